"""A stage's need of memory, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Bytes that CUDA, cuBLAS and their kernels take beside all tensors: 0.3 GB to 0.5 GB on GPUs since 2018.
CONTEXT = 450_000_000
# Bytes of a Python process with torch and transformers loaded.
PROCESS = 700_000_000


@dataclass(frozen=True)
class Need:
    """The memory of a stage at its peak."""

    parts: Mapping[str, int]
    """Bytes by what they hold: weights, adapters, gradients, optimizer, activations, logits, cache, temporaries."""
    rough: str | None = None
    """The reason why this is a rough estimate, or None."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(self.parts.values())

    def plus(self, part: str, nbytes: int) -> Need:
        """Return the need with one part more."""
        return Need({**self.parts, part: nbytes}, self.rough)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {"bytes": self.nbytes, "parts": dict(self.parts), "rough": self.rough}


def highest(*needs: Need) -> Need:
    """Return the need with the most bytes."""
    return max(needs, key=lambda need: need.nbytes)
