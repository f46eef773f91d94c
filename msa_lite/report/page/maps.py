"""Draw a choice (its score over α and β) and the update by layer and kind of module."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msa_lite.io.files.writing import write_text
from msa_lite.report.page.charts import (
    ACCENT,
    INK,
    MUTED,
    RULE,
    SMALL,
    Chart,
    can_draw,
    cut,
    draw,
)
from msa_lite.report.run.choice import SYMBOLS, Candidate, Choice, value_text
from msa_lite.report.run.update import GroupUpdate
from msa_lite.report.tables.metrics import METRICS
from msa_lite.report.tables.reports import Metric, number

logger = logging.getLogger(__name__)

HEAT_MAP_FILE = "heat_map.svg"

_Value = float | int | str
_PALE, _DEEP = 0.06, 0.5  # opacity of the accent colour; up to that, ink can be read on it
_ROOM = 33.0  # units; a narrower cell has no room for its number
_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # their usual order


def value_label(key: str, value: _Value) -> str:
    """Return one value of a candidate for a reader, "α = 0.5", on one line."""
    return f"{_symbol(key)}\u00a0=\u00a0{tick(value)}"


def _symbol(key: str) -> str:
    """Return the name of an axis."""
    return SYMBOLS.get(key, cut(key, 16))


def tick(value: _Value) -> str:
    """Return a value as axes show it."""
    return cut(value_text(value), 12)


def write_pictures(choice: Choice, folder: Path) -> None:
    """Write heat_map.svg, where there is something to draw; nothing without matplotlib."""
    if not can_draw():
        logger.warning("no picture of the sweep: pip install matplotlib; `msa-lite report` then draws it on its page")
        return
    if chart := sweep_chart(choice):
        write_text(folder / HEAT_MAP_FILE, chart.as_file())


def sweep_chart(choice: Choice) -> Chart | None:
    """Return the score over the two values that vary as a map, or over the only one as a line.

    Return None where there is nothing to compare: a single candidate, candidates that differ in more than two values,
    or broken ones alone.
    """
    candidates = choice.candidates
    varied = [key for key in choice.keys if len({candidate.values.get(key) for candidate in candidates}) > 1]
    scores = [score for candidate in candidates if (score := choice.shown_score(candidate)) is not None]
    alike = all(set(candidate.values) == set(choice.keys) for candidate in candidates)
    if not alike or len(varied) not in (1, 2) or all(candidate.score is None for candidate in candidates):
        return None
    place = ", ".join(value_label(key, value) for key, value in choice.values.items())
    span = f"from {number(min(scores))} to {number(max(scores))}" if scores else "none of which meets the conditions"
    words = f"{choice.heading} of {len(candidates)} candidates, {span}. Chosen: {place}."
    if len(varied) == 1:
        return _score_line(choice, varied[0], f"Line chart. {words}")
    return _score_map(choice, varied, scores, f"Heat map. {words}")


def _sweep_caption(choice: Choice, chosen: str, **states: str) -> str:
    """Return the caption of a score's picture; states: what the signs of "not met" and "broken" candidates mean."""
    signs = {candidate.state for candidate in choice.candidates}
    meanings = (meaning for state, meaning in states.items() if state.replace("_", " ") in signs)
    return " ".join([f"The score, {choice.heading}{chosen}", *dict.fromkeys(meanings)])


def _steps(candidates: Sequence[Candidate], key: str) -> list[_Value]:
    """Return the values on one axis in order, numbers before texts."""
    values = {candidate.values[key] for candidate in candidates}
    return sorted(
        values, key=lambda value: (isinstance(value, str), 0 if isinstance(value, str) else value, str(value))
    )


def _score_map(choice: Choice, keys: Sequence[str], scores: Sequence[float], words: str) -> Chart:
    columns, rows = (_steps(choice.candidates, key) for key in keys)
    low = min(scores, default=0.0)
    span = max(scores, default=0.0) - low or 1.0

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        for candidate in choice.candidates:
            place = columns.index(candidate.values[keys[0]]), rows.index(candidate.values[keys[1]])
            score, is_broken = choice.shown_score(candidate), candidate.score is None
            if score is None:
                _add_cell(axes, place, facecolor="none", edgecolor=RULE, hatch="" if is_broken else "///")
                axes.plot(*place, "x" if is_broken else "", color=MUTED, markersize=7)
            else:
                share = (score - low) / span
                _add_share(axes, place, share, number(score), 280 / len(columns))
            if choice.is_chosen(candidate):
                _add_cell(axes, place, fill=False, edgecolor=INK, linewidth=2.4, clip_on=False, zorder=5)
        _finish(axes, [tick(value) for value in columns], [tick(value) for value in rows])
        axes.set(xlabel=_symbol(keys[0]), ylabel=_symbol(keys[1]))

    caption = _sweep_caption(
        choice,
        ": the deeper the colour, the better. The framed candidate was chosen.",
        not_met="Hatched: misses the conditions of the rule.",
        broken="×: broken.",
    )
    return draw("sweep", words, 60 + len(rows) * min(44, max(16, 320 / len(rows))), paint, caption)


def _add_cell(axes: Any, place: tuple[int, int], **style: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((place[0] - 0.5, place[1] - 0.5), 1, 1, **style))


