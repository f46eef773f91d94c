"""Generate answers: greedy, drawn from the model's own probabilities, or sampled as published benchmarks do.

Decoding is our own loop, since rows that have ended leave the batch: a batch costs the sum of its answers' lengths, not
its longest answer times its rows. A common beginning of its prompts, a system message say, runs once, and so does a
prompt that several answers are drawn for.

Not every family goes on rightly from a padded batch: RWKV's states take padding for tokens, say. So the first batch of
a model waits for a check against transformers' own `generate`, one prompt at a time. Where the two differ, `generate`
makes the answers.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np

from msa_lite.errors import NotFiniteError, StageError
from msa_lite.evals.forward import WORTH_SHARING, common_start
from msa_lite.evals.models import Runner, can_divide, check_numbers, no_numbers
from msa_lite.io.models.devices import free_memory, is_out_of_memory

logger = logging.getLogger(__name__)

_EXPECTED = 0.25  # mean length of answers, as a part of the most tokens
_LEAVE = 0.75  # take ended rows out when at most this part goes on; taking out copies the cache
_CHECKED = 24  # tokens of the longer prompt of a check; the shorter one has about half
_CHECKED_STEPS = 3  # new tokens of each
# Of the logits' spread. Rounding of two layers in bf16 changes 0.015 of it, in fp32 1e-6; a lost state or a wrong
# position changes all of it, or, of few of many layers, less.
_TOLERANCES = {"float32": 0.01, "float64": 0.01}
_LEAST_SPREAD = 1e-3  # logits that are as near as that mean nothing
_COARSE = 0.1  # where values have 16 or 4 bits

_Unit = TypeVar("_Unit")
_Texts = TypeVar("_Texts")
_Choose = Callable[[Any, Any, int], Any]
"""(n, vocabulary) logits, the places of their prompts, and the number of tokens so far → (n,) next tokens."""


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

    def answer(batch: Sequence[int]) -> list[list[str]]:
        ids = [prompts[i] for i in batch]
        if decoding.samples:
            return _sample(runner, tokenizer, ids, decoding, ends)
        return [[text] for text in _decode(runner, tokenizer, ids, decoding, ends, _likeliest, hidden)]

    _check_batches(runner, tokenizer, prompts)
    todo = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    for batch, texts in _in_batches(runner, todo, prompts.__getitem__, decoding, answer):
        yield list(zip(batch, texts, strict=True))


def sample_answers(
    runner: Runner,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    count: int,
    decoding: Decoding,
    *,
    end: int | None = None,
) -> Iterator[list[tuple[int, int, str]]]:
    """Yield (index of the prompt, number of the sample, answer), a batch at a time, in no particular order.

    Each prompt gets `count` answers, drawn token by token from all of the model's probabilities: temperature 1, and
    none of the sampling settings that the model comes with. decoding: its length, stop strings and seed. end: as for
    `generate`. A sample depends on the seed, the index of its prompt and its own number, not on its batch: all models
    are drawn from with the same random numbers, and a larger `count` adds to the samples of a smaller one.
    """
    import torch

    ends = _ends(runner, tokenizer, end)

    def answer(batch: Sequence[tuple[int, int]]) -> list[str]:
        rows = [np.random.default_rng([decoding.seed, *pair]).random(decoding.max_new_tokens) for pair in batch]
        points = torch.tensor(np.array(rows, np.float32), device=runner.device)
        ids = [prompts[i] for i, _ in batch]
        return _decode(
            runner, tokenizer, ids, decoding, ends, lambda logits, rows, step: _drawn(logits, points[rows, step])
        )

    _check_batches(runner, tokenizer, prompts)
    todo = [(i, number) for i in range(len(prompts)) for number in range(count)]
    todo.sort(key=lambda pair: (-len(prompts[pair[0]]), pair))
    for batch, texts in _in_batches(runner, todo, lambda pair: prompts[pair[0]], decoding, answer):
        yield [(i, number, text) for (i, number), text in zip(batch, texts, strict=True)]


def _in_batches(
    runner: Runner,
    todo: list[_Unit],
    prompt_of: Callable[[_Unit], list[int]],
    decoding: Decoding,
    answer: Callable[[list[_Unit]], list[_Texts]],
) -> Iterator[tuple[list[_Unit], list[_Texts]]]:
    """Yield (units, their answers), batches as large as fit into memory. todo: the longest prompts first."""
    while todo:
        width = len(prompt_of(todo[0])) + math.ceil(_EXPECTED * decoding.max_new_tokens)
        batch = todo[: 1 if runner.batched is False else max(1, runner.cache_budget // width)]
        try:
            texts = answer(batch)
        except (RuntimeError, MemoryError) as error:
            if "probability tensor contains" in str(error):  # torch's words for NaN, when it samples
                raise no_numbers() from error
            if not runner.lower_budget(error, width * len(batch)):
                raise
            if len(batch) == 1:
                raise StageError(
                    f"out of memory with a single prompt of {len(prompt_of(batch[0]))} tokens; use a GPU with more "
                    "memory, or a smaller model"
                ) from error
            continue
        todo = todo[len(batch) :]
        yield batch, texts


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


def _pad(tokenizer: Any, ends: Sequence[int]) -> int:
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0))


def _likeliest(logits: Any, rows: Any, step: int) -> Any:
    most, chosen = logits.max(-1)
    check_numbers(most)
    return chosen


def _drawn(logits: Any, points: Any) -> Any:
    """Return the tokens at some points, (n,) in [0, 1), of the cumulated probabilities of (n, vocabulary) logits."""
    import torch

    cumulated = torch.softmax(logits, dim=-1).cumsum(-1)
    top = cumulated[:, -1:]
    check_numbers(top)
    # Rounding may have a point reach the top, and no token is there.
    points = torch.minimum(points[:, None] * top, torch.nextafter(top, torch.zeros_like(top)))
    return torch.searchsorted(cumulated, points, right=True)[:, 0]


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

    def run(self, runner: Runner, tokens: Any) -> None:
        """Run the next token of each row."""
        import torch

        self.positions = self.positions + 1
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


def _decode(
    runner: Runner,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    ends: Sequence[int],
    choose: _Choose,
    hidden: int | None = None,
) -> list[str]:
    """Return an answer to each prompt, by our own loop or, where that goes wrong, by transformers'."""
    decode = _decode_alone if runner.batched is False else _decode_together
    room = [min(decoding.max_new_tokens, (runner.window or 1 << 60) - len(prompt)) for prompt in prompts]
    answers = decode(runner, tokenizer, prompts, room, decoding.stop, ends, choose, hidden)
    return [_finish(tokenizer.decode(answer, skip_special_tokens=True), decoding.stop) for answer in answers]


