"""Tokenizers of models: open them, render chats, and compare the ids that two of them make of the same rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from msa_lite.data.rows import Row
from msa_lite.errors import MismatchError, NoTokenizerError, clip
from msa_lite.io.limits import limited
from msa_lite.io.loading import read_tokenizer
from msa_lite.io.tokenizer import has_tokenizer

logger = logging.getLogger(__name__)

COMPARED_ROWS = 64
_LONGEST = 1 << 20  # characters that a chat template may add
_CHARACTERS = 2000  # of a row to compare
_SHOWN = 48  # characters of a row to show in a message


def open_tokenizer(folder: Path, name: str) -> Any:
    """Load a model's tokenizer. name: of the model, for messages.

    Raise NoTokenizerError if there is none, FormatError if it cannot be loaded.
    """
    if not has_tokenizer(folder):
        raise NoTokenizerError(f"{name}: was saved without a tokenizer")
    return read_tokenizer(folder, name)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
    """Render messages as text with the tokenizer's chat template, a program by whoever made the model.

    Raise whatever the template raises, OverrunError if it runs too long, and MemoryError or ValueError if it makes far
    more text than it gets.
    """
    with limited():
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    if not isinstance(text, str) or len(text) > _LONGEST + 10 * sum(len(m["content"]) for m in messages):
        raise ValueError("it makes no text, or far more than it gets")
    return text


def check_same_ids(rows: Iterable[Row], target: Any, prior: Any, names: tuple[str, str]) -> None:
    """Raise MismatchError, with an example, when the tokenizers of target and prior make different ids of a row.

    Only plain texts count: chat templates may differ, and so may tokens added to the target's. names: of target and
    prior.
    """
    size = len(prior)
    for row in rows:
        text = _text(row)[:_CHARACTERS]
        ours, theirs = (list(t(text, add_special_tokens=False)["input_ids"]) for t in (target, prior))
        place = _first_difference(ours, theirs)
        if place is None or any(token >= size for token in ours[: place + 1]):
            continue
        start = clip(" ".join(text.split()), _SHOWN)
        raise MismatchError(
            f"the tokenizers of target {names[0]} and prior {names[1]} read the forget rows differently. Row "
            f"{row.index}, {start!r}: token {place + 1} is {_token(target, ours, place)} to the target and "
            f"{_token(prior, theirs, place)} to the prior. Give the checkpoint that the target was tuned from; if only "
            "its tokenizer files are wrong, replace them by the target's"
        )


def _text(row: Row) -> str:
    """Return the texts of a row, whatever its format."""
    return " ".join(value for value in vars(row).values() if isinstance(value, str) and value)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)


def _token(tokenizer: Any, ids: Sequence[int], place: int) -> str:
    """Describe a token by id and text, for a message."""
    if place >= len(ids):
        return "none, the row is at its end,"
    return f"{ids[place]} ({tokenizer.decode([ids[place]])!r})"
