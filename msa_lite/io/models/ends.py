"""Keep the frozen embedding and head of a model in the host's memory.

The outputs of the embedding go to the device; the rows of the head pass through it, some at a time.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

from msa_lite.io.models.transit import pin, unpin

HEAD_BLOCK = 64 << 20
"""Bytes of the rows on the device at a time; there are two such buffers."""


def can_leave_embedding(model: Any) -> bool:
    """Check whether the embedding is frozen, no head shares its weight, and it has not left the parameters yet."""
    import torch

    embedding = model.get_input_embeddings()
    return isinstance(embedding, torch.nn.Embedding) and _is_free(embedding, model.get_output_embeddings())


def can_leave_head(model: Any) -> bool:
    """Check whether the head is a frozen linear layer of its own, and has not left the parameters yet."""
    import torch

    head = model.get_output_embeddings()
    return type(head) is torch.nn.Linear and _is_free(head, model.get_input_embeddings())


def _is_free(end: Any, other_end: Any) -> bool:
    """Check whether the weight of embedding or head is a frozen parameter that the other one does not share."""
    weight = getattr(end, "_parameters", {}).get("weight")
    return weight is not None and not weight.requires_grad and getattr(other_end, "weight", None) is not weight


def leave_embedding(model: Any, device: Any) -> None:
    """Keep the embedding in the host's memory, out of the model's parameters, so that no library moves it back."""
    embedding = model.get_input_embeddings()
    embedding.to("cpu")
    weight = embedding._parameters.pop("weight").detach()
    embedding.weight = weight  # a plain attribute: `model.device` stays that of the layers
    embedding.register_forward_pre_hook(lambda module, inputs: tuple(ids.cpu() for ids in inputs))
    embedding.register_forward_hook(lambda module, inputs, states: states.to(device))


def leave_head(model: Any, device: Any) -> None:
    """Keep the head in the host's memory, out of the model's parameters; its rows pass through for each product.

    The logits are those of a head on the device but for the last bits: a product of other sizes may be summed in
    another order.
    """
    import torch

    head = model.get_output_embeddings()
    weight, bias = head._parameters.pop("weight").detach(), head.bias
    home = torch.empty(weight.shape, dtype=weight.dtype)
    rows = PassingRows(home.copy_(weight), torch.device(device))
    head.weight = home

    def forward(states: Any) -> Any:
        if torch.is_autocast_enabled(rows.device.type):
            states = states.to(home.dtype)
        logits = _product().apply(states, rows)
        return logits if bias is None else logits + bias

    head.forward = forward


class PassingRows:
    """A matrix (outputs, inputs) in the host's memory whose rows pass through two buffers on a device."""

    def __init__(self, matrix: Any, device: Any) -> None:
        import torch

        self.matrix, self.device = matrix, device
        most = max(1, min(len(matrix), HEAD_BLOCK // (matrix.shape[1] * matrix.element_size())))
        self._blocks = [slice(start, min(len(matrix), start + most)) for start in range(0, len(matrix), most)]
        self._buffers = [torch.empty((most, matrix.shape[1]), dtype=matrix.dtype, device=device) for _ in range(2)]
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._beside is not None:
            weakref.finalize(self, unpin, pin([matrix.view(-1).view(torch.uint8)]))

    def each(self) -> Iterator[tuple[slice, Any]]:
        """Yield the place and the rows of each block. The rows are good until the next ones are asked for."""
        import torch

        coming = self._fetch(0)
        for number, block in enumerate(self._blocks):
            rows, is_there = coming
            if is_there is not None:
                torch.cuda.current_stream(self.device).wait_event(is_there)
            if number + 1 < len(self._blocks):
                coming = self._fetch(number + 1)
            yield block, rows

    def _fetch(self, number: int) -> tuple[Any, Any]:
        """Begin to copy a block; return its place on the device, and the event that ends the copy."""
        import torch

        block = self._blocks[number]
        rows = self._buffers[number % 2][: block.stop - block.start]
        if self._beside is None:
            return rows.copy_(self.matrix[block]), None
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._beside):
            rows.copy_(self.matrix[block], non_blocking=True)
            return rows, self._beside.record_event()


@functools.cache
def _product() -> Any:
    """Return the autograd function of states (…, inputs) and `PassingRows`: states · rowsᵀ (…, outputs)."""
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, states: Any, rows: PassingRows) -> Any:
            context.rows = rows
            logits = states.new_empty((*states.shape[:-1], len(rows.matrix)))
            for block, matrix in rows.each():
                logits[..., block] = states @ matrix.T
            return logits

        @staticmethod
        def backward(context: Any, gradient: Any) -> tuple[Any, None]:
            shape = (*gradient.shape[:-1], context.rows.matrix.shape[1])
            total = torch.zeros(shape, device=gradient.device)
            for block, matrix in context.rows.each():
                total += gradient[..., block] @ matrix
            return total.to(gradient.dtype), None

    return Product