def _decode_together(
    runner: Runner,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    room: Sequence[int],
    stop: tuple[str, ...],
    ends: Sequence[int],
    choose: _Choose,
    hidden: int | None = None,
) -> list[list[int]]:
    """Return the tokens of an answer to each prompt, at most `room`. Prompts that are equal run once."""
    import torch

    last = torch.tensor([*ends] or [-1], device=runner.device)
    limits = torch.tensor(room, device=runner.device)
    answers: list[list[int]] = [[] for _ in prompts]
    fitting = [i for i, tokens in enumerate(room) if tokens > 0]
    if not fitting:
        return answers
    with torch.inference_mode():
        rows = _run_prompts(runner, [prompts[i] for i in fitting], hidden)
        rows.numbers = torch.tensor(fitting, device=runner.device)
        alive = torch.ones_like(rows.numbers, dtype=torch.bool)
        for step in range(max(room)):
            chosen = choose(runner.halves.logits(rows.states), rows.numbers, step)
            alive = alive & ~torch.isin(chosen, last)
            for row, token, goes_on in zip(rows.numbers.tolist(), chosen.tolist(), alive.tolist(), strict=True):
                if goes_on:
                    answers[row].append(token)
            alive = alive & (limits[rows.numbers] > step + 1)
            if stop:
                alive = alive & _unstopped(tokenizer, answers, rows.numbers, stop)
            if not alive.any():
                break
            if int(alive.sum()) <= _LEAVE * len(alive) and can_divide(rows.cache):
                keep = alive.nonzero().flatten()
                rows.take(keep)
                chosen, alive = chosen[keep], alive[keep]
            rows.run(runner, chosen)
    return answers


def _decode_alone(
    runner: Runner,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    room: Sequence[int],
    stop: tuple[str, ...],
    ends: Sequence[int],
    choose: _Choose,
    hidden: int | None = None,
) -> list[list[int]]:
    """Return what `_decode_together` does, by transformers' own `generate`, one prompt at a time."""
    import torch
    from transformers import LogitsProcessorList, StoppingCriteriaList

    answers: list[list[int]] = []
    for place, (prompt, tokens) in enumerate(zip(prompts, room, strict=True)):
        answer: list[int] = []
        answers.append(answer)
        if tokens <= 0:
            continue

        def pick(ids: Any, logits: Any, place: int = place, answer: list[int] = answer) -> Any:
            """Leave `choose`'s token alone to be chosen from."""
            [token] = choose(logits, torch.tensor([place], device=logits.device), len(answer)).tolist()
            answer.append(token)
            return torch.full_like(logits, -torch.inf).index_fill(-1, torch.tensor([token], device=logits.device), 0)

        def stops(ids: Any, _scores: Any, answer: list[int] = answer) -> Any:
            text = tokenizer.decode(answer, skip_special_tokens=True)
            return torch.tensor([any(word in text for word in stop)], device=ids.device)

        ids = torch.tensor([prompt], device=runner.device)
        with torch.inference_mode(), _plain_settings(runner.model):
            runner.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids) if hidden is None else (ids != hidden).long(),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=[*ends] or None,
                pad_token_id=_pad(tokenizer, ends),
                logits_processor=LogitsProcessorList([pick]),
                stopping_criteria=StoppingCriteriaList([stops] if stop else []),
            )
        if answer[-1] in ends:
            answer.pop()
    return answers


