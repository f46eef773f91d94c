"""The table of methods, and their parameters as a user gives them.

A method is a loss of `losses.py` and an entry here. What a loss takes by keyword is a parameter of its method.
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
    """A method that trains: minimises γ · loss(forget rows) + λ · loss(retain rows).

    loss: of a batch of forget rows; mean_over: what it is a mean over. takes: what it is a function of. "answers":
    logits and labels, and where there is one the reference, (b,) log-probabilities or logits; "pairs": the gains of
    answer and alternative; "activations": those of a layer. forget_weight: γ by default; retain_weight: λ by default
    (α in open-unlearning), None for a method without retain term. layer_parameters: parameters beside the loss's own.
    compat: keyword of the loss that repeats what open-unlearning does.
    """

    loss: Callable[..., Any]
    mean_over: Literal["rows", "labels"]
    takes: Literal["answers", "pairs", "activations"] = "answers"
    reference: Literal["log_probs", "logits"] | None = None
    forget_weight: float = 1.0
    retain_weight: float | None = 1.0
    layer_parameters: Mapping[str, Value] = field(default_factory=dict)
    compat: str | None = None

    @property
    def keywords(self) -> dict[str, Value]:
        """What the loss takes by keyword, with its defaults."""
        found = inspect.signature(self.loss).parameters.values()
        return {p.name: p.default for p in found if p.kind is p.KEYWORD_ONLY and p.name != self.compat}

    @property
    def parameters(self) -> dict[str, Value]:
        """Every parameter with its default; learning_rate, which all take, aside."""
        weights: dict[str, Value] = {"forget_weight": self.forget_weight}
        if self.retain_weight is not None:
            weights["retain_weight"] = self.retain_weight
            if self.takes != "activations":  # whose retain term is of activations as well
                weights["retain_loss"] = "nll"
        return self.keywords | dict(self.layer_parameters) | weights


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
        compat="broadcast",
    ),
    "satimp": Method(losses.satimp, "labels", forget_weight=0.1),
    "wga": Method(losses.wga, "labels"),
    "undial": Method(losses.undial, "labels", reference="logits", retain_weight=0.0, compat="wrapped"),
}


def check_method(name: str, where: str = "") -> None:
    """Raise UsageError for a name that is no method's. where: what the message begins with."""
    names = (*METHODS, TASK_VECTOR)
    if name not in names:
        raise UsageError(f"{where}no method '{name}'{nearest(name, names)}; choose from {', '.join(names)}")


def check_grids(methods: Mapping[str, Mapping[str, Value | Sequence[Value]]]) -> None:
    """Raise UsageError for a name that is no method's, and for parameters that a method has not, by method."""
    for name, given in methods.items():
        check_method(name, "baseline.methods: ")
        settings_grid(name, given)


def settings_grid(name: str, given: Mapping[str, Value | Sequence[Value]]) -> list[dict[str, Value]]:
    """Every combination of the values given to a method, each with defaults for the others.

    A list stands for values to try. Raises UsageError that names every parameter that the method has not (and the
    methods that have it) and every value of the wrong kind.
    """
    if name == TASK_VECTOR:
        if given:
            raise UsageError(f"baseline.methods.{name}: takes no parameters; it has forget.alpha and retain.beta")
        return [{}]
    defaults = METHODS[name].parameters
    faults = [fault for key, value in given.items() for fault in _faults(name, key, value, defaults)]
    if faults:
        raise UsageError(join_faults(f"baseline.methods.{name}:", faults))
    choices = {key: value if isinstance(value, (list, tuple)) else [value] for key, value in given.items()}
    return [defaults | dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def _faults(name: str, key: str, value: Any, defaults: Mapping[str, Value]) -> list[str]:
    known = [*defaults, "learning_rate"]
    if key not in known:
        others = [other for other, method in METHODS.items() if key in method.parameters]
        hint = f"; it is one of {', '.join(others)}" if others else nearest(key, known)
        return [f"{key}: not a parameter of {name}{hint}. {name} takes {', '.join(known)}"]
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    faults = [fault for one in values if (fault := _fault(key, one))] if values else ["an empty list"]
    if not faults and len(set(values)) < len(values):
        faults = ["a value stands twice"]
    return [f"{key}: {fault}" for fault in faults]


# Parameters that may be 0, or of either sign; the others are above 0.
_MAY_BE_ZERO = ("forget_weight", "retain_weight", "layer", "beta1", "beta2")
_ANY_SIGN = ("delta",)


def _fault(key: str, value: Any) -> str | None:
    """What is wrong with one value of a parameter."""
    if key == "retain_loss":
        return None if value in RETAIN_LOSSES else f"expected one of {', '.join(RETAIN_LOSSES)}, got {value!r}"
    kinds = (int,) if key == "layer" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or value != value or abs(value) == float("inf"):
        return f"expected a {'whole ' if key == 'layer' else ''}number, got {value!r}"
    if key not in _ANY_SIGN and (value < 0 or (value == 0 and key not in _MAY_BE_ZERO)):
        return f"expected {'no less than' if key in _MAY_BE_ZERO else 'more than'} 0, got {value!r}"
    return None
