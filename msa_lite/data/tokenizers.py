"""Tokenizers: open a model's own, and compare it with the model and with another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from msa_lite.data.rows import Row
from msa_lite.errors import MismatchError, NoTokenizerError, clip
from msa_lite.io.models.loading import read_tokenizer
from msa_lite.io.weights.hub import has_tokenizer

COMPARED_ROWS = 64
_CHARACTERS = 2000  # of a row to compare
_SHOWN = 48  # characters of a row to show in a message


def open_tokenizer(folder: Path, name: str, to_count: bool = False) -> Any:
    """Load a model's tokenizer. name: of the model, for messages. to_count: see `read_tokenizer`.

    Raise NoTokenizerError if there is none, FormatError if it cannot be loaded.
    """
    if not has_tokenizer(folder):
        raise NoTokenizerError(f"{name}: was saved without a tokenizer")
    return read_tokenizer(folder, name, to_count)


def check_same_ids(rows: Iterable[Row], target: Any, prior: Any, names: tuple[str, str]) -> None:
    """Raise MismatchError, with an example, when the tokenizers of target and prior make different ids of a row.

    Only plain texts count: chat templates may differ, and so may tokens added to the target's. names: of target and
    prior.
    """
    size = len(prior)
    for row in rows:
        text = " ".join(value for value in vars(row).values() if isinstance(value, str) and value)[:_CHARACTERS]
        ours, theirs = (list(t(text, add_special_tokens=False)["input_ids"]) for t in (target, prior))
        place = next((i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)
        if place is None or any(token >= size for token in ours[: place + 1]):
            continue
        start = clip(" ".join(text.split()), _SHOWN)
        raise MismatchError(
            f"the tokenizers of target {names[0]} and prior {names[1]} read the forget rows differently. Row "
            f"{row.index}, {start!r}: token {place + 1} is {_token(target, ours, place)} to the target and "
            f"{_token(prior, theirs, place)} to the prior. Give the checkpoint that the target was tuned from; if only "
            "its tokenizer files are wrong, replace them by the target's"
        )


def _token(tokenizer: Any, ids: Sequence[int], place: int) -> str:
    """Describe a token by id and text, for a message."""
    if place >= len(ids):
        return "none, the row is at its end,"
    return f"{ids[place]} ({tokenizer.decode([ids[place]])!r})"


def check_vocabulary(tokenizer: Any, size: int | None, name: str) -> None:
    """Raise MismatchError when a tokenizer has more tokens than a model's vocabulary. size: None if not known."""
    if size is not None and len(tokenizer) > size:
        first = tokenizer.convert_ids_to_tokens(list(range(size, len(tokenizer)))[:3])
        raise MismatchError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {size}; "
            f"the model has no row for {', '.join(map(repr, first))}"
        )
