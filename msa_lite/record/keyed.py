"""Keyed hashes of rows: with the key, `was this row among them?` has an answer; without it, nobody can guess.

A plain hash of a short row could be found by hashing candidates.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from msa_lite.errors import FormatError, MismatchError, UsageError
from msa_lite.io.files import sync
from msa_lite.io.reading import read_text
from msa_lite.record.schema import KeyedRows

KEY_FILE = "record.key"
RowContent = tuple[str, str, str]
"""The question, answer and text of a row; either the text is empty, or the two others are."""
RowMatch = Literal["row", "question", "none"]


@dataclass(frozen=True)
class RecordKey:
    """The key of a record."""

    secret: bytes
    """32 random bytes."""

    def digest(self, *lines: str) -> str:
        """Return the HMAC-SHA256 (hex) of lines, each in its canonical form."""
        message = "\n".join(canonical(line) for line in lines)
        return hmac.new(self.secret, message.encode("utf-8", "surrogatepass"), sha256).hexdigest()

    def hash_rows(self, rows: Iterable[RowContent]) -> KeyedRows:
        """Return the keyed hashes of rows, sorted, so that their order tells nothing."""
        rows = list(rows)
        whole = {self._row(row) for row in rows}
        questions = {self.digest("question", question) for question, _, _ in rows if question}
        return KeyedRows(check=self.digest("check"), rows=sorted(whole), questions=sorted(questions))

    def _row(self, row: RowContent) -> str:
        question, answer, text = row
        return self.digest("text", text) if text else self.digest("row", question, answer)

    def find(self, rows: Sequence[RowContent], keyed: KeyedRows) -> list[RowMatch]:
        """Return for each row whether it is among the keyed ones: whole, only its question, or not at all.

        Raise MismatchError where this is not the key of these hashes.
        """
        if self.digest("check") != keyed.check:
            raise MismatchError("the key is not the one that the record was made with; look for another record.key")
        whole, questions = set(keyed.rows), set(keyed.questions)

        def match(row: RowContent) -> RowMatch:
            if self._row(row) in whole:
                return "row"
            return "question" if row[0] and self.digest("question", row[0]) in questions else "none"

        return [match(row) for row in rows]


def canonical(text: str) -> str:
    """Return a text in Unicode's form NFC, with one blank for every run of white space, and none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def load_key(path: Path) -> RecordKey:
    """Read a key. Raise UsageError where there is none, FormatError where it is damaged."""
    if not path.exists():
        raise UsageError(f"{path}: no such key; it lies in the folder of the run; give a copy of it (--key FILE)")
    text = read_text(path, 1 << 10).strip()
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise FormatError(f"{path}: no key of a record (64 hexadecimal digits); put a copy of the right one there")
    return RecordKey(bytes.fromhex(text))


def make_key(path: Path) -> RecordKey:
    """Read a key, or make one where there is none; only its owner can read it. Raise FormatError as `load_key`."""
    if not path.exists():
        temporary = path.with_name(path.name + ".tmp")
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as stream:
            stream.write(secrets.token_hex(32) + "\n")
        sync(temporary)
        os.rename(temporary, path)
        sync(path.parent)
    return load_key(path)
