"""Test whether an unlearned model is nearer to a model that never saw the rows, or to the target.

Three samples, as in the relative tests of Bounliphone et al. (2016, arXiv 1511.04581), which Ribero, Schrab and Gretton
(2026, arXiv 2601.19755) bring to unlearning: two models that were trained apart differ without any failure of
unlearning, so a difference to the ideal alone says nothing. What counts is whether it is smaller than the difference to
the target. Their statistic is a divergence of outputs; here it is a squared distance, row by row, since all three
models are asked the same rows.

With features t, u, c of a row in target T, unlearned model U and control C (the ideal, or else the prior), the row
gives δ = |u − t|² − |u − c|² and γ = |t − c|². Rows that no model is to forget give the same, and show what training
apart alone does: the level. The position is

    (mean δ of forget rows − mean δ of level rows) / (mean γ of forget rows − mean γ of level rows)

It is −1 where U is T, +1 where U is C, and 2 λ − 1 where u = t + λ (c − t). Nearer is not near: a model that is thrown
far beyond C has a high position, too. So the rest says how far it is from C, as a share of the way from T:

    (mean |u − c|² of forget rows − that of level rows) / (mean γ of forget rows − mean γ of level rows)

0: at the control; 1: as far as the target. Position and rest together are the distance from T in the same measure. If
U is farther from T and from C than these are from each other, U is away from both. p: the chance of so large a
numerator of the position if subjects are dealt to forget and level rows at random, two-sided. Each subject counts once,
by the mean of its rows.

The feature is the probability of the answer, exp(− mean loss of its tokens), since a loss has no bound. On the first
real model one row of 72 decided all. (The rest, and equal weights of subjects, were added then; they only take away.)
Other features go through the same test (`measure_distances`): examples/gives_away looks at hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, Literal

import numpy as np

from msa_lite.data import Example, sample_rows
from msa_lite.errors import MismatchError
from msa_lite.evals.benchmarks.benchmark import Item, Record
from msa_lite.evals.engine.forward import mean_losses
from msa_lite.evals.engine.hidden_states import predicting_places
from msa_lite.evals.engine.models import Runner, open_runner
from msa_lite.evidence.evidence import EvidenceKind, Scene
from msa_lite.io.console.progress import Progress, silent
from msa_lite.report.run.evidence import UNDECIDED, EvidenceFigure, EvidenceFinding

LEVEL = 0.05  # of significance; fixed before any model was looked at
_ROWS = 200  # of each side, a seeded sample
_DRAWS = 9_999
_NEAR = {"target": "nearer to the target", "neither": "away from both", "undecided": UNDECIDED}


@dataclass(frozen=True)
class RelativeTest:
    """The outcome of the test by one feature."""

    position: float | None
    """−1: at the target, +1: at the control. None where target and control do not differ more than on level rows."""
    rest: float | None
    """The distance from the control, as a share of the target's: 0 at the control, 1 as far as the target."""
    interval: tuple[float, float] | None
    """Its 95 % interval, by a seeded bootstrap over subjects."""
    p: float
    """Of the hypothesis that the unlearned model is as far from the one as from the other."""
    p_apart: float
    """Of the hypothesis that target and control differ no more on forget rows than on level rows, one-sided."""

    @property
    def outcome(self) -> Literal["control", "target", "neither", "undecided"]:
        """Return the model that the unlearned one is nearer to, if that is shown; "neither" if it is away from both."""
        if self.position is None or self.rest is None or self.p >= LEVEL:
            return "undecided"
        if self.position < 0:
            return "target" if self.position + self.rest < 1 else "neither"
        return "control" if self.rest < 1 else "neither"


