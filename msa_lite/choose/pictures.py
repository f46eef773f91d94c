"""Draw the pictures of a sweep: its score over alpha and beta, and what is forgotten against what is kept.

They are drawn with the choice, or by the next run where matplotlib was missing. Figures are made without pyplot, so
that the caller's own matplotlib stays as it is. Colours run in viridis, which is as clear in grey and to colour-blind
eyes; what matters is marked by shape as well.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_lite.choose.table import Candidate, Sweep
from msa_lite.io.finished.seal import add_files, load_manifest
from msa_lite.report.choosing import in_symbols, value_text
from msa_lite.report.metrics import METRICS
from msa_lite.report.reports import Metric, heading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

HEAT_MAP_FILE = "heat_map.png"
FORGET_RETAIN_FILE = "forget_retain.png"
DRAWN = "pictures"  # in a sweep's manifest: true once all of its pictures are drawn

_DPI = 200
_SIZE = (5.6, 4.6)  # inches
_FONT = 9  # points
_SMALLEST = 5.5  # points, of a score that can still be read
_STRENGTHS = {"alpha": "α, strength of the forget vector", "beta": "β, strength of the retain vector"}
_RING: dict[str, Any] = {
    "marker": "o", "linestyle": "none", "markersize": 13, "color": "black", "markerfacecolor": "none",
    "markeredgewidth": 1.8, "zorder": 5,
}  # fmt: skip
_UNMET, _BROKEN = "conditions not met", "broken"


def draw_pictures(sweep: Sweep, folder: Path) -> bool:
    """Draw a sweep into its folder; without matplotlib, log a warning and return False."""
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("no pictures of the sweep: pip install matplotlib, and the next run draws them")
        return False
    write_pictures(sweep, folder)
    return True


def draw_missing(out: Path, load: Callable[[Path], Sweep]) -> None:
    """Draw a finished sweep that was made without matplotlib, and enter the pictures into its manifest."""
    manifest = load_manifest(out) or {}
    there = not {HEAT_MAP_FILE, FORGET_RETAIN_FILE}.isdisjoint(manifest["files"])
    if not manifest.get(DRAWN, there) and draw_pictures(load(out), out):
        files = [name for name in (HEAT_MAP_FILE, FORGET_RETAIN_FILE) if (out / name).is_file()]
        add_files(out, files, {DRAWN: True})


def write_pictures(sweep: Sweep, folder: Path) -> list[Path]:
    """Write heat_map.png and forget_retain.png into a folder, each where there is something to draw; return them."""
    drawn = {HEAT_MAP_FILE: heat_map(sweep), FORGET_RETAIN_FILE: forget_retain(sweep)}
    figures = {name: figure for name, figure in drawn.items() if figure is not None}
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=_DPI)
    return [folder / name for name in figures]


def heat_map(sweep: Sweep) -> Figure | None:
    """Draw the score of each point: a cell for each α and β, or a line where only one of the two varies.

    The chosen point is framed, broken ones are crossed out. Those that do not meet the conditions are hatched and have
    neither colour nor number. Return None where candidates differ in anything else, there is only one, or all are
    broken.
    """
    values = [candidate.values for candidate in sweep.candidates]
    alike = len({frozenset(one) for one in values}) == 1 and set(values[0]) <= set(_STRENGTHS)
    varied = [key for key in _STRENGTHS if len({one.get(key) for one in values}) > 1]
    if not alike or not varied or all(candidate.score is None for candidate in sweep.candidates):
        return None
    return _cells(sweep) if len(varied) > 1 else _line(sweep, varied[0])


def _cells(sweep: Sweep) -> Figure:
    """Draw cells of one size, whatever the steps between the values; points that were not tried stay blank."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    figure, axes = _new_figure(sweep, "Score of each point")
    colour_of = _add_colours(figure, axes, sweep)
    alphas, betas = (sorted({float(one.values[key]) for one in sweep.candidates}) for key in _STRENGTHS)
    font = min(_FONT - 0.5, 72 / len(alphas), 180 / len(betas))
    hatch: dict[str, Any] = {"fill": False, "edgecolor": "0.55", "hatch": "///", "linewidth": 0, "label": _UNMET}
    rim = [withStroke(linewidth=4.5, foreground="white")]  # shows on dark cells
    frame: dict[str, Any] = {"fill": False, "linewidth": 2.2, "path_effects": rim, "clip_on": False, "zorder": 3}
    for one in sweep.candidates:
        x, y = alphas.index(float(one.values["alpha"])), betas.index(float(one.values["beta"]))
        corner, score = (x - 0.5, y - 0.5), sweep.shown_score(one)
        red, green, blue, _ = face = colour_of(score)
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=face, edgecolor="white", linewidth=0.8))
        if score is not None and font >= _SMALLEST:
            ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
            text = f"{score:.3f}".replace("-", "−")
            axes.text(x, y, text, ha="center", va="center", fontsize=font, color=ink)
        if one.score is None:
            axes.plot(x, y, "x", color="0.35", markersize=8, label=_BROKEN)
        elif not one.met:
            axes.add_patch(Rectangle(corner, 1, 1, **hatch))
        if sweep.is_chosen(one):
            axes.add_patch(Rectangle(corner, 1, 1, label=_chosen(sweep), **frame))
    axes.set(xlim=(-0.5, len(alphas) - 0.5), ylim=(-0.5, len(betas) - 0.5))
    _set_ticks(axes.set_xticks, alphas)
    _set_ticks(axes.set_yticks, betas)
    _finish(figure, axes, *_STRENGTHS.values())
    return figure


