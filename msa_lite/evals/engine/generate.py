"""Generate answers: greedy, drawn from the model's own probabilities, or sampled as published benchmarks do.

Answers are decoded in batches (`together`). The first batch of a model waits for a check against transformers' own
`generate`. Where the two differ, `generate` makes the answers (`alone`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np

from msa_lite.data import added_ids, decode_answer
from msa_lite.errors import StageError
from msa_lite.evals.engine.alone import check_batches, decode_alone, pad_token
from msa_lite.evals.engine.models import Runner, check_numbers, no_numbers
from msa_lite.evals.engine.together import Choose, PromptBatch, decode_together, is_stopped, left_padded, likeliest

_EXPECTED = 0.25  # mean length of answers, as a part of the most tokens

_Unit = TypeVar("_Unit")
_Texts = TypeVar("_Texts")


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
    known: Sequence[list[int]] = (),
    hidden: int | None = None,
    end: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> Iterator[list[tuple[int, list[str]]]]:
    """Yield (index of the prompt, its answers: one, or `samples`), a batch at a time, in no particular order.

    prompts: token ids. Answers end at the model's own end tokens and the tokenizer's. They are decoded
    by `decode_answer`, cut at the first stop string and stripped, and never go beyond the model's window. known: the
    tokens that each greedy answer is known to begin with (`forward.known_beginning`); they are read at once.
    hidden: a token id that no position may attend to (`compat.mask_eq_pad`); None for the right mask, which comes from
    lengths. end: another token that ends answers: the chat template's end of turn, which models tuned from a base model
    may not name. watch: called with each token of the greedy answer to a single prompt as soon as it is chosen; an
    exception that it raises stops the answer.
    """
    ends = end_tokens(runner, tokenizer, end)
    choose = likeliest if watch is None else partial(_likeliest_watched, watch)
    starts = [_Start(prompt, [], False) for prompt in prompts]
    if known and not decoding.samples:
        starts = [_start_of(runner, tokenizer, p, k, decoding, ends) for p, k in zip(prompts, known, strict=True)]

    def answer(batch: Sequence[int]) -> list[list[str]]:
        if decoding.samples:
            return _sample(runner, tokenizer, [prompts[i] for i in batch], decoding, ends)
        rows = [starts[i] for i in batch]
        return [[text] for text in _decode(runner, tokenizer, rows, decoding, ends, choose, hidden)]

    check_batches(runner, tokenizer, prompts)
    if ended := [i for i, row in enumerate(starts) if row.ended]:
        yield [(i, [_finish(tokenizer, starts[i].tokens, decoding.stop)]) for i in ended]
    todo = sorted((i for i, row in enumerate(starts) if not row.ended), key=lambda i: (-len(starts[i].ids), i))
    for batch, texts in _in_batches(runner, todo, lambda i: starts[i].ids, decoding, answer):
        yield list(zip(batch, texts, strict=True))


def _likeliest_watched(watch: Callable[[int], None], logits: Any, rows: Any, step: int) -> Any:
    """Choose as `likeliest` does, and hand over the token of the only row."""
    chosen = likeliest(logits, rows, step)
    [token] = chosen.tolist()
    watch(token)
    return chosen


@dataclass(frozen=True)
class _Start:
    """A prompt, and the beginning of its answer."""

    prompt: list[int]
    tokens: list[int]
    """The first tokens of the answer."""
    ended: bool
    """True where they are the whole answer."""

    @property
    def ids(self) -> list[int]:
        """Return the tokens that the next one follows."""
        return self.prompt + self.tokens


def _start_of(
    runner: Runner, tokenizer: Any, prompt: list[int], known: list[int], decoding: Decoding, ends: Sequence[int]
) -> _Start:
    """Return a prompt with the part of the known tokens that belongs to its answer."""
    room = max(0, _room(runner, prompt, decoding))
    tokens = list(takewhile(lambda token: token not in ends, known))
    ended = len(tokens) < len(known) or len(tokens) >= room
    return _Start(prompt, tokens[:room], ended or is_stopped(tokenizer, tokens, decoding.stop))


def _room(runner: Runner, prompt: Sequence[int], decoding: Decoding) -> int:
    """Return the most tokens of an answer; 0 or less for a prompt that fills the window."""
    return min(decoding.max_new_tokens, (runner.window or 1 << 60) - len(prompt))


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

    ends = end_tokens(runner, tokenizer, end)

    def answer(batch: Sequence[tuple[int, int]]) -> list[str]:
        rows = [np.random.default_rng([decoding.seed, *pair]).random(decoding.max_new_tokens) for pair in batch]
        points = torch.tensor(np.array(rows, np.float32), device=runner.device)
        starts = [_Start(prompts[i], [], False) for i, _ in batch]
        return _decode(
            runner, tokenizer, starts, decoding, ends, lambda logits, rows, step: _drawn(logits, points[rows, step])
        )

    check_batches(runner, tokenizer, prompts)
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
        longest = len(prompt_of(todo[0]))
        width = longest + math.ceil(_EXPECTED * decoding.max_new_tokens)
        batch = todo[: 1 if runner.batched is False else max(1, runner.cache_budget // width)]
        short_of_room = _room(runner, prompt_of(todo[0]), decoding) < decoding.max_new_tokens
        if short_of_room and "position_ids" not in runner.halves.arguments:  # then padding takes room, too (MPT)
            batch = [unit for unit in batch if len(prompt_of(unit)) == longest]
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


def end_tokens(runner: Runner, tokenizer: Any, end: int | None) -> list[int]:
    """Return the tokens that end answers: `end`, the tokenizer's, what it puts behind texts, and the model's own."""
    own = runner.model.generation_config.eos_token_id
    ends = {end, tokenizer.eos_token_id, *added_ids(tokenizer)[1][:1], *(own if isinstance(own, list) else [own])}
    return sorted(ends - {None})


def _drawn(logits: Any, points: Any) -> Any:
    """Return the tokens at some points, (n,) in [0, 1), of the cumulated probabilities of (n, vocabulary) logits."""
    import torch

    cumulated = torch.softmax(logits, dim=-1).cumsum(-1)
    top = cumulated[:, -1:]
    check_numbers(top)
    # Rounding may have a point reach the top, and no token is there.
    points = torch.minimum(points[:, None] * top, torch.nextafter(top, torch.zeros_like(top)))
    return torch.searchsorted(cumulated, points, right=True)[:, 0]


def _decode(
    runner: Runner,
    tokenizer: Any,
    rows: Sequence[_Start],
    decoding: Decoding,
    ends: Sequence[int],
    choose: Choose,
    hidden: int | None = None,
) -> list[str]:
    """Return an answer to each prompt, by our own loop or, where that goes wrong, by transformers'."""
    decode = decode_alone if runner.batched is False else decode_together
    room = [_room(runner, row.prompt, decoding) - len(row.tokens) for row in rows]
    batch = PromptBatch(tokenizer, [row.ids for row in rows], room, decoding.stop, ends, hidden)
    answers = [row.tokens + rest for row, rest in zip(rows, decode(runner, batch, choose), strict=True)]
    return [_finish(tokenizer, answer, decoding.stop) for answer in answers]


