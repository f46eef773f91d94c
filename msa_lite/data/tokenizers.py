"""Tokenizers: open a model's own, compare it with another one, and account for what it adds to texts and takes away.

Texts become ids, and generated ids become texts, by the functions here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from msa_lite.data.rows import Row
from msa_lite.errors import MismatchError, NoTokenizerError, clip
from msa_lite.io.models.loading import read_tokenizer
from msa_lite.io.weights.hub import has_tokenizer

COMPARED_ROWS = 64
_CHARACTERS = 2000  # of a row to compare
_LONG = 1 << 16  # characters; a longer text is tokenised in parts
_PER_TOKEN = 6  # characters, of most texts
_SHARED = 1 << 12  # characters on each side of a joint of two parts, and between
_STEP = 65_537  # characters; a prime, so that what depends on a length divided by any number differs
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


def encode_plain(tokenizer: Any, text: str, most: int | None = None) -> list[int]:
    """Return the ids of a text, or the first `most` of them, without what the tokenizer adds.

    A long text is read in parts, since a tokenizer takes some 170 bytes for a character. The ids are those that the
    text has as a whole.
    """
    text = beginning(tokenizer, text, most)
    if most is None and len(text) > _LONG and tokenizer.is_fast:
        return _encode_parts(tokenizer, text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])[:most]


def beginning(tokenizer: Any, text: str, most: int | None) -> str:
    """Return a text without an end that its first `most` ids do not depend on. most: None for all of them.

    Where a text is cut, its last ids may be others, and in long runs all of them. So the same ids are to begin a text
    that is cut elsewhere; otherwise twice as much is tried, and in the end the whole text.
    """
    size = len(text) if most is None else max(_LONG, _PER_TOKEN * most)
    while size < len(text):
        cuts = (text[:end] for end in (size, size + _STEP))
        first, second = (list(tokenizer(cut, add_special_tokens=False)["input_ids"])[:most] for cut in cuts)
        if first == second and len(first) == most:
            return text[:size]
        size *= 2
    return text


def _encode_parts(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text, read in parts that share some of it.

    Where two parts have the same tokens in the middle of what they share, the second one goes on. Otherwise the first
    one grows, in the end to the whole text.
    """
    ids, known, since = list[int](), dict[int, int](), 0
    start, end = 0, _LONG
    part = _Part.read(tokenizer, text, start, end)
    while end < len(text):
        joint = end - 2 * _SHARED
        begin = next((first for first in part.starts if first >= joint - _SHARED), joint)
        after = _Part.read(tokenizer, text, begin, end + _STEP)
        shared, again = (side.between(joint, joint + _SHARED) for side in (part, after))
        if shared and shared == again:
            ids += (known.setdefault(token, token) for token, _ in part.between(since, joint))
            part, start, end, since = after, begin, end + _STEP, joint
        else:
            end = start + 2 * (end - start)
            part = _Part.read(tokenizer, text, start, end)
    return ids + [token for token, _ in part.between(since, len(text))]


class _Part(NamedTuple):
    """The tokens of a part of a text."""

    ids: list[int]
    starts: list[int]
    """The places in the text at which they begin."""

    @classmethod
    def read(cls, tokenizer: Any, text: str, start: int, end: int) -> _Part:
        encoded = tokenizer(text[start:end], add_special_tokens=False, return_offsets_mapping=True)
        return cls(encoded["input_ids"], [start + first for first, _ in encoded["offset_mapping"]])

    def between(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return (id, place) from the first token at or behind `start` on, up to the first one at or behind `end`."""
        first, last = (
            next((i for i, at in enumerate(self.starts) if at >= place), len(self.ids)) for place in (start, end)
        )
        return list(zip(self.ids[first:last], self.starts[first:last], strict=True))


def encode_start(tokenizer: Any, text: str, most: int | None = None) -> list[int]:
    """Return the ids of a text that something follows: with the tokenizer's beginning, and without its end.

    A beginning that the text brings itself does not come twice. most: the most ids to return; None for all.
    """
    before, _ = added_ids(tokenizer)
    ids = encode_plain(tokenizer, text, most)
    return ids if ids[: len(before)] == before else (before + ids)[:most]


def encode_next(tokenizer: Any, text: str) -> list[int]:
    """Return the ids that a text has behind other text and a blank. By itself, SentencePiece reads a second blank."""
    first, whole = (encode_plain(tokenizer, t) for t in (":", f": {text}"))
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
    blanks, so that they touch no word. A very long reference counts as it is written alone.
    """
    forms = {reference}
    if len(reference) <= _LONG:
        forms.add(decode_answer(tokenizer, encode_plain(tokenizer, reference)).strip())
    return max(rule(form, without_special(tokenizer, generated, form)) for form in forms)


def cut_text(tokenizer: Any, text: str, tokens: int) -> str:
    """Return the first tokens of a text, as they are written in it. Without offsets (slow tokenizers): as decoded."""
    start = beginning(tokenizer, text, tokens + 1)
    encoded = tokenizer(start, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
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
