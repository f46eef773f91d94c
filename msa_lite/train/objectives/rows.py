"""Rows as a model runs them: padded or packed, perhaps behind tokens that all have in common; where their labels are.

A beginning that rows share, such as a system prompt, is run once for all of them.

Packed rows of unlike lengths stand one after another in a single sequence, without padding. All of a model but its
attention works token by token. So attention alone sees them as padded rows, each behind the beginning that all have in
common. Only models of plain causal attention are run so: the keys and values of a layer, no window, no state that goes
from token to token. On a GPU rows stay padded.

A run over a few tokens shows whether rows get the states that they get alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from msa_lite.data import IGNORE, Example
from msa_lite.io.models.devices import is_out_of_memory
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

    @classmethod
    def of_rows(cls, halves: Halves, examples: Sequence[Example]) -> Beginning | None:
        """Run what rows with labels begin with, if it is long enough and the model allows it."""
        tokens = common_beginning(examples)
        return cls.run(halves, examples[0].ids[:tokens]) if tokens and can_share(halves) else None

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


# Packed rows

_NAME = "msa_lite_rows"  # among transformers' ways of attention


@dataclass(frozen=True)
class Layout:
    """The places of packed rows."""

    lengths: tuple[int, ...]
    """Tokens of each row."""
    start: int
    """Tokens of the beginning that the rows share, whose keys and values stand first."""
    padded: Any
    """(rows · longest,) the token at each place of the padded rows; any at padding."""
    places: Any
    """(tokens,) the place of each token among the padded rows."""
    mask: Any
    """(longest, start + longest) True where a token sees another; None without a beginning."""

    @classmethod
    def of(cls, lengths: Sequence[int], start: int, device: Any) -> Layout:
        """Lay rows out in the order of their lengths given."""
        import torch

        longest, counts = max(lengths), torch.tensor(lengths)
        column = torch.arange(longest)
        is_token = column < counts[:, None]
        first = counts.cumsum(0) - counts
        padded = torch.where(is_token, first[:, None] + column, 0).flatten()
        mask = (column[:, None] + start >= torch.arange(start + longest)).to(device) if start else None
        places = is_token.flatten().nonzero().flatten()
        return cls(tuple(lengths), start, padded.to(device), places.to(device), mask)

    @property
    def positions(self) -> Any:
        """Return the (1, tokens) positions of the tokens in their rows, the beginning counted."""
        import torch

        return torch.cat([torch.arange(self.start, self.start + n) for n in self.lengths])[None].to(self.padded.device)

    def pad(self, packed: Any) -> Any:
        """Return (rows, heads, longest, width) of (1, heads, tokens, width)."""
        rows = _moves()[0].apply(packed[0].transpose(0, 1), self.padded, self.places)
        return rows.view(len(self.lengths), -1, *rows.shape[1:]).transpose(1, 2)

    def pack(self, padded: Any) -> Any:
        """Return (1, tokens, heads, width) of (rows, heads, longest, width)."""
        return _moves()[1].apply(padded.transpose(1, 2).flatten(0, 1), self.padded, self.places)[None]

    def attend(self, query: Any, key: Any, value: Any, scale: float | None, dropout: float) -> Any:
        """Return (1, tokens, heads, width) attention of (1, heads, ·, width) tensors, the beginning first in two."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        def with_beginning(states: Any) -> Any:
            padded, beginning = self.pad(states[:, :, self.start :]), states[:, :, : self.start]
            return torch.cat([beginning.expand(len(padded), -1, -1, -1), padded], 2) if self.start else padded

        output = scaled_dot_product_attention(
            self.pad(query),
            with_beginning(key),
            with_beginning(value),
            attn_mask=self.mask,
            dropout_p=dropout,
            scale=scale,
            is_causal=self.mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.pack(output)


@cache
def _moves() -> tuple[Any, Any]:
    """Return the autograd functions that pad and pack. Indexing alone would add up gradients token by token."""
    import torch

    class Pad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tokens: Any, padded: Any, places: Any) -> Any:
            ctx.save_for_backward(places)
            return tokens.index_select(0, padded)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (places,) = ctx.saved_tensors
            return gradient.index_select(0, places), None, None  # nothing looks at padding, so it has no gradient

    class Pack(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Any, padded: Any, places: Any) -> Any:
            ctx.save_for_backward(places)
            ctx.count = len(padded)
            return rows.index_select(0, places)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (places,) = ctx.saved_tensors
            whole = gradient.new_zeros(ctx.count, *gradient.shape[1:])
            return whole.index_copy_(0, places, gradient), None, None

    return Pad, Pack


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_rows: Layout | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attend within packed rows; without any, as transformers does."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packed_rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise ValueError(f"packed rows have no {unknown[0]}")
    return packed_rows.attend(query, key, value, scaling, dropout), None


@contextmanager
def packing(halves: Halves) -> Iterator[None]:
    """Have the attention of a model take packed rows, forward and backward."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attention)
    configs = _configs(halves)
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def _configs(halves: Halves) -> list[Any]:
    """Return the configs of a body's modules, each once."""
    assert halves.body is not None
    return list({id(m.config): m.config for m in halves.body.modules() if hasattr(m, "config")}.values())


def run_packed(halves: Halves, ids: Sequence[Sequence[int]], beginning: Beginning | None = None) -> Any:
    """Return (tokens, ·) states of rows, one after another; within `packing`.

    beginning: its tokens, which `ids` leave out, come before each row.
    """
    import torch

    layout = Layout.of([len(row) for row in ids], beginning.tokens if beginning else 0, halves.model.device)
    cache = beginning.cache(1) if beginning else None
    tokens = torch.tensor([token for row in ids for token in row], device=halves.model.device)
    places = {"position_ids": layout.positions, "packed_rows": layout}
    return halves.run(cache, input_ids=tokens[None], use_cache=cache is not None, **places)[0][0]


def can_pack(halves: Halves, start: Callable[[Sequence[int]], Beginning] | None = None) -> bool:
    """Check that packed rows get the states that they get alone, on the CPU.

    start: a function of ids that returns their `Beginning`; None where rows do not share theirs.
    """
    import torch

    model = halves.model
    if halves.body is None or model.device.type != "cpu" or not all(map(_is_plain, _configs(halves))):
        return False
    ids = ((torch.arange(16).view(2, 8) * 7 + 3) % halves.vocabulary).tolist()
    ids = [ids[0][:4] + ids[1][4:7], ids[0]]  # a short row first: the next one must not see it
    training = model.training
    model.eval()  # without dropout
    try:
        with torch.no_grad(), autocast(model):
            alone = [halves.body(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0] for row in ids]
            with packing(halves):
                for cut in (0, 4) if start else (0,):
                    beginning = start(ids[0][:cut]) if start and cut else None
                    states = run_packed(halves, [row[cut:] for row in ids], beginning)
                    expected = torch.cat([of_row[cut:] for of_row in alone])
                    if not (states - expected).abs().max() <= _TOLERANCE * expected.abs().max():
                        return False
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return False  # its forward pass takes no such rows
    finally:
        model.train(training)
    return True


def _is_plain(config: Any) -> bool:
    """Check that a config's attention is transformers' own, over all tokens."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "attention_window")]
    is_own = getattr(config, "_attn_implementation", None) == "sdpa"
    return is_own and {*kinds} == {"full_attention"} and not any(windows)