def _finish(tokenizer: Any, tokens: Sequence[int], stop: tuple[str, ...]) -> str:
    """Return tokens as text before its first stop string, stripped."""
    text = decode_answer(tokenizer, tokens)
    return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=len(text))].strip()


def _sample(
    runner: Runner, tokenizer: Any, prompts: Sequence[list[int]], decoding: Decoding, ends: Sequence[int]
) -> list[list[str]]:
    """Draw `samples` answers per prompt. The batch is a single prompt where padding would change them.

    The seed is set for each batch. A resumed run, or one in several processes, has other batches and so other answers.
    """
    import torch

    pad = pad_token(tokenizer, ends)
    ids, mask = left_padded(runner, prompts, pad)
    torch.manual_seed(decoding.seed)
    most = decoding.max_length or ids.shape[1] + decoding.max_new_tokens
    with torch.inference_mode():
        output = runner.model.generate(
            synced_gpus=False,  # transformers would wait for other processes that share the weights
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            num_return_sequences=decoding.samples,
            min_new_tokens=decoding.min_new_tokens or None,
            eos_token_id=[*ends] or None,
            pad_token_id=pad,
            max_length=min(most, runner.window or most),
        )
    drawn = [list(takewhile(lambda token: token not in ends, row)) for row in output[:, ids.shape[1] :].tolist()]
    answers = [_finish(tokenizer, row, decoding.stop) for row in drawn]
    return [answers[i : i + decoding.samples] for i in range(0, len(answers), decoding.samples)]
