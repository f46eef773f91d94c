"""Read and write record.json, whole or not at all, with a seal that shows a change."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from pydantic import ValidationError

from msa_lite.errors import FormatError, join_faults
from msa_lite.io.files import write_text
from msa_lite.io.reading import parse_json, printable, read_bytes
from msa_lite.io.seal import is_whole, sealed_json
from msa_lite.record.schema import SEAL, Removal

RECORD_FILE = "record.json"
SIGNATURE_FILE = "record.json.sig"
_LIMIT = 1 << 30  # bytes; 150 for each row to forget


def load_record(path: Path) -> Removal:
    """Read a record. Raise FormatError for one that does not fit the schema, or is not as it was written."""
    raw, where = read_bytes(path, _LIMIT), printable(path)
    value = parse_json(raw, where)
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
