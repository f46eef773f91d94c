"""Turn what a stranger's file may hold into one error that names the file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError
from msa_lite.io.seal import MANIFEST, load_manifest
from msa_lite.report.reports import REPORT_FILE, Report, load_report

_WRONG = (KeyError, TypeError, AttributeError, ValueError, IndexError)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise FormatError, with the file's name, where its content is not as msa-lite writes it."""
    try:
        yield
    except _WRONG as error:
        raise FormatError(f"{path}: not as msa-lite writes it ({type(error).__name__}: {error})") from error


def stage_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a finished stage, None where there is none. Raise FormatError for a damaged one."""
    manifest = load_manifest(folder)
    if manifest is None and (folder / MANIFEST).exists():
        raise FormatError(f"{folder / MANIFEST}: not as msa-lite wrote it, or of another program")
    return manifest


def stage_report(folder: Path) -> Report | None:
    """Return the report in a folder, None where there is none. Raise FormatError for one that is damaged."""
    path = folder / REPORT_FILE
    if not path.is_file():
        return None
    report = load_report(path)
    with reading(path):
        for name, metric in report.metrics.items():
            values = (metric.value, metric.stderr)
            if not all(value is None or is_finite_number(value) for value in values) or not is_finite_number(metric.n):
                raise ValueError(f"{name} is no number")
        if not isinstance(report.settings, Mapping) or not all(
            isinstance(s, str) for s in (report.benchmark, report.split)
        ):
            raise ValueError("benchmark, split or settings")
    return report


def is_finite_number(value: object) -> bool:
    """Check for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
