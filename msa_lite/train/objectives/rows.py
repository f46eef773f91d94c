"""Rows as a model runs them: the tokens that predict labels, and those that all rows of a step begin with.

A beginning that rows share, such as a system prompt, is run once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from msa_lite.data import IGNORE, Example
from msa_lite.io.models.heads import Halves, autocast

_WORTH_SHARING = 8  # tokens; for less, a pass of their own costs more than it saves
_TOLERANCE = 0.05  # of the largest state: far above what bf16 and 4-bit kernels round, far below what a leak changes


def label_states(states: Any, examples: Sequence[Example]) -> tuple[Any, Any]:
    """Return the (n, ·) states that predict the labels of padded examples, and these (n,) labels.

    states: (rows, width, ·), of the last `width` tokens of the padded rows. The places come from the examples, not from
    tensors, so that a GPU need not be waited for.
    """
    import torch

    start = max(len(e.ids) for e in examples) - states.shape[1]
    row_of, position = torch.tensor(label_places(examples, start), device=states.device).T
    targets = [e.labels[t] for e in examples for t in labelled(e)]
    return states[row_of, position], torch.tensor(targets, device=states.device)


def label_places(examples: Sequence[Example], start: int = 0) -> list[tuple[int, int]]:
    """Return (row, position) of the tokens that predict labels, the position counted from `start`."""
    return [(row, t - 1 - start) for row, e in enumerate(examples) for t in labelled(e)]


def labelled(example: Example) -> list[int]:
    """Return the places of the labels that some token predicts."""
    return [t for t, label in enumerate(example.labels) if t and label != IGNORE]


def count_labels(example: Example) -> int:
    """Return the number of labels that some token predicts."""
    return len(labelled(example))


def common_beginning(examples: Sequence[Example]) -> int:
    """Return the number of tokens that all rows, which have labels, begin with and that predict none; 0 for a few."""
    if len(examples) < 2:
        return 0
    columns = zip(*(e.ids for e in examples), strict=False)
    common = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns))
    # The token before a label predicts it, so it belongs to the row.
    common = min(common, *(labelled(e)[0] - 1 for e in examples))
    return common if common >= _WORTH_SHARING else 0


@dataclass(frozen=True)
class Beginning:
    """The keys and values of the tokens that rows have in common."""

    tokens: int
    roots: tuple[Any, ...]
    """Keys and values of each layer, (1, heads, tokens, width)."""
    leaves: tuple[Any, ...]
    """The same without history; gradients gather here."""

    @classmethod
    def run(cls, halves: Halves, ids: Sequence[int]) -> Beginning:
        """Run the tokens."""
        import torch

        _, cache = halves.run(input_ids=torch.tensor([ids], device=halves.model.device), use_cache=True)
        roots = tuple(values for layer in cache.layers for values in (layer.keys, layer.values))
        leaves = tuple(root.detach().requires_grad_(root.requires_grad) for root in roots)
        return cls(len(ids), roots, leaves)

    def cache(self, rows: int) -> Any:
        """Return a key-value cache from which this many rows can go on."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(len(self.leaves) // 2):
            keys, values = (leaf.expand(rows, -1, -1, -1) for leaf in self.leaves[2 * layer : 2 * layer + 2])
            cache.update(keys, values, layer)
        return cache

    def backward(self) -> None:
        """Carry the gradients that the rows left through the beginning."""
        import torch

        pairs = [(root, leaf.grad) for root, leaf in zip(self.roots, self.leaves, strict=True) if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])


def run_rows(halves: Halves, batch: dict[str, Any], beginning: Beginning | None = None) -> Any:
    """Return (rows, width, ·) states of a padded batch, or of what comes after the beginning that its rows share."""
    import torch

    if beginning is None:
        return halves.run(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)[0]
    mask, start = batch["attention_mask"], beginning.tokens
    ids = batch["input_ids"][:, start:]
    # Padding repeats the last position: one beyond the model's window must not be looked up.
    places = torch.arange(mask.shape[1], device=mask.device)
    positions = torch.minimum(places, mask.sum(1, keepdim=True) - 1)[:, start:]
    cache = beginning.cache(len(ids))
    return halves.run(cache, input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)[0]


def can_share(halves: Halves) -> bool:
    """Check that rows that go on from a common beginning get the states that they get alone, and none sees another.

    False for models that are not made of plain attention, whose cache has other layers than keys and values, and for
    those with dropout, which would drop the same of all rows.
    """
    import torch
    from transformers.cache_utils import DynamicLayer

    model = halves.model
    dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules())
    if halves.body is None or dropout or getattr(model.config, "attention_dropout", None):
        return False
    ids = (torch.arange(24, device=model.device).view(2, 12) * 7 + 3) % halves.vocabulary
    ids[1, :4] = ids[0, :4]
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    with torch.no_grad(), autocast(model):
        _, cache = halves.run(input_ids=ids[:1, :4], use_cache=True)
        if cache is None or any(type(layer) is not DynamicLayer for layer in getattr(cache, "layers", [None])):
            return False
        shared = run_rows(
            halves, {"input_ids": ids, "attention_mask": mask}, Beginning.run(halves, ids[0, :4].tolist())
        )
        for row, length in enumerate((12, 9)):
            alone = halves.body(input_ids=ids[row : row + 1, :length], use_cache=False).last_hidden_state[0, 4:]
            if (shared[row, : length - 4] - alone).abs().max() > _TOLERANCE * alone.abs().max():
                return False
    return True
