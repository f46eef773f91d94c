"""Draw charts for a page: matplotlib's figures as inline SVG whose colours are the page's own variables.

Figures are made without pyplot and with settings of their own, so that the caller's matplotlib stays as it is. One unit
of a figure is one pixel of a narrow screen, so that text keeps its size there. The same chart gives the same bytes.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WIDTH = 340  # units
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


def cut(text: str, most: int = 52) -> str:
    """Return a text that is at most so many signs long."""
    return text if len(text) <= most else text[: most - 1] + "…"


def draw(name: str, words: str, height: float, paint: Callable[[Any], None]) -> Chart:
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
    return Chart(_inline(stream.getvalue(), name, words), words)


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
