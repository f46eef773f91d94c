"""Draw the figures of the page of results as SVG: the same numbers give the same bytes.

Figures are made without pyplot, so that the caller's own matplotlib stays as it is. Text stays text, and colours differ
in lightness, so that they can be told apart in grey.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from claims import BASELINES, FULL_BASELINES, NAMES, best_points
from collect import Point, Results
from measures import FORGET, RETAIN, mean_score, measure, reference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FONT = 9
_SIZE = (6.4, 4.4)  # inches
_MARKS = ("s", "D", "^", "v", "<", ">", "p")
_COLOURS = ("#7b3294", "#c2a5cf", "#a6611a", "#dfa44a", "#4d4d4d", "#8c8c8c", "#c51b7d")
_STYLES: dict[str, dict[str, Any]] = {
    "target": {"marker": "X", "color": "black"},
    "ideal": {"marker": "*", "color": "black"},
    "msa-lora": {"marker": "o", "color": "#1b7837"},
    "msa-full": {"marker": "o", "color": "#7fbf7b"},
    **{name: {"marker": mark, "color": colour} for name, mark, colour in zip(BASELINES, _MARKS, _COLOURS, strict=True)},
}
_STYLES |= {  # hollow
    name: (style := _STYLES[name.removesuffix("-full")])
    | {"markerfacecolor": "white", "markeredgecolor": style["color"]}
    for name in FULL_BASELINES
}
_PRIORS = {"prior-base": "base", "prior-text-a": "text-a", "msa-lora": "text-b"}


def write_figures(results: Results, folder: Path) -> dict[str, str]:
    """Write every figure that there are numbers for; return their captions by file name. Others are removed."""
    drawings: dict[str, tuple[Callable[[Results], Figure | None], str]] = {
        "frontier.svg": (_frontier, "Forgetting against keeping. Small signs are seeds, large ones their means"),
        "prior.svg": (_distance, "Distance to the ideal against how far the prior is from the target (MSA with LoRA)"),
        "grid.svg": (_grid, "Distance to the ideal over α and β on the test rows, mean over seeds (MSA with LoRA)"),
        "relearn-retain.svg": (partial(_relearning, "retain"), "What comes back while a model learns rows to keep"),
        "relearn-part.svg": (
            partial(_relearning, "part"),
            "What comes back of one half of the rows while a model learns the other half",
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    captions = {}
    for name, (draw, caption) in drawings.items():
        figure = draw(results)
        (folder / name).unlink(missing_ok=True)
        if figure is not None:
            _save(figure, folder / name)
            captions[name] = caption
    return captions


def _save(figure: Figure, path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "msa-lite", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", "utf-8")


def _new_figure() -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(labelsize=_FONT - 1)
    axes.set_axisbelow(True)
    axes.grid(color="0.92", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _frontier(results: Results) -> Figure | None:
    """Draw the mean forget score of each method against its mean retain score."""
    figure, axes = _new_figure()
    drawn = False
    first = next((runs for name in NAMES if (runs := results.runs(name))), {})
    for name, style in _STYLES.items():
        if name in ("target", "ideal"):
            points: Mapping[int, Point] = {seed: reference(run, name) for seed, run in first.items()}
        else:
            points = results.runs(name)
        places = [(mean_score(p.unlearned, FORGET), mean_score(p.unlearned, RETAIN)) for p in points.values()]
        known = [place for place in places if None not in place]
        if known:
            drawn = drawn or name not in ("target", "ideal")
            size = 15 if name == "ideal" else 9
            label = NAMES.get(name, name)
            _add_means(axes, known, style | {"markersize": size}, label)
    if not drawn:
        return None
    axes.set_xlabel("mean forget score (the nearer to the ideal's the better)", fontsize=_FONT)
    axes.set_ylabel("mean retain score  better →", fontsize=_FONT)
    figure.legend(loc="outside right upper", frameon=False, fontsize=_FONT - 1)
    return figure


def _add_means(axes: Any, places: Sequence[tuple[Any, Any]], style: Mapping[str, Any], label: str) -> None:
    """Draw a small sign for each place, and a large one at their mean."""
    line = {"linestyle": "none", "markeredgecolor": "white", "markeredgewidth": 0.8}
    if len(places) > 1:
        small = style | {"markersize": style["markersize"] * 0.5, "alpha": 0.6}
        axes.plot([x for x, _ in places], [y for _, y in places], **(line | small), zorder=2)
    x, y = (statistics.fmean(place[i] for place in places) for i in (0, 1))
    axes.plot([x], [y], label=label, **(line | style), zorder=3)


def _distance(results: Results) -> Figure | None:
    """Draw the distance to the ideal of MSA with each prior over the prior's distance to the target."""
    series: dict[str, list[tuple[float, float]]] = {name: [] for name in ("target", *_PRIORS)}
    for seed in results.seeds:
        for name, prior in _PRIORS.items():
            run, far = seed.runs.get(name), seed.distances.get(prior)
            value = measure(run, "distance") if run else None
            before = measure(reference(run, "target"), "distance") if run else None
            if far is not None and value is not None:
                series[name].append((far, value))
                if before is not None:
                    series["target"].append((far, before))
    if not any(series[name] for name in _PRIORS):
        return None
    figure, axes = _new_figure()
    if before := [y for _, y in series["target"]]:
        axes.axhline(statistics.fmean(before), color="0.4", linestyle="--", linewidth=1, label="target, nothing done")
    for (name, prior), mark, colour in zip(_PRIORS.items(), "s^o", ("#7b3294", "#a6611a", "#1b7837"), strict=True):
        if series[name]:
            _add_means(axes, series[name], {"marker": mark, "color": colour, "markersize": 9}, f"prior: {prior}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("‖target − prior‖ / ‖target‖", fontsize=_FONT)
    axes.set_ylabel("← better  distance to the ideal", fontsize=_FONT)
    figure.legend(loc="outside right upper", frameon=False, fontsize=_FONT - 1)
    return figure


def _relearning(branch: str, results: Results) -> Figure | None:
    """Draw the extraction strength of the scored rows over the steps of training, for all attacked models."""
    curves: dict[str, dict[int, list[float]]] = {}
    attacked = {name: [run for run in results.runs(name).values() if run.under_attack] for name in NAMES}
    first = next((runs for runs in attacked.values() if runs), [])
    runs_of = {"target": first, "ideal": first} | {name: runs for name, runs in attacked.items() if runs}
    for name, runs in runs_of.items():
        for run in runs:
            model = name if name in ("target", "ideal") else "unlearned"
            for metric, one in run.under_attack.get("relearn", {}).items():
                step = re.fullmatch(rf"(?:plain|{branch} step (\d+))\.extraction_strength\.{model}", metric)
                if step and one.value is not None:
                    curves.setdefault(name, {}).setdefault(int(step[1] or 0), []).append(one.value)
    if not any(len(curve) > 1 for curve in curves.values()):
        return None
    figure, axes = _new_figure()
    for name, curve in curves.items():
        steps = sorted(curve)
        axes.plot(
            steps, [statistics.fmean(curve[step]) for step in steps], label=NAMES.get(name, name), linewidth=1,
            markersize=6, markeredgecolor="white", **_STYLES[name],
        )  # fmt: skip
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("steps of training", fontsize=_FONT)
    axes.set_ylabel("← better  extraction strength on the forget rows", fontsize=_FONT)
    figure.legend(loc="outside right upper", frameon=False, fontsize=_FONT - 1)
    return figure


def grid_means(results: Results) -> dict[tuple[float, float], float]:
    """Return the mean distance to the ideal over seeds of each point of the grid that all its seeds have."""
    values: dict[tuple[float, float], list[float]] = {}
    seeds = [seed for seed in results.seeds if seed.grid]
    for seed in seeds:
        for place, point in sorted(seed.grid.items()):
            if (value := measure(point, "distance")) is not None:
                values.setdefault(place, []).append(value)
    return {place: statistics.fmean(of) for place, of in sorted(values.items()) if len(of) == len(seeds)}


def _grid(results: Results) -> Figure | None:
    """Draw a cell for each α and β, with the best point of each seed and the points that the search chose."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    means = grid_means(results)
    if not means:
        return None
    figure, axes = _new_figure()
    axes.grid(visible=False)
    alphas, betas = (sorted({place[i] for place in means}) for i in (0, 1))
    low, high = min(means.values()), max(means.values())
    colours = ScalarMappable(Normalize(low, high if high > low else low + 1e-3), "viridis_r")
    for (alpha, beta), value in means.items():
        x, y = alphas.index(alpha), betas.index(beta)
        red, green, blue, _ = face = colours.to_rgba(value)
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white"))
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        axes.text(x, y - 0.2, f"{value:.3f}", ha="center", va="center", fontsize=_FONT - 2, color=ink)
    for i, (alpha, beta, _) in enumerate(best_points(results).values()):
        if (alpha, beta) in means:
            label = "best point of a seed" if i == 0 else None
            x, y = alphas.index(alpha) + (i - 1) * 0.15, betas.index(beta) + 0.18
            axes.plot([x], [y], "*", color="white", markeredgecolor="black", markersize=11, label=label, zorder=4)
    for i, run in enumerate(results.runs("msa-lora").values()):
        place = [_position(run.strengths.get(key), axis) for key, axis in (("alpha", alphas), ("beta", betas))]
        if None not in place:
            label = "chosen by the search" if i == 0 else None
            axes.plot(place[:1], place[1:], "o", color="none", markeredgecolor="#d7191c", markeredgewidth=2,
                      markersize=12, label=label, clip_on=False, zorder=5)  # fmt: skip
    axes.set(xlim=(-0.5, len(alphas) - 0.5), ylim=(-0.5, len(betas) - 0.5))
    axes.set_xticks(range(len(alphas)), [f"{value:g}" for value in alphas])
    axes.set_yticks(range(len(betas)), [f"{value:g}" for value in betas])
    axes.set_xlabel("α, strength of the forget vector", fontsize=_FONT)
    axes.set_ylabel("β, strength of the retain vector", fontsize=_FONT)
    figure.colorbar(colours, ax=axes, pad=0.02).set_label("← better  distance to the ideal", fontsize=_FONT)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=_FONT - 1)
    return figure


def _position(value: Any, axis: Sequence[float]) -> float | None:
    """Return the place of a value on an axis whose steps are one apart, between its neighbours."""
    if not isinstance(value, (int, float)) or not axis:
        return None
    if value <= axis[0] or value >= axis[-1]:
        return 0.0 if value <= axis[0] else len(axis) - 1.0
    right = next(i for i, step in enumerate(axis) if step >= value)
    return right - 1 + (value - axis[right - 1]) / (axis[right] - axis[right - 1])
