"""Tell in a report that the data of a run was purged."""

from __future__ import annotations

from pathlib import Path

from msa_lite.io.reading import read_object

PURGED_FILE = "purged.json"  # what `msa-lite purge` has removed from a run's folder, and when


def after_purge(folder: Path, missing: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines on what a run's folder lacks: after a purge, its vectors are not called unfitted."""
    path = folder / PURGED_FILE
    if not path.is_file():
        return missing
    day = str(read_object(path).get("began"))[:10]
    line = f"vectors: purged on {day}, and so were the records of rows; {PURGED_FILE} lists what was removed"
    return (line, *(other for other in missing if not other.startswith("vectors")))
