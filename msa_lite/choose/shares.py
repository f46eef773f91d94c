"""Compute the shares of the target's knowledge that a candidate has: of the forget set (low) and retain set (high)."""

from __future__ import annotations

from collections.abc import Collection
from statistics import harmonic_mean

from msa_lite.choose.evidence import Metrics, Pairs, surely_misses
from msa_lite.report.metrics import METRICS, metric_kind

FAR = 0.10  # a share lower than `keep` by more than this is a loss, however noisy the rows

# Metric → weight. Probability counts twice: it moves with every bit of damage, where an answer is right until it is
# wrong, and two of 16 answers are an eighth of all.
_OF_QUESTIONS = {"probability_r": 2, "rouge_l_r": 1, "accuracy_r": 1}
_OF_TEXTS = {"probability_r": 2, "exact_memorization_r": 1}


def extractable_share(metrics: Metrics, target: Metrics, prior: Metrics | None = None) -> float:
    """Return the share of the target's knowledge of the forget set that can still be extracted, in [0, 1].

    Lower is better. It is the mean over ROUGE-L, accuracy and extraction strength (without questions: exact
    memorization and extraction strength) of (m − h) / (t − h), clipped to [0, 1]. m is the candidate's value on the
    forget set and t the target's. h is the level of a model that never saw these rows: the target's value on the
    holdout set or the `prior`'s on the forget set, whichever is higher, or 0 without either. Values below h gain
    nothing, since forgotten rows should look like unseen ones.
    """
    has_questions = any(target.get(name) is not None for name in ("rouge_l_f", "accuracy_f"))
    names = ("rouge_l", "accuracy") if has_questions else ("exact_memorization",)
    shares = []
    for name in (*names, "extraction_strength"):
        key = f"{name}_f" if f"{name}_f" in METRICS else name
        before = target.get(key) or 0.0
        unseen = max(target.get(f"{name}_h") or 0.0, (prior or {}).get(key) or 0.0)
        if before > unseen:
            shares.append(min(1.0, max(0.0, ((metrics.get(key) or 0.0) - unseen) / (before - unseen))))
    return sum(shares) / len(shares) if shares else 0.0


def kept_shares(metrics: Metrics, target: Metrics) -> dict[str, float]:
    """Return the shares left of the target's own scores on the retain set, ≥ 0, by metric; empty without retain rows.

    The metrics are probability, ROUGE-L and accuracy; without questions, probability and exact memorization. Extraction
    strength is left out: it ends at a row's last error, and says little of rows that are not
    known by heart.
    """
    return {name: (metrics.get(name) or 0.0) / known for name in _weights(target) if (known := target.get(name))}


def kept_share(metrics: Metrics, target: Metrics) -> float:
    """Return how much of the retain set is kept, in [0, 1]: the mean of `kept_shares`, probability counting twice.

    A share above 1 counts as 1, so a gain does not make up for a loss elsewhere. 1 without retain rows.
    """
    shares, weights = kept_shares(metrics, target), _weights(target)
    total = sum(weights[name] for name in shares)
    return sum(weights[name] * min(1.0, share) for name, share in shares.items()) / total if total else 1.0


def lost_too_much(metrics: Metrics, target: Metrics, keep: float, pairs: Pairs, doubt: bool = False) -> str | None:
    """Return what a candidate keeps, in words, if that is not enough; else None.

    `kept_share` ≥ keep is enough, unless a single metric is lower than keep − 0.10 beyond the noise of the rows
    (`pairs`): accuracy has to stay even where probability hardly moves. doubt: a share down to keep − 0.10 is enough,
    too, if the gap may be noise (`surely_misses`).
    """
    shares, kept = kept_shares(metrics, target), kept_share(metrics, target)
    rows = _kept_rows(shares, target, pairs) if doubt else []
    short = surely_misses(rows, keep, at_least=True) if len(rows) > 1 else kept < keep - 1e-9
    alone = any(name in pairs and surely_misses(pairs[name], keep - FAR, at_least=True) for name in shares)
    if not ((short and kept < keep) or kept < keep - FAR - 1e-9 or alone):
        return None
    parts = ", ".join(f"{metric_kind(name).label} {share:.0%}" for name, share in shares.items())
    return f"keeps {kept:.0%} ({parts}), {keep:.0%} wanted"


def _kept_rows(shares: dict[str, float], target: Metrics, pairs: Pairs) -> list[tuple[float, float]]:
    """Return what each row adds to `kept_share`, for candidate and target; nothing if some metric lacks rows."""
    if not shares or len({len(pairs.get(name, ())) for name in shares}) > 1:
        return []
    weights = _weights(target)
    rows = zip(*(pairs.get(name, ()) for name in shares), strict=True)
    scales = [weights[name] / (target[name] or 1.0) for name in shares]
    gains = [share > 1 for share in shares.values()]  # they make up for no loss
    return [
        (
            sum(scale * (other if gain else own) for (own, other), scale, gain in zip(row, scales, gains, strict=True)),
            sum(scale * other for (_, other), scale in zip(row, scales, strict=True)),
        )
        for row in rows
    ]


def why_broken(metrics: Metrics, target: Metrics, vital: Collection[str] = ()) -> str | None:
    """Return why a candidate is unusable (it lost all retain performance), or None.

    Unusable means: the harmonic mean of its shares of the target's probability and ROUGE-L on the retain set rounds to
    0.00, or a metric that the benchmark calls `vital` is 0 and the target's is not.
    """
    shares = [share for name, share in kept_shares(metrics, target).items() if name in ("probability_r", "rouge_l_r")]
    left = harmonic_mean(shares) if shares else 1.0
    if round(left, 2) == 0:
        return f"{left:.2g} is left of the target's probability_r and rouge_l_r"
    for name in vital:
        if (known := target.get(name)) and not metrics.get(name):
            return f"{name} is 0, the target's {known:.2g}"
    return None


def _weights(target: Metrics) -> dict[str, int]:
    has_questions = any(target.get(name) is not None for name in ("rouge_l_r", "accuracy_r"))
    return _OF_QUESTIONS if has_questions else _OF_TEXTS
