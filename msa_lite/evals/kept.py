"""How much of what the target knows of the retain rows a candidate has kept."""

from __future__ import annotations

from msa_lite.evals.evidence import Metrics, Pairs, surely_misses

FAR = 0.10  # below what is to be kept by more than this, no noise is an excuse

# Metric → (its weight, its name in messages). Probability counts twice: it moves with every bit of damage, where an
# answer is right until it is wrong, and two of 16 answers are an eighth of all.
_OF_QUESTIONS = {
    "probability_r": (2, "probability"),
    "rouge_l_r": (1, "ROUGE-L"),
    "accuracy_r": (1, "accuracy"),
    "knowmem_r": (1, "knowmem_r"),
}
_OF_TEXTS = {"probability_r": (2, "probability"), "exact_memorization_r": (1, "exact memorization")}


def kept_shares(metrics: Metrics, reference: Metrics) -> dict[str, float]:
    """Return the shares left of what the target itself scores on the retain set, ≥ 0, by metric.

    Of probability, ROUGE-L and accuracy, and MUSE's knowmem_r; where no questions were asked, of probability and exact
    memorization. Extraction strength is no part of it: it ends at a row's last error, and says little of what is not
    known by heart. Empty without retain rows.
    """
    return {name: (metrics.get(name) or 0.0) / known for name in _weights(reference) if (known := reference.get(name))}


def kept_share(metrics: Metrics, reference: Metrics) -> float:
    """Return how much of the retain set is kept, in [0, 1]: the mean of `kept_shares`, probability counting twice.

    What is better than the target's counts as 1, and does not make up for what is lost elsewhere. 1 without retain
    rows.
    """
    shares, weights = kept_shares(metrics, reference), _weights(reference)
    total = sum(weights[name][0] for name in shares)
    return sum(weights[name][0] * min(1.0, share) for name, share in shares.items()) / total if total else 1.0


def lost_too_much(metrics: Metrics, reference: Metrics, keep: float, pairs: Pairs) -> str | None:
    """Return which of the scores fell below `keep` times the target's and how far, in words; None where none did.

    Rows decide where there are any: a score that is lower for no more than their noise is kept (`surely_misses`). But
    what keeps less than keep − 0.10 over all never keeps enough.
    """
    shares = kept_shares(metrics, reference)
    lost = []
    for name, share in shares.items():
        if name in pairs and len(pairs[name]) > 1:
            below = share < keep and surely_misses(pairs[name], keep, at_least=True)
        else:
            below = name not in pairs and share < keep - 1e-9
        if below:
            lost.append(f"{share:.0%} of {_weights(reference)[name][1]}")
    kept = kept_share(metrics, reference)
    if not lost and kept < keep - FAR - 1e-9:
        lost = [f"{kept:.0%} of the retain scores"]
    return f"keeps {', '.join(lost)}, {keep:.0%} wanted" if lost else None


def utility(metrics: Metrics, reference: Metrics) -> float:
    """Return the harmonic mean of the shares left of the target's probability and ROUGE-L on the retain set, ≥ 0.

    0 where the model is broken, 1 where it is as good as the target, and without retain rows.
    """
    shares = [(metrics.get(n) or 0.0) / known for n in ("probability_r", "rouge_l_r") if (known := reference.get(n))]
    return 0.0 if not all(shares) else len(shares) / sum(1 / share for share in shares) if shares else 1.0


def _weights(reference: Metrics) -> dict[str, tuple[int, str]]:
    asked = any(reference.get(name) is not None for name in ("rouge_l_r", "accuracy_r", "knowmem_r"))
    return _OF_QUESTIONS if asked else _OF_TEXTS
