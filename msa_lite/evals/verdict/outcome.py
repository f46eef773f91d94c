"""Measure from records what models have forgotten and kept, beside control and target."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from msa_lite.evals.engine import answers
from msa_lite.evals.verdict.bounds import (
    Models,
    Record,
    Records,
    add_up,
    bounded,
    count_subjects,
    difference_of_shares,
    effective_rows,
    share_bound,
    unit_of_rows,
)
from msa_lite.report.verdict.figures import Bound, ControlName, Forgotten, Kept, Unit, score_label

RECITED = 0.9  # a text counts as recited from this share of predicted tokens, or this ROUGE-L, on
LEAST = 0.05  # a score counts where the target is so far from the control; nearer, the share of the gap is noise

Weighed = tuple[Forgotten, Kept | None] | str
"""The outcome for the forget and the retain set, or the reason why nothing can be said."""


class Yardstick(NamedTuple):
    """The sets and scores that say what a model has forgotten and kept."""

    unit: Unit
    """The units of the forget set."""
    forget_set: str
    """The set of the items to forget."""
    left_scores: Sequence[tuple[str, str]]
    """(set, score) of which no gap to the control may be left."""
    near_scores: Sequence[tuple[str, str]]
    """(set, score) by which parity compares with the control."""
    retain_set: str
    """The set of the items to keep."""
    retain_scores: Sequence[str]
    """The scores of the items to keep."""
    is_recited: Callable[[Record], bool]
    """The check whether an item of the forget set is recited."""
    is_kept: Callable[[Record], bool] | None
    """The check whether an item of the retain set is right, or known by heart; None where there is no such thing."""
    retain_unit: Unit = "questions"
    """The units of the retain set."""
    unseen_set: str | None = "forget"
    """The set of the control's records that shows the level of unseen rows in the retain scores; None: 0 is the
    level."""


def is_recited(record: Record) -> bool:
    """Check whether a row is recited.

    A question is recited where the whole reference stands in the greedy answer, a text where 90 % of its tokens are
    predicted (`RECITED`).
    """
    if "text" in record:
        return (record.get("exact_memorization") or 0.0) >= RECITED
    return score_of(record, "accuracy") == 1.0


_LEFT = ("extraction_strength", "probability")
_OF_QUESTIONS = ("accuracy", "rouge_l", "probability", "extraction_strength")
_OF_TEXTS = ("exact_memorization", "probability", "extraction_strength")


def yardstick_of_rows(models: Models) -> Yardstick:
    """Return the yardstick of forget and retain sets that hold questions, texts or both."""

    def unit(name: str) -> Unit:
        texts = ["text" in record for record in models["target"].get(name, ())]
        return "texts" if texts and all(texts) else "rows" if any(texts) else "questions"

    scores = {name: _OF_TEXTS if unit(name) == "texts" else _OF_QUESTIONS for name in ("forget", "retain")}
    return Yardstick(
        unit=unit("forget"),
        forget_set="forget",
        left_scores=[("forget", name) for name in _LEFT],
        near_scores=[("forget", name) for name in scores["forget"]],
        retain_set="retain",
        retain_scores=scores["retain"],
        is_recited=is_recited,
        is_kept=is_recited,
        retain_unit=unit("retain"),
    )


@dataclass(frozen=True)
class Control:
    """A model's records of rows that it never saw."""

    name: ControlName
    records: Records
    """By set, as the yardstick names them."""


def weigh_recited(models: Models, yardstick: Yardstick) -> Weighed:
    """Return what is left of the forget set beyond the control, and what is kept of the retain set."""
    target, unlearned = (models[name].get(yardstick.forget_set, []) for name in ("target", "unlearned"))
    if not target:
        return "no rows of the forget set were scored; give evaluate.forget"
    control = find_control(models, yardstick)
    before, after = (models[name].get(yardstick.retain_set, []) for name in ("target", "unlearned"))
    kept = kept_of(before, after, yardstick, control)
    return _forgotten(models, yardstick, target, unlearned, control), kept


def weigh_rows(models: Models) -> Weighed:
    """Return `weigh_recited` of forget and retain sets that hold questions, texts or both."""
    return weigh_recited(models, yardstick_of_rows(models))


def find_control(models: Models, yardstick: Yardstick) -> Control | None:
    """Return the best control that there is: ideal, holdout or prior; None without any.

    Holdout rows serve where it can be told whether they are recited.
    """
    if models.get("ideal", {}).get(yardstick.forget_set):
        return Control("ideal", models["ideal"])
    if holdout := [r for r in models["target"].get("holdout", []) if r.get("generated") is not None or "text" in r]:
        return Control("holdout", {yardstick.forget_set: holdout})
    if models.get("prior", {}).get(yardstick.forget_set):
        return Control("prior", models["prior"])
    return None


