"""Round the weights of a loaded model as quantisation does (`codes`), and put them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msa_lite.io.codes import QUANTISATIONS


@contextmanager
def rounded_model(model: Any, form: str | None) -> Iterator[None]:
    """Round a model's linear weights in place; put them back bit for bit at the end, also after an error.

    form: of `QUANTISATIONS`; None leaves all as it is. The weights wait in RAM meanwhile. Head, embedding, norms and
    the factors of an adapter keep their values, as bitsandbytes leaves them.
    """
    import torch

    kept: list[tuple[Any, Any]] = []
    try:
        for module in linear_modules(model) if form else ():
            weight = module.weight.data
            kept.append((weight, weight.to("cpu", copy=True)))
            weight.copy_(round_weight(form or "", weight, is_transposed=not isinstance(module, torch.nn.Linear)))
        yield
    finally:
        for weight, values in kept:
            weight.copy_(values)


def linear_modules(model: Any) -> list[Any]:
    """Return the linear modules of a model that quantisation rounds, each weight once."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    modules = list(model.modules())
    head = model.get_output_embeddings()
    inner = {
        id(part)
        for layer in modules
        if isinstance(layer, BaseTunerLayer)
        for part in layer.modules()
        if part is not layer.get_base_layer()
    }
    linear = [m for m in modules if isinstance(m, torch.nn.Linear | Conv1D) and m is not head and id(m) not in inner]
    return list({id(module.weight): module for module in linear}.values())


def round_weight(form: str, weight: Any, is_transposed: bool = False) -> Any:
    """Return a weight (outputs, inputs), rounded, in its own dtype. is_transposed: it is (inputs, outputs)."""
    import torch

    values = weight.float().cpu()
    values = values.T.contiguous() if is_transposed else values
    result = torch.from_numpy(QUANTISATIONS[form].round(values.numpy()))
    return (result.T if is_transposed else result).to(weight.dtype)
