"""Generate answers: greedy, or sampled for benchmarks whose published numbers are.

Greedy decoding is our own loop, since rows that have ended leave the batch: a batch costs the sum of its answers'
lengths, not its longest answer times its rows. A common beginning of its prompts, a system message say, runs once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from msa_lite.errors import StageError
from msa_lite.evals.forward import WORTH_SHARING, common_start
from msa_lite.evals.models import Runner, can_divide, check_numbers, no_numbers

_EXPECTED = 0.25  # mean length of answers, as a part of the most tokens
_LEAVE = 0.75  # take ended rows out when at most this part goes on; taking out copies the cache


@dataclass(frozen=True)
class Decoding:
    """The settings of generation."""

    max_new_tokens: int
    """The most tokens of an answer."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; the answer is cut before them."""
    samples: int = 0
    """0 for one greedy answer; or the number to draw with the model's own sampling settings, as RESTOR's authors do."""
    min_new_tokens: int = 0
    """The fewest tokens of a sample."""
    max_length: int | None = None
    """The most tokens of a sample together with its prompt."""
    seed: int = 0


def generate(
    runner: Runner,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    *,
    hidden: int | None = None,
    end: int | None = None,
) -> Iterator[list[tuple[int, list[str]]]]:
    """Yield (index of the prompt, its answers: one, or `samples`), a batch at a time, in no particular order.

    prompts: token ids. Answers end at the model's own end tokens and the tokenizer's. They are decoded without special
    tokens, cut at the first stop string and stripped, and never go beyond the model's window. hidden: a token id that
    no position may attend to (`compat.mask_eq_pad`); None for the right mask, which comes from lengths. end: another
    token that ends answers: the chat template's end of turn, which models tuned from a base model may not name.
    """
    ends = _ends(runner, tokenizer, end)
    todo = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    while todo:
        width = len(prompts[todo[0]]) + math.ceil(_EXPECTED * decoding.max_new_tokens)
        batch = todo[: max(1, runner.cache_budget // width)]
        ids = [prompts[i] for i in batch]
        try:
            if decoding.samples:
                texts = _sample(runner, tokenizer, ids, decoding, ends)
            else:
                texts = [[text] for text in _greedy(runner, tokenizer, ids, decoding, ends, hidden)]
        except (RuntimeError, MemoryError) as error:
            if "probability tensor contains" in str(error):  # torch's words for NaN, when it samples
                raise no_numbers() from error
            if not runner.lower_budget(error, width * len(batch)):
                raise
            if len(batch) == 1:
                raise StageError(
                    f"out of memory with a single prompt of {len(ids[0])} tokens; use a GPU with more memory, or a "
                    "smaller model"
                ) from error
            continue
        todo = todo[len(batch) :]
        yield list(zip(batch, texts, strict=True))


def _ends(runner: Runner, tokenizer: Any, end: int | None) -> list[int]:
    """Return the tokens that end answers: `end`, the tokenizer's and the model's own."""
    own = runner.model.generation_config.eos_token_id
    return sorted({end, tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None})


def _left_padded(runner: Runner, prompts: Sequence[list[int]], pad: int) -> tuple[Any, Any]:
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=runner.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=runner.device)
    return ids, mask


def _greedy(
    runner: Runner,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    ends: Sequence[int],
    hidden: int | None,
) -> list[str]:
    import torch

    last = torch.tensor([*ends] or [-1], device=runner.device)
    beginning, cache = _run_beginning(runner, prompts, hidden)
    shared = len(beginning)
    ids, mask = _left_padded(runner, [prompt[shared:] for prompt in prompts], 0)
    before = torch.tensor([beginning] * len(prompts), dtype=ids.dtype, device=runner.device)
    mask = torch.cat([torch.ones_like(before), mask], dim=1)
    if hidden is not None:
        mask = mask * (torch.cat([before, ids], dim=1) != hidden)
    rows = torch.arange(len(prompts), device=runner.device)  # those still in the batch
    room = [min(decoding.max_new_tokens, (runner.window or 1 << 60) - len(p)) for p in prompts]
    limits = torch.tensor(room, device=runner.device)
    answers: list[list[int]] = [[] for _ in prompts]
    started = False
    with torch.inference_mode():
        # As `generate` of transformers does: the first visible token has position 0.
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, shared:]
        alive = limits > 0
        while alive.any():
            few = int(alive.sum()) <= _LEAVE * len(rows)
            if not started or (few and can_divide(cache)):
                keep = alive.nonzero().flatten()
                rows, ids, mask, positions, alive = (x[keep] for x in (rows, ids, mask, positions, alive))
                if cache is not None:
                    cache.batch_select_indices(keep)
            states, cache = runner.halves.run(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            most, chosen = runner.halves.logits(states[:, -1]).max(-1)
            check_numbers(most)
            ended = torch.isin(chosen, last)
            for row, token, goes_on in zip(rows.tolist(), chosen.tolist(), (alive & ~ended).tolist(), strict=True):
                if goes_on:
                    answers[row].append(token)
            alive = alive & ~ended & (positions.new_tensor([len(answers[r]) for r in rows.tolist()]) < limits[rows])
            if decoding.stop:
                alive = alive & positions.new_tensor(_unstopped(tokenizer, answers, rows, decoding.stop)).bool()
            started = True
            ids, positions = chosen[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return [_finish(tokenizer.decode(a, skip_special_tokens=True), decoding.stop) for a in answers]


def _run_beginning(runner: Runner, prompts: Sequence[list[int]], hidden: int | None) -> tuple[list[int], Any]:
    """Run the common beginning of all prompts once; return it, and its key-value cache for each prompt.

    Padding stands between it and the rest of a short prompt. A layer with a sliding window, or with a state instead of
    a cache, would take that for tokens; models with such layers share nothing: ([], None).
    """
    import torch
    from transformers.cache_utils import DynamicLayer

    shared = min(common_start(prompts), min(map(len, prompts)) - 1)
    if len(prompts) < 2 or shared < WORTH_SHARING:
        return [], None
    ids = torch.tensor([prompts[0][:shared]], device=runner.device)
    mask = torch.ones_like(ids) if hidden is None else (ids != hidden).long()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.inference_mode():
        _, cache = runner.halves.run(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            return [], None
        cache.batch_repeat_interleave(len(prompts))
    return prompts[0][:shared], cache


def _unstopped(tokenizer: Any, answers: list[list[int]], rows: Any, stop: tuple[str, ...]) -> list[bool]:
    """Check which rows' answers have no stop string so far."""
    texts = tokenizer.batch_decode([answers[row] for row in rows.tolist()], skip_special_tokens=True)
    return [not any(word in text for word in stop) for text in texts]


def _finish(text: str, stop: tuple[str, ...]) -> str:
    """Return the text before its first stop string, stripped."""
    return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=len(text))].strip()


def _sample(
    runner: Runner, tokenizer: Any, prompts: Sequence[list[int]], decoding: Decoding, ends: Sequence[int]
) -> list[list[str]]:
    """Draw `samples` answers per prompt.

    The seed is set for each batch. A resumed run, or one in several processes, has other batches and so other answers.
    """
    import torch

    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    ids, mask = _left_padded(runner, prompts, pad)
    torch.manual_seed(decoding.seed)
    most = decoding.max_length or ids.shape[1] + decoding.max_new_tokens
    with torch.inference_mode():
        output = runner.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            num_return_sequences=decoding.samples,
            min_new_tokens=decoding.min_new_tokens or None,
            eos_token_id=[*ends] or None,
            pad_token_id=pad,
            max_length=min(most, runner.window or most),
        )
    # Cut here: an end token that the tokenizer does not call special would be decoded.
    drawn = [list(takewhile(lambda token: token not in ends, row)) for row in output[:, ids.shape[1] :].tolist()]
    texts = tokenizer.batch_decode(drawn, skip_special_tokens=True)
    answers = [_finish(text, decoding.stop) for text in texts]
    return [answers[i : i + decoding.samples] for i in range(0, len(answers), decoding.samples)]
