"""Rows of unlike lengths one after another in a single sequence, without padding.

All of a model but its attention works token by token. So the rows of a pass stand in one sequence, and attention alone
sees them as padded rows, each behind the beginning that all have in common. Only models of plain causal attention are
run so: the keys and values of a layer, no window, no state that goes from token to token. A run over a few tokens shows
whether rows get the states that they get alone. On a GPU rows stay padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from msa_lite.io.models.devices import is_out_of_memory
from msa_lite.io.models.heads import Halves, autocast

_NAME = "msa_lite_rows"  # among transformers' ways of attention
_TOLERANCE = 0.05  # of the largest state, as for rows that share their beginning


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


def run_packed(halves: Halves, ids: Sequence[Sequence[int]], beginning: Any = None) -> Any:
    """Return (tokens, ·) states of rows, one after another; within `packing`.

    beginning: a `beginning.Beginning`, whose tokens `ids` leave out.
    """
    import torch

    layout = Layout.of([len(row) for row in ids], beginning.tokens if beginning else 0, halves.model.device)
    cache = beginning.cache(1) if beginning else None
    tokens = torch.tensor([token for row in ids for token in row], device=halves.model.device)
    places = {"position_ids": layout.positions, "packed_rows": layout}
    return halves.run(cache, input_ids=tokens[None], use_cache=cache is not None, **places)[0][0]


def can_pack(halves: Halves, start: Any = None) -> bool:
    """Check that packed rows get the states that they get alone, on the CPU.

    start: a function of ids that returns their `beginning.Beginning`; None where rows do not share theirs.
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
                    states = run_packed(halves, [row[cut:] for row in ids], start(ids[0][:cut]) if cut else None)
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
