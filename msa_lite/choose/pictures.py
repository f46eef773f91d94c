"""The pictures of a sweep: its score over alpha and beta, and what is forgotten against what is kept.

Figures are made without pyplot, so that nothing of the caller's own matplotlib changes. Colours run in viridis, which
is as clear in grey and to colour-blind eyes; what matters is marked by shape as well.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_lite.choose.table import Candidate, Sweep, Values, value_text
from msa_lite.errors import UsageError
from msa_lite.report.metrics import METRICS
from msa_lite.report.reports import Metric
from msa_lite.report.table import heading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAT_MAP_FILE = "heat_map.png"
FORGET_RETAIN_FILE = "forget_retain.png"

_DPI = 200
_SIZE = (5.6, 4.6)  # inches
_FONT = 9  # points
_SIZES = (8.5, 7.0, 6.0)  # of the numbers in cells, points
_SYMBOLS = {"alpha": "α", "beta": "β"}
_STRENGTHS = {"alpha": "α, strength of the forget vector", "beta": "β, strength of the retain vector"}
_RING: dict[str, Any] = {
    "marker": "o", "linestyle": "none", "markersize": 13, "color": "black", "markerfacecolor": "none",
    "markeredgewidth": 1.8,
}  # fmt: skip
_GREY = (0.92, 0.92, 0.92, 1.0)  # of what has no score
_FULL = 0.8  # of a grid: from here on what is missing of it is left blank


def can_draw() -> bool:
    """Check whether matplotlib is there. It comes with msa-lite, but nothing else depends on it."""
    return importlib.util.find_spec("matplotlib") is not None


def write_pictures(sweep: Sweep, folder: Path) -> list[Path]:
    """Write heat_map.png and forget_retain.png into a folder, each where there is something to draw; return them.

    Raises UsageError without matplotlib.
    """
    if not can_draw():
        raise UsageError("the pictures of a sweep need matplotlib: pip install matplotlib")
    figures = {HEAT_MAP_FILE: heat_map(sweep), FORGET_RETAIN_FILE: forget_retain(sweep)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=_DPI)
    return [folder / name for name, figure in figures.items() if figure is not None]


def heat_map(sweep: Sweep) -> Figure | None:
    """The score of each point: cells over alpha and beta, or a line where only one of the two varies.

    The chosen one is framed, broken ones are crossed out, those that do not meet the conditions are hatched and have
    neither colour nor number. None where candidates differ in anything else, there is only one, or all are broken.
    """
    values = [candidate.values for candidate in sweep.candidates]
    alike = len({frozenset(one) for one in values}) == 1 and set(values[0]) <= set(_STRENGTHS)
    varied = [key for key in _STRENGTHS if len({one.get(key) for one in values}) > 1]
    if not alike or not varied or all(candidate.score is None for candidate in sweep.candidates):
        return None
    return _cells(sweep) if len(varied) > 1 else _line(sweep, varied[0])


def forget_retain(sweep: Sweep) -> Figure | None:
    """What is known of the forget set against what is known of the retain set, with one standard error either way.

    All candidates, coloured by score, beside target and ideal. The metrics are the first in the table of metrics with a
    `partner` that some candidate has values of; None where there is no such pair.
    """
    pairs = ((kind.name, kind.partner) for kind in METRICS.values() if kind.partner)
    pair = next((pair for pair in pairs if any(_both(one.metrics, *pair) for one in sweep.candidates)), None)
    if pair is None:
        return None
    figure, axes = _new_figure(sweep, "Forget set against retain set")
    shades = _Shades.of(sweep)
    shown = [(one, both) for one in sweep.candidates if (both := _both(one.metrics, *pair))]
    places = {}
    for candidate, both in shown:
        place = _draw_point(axes, both, **shades.marker(candidate, sweep.shown_score(candidate)))
        if sweep.is_chosen(candidate):
            places["chosen"] = place
            axes.plot(*place, **_RING)
    for name, metrics, marker, size in (("target", sweep.target, "s", 8), ("ideal", sweep.ideal or {}, "*", 14)):
        if both := _both(metrics, *pair):
            style = {"color": "black", "markeredgecolor": "white", "markeredgewidth": 0.8, "zorder": 4}
            places[name] = _draw_point(axes, both, marker=marker, markersize=size, **style)
    x, y = shown[0][1]
    axes.set_xlabel(_axis_label(pair[0], x), fontsize=_FONT)
    axes.set_ylabel(_axis_label(pair[1], y), fontsize=_FONT)
    axes.margins(0.1)
    shades.draw_bar(figure, axes, sweep)
    _marker_legend(figure, sweep, [candidate for candidate, _ in shown])
    _name_places(figure, axes, places)
    return figure


def _both(metrics: Mapping[str, Metric], x: str, y: str) -> tuple[Metric, Metric] | None:
    known = [metrics[name] for name in (x, y) if name in metrics and metrics[name].value is not None]
    return (known[0], known[1]) if len(known) == 2 else None


def _draw_point(axes: Any, both: tuple[Metric, Metric], **style: Any) -> tuple[float, float]:
    (x, y), errors = [metric.value or 0.0 for metric in both], [metric.stderr or math.nan for metric in both]
    bars = {"ecolor": "0.55", "elinewidth": 0.8, "linestyle": "none"}
    axes.errorbar(x, y, xerr=errors[0], yerr=errors[1], **({"zorder": 2} | bars | style))
    return x, y


def _axis_label(name: str, metric: Metric) -> str:
    label = f"{heading(name, None)} (0…1)"
    return {True: f"{label}   better →", False: f"← better   {label}", None: label}[metric.higher_is_better]


@dataclass(frozen=True)
class _Shades:
    """The colours of scores, as they are shown; grey without one. The best is the brightest."""

    low: float
    high: float
    names: str
    shown: bool

    @classmethod
    def of(cls, sweep: Sweep) -> _Shades:
        scores = [score for one in sweep.candidates if (score := sweep.shown_score(one)) is not None]
        low, high = min(scores, default=0.0), max(scores, default=0.0)
        names = "viridis_r" if sweep.lower_is_better else "viridis"
        return cls(low, high if high > low else low + 1e-3, names, bool(scores))

    def colour(self, score: float | None) -> Any:
        return self._mappable().to_rgba(score) if score is not None else _GREY

    def ink(self, score: float) -> str:
        """Black or white, whichever is read better on the score's colour."""
        red, green, blue, _ = self.colour(score)
        return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"

    def marker(self, candidate: Candidate, score: float | None) -> dict[str, Any]:
        """The style of a candidate's marker: full, hollow where conditions are not met, a cross where it is broken."""
        colour = "0.4" if score is None else self.colour(score)
        face = colour if candidate.met else "white"
        shape = "x" if candidate.score is None else "o"
        return {"marker": shape, "markersize": 6.5, "color": colour, "markerfacecolor": face, "markeredgewidth": 1.5}

    def draw_bar(self, figure: Figure, axes: Any, sweep: Sweep) -> None:
        if not self.shown:
            return
        bar = figure.colorbar(self._mappable(), ax=axes, pad=0.02)
        bar.set_label(_plain(sweep.score_heading), fontsize=_FONT)
        bar.ax.tick_params(labelsize=_FONT - 1)

    def _mappable(self) -> Any:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        return ScalarMappable(Normalize(self.low, self.high), self.names)


