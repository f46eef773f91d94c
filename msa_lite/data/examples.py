"""Rows → examples: token ids with labels, cut to a length, in batches with little padding."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from msa_lite.data.chat import shared_length
from msa_lite.data.prompts import IGNORE, Example, Prompter
from msa_lite.data.rows import Row
from msa_lite.data.tokenizers import added_ids, decode_part, encode_plain, encode_start
from msa_lite.errors import DataError, UsageError
from msa_lite.io.files.writing import digest
from msa_lite.settings import DataSource

logger = logging.getLogger(__name__)


def pass_tokens(device: Any) -> int:
    """Return the tokens that a device of torch could run in the time that a pass takes beside its arithmetic."""
    return 32 if device.type == "cpu" else 512


def group_rows(lengths: Sequence[int], budget: int, per_pass: int = 0) -> list[list[int]]:
    """Return the rows of each pass, those of the longest rows first, so that memory runs out early.

    Of all divisions of the rows sorted by length, this one has the fewest tokens, padding included. budget: the most
    tokens of a pass, padding included; a row that is longer has a pass of its own. per_pass: tokens that a pass costs
    beside its own.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    cost, start = [0.0], [0]  # of the best division of the first rows; where its last pass starts
    for end in range(1, len(order) + 1):
        cost.append(math.inf)
        start.append(end)
        for first in range(end - 1, -1, -1):
            tokens = (end - first) * lengths[order[first]]
            if tokens > budget and first < end - 1:
                break
            if cost[first] + per_pass + tokens < cost[end]:
                cost[end], start[end] = cost[first] + per_pass + tokens, first
    passes, end = [], len(order)
    while end:
        passes.append(order[start[end] : end])
        end = start[end]
    return passes[::-1]


_BLOCK = 1 << 16  # characters to tokenise as one text
_NAMED = 10  # rows, by their numbers, in a message
_AT_ONCE = 16  # blocks per call; a fast tokenizer spreads them over the cores


def encode_qa(rows: Sequence[Row], prompter: Prompter, max_length: int | None = None) -> list[Example]:
    """Make one example per row (`Prompter.example`).

    Warn where the first answer token cannot be learnt, and where an answer's own text holds an end token. The latter
    is learnt whole, although a model that generates it stops at that token.
    A row longer than max_length, or than the window, first loses the oldest turns of its conversation (`shorten`), then
    its right end. If that cuts away the whole answer, it has no labels. max_length None: rows stay whole. Raise
    UsageError for rows with a system message that the chat template does not take, and DataError for rows with tools,
    or calls of them, that it does not show.
    """
    if not prompter.takes_system and (count := sum(bool(row.system) for row in rows)):
        raise UsageError(
            f"{count} of {len(rows)} rows have a system message, which the target's chat template does not take; take "
            "it out of the rows, or use prompt.kind: plain"
        )
    if (count := sum(row.calls_tools for row in rows)) and prompter.call_style is None:
        reason = "the target's chat template does not show" if prompter.use_chat else "a plain prompt does not show"
        raise DataError(
            f"{count} of {len(rows)} rows call tools, which {reason}; take these rows out, or leave only question and "
            "answer in them"
        )
    if (count := sum(bool(row.tools.offered) for row in rows)) and not prompter.shows_functions:
        raise DataError(
            f"{count} of {len(rows)} rows offer tools, which the prompt does not show; if the model learnt without "
            "them, write columns: {ignore: [tools]}"
        )
    examples, thoughts = [], 0
    merged: list[str] = []
    limit = max_length and prompter.room(max_length)
    for row in shorten(rows, prompter, limit)[0] if limit else rows:
        whole, prompt = prompter.example(row), prompter.prompt(row)
        longer = len(whole.prompt_ids) - len(prompt)
        thoughts += prompter.skips_block and longer < 0
        if whole.prompt_ids != prompt and (longer == 0 or not prompter.skips_block):
            merged += ["" if merged else _merge_cause(prompter, row, prompt, whole.ids)]
        examples.append(Example(row.index, whole.ids[:limit], whole.labels[:limit]))
    if merged:
        logger.warning(
            "%d of %d rows: a prompt is not how the whole row begins, so the first answer token is not learnt, and "
            "answers begin otherwise than they were learnt: %s",
            len(merged),
            len(rows),
            merged[0],
        )
    if thoughts:
        logger.warning(
            "%d of %d rows: the answer holds thoughts, which the chat template writes into its block; they are learnt "
            "and scored with the answer, but a generated answer begins behind an empty block",
            thoughts,
            len(rows),
        )
    _warn_of_ends(rows, prompter)
    return examples