def _line(sweep: Sweep, key: str) -> Figure:
    """Draw the score over alpha or beta, in steps of one size, where the other one does not vary."""
    figure, axes = _new_figure(sweep, "Score of each point")
    candidates = sorted(sweep.candidates, key=lambda one: float(one.values[key]))
    points = [(x, y) for x, one in enumerate(candidates) if (y := sweep.shown_score(one)) is not None]
    axes.plot([x for x, _ in points], [y for _, y in points], color="0.55", linewidth=1.2, zorder=1)
    foot = {"transform": axes.get_xaxis_transform(), "clip_on": False}  # what has no score has no height of its own
    for x, one in enumerate(candidates):
        y = sweep.shown_score(one)
        height, place = (0.04, foot) if y is None else (y, {})
        axes.plot(x, height, **_marker(one, "black"), **place)
        if sweep.is_chosen(one):
            axes.plot(x, height, label=_chosen(sweep), **_RING, **place)
    _set_ticks(axes.set_xticks, [float(one.values[key]) for one in candidates])
    axes.margins(0.1)
    axes.grid(color="0.9", linewidth=0.6)
    fixed = {name: value for name, value in candidates[0].values.items() if name != key}
    _finish(figure, axes, _STRENGTHS[key] + (f" ({in_symbols(fixed)})" if fixed else ""), sweep.score_heading)
    return figure


def _set_ticks(set_ticks: Callable[[range, list[str]], object], values: list[float]) -> None:
    """Label the steps of an axis with their values; of many, label only every second one, or fewer."""
    step = 1 + len(values) // 16
    set_ticks(range(0, len(values), step), [value_text(value) for value in values[::step]])


