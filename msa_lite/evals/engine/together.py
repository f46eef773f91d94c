"""Decode answers in batches, by our own loop.

Rows that have ended leave the batch, so a batch costs the total length of its answers, not the longest answer times the
number of rows. A common beginning of its prompts, a system message say, runs once, and so does a prompt that several
answers are drawn for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msa_lite.data import decode_answer
from msa_lite.evals.engine.forward import WORTH_SHARING, common_start
from msa_lite.evals.engine.models import Runner, check_numbers

_LEAVE = 0.75  # take ended rows out when at most this part goes on; taking out copies the cache

Choose = Callable[[Any, Any, int], Any]
"""(n, vocabulary) logits, the places of their prompts, and the number of tokens so far → (n,) next tokens."""


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are answered together."""

    tokenizer: Any
    prompts: Sequence[list[int]]
    room: Sequence[int]
    """The most tokens of each answer."""
    stop: tuple[str, ...] = ()
    """The texts that end an answer."""
    ends: Sequence[int] = ()
    """The tokens that end an answer."""
    hidden: int | None = None
    """A token that no other may attend to."""


def likeliest(logits: Any, rows: Any, step: int) -> Any:
    """Choose the likeliest token of each row. Raise NotFiniteError for NaN."""
    most, chosen = logits.max(-1)
    check_numbers(most)
    return chosen


@dataclass
class _Rows:
    """The rows of a batch that go on."""

    numbers: Any
    """(n,) the place of each row's prompt in the batch."""
    states: Any
    """(n, ·) of the last token."""
    cache: Any
    """The key-value cache."""
    mask: Any
    """(n, tokens) 1 where later tokens may attend."""
    positions: Any
    """(n, 1) of the last token."""

    def take(self, chosen: Any) -> None:
        """Go on with the chosen rows alone, which may repeat."""
        self.numbers, self.states, self.mask, self.positions = (
            values[chosen] for values in (self.numbers, self.states, self.mask, self.positions)
        )
        self.cache.batch_select_indices(chosen)

    def run(self, runner: Runner, tokens: Any, alive: Any) -> None:
        """Run the next token of each row. Rows that are not alive stay at their positions: the window may end there."""
        import torch

        self.positions = self.positions + alive[:, None]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        states, self.cache = _forward(runner, tokens[:, None], self.mask, self.positions, self.cache)
        self.states = states[:, -1]