def relative_test(
    distances: np.ndarray, is_forget: np.ndarray, units: np.ndarray, seed: int = 0, draws: int = _DRAWS
) -> RelativeTest:
    """Return the position between target and control with its p-value.

    distances: (rows, 3) squared distances |u − t|², |u − c|² and |t − c|², all above 0 or 0. is_forget: (rows,) True
    for forget rows, False for level rows. units: (rows,) the number of each row's subject; one subject has rows of one
    side alone. Time and memory grow with draws × subjects.
    """
    values = np.stack([distances[:, 0] - distances[:, 1], distances[:, 2], distances[:, 1]])
    names, codes = np.unique(units, return_inverse=True)
    counts = np.bincount(codes, minlength=len(names))
    means = np.stack([np.bincount(codes, row, minlength=len(names)) / counts for row in values])
    sides = np.array([bool(is_forget[codes == at].any()) for at in range(len(names))])
    generator = np.random.default_rng(seed)
    orders = generator.permuted(np.tile(sides, (draws, 1)), axis=1)

    def contrast(chosen: np.ndarray) -> np.ndarray:
        """Return the (…, 3) means of the values over the chosen subjects, minus those over the others."""
        weights = chosen.astype(np.float64)
        inside, outside = (side @ means.T / side.sum(axis=-1, keepdims=True) for side in (weights, 1 - weights))
        return np.asarray(inside - outside)

    own, drawn = contrast(sides), contrast(orders)
    slack = 1e-12 * np.abs(means).sum(axis=1)  # of equal sums in another order
    p = (1 + int((np.abs(drawn[:, 0]) >= abs(own[0]) - slack[0]).sum())) / (1 + draws)
    p_apart = (1 + int((drawn[:, 1] >= own[1] - slack[1]).sum())) / (1 + draws)
    if p_apart >= LEVEL or own[1] <= 0:
        return RelativeTest(None, None, None, p, p_apart)
    position, rest = float(own[0] / own[1]), float(own[2] / own[1])
    return RelativeTest(position, rest, _interval(means, sides, generator), p, p_apart)


def _interval(
    means: np.ndarray, sides: np.ndarray, generator: np.random.Generator, draws: int = 2_000
) -> tuple[float, float]:
    """Return the 95 % percentile interval of the position; subjects of each side are redrawn among themselves."""
    places = [np.flatnonzero(sides == side) for side in (True, False)]
    forget, level = (
        means[:, of_side[generator.integers(0, len(of_side), (draws, len(of_side)))]].mean(axis=2) for of_side in places
    )
    difference = forget - level
    ratios = difference[0] / np.where(difference[1] > 0, difference[1], np.nan)
    low, high = np.nanpercentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def smallest_p(forget: int, level: int) -> float:
    """Return the smallest p-value of so many subjects on both sides.

    No other dealing is then as extreme, except, where both sides are as many, the one with the sides exchanged.
    """
    alike = 2 if forget == level else 1
    return alike / comb(forget + level, forget) if forget and level else 1.0


class Nearer(EvidenceKind):
    """The test on the probabilities of the answers."""

    name = "nearer"
    loads, passes = 3, 6.0  # forget rows, and about as many of the level, in three models

    def describe(self, scene: Scene) -> dict[str, Any]:
        return {"rows": _ROWS, "draws": _DRAWS, "seed": scene.seed, "control": _control(scene)}

    def lacking(self, scene: Scene) -> str:
        if "target" not in scene.sources:
            return "there is no target"
        control, level = _control(scene), _level_set(scene)
        if control is None:
            return "there is no control: give an ideal model (evaluate.ideal), or a prior"
        if not any(_text(item) for item in scene.forget):
            return "no answer or text of the forget rows is scored"
        if level is None:
            wanted = "rows to keep" if control == "ideal" else "holdout rows"
            return f"no {wanted} are asked; they would show how far the models differ on other rows"
        counts = [_count_subjects(items) for items in (scene.forget, scene.benchmark.sets[level].items)]
        for name, count in zip((scene.benchmark.forget_set, level), counts, strict=True):
            if not count:
                return (
                    f"the {name} rows do not say whom they are about, and rows about one person count together; give "
                    "them a column subject (docs/how-to/data-and-prompts.md)"
                )
        if smallest_p(*counts) >= LEVEL:
            return (
                f"{counts[0]} forgotten and {counts[1]} other subjects are too few: no p-value could be below "
                f"{LEVEL:g}, whatever they show"
            )
        return ""

    def find(self, scene: Scene, progress: Progress = silent) -> tuple[EvidenceFinding, Mapping[str, Sequence[Record]]]:
        records = measure_distances(scene, _probabilities, progress)
        test, control = relative_test_of(records, scene), _control(scene)
        units: dict[bool, list[int]] = {True: [], False: []}
        for record in records:
            units[record["set"] == scene.benchmark.forget_set].append(record["unit"])
        rows, position = len(units[True]), test.position
        figures = {} if position is None else {"losses": EvidenceFigure(position, test.interval, rows)}
        details = {
            "losses": {"p": test.p, "p_apart": test.p_apart, "rest": test.rest, "outcome": test.outcome},
            "subjects": [len({*units[True]}), len({*units[False]})],
            "level": _level_set(scene),
        }
        answer = {"control": f"nearer to the {control}", **_NEAR}[test.outcome]
        finding = EvidenceFinding(
            self.name, answer, _sentence(test, answer, control), control, rows, {"unlearned": figures}, details
        )
        return finding, {"rows": records}