def forget_retain(sweep: Sweep) -> Figure | None:
    """Draw what each model knows of the forget set against what it knows of the retain set, ± one standard error.

    Candidates are coloured by score. The metrics are the first in the table of metrics with a `partner` that some
    candidate has values of; return None where there is no such pair.
    """
    pairs = ((kind.name, kind.partner) for kind in METRICS.values() if kind.partner)
    pair = next((pair for pair in pairs if any(_both(one.metrics, *pair) for one in sweep.candidates)), None)
    if pair is None:
        return None
    figure, axes = _new_figure(sweep, "Forget set against retain set")
    colour_of = _add_colours(figure, axes, sweep)
    style: dict[str, Any] = {"linestyle": "none", "color": "black", "markeredgecolor": "white", "zorder": 4}
    for name, metrics, shape, size in (("target", sweep.target, "s", 8), ("ideal", sweep.ideal or {}, "*", 14)):
        if both := _both(metrics, *pair):
            _add_point(axes, *both, label=name, marker=shape, markersize=size, **style)
    for one in sweep.candidates:
        if both := _both(one.metrics, *pair):
            _add_point(axes, *both, **_marker(one, colour_of(sweep.shown_score(one))))
            if sweep.is_chosen(one):
                axes.plot(both[0].value, both[1].value, label=_chosen(sweep), **_RING)
            labels = [_axis_label(name, metric) for name, metric in zip(pair, both, strict=True)]
    axes.margins(0.1)
    _finish(figure, axes, *labels)
    return figure


def _both(metrics: Mapping[str, Metric], x: str, y: str) -> tuple[Metric, Metric] | None:
    known = [metrics[name] for name in (x, y) if name in metrics and metrics[name].value is not None]
    return (known[0], known[1]) if len(known) == 2 else None


def _add_point(axes: Any, x: Metric, y: Metric, **style: Any) -> None:
    axes.errorbar(x.value, y.value, y.stderr, x.stderr, fmt="none", ecolor="0.55", elinewidth=0.8, zorder=2)
    axes.plot(x.value, y.value, **({"zorder": 3} | style))


def _axis_label(name: str, metric: Metric) -> str:
    label = f"{heading(name, None)} (0…1)"
    return {True: f"{label}   better →", False: f"← better   {label}", None: label}[metric.higher_is_better]


def _marker(one: Candidate, colour: Any) -> dict[str, Any]:
    """Return a candidate's marker: full, hollow where conditions are not met, a cross where it is broken."""
    style: dict[str, Any] = {"linestyle": "none", "markersize": 6.5, "markeredgewidth": 1.5}
    if one.score is None:
        return style | {"marker": "x", "color": "0.4", "label": _BROKEN}
    if not one.met:
        return style | {"marker": "o", "color": "0.4", "markerfacecolor": "white", "label": _UNMET}
    return style | {"marker": "o", "color": colour}


def _add_colours(figure: Figure, axes: Any, sweep: Sweep) -> Callable[[float | None], Any]:
    """Add a colour bar, the best score brightest; return a function from a score to its colour, grey for None."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize, to_rgba

    scores = [score for one in sweep.candidates if (score := sweep.shown_score(one)) is not None]
    low, high = min(scores, default=0.0), max(scores, default=0.0)
    names = "viridis_r" if sweep.score_heading.endswith("↓") else "viridis"
    colours: Any = ScalarMappable(Normalize(low, high if high > low else low + 1e-3), names)
    if scores:
        bar = figure.colorbar(colours, ax=axes, pad=0.02)
        bar.set_label(_plain(sweep.score_heading), fontsize=_FONT)
        bar.ax.tick_params(labelsize=_FONT - 1)
    return lambda score: to_rgba("0.92") if score is None else colours.to_rgba(score)


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


def _finish(figure: Figure, axes: Any, x_label: str, y_label: str) -> None:
    """Label the axes, and explain each sign once below the picture."""
    axes.set_xlabel(_plain(x_label), fontsize=_FONT)
    axes.set_ylabel(_plain(y_label), fontsize=_FONT)
    handles, labels = axes.get_legend_handles_labels()
    signs = dict(sorted(zip(labels, handles, strict=True), key=lambda sign: sign[0], reverse=True))
    columns = len(signs) if sum(map(len, signs)) < 60 else 3  # a longer line has no room below the picture
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "columnspacing": 1, "handletextpad": 0.4}
    figure.legend(list(signs.values()), list(signs), frameon=False, fontsize=_FONT - 1, **place)


def _chosen(sweep: Sweep) -> str:
    return _plain(f"chosen: {in_symbols(sweep.chosen)}")


def _plain(text: str) -> str:
    """Return text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")
