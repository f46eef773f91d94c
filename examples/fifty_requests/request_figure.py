"""Draw the scores and the cost of each request as SVG: the same numbers give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from request_results import NAMES, Request

_STYLES = {"msa": ("#1b7837", "o"), "npo": ("#7b3294", "s"), "grad_diff": ("#a6611a", "^")}
_FONT = 9
_RECENT = 10  # requests of a running mean
_PANELS: dict[str, Callable[[Sequence[Request], int], float | None]] = {
    "own rows recited (mean of 10)": lambda done, at: _share(done, at, "recited", "rows"),
    "earlier rows recited": lambda done, at: (
        done[at].earlier_recited / done[at].earlier_scored if done[at].earlier_scored else None
    ),
    "rows to keep answered right": lambda done, at: done[at].kept,
    "CPU seconds": lambda done, at: done[at].cpu_seconds,
    "peak memory, MB": lambda done, at: done[at].peak_mb,
    "disk, MB": lambda done, at: done[at].disk_mb,
}


def _share(done: Sequence[Request], at: int, part: str, whole: str) -> float:
    recent = done[max(0, at + 1 - _RECENT) : at + 1]
    return sum(getattr(r, part) for r in recent) / sum(getattr(r, whole) for r in recent)


def write_figure(handled: Sequence[Request], path: Path) -> None:
    """Draw three panels of scores and three of cost over the number of the request, a line for each method."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    grid: Any = figure.subplots(2, 3)
    for number, (axes, (title, value)) in enumerate(zip(grid.flat, _PANELS.items(), strict=True)):
        for method, (colour, mark) in _STYLES.items():
            done = [request for request in handled if request.method == method]
            points = [(request.number, y) for at, request in enumerate(done) if (y := value(done, at)) is not None]
            label = NAMES[method] if number == 0 else None
            xs, ys = zip(*points, strict=True) if points else ((), ())
            axes.plot(xs, ys, color=colour, marker=mark, markersize=3, linewidth=1, label=label)
        axes.set_title(title, fontsize=_FONT)
        axes.set_ylim(bottom=0, top=1.03 if number < 3 else None)
        axes.tick_params(labelsize=_FONT - 1)
        axes.set_axisbelow(True)
        axes.grid(color="0.92", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if number >= 3:
            axes.set_xlabel("request", fontsize=_FONT)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=_FONT)
    with matplotlib.rc_context({"svg.hashsalt": "msa-lite", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text("utf-8").splitlines()) + "\n", "utf-8")
