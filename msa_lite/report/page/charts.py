"""Draw charts as SVG, inline in the page's colours or as a file: the machinery, dots of scores and lines of losses.

The pictures of a choice and of an update are in `maps`.
"""

from __future__ import annotations

import html
import importlib.util
import io
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.report.run.update import Fit
from msa_lite.report.tables.reports import Metric, number, signed

WIDTH = 340  # units
COLOURS_FILE = Path(__file__).parent / "templates/colours.css"
"""The colours of pages, by day and by night."""
# Colours that stand for the page's variables until the chart is written; matplotlib leaves pure black out of its SVG.
INK, MUTED, RULE, SURFACE, ACCENT, TARGET, UNLEARNED, IDEAL = (f"#01010{i}" for i in range(8))
_VARIABLES = {
    INK: "ink", MUTED: "muted", RULE: "rule", SURFACE: "surface", ACCENT: "accent", TARGET: "target",
    UNLEARNED: "unlearned", IDEAL: "ideal",
}  # fmt: skip
TEXT, SMALL = 12, 10.5  # units
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "msa-lite", "svg.image_inline": True, "text.parse_math": False,
    "text.usetex": False, "axes.unicode_minus": True, "font.family": ["DejaVu Sans"], "font.size": TEXT,
    "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "axes.edgecolor": RULE, "axes.linewidth": 1,
    "axes.facecolor": "none", "axes.labelsize": TEXT, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "xtick.color": RULE, "ytick.color": RULE, "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "grid.color": RULE,
    "grid.linewidth": 0.8, "lines.linewidth": 1.8, "hatch.color": MUTED, "hatch.linewidth": 0.8, "path.simplify": True,
    "figure.facecolor": "none", "savefig.facecolor": "none", "figure.constrained_layout.h_pad": 3 / 72,
    "figure.constrained_layout.w_pad": 3 / 72,
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """One picture of a page."""

    svg: str
    """The SVG element, which may stand in HTML."""
    words: str
    """The same in words, with the numbers."""
    caption: str = ""
    """The text below it: what its signs mean."""

    def as_file(self) -> str:
        """Return the picture as a file of its own: the page's colours by day, with its caption."""
        style = COLOURS_FILE.read_text("utf-8")
        colours: dict[str, str] = {}
        for name, colour in re.findall(r"--([\w-]+): (#\w+)", style):
            colours.setdefault(name, colour)  # those by day come first
        lines = textwrap.wrap(self.caption, 56)
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', self.svg)
        assert box, "matplotlib writes a viewBox"
        width, height = map(float, box.groups())
        whole = height + 16 * len(lines) + 8 * bool(lines)
        texts = (f'<text x="4" y="{height + 16 * at:g}">{html.escape(line)}</text>' for at, line in enumerate(lines, 1))
        caption = f'<g style="font-size: {SMALL}px; fill: {colours["muted"]}">{"".join(texts)}</g>'
        head = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'width="{2 * width:g}" height="{2 * whole:g}" viewBox="0 0 {width:g} {whole:g}" '
            f'style="background: {colours["surface"]}; fill: {colours["ink"]}; font-family: sans-serif"'
        )
        text = self.svg.replace(f"<svg {box[0]}", head, 1).replace("</svg>", f"{caption}\n</svg>\n")
        return re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], text)


