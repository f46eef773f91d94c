"""The table of methods, and their parameters as a user gives them.

A method is a loss of `losses.py` and an entry here. A keyword of the loss is a parameter of its method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from msa_lite.baselines import losses
from msa_lite.errors import UsageError, join_faults, nearest

TASK_VECTOR = "task_vector"  # no loss of its own: MSA with the target as its own prior
RETAIN_LOSSES = ("nll", "kl")

Value = float | int | str


@dataclass(frozen=True)
class Method:
    """A method that trains: it minimises γ · loss(forget rows) + λ · loss(retain rows)."""

    loss: Callable[..., Any]
    """The loss of a batch of forget rows."""
    mean_over: Literal["rows", "labels"]
    """The units that the loss is a mean over."""
    takes: Literal["answers", "pairs", "activations"] = "answers"
    """Inputs of the loss: logits and labels (and `reference`), gains of answer and alternative, or a layer's output."""
    reference: Literal["log_probs", "logits"] | None = None
    """The reference model's part of the inputs: (b,) log-probabilities, or logits."""
    forget_weight: float = 1.0
    """γ by default."""
    retain_weight: float | None = 1.0
    """λ by default (α in open-unlearning); None: the method has no retain term."""
    layer_parameters: Mapping[str, Value] = field(default_factory=dict)
    """Parameters beside the loss's own."""

    @property
    def keywords(self) -> dict[str, Value]:
        """Return the keywords of the loss and their defaults."""
        parameters = inspect.signature(self.loss).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    @property
    def parameters(self) -> dict[str, Value]:
        """Return every parameter with its default, except learning_rate, which all methods take."""
        weights: dict[str, Value] = {"forget_weight": self.forget_weight}
        if self.retain_weight is not None:
            weights["retain_weight"] = self.retain_weight
            if self.takes != "activations":  # then the retain term is of activations, too
                weights["retain_loss"] = "nll"
        return self.keywords | dict(self.layer_parameters) | weights

    def more_passes(self, parameters: Mapping[str, Value], retain: float) -> float:
        """Return the extra passes of a step, forward and backward, for each pass over its forget rows.

        retain: tokens of a retain row for each token of a forget row. A reference runs only forward: a third of a pass.
        """
        passes = (1.0 if self.takes == "pairs" else 0.0) + (1 / 3 if self.reference == "logits" else 0.0)
        by_reference = self.takes == "activations" or parameters.get("retain_loss") == "kl"
        return passes + (retain * (4 / 3 if by_reference else 1.0) if parameters.get("retain_weight") else 0.0)

    def runs_reference(self, parameters: Mapping[str, Value]) -> bool:
        """Check whether a step runs the reference. Log-probabilities are computed once, before the first step."""
        by_retain = self.takes == "activations" or parameters.get("retain_loss") == "kl"
        return self.reference == "logits" or (bool(parameters.get("retain_weight")) and by_retain)


METHODS = {
    "grad_ascent": Method(losses.grad_ascent, "labels", retain_weight=None),
    "grad_diff": Method(losses.grad_ascent, "labels"),
    "npo": Method(losses.npo, "rows", reference="log_probs"),
    "simnpo": Method(losses.simnpo, "rows", forget_weight=0.125),
    "dpo": Method(losses.dpo, "rows", takes="pairs", reference="log_probs"),
    "rmu": Method(
        losses.rmu,
        "rows",
        takes="activations",
        layer_parameters={"layer": 7, "steering": 2.0},
    ),
    "satimp": Method(losses.satimp, "labels", forget_weight=0.1),
    "wga": Method(losses.wga, "labels"),
    "undial": Method(losses.undial, "labels", reference="logits", retain_weight=0.0),
}


def check_method(name: str, where: str = "") -> None:
    """Raise UsageError for an unknown method. where: the beginning of the message."""
    names = (*METHODS, TASK_VECTOR)
    if name not in names:
        raise UsageError(f"{where}no method '{name}'{nearest(name, names)}; choose from {', '.join(names)}")


def check_grids(methods: Mapping[str, Mapping[str, Value | Sequence[Value]]]) -> None:
    """Raise UsageError for an unknown method, and for parameters that a method does not have."""
    for name, parameters in methods.items():
        check_method(name, "baseline.methods: ")
        settings_grid(name, parameters)


def settings_grid(name: str, parameters: Mapping[str, Value | Sequence[Value]]) -> list[dict[str, Value]]:
    """Return every combination of a method's parameters, with defaults for those left out.

    A list holds values to try. Raise a UsageError that names every unknown parameter (with the methods that have it)
    and every value of the wrong kind.
    """
    if name == TASK_VECTOR:
        if parameters:
            raise UsageError(f"baseline.methods.{name}: takes no parameters; it has forget.alpha and retain.beta")
        return [{}]
    defaults = METHODS[name].parameters
    faults = [fault for key, value in parameters.items() for fault in _faults(name, key, value, defaults)]
    if faults:
        raise UsageError(join_faults(f"baseline.methods.{name}:", faults))
    choices = {key: value if isinstance(value, (list, tuple)) else [value] for key, value in parameters.items()}
    return [defaults | dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def _faults(name: str, key: str, value: Any, defaults: Mapping[str, Value]) -> list[str]:
    names = [*defaults, "learning_rate"]
    if key not in names:
        owners = [owner for owner, method in METHODS.items() if key in method.parameters]
        hint = f"; it is one of {', '.join(owners)}" if owners else nearest(key, names)
        return [f"{key}: not a parameter of {name}{hint}. {name} takes {', '.join(names)}"]
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    faults = [fault for candidate in values if (fault := _fault(key, candidate))] if values else ["an empty list"]
    if not faults and len(set(values)) < len(values):
        faults = ["a value stands twice"]
    return [f"{key}: {fault}" for fault in faults]


# Parameters that may be 0, or of either sign; the others are above 0.
_MAY_BE_ZERO = ("forget_weight", "retain_weight", "layer", "beta1", "beta2")
_ANY_SIGN = ("delta",)


def _fault(key: str, value: Any) -> str | None:
    """Return the fault of one value of a parameter, or None."""
    if key == "retain_loss":
        return None if value in RETAIN_LOSSES else f"expected one of {', '.join(RETAIN_LOSSES)}, got {value!r}"
    kinds = (int,) if key == "layer" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or value != value or abs(value) == float("inf"):
        return f"expected a {'whole ' if key == 'layer' else ''}number, got {value!r}"
    if key not in _ANY_SIGN and (value < 0 or (value == 0 and key not in _MAY_BE_ZERO)):
        return f"expected {'no less than' if key in _MAY_BE_ZERO else 'more than'} 0, got {value!r}"
    return None
