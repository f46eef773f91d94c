"""Read and write record.json with a seal that shows a change; keyed hashes of rows; the signature."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import shlex
import subprocess
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from msa_lite.errors import FormatError, MismatchError, UsageError, join_faults
from msa_lite.io.files.reading import local_path, parse_json, printable, read_bytes, read_text
from msa_lite.io.files.writing import replacing, sync, write_text
from msa_lite.io.finished.seal import is_whole, sealed_json
from msa_lite.io.weights.checkpoint import unique_keys
from msa_lite.record.schema import SEAL, KeyedRows, Removal
from msa_lite.report.run.provenance import RECORD_FILE

SIGNATURE_FILE = "record.json.sig"
_LIMIT = 1 << 30  # bytes; 150 for each row to forget


def load_record(path: Path) -> Removal:
    """Read a record. Raise FormatError for one that does not fit the schema, or is not as it was written."""
    raw, where = read_bytes(path, _LIMIT), printable(path)
    value = parse_json(raw, where, pairs=unique_keys)
    try:
        record = Removal.model_validate(value)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise FormatError(join_faults(f"{where}: no record of msa-lite:", faults)) from error
    if not is_whole(raw, SEAL):
        raise FormatError(f"{where}: changed since it was written ({SEAL} does not fit it)")
    return record


def store_record(record: Removal, path: Path) -> None:
    """Write a record with its seal."""
    write_text(path, sealed_json(record.model_dump(mode="json", exclude={SEAL}), SEAL))


def record_hash(folder: Path) -> str | None:
    """Return the SHA-256 of the record in a run's folder, as the next record names it; None where there is none."""
    path = folder / RECORD_FILE
    return sha256(read_bytes(path, _LIMIT)).hexdigest() if path.exists() else None


KEY_FILE = "record.key"
RowContent = tuple[str, str, str]
"""The question, answer and text of a row; either the text is empty, or the two others are."""
RowMatch = Literal["row", "question", "none"]

_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")
_JOINERS = "\u200c\u200d"


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
    """Return a text as people see it: in Unicode's form NFC, without signs that show nothing, white space as one blank.

    Left out are byte order marks, zero-width spaces, soft hyphens and marks of direction, wherever they stand, and
    joiners at the ends (within a word they decide its form). No white space is at the ends. Case and all other signs
    count.
    """
    words = " ".join(unicodedata.normalize("NFC", _INVISIBLE.sub("", text)).split())
    return words.strip(_JOINERS + " ")


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
        with replacing(path) as temporary:
            temporary.unlink(missing_ok=True)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="ascii") as stream:
                stream.write(secrets.token_hex(32) + "\n")
            sync(temporary)
        sync(path.parent)
    return load_key(path)


NAMESPACE = "msa-lite"
_SECONDS = 60
_SIGNATURE_LIMIT = 1 << 20  # bytes; it takes some hundreds


def signing_command(record: Path) -> str:
    """Return the command by which a user signs a record."""
    return f"ssh-keygen -Y sign -n {NAMESPACE} -f ~/.ssh/id_ed25519 {shlex.quote(str(record))}"


def signature_of(record: Path) -> Path:
    """Return the place of a record's signature: beside it, with .sig behind its name."""
    return record.with_name(f"{record.name}.sig")


def check_signature(record: Path, allowed_signers: str | Path | None = None) -> str:
    """Check the signature beside a record; return a sentence on the signer.

    allowed_signers: a file in OpenSSH's form (`alice@example.org ssh-ed25519 AAAA…` in a line) with those whose
    signature counts. Without it, only the signature itself is checked, and who signed is left open.

    Raise MismatchError for a signature that does not fit the record, or is of nobody in that file; UsageError without
    ssh-keygen, or such a file.
    """
    signature = signature_of(record)
    read_bytes(signature, _SIGNATURE_LIMIT, MismatchError)  # ssh-keygen would wait at a pipe
    if allowed_signers is None:
        answer = _call(record, "check-novalidate", "-s", signature)
        return f"{answer}; --allowed-signers FILE checks whose key that is"
    signers = local_path(allowed_signers)
    try:
        read_bytes(signers, kind=UsageError)
    except UsageError as error:
        lines = "alice@example.org ssh-ed25519 AAAA…"
        raise UsageError(f"{error}; give a file of allowed signers (a line: {lines})") from error
    names = _call(record, "find-principals", "-s", signature, "-f", signers)
    signer = names.splitlines()[0].split(",")[0]  # a line of the file may name several
    return _call(record, "verify", "-f", signers, "-I", signer, "-s", signature)


def _call(record: Path, action: str, *arguments: str | Path) -> str:
    """Call `ssh-keygen -Y ACTION` with the record on its standard input; return what it prints."""
    options = () if action == "find-principals" else ("-n", NAMESPACE)
    command = ["ssh-keygen", "-Y", action, *options, *map(_argument, arguments)]
    try:
        with open(record, "rb") as stream:
            done = subprocess.run(command, stdin=stream, capture_output=True, timeout=_SECONDS, check=False)
    except FileNotFoundError as error:
        raise UsageError("the signature cannot be checked without ssh-keygen: install OpenSSH 8.1 or later") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"ssh-keygen gave no answer within {_SECONDS} seconds") from error
    message = (done.stdout + done.stderr).decode(errors="replace").strip()
    if done.returncode:
        raise MismatchError(_refusal(action, message, record.name))
    return done.stdout.decode(errors="replace").strip()


def _argument(value: str | Path) -> str:
    """Return an argument; of a path the full one, which cannot be taken for an option."""
    return str(value.absolute()) if isinstance(value, Path) else value


def _refusal(action: str, message: str, record: str) -> str:
    """Return the message that a signature is not good."""
    reason = f" (ssh-keygen: {message.splitlines()[0]})" if message else ""
    if action == "find-principals":
        return f"made with no key of the allowed signers, or no signature{reason}"
    return f"does not fit {record} (changed since it was signed?), or is no signature{reason}"
