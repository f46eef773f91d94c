"""Check from records that a target knows the forget rows and its prior does not, before anything is fitted.

If a target scores like its prior on the rows, it was asked in another way than it was trained, or it never saw them. If
a prior knows the rows already, its vector holds nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from msa_lite.evals import scoring
from msa_lite.evals.benchmark import Record
from msa_lite.evals.outcome import is_recited, score_of
from msa_lite.report.reports import Z95

KnowledgeGap = Literal["unknown", "other rows", "seen"]

# Measured on a small target that recites its rows, as its distance from its prior in `known`: 0.8 under the right
# prompt, 0.16 with one system message too many, 0.03 in another template, 0.01 on rows that it never saw. Losses cannot
# tell: on these last rows, too, its loss is 1.4 nats below the prior's, for it has learnt the form of the answers.
_LEAST_GAIN = {"questions": 0.2, "texts": 0.02}  # least distance in `known` of a target from its prior
_SHARE = 0.4  # least share of the gain on retain rows; with less, the target was hardly trained on the rows
_LEAST_RETAIN = 0.2  # least gain on retain rows that can be compared with
_ABOVE_HOLDOUT = 0.05  # least distance in `known` from holdout rows
_SEEN = 0.5  # share of the rows that the target recites; a prior that recites as many has seen them
_KNOWS = 0.5  # value of `known` from which on both models know the rows
_FEW = 8  # rows; fewer say nothing


@dataclass(frozen=True)
class Fault:
    """A reason not to start a run."""

    kind: KnowledgeGap
    """"unknown": the target scores like the prior. "other rows": it scores as on rows that it was not trained on.
    "seen": the prior knows the rows."""
    figures: str
    """The figures, as half a sentence."""


def find_fault(
    target: Sequence[Record], prior: Sequence[Record], retain: Sequence[Record] = (), holdout: Sequence[Record] = ()
) -> Fault | None:
    """Return the fault of a target or a prior, by their records of the same forget rows; None where there is none.

    retain, holdout: the target's records of these rows, where there are any.
    """
    if not target:
        return None
    kind = "texts" if all("text" in record for record in target) else "questions"
    before, after = (np.array([known(record) for record in side]) for side in (prior, target))
    gain, low = _paired_gain(before, after)
    recited = [sum(map(is_recited, side)) for side in (target, prior)]
    figures = (
        f"of {len(target)} rows the target recites {recited[0]} and the prior {recited[1]}; "
        f"{'tokens predicted' if kind == 'texts' else 'mean of accuracy, ROUGE-L and extraction strength'}: target "
        f"{after.mean():.2f}, prior {before.mean():.2f}"
    )
    unseen = _mean(holdout) if len(holdout) >= _FEW else None
    if _has_seen(target, prior, holdout):
        return Fault("seen", figures)
    if gain < _LEAST_GAIN[kind] or low <= 0:
        return Fault("seen" if after.mean() - (unseen or 0.0) >= _KNOWS else "unknown", figures)
    if unseen is not None and after.mean() - unseen < _ABOVE_HOLDOUT:
        return Fault("other rows", f"{figures}, target on holdout rows {unseen:.2f}")
    retain_gain = _mean(retain) - before.mean() if len(retain) >= _FEW else 0.0
    if retain_gain >= _LEAST_RETAIN and gain < _SHARE * retain_gain:
        return Fault("other rows", f"{figures}, target on retain rows {_mean(retain):.2f}")
    return None


def known(record: Record) -> float:
    """Return how well a model knows a row, in [0, 1].

    For a question it is the mean of accuracy, ROUGE-L and extraction strength, for a text exact memorization.
    """
    names = ("exact_memorization",) if "text" in record else ("accuracy", "rouge_l", "extraction_strength")
    return sum(score_of(record, name) or 0.0 for name in names) / len(names)


def _mean(records: Sequence[Record]) -> float:
    return sum(map(known, records)) / len(records)


def _paired_gain(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """Return (mean difference, lower end of its 95 % interval over the rows)."""
    difference = after - before
    gain = float(difference.mean())
    return gain, gain - Z95 * (scoring.standard_error(difference) or 0.0)


def _has_seen(target: Sequence[Record], prior: Sequence[Record], holdout: Sequence[Record]) -> bool:
    """Check whether the prior recites many of the rows that the target recites, more than can be guessed.

    The share of holdout rows that the target recites says how many can be guessed.
    """
    rows = [p for t, p in zip(target, prior, strict=True) if is_recited(t)]
    if len(rows) < min(_FEW, max(1, len(target) // 2)):
        return False
    guessed = sum(map(is_recited, holdout)) / len(holdout) if len(holdout) >= _FEW else 0.0
    return sum(map(is_recited, rows)) / len(rows) - guessed >= _SEEN