def _forgotten(
    models: Models,
    yardstick: Yardstick,
    target: Sequence[Record],
    unlearned: Sequence[Record],
    control: Control | None,
) -> Forgotten:
    check, name = yardstick.is_recited, yardstick.forget_set
    recited = {"target": sum(map(check, target)), "unlearned": sum(map(check, unlearned))}
    others = control.records[name] if control else []
    if control:
        recited[control.name] = sum(map(check, others))
    prior = models.get("prior", {}).get(name, [])
    if [record.get("index") for record in prior] == [record.get("index") for record in target]:
        recited["prior"] = sum(map(check, prior))
    left = {}
    for place, score in yardstick.left_scores if control else ():
        assert control is not None, "only a control has a gap to it"
        sides = [models[model].get(place, []) for model in ("unlearned", "target")]
        if (gap := _gap_left(sides[0], sides[1], control, place, score)) is not None:
            left[score if place == name else f"{score} ({place})"] = gap
    excess = None
    if control:
        own = recited["unlearned"] / len(target), independent_rows(unlearned, check)
        excess = difference_of_shares(own, (recited[control.name] / len(others), independent_rows(others, check)))
    return Forgotten(
        rows=len(target),
        recited=recited,
        control=control.name if control else None,
        control_rows=len(others),
        excess=excess,
        left=left,
        changed=count_changed(target, unlearned),
        unit=yardstick.unit,
        subjects=count_subjects(target),
    )


def independent_rows(records: Sequence[Record], check: Callable[[Record], bool]) -> float:
    """Return the number of independent rows, by how alike the extraction strengths of one subject's rows are.

    Recited rows themselves say too little of that where there are hardly any.
    """
    strengths = [score_of(record, "extraction_strength") for record in records]
    values = [float(check(r)) if s is None else s for r, s in zip(records, strengths, strict=True)]
    return effective_rows(values, unit_of_rows(records))


@dataclass(frozen=True)
class _Share:
    """An estimate of (U − C) / (T − C), the means of unlearned model, target and rows that no model saw."""

    value: float
    own: dict[Hashable, float]
    """What each unit of the scored rows adds to the deviation."""
    unseen: dict[Hashable, float]
    """What each unit of the unseen rows adds."""


def _share_of_gap(
    unlearned: Sequence[Record], target: Sequence[Record], unseen: Sequence[Record], score: str
) -> _Share | None:
    """Return what is left of the target's lead over unseen rows; None without rows, or where it is below `LEAST`.

    With R = (U − C) / (T − C), its deviation is the sum over rows of (u − U − R (t − T)) / n (T − C), and over the m
    unseen rows of −(1 − R) (c − C) / m (T − C). Without unseen rows C is 0.
    """
    after, before, units = _pairs(unlearned, target, score)
    rows = [record for record in unseen if score_of(record, score) is not None]
    values = column_of(rows, score)
    level = float(values.mean()) if rows else 0.0
    gap = float(before.mean()) - level if len(before) else 0.0
    if gap < LEAST:
        return None
    value = (float(after.mean()) - level) / gap
    own = (after - after.mean() - value * (before - before.mean())) / (gap * len(before))
    theirs = -(1 - value) * (values - level) / (gap * len(rows)) if rows else values
    return _Share(value, add_up(units, own), add_up(unit_of_rows(rows), theirs))


def _gap_left(
    unlearned: Sequence[Record], target: Sequence[Record], control: Control, name: str, score: str
) -> Bound | None:
    """Return the share of the gap between target and control that is left of a score; None where there is no gap.

    The ideal and the prior are scored on the same rows as the target, so their units are the same.
    """
    unseen = control.records.get(name, ())
    share = _share_of_gap(unlearned, target, unseen, score) if len(column_of(unseen, score)) else None
    if share is None:
        return None
    samples = [share.own, share.unseen] if control.name == "holdout" else [_added([share.own, share.unseen])]
    return bounded(share.value, *samples)


def kept_of(
    target: Sequence[Record], unlearned: Sequence[Record], yardstick: Yardstick, control: Control | None
) -> Kept | None:
    """Return the mean over scores of S = (U − H) / (T − H), H being the control's level on unseen rows.

    None where there are no rows, or the target knows no more of them than of unseen rows, in any score (`LEAST`). The
    bounds take the gains of a score along, though each counts at most 1.
    """
    unseen = control.records.get(yardstick.unseen_set, ()) if control and yardstick.unseen_set else ()
    estimates = {score: _share_of_gap(unlearned, target, unseen, score) for score in yardstick.retain_scores}
    shares = {score: share for score, share in estimates.items() if share is not None}
    if not shares:
        return None
    samples = [_added([share.own for share in shares.values()]), _added([share.unseen for share in shares.values()])]
    means = [{unit: sum_ / len(shares) for unit, sum_ in sample.items()} for sample in samples if sample]
    value = sum(min(1.0, max(0.0, share.value)) for share in shares.values()) / len(shares)
    check = yardstick.is_kept
    return Kept(
        share=bounded(value, *means),
        rows=len(target),
        shares={score: share.value for score, share in shares.items()},
        recited={"target": sum(map(check, target)), "unlearned": sum(map(check, unlearned))} if check else {},
        changed=count_changed(target, unlearned),
        unit=yardstick.retain_unit,
        subjects=count_subjects(target),
    )


