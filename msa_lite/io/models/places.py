"""Find where a checkpoint stores the weights that transformers holds in memory: under which names, in which form.

transformers renames tensors, and stacks the experts of a layer, (experts, out, in), whichever way files store them. Its
own conversion tells how: run backwards, on small tensors that mark their places.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from msa_lite.io.weights.matching import find_name

logger = logging.getLogger(__name__)

_SIDE = 4  # rows and columns of a mark: enough for halves, and to tell which way a matrix lies


@dataclass(frozen=True)
class Place:
    """The part of the model in memory that a stored matrix holds, or a slice of a stored tensor of three dimensions."""

    parameter: str
    """The path of the parameter: "model.layers.0.mlp.experts.gate_up_proj"."""
    number: int
    """The number of the matrix in the parameter: the expert; 0 for a parameter that is a matrix."""
    rows: tuple[float, float]
    """The first row of the parameter's matrix that it holds, and the one after the last, as shares of its rows."""
    is_turned: bool
    """True where it is stored transposed."""


def find_places(model: Any, counts: Mapping[str, int], names: Container[str]) -> dict[str, tuple[list[Place], bool]]:
    """Return the places by the checkpoint's tensors, and True for tensors of three dimensions (one place a slice).

    counts: the matrices of each parameter that is looked for, by its path; 0 for a plain matrix. names: the tensors of
    the checkpoint. What files hold in a form that is none of whole rows of one matrix is left out, with a warning where
    transformers cannot undo its conversion.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    owners = [(path, number) for path, count in counts.items() for number in range(max(1, count))]
    marks: dict[str, Any] = {}
    start = 0
    for path, count in counts.items():
        mark = _SIDE**2 * (start + torch.arange(max(1, count))).view(-1, 1, 1)
        mark = mark + torch.arange(_SIDE**2).view(_SIDE, _SIDE)
        marks[path] = mark if count else mark[0]
        start += max(1, count)
    try:
        stored = revert_weight_conversion(model, marks) if marks else {}
    except Exception as error:  # each kind of conversion raises its own
        logger.warning("where this model's files hold its weights is not known to transformers: %s", error)
        return {}
    found = {}
    for name, mark in stored.items():
        known = find_name(name, names)
        places = [_place(matrix, owners) for matrix in mark.reshape(-1, *mark.shape[-2:])]
        whole = [place for place in places if place]
        if known and mark.dim() in (2, 3) and len(whole) == len(places):
            found[known] = whole, mark.dim() == 3
    return found


def module_paths(model: Any, names: Container[str]) -> dict[str, str]:
    """Return the path of the module that holds each weight of a checkpoint today, by the weight's name in its files.

    Only whole matrices count. names: the tensors of the checkpoint.
    """
    paths = {f"{path}.weight": path for path, m in model.named_modules() if getattr(_weight(m), "ndim", 0) == 2}
    places = find_places(model, dict.fromkeys(paths, 0), names)
    return {name: paths[place.parameter] for name, ([place, *_], _) in places.items() if place.rows == (0.0, 1.0)}


def linear_paths(model: Any, names: Container[str]) -> dict[str, str]:
    """Return as `module_paths` only modules that are linear layers and keep their weight as (out, in)."""
    import torch

    linear = {path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: path for name, path in module_paths(model, names).items() if path in linear}


def _weight(module: Any) -> Any:
    return dict(module.named_parameters(recurse=False)).get("weight")


def _place(mark: Any, owners: list[tuple[str, int]]) -> Place | None:
    """Return the place that a stored mark (rows, columns) tells; None unless it is whole rows of one matrix."""
    is_turned = bool(mark.shape[1] > 1 and mark[0, 1] - mark[0, 0] != 1)
    lying = mark.T if is_turned else mark
    first, last = lying[0, 0].item(), lying[-1, -1].item()
    expected = first + lying.new_tensor(range(last - first + 1))
    if first % _SIDE or lying.shape[1] != _SIDE or not lying.flatten().equal(expected):
        return None
    path, number = owners[first // _SIDE**2]
    rows = (first % _SIDE**2) // _SIDE
    return Place(path, number, (rows / _SIDE, (rows + len(lying)) / _SIDE), is_turned)
