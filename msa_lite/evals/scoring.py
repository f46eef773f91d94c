"""The metrics, as pure functions of one item: arrays in, numbers out.

Notation of the docstrings: an item has answer tokens x_1 … x_n (labels, the end token included) with
log-probabilities lp_t = log p(x_t | everything before). "Without the last" drops x_n, which is the end token for
questions with answers, as open-unlearning does for memorization metrics. None stands for "not defined for this item";
such items are left out of means and counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np


def probability(log_probs: np.ndarray) -> float | None:
    """exp of the mean log-probability over all n answer tokens, end token included; in (0, 1].

    TOFU's "Probability" (Maini et al., 2024). None for an item without answer tokens.
    """
    return float(np.exp(np.mean(log_probs, dtype=np.float64))) if len(log_probs) else None


def extraction_strength(matches: np.ndarray) -> float:
    """1 − k*/N, where k* is the shortest prefix after which every teacher-forced argmax is right; in [0, 1].

    matches: (N,) booleans over the answer tokens without the last. Nothing right at the end gives 0. (open-unlearning
    gives 1/N there, since its loop ends one step early.) N = 0 gives 0, as nothing can be extracted, and counts.
    Carlini et al., 2021; higher = memorised.
    """
    count = len(matches)
    if not count:
        return 0.0
    wrong = np.flatnonzero(~np.asarray(matches, bool))
    first = int(wrong[-1]) + 1 if len(wrong) else 0
    return 1.0 - first / count


def exact_memorization(matches: np.ndarray) -> float | None:
    """Share of the answer tokens without the last whose teacher-forced argmax is right; in [0, 1]; None for N = 0."""
    return float(np.mean(matches)) if len(matches) else None


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


def rouge_l_recall(reference: str, generated: str) -> float:
    """ROUGE-L recall of a generated answer, Porter stemmer, by the rouge-score package; in [0, 1].

    Only [a-z0-9] counts there, so texts in other scripts score 0.
    """
    return float(_rouge().score(reference, generated)["rougeL"].recall)


def normalise(text: str) -> str:
    """Lower-case words of letters and digits (of any script) with single blanks between them."""
    return " ".join(re.findall(r"\w+", text.lower()))


def accuracy(reference: str, generated: str) -> float:
    """1 when the normalised reference stands whole in the normalised generation, otherwise 0.

    Strict on long answers: a paraphrase of the right fact counts as wrong. A reference without any word counts as 0.
    """
    wanted = normalise(reference)
    return float(bool(wanted) and f" {wanted} " in f" {normalise(generated)} ")


def mean_and_error(values: Sequence[float | None]) -> tuple[float | None, int, float | None]:
    """(mean, n, standard error of the mean) over the values that are defined; the error needs n ≥ 2."""
    known = np.array([v for v in values if v is not None], np.float64)
    if not len(known):
        return None, 0, None
    error = float(np.std(known, ddof=1) / math.sqrt(len(known))) if len(known) > 1 else None
    return float(np.mean(known)), len(known), error


def exposure(metrics: Mapping[str, float | None], reference: Mapping[str, float | None]) -> float:
    """How much of what the target knows of the forget set can still be drawn out, in [0, 1]; lower is better.

    The mean over ROUGE-L, accuracy and extraction strength of (m − h) / (t − h), clipped to [0, 1], where m is the
    point's value on the forget set, t the target's, and h the target's on the holdout set (0 without one): rows that
    it never saw. Going below h counts for nothing, since unseen data is what forgotten data should look like.
    """
    shares = []
    for name in ("rouge_l", "accuracy", "extraction_strength"):
        key = name if name in reference else f"{name}_f"
        known, unseen = reference.get(key) or 0.0, reference.get(f"{name}_h") or 0.0
        if known > unseen:
            shares.append(min(1.0, max(0.0, ((metrics.get(key) or 0.0) - unseen) / (known - unseen))))
    return sum(shares) / len(shares) if shares else 0.0


def kept_share(metrics: Mapping[str, float | None], reference: Mapping[str, float | None]) -> float:
    """The least share left of the target's own ROUGE-L, accuracy and extraction strength on the retain set, ≥ 0.

    1 without retain rows; may exceed 1 where a point does better than the target.
    """
    names = ("rouge_l_r", "accuracy_r", "extraction_strength_r")
    return min(((metrics.get(name) or 0.0) / known for name in names if (known := reference.get(name))), default=1.0)


def selection_score(metrics: Mapping[str, float | None], reference: Mapping[str, float | None], keep: float) -> float:
    """How good a point (α, β) is on validation rows; higher is better. Needs no ideal model.

    1 − `exposure` where `kept_share` ≥ keep, in [0, 1]. Other points score kept_share − 1 < 0, so that the gentlest of
    them is chosen where no point keeps enough. metrics, reference: means by name of the point and of the target.
    """
    kept = kept_share(metrics, reference)
    return 1.0 - exposure(metrics, reference) if kept >= keep else kept - 1.0
