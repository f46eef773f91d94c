"""Say why a candidate is unusable: it has lost all that was to be kept, by its metrics beside the target's."""

from __future__ import annotations

from collections.abc import Collection
from statistics import harmonic_mean

from msa_lite.choose.evidence import Metrics


def why_broken(metrics: Metrics, target: Metrics, vital: Collection[str] = ()) -> str | None:
    """Return why a candidate is unusable (it lost all retain performance), or None.

    Unusable means: the harmonic mean of its shares of the target's probability and ROUGE-L on the retain set rounds to
    0.00, or a metric that the benchmark calls `vital` is 0 and the target's is not.
    """
    known = {name: value for name in ("probability_r", "rouge_l_r") if (value := target.get(name))}
    shares = [(metrics.get(name) or 0.0) / value for name, value in known.items()]
    left = harmonic_mean(shares) if shares else 1.0
    if round(left, 2) == 0:
        return f"{left:.2g} is left of the target's probability_r and rouge_l_r"
    for name in vital:
        if (value := target.get(name)) and not metrics.get(name):
            return f"{name} is 0, the target's {value:.2g}"
    return None
