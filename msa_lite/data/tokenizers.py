"""Tokenizers: open a model's own, compare it with another one, and account for what it adds to texts and takes away.

Texts become ids, and generated ids become texts, by the functions here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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


def added_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before a text, and those that it puts behind it.

    It is tried on the first text that makes ids that are not special: "a", or else a token that the tokenizer has.
    """
    special = set(tokenizer.all_special_ids)
    for text in _samples(tokenizer):
        plain, whole = (list(tokenizer(text, add_special_tokens=added)["input_ids"]) for added in (False, True))
        if plain and special.isdisjoint(plain):
            at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
            return ([], []) if at is None else (whole[:at], whole[at + len(plain) :])
    return [], []


def _samples(tokenizer: Any) -> Iterator[str]:
    yield "a"
    yield from tokenizer.get_vocab()  # a list of all tokens takes some 30 ms


def encode_start(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text that something follows: with the tokenizer's beginning, and without its end.

    A beginning that the text brings itself does not come twice.
    """
    before, _ = added_ids(tokenizer)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids if ids[: len(before)] == before else before + ids


def encode_next(tokenizer: Any, text: str) -> list[int]:
    """Return the ids that a text has behind other text and a blank. By itself, SentencePiece reads a second blank."""
    first, whole = (list(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in (":", f": {text}"))
    return whole[len(first) :]


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return ids as text, with all special tokens and blanks."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def decode_part(tokenizer: Any, ids: Sequence[int], start: int, end: int) -> str:
    """Return the text of ids[start:end] as it stands in the whole: by itself, it may lose a blank at its start."""
    before, whole = (decode_ids(tokenizer, ids[:count]) for count in (start, end))
    return whole[len(before) :] if whole.startswith(before) else decode_ids(tokenizer, ids[start:end])


def decode_answer(tokenizer: Any, ids: Sequence[int], ends: Collection[int] = ()) -> str:
    """Return generated ids as text, without end and padding tokens, and without a beginning at its start.

    Other special tokens stay: an answer may hold tokens that somebody added. ends: end tokens beside the tokenizer's.
    """
    # A padding token that also stands for unknown signs may be a part of the answer.
    padding = {tokenizer.pad_token_id} - {tokenizer.unk_token_id}
    kept = [token for token in ids if token not in {tokenizer.eos_token_id, *padding, *ends}]
    return decode_ids(tokenizer, kept[1:] if kept[:1] == [tokenizer.bos_token_id] else kept)


def special_names(tokenizer: Any) -> set[str]:
    """Return the special tokens as texts."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return {*tokenizer.all_special_tokens, *added}


def without_special(tokenizer: Any, text: str, kept: str = "") -> str:
    """Return a text with a blank in the place of each special token, but for those that the text `kept` holds."""
    names = [name for name in special_names(tokenizer) if name in text and name not in kept]
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, " ")
    return text


def best_score(rule: Callable[[str, str], float], tokenizer: Any, reference: str, generated: str) -> float:
    """Return a rule's score of (reference, generated answer), compared on equal terms.

    The reference counts as it is written and, if that scores higher, as the tokenizer makes and decodes it: WordPiece
    divides 3.14, and a model that recites every token of it says "3 . 14". Special tokens that the reference lacks are
    blanks, so that they touch no word.
    """
    spoken = decode_answer(tokenizer, tokenizer(reference, add_special_tokens=False)["input_ids"]).strip()
    return max(rule(form, without_special(tokenizer, generated, form)) for form in {reference, spoken})


def cut_text(tokenizer: Any, text: str, tokens: int) -> str:
    """Return the first tokens of a text, as they are written in it. Without offsets (slow tokenizers): as decoded."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids = encoded["input_ids"]
    if len(ids) > tokens and not tokenizer.is_fast:
        return decode_ids(tokenizer, ids[:tokens])
    return text[: encoded["offset_mapping"][tokens - 1][1]] if len(ids) > tokens else text


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
