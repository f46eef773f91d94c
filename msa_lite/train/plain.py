"""The plain loss of a fit, with the tokens that all rows of a step begin with run once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, takewhile
from typing import Any, TypeAlias

from msa_lite.data import IGNORE, Example, group_rows, pass_tokens, to_batch
from msa_lite.io.models.heads import Halves, autocast, split_model
from msa_lite.train.packed import can_pack, packing, run_packed
from msa_lite.train.share import ALONE, StepShare, run_passes, shortest

_WORTH_SHARING = 8  # tokens; for less, a pass of their own costs more than it saves
_PADDED_ATTENTION = 16  # of packed rows attention alone is padded, a sixteenth of the work
_TOLERANCE = 0.05  # of the largest state: far above what bf16 and 4-bit kernels round, far below what a leak changes


def common_beginning(examples: Sequence[Example]) -> int:
    """Return the number of tokens that all rows, which have labels, begin with and that predict none; 0 for a few."""
    if len(examples) < 2:
        return 0
    columns = zip(*(e.ids for e in examples), strict=False)
    common = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns))
    # The token before a label predicts it, so it belongs to the row.
    common = min(common, *(_labelled(e)[0] - 1 for e in examples))
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


def label_states(states: Any, examples: Sequence[Example]) -> tuple[Any, Any]:
    """Return the (n, ·) states that predict the labels of padded examples, and these (n,) labels.

    states: (rows, width, ·), of the last `width` tokens of the padded rows. The places come from the examples, not from
    tensors, so that a GPU need not be waited for.
    """
    import torch

    start = max(len(e.ids) for e in examples) - states.shape[1]
    row_of, position = torch.tensor(label_places(examples, start), device=states.device).T
    targets = [e.labels[t] for e in examples for t in _labelled(e)]
    return states[row_of, position], torch.tensor(targets, device=states.device)


def label_places(examples: Sequence[Example], start: int = 0) -> list[tuple[int, int]]:
    """Return (row, position) of the tokens that predict labels, the position counted from `start`."""
    return [(row, t - 1 - start) for row, e in enumerate(examples) for t in _labelled(e)]


def _labelled(example: Example) -> list[int]:
    """Return the places of the labels that some token predicts."""
    return [t for t, label in enumerate(example.labels) if t and label != IGNORE]


def count_labels(example: Example) -> int:
    """Return the number of labels that some token predicts."""
    return len(_labelled(example))


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


_Backward: TypeAlias = Callable[[Any], None]


@dataclass
class PlainLoss:
    """The objective of a fit that was given no other one."""

    examples: Sequence[Example]
    pad: int
    """The token that fills up rows of a batch."""
    _halves: Halves | None = field(default=None, init=False)
    _shares: bool = field(default=False, init=False)
    _packs: bool = field(default=False, init=False)
    _share: StepShare = field(default=ALONE, init=False)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest row."""
        return max(len(e.ids) for e in self.examples)

    def describe(self) -> dict[str, Any]:
        """Return nothing: a manifest names only objectives in place of this one."""
        return {}

    def prepare(self, model: Any, share: StepShare = ALONE) -> None:
        """Split the model, and check whether rows may share their beginning, and stand in one sequence.

        They may not if they are divided.
        """
        self._share, self._halves = share, split_model(model)
        self._shares = share.is_whole and can_share(self._halves)
        beginning = partial(Beginning.run, self._halves) if self._shares else None
        self._packs = share.is_whole and can_pack(self._halves, beginning)

    def release(self) -> None:
        """Let go of the model."""
        self._halves = None

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: _Backward) -> Any:
        """Run the rows of an optimiser step, as `train.Objective` describes; `micro` of the longest rows fit."""
        import torch

        examples = [self.examples[i] for i in rows if count_labels(self.examples[i])]
        labels = sum(map(count_labels, examples))
        if not self._share.is_whole:
            return self._run_divided(model, examples or self.examples[:1], max(1, labels), micro, backward)
        total = torch.zeros((), device=model.device)
        packs = self._packs and not _has_router_loss(model)
        with packing(self._halves) if packs and self._halves else nullcontext():
            beginning = self._run_beginning(model, examples)
            start = beginning.tokens if beginning else 0
            budget, per_pass = micro * self.longest - start, pass_tokens(model.device)
            run, per_pass = (self._run_packed, _PADDED_ATTENTION * per_pass) if packs else (self._run, per_pass)
            for chosen in group_rows([len(e.ids) - start for e in examples], budget, per_pass):
                total += run(model, [examples[i] for i in chosen], beginning, labels, backward)
            if beginning:
                beginning.backward()
        return total

    def _run_divided(
        self, model: Any, examples: Sequence[Example], labels: int, micro: int, backward: _Backward
    ) -> Any:
        """Run this process's share of a step's rows. labels: those of the whole step."""
        from torch.nn.functional import cross_entropy

        halves = self._halves
        assert halves is not None, "prepare comes first"

        def loss(rows: Sequence[int]) -> Any:
            chosen = [examples[i] for i in rows]
            batch = to_batch(chosen, self.pad, model.device)
            if _has_router_loss(model):
                return model(**batch, use_cache=False, num_items_in_batch=labels).loss
            with autocast(model):
                states = label_states(run_rows(halves, batch), chosen)
                return halves.map_logits(partial(cross_entropy, reduction="none"), *states).sum() / labels

        lengths = [len(example.ids) for example in examples]
        passes = self._share.passes(lengths, micro * self.longest, pass_tokens(model.device))
        spare = shortest(examples, [count_labels(example) for example in examples])
        return run_passes(self._share, model, passes, spare, loss, backward)

    def _run_beginning(self, model: Any, examples: Sequence[Example]) -> Beginning | None:
        """Run what all rows begin with, if it is long enough and the model allows it."""
        # Activation checkpointing runs layers again, on a cache that would then hold their keys twice.
        if not self._shares or any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            return None
        tokens = common_beginning(examples)
        with autocast(model):
            return Beginning.run(self._halves, examples[0].ids[:tokens]) if self._halves and tokens else None

    def _run(
        self,
        model: Any,
        examples: Sequence[Example],
        beginning: Beginning | None,
        labels: int,
        backward: _Backward,
    ) -> Any:
        """Run one pass forward and backward; return its share of the loss. labels: those of the whole step."""
        halves = self._halves
        assert halves is not None, "prepare comes first"
        batch = to_batch(examples, self.pad, model.device)
        if _has_router_loss(model):  # the model adds a loss of its router to its own
            loss = model(**batch, use_cache=False, num_items_in_batch=labels).loss
            backward(loss)
            return loss.detach()
        with autocast(model):
            states = run_rows(halves, batch, beginning)
        return _backward_of_labels(halves, *label_states(states, examples), labels, backward)

    def _run_packed(
        self,
        model: Any,
        examples: Sequence[Example],
        beginning: Beginning | None,
        labels: int,
        backward: _Backward,
    ) -> Any:
        """Run one pass as `_run` does, of rows one after another and up to the token that predicts their last label."""
        import torch

        halves, start = self._halves, beginning.tokens if beginning else 0
        assert halves is not None, "prepare comes first"
        ids = [e.ids[start : _labelled(e)[-1]] for e in examples]
        with autocast(model):
            states = run_packed(halves, ids, beginning)
        firsts = list(accumulate(map(len, ids), initial=-start - 1))
        places = [first + t for first, e in zip(firsts, examples, strict=False) for t in _labelled(e)]
        targets = torch.tensor([e.labels[t] for e in examples for t in _labelled(e)], device=states.device)
        return _backward_of_labels(halves, states[torch.tensor(places)], targets, labels, backward)


