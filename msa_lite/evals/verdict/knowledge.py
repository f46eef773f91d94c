"""Check from records that a target knows the forget rows and its prior does not, before anything is fitted.

If a target scores like its prior on the rows, it was asked in another way than it was trained, or it never saw them. If
a prior knows the rows already, its vector holds nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from msa_lite.evals.engine import scoring
from msa_lite.evals.verdict.bounds import Record
from msa_lite.evals.verdict.outcome import is_recited, score_of
from msa_lite.report.tables.reports import Z95

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
    reason: str
    """What is at fault with the model, with the figures that were compared: "it is hardly better on them than …"."""
    figures: str
    """The other figures, as half a sentence."""


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
    mine, base, least = float(after.mean()), float(before.mean()), _LEAST_GAIN[kind]
    if seen := _rows_seen(target, prior, holdout):
        return Fault("seen", f"it recites {seen[0]} of the {seen[1]} that the target recites", figures)
    if gain < least or low <= 0:
        if mine - (unseen or 0.0) >= _KNOWS:
            return Fault("seen", f"it knows them about as well as the target: {base:.2f} against {mine:.2f}", figures)
        if gain < least:
            reason = f"it is hardly better on them than the prior: {_against(mine, base, base + least)}"
        else:
            reason = (
                f"it is not surely better on them than the prior: {mine:.2f} against {base:.2f}, and the 95 % interval "
                f"of the difference begins at {low:.2f}"
            )
        return Fault("unknown", reason, figures)
    if unseen is not None and mine - unseen < _ABOVE_HOLDOUT:
        reason = "it is hardly better on them than on the holdout rows, which it was not trained on"
        reason = f"{reason}: {_against(mine, unseen, unseen + _ABOVE_HOLDOUT)}"
        return Fault("other rows", reason, f"{figures}, target on holdout rows {unseen:.2f}")
    retain_gain = _mean(retain) - base if len(retain) >= _FEW else 0.0
    if retain_gain >= _LEAST_RETAIN and gain < _SHARE * retain_gain:
        reason = "it learnt far less of them than of the retain rows"
        reason = f"{reason}: {_against(gain, retain_gain, _SHARE * retain_gain)} (each above the prior)"
        return Fault("other rows", reason, f"{figures}, target on retain rows {_mean(retain):.2f}")
    return None


def weak_sets(
    target: Sequence[Record], prior: Sequence[Record], retain: Sequence[Record] = (), holdout: Sequence[Record] = ()
) -> list[str]:
    """Return a sentence for each set that can show nothing, by scores of a target that knows the forget rows.

    If the control is recited as often as the forget rows, it shows of no row that it was forgotten. Of rows that the
    target does not know, nothing can be kept. Arguments as of `find_fault`; sets of fewer than 8 rows say nothing.
    """
    notes = []
    mine, theirs = (sum(map(is_recited, side)) for side in (target, holdout))
    if len(holdout) >= _FEW and mine and theirs * len(target) >= mine * len(holdout):
        notes.append(
            f"the holdout rows are no control: the target recites {theirs} of {len(holdout)} of them, and {mine} of "
            f"{len(target)} forget rows; give rows that it was not trained on, and whose answers nobody can guess"
        )
        holdout = ()
    if len(retain) >= _FEW and (len(holdout) >= _FEW or prior):
        kind = "texts" if all("text" in record for record in target) else "questions"
        name, unseen, least = "the prior's of the forget rows", prior, _LEAST_GAIN[kind]
        if len(holdout) >= _FEW:
            name, unseen, least = "those of the holdout rows", holdout, _ABOVE_HOLDOUT
        if (level := _mean(retain)) - (base := _mean(unseen)) < least:
            notes.append(
                "what is kept cannot be shown: the target does not know the retain rows. Its scores are hardly above "
                f"{name}: {_against(level, base, base + least)}; give retain rows that it was trained on"
            )
    return notes


def _against(value: float, other: float, wanted: float) -> str:
    """Return "0.26 against 0.09, and 0.29 at least is wanted", with as many digits as tell the first from the last."""
    digits = next((n for n in (2, 3) if round(value, n) < round(wanted, n)), 4)
    return f"{value:.{digits}f} against {other:.{digits}f}, and {wanted:.{digits}f} at least is wanted"


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


def _rows_seen(target: Sequence[Record], prior: Sequence[Record], holdout: Sequence[Record]) -> tuple[int, int] | None:
    """Return how many of the rows that the target recites the prior recites too, if more than guessing explains.

    The share of holdout rows that the target recites says how many can be guessed. None if the prior shows no signs.
    """
    rows = [p for t, p in zip(target, prior, strict=True) if is_recited(t)]
    if len(rows) < min(_FEW, max(1, len(target) // 2)):
        return None
    guessed = sum(map(is_recited, holdout)) / len(holdout) if len(holdout) >= _FEW else 0.0
    both = sum(map(is_recited, rows))
    return (both, len(rows)) if both / len(rows) - guessed >= _SEEN else None