@contextmanager
def _plain_settings(model: Any) -> Iterator[None]:
    """Have `generate` use none of the settings that a model comes with: it fills in what it is not told."""
    from transformers import GenerationConfig

    settings = vars(model.generation_config)
    own = dict(settings)
    settings.clear()
    settings.update(vars(GenerationConfig()))
    try:
        yield
    finally:
        settings.clear()
        settings.update(own)


def _check_batches(runner: Runner, tokenizer: Any, prompts: Sequence[list[int]]) -> None:
    """Find out, once per model, whether our loop goes on as transformers' `generate`; if not, say so.

    Two prompts of different lengths, cut from a real one, run as a batch and one at a time. Both get the same tokens,
    and their logits are compared: where two tokens are about as likely, the choice between them means nothing.
    """
    longest = max(prompts, key=len, default=[])
    if runner.batched is not None or not longest:
        return
    most = min(_CHECKED, (runner.window or _CHECKED) - _CHECKED_STEPS)
    ids = (longest * most)[:most]
    short = ids[: max(1, len(ids) // 2 - _CHECKED_STEPS)]
    try:
        difference = _difference(runner, tokenizer, [ids, short[:-1] + ids[-1:]])
    except Exception as error:
        if isinstance(error, NotFiniteError):
            raise
        traceback.clear_frames(error.__traceback__)
        if is_out_of_memory(error):  # the first batch will say so
            free_memory()
            return
        difference = math.inf
        logger.debug("a batch of two prompts failed", exc_info=error)
    dtype = str(runner.model.dtype).removeprefix("torch.")
    coarse = getattr(runner.model, "is_quantized", False)
    runner.batched = difference <= (_COARSE if coarse else _TOLERANCES.get(dtype, _COARSE))
    if not runner.batched:
        logger.warning(
            "%s: batches do not give the answers that transformers' generate gives to single prompts; answers are "
            "generated one at a time, which is right but slower",
            type(runner.model).__name__,
        )


def _difference(runner: Runner, tokenizer: Any, prompts: Sequence[list[int]]) -> float:
    """Return how far logits of a batch are from those of its prompts alone: the RMS difference over their spread.

    It is that of the token with the largest difference; 0 for equal logits, about 1.4 for unrelated ones.
    """
    alone: dict[tuple[int, int], Any] = {}
    together: dict[tuple[int, int], Any] = {}

    def first(logits: Any, rows: Any, step: int) -> Any:
        alone.update({(row, step): values.clone() for row, values in zip(rows.tolist(), logits, strict=True)})
        return _likeliest(logits, rows, step)

    def again(logits: Any, rows: Any, step: int) -> Any:
        together.update({(row, step): values.clone() for row, values in zip(rows.tolist(), logits, strict=True)})
        return logits.new_tensor([alone[row, step].argmax() for row in rows.tolist()]).long()

    room = [_CHECKED_STEPS] * len(prompts)
    _decode_alone(runner, tokenizer, prompts, room, (), (), first)
    _decode_together(runner, tokenizer, prompts, room, (), (), again)
    return max(
        float((together[place] - values).square().mean().sqrt() / values.std().clamp_min(_LEAST_SPREAD))
        for place, values in alone.items()
    )


def _run_prompts(runner: Runner, prompts: Sequence[list[int]], hidden: int | None) -> _Rows:
    """Run prompts up to their last token, equal ones once."""
    import torch

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
    ids, mask = _left_padded(runner, [prompt[shared:] for prompt in prompts], 0)
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
    from transformers.cache_utils import DynamicLayer

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
        if not can_divide(cache) or any(type(layer) is not DynamicLayer for layer in cache.layers):
            return [], None
        cache.batch_repeat_interleave(len(prompts))
    return prompts[0][:shared], cache


def _window(runner: Runner) -> float:
    """Return the smallest window that the model's config names. GPT-Neo's local layers keep all keys all the same."""
    config = runner.model.config.get_text_config()
    named = {name: size for name, size in vars(config).items() if name.endswith(("window", "window_size"))}
    return min((size for size in named.values() if isinstance(size, int) and size > 1), default=math.inf)


def _unstopped(tokenizer: Any, answers: list[list[int]], numbers: Any, stop: tuple[str, ...]) -> Any:
    """Check which rows' answers have no stop string so far."""
    texts = tokenizer.batch_decode([answers[row] for row in numbers.tolist()], skip_special_tokens=True)
    return numbers.new_tensor([not any(word in text for word in stop) for text in texts]).bool()


def _finish(text: str, stop: tuple[str, ...]) -> str:
    """Return the text before its first stop string, stripped."""
    return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=len(text))].strip()


def _sample(
    runner: Runner, tokenizer: Any, prompts: Sequence[list[int]], decoding: Decoding, ends: Sequence[int]
) -> list[list[str]]:
    """Draw `samples` answers per prompt. The batch is a single prompt where padding would change them.

    The seed is set for each batch. A resumed run, or one in several processes, has other batches and so other answers.
    """
    import torch

    pad = _pad(tokenizer, ends)
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