def measure_distances(
    scene: Scene, features: Callable[[Runner, Sequence[Example]], np.ndarray], progress: Progress = silent
) -> list[Record]:
    """Return a record of each row with its subject and its squared distances (`relative_test`), as "losses".

    features: returns (texts, layers, width) for texts in a model; NaN for a text that is longer than its window. The
    distance is the mean over layers, each divided by its mean square in the target.
    """
    control, level = _control(scene), _level_set(scene)
    assert control is not None, "`lacking` has asked"
    assert level is not None, "`lacking` has asked"
    sides = {name: _chosen(scene, name) for name in (scene.benchmark.forget_set, level)}
    items = [(name, item) for name, chosen in sides.items() for item in chosen]
    texts = [text for _, item in items if (text := _text(item))]
    values = []
    for at, model in enumerate(("target", control, "unlearned")):
        progress("evidence: nearer", at, 3)
        with open_runner(scene.sources[model]) as runner:
            values.append(features(runner, texts))
    progress("evidence: nearer", 3, 3)
    target, controls, unlearned = values
    if not target.shape == unlearned.shape == controls.shape:
        shapes = ", ".join(str(one.shape[1:]) for one in (target, unlearned, controls))
        raise MismatchError(f"nearer: features of {shapes} (layers, width) cannot be compared")
    scale = np.maximum(np.nanmean((target**2).sum(axis=2), axis=0), 1e-30)
    pairs = ((unlearned, target), (unlearned, controls), (target, controls))
    distances = np.stack([(((a - b) ** 2).sum(axis=2) / scale).mean(axis=1) for a, b in pairs], axis=1)
    units: dict[Any, int] = {}
    return [
        {"index": item.index, "set": name, "unit": units.setdefault((name, item.group), len(units))}
        | {"losses": row.tolist()}
        for (name, item), row in zip(items, distances, strict=True)
        if not np.isnan(row).any()
    ]


def relative_test_of(records: Sequence[Record], scene: Scene) -> RelativeTest:
    """Return the test on the records of `measure_distances`."""
    is_forget = np.array([record["set"] == scene.benchmark.forget_set for record in records])
    units = np.array([record["unit"] for record in records])
    rows = np.array([record["losses"] for record in records], np.float64)
    return relative_test(rows, is_forget, units, scene.seed)


def _control(scene: Scene) -> str | None:
    """Return the model that never saw the rows: the ideal, or else the prior."""
    return next((name for name in ("ideal", "prior") if name in scene.sources), None)


def _level_set(scene: Scene) -> str | None:
    """Return the set of rows on which target and control differ by their training apart alone.

    The ideal knows the rows to keep as the target does. The prior knows none of them, and is compared on holdout rows.
    """
    names = ("retain", "holdout") if _control(scene) == "ideal" else ("holdout",)
    sets = scene.benchmark.sets
    return next((name for name in names if name in sets and _count_subjects(sets[name].items)), None) or next(
        (name for name in names if name in sets and any(map(_text, sets[name].items))), None
    )


def _text(item: Item) -> Example | None:
    """Return the text of a row that is scored: its answer, or itself; None without any."""
    texts = item.texts.get("answer") or item.texts.get("text") or ()
    return texts[0] if texts and predicting_places(texts[0]) else None


def _count_subjects(items: Sequence[Item]) -> int:
    """Return the number of subjects that scored rows name."""
    return len({item.group for item in items if item.group is not None and _text(item)})


def _chosen(scene: Scene, name: str) -> list[Item]:
    """Return the rows of a set that name their subject and are scored, at most `_ROWS` of them."""
    items = [item for item in scene.benchmark.sets[name].items if item.group is not None and _text(item)]
    return list(sample_rows(items, _ROWS, scene.seed))


def _probabilities(runner: Runner, texts: Sequence[Example]) -> np.ndarray:
    """Return the (texts, 1, 1) probabilities of the labels of texts; NaN for one that is longer than the window."""
    probabilities = np.full((len(texts), 1, 1), np.nan)
    for at, loss in mean_losses(runner, texts):
        probabilities[at] = np.exp(-loss)
    return probabilities


def _sentence(test: RelativeTest, answer: str, control: str | None) -> str:
    figures = f"target and {control} hardly differ, p {test.p_apart:.2g}"
    if test.position is not None:
        figures = f"position {test.position:+.2f}, p {test.p:.2g}, rest {test.rest:.2f}"
    return (
        f"On the forget rows the unlearned model is by losses {answer} ({figures}). Position: −1 is the target, +1 the "
        f"{control}. Rest: 0 is the {control}, 1 as far from it as the target."
    )
