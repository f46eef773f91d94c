"""Draw charts as SVG in the page's colours: dots of scores, lines of losses, and the score of a choice over α and β."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.report.run.choice import SYMBOLS, Candidate, Choice, value_text
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


ByModel = Mapping[str, Metric]
"""The values of one metric: some of target, unlearned, ideal."""
_LANES = {"target": 0.42, "unlearned": 0.0, "ideal": -0.42}
"""How far above the line each mark is, so that marks at the same place and their intervals are all seen."""


def score_dots(name: str, metrics: Mapping[str, ByModel]) -> Chart:
    """Return a line a metric with the marks of its models, their 95 % intervals, and their values above it.

    metrics: by heading: the name of the metric, and which way is better.
    """
    words = "; ".join(
        f"{heading}: {', '.join(_spoken(*item) for item in models.items())}" for heading, models in metrics.items()
    )

    def paint(figure: Any) -> None:
        grid = figure.subplots(len(metrics), 1, squeeze=False)
        scales = [_scale(models) for models in metrics.values()]
        for at, (axes, (heading, models), scale) in enumerate(zip(grid[:, 0], metrics.items(), scales, strict=True)):
            axes.set_title(heading, loc="left", fontsize=TEXT)
            _paint_dots(axes, models, scale)
            axes.tick_params(labelbottom=at + 1 == len(metrics) or scale != scales[at + 1])
        figure.get_layout_engine().set(h_pad=6 / 72)

    return draw(name, f"Dot chart. {words}.", 54 * len(metrics) + 24, paint)


def _scale(models: ByModel) -> tuple[float, float]:
    """Return 0 to 1, or a scale of its own, which holds the intervals, where a value lies outside."""
    values = [0.0, *(metric.value for metric in models.values() if metric.value is not None)]
    if min(values) >= 0 and max(values) <= 1:
        return 0.0, 1.0
    scored = [(metric.value, metric.margin) for metric in models.values() if metric.value is not None]
    ends = [0.0, *(value - error for value, error in scored), *(value + error for value, error in scored)]
    return min(ends), max(ends)


def _paint_dots(axes: Any, models: ByModel, scale: tuple[float, float]) -> None:
    axes.axhline(0, color=RULE, linewidth=1.2, zorder=1)
    for name, metric in models.items():
        if metric.value is None:
            continue
        if metric.stderr:
            error = {"ecolor": ROLES[name], "elinewidth": 1.4, "capsize": 2.5, "capthick": 1.4}
            axes.errorbar(metric.value, _LANES[name], xerr=metric.margin, fmt="none", zorder=2, **error)
        style = {"color": ROLES[name], "markersize": 7.5, "markeredgecolor": SURFACE, "clip_on": False, "zorder": 3}
        axes.plot(metric.value, _LANES[name], SHAPES[name], **style)
    for at, (name, metric) in enumerate(reversed(list(models.items()))):
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


_PALE, _DEEP = 0.06, 0.5  # opacity of the accent colour; up to that, ink can be read on it
_ROOM = 33.0  # units; a narrower cell has no room for its number


def sweep_chart(choice: Choice) -> Chart | None:
    """Return the score over the two values that vary as a map; of a single one, the map has one row.

    Return None where there is nothing to compare: a single candidate, candidates that differ in more than two values,
    or broken ones alone.
    """
    candidates = choice.candidates
    varied = [key for key in choice.keys if len({candidate.values.get(key) for candidate in candidates}) > 1]
    scores = [score for candidate in candidates if (score := candidate.shown_score) is not None]
    alike = all(set(candidate.values) == set(choice.keys) for candidate in candidates)
    if not alike or len(varied) not in (1, 2) or all(candidate.score is None for candidate in candidates):
        return None
    steps = [_steps(candidates, key) for key in varied]
    columns, rows = steps if len(steps) == 2 else (*steps, [None])
    low, high = min(scores, default=0.0), max(scores, default=0.0)

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        for candidate in candidates:
            at = [values.index(candidate.values[key]) for key, values in zip(varied, steps, strict=True)]
            place, score = (*at, 0)[:2], candidate.shown_score
            if score is not None:
                depth = (score - low) / ((high - low) or 1.0)
                _add_cell(axes, place, facecolor=ACCENT, alpha=_PALE + (_DEEP - _PALE) * depth, linewidth=0)
                if 280 / len(columns) >= _ROOM:
                    axes.text(*place, signed(score), ha="center", va="center", fontsize=SMALL)
            elif candidate.score is None:
                _add_cell(axes, place, facecolor="none", edgecolor=RULE)
                axes.plot(*place, "x", color=MUTED, markersize=7)
            else:
                _add_cell(axes, place, facecolor="none", edgecolor=RULE, hatch="///")
            if choice.is_chosen(candidate):
                _add_cell(axes, place, fill=False, edgecolor=INK, linewidth=2.4, clip_on=False, zorder=5)
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
        for set_ticks, values in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
            step = 1 + len(values) // 13  # of many steps only every second, or fewer, has a label
            set_ticks(range(0, len(values), step), ["" if v is None else _tick(v) for v in values[::step]])
        axes.set(**dict(zip(("xlabel", "ylabel"), (SYMBOLS.get(key, cut(key, 16)) for key in varied), strict=False)))
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)

    chosen = ", ".join(f"{SYMBOLS.get(key, cut(key, 16))}\u00a0=\u00a0{_tick(v)}" for key, v in choice.values.items())
    span = f"from {number(low)} to {number(high)}" if scores else "none of which meets the conditions"
    words = f"Heat map. {choice.heading} of {len(candidates)} candidates, {span}. Chosen: {chosen}."
    states = {candidate.state for candidate in candidates}
    caption = f"The score, {choice.heading}: the deeper the colour, the better. The framed candidate was chosen."
    caption += " Hatched: misses the conditions of the rule." if "not met" in states else ""
    caption += " ×: broken." if "broken" in states else ""
    return draw("sweep", words, 60 + len(rows) * min(44, max(16, 320 / len(rows))), paint, caption)


def _steps(candidates: Sequence[Candidate], key: str) -> list[Any]:
    """Return the values on one axis in order, numbers before texts."""
    values = {candidate.values[key] for candidate in candidates}
    return sorted(
        values, key=lambda value: (isinstance(value, str), 0 if isinstance(value, str) else value, str(value))
    )


def _tick(value: object) -> str:
    """Return a value as axes show it."""
    return cut(value_text(value), 12)


def _add_cell(axes: Any, place: tuple[int, ...], **style: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((place[0] - 0.5, place[1] - 0.5), 1, 1, **style))