def can_draw() -> bool:
    """Check whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def cut(text: str, most: int = 52) -> str:
    """Return a text that is at most so many signs long."""
    return text if len(text) <= most else text[: most - 1] + "…"


def draw(name: str, words: str, height: float, paint: Callable[[Any], None], caption: str = "") -> Chart:
    """Return a chart; paint: fills a new, empty figure. name: unique on the page, of letters and "-"."""
    import matplotlib
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # signs that matplotlib's font lacks; the browser has them
        matplotlib.rcdefaults()  # whatever the user's own matplotlibrc says
        matplotlib.rcParams.update(_SETTINGS)
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        paint(figure)
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Chart(_inline(stream.getvalue(), name, words), words, caption)


def _inline(svg: str, name: str, words: str) -> str:
    """Return matplotlib's file as an element: the page's colours and font, ids of its own, a label for screen readers.

    Its ids are hashes of shapes, which other charts of the page may hold as well. Its style sheet would be the page's.
    """
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box, "matplotlib writes a viewBox"
    body = svg[svg.index(">", box.end()) + 1 :]
    body = re.sub(r"<(metadata|style)\b.*?</\1>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"<[^>]+>", lambda tag: _own_tag(tag[0], name), body)  # tags only: texts are the user's
    body = re.sub(r"\s*\n\s*", "\n", body).strip()
    return f'<svg {box[0]} role="img" aria-label="{html.escape(words, quote=True)}">\n{body}'


def _own_tag(tag: str, name: str) -> str:
    if tag.startswith("<g "):
        tag = re.sub(r' id="[^"]*"', "", tag)  # groups are numbered, and nothing refers to them
    tag = re.sub(r'( id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", tag)
    tag = re.sub(r"font-family: [^;\"]+;? ?", "", tag)
    tag = re.sub(r"font: ((?:[a-z0-9]+ )*)([\d.]+px)[^;\"]+", r"font-size: \2", tag)  # matplotlib before 3.11
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)  # a hundredth of a pixel is enough
    return re.sub("|".join(_VARIABLES), lambda match: f"var(--{_VARIABLES[match[0]]})", tag)


ROLES = {"target": TARGET, "unlearned": UNLEARNED, "ideal": IDEAL}
SHAPES = {"target": "s", "unlearned": "o", "ideal": "D"}
"""The shape of each model's marker, by matplotlib's letter: colour is never the only sign."""


@dataclass(frozen=True)
class Dots:
    """The values of one metric: a line with one mark a model."""

    heading: str
    """The name of the metric, and which way is better."""
    models: Mapping[str, Metric]
    """The metric by model: some of target, unlearned, ideal."""


_LANES = {"target": 0.42, "unlearned": 0.0, "ideal": -0.42}
"""How far above the line each mark is, so that marks at the same place and their intervals are all seen."""


def score_dots(name: str, metrics: Sequence[Dots]) -> Chart:
    """Return a line a metric with the marks of its models, their 95 % intervals, and their values above it."""
    words = "; ".join(
        f"{dots.heading}: {', '.join(_spoken(*item) for item in dots.models.items())}" for dots in metrics
    )

    def paint(figure: Any) -> None:
        grid = figure.subplots(len(metrics), 1, squeeze=False)
        scales = [_scale(dots) for dots in metrics]
        for at, (axes, dots, scale) in enumerate(zip(grid[:, 0], metrics, scales, strict=True)):
            _paint_dots(axes, dots, scale)
            axes.tick_params(labelbottom=at + 1 == len(metrics) or scale != scales[at + 1])
        figure.get_layout_engine().set(h_pad=6 / 72)

    return draw(name, f"Dot chart. {words}.", 54 * len(metrics) + 24, paint)


def _scale(dots: Dots) -> tuple[float, float]:
    """Return 0 to 1, or a scale of its own, which holds the intervals, where a value lies outside."""
    values = [0.0, *(metric.value for metric in dots.models.values() if metric.value is not None)]
    if min(values) >= 0 and max(values) <= 1:
        return 0.0, 1.0
    scored = [(metric.value, metric.margin) for metric in dots.models.values() if metric.value is not None]
    ends = [0.0, *(value - error for value, error in scored), *(value + error for value, error in scored)]
    return min(ends), max(ends)


def _paint_dots(axes: Any, dots: Dots, scale: tuple[float, float]) -> None:
    axes.axhline(0, color=RULE, linewidth=1.2, zorder=1)
    for name, metric in dots.models.items():
        if metric.value is None:
            continue
        if metric.stderr:
            error = {"ecolor": ROLES[name], "elinewidth": 1.4, "capsize": 2.5, "capthick": 1.4}
            axes.errorbar(metric.value, _LANES[name], xerr=metric.margin, fmt="none", zorder=2, **error)
        style = {"color": ROLES[name], "markersize": 7.5, "markeredgecolor": SURFACE, "clip_on": False, "zorder": 3}
        axes.plot(metric.value, _LANES[name], SHAPES[name], **style)
    axes.set_title(dots.heading, loc="left", fontsize=TEXT)
    for at, (name, metric) in enumerate(reversed(list(dots.models.items()))):
        place = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "bottom"}
        axes.annotate(signed(metric.value), (1, 1), (-46 * at, 5), fontsize=SMALL, color=ROLES[name], **place)
    axes.set_yticks([])
    axes.set(xlim=scale, ylim=(-1, 1))
    axes.locator_params(axis="x", nbins=4)
    axes.tick_params(length=0, pad=5)
    axes.grid(axis="x")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _spoken(name: str, metric: Metric) -> str:
    value = "no value" if metric.value is None else signed(metric.value)
    return f"{name} {value}" + (f" ± {number(metric.margin)}" if metric.stderr else "")


def loss_chart(fits: Mapping[str, Fit]) -> Chart | None:
    """Return the training loss over the epochs, one line a fit; None where nothing was logged.

    Of more fits than can be told apart, as a baseline's many settings, all lines look alike.
    """
    curves = {name: _thinned(fit.curve) for name, fit in fits.items() if fit.curve}
    if not curves:
        return None
    few = len(curves) <= len(_LINES)
    words = "; ".join(f"{name}: from {curve[0][1]:.3g} to {curve[-1][1]:.3g}" for name, curve in curves.items())

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        for at, (name, curve) in enumerate(curves.items()):
            colour, dashes = _LINES[at] if few else (MUTED, "-")
            style = {"color": colour, "linestyle": dashes, "linewidth": 1.8 if few else 0.9, "label": cut(name, 30)}
            axes.plot(*zip(*curve, strict=True), marker="o" if len(curve) == 1 else None, **style)
        axes.grid(axis="y")
        if all(loss >= 0 for curve in curves.values() for _, loss in curve):
            axes.set_ylim(bottom=0)
        axes.set(xlabel="epoch", ylabel="training loss")
        if len(curves) > 1 and few:
            axes.legend(frameon=False, fontsize=TEXT, labelcolor=INK)

    caption = "Mean loss of a training step over the passes (epochs) through the rows."
    return draw("losses", f"Line chart of the training loss. {words}.", 210, paint, caption)


_LINES: Sequence[tuple[str, Any]] = (
    (ACCENT, "-"),
    (INK, (0, (4, 2))),
    (MUTED, (0, (1, 1.5))),
    (ACCENT, (0, (6, 2, 1, 2))),
)
"""Colour and dashes of the lines of a few fits."""


def _thinned(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most 200 points: of longer curves the means of neighbours, so that the page stays small."""
    size = -(-len(curve) // 200)
    parts = [curve[at : at + size] for at in range(0, len(curve), size)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]
