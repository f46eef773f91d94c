"""Read and write report.json: metrics of one model on one benchmark; show models side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError, UsageError
from msa_lite.io.files.reading import read_bytes, read_object
from msa_lite.io.files.writing import write_json
from msa_lite.io.finished.seal import MANIFEST, NOT_OURS, check_read, load_manifest
from msa_lite.report.tables.formats import Cell, Section, TextTable, html_table
from msa_lite.report.tables.metrics import GROUPS, MetricKind, metric_kind

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

    def values(self) -> dict[str, float | None]:
        """Return the values of the metrics by name."""
        return {name: metric.value for name, metric in self.metrics.items()}

    def _repr_html_(self) -> str:
        return html_table(reports_table({"value": self}, f"{self.benchmark}, {self.split}"))


def write_report(report: Report, folder: Path) -> None:
    """Write `report.json` into a folder."""
    write_json(folder / REPORT_FILE, report)


def load_report(path: Path) -> Report:
    """Read a report.json, or the one in a folder. Values that are no finite numbers are missing, and the note says so.

    Raise UsageError when there is none, FormatError if it is broken, or not as the manifest beside it says.
    """
    from pydantic import TypeAdapter, ValidationError

    path = path / REPORT_FILE if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"{path}: no such report")
    check_read(path)
    if is_run_report(path):
        raise FormatError(f"{path}: the report of a whole run; give its folder, or a report.json in its evaluation/")
    try:
        report = TypeAdapter(Report).validate_json(read_bytes(path), strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        place = "".join(f"{part}: " for part in [".".join(map(str, fault["loc"]))] if part)
        raise FormatError(f"{path}: not a report of msa-lite ({place}{fault['msg']})") from error
    return replace(report, metrics={name: _finite(metric) for name, metric in report.metrics.items()})


def _finite(metric: Metric) -> Metric:
    if metric.value is not None and not math.isfinite(metric.value):
        return replace(metric, value=None, stderr=None, note=metric.note or f"not a finite number but {metric.value}")
    return metric if metric.stderr is None or math.isfinite(metric.stderr) else replace(metric, stderr=None)


def stage_report(folder: Path) -> Report | None:
    """Return the report in a folder, None where there is none. Raise FormatError for one that is damaged."""
    return load_report(folder) if (folder / REPORT_FILE).is_file() else None


def report_on(folder: Path, model: str, revision: str | None) -> Report | None:
    """Return the report in a folder if it names a model with this revision, else None. Raise FormatError.

    Such a report is of several models, which its settings name.
    """
    report = stage_report(folder)
    if report is None or revision is None:
        return None
    with reading(folder / REPORT_FILE):
        return report if report.settings["models"].get(model, {}).get("revision") == revision else None


def is_run_report(path: Path) -> bool:
    """Check whether a report.json is that of a whole run, which holds the reports of its models and is no `Report`."""
    try:
        return bool(read_object(path).get("kind") == RUN_REPORT)
    except FormatError:
        return False


_WRONG = (LookupError, TypeError, AttributeError, ValueError, RecursionError)


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
        raise FormatError(f"{folder / MANIFEST}: {NOT_OURS}")
    return manifest


def is_finite_number(value: object) -> bool:
    """Check for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_ARROWS = {True: " ↑", False: " ↓", None: ""}
_LEGEND = "mean ± standard error; ↑ higher, ↓ lower is better"


def heading(name: str, higher_is_better: bool | None) -> str:
    """Return a metric's label for where no group stands beside it, with the direction's arrow."""
    kind = metric_kind(name)
    return kind.heading + arrow(kind, higher_is_better)


def arrow(kind: MetricKind, higher_is_better: bool | None) -> str:
    """Return the sign of the better direction, to be put behind a label."""
    return " → 0" if kind.best_at_zero else _ARROWS[higher_is_better]


def number(value: float | None) -> str:
    """Return a value as tables show it."""
    if value is None:
        return "–"
    small = 0 < abs(value) < 5e-4  # p-values
    return f"{value:{'.1e' if small else '.3f'}}"


def signed(value: float | None) -> str:
    """Return a value as pages and pictures show it, with a proper minus sign."""
    return number(value).replace("-", "−")


def metric_cell(metric: Metric | None, n: int) -> Cell:
    """Return a metric as tables show it, with its number of items where it is not n."""
    if metric is None or metric.value is None:
        return Cell(number(None))
    return Cell(number(metric.value), stderr=metric.stderr, remark="" if metric.n == n else f"n = {metric.n}")


def notes(reports: Mapping[str, Report]) -> list[str]:
    """Return why numbers are missing, what was left out, and how much judges were asked, one line each."""
    labels: dict[str, dict[str, None]] = {}
    for report in reports.values():
        for name, metric in report.metrics.items():
            kind = metric_kind(name)
            if metric.note:
                labels.setdefault(metric.note, {})[kind.label] = None
            if metric.skipped:
                labels.setdefault(f"items left out: {metric.skipped}", {})[f"{kind.label}, {kind.group}"] = None
    judges = dict.fromkeys(
        _judge_note(report.settings["judge"]) for report in reports.values() if "judge" in report.settings
    )
    return [*(f"{', '.join(names)}: {note}" for note, names in labels.items()), *judges]


def _judge_note(judge: Mapping[str, Any]) -> str:
    """Return how much the judge of a report was asked."""
    counts = f"{judge['calls']} calls, {judge['cached']} verdicts from earlier ones, {judge['invalid']} invalid"
    return f"judge {judge['model']}: {counts}"


def reports_table(reports: Mapping[str, Report], title: str = "") -> TextTable:
    """Return one row a metric and one column a model, in a section for each group of metrics.

    Metrics stand in the order of the first report that has them.
    """
    names = dict.fromkeys(name for report in reports.values() for name in report.metrics)
    kinds = sorted(map(metric_kind, names), key=lambda kind: GROUPS.index(kind.group))
    sections = [
        Section([_metric_row(kind, reports) for kind in of_group], group)
        for group, of_group in groupby(kinds, key=lambda kind: kind.group)
    ]
    return TextTable(["metric", "n", *reports], sections, title, [_LEGEND, *notes(reports)])


def _metric_row(kind: MetricKind, reports: Mapping[str, Report]) -> list[Cell]:
    """Return [label, n, one cell a model] of a metric."""
    metrics = [report.metrics.get(kind.name) for report in reports.values()]
    present = [metric for metric in metrics if metric is not None]
    n = max(metric.n for metric in present)
    label = Cell(kind.label + arrow(kind, present[0].higher_is_better), meaning=kind.formula)
    return [label, Cell(str(n)), *(metric_cell(metric, n) for metric in metrics)]
