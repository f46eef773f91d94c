"""Known weights: the only ones that a training may change, so that what it taught has a known place.

Source: LACUNA (arXiv 2607.02513, section 3.2), which teaches each group of rows into 5 % of the entries of the
attention and feed-forward matrices, drawn one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from msa_lite.errors import UsageError, join_faults, nearest
from msa_lite.io.weights.patterns import Patterns
from msa_lite.train.objectives.objective import ALONE, Division
from msa_lite.train.objectives.plain import PlainLoss


@dataclass(frozen=True)
class KnownWeights:
    """Weights of a model."""

    tensors: tuple[str, ...]
    """Names of tensors, or regular expressions that fit the end of a name after a dot."""
    share: float = 1.0
    """The share of the entries of these tensors, in (0, 1]; each entry is drawn by itself."""
    seed: int = 0
    """The seed of the draw."""

    def among(self, names: Collection[str]) -> list[str]:
        """Return the names that a pattern fits. Raise UsageError with all patterns that are broken or fit none."""
        faults, found = list[str](), set[str]()
        for pattern in self.tensors:
            patterns = Patterns({pattern: True})
            fitting = [] if patterns.faults else [name for name in names if patterns.first([name], False)]
            if not fitting and not patterns.faults:
                faults.append(f"'{pattern}' fits no weight of the model{nearest(pattern, names)}")
            faults += patterns.faults
            found.update(fitting)
        if faults:
            raise UsageError(join_faults("into.tensors:", faults))
        return [name for name in names if name in found]

    def entries(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return which of the entries [start, stop) of a named tensor are known: (stop − start,) truth values.

        An entry is known where a hash of seed, name and its place is below the share (SplitMix64, Steele et al. 2014),
        so a block needs nothing of the others.
        """
        if self.share >= 1:
            return np.ones(stop - start, np.bool_)
        key = hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:8]
        bits = np.arange(start + 1, stop + 1, dtype=np.uint64)
        bits *= np.uint64(0x9E3779B97F4A7C15)
        bits += np.frombuffer(key, "<u8")
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        bits ^= bits >> np.uint64(31)
        return bits < np.uint64(int(self.share * 2**64))


@dataclass
class KnownLoss(PlainLoss):
    """The plain loss of a training that changes known weights alone; it must have no weight decay.

    The gradient of all other entries is set to 0 before anything reads it: clipping counts the known ones alone, and
    AdamW's moments of the others stay 0, so its step leaves them as they are, bit for bit.
    """

    known: KnownWeights = KnownWeights(("",))

    def describe(self) -> dict[str, Any]:
        return {"known": [*self.known.tensors, self.known.share, self.known.seed]}

    def prepare(self, model: Any, division: Division = ALONE) -> None:
        import torch

        super().prepare(model, division)
        names = {*self.known.among([name for name, _ in model.named_parameters()])}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
            if name in names:
                mask = torch.from_numpy(self.known.entries(name, 0, parameter.numel())).view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(partial(_clear_others, mask.to(parameter.device)))


def _clear_others(mask: Any, parameter: Any) -> None:
    """Set the gradient outside a mask to 0, NaN included."""
    parameter.grad.masked_fill_(~mask, 0.0)
