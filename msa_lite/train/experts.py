"""The stacked experts of a model's layers: where a checkpoint stores them, and the inputs of each.

transformers stacks the experts of a layer into one module, (experts, out, in), whichever way the checkpoint stores
them. Its classes share one interface (`use_experts_implementation`): they are called with hidden states and the numbers
of the chosen experts, and tell how their weights lie and how they gate. Classes without it, such as Llama 4's and
DBRX's, are not measured.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from msa_lite.io.models.places import find_places

_INTERFACE = ("_apply_gate", "has_gate", "has_bias", "is_transposed", "num_experts", "down_proj")
_DOWN = "down_proj"


@dataclass(frozen=True)
class Stack:
    """One stacked weight of a layer's experts: their gates and ups, which get the same inputs, or their downs."""

    module: str
    """The path of the experts' module: "model.layers.0.mlp.experts"."""
    weight: str
    """The parameter: "gate_up_proj", "up_proj" of experts without a gate, or "down_proj"."""
    count: int
    """The number of experts."""
    inputs: int
    """The number of inputs of each expert's weight."""
    routed: int
    """The most experts that a position is sent to."""
    stored: dict[str, tuple[int | list[int], bool]] = field(default_factory=dict)
    """The tensors of the checkpoint that hold this weight: the expert of a matrix, or those of each slice of a tensor
    of three dimensions, and True where it is stored as (in, out)."""

    @property
    def path(self) -> str:
        """Return the path of the parameter."""
        return f"{self.module}.{self.weight}"

    def root(self, expert: int) -> str:
        """Return the name of an expert's roots."""
        return f"{self.path}.{expert}"


def expert_stacks(model: Any, names: Container[str]) -> dict[str, Stack]:
    """Return a model's stacked experts' weights by their paths. names: the tensors of its checkpoint.

    What the checkpoint holds one by one is a matrix for each expert; what it holds stacked is a tensor of three
    dimensions (`find_places`).
    """
    stacks: dict[str, Stack] = {}
    turned: dict[str, bool] = {}
    for path, module in model.named_modules():
        if not all(hasattr(module, name) for name in _INTERFACE):
            continue
        for weight in (_first(module), _DOWN):
            count, *sizes = getattr(module, weight).shape
            routed = getattr(module.config, "num_experts_per_tok", None)  # or a list of them, one a layer
            most = routed if isinstance(routed, int) else count
            stack = Stack(path, weight, count, sizes[0 if module.is_transposed else 1], most)
            stacks[stack.path], turned[stack.path] = stack, module.is_transposed
    places_by_name = find_places(model, {path: stack.count for path, stack in stacks.items()}, names)
    for name, (places, is_stack) in places_by_name.items():
        path, experts = places[0].parameter, [place.number for place in places]
        if all(place.parameter == path for place in places):
            is_transposed = places[0].is_turned != turned[path]
            stacks[path].stored[name] = experts if is_stack else experts[0], is_transposed
    return {path: stack for path, stack in stacks.items() if stack.stored}


def expert_inputs(module: Any, weight: str, states: Any, chosen: Any) -> Iterator[tuple[int, Any]]:
    """Yield each chosen expert's number and the inputs (n, in) of its weight.

    states: (positions, hidden), the inputs of the module. chosen: (positions, k), the experts of each position. The
    inputs of `down_proj` are computed as the module does.
    """
    for expert in chosen.unique().tolist():
        if expert >= module.num_experts:  # a place without an expert
            continue
        inputs = states[(chosen == expert).any(dim=-1)]
        yield expert, _activated(module, expert, inputs) if weight == _DOWN else inputs


def _first(module: Any) -> str:
    """Return the parameter that an expert's inputs meet first."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def _activated(module: Any, expert: int, inputs: Any) -> Any:
    """Return the inputs (n, intermediate) of an expert's down projection."""
    first = _first(module)
    matrix = getattr(module, first)[expert]
    values = inputs @ (matrix if module.is_transposed else matrix.T)
    if module.has_bias:
        values = values + getattr(module, f"{first}_bias")[expert]
    return module._apply_gate(values) if module.has_gate else module.act_fn(values)
