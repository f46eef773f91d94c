"""Hold the strengths of MSA, as one value from the recipe to the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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
    filter: float = 0.0
    """λ of the filter of the forget vector, ≥ 0; 0 for the vector as it was fitted."""

    def __str__(self) -> str:
        return f"α = {self.alpha:g}, β = {self.beta:g}" + (f", λ = {self.filter:g}" if self.filter else "")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Strengths:
        """Return the strengths among a candidate's values; those that are not there are 0."""
        return cls(*(float(values.get(name, 0.0)) for name in ("alpha", "beta", "filter")))

    @property
    def values(self) -> dict[str, float]:
        """Return them by their public names, as candidates, manifests and reports hold them."""
        return {"alpha": self.alpha, "beta": self.beta, **({"filter": self.filter} if self.filter else {})}

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of each vector in θ_u = θ_D + Σ weight · vector."""
        return {"forget": -self.alpha, "retain": self.beta}

    def vector_folder(self, run: Path, name: str) -> Path:
        """Return the folder of the vector that is merged, "forget" or "retain", in the folder of a run."""
        return filtered_folder(run, self.filter) if name == "forget" and self.filter else run / "vectors" / name


def filtered_folder(run: Path, strength: float, name: str = "forget") -> Path:
    """Return the folder of a run's vector after the filter of this strength λ. name: "forget", or a baseline."""
    return run / "vectors" / f"{name}-filter-{strength:g}"