def _cells(sweep: Sweep) -> Figure:
    from matplotlib.patches import Rectangle

    figure, axes = _new_figure(sweep, "Score of each point")
    shades = _Shades.of(sweep)
    points = [(float(one.values["alpha"]), float(one.values["beta"])) for one in sweep.candidates]
    cells = _cell_bounds(points)
    # Of cells that overlap, as after a refinement, the smaller is on top.
    order = sorted(range(len(cells)), key=lambda i: -cells[i].width * cells[i].height)
    for depth, i in enumerate(order):
        cell, candidate = cells[i], sweep.candidates[i]
        at, size = (cell.left, cell.bottom), (cell.width, cell.height)
        face = _GREY if candidate.score is None else shades.colour(sweep.shown_score(candidate))
        axes.add_patch(Rectangle(at, *size, facecolor=face, edgecolor="white", linewidth=0.8, zorder=1 + depth))
        if candidate.score is None:
            for ends in ((cell.bottom, cell.top), (cell.top, cell.bottom)):
                axes.plot((cell.left, cell.right), ends, color="0.35", linewidth=1, zorder=1 + depth)
        elif not candidate.met:
            hatch = Rectangle(at, *size, fill=False, edgecolor="black", alpha=0.45, hatch="///", linewidth=0)
            axes.add_patch(hatch).set_zorder(1 + depth)
        if sweep.is_chosen(candidate):
            axes.add_patch(Rectangle(at, *size, fill=False, zorder=len(cells) + 2, **_frame()))
    for key, set_ticks in (("alpha", axes.set_xticks), ("beta", axes.set_yticks)):
        _set_ticks(set_ticks, [one.values[key] for one in sweep.candidates])
    axes.set_xlim(min(cell.left for cell in cells), max(cell.right for cell in cells))
    axes.set_ylim(min(cell.bottom for cell in cells), max(cell.top for cell in cells))
    axes.set_xlabel(_STRENGTHS["alpha"], fontsize=_FONT)
    axes.set_ylabel(_STRENGTHS["beta"], fontsize=_FONT)
    shades.draw_bar(figure, axes, sweep)
    _cell_legend(figure, sweep)
    _write_scores(figure, axes, sweep, cells, shades)
    return figure


