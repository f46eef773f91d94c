"""Find the experts that a model holds stacked, (experts, out, in), and compute the inputs of each of their weights.

transformers stacks the experts of a layer into one module, whichever way the checkpoint stores them. Its classes share
one interface (`use_experts_implementation`): they are called with hidden states and the numbers of the chosen experts,
and tell how their weights lie and how they gate. Classes without it, such as Llama 4's and DBRX's, are not measured.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from msa_lite.io.weights.matching import find_name

logger = logging.getLogger(__name__)

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

    transformers' own conversion, run backwards on small tensors that hold their places, tells the names. What the
    checkpoint holds one by one is a matrix for each expert; what it holds stacked is one tensor of three dimensions.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    stacks: dict[str, Stack] = {}
    places: list[tuple[str, int]] = []  # of each expert's weight: the path of its stack, and its number
    marks: dict[str, Any] = {}  # 2 · place + column, since two columns tell which way a matrix lies
    for path, module in model.named_modules():
        if not all(hasattr(module, name) for name in _INTERFACE):
            continue
        for weight in (_first(module), _DOWN):
            count, *sizes = getattr(module, weight).shape
            routed = getattr(module.config, "num_experts_per_tok", None)  # or a list of them, one a layer
            most = routed if isinstance(routed, int) else count
            stack = Stack(path, weight, count, sizes[0 if module.is_transposed else 1], most)
            marked = 2 * torch.arange(len(places), len(places) + count).view(-1, 1, 1) + torch.arange(2)
            marked = marked.expand(-1, 4, -1)  # four rows: a gate and an up of two
            marks[stack.path] = marked.mT if module.is_transposed else marked
            places += [(stack.path, expert) for expert in range(count)]
            stacks[stack.path] = stack
    try:
        stored = revert_weight_conversion(model, marks) if marks else {}
    except Exception as error:  # each kind of conversion raises its own
        logger.warning("experts cannot be measured, as their names in the model's files are not known: %s", error)
        return {}
    for found, mark in stored.items():
        name, slices = find_name(found, names), mark.reshape(-1, *mark.shape[-2:])
        owners = [{places[value // 2] for value in matrix.flatten().tolist()} for matrix in slices]
        if name is None or mark.dim() not in (2, 3) or any(len(several) > 1 for several in owners):
            continue  # such as a matrix that holds several experts
        holders, experts = zip(*(owner for [owner] in owners), strict=True)
        if len(set(holders)) == 1:
            is_transposed = bool(slices[0, 0, 0] != slices[0, 1, 0])
            stacks[holders[0]].stored[name] = experts[0] if mark.dim() == 2 else list(experts), is_transposed
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
