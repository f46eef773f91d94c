"""Try points (α, β) on a target in 4-bit: both adapters stay beside it and are rescaled.

Quantised weights cannot take an update, so adapters run beside them. Each point is therefore slower than a plain model.
The scores are those of the 4-bit model; the pipeline scores the chosen point again after the merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msa_lite.choose.candidates import Values
from msa_lite.evals.models import load_model
from msa_lite.io.loading import attach_adapter
from msa_lite.io.memory import free_memory
from msa_lite.strengths import Strengths


@dataclass
class Points:
    """The 4-bit target with its vectors, loaded once; call it with a point (None: the target alone)."""

    target: Path
    """The target's folder."""
    adapters: Mapping[str, Path]
    """The folders of the vectors by name."""
    fixed: Mapping[str, float] = field(default_factory=dict)
    """The weights of vectors that are the same at every point: those of earlier requests."""
    _model: Any = field(default=None, init=False)

    def __call__(self, values: Values | None) -> Any:
        if self._model is None:
            self._model = load_with_adapters(self.target, self.adapters, four_bit=True)
        fixed = self.fixed if values is not None else dict.fromkeys(self.fixed, 0.0)
        set_weights(self._model, {**Strengths.of(values or {}).weights, **fixed})
        return self._model

    def close(self) -> None:
        """Free the memory of the model; the next call loads it again."""
        self._model = None
        free_memory()


def load_with_adapters(target: Path, adapters: Mapping[str, Path], four_bit: bool = False) -> Any:
    """Load the target with PEFT adapters by name, all active at once."""
    model: Any = load_model(target, four_bit)
    for name, path in adapters.items():
        model = attach_adapter(model, path, name)
    model.base_model.set_adapter(list(adapters))
    return model.eval()


def set_weights(model: Any, weights: Mapping[str, float]) -> None:
    """Set the weight that each adapter's delta is multiplied by, in every layer; negative and 0 are fine."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            for name, weight in weights.items():
                if name in module.scaling:
                    module.set_scale(name, weight)