def _forward(runner: Runner, ids: Any, mask: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
    """Run tokens that go on from a cache; return their states, and the cache that includes them.

    A model of states alone has nothing left to attend to, and some (Mamba) read a mask as that of the new tokens.
    """
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
    layers = getattr(cache, "layers", None)
    if layers and not any(hasattr(layer, "keys") for layer in layers):
        inputs["attention_mask"] = None
    if "position_ids" in runner.halves.arguments:
        inputs["position_ids"] = positions
    return runner.halves.run(cache, **inputs)


def decode_together(runner: Runner, batch: PromptBatch, choose: Choose) -> list[list[int]]:
    """Return the tokens of an answer to each prompt. Prompts that are equal run once."""
    import torch

    from msa_lite.evals.engine.key_values import can_divide, make_room

    last = torch.tensor([*batch.ends] or [-1], device=runner.device)
    limits = torch.tensor(batch.room, device=runner.device)
    answers: list[list[int]] = [[] for _ in batch.prompts]
    fitting = [i for i, tokens in enumerate(batch.room) if tokens > 0]
    if not fitting:
        return answers
    with torch.inference_mode():
        rows = _run_prompts(runner, [batch.prompts[i] for i in fitting], batch.hidden)
        rows.numbers = torch.tensor(fitting, device=runner.device)
        make_room(rows.cache)
        alive = torch.ones_like(rows.numbers, dtype=torch.bool)
        for step in range(max(batch.room)):
            chosen = choose(runner.halves.logits(rows.states), rows.numbers, step)
            alive = alive & ~torch.isin(chosen, last)
            for row, token, goes_on in zip(rows.numbers.tolist(), chosen.tolist(), alive.tolist(), strict=True):
                if goes_on:
                    answers[row].append(token)
            alive = alive & (limits[rows.numbers] > step + 1)
            if batch.stop:
                going = [not is_stopped(batch.tokenizer, answers[row], batch.stop) for row in rows.numbers.tolist()]
                alive = alive & alive.new_tensor(going)
            if not alive.any():
                break
            if int(alive.sum()) <= _LEAVE * len(alive) and can_divide(rows.cache):
                keep = alive.nonzero().flatten()
                rows.take(keep)
                chosen, alive = chosen[keep], alive[keep]
            rows.run(runner, chosen, alive)
    return answers


def _run_prompts(runner: Runner, prompts: Sequence[list[int]], hidden: int | None) -> _Rows:
    """Run prompts up to their last token, equal ones once."""
    import torch

    from msa_lite.evals.engine.key_values import can_divide

    distinct = {tuple(prompt): place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    rows = _run_distinct(runner, [list(prompt) for prompt in distinct], hidden)
    if len(distinct) == len(prompts):
        return rows
    if not can_divide(rows.cache):
        return _run_distinct(runner, prompts, hidden)
    rows.take(torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=runner.device))
    return rows


def _run_distinct(runner: Runner, prompts: Sequence[list[int]], hidden: int | None) -> _Rows:
    """Run each of some prompts up to its last token, and their common beginning once."""
    import torch

    beginning, cache = _run_beginning(runner, prompts, hidden)
    shared = len(beginning)
    ids, mask = left_padded(runner, [prompt[shared:] for prompt in prompts], 0)
    before = torch.tensor([beginning] * len(prompts), dtype=ids.dtype, device=runner.device)
    mask = torch.cat([torch.ones_like(before), mask], dim=1)
    if hidden is not None:
        mask = mask * (torch.cat([before, ids], dim=1) != hidden)
    # As `generate` of transformers does: the first visible token has position 0.
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, shared:]
    states, cache = _forward(runner, ids, mask, positions, cache)
    numbers = torch.arange(len(prompts), device=runner.device)
    return _Rows(numbers, states[:, -1], cache, mask, positions[:, -1:])


def _run_beginning(runner: Runner, prompts: Sequence[list[int]], hidden: int | None) -> tuple[list[int], Any]:
    """Run the common beginning of all prompts once; return it, and its key-value cache for each prompt.

    Padding stands between it and the rest of a short prompt. A layer with a sliding window, or with a state instead of
    a cache, would take that for tokens, and so would a model that counts positions itself. They share nothing:
    ([], None).
    """
    import torch

    from msa_lite.evals.engine.key_values import keeps_all

    shared = min(common_start(prompts), min(map(len, prompts)) - 1)
    if len(prompts) < 2 or shared < WORTH_SHARING or "position_ids" not in runner.halves.arguments:
        return [], None
    if max(map(len, prompts)) > _window(runner):
        return [], None
    ids = torch.tensor([prompts[0][:shared]], device=runner.device)
    mask = torch.ones_like(ids) if hidden is None else (ids != hidden).long()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.inference_mode():
        _, cache = _forward(runner, ids, mask, positions, None)
        if not keeps_all(cache):
            return [], None
        cache.batch_repeat_interleave(len(prompts))
    return prompts[0][:shared], cache


def _window(runner: Runner) -> float:
    """Return the smallest window that the model's config names. GPT-Neo names one, but its layers keep all keys."""
    config = runner.model.config.get_text_config()
    named = {name: size for name, size in vars(config).items() if name.endswith(("window", "window_size"))}
    return min((size for size in named.values() if isinstance(size, int) and size > 1), default=math.inf)


def left_padded(runner: Runner, prompts: Sequence[list[int]], pad: int) -> tuple[Any, Any]:
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=runner.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=runner.device)
    return ids, mask


def is_stopped(tokenizer: Any, tokens: Sequence[int], stop: Sequence[str]) -> bool:
    """Check whether an answer holds a stop string."""
    text = decode_answer(tokenizer, tokens) if stop else ""
    return any(word in text for word in stop)
