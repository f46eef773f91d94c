"""Settings of a relearning attack, and the unrelated texts that it may tune on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from msa_lite.data import Row
from msa_lite.io.models.heads import Compute
from msa_lite.train import FitSettings, TuningMode, auto_rate, roomy_mode

_FASTER = 3.0  # times the rate of a vector: whoever attacks need not spare the rest of the model
_OF_ADAPTER = 10 * 64  # over lora_alpha: the rate of an adapter as a multiple of that of all weights


@dataclass(frozen=True)
class RelearnSettings:
    """The settings of a branch."""

    learning_rate: float | None = None
    """None: three times the rate at which a vector of all weights is fitted to a model of this size."""
    epochs: int = 1
    steps: int | None = None
    """The number of optimiser steps, in place of `epochs`."""
    batch_size: int = 32
    mode: Literal["auto", "full", "lora"] = "auto"
    """auto: all weights where the device has room for their gradients and AdamW's states, else an adapter, at ten times
    the rate."""
    lora_rank: int = 32
    lora_alpha: float = 64
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["linear", "constant"] = "linear"

    def count_steps(self, examples: int) -> int:
        """Return the number of optimiser steps."""
        return self.steps or self.epochs * math.ceil(examples / self.batch_size)

    def with_mode(self, mode: TuningMode) -> RelearnSettings:
        """Return the settings with a mode in the place of auto; the rate for all weights becomes that of an adapter."""
        if self.mode != "auto":
            return self
        rate = self.learning_rate
        if mode == "lora" and rate is not None:
            rate *= _OF_ADAPTER / self.lora_alpha
        return replace(self, mode=mode, learning_rate=rate)

    def settings(self, model: Any, examples: int, seed: int, compute: Compute) -> FitSettings:
        """Return the settings of a fit of a loaded model on so many examples."""
        weights = sum(parameter.numel() for parameter in model.parameters())
        if self.mode == "auto":
            return self.with_mode(roomy_mode(weights)).settings(model, examples, seed, compute)
        rate = self.learning_rate
        if rate is None:
            rate = _FASTER * auto_rate("full", weights) * (_OF_ADAPTER / self.lora_alpha if self.mode == "lora" else 1)
        return FitSettings(
            mode=self.mode,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
            epochs=math.ceil(self.count_steps(examples) / math.ceil(examples / self.batch_size)),
            learning_rate=rate,
            weight_decay=self.weight_decay,
            batch_size=self.batch_size,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            compute=compute,
            seed=seed,
        )

    def faults(self) -> Iterator[str]:
        """Yield values out of range."""
        for name in ("learning_rate", "steps"):
            if (value := getattr(self, name)) is not None and not value > 0:
                yield f"{name}: {value}; it must be above 0"
        for name in ("epochs", "batch_size", "lora_rank", "lora_alpha"):
            if not (value := getattr(self, name)) > 0:
                yield f"{name}: {value}; it must be above 0"


MATCHED = RelearnSettings(steps=48, batch_size=8, schedule="constant")
"""The settings of all branches at the strength that is matched to the model."""
ON_ALL_ROWS = RelearnSettings(2e-5)
"""Published for all forget rows; they stand in for those of rows to keep."""
ON_PART = RelearnSettings(5e-6, epochs=6, batch_size=4, warmup_steps=24)
"""Published for a part of the forget rows."""
ON_UNRELATED = RelearnSettings(
    2e-4, epochs=3, batch_size=1, mode="lora", lora_rank=128, lora_alpha=16, weight_decay=0.01, warmup_steps=4
)
"""Published for unrelated text."""


_TEXTS = (
    "Water boils at a lower temperature on a mountain than at the coast, because the air presses less on its surface.",
    "A triangle has three angles, and in a plane they add up to a straight line. On a globe they add up to more.",
    "Bread rises because yeast eats sugar and gives off gas. The gas is caught in a net of gluten.",
    "Tides follow the moon. Most coasts see high water twice a day, about fifty minutes later each day.",
    "Iron rusts where both water and oxygen reach it. Paint keeps them away.",
    "A bicycle stays upright more easily when it is moving.",
    "Glass is made of sand, soda and lime, melted together.",
    "Leaves look green because they take in red and blue light and send back the rest.",
    "A prime number has no divisors but one and itself. There are infinitely many of them.",
    "Sound needs something to travel through.",
    "Bees dance on the comb to tell others where flowers are.",
    "Soap has two ends. One likes water, the other likes fat.",
    "Rivers carry most sand in floods.",
    "A violin string sounds higher when it is shorter, thinner or tighter.",
    "Salt lowers the freezing point of water.",
    "A lever trades force for distance.",
    "Clouds are made of droplets so small that they hardly fall. They grow by running into one another.",
    "Paper is made of fibres of wood that lie in all directions.",
    "Magnets have two poles. If one is cut in half, each half has two poles again.",
    "Cheese begins as milk that is made to curdle. The curd is cut, drained and salted.",
    "A compass points to the magnetic pole, which is not the pole of the map.",
    "Concrete does not dry, it sets: cement and water form crystals that lock the gravel in place.",
    "Cats see well at dusk because a layer behind the retina sends the light through it a second time.",
    "To find the area of a circle, square its radius and multiply by a little more than three.",
)

UNRELATED = tuple(Row(index, text=text) for index, text in enumerate(_TEXTS))
