"""Compute what a run's models have forgotten and kept, from their records: the numbers that its verdict rests on.

These are pure functions of per-item records; nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from msa_lite.evals import scoring
from msa_lite.evals.benchmark import Models, Record, Weighed
from msa_lite.report.reports import Z95
from msa_lite.report.verdict import Forgotten, Kept, Unit, percent

RECITED = 0.9  # a text counts as recited from this share of predicted tokens, or this ROUGE-L, on
_NOUNS: Mapping[Unit, str] = {"texts": "texts", "passages": "passages"}  # all others are rows
LEAST = 0.05  # a target's score counts from this distance above the floor on; below, the share left of it is noise


class Yardstick(NamedTuple):
    """The sets and scores that say what can be extracted from a model, and what it has kept."""

    unit: Unit
    """The units of the forget set."""
    forget_set: str
    """The set of the items to forget."""
    forget_scores: Sequence[tuple[str, str]]
    """(set, score) of everything that can be extracted."""
    retain_set: str
    """The set of the items to keep."""
    retain_scores: Sequence[str]
    """The scores of the items to keep."""
    what: str
    """The whole that the kept share is of, in words."""
    is_recited: Callable[[Record], bool]
    """The check whether an item of the forget set is recited."""


def is_recited(record: Record) -> bool:
    """Check whether a row is recited.

    A question is recited where the whole reference stands in the greedy answer, a text where 90 % of its tokens are
    predicted (`RECITED`).
    """
    if "text" in record:
        return (record.get("exact_memorization") or 0.0) >= RECITED
    return score_of(record, "accuracy") == 1.0


_QUESTIONS = Yardstick(
    unit="questions",
    forget_set="forget",
    forget_scores=[("forget", name) for name in ("accuracy", "rouge_l", "extraction_strength")],
    retain_set="retain",
    retain_scores=("rouge_l", "probability"),
    what="what it answered before",
    is_recited=is_recited,
)
_TEXTS = Yardstick(
    unit="texts",
    forget_set="forget",
    forget_scores=[("forget", name) for name in ("exact_memorization", "extraction_strength")],
    retain_set="retain",
    retain_scores=("exact_memorization", "probability"),
    what="what it knew before",
    is_recited=is_recited,
)


def weigh_rows(models: Models) -> Weighed:
    """Return `weigh_recited` of forget and retain sets that hold questions, or texts alone."""
    texts = ["text" in record for record in models["target"].get("forget", ())]
    yardstick = _QUESTIONS._replace(unit="rows") if any(texts) else _QUESTIONS
    return weigh_recited(models, _TEXTS if all(texts) else yardstick)


def weigh_recited(models: Models, yardstick: Yardstick) -> Weighed:
    """Return how much of the forget set is still recited or can be extracted, and how much of the retain set is kept.

    Forget scores are held against a floor: the ideal's score. Without an ideal it is the higher of what the target
    scores on holdout rows and the prior on the forget rows; 0 without either.
    """
    target, unlearned = (models[name].get(yardstick.forget_set, []) for name in ("target", "unlearned"))
    if not target:
        return "no rows of the forget set were scored; give evaluate.forget"
    before, after = (models[name].get(yardstick.retain_set, []) for name in ("target", "unlearned"))
    kept = kept_of(before, after, yardstick.retain_scores, yardstick.what)
    return _forgotten(models, yardstick, target, unlearned), kept


def _forgotten(
    models: Models, yardstick: Yardstick, target: Sequence[Record], unlearned: Sequence[Record]
) -> Forgotten:
    check = yardstick.is_recited
    recited = {
        name: sum(map(check, models[name][yardstick.forget_set])) for name in ("target", "unlearned", "ideal")
        if name in models
    }  # fmt: skip
    holdout = [r for r in models["target"].get("holdout", []) if r.get("generated") is not None or "text" in r]
    if holdout:
        recited["holdout"] = sum(map(check, holdout))
    prior = models.get("prior", {}).get(yardstick.forget_set, [])
    if [record.get("index") for record in prior] == [record.get("index") for record in target]:
        recited["prior"] = sum(map(check, prior))
    gone = sum(check(t) and not check(u) for t, u in zip(target, unlearned, strict=True))
    left = left_over(models, yardstick.forget_scores)
    noun = _NOUNS.get(yardstick.unit, "rows")
    sentence = _sentence(gone, recited, len(holdout), len(target), left, noun)
    changed = count_changed(target, unlearned)
    return Forgotten(sentence, len(target), left, recited, changed, yardstick.unit, gone, len(holdout))


def _sentence(gone: int, recited: Mapping[str, int], holdout: int, rows: int, left: float | None, noun: str) -> str:
    """Say what happened to the rows. Where the target recites few of them, the share that is left says more.

    gone: the rows that the unlearned model no longer recites. holdout: the rows of the holdout set that could be.
    """
    before = recited["target"]
    others = f"; holdout: {recited['holdout']} of {holdout}" if holdout else ""
    others += f"; ideal: {recited['ideal']}" if "ideal" in recited else ""
    share = f", and {percent(left)} is left of what could be extracted" if left is not None else ""
    if before == rows:
        return f"{gone} of {rows} {noun} are no longer recited (before: {before}{others}){share}"
    if before:
        return f"{gone} of the {before} {noun} recited before are no longer recited (of {rows}{others}){share}"
    return f"none of {rows} {noun} was recited word by word before{share or ', nor could anything be extracted'}"


def left_over(models: Models, scores: Sequence[tuple[str, str]]) -> float | None:
    """Return the mean over scores of (u − h) / (t − h), clipped to [0, 1]; None where no score counts.

    u is the unlearned model's score, t the target's, h the floor. A score counts where the target has clearly more than
    the floor (`LEAST`).
    """
    shares = []
    for name, score in scores:
        before, after = (_mean(models[model].get(name, []), score) for model in ("target", "unlearned"))
        floor = _floor(models, name, score)
        if before is not None and before - floor >= LEAST:
            shares.append(min(1.0, max(0.0, ((after or 0.0) - floor) / (before - floor))))
    return sum(shares) / len(shares) if shares else None


def _floor(models: Models, name: str, score: str) -> float:
    if "ideal" in models:
        return _mean(models["ideal"].get(name, []), score) or 0.0
    unseen = [_mean(models["target"].get("holdout", []), score), _mean(models.get("prior", {}).get(name, []), score)]
    return max((value for value in unseen if value is not None), default=0.0)


def kept_of(target: Sequence[Record], unlearned: Sequence[Record], scores: Sequence[str], what: str) -> Kept | None:
    """Return the mean over scores of Σu / Σt, with its 95 % interval over the paired rows, by the delta method.

    None where there are no rows, or the target knows nothing of them.
    """
    table = [[[score_of(record, score) for score in scores] for record in side] for side in (target, unlearned)]
    pairs = [(t, u) for t, u in zip(*table, strict=True) if None not in (*t, *u)]
    if not pairs:
        return None
    before, after = (np.array(side, float) for side in zip(*pairs, strict=True))  # (rows, scores)
    defined = before.mean(0) > 0
    if not defined.any():
        return None
    before, after = before[:, defined], after[:, defined]
    shares = after.sum(0) / before.sum(0)
    influence = ((after - shares * before) / before.mean(0)).mean(1)
    margin = Z95 * (scoring.standard_error(influence) or 0.0)
    share = float(shares.mean())
    interval = max(0.0, share - margin), share + margin
    return Kept(share, interval, len(pairs), what, count_changed(target, unlearned))


def score_of(record: Record, score: str) -> float | None:
    """Return a record's score. An accuracy that the record lacks is computed from its answers."""
    value = record.get(score)
    if value is None and score == "accuracy" and record.get("generated") is not None:
        return scoring.accuracy(record["answer"], record["generated"])
    return value


def _mean(records: Sequence[Record], score: str) -> float | None:
    values = [value for record in records if (value := score_of(record, score)) is not None]
    return sum(values) / len(values) if values else None


def count_changed(target: Sequence[Record], unlearned: Sequence[Record]) -> int:
    """Count the rows on which the two models do not say the same."""
    return sum(not _says_the_same(t, u) for t, u in zip(target, unlearned, strict=True))


def _says_the_same(target: Record, unlearned: Record) -> bool:
    if "generated" in target:
        return bool(target["generated"] == unlearned.get("generated"))
    before, after = (score_of(record, "probability") or 0.0 for record in (target, unlearned))
    return abs(before - after) < 1e-6
