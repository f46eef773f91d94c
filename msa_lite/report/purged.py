"""Tell in a report that the data of a run was purged."""

from __future__ import annotations

from pathlib import Path

from msa_lite.io.reading import read_object

PURGED_FILE = "purged.json"  # what `msa-lite purge` has removed from a run's folder, and when


def is_purged(folder: Path) -> bool:
    """Check whether the data of a run was purged."""
    return (folder / PURGED_FILE).is_file()


def purge_day(folder: Path) -> str | None:
    """Return the day on which a run's data was purged; None where it was not."""
    path = folder / PURGED_FILE
    return str(read_object(path).get("began"))[:10] if path.is_file() else None


def after_purge(folder: Path, missing: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines on what a run's folder lacks: after a purge, its vectors are not called unfitted."""
    day = purge_day(folder)
    if day is None:
        return missing
    line = f"vectors: purged on {day}, and so were the records of rows; {PURGED_FILE} lists what was removed"
    return (line, *(other for other in missing if not other.startswith("vectors")))
