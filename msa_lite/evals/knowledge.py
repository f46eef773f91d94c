"""Does a target know the forget rows, and does its prior not? What their records say, before anything is fitted.

A target that scores like its prior on the rows was asked in another way than it was trained, or is about to forget
rows that it never saw; and a prior that knows them already gives a vector that holds none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from msa_lite.evals import scoring
from msa_lite.evals.benchmark import Record
from msa_lite.evals.outcome import is_recited, score_of

KnowledgeGap = Literal["unknown", "other rows", "seen"]

# Measured on a small target that recites its rows: under the right prompt it is 0.8 above its prior in `known`; with a
# system message too many 0.16, in another template 0.03; on rows never trained on 0.01, although its loss on these is
# 1.4 nats below the prior's, since it has learnt the form of the answers. So losses cannot tell.
_LEAST_GAIN = {"questions": 0.2, "texts": 0.02}  # of `known`, by which a target has to be above its prior
_SHARE = 0.4  # of the gain on retain rows, below which rows look as if they had not been trained on
_LEAST_RETAIN = 0.2  # gain on retain rows that is needed to compare with
_ABOVE_HOLDOUT = 0.05
_SEEN = 0.5  # of the rows that the target recites, from which on a prior that recites them has seen them
_KNOWS = 0.5  # of `known`, from which on both models know the rows
_FEW = 8  # rows, of which nothing is told from


@dataclass(frozen=True)
class Fault:
    """A reason not to start a run, with its figures as half a sentence.

    kind: "unknown" (the target scores like the prior), "other rows" (it scores as on rows that it was not trained on)
    or "seen" (the prior knows the rows).
    """

    kind: KnowledgeGap
    figures: str


def find_fault(
    target: Sequence[Record], prior: Sequence[Record], retain: Sequence[Record] = (), holdout: Sequence[Record] = ()
) -> Fault | None:
    """Return what is wrong with a target and a prior by their records of the same forget rows; None if nothing is.

    retain, holdout: the target's records of these rows, where there are any.
    """
    if not target:
        return None
    what = "texts" if all("text" in record for record in target) else "questions"
    before, after = (np.array([known(record) for record in side]) for side in (prior, target))
    gain, low = _paired_gain(before, after)
    recited = [sum(map(is_recited, side)) for side in (target, prior)]
    figures = (
        f"of {len(target)} rows the target recites {recited[0]} and the prior {recited[1]}; "
        f"{'tokens predicted' if what == 'texts' else 'mean of accuracy, ROUGE-L and extraction strength'}: target "
        f"{after.mean():.2f}, prior {before.mean():.2f}"
    )
    unseen = _mean(holdout) if len(holdout) >= _FEW else None
    if _has_seen(target, prior, holdout):
        return Fault("seen", figures)
    if gain < _LEAST_GAIN[what] or low <= 0:
        return Fault("seen" if after.mean() - (unseen or 0.0) >= _KNOWS else "unknown", figures)
    if unseen is not None and after.mean() - unseen < _ABOVE_HOLDOUT:
        return Fault("other rows", f"{figures}, target on holdout rows {unseen:.2f}")
    kept = _mean(retain) - before.mean() if len(retain) >= _FEW else 0.0
    if kept >= _LEAST_RETAIN and gain < _SHARE * kept:
        return Fault("other rows", f"{figures}, target on retain rows {_mean(retain):.2f}")
    return None


def known(record: Record) -> float:
    """Return how much of a row a model gives away, in [0, 1].

    Of a question: the mean of accuracy, ROUGE-L and extraction strength. Of a text: exact memorization.
    """
    names = ("exact_memorization",) if "text" in record else ("accuracy", "rouge_l", "extraction_strength")
    return sum(score_of(record, name) or 0.0 for name in names) / len(names)


def _mean(records: Sequence[Record]) -> float:
    return sum(map(known, records)) / len(records)


def _paired_gain(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """(mean difference, lower end of its 95 % interval over the rows)."""
    difference = after - before
    gain = float(difference.mean())
    return gain, gain - scoring.Z95 * (scoring.standard_error(difference) or 0.0)


def _has_seen(target: Sequence[Record], prior: Sequence[Record], holdout: Sequence[Record]) -> bool:
    """Check whether the prior recites many of the rows that the target recites, more than can be guessed.

    What can be guessed is the share of holdout rows that the target recites.
    """
    rows = [p for t, p in zip(target, prior, strict=True) if is_recited(t)]
    if len(rows) < min(_FEW, max(1, len(target) // 2)):
        return False
    guessed = sum(map(is_recited, holdout)) / len(holdout) if len(holdout) >= _FEW else 0.0
    return sum(map(is_recited, rows)) / len(rows) - guessed >= _SEEN
