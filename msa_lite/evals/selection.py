"""The scores that a sweep chooses (α, β) by, from the metrics of one point: one number a point, higher is better."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msa_lite.errors import DataError


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


def utility(metrics: Mapping[str, float | None], reference: Mapping[str, float | None]) -> float:
    """The harmonic mean of the shares left of the target's own probability and ROUGE-L on the retain set, ≥ 0.

    0 where the model is broken, 1 where it is as good as the target, and without retain rows.
    """
    shares = [(metrics.get(n) or 0.0) / known for n in ("probability_r", "rouge_l_r") if (known := reference.get(n))]
    return 0.0 if not all(shares) else len(shares) / sum(1 / share for share in shares) if shares else 1.0


def selection_score(metrics: Mapping[str, float | None], reference: Mapping[str, float | None], keep: float) -> float:
    """How good a point (α, β) is on validation rows; higher is better. Needs no ideal model.

    1 − `exposure` where `kept_share` ≥ keep, in [0, 1]. Other points score kept_share − 1 < 0, so that the gentlest of
    them is chosen where no point keeps enough. metrics, reference: means by name of the point and of the target.
    """
    kept = kept_share(metrics, reference)
    return 1.0 - exposure(metrics, reference) if kept >= keep else kept - 1.0


def tofu_score(metrics: Mapping[str, float | None]) -> float:
    """The MSA paper's validation score for TOFU, in (0, 1]; higher is better.

    The geometric mean of model utility (weight 2), acc_forget (1), acc_recover (2), acc_retain (1) and 1 − extraction
    strength (2). The paper prints exp(product / 8), which orders points alike. Terms that are None or absent, as the
    judge's three are without a judge, are left out with their weights: scores compare only where the same are there.
    DataError where none is.
    """
    rising = {"model_utility": 2, "acc_forget": 1, "acc_recover": 2, "acc_retain": 1}
    return _geometric_mean(metrics, rising, falling={"extraction_strength": 2})


def muse_score(metrics: Mapping[str, float | None]) -> float:
    """The MSA paper's validation score for MUSE, in (0, 1]; higher is better.

    The geometric mean of 1 − each of min_k, min_k_pp, verbmem_f and exact_memorization (weight 1), 1 − extraction
    strength (2) and knowmem_r (2). The paper prints (1 − knowmem_r)², against its own words that this term is there to
    preserve what is known of the retain set; and exp(product / 8), which orders points alike. As in the paper, an AUC
    below the ideal model's counts as a gain, though it is over-unlearning. Missing terms: as in `tofu_score`.
    """
    falling = {"min_k": 1, "min_k_pp": 1, "verbmem_f": 1, "extraction_strength": 2, "exact_memorization": 1}
    return _geometric_mean(metrics, {"knowmem_r": 2}, falling)


def _geometric_mean(
    metrics: Mapping[str, float | None], rising: Mapping[str, int], falling: Mapping[str, int]
) -> float:
    """(Π f^w)^(1/Σw) over the metrics m that are there: f = m where rising, 1 − m where falling, within [1e-6, 1]."""
    factors = [(m, w) for name, w in rising.items() if (m := metrics.get(name)) is not None]
    factors += [(1.0 - m, w) for name, w in falling.items() if (m := metrics.get(name)) is not None]
    if not factors:
        raise DataError(f"none of the score's metrics is there: it needs some of {', '.join([*rising, *falling])}")
    return math.exp(sum(w * math.log(min(1.0, max(1e-6, f))) for f, w in factors) / sum(w for _, w in factors))
