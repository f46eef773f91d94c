"""Find the layers of a model, whatever their names."""

from __future__ import annotations

from typing import Any

from msa_lite.errors import MismatchError


def find_layers(model: Any) -> Any:
    """Return the list of a model's layers: the list of modules with the most weights, since experts are within layers.

    Raise MismatchError for a model without such a list.
    """
    import torch

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    if not lists:
        raise MismatchError(f"{type(model).__name__}: has no list of layers that could be read or changed one by one")
    return max(lists, key=lambda layers: sum(weight.numel() for weight in layers.parameters()))