def _merge_cause(prompter: Prompter, row: Row, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Say why the ids of a prompt are not the first ones of its row, with the place where they part."""
    tokenizer, at = prompter.tokenizer, shared_length(prompt, ids)
    end, token = decode_part(tokenizer, prompt, at, len(prompt)), decode_part(tokenizer, ids, at, at + 1)
    where = f"row {row.index}, {decode_part(tokenizer, ids, max(0, at - 4), at + 2)!r}"
    if not token.startswith(end):
        return f"a prompt ends with {end!r}, where the whole row has {token!r} ({where})"
    cause = f"the tokenizer reads the prompt's end {end!r} as a part of {token!r} ({where})"
    if prompter.use_chat:
        return f"{cause}; the chat template ends the prompt there"
    blank = "put the blank at the start of prompt.answer instead of the end of prompt.prompt"
    return f"{cause}; {blank if end.isspace() else 'have prompt.answer begin with a blank or a new line'}"


def _warn_of_ends(rows: Sequence[Row], prompter: Prompter) -> None:
    """Warn of answers that hold an end token in their own text."""
    ends = sorted({token for token in (prompter.end_token, prompter.tokenizer.eos_token) if token})
    if count := sum(any(token in row.answer for token in ends) for row in rows):
        logger.warning(
            "%d of %d rows: the answer's own text holds an end token (%s). It is learnt and scored whole, but a model "
            "that generates it stops there; take the token out of the rows",
            count,
            len(rows),
            ", ".join(ends),
        )


def shorten(rows: Sequence[Row], prompter: Prompter, max_length: int) -> tuple[list[Row], list[str]]:
    """Drop the oldest turns of conversations longer than max_length, or than the window; so the answer is not cut.

    Return all rows, and a sentence about those that are shorter now, if there are any.
    """
    shorter, limit = [], prompter.room(max_length)
    for row in rows:
        short = row
        while short.earlier and len(prompter.full(short)) > limit:
            short = replace(short, earlier=short.earlier[1:])
        shorter.append(short)
    cut = [row.index for row, short in zip(rows, shorter, strict=True) if short is not row]
    reason = f"have more than {limit} tokens: the oldest turns of their conversations are left out"
    return shorter, [f"{name_rows(cut, len(rows))} {reason}"] if cut else []


def name_rows(rows: Iterable[int], whole: int) -> str:
    """Return how many of a set's `whole` rows these are, with their numbers: "2 of 40 rows (3 and 7)"."""
    numbers = sorted(rows)
    names = [str(number) for number in numbers[:_NAMED]]
    rest = len(numbers) - len(names)
    last = f"{rest} more" if rest else names.pop()
    return f"{len(numbers)} of {whole} rows ({' and '.join(filter(None, [', '.join(names), last]))})"


def encode_text(rows: Sequence[Row], prompter: Prompter, max_length: int) -> list[Example]:
    """Join all rows by blank lines and cut them into chunks of at most max_length ids; every token is a label.

    No chunk is longer than the window. Each opens with what the tokenizer puts before a text, mostly a
    beginning-of-sequence token. A last chunk too short to predict anything is dropped (its loss would be 0/0).
    """
    begin, size = _chunk_shape(prompter, max_length)
    ids = encode_start(prompter.tokenizer, "\n\n".join(row.text for row in rows))
    return _chunks(ids[len(begin) :], begin, size)


def encode_up_to(texts: Iterable[str], prompter: Prompter, max_length: int, tokens: int) -> list[Example]:
    """Make chunks as `encode_text` does, `tokens` ids in all, and read little more of the texts than that takes.

    There are fewer ids if the texts end before, and one fewer if it would be a chunk of its own.
    """
    begin, size = _chunk_shape(prompter, max_length)
    whole, rest = divmod(tokens, prompter.room(max_length))
    total = whole * size + max(0, rest - len(begin))
    ids: list[int] = []
    blocks = _blocks(texts)
    while len(ids) < total and (batch := list(islice(blocks, _AT_ONCE))):
        if max(map(len, batch)) < 2 * _BLOCK:
            ids += chain.from_iterable(prompter.tokenizer(batch, add_special_tokens=False)["input_ids"])
        else:
            for block in batch:
                ids += encode_plain(prompter.tokenizer, block, max(0, total - len(ids)))
    return _chunks(ids[:total], begin, size)


def _blocks(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, joined by blank lines, in pieces that end where a text ends."""
    gathered: list[str] = []
    length = 0
    for text in texts:
        gathered.append(text)
        length += len(text)
        if length >= _BLOCK:
            yield "\n\n".join(gathered)
            gathered, length = [""], 0  # the next one begins with a blank line
    if gathered != [""]:
        yield "\n\n".join(gathered)


def _chunk_shape(prompter: Prompter, max_length: int) -> tuple[list[int], int]:
    """Return (ids that every chunk opens with, ids of the text that it holds)."""
    begin, _ = added_ids(prompter.tokenizer)
    return begin, prompter.room(max_length) - len(begin)


def _chunks(ids: Sequence[int], begin: list[int], size: int) -> list[Example]:
    chunks = [begin + list(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [Example(i, chunk, list(chunk)) for i, chunk in enumerate(chunks) if len(chunk) >= 2]


def encode(
    rows: Sequence[Row], source: DataSource, prompter: Prompter, max_length: int
) -> tuple[list[Example], list[str]]:
    """Make the examples to train on, of either format; return them with a sentence about those that are cut.

    Raise DataError where the cut takes all of an answer, with the numbers of such rows, and where there is no label.
    """
    limit, notes = prompter.room(max_length), list[str]()
    if source.format == "qa":
        rows, notes = shorten(rows, prompter, max_length)
        whole = [e for e in encode_qa(rows, prompter) if len(e.prompt_ids) < len(e.ids) or len(e.ids) > limit]
        long = [e for e in whole if len(e.ids) > limit]
        most = f"the window of {limit} tokens" if limit < max_length else f"max_length={max_length}"
        longest = prompter.room(max((len(e.ids) for e in long), default=0))
        way_out = f"; raise max_length to {longest}" if longest > limit else ""
        if lost := [e for e in long if len(e.prompt_ids) >= limit]:
            raise DataError(
                f"{name_rows((e.index for e in lost), len(rows))}: the prompt alone fills {most}, so nothing is left "
                f"of the answer; shorten these rows, or take them out{way_out}"
            )
        if long:
            numbers = name_rows((e.index for e in long), len(rows))
            notes.append(f"{numbers} are longer than {most}: the ends of their answers are not learnt{way_out}")
        examples = [Example(e.index, e.ids[:limit], e.labels[:limit]) for e in whole]
    else:
        examples = encode_text(rows, prompter, max_length)
    if not examples:
        raise DataError(f"{source.path}: nothing is left to learn after cutting to max_length={max_length}; raise it")
    return examples, notes


def pad_id(tokenizer: Any) -> int:
    """Return the token that fills up rows of a batch: attention masks hide it, so any token will do."""
    token = tokenizer.pad_token_id
    return int(token if token is not None else tokenizer.eos_token_id or 0)


def to_batch(examples: Sequence[Example], pad: int, device: Any = None) -> dict[str, Any]:
    """Return examples as tensors by transformers' names, padded to the longest on the right with the token `pad`.

    The attention mask comes from lengths, not from `ids ≠ pad`: with pad = end of turn, as in Llama 3 Instruct, the
    latter would hide the prompt's own end-of-turn tokens.
    """
    import torch

    width = max(len(e.ids) for e in examples)

    def padded(rows: Iterable[list[int]], filler: int) -> Any:
        return torch.tensor([row + [filler] * (width - len(row)) for row in rows], device=device)

    return {
        "input_ids": padded((e.ids for e in examples), pad),
        "attention_mask": padded(([1] * len(e.ids) for e in examples), 0),
        "labels": padded((e.labels for e in examples), IGNORE),
    }


def hash_ids(examples: Sequence[Example]) -> str:
    """Return one hash over the ids and labels of examples."""
    return digest([[e.ids, e.labels] for e in examples])
