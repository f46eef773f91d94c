"""The key-value cache of a batch that decodes."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

_ROOM = 32  # new tokens that a layer's tensors are made for at a time


class RoomyLayer(DynamicLayer):
    """A layer of keys and values with room for new tokens: it copies its tensors once in a while, not at each token.

    `keys` and `values` are the used part of larger tensors. After rows are taken out, the next token makes room
    anew.
    """

    keys: Any
    values: Any
    _tensors: tuple[Any, Any] | None = None

    def update(self, key_states: Any, value_states: Any, *args: Any, **others: Any) -> tuple[Any, Any]:
        """Append (rows, heads, new tokens, ·) keys and values; return all of them."""
        used = self.keys.shape[-2]
        needed = used + key_states.shape[-2]
        if not self._has_room(needed):
            self._tensors = (_enlarged(self.keys, needed + _ROOM), _enlarged(self.values, needed + _ROOM))
        assert self._tensors is not None
        for tensor, new in zip(self._tensors, (key_states, value_states), strict=True):
            tensor[:, :, used:needed] = new
        self.keys, self.values = (tensor[:, :, :needed] for tensor in self._tensors)
        return self.keys, self.values

    def _has_room(self, needed: int) -> bool:
        if self._tensors is None or self._tensors[0].shape[-2] < needed:
            return False
        # Taking out rows makes new tensors. The old ones are kept, so that nothing else gets their address.
        pairs = zip(self._tensors, (self.keys, self.values), strict=True)
        return all(tensor.data_ptr() == part.data_ptr() and len(tensor) == len(part) for tensor, part in pairs)


def _enlarged(part: Any, tokens: int) -> Any:
    """Copy (rows, heads, used, ·) values to the beginning of a tensor for so many tokens."""
    rows, heads, used, width = part.shape
    tensor = torch.empty((rows, heads, tokens, width), dtype=part.dtype, device=part.device)
    tensor[:, :, :used] = part
    return tensor


def can_divide(cache: Any) -> bool:
    """Check whether rows can be taken out of a cache: it holds only keys and values. Mamba's layers keep states."""
    kinds = (DynamicLayer, DynamicSlidingWindowLayer, RoomyLayer)
    return type(cache) is DynamicCache and all(type(layer) in kinds for layer in cache.layers)


def keeps_all(cache: Any) -> bool:
    """Check whether a cache keeps keys and values of all tokens, those outside of a window included."""
    return type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)


def make_room(cache: Any) -> None:
    """Replace each layer of a cache that keeps all tokens by one with room for new ones. Other caches stay."""
    if type(cache) is not DynamicCache:
        return
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.get_seq_length():
            cache.layers[place] = RoomyLayer()
            vars(cache.layers[place]).update(vars(layer))