@dataclass(frozen=True)
class _Cell:
    left: float
    right: float
    bottom: float
    top: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.top - self.bottom


def _cell_bounds(points: Sequence[tuple[float, float]]) -> list[_Cell]:
    """The cell of each point: midway to its neighbours, and as far out on a side where it has none.

    Neighbours are the next lines of the grid, so that what is missing of it stays blank; of a set of points that does
    not fill a grid, as after a refinement, the next points in the same row or column, if it has any.
    """
    alphas, betas = {alpha for alpha, _ in points}, {beta for _, beta in points}
    full = len(points) >= _FULL * len(alphas) * len(betas)
    cells = []
    for alpha, beta in points:
        row = {a for a, b in points if b == beta and a != alpha}
        column = {b for a, b in points if a == alpha and b != beta}
        across = _midways(alpha, alphas if full or not row else row)
        cells.append(_Cell(*across, *_midways(beta, betas if full or not column else column)))
    return cells


def _midways(at: float, others: set[float]) -> tuple[float, float]:
    """The bounds midway from a value to the nearest of others on either side."""
    below = min((at - other for other in others if other < at), default=0.0)
    above = min((other - at for other in others if other > at), default=0.0)
    return at - (below or above) / 2, at + (above or below) / 2


def _frame() -> dict[str, Any]:
    """The style of the frame around what is chosen: black, with a white rim that shows on dark cells."""
    from matplotlib.patheffects import Normal, withStroke

    effects = [withStroke(linewidth=4.5, foreground="white"), Normal()]
    return {"edgecolor": "black", "linewidth": 2.2, "path_effects": effects, "clip_on": False}


def _write_scores(figure: Figure, axes: Any, sweep: Sweep, cells: Sequence[_Cell], shades: _Shades) -> None:
    """The score in each cell where there is room for it."""
    figure.draw_without_rendering()  # gives the axes their place
    box = axes.get_window_extent()
    across = box.width / figure.dpi * 72 / abs(axes.get_xlim()[1] - axes.get_xlim()[0])  # points per unit
    up = box.height / figure.dpi * 72 / abs(axes.get_ylim()[1] - axes.get_ylim()[0])
    shown = [(sweep.shown_score(one), cell) for one, cell in zip(sweep.candidates, cells, strict=True)]
    scored = [(score, cell) for score, cell in shown if score is not None]

    def fits(size: float, text: str, cell: _Cell) -> bool:
        return cell.width * across > 0.62 * size * len(text) + 3 and cell.height * up > 1.3 * size

    decimals = 3 if all(fits(_SIZES[0], f"{score:.3f}", cell) for score, cell in scored) else 2
    for score, cell in scored:
        text = f"{score:.{decimals}f}".replace("-", "−")
        size = next((size for size in _SIZES if fits(size, text, cell)), None)
        if size is not None:
            style: dict[str, Any] = {"fontsize": size, "color": shades.ink(score), "zorder": len(cells) + 3}
            middle = (cell.left + cell.right) / 2, (cell.bottom + cell.top) / 2
            axes.text(*middle, text, ha="center", va="center", **style)


def _cell_legend(figure: Figure, sweep: Sweep) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    chosen = Patch(facecolor="none", edgecolor="black", linewidth=2.2)
    unmet = Patch(facecolor="0.85", edgecolor="0.35", hatch="////", linewidth=0)
    broken = Line2D([], [], linestyle="none", marker="x", color="0.35", markersize=8)
    _legend(figure, sweep, sweep.candidates, (chosen, unmet, broken))


