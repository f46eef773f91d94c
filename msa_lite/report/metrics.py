"""report.json: one benchmark's aggregates for one model, each with its n, standard error and direction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError, UsageError
from msa_lite.io.files import write_json

REPORT_FILE = "report.json"
# Metrics with a direction for which the paper prints no ratio: a p-value has orders of magnitude, not shares.
WITHOUT_RATIO = frozenset({"forget_quality"})
BEST_AT_ZERO = frozenset({"privleak"})


@dataclass(frozen=True)
class Metric:
    """One aggregate. value: None when it cannot be given, with the reason in `note`. n: items in it; skipped: items
    left out as not defined. stderr: standard error of the mean. higher_is_better: None where neither way is better.
    """

    value: float | None
    n: int
    stderr: float | None
    higher_is_better: bool | None
    skipped: int = 0
    note: str | None = None


@dataclass(frozen=True)
class Report:
    """All metrics of one model on one benchmark; `split` names the rows ("all", "test", "validation")."""

    benchmark: str
    split: str
    metrics: Mapping[str, Metric]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, that of report.json."""
        return asdict(self) | {"metrics": {name: asdict(metric) for name, metric in self.metrics.items()}}

    def values(self) -> dict[str, float | None]:
        """Metric values by name."""
        return {name: metric.value for name, metric in self.metrics.items()}


def write_report(report: Report, folder: Path) -> None:
    """Write `report.json` into a folder."""
    write_json(folder / REPORT_FILE, report.as_dict())


def load_report(path: Path) -> Report:
    """Read a report.json, or the one in a folder. Raises UsageError when there is none, FormatError if it is broken."""
    path = path / REPORT_FILE if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"{path}: no such report")
    try:
        value = json.loads(path.read_text("utf-8"))
        metrics = {name: Metric(**item) for name, item in value["metrics"].items()}
        return Report(value["benchmark"], value["split"], metrics, value.get("settings", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: not a report of msa-lite ({error})") from error
