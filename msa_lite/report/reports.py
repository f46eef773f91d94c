"""Read and write report.json: one benchmark's metrics for one model, each with n, standard error and direction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError, UsageError
from msa_lite.io.files import write_json
from msa_lite.io.reading import read_object

REPORT_FILE = "report.json"
Z95 = 1.96  # standard errors from a value to the ends of its 95 % interval
RUN_REPORT = "run"
"""The value of "kind" in the report.json of a whole run, which is no `Report`."""


@dataclass(frozen=True)
class Metric:
    """One aggregate of a report."""

    value: float | None
    """None when it cannot be given; `note` has the reason."""
    n: int
    """Items in it."""
    stderr: float | None
    """Standard error of `value`."""
    higher_is_better: bool | None
    """None where neither way is better."""
    skipped: int = 0
    """Items left out because their score is not defined."""
    note: str | None = None
    """A remark on the value, or the reason why there is none."""

    @property
    def margin(self) -> float:
        """Return half the length of the 95 % interval around the value; 0 where it has no error."""
        return Z95 * (self.stderr or 0.0)


@dataclass(frozen=True)
class Report:
    """All metrics of one model on one benchmark."""

    benchmark: str
    split: str
    """The rows: "all", "test", "forget10 validation"."""
    metrics: Mapping[str, Metric]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The model, and how it was scored."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form, that of report.json."""
        return asdict(self) | {"metrics": {name: asdict(metric) for name, metric in self.metrics.items()}}

    def values(self) -> dict[str, float | None]:
        """Return the values of the metrics by name."""
        return {name: metric.value for name, metric in self.metrics.items()}


def write_report(report: Report, folder: Path) -> None:
    """Write `report.json` into a folder."""
    write_json(folder / REPORT_FILE, report.as_dict())


def load_report(path: Path) -> Report:
    """Read a report.json, or the one in a folder. Raise UsageError when there is none, FormatError if it is broken."""
    path = path / REPORT_FILE if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"{path}: no such report")
    try:
        value = json.loads(path.read_text("utf-8"))
        if value.get("kind") == RUN_REPORT:
            raise FormatError(
                f"{path}: the report of a whole run; give its folder, or a report.json in its evaluation/"
            )
        metrics = {name: Metric(**item) for name, item in value["metrics"].items()}
        return Report(value["benchmark"], value["split"], metrics, value.get("settings", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: not a report of msa-lite ({error})") from error


def is_run_report(path: Path) -> bool:
    """Check whether a report.json is that of a whole run, which holds the reports of its models and is no `Report`."""
    try:
        return bool(read_object(path).get("kind") == RUN_REPORT)
    except FormatError:
        return False