def _line(sweep: Sweep, key: str) -> Figure:
    """The score over alpha or beta, where the other one does not vary."""
    figure, axes = _new_figure(sweep, "Score of each point")
    shown = sorted(sweep.candidates, key=lambda one: float(one.values[key]))
    placed = [(float(one.values[key]), sweep.shown_score(one), one) for one in shown]
    scored = [(x, y) for x, y, _ in placed if y is not None]
    axes.plot([x for x, _ in scored], [y for _, y in scored], color="0.55", linewidth=1.2, zorder=1)
    for x, y, one in placed:
        style: dict[str, Any] = {"marker": "o", "color": "black", "markersize": 6.5}
        if y is None:  # at the foot of the picture, since it has no height of its own
            y, place = 0.04, {"transform": axes.get_xaxis_transform(), "clip_on": False}
            broken = {"marker": "x", "color": "0.35", "markersize": 8}
            style = (broken if one.score is None else style | {"markerfacecolor": "white"}) | place
        axes.plot(x, y, **style)
        if sweep.is_chosen(one):
            axes.plot(x, y, **(style | _RING))
    _set_ticks(axes.set_xticks, [one.values[key] for one in shown])
    axes.margins(0.1)
    fixed = {k: v for k, v in shown[0].values.items() if k != key}
    axes.set_xlabel(_STRENGTHS[key] + (f" ({_in_symbols(fixed)})" if fixed else ""), fontsize=_FONT)
    axes.set_ylabel(_plain(sweep.score_heading), fontsize=_FONT)
    axes.grid(color="0.9", linewidth=0.6)
    _marker_legend(figure, sweep, shown)
    return figure


def _new_figure(sweep: Sweep, title: str) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(_plain(f"{title}, {sweep.part}"), fontsize=_FONT + 1, loc="left")
    axes.tick_params(labelsize=_FONT - 1)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _set_ticks(set_ticks: Any, values: Sequence[float | int | str]) -> None:
    """Ticks where something was tried, as long as their labels have room."""
    ticks = sorted({float(value) for value in values})
    gaps = [high - low for low, high in pairwise(ticks)]
    if min(gaps) >= (ticks[-1] - ticks[0]) / 16:
        set_ticks(ticks, [value_text(tick) for tick in ticks])


def _marker_legend(figure: Figure, sweep: Sweep, shown: Sequence[Candidate]) -> None:
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"linestyle": "none", "color": "0.2", "markeredgewidth": 1.5, "markersize": 6.5}
    unmet = Line2D([], [], marker="o", markerfacecolor="none", **style)
    _legend(figure, sweep, shown, (Line2D([], [], **_RING), unmet, Line2D([], [], marker="x", **style)))


def _legend(figure: Figure, sweep: Sweep, shown: Sequence[Candidate], signs: tuple[Any, Any, Any]) -> None:
    """What the signs for a chosen, an unmet and a broken candidate mean, as far as such are shown."""
    there = {
        f"chosen: {_in_symbols(sweep.chosen)}": any(sweep.is_chosen(one) for one in shown),
        "conditions not met": any(not one.met and one.score is not None for one in shown),
        "broken": any(one.score is None for one in shown),
    }
    used = {label: sign for (label, is_there), sign in zip(there.items(), signs, strict=True) if is_there}
    if used:
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": len(used)}
        figure.legend(list(used.values()), list(used), frameon=False, fontsize=_FONT - 1, **place)


def _name_places(figure: Figure, axes: Any, places: Mapping[str, tuple[float, float]]) -> None:
    """Write each name beside its place, on the side where it is farthest from all that is drawn and other names."""
    from matplotlib.patheffects import withStroke

    figure.draw_without_rendering()  # gives the axes their place
    scale = 72 / figure.dpi
    left, bottom, right, top = (edge * scale for edge in axes.get_window_extent().extents)
    taken = [axes.transData.transform(point) * scale for line in axes.lines for point in line.get_xydata()]
    for name, place in places.items():
        x, y = axes.transData.transform(place) * scale
        wide = 0.3 * _FONT * len(name)  # half of the name's width
        sides = [(dx * (wide + 11 - 3 * abs(dy)), dy * 13) for dx in (-1, 0, 1) for dy in (-1, 0, 1) if dx or dy]
        spots = {(dx, dy): [(x + dx + part * wide, y + dy) for part in (-1, 0, 1)] for dx, dy in sides}
        inside = [side for side in sides if all(left < sx < right and bottom < sy < top for sx, sy in spots[side])]
        rooms = {side: min(math.dist(spot, other) for spot in spots[side] for other in taken) for side in inside}
        best = max(rooms, key=lambda side: rooms[side])
        style = {"ha": "center", "va": "center", "fontsize": _FONT, "zorder": 6}
        rim = [withStroke(linewidth=2.5, foreground="white")]
        axes.annotate(name, place, best, textcoords="offset points", path_effects=rim, **style)
        taken += spots[best]


def _in_symbols(values: Values) -> str:
    return ", ".join(f"{_SYMBOLS.get(key, key)} = {value_text(value)}" for key, value in values.items())


def _plain(text: str) -> str:
    """Text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
