"""Hold the two strengths of MSA, as one value from the recipe to the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


def rounded(strength: float) -> float:
    """Return a strength without the last digits, in which sums and products of decimal fractions are off."""
    return float(f"{strength:.12g}")


@dataclass(frozen=True)
class Strengths:
    """θ_u = θ_D − alpha · forget vector + beta · retain vector."""

    alpha: float
    """The forget vector is subtracted this many times, ≥ 0."""
    beta: float = 0.0
    """The retain vector is added this many times, ≥ 0; 0 without a retain set."""

    def __str__(self) -> str:
        return f"α = {self.alpha:g}, β = {self.beta:g}"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Strengths:
        """Return the strengths among a candidate's values; those that are not there are 0."""
        return cls(float(values.get("alpha", 0.0)), float(values.get("beta", 0.0)))

    @property
    def values(self) -> dict[str, float]:
        """Return both by their public names, as candidates, manifests and reports hold them."""
        return asdict(self)

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of each vector in θ_u = θ_D + Σ weight · vector."""
        return {"forget": -self.alpha, "retain": self.beta}
