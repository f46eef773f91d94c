"""How much of what the target knows of the retain rows a candidate has kept."""

from __future__ import annotations

from msa_lite.choose.evidence import Metrics, Pairs, surely_misses

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
    """Return what a candidate keeps, in words, where that is not enough; None where it is.

    Enough is `kept_share` ≥ keep. Rows decide where there are any: a share that is lower for no more than their noise
    is enough (`surely_misses`). But less than keep − 0.10 never is, nor is a single score that is lower than that
    beyond noise: accuracy has to stay, too, where probability hardly moves.
    """
    shares, kept = kept_shares(metrics, reference), kept_share(metrics, reference)
    rows = _kept_rows(shares, reference, pairs)
    short = surely_misses(rows, keep, at_least=True) if len(rows) > 1 else kept < keep - 1e-9
    alone = any(name in pairs and surely_misses(pairs[name], keep - FAR, at_least=True) for name in shares)
    if not ((short and kept < keep) or kept < keep - FAR - 1e-9 or alone):
        return None
    parts = ", ".join(f"{_weights(reference)[name][1]} {share:.0%}" for name, share in shares.items())
    return f"keeps {kept:.0%} ({parts}), {keep:.0%} wanted"


def _kept_rows(shares: dict[str, float], reference: Metrics, pairs: Pairs) -> list[tuple[float, float]]:
    """Return what each row adds to `kept_share`, for candidate and target; nothing where scores lack rows."""
    if not shares or len({len(pairs.get(name, ())) for name in shares}) > 1:
        return []
    weights = _weights(reference)
    rows = zip(*(pairs.get(name, ()) for name in shares), strict=True)
    scales = [weights[name][0] / (reference[name] or 1.0) for name in shares]
    gains = [share > 1 for share in shares.values()]  # they make up for no loss
    return [
        (
            sum(scale * (other if gain else own) for (own, other), scale, gain in zip(row, scales, gains, strict=True)),
            sum(scale * other for (_, other), scale in zip(row, scales, strict=True)),
        )
        for row in rows
    ]


def utility(metrics: Metrics, reference: Metrics) -> float:
    """Return the harmonic mean of the shares left of the target's probability and ROUGE-L on the retain set, ≥ 0.

    0 where the model is broken, 1 where it is as good as the target, and without retain rows.
    """
    shares = [(metrics.get(n) or 0.0) / known for n in ("probability_r", "rouge_l_r") if (known := reference.get(n))]
    return 0.0 if not all(shares) else len(shares) / sum(1 / share for share in shares) if shares else 1.0


def _weights(reference: Metrics) -> dict[str, tuple[int, str]]:
    asked = any(reference.get(name) is not None for name in ("rouge_l_r", "accuracy_r", "knowmem_r"))
    return _OF_QUESTIONS if asked else _OF_TEXTS
