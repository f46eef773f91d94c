"""The part of a recipe about the baselines: the training of a method beside MSA, and the grid of its parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from msa_lite.closed import Closed
from msa_lite.recipe.inputs import OneOrMore, check_points
from msa_lite.recipe.training import MOST, Rate


def _as_number(value: object) -> object:
    """Return a number for a text such as 1e-5, which YAML reads as a string. Raise ValueError for true and false."""
    if isinstance(value, bool):
        raise ValueError("a number or a word is wanted")
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _within_reason(value: float | str) -> float | str:
    if not isinstance(value, str) and not abs(value) <= 1e12:
        raise ValueError("a number within reason is wanted")
    return value


Parameter = Annotated[int | float | str, BeforeValidator(_as_number), AfterValidator(_within_reason)]


class Baseline(Closed):
    """The training of `msa-lite baseline METHOD`. All other settings are those of `vector`, for a fair comparison;
    `hold` and `start` are for MSA and task_vector only."""

    start: Literal["target", "prior"] = "target"
    """target: the method trains the target. prior: it trains the prior, and the change is then added to the target."""
    scale: OneOrMore[Rate] = 1.0
    """With start: prior, the factor of the change. A list: the best is chosen on validation rows."""
    epochs: int | None = Field(None, ge=1, le=MOST)
    """Passes over the forget rows. The best epoch is chosen on validation rows. Default: vector.epochs, or 5 if that is
    auto."""
    learning_rate: Rate | None = None
    """The learning rate of methods that have none of their own in `methods`. Default: vector.learning_rate."""
    methods: dict[str, dict[str, OneOrMore[Parameter]]] = {}
    """Parameters by method, such as npo: {retain_weight: [2, 4], learning_rate: 1e-5}. All combinations of lists are
    tried, and the best is chosen on validation rows."""

    _points = field_validator("scale")(check_points)

    @model_validator(mode="after")
    def _fits_its_methods(self) -> Baseline:
        if self.start == "target" and self.scale != 1.0:
            raise ValueError("scale: only with start: prior")
        return self