def _has_router_loss(model: Any) -> bool:
    return bool(getattr(model.config, "output_router_logits", False))


def _backward_of_labels(halves: Halves, states: Any, targets: Any, labels: int, backward: _Backward) -> Any:
    """Return Σ −log p of the targets, divided by `labels`, after the backward pass of (n, ·) states.

    Each block of logits has its backward pass to the states before the next one is made; then one pass takes the
    gradients of all states through the body. So the head runs once, and neither logits nor their gradients pile up.
    """
    import torch

    total, gradients = torch.zeros((), device=states.device), []
    for block in halves.blocks(len(states)):
        leaf = states[block].detach().requires_grad_()
        with autocast(halves.model):
            logits = halves.logits(leaf)
        loss = _summed_loss().apply(logits, targets[block]) / labels
        backward(loss)
        total += loss.detach()
        gradients.append(leaf.grad)
        del logits, loss  # of the last block they would stay during the pass through the body
    if states.requires_grad:  # not where the head alone is trained
        states.backward(torch.cat(gradients))
    return total


@cache
def _summed_loss() -> Any:
    """Return an autograd function of (n, v) logits and (n,) targets: Σ −log p.

    The gradient of the logits takes the place of their log-probabilities, where torch's loss makes two more tensors.
    """
    import torch

    class SummedLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, targets: Any) -> Any:
            ctx.targets, ctx.log_p = targets[:, None], logits.log_softmax(-1)
            return -ctx.log_p.gather(1, ctx.targets).sum()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            of_logits, ctx.log_p = ctx.log_p.exp_(), None
            of_logits.scatter_add_(1, ctx.targets, -torch.ones_like(ctx.targets, dtype=of_logits.dtype))
            return of_logits.mul_(gradient), None

    return SummedLoss
