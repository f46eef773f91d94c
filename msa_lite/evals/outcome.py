"""What the records of a run's models say of forgetting and keeping: the numbers that its verdict rests on.

Pure functions of per-item records: nothing here runs a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from msa_lite.evals import scoring
from msa_lite.evals.benchmark import Record, Records
from msa_lite.evals.restor import QUESTIONS, Restor, record_score
from msa_lite.report.verdict import Forgotten, Kept, percent

RECITED = 0.9  # of a text's tokens predicted, or of a passage's ROUGE-L, from which on it counts as recited
_LEAST = 0.05  # that a score of the target lies above the floor; below it, what is left of it would be noise
_Z95 = 1.96

Models = Mapping[str, Records]
"""Records by set of "target" and "unlearned", of "ideal" where there is one, and of "prior" where it was scored."""


class _Scores(NamedTuple):
    """The scores, by set, that measure what can be drawn out and what is kept."""

    noun: str
    exposed: Sequence[tuple[str, str]]  # (set, score)
    kept: tuple[str, Sequence[str]]
    what: str


_QUESTIONS = _Scores(
    "rows",
    [("forget", name) for name in ("accuracy", "rouge_l", "extraction_strength")],
    ("retain", ("rouge_l", "probability")),
    "what it answered before",
)
_TEXTS = _Scores(
    "texts",
    [("forget", name) for name in ("exact_memorization", "extraction_strength")],
    ("retain", ("exact_memorization", "probability")),
    "what it knew before",
)
_MUSE = _Scores(
    "passages",
    [("verbmem", "rouge_l_f1"), ("verbmem", "extraction_strength"), ("knowmem_forget", "rouge_l_f1")],
    ("knowmem_retain", ("rouge_l_f1",)),
    "what it answered before",
)


def weigh(benchmark: str, models: Models) -> tuple[Forgotten, Kept | None] | str:
    """Return what became of the forget and the retain set, or the reason why nothing can be said.

    benchmark: qa, tofu, muse or restor. The floor that forget scores are held against is the ideal's score; without
    an ideal, the higher of what the target scores on holdout rows and the prior on the forget rows; 0 without either.
    """
    if benchmark == "restor":
        return _regained(models)
    target, unlearned = models["target"], models["unlearned"]
    first = "verbmem" if benchmark == "muse" else "forget"
    if not target.get(first):
        return "no rows of the forget set were scored; give evaluate.forget"
    texts = all("text" in record for record in target[first])
    scores = _MUSE if benchmark == "muse" else _TEXTS if texts else _QUESTIONS
    name, columns = scores.kept
    kept = kept_of(target.get(name, []), unlearned.get(name, []), columns, scores.what)
    return _forgotten(models, first, scores), kept


def _forgotten(models: Models, first: str, scores: _Scores) -> Forgotten:
    target, unlearned = models["target"][first], models["unlearned"][first]
    recited = {name: sum(map(is_recited, models[name][first])) for name in ("target", "unlearned", "ideal")
               if name in models}  # fmt: skip
    holdout = models["target"].get("holdout", [])
    known = [record for record in holdout if record.get("generated") is not None or "text" in record]
    if known:
        recited["holdout"] = sum(map(is_recited, known))
    gone = sum(is_recited(t) and not is_recited(u) for t, u in zip(target, unlearned, strict=True))
    left = left_over(models, scores.exposed)
    said = _said(gone, recited, len(known), len(target), left, scores.noun)
    return Forgotten(said, len(target), left, recited, _count_changed(target, unlearned))


def _said(gone: int, recited: Mapping[str, int], holdout: int, rows: int, left: float | None, noun: str) -> str:
    """Say what happened to the rows. Where the target recites few of them, the share that is left says more.

    holdout: rows of the holdout set that could be recited.
    """
    before = recited["target"]
    others = f"; holdout: {recited['holdout']} of {holdout}" if holdout else ""
    others += f"; ideal: {recited['ideal']}" if "ideal" in recited else ""
    share = f", and {percent(left)} is left of what could be drawn out" if left is not None else ""
    if before == rows:
        return f"{gone} of {rows} {noun} are no longer recited (before: {before}{others}){share}"
    if before:
        return f"{gone} of the {before} {noun} recited before are no longer recited (of {rows}{others}){share}"
    return f"none of {rows} {noun} was recited word by word before{share or ', nor could anything be drawn out'}"


def is_recited(record: Record) -> bool:
    """Check whether a row is recited.

    A question is where the whole reference stands in the greedy answer. A text is where 90 % of its tokens are
    predicted, a passage where its ROUGE-L is 0.9 (`RECITED`).
    """
    if "text" in record:
        return (record.get("exact_memorization") or 0.0) >= RECITED
    if "gt" in record:
        return (record.get("rouge_l_f1") or 0.0) >= RECITED
    return score_of(record, "accuracy") == 1.0


def left_over(models: Models, exposed: Sequence[tuple[str, str]]) -> float | None:
    """The mean over scores of (u − h) / (t − h), clipped to [0, 1]: u the unlearned model's, t the target's, h the
    floor. Scores of which the target has hardly more than the floor are left out; None where all are.
    """
    shares = []
    for name, score in exposed:
        known, now = (_mean(models[model].get(name, []), score) for model in ("target", "unlearned"))
        floor = _floor(models, name, score)
        if known is not None and known - floor >= _LEAST:
            shares.append(min(1.0, max(0.0, ((now or 0.0) - floor) / (known - floor))))
    return sum(shares) / len(shares) if shares else None


def _floor(models: Models, name: str, score: str) -> float:
    if "ideal" in models:
        return _mean(models["ideal"].get(name, []), score) or 0.0
    unseen = [_mean(models["target"].get("holdout", []), score), _mean(models.get("prior", {}).get(name, []), score)]
    return max((value for value in unseen if value is not None), default=0.0)


def kept_of(target: Sequence[Record], unlearned: Sequence[Record], scores: Sequence[str], what: str) -> Kept | None:
    """The mean over scores of Σu / Σt, with its 95 % interval over the rows, paired: by the delta method.

    None where there are no rows, or the target knows nothing of them.
    """
    table = [[[score_of(record, score) for score in scores] for record in side] for side in (target, unlearned)]
    pairs = [(t, u) for t, u in zip(*table, strict=True) if None not in (*t, *u)]
    if not pairs:
        return None
    before, after = (np.array(side, float) for side in zip(*pairs, strict=True))  # (rows, scores)
    known = before.mean(0) > 0
    if not known.any():
        return None
    before, after = before[:, known], after[:, known]
    shares = after.sum(0) / before.sum(0)
    influence = ((after - shares * before) / before.mean(0)).mean(1)
    error = float(influence.std(ddof=1)) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
    share = float(shares.mean())
    interval = max(0.0, share - _Z95 * error), share + _Z95 * error
    return Kept(share, interval, len(pairs), what, _count_changed(target, unlearned))


def _regained(models: Models) -> tuple[Forgotten, Kept | None] | str:
    """RESTOR: documents full of falsehoods are forgotten as far as answers are right again that they had spoilt."""
    if "ideal" not in models:
        return "restor needs an ideal, which never read the documents, to say what was regained; give evaluate.ideal"
    values = {name: Restor.metrics(models[name], None) for name in ("target", "unlearned", "ideal")}
    metric = "accuracy_corrupted" if values["target"]["accuracy_corrupted"].n else "accuracy"
    target, unlearned, ideal = (values[name][metric].value or 0.0 for name in values)
    if ideal - target < _LEAST:
        return f"the target answers as well as the ideal ({target:.3f}, {ideal:.3f}), so there is nothing to regain"
    regained = min(1.0, max(0.0, (unlearned - target) / (ideal - target)))
    said = (
        f"{percent(regained)} of what the documents cost is regained ({metric.replace('_', ' ')}: target {target:.3f}, "
        f"unlearned {unlearned:.3f}, ideal {ideal:.3f})"
    )
    sides = [models[name][QUESTIONS] for name in ("target", "unlearned")]
    judged = any("judge" in record for side in sides for record in side)
    scored = [[record | {"score": record_score(record, judged)} for record in side] for side in sides]
    others = [[record for record in side if not record["corrupted"]] for side in scored]
    spoilt = [[record for record in side if record["corrupted"]] or side for side in scored]
    kept = kept_of(others[0], others[1], ("score",), "what it answered before of other entities")
    return Forgotten(said, values["target"][metric].n, 1.0 - regained, changed=_count_changed(*spoilt)), kept


def score_of(record: Record, score: str) -> float | None:
    """A record's score; tofu's records have no accuracy, but all that it is made of."""
    value = record.get(score)
    if value is None and score == "accuracy" and record.get("generated") is not None:
        return scoring.accuracy(record["answer"], record["generated"])
    return value


def _mean(records: Sequence[Record], score: str) -> float | None:
    values = [value for record in records if (value := score_of(record, score)) is not None]
    return sum(values) / len(values) if values else None


def _count_changed(target: Sequence[Record], unlearned: Sequence[Record]) -> int:
    """Rows of which the two models do not say the same."""
    return sum(not _says_the_same(t, u) for t, u in zip(target, unlearned, strict=True))


def _says_the_same(target: Record, unlearned: Record) -> bool:
    if "generated" in target:
        return bool(target["generated"] == unlearned.get("generated"))
    before, after = (score_of(record, "probability") or 0.0 for record in (target, unlearned))
    return abs(before - after) < 1e-6