def _added(samples: Sequence[Mapping[Hashable, float]]) -> dict[Hashable, float]:
    """Return the sum of what each unit adds in several samples of the same rows."""
    units = dict.fromkeys(unit for sample in samples for unit in sample)
    return {unit: math.fsum(sample.get(unit, 0.0) for sample in samples) for unit in units}


def column_of(records: Iterable[Record], score: str) -> np.ndarray:
    """Return a score of records, without those where it is not defined."""
    return np.array([value for r in records if (value := score_of(r, score)) is not None], np.float64)


def _pairs(
    unlearned: Sequence[Record], target: Sequence[Record], score: str
) -> tuple[np.ndarray, np.ndarray, list[Hashable]]:
    """Return a score of both models on the rows where both have it, and the units of these rows."""
    rows = [
        (after, before, unit)
        for u, t, unit in zip(unlearned, target, unit_of_rows(target), strict=True)
        if (after := score_of(u, score)) is not None and (before := score_of(t, score)) is not None
    ]
    sides = np.array([[after, before] for after, before, _ in rows], np.float64).reshape(len(rows), 2)
    return sides[:, 0], sides[:, 1], [unit for _, _, unit in rows]


def score_of(record: Record, score: str) -> float | None:
    """Return a record's score. An accuracy that the record lacks is computed from its answers."""
    value = record.get(score)
    if value is None and score == "accuracy" and record.get("generated") is not None and "answer" in record:
        return answers.accuracy(record["answer"], record["generated"])
    return value


def count_changed(target: Sequence[Record], unlearned: Sequence[Record]) -> int:
    """Count the rows on which the two models do not say the same."""
    return sum(not _says_the_same(t, u) for t, u in zip(target, unlearned, strict=True))


def _says_the_same(target: Record, unlearned: Record) -> bool:
    if "generated" in target:
        return bool(target["generated"] == unlearned.get("generated"))
    before, after = (score_of(record, "probability") or 0.0 for record in (target, unlearned))
    return abs(before - after) < 1e-6


@dataclass(frozen=True)
class Standing:
    """A candidate beside the control: what the choice of strengths looks at."""

    inside: bool
    """True if it recites no more than the control may by its upper bound, and no score lies above the control's."""
    above: Sequence[str]
    """The figures that lie above the control's bounds, in words."""
    kept: float
    """What is kept of the retain set, as `Kept.share`; 1 without retain rows."""
    distance: float
    """(mean |forget score − control| + mean |retain score − the target's|) / 2, in [0, 1]: the distance to the ideal,
    estimated without one."""
    forgotten: Forgotten
    """What was measured of the forget set, as the verdict has it."""


def stand(models: Models, yardstick: Yardstick) -> Standing | str:
    """Return how the model "unlearned" stands beside the control, or the reason why nothing can be said.

    Without a control the level of unseen rows is 0, in the place of a better one.
    """
    weighed = weigh_recited(models, yardstick)
    if isinstance(weighed, str):
        return weighed
    forgotten, kept = weighed
    control = find_control(models, yardstick)
    unseen: Records = control.records if control else {}
    above = []
    most = 0.0
    if control:
        rows = independent_rows(unseen[yardstick.forget_set], yardstick.is_recited)
        most = share_bound(forgotten.control_share, rows)
    if forgotten.share("unlearned") > most:
        above.append(f"{forgotten.recited['unlearned']} of {forgotten.rows} are recited, at most {most:.0%} wanted")
    for place, score in yardstick.left_scores:
        value, bound = _mean(models["unlearned"], place, score), _upper(unseen.get(place, ()), score)
        if value is not None and value > bound:
            above.append(f"{score_label(score)} is {value:.4f}, at most {bound:.4f} wanted")
    own, before, retain = models["unlearned"], models["target"], yardstick.retain_set
    far = [(_mean(own, *at), _mean(unseen, *at) if control else 0.0) for at in yardstick.near_scores]
    lost = [(_mean(own, retain, score), _mean(before, retain, score)) for score in yardstick.retain_scores]
    distance = (_mean_distance(far) + _mean_distance(lost)) / 2
    return Standing(not above, above, kept.share.value if kept else 1.0, distance, forgotten)


def _upper(records: Sequence[Record], score: str) -> float:
    """Return the upper bound of the mean of a score; 0 where no record has it."""
    rows = [record for record in records if score_of(record, score) is not None]
    values = column_of(rows, score)
    if not rows:
        return 0.0
    return bounded(float(values.mean()), add_up(unit_of_rows(rows), (values - values.mean()) / len(values))).high


def _mean(records: Records, name: str, score: str) -> float | None:
    values = column_of(records.get(name, ()), score)
    return float(values.mean()) if len(values) else None


def _mean_distance(pairs: Sequence[tuple[float | None, float | None]]) -> float:
    """Return the mean distance of the pairs of which both values are there; 0 without any."""
    distances = [abs(first - second) for first, second in pairs if first is not None and second is not None]
    return sum(distances) / len(distances) if distances else 0.0