def _add_share(axes: Any, place: tuple[int, int], share: float, text: str, room: float) -> None:
    """Add a cell, the deeper the larger its share in [0, 1], with its number where there is room."""
    _add_cell(axes, place, facecolor=ACCENT, alpha=_PALE + (_DEEP - _PALE) * share, linewidth=0)
    if room >= _ROOM:
        axes.text(*place, text.replace("-", "−"), ha="center", va="center", fontsize=SMALL)


def _finish(axes: Any, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Label the axes; of many steps only every second, or fewer."""
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
    for set_ticks, labels in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
        step = 1 + len(labels) // 13
        set_ticks(range(0, len(labels), step), labels[::step])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _score_line(choice: Choice, key: str, words: str) -> Chart:
    steps = _steps(choice.candidates, key)
    places = sorted(((steps.index(one.values[key]), one) for one in choice.candidates), key=lambda place: place[0])
    scored = [(x, score, one) for x, one in places if (score := choice.shown_score(one)) is not None]

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.plot([x for x, _, _ in scored], [y for _, y, _ in scored], color=ACCENT, marker="o", markersize=5)
        for x, y in ((x, y) for x, y, one in scored if choice.is_chosen(one)):
            axes.plot(x, y, "o", markersize=13, color=INK, markerfacecolor="none", markeredgewidth=1.8)
        foot = {"transform": axes.get_xaxis_transform(), "clip_on": False}  # what has no score has no height
        for x in (x for x, one in places if choice.shown_score(one) is None):
            axes.plot(x, 0.03, "x", color=MUTED, markersize=6, **foot)
        step = 1 + len(steps) // 11
        axes.set_xticks(range(0, len(steps), step), [tick(value) for value in steps[::step]])
        axes.grid(axis="y")
        axes.margins(0.08)
        axes.set(xlabel=_symbol(key), ylabel=cut(choice.heading, 30))

    cross = "× at the foot: misses the conditions of the rule, or is broken."
    caption = _sweep_caption(choice, ". The ringed candidate was chosen.", not_met=cross, broken=cross)
    return draw("sweep", words, 220, paint, caption)


def forget_retain_pair(choice: Choice) -> tuple[str, str] | None:
    """Return the metrics of the forget set and the retain set that tell candidates apart; None without such a pair."""
    pairs = ((kind.name, kind.partner) for kind in METRICS.values() if kind.partner)
    return next((pair for pair in pairs if any(_has_values(c.metrics, *pair) for c in choice.candidates)), None)


def _has_values(metrics: Mapping[str, Metric], *names: str) -> bool:
    return all(name in metrics and metrics[name].value is not None for name in names)


def layer_chart(cells: Mapping[tuple[int | None, str], GroupUpdate]) -> Chart | None:
    """Return the update's relative size in percent by layer and kind of module; what lies outside layers is left out.

    Return None where no tensor lies in a layer.
    """
    sizes = {(layer, kind): group.relative_size for (layer, kind), group in cells.items() if layer is not None}
    known = {place: size for place, size in sizes.items() if size is not None}
    if not known:
        return None
    layers = sorted({layer for layer, _ in known if layer is not None})
    kinds = _kinds(kind for _, kind in known)
    largest = max(known.values()) or 1.0
    row = min(24.0, max(6.0, 480 / len(layers)))

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        for (layer, kind), size in known.items():
            room = 280 / len(kinds) if row >= 16 else 0.0
            _add_share(axes, (kinds.index(kind), layers.index(layer)), size / largest, f"{100 * size:.3g}", room)
        upright = 90 if len(kinds) > 3 else 0
        _finish(axes, ["" for _ in kinds], [str(layer) for layer in layers])
        axes.set_xticks(range(len(kinds)), [cut(short_kind(kind, kinds), 14) for kind in kinds], rotation=upright)
        axes.set_ylabel("layer")
        axes.invert_yaxis()
        axes.xaxis.tick_top()
        axes.tick_params(axis="x", pad=6)

    top, bottom = max(known, key=lambda place: known[place]), min(known, key=lambda place: known[place])
    words = (
        f"Heat map. Layers: {len(layers)}, kinds of module: {len(kinds)}. Largest: layer {top[0]}, {top[1]}, "
        f"{known[top]:.2%} of the weights' norm. Smallest: layer {bottom[0]}, {bottom[1]}, {known[bottom]:.2%}."
    )
    caption = (
        "‖Δ‖ / ‖weights‖ in percent: the norm of the change as a share of the norm of the weights. The deeper the "
        "colour, the larger the change."
    )
    return draw("layers", words, 90 + row * len(layers), paint, caption)


def _kinds(kinds: Iterable[str]) -> list[str]:
    """Return the kinds in the usual order of Llama-like models, then the others."""
    order = {name: at for at, name in enumerate(_LLAMA)}
    return sorted(dict.fromkeys(kinds), key=lambda kind: order.get(kind.rpartition(".")[2], len(order)))


def short_kind(kind: str, kinds: Sequence[str]) -> str:
    """Return the last part of a kind's name, where it is enough to tell the kinds apart."""
    last = kind.rpartition(".")[2]
    return last if [kind.rpartition(".")[2] for kind in kinds].count(last) == 1 else kind
