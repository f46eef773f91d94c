"""Find rows in files: long texts anywhere in them, short ones by the pieces that they fill."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from msa_lite.data.pieces import PARQUET, packing_of, pieces_of
from msa_lite.errors import FormatError
from msa_lite.io.files.reading import printable
from msa_lite.io.files.search import SHORTEST, text_search

_MOST = 2000  # characters of a text that have to be there
_LEAST, _FEWEST = 4, 3  # characters of a piece that tells something, and how many it takes
_BATCH = 10_000  # cells that are searched at a time


@dataclass(frozen=True)
class Texts:
    """The texts by which rows are known, or hashes of them."""

    long: frozenset[str]
    """Texts of `SHORTEST` characters and more, each of which tells a file."""
    short: tuple[frozenset[str], ...]
    """The texts of columns of mostly shorter ones, of which it takes many to tell a file."""

    @classmethod
    def of(cls, columns: Iterable[Iterable[str]]) -> Texts:
        """Sort the texts of columns; a column is, for instance, all answers of one file."""
        stripped = [{text.strip() for text in column} for column in columns]
        short = [{text for text in column if len(text) < SHORTEST} for column in stripped]
        told = [
            frozenset(text for text in part if len(text) >= _LEAST)
            for part, column in zip(short, stripped, strict=True)
            if len(part) > len(column) / 2
        ]
        long = frozenset().union(*stripped).difference(*short)
        return cls(long, tuple(dict.fromkeys(part for part in told if len(part) >= _FEWEST)))

    def __bool__(self) -> bool:
        return bool(self.long or self.short)

    def mapped(self, change: Callable[[str], str]) -> Texts:
        """Return the same texts, each of them changed."""
        return Texts(frozenset(map(change, self.long)), tuple(frozenset(map(change, part)) for part in self.short))

    def without(self, others: Collection[str]) -> Texts:
        """Return these texts without others."""
        left = [part.difference(others) for part in self.short]
        return Texts(self.long.difference(others), tuple(part for part in left if part))


NO_TEXTS = Texts(frozenset(), ())


class RowSearch:
    """A search for rows in files.

    A text of `SHORTEST` characters and more is looked for anywhere in a file. Shorter ones tell a file where at least
    half of a column, and three of them, are whole pieces of it (`pieces_of`): "1234" and "Anna". Texts of fewer than
    four characters, such as "yes" and "12", stand in many files, and tell none.
    """

    def __init__(
        self, texts: Texts, hashed: Texts = NO_TEXTS, digest: Callable[[str], str] = str, most: int = _MOST
    ) -> None:
        """Prepare the search.

        hashed: hashes of further texts; they are found where one is a whole piece of a file. digest: makes the hash of
        a piece. most: characters of a text that have to be there.
        """
        self._texts, self._hashed, self._digest = texts, hashed, digest
        self._bytes = text_search(texts.long, most)

    def __bool__(self) -> bool:
        """Return whether there is anything to look for."""
        return bool(self._texts or self._hashed)

    def is_in(self, path: Path) -> bool:
        """Check whether rows stand in a file.

        Raise FormatError where that cannot be told: of what is no regular file, cannot be read, or is packed.
        """
        try:
            if self._bytes.is_in(path):
                return True
            packing = packing_of(path)
        except OSError as error:
            raise FormatError(f"{printable(path)}: cannot be read ({error.strerror or error})") from error
        if packing not in (None, PARQUET):
            raise FormatError(f"{printable(path)}: is packed ({packing}), so its texts cannot be seen")
        return bool(packing or self._texts.short or self._hashed) and self._is_in_pieces(path)

    def _is_in_pieces(self, path: Path) -> bool:
        """Check the pieces of a file for short texts, for hashed ones, and in a packed table for long ones, too."""
        left, hashed_left = self._texts.short, self._hashed.short
        pieces_left = pieces_of(path)
        while batch := list(islice(pieces_left, _BATCH)):
            if self._bytes.is_within("\n".join(batch).encode("utf-8", "replace")):
                return True
            pieces = {piece for piece in batch if len(piece) >= _LEAST}
            left = tuple(part - pieces for part in left)
            if self._hashed:
                hashes = {piece: self._digest(piece) for piece in pieces}
                if any(digest in self._hashed.long for piece, digest in hashes.items() if len(piece) >= SHORTEST):
                    return True
                hashed_left = tuple(part.difference(hashes.values()) for part in hashed_left)
        return has_many(self._texts.short, left) or has_many(self._hashed.short, hashed_left)


def has_many(columns: Sequence[Collection[str]], left: Sequence[Collection[str]], fewest: int = _FEWEST) -> bool:
    """Check whether at least half of a column, and the fewest texts that tell something, are no longer left."""
    counts = ((len(column) - len(rest), len(column)) for column, rest in zip(columns, left, strict=True))
    return any(count >= max(fewest, whole / 2) for count, whole in counts)


def fills_half(path: Path, columns: Iterable[Iterable[str]]) -> bool:
    """Check whether half of a column, however short, are whole pieces of a file. Raise FormatError as `RowSearch`.

    This tells something only of a table that other signs point at.
    """
    texts = [{text.strip() for text in column} for column in columns]
    pieces = set(pieces_of(path))
    return has_many(texts, [part - pieces for part in texts], fewest=1)
