"""Find the reports of a comparison in folders, and label them as in the MSA paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from msa_lite.catalogue import EARLIER_COLUMNS
from msa_lite.comparison.published import Figure, Ratio
from msa_lite.errors import FormatError, MsaError, UsageError, join_faults
from msa_lite.io.files.reading import local_path
from msa_lite.report.run.attacks import ATTACKS_FOLDER, attack_metrics
from msa_lite.report.run.evidence import EVIDENCE_FOLDER, evidence_metrics, load_evidence
from msa_lite.report.tables.reports import REPORT_FILE, Metric, Report, is_run_report, load_report, stage_report
from msa_lite.report.verdict.figures import EARLIER_SET

Role = Literal["target", "ideal", "method"]
SECTIONS = ("references", "msa", "baselines", "others", "published")
"""Parts of a comparison in their order: target and ideal; MSA; other methods; models whose report does not say how they
were made; figures of a paper."""

ROLES_OF_NAMES: Mapping[str, Role] = {"target": "target", "ideal": "ideal"}
METHOD_LABELS = {
    "msa": "MSA",
    "npo": "NPO",
    "simnpo": "SimNPO",
    "rmu": "RMU",
    "grad_ascent": "GradAscent",
    "grad_diff": "GradDiff",
    "task_vector": "Task Vector",
    "satimp": "SatImp",
    "undial": "UNDIAL",
    "wga": "WGA",
    "dpo": "DPO",
}


@dataclass(frozen=True)
class ModelValue:
    """A model's value of one metric, and how it stands beside the other models'."""

    value: float | None
    """None where it is missing."""
    stderr: float | None
    n: int | None
    """The number of items it is of. None for published figures."""
    ratio: Ratio | None
    """Of methods only, where there are several: see `ratios`."""
    best: bool
    """True where no method of its section is better, and there are several."""
    text: str
    """The value as tables show it. A published one stands as it was printed."""
    json_keys: ClassVar = {
        "value": "value", "stderr": "stderr", "n": "n", "ratio": "ratio.value", "reaches_ideal": "ratio.reached",
        "best": "best",
    }  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: the report of one model, or a row of a published table."""

    role: Role
    section: str
    """One of `SECTIONS`."""
    label: str
    report: Report
    source: str
    """The path of the report, or the name of a published table."""
    named: bool = False
    """True where the user gave the label."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """The paper's figures by metric, for a row of a published table."""
    cells: Mapping[str, ModelValue] = field(default_factory=dict)
    """The values by metric, once it stands beside the others."""
    seeds: Mapping[int, Entry] = field(default_factory=dict)
    """The runs that a row of several seeds is the mean of, by their seeds; else none."""
    json_keys: ClassVar = {
        "model": "label", "section": "section", "role": "role", "source": "source", "method": "method",
        "metrics": "cells", "seeds?": "seed_values",
    }  # fmt: skip

    def value(self, name: str) -> float | None:
        """Return a metric's value, or None."""
        metric = self.report.metrics.get(name)
        return metric.value if metric else None

    @property
    def seed_values(self) -> dict[str, Any]:
        """Return the single runs of a row of several seeds, by seed."""
        return {str(seed): {"source": run.source, "metrics": run.report.metrics} for seed, run in self.seeds.items()}

    @property
    def method(self) -> Mapping[str, Any] | None:
        """Return the method that made the model, by its report; None where the report does not say."""
        return _method_of(self.report)


def _method_of(report: Report) -> Mapping[str, Any] | None:
    method = report.settings.get("method")
    return method if method and isinstance(method, Mapping) else None


def read_entries(paths: str | Path | Iterable[str | Path]) -> tuple[list[Entry], list[str]]:
    """Read the reports below paths, in order; return them with notes on models that are not scored yet.

    A path is a run's folder (target, ideal and unlearned below evaluation/, runs of baselines below baselines/), an
    evaluation's folder, or a report.json, each also as LABEL=PATH. A model is the target or the ideal where the folder
    of a run or an evaluation says so, or its label, or the name of its folder if no method made it. Raise UsageError
    or FormatError with every path that cannot be read.
    """
    paths = [paths] if isinstance(paths, str | Path) else paths
    entries: dict[Path, Entry] = {}
    faults: list[MsaError] = []
    notes: list[str] = []
    labels: list[str] = []
    for text in map(str, paths):
        label, path = _split_label(text)
        if label is not None:
            if not label or label in labels:
                faults.append(UsageError(f"{text}: the label '{label}' is {'taken' if label else 'empty'}"))
            labels.append(label)
        try:
            for place, role, name in _find(path, label, notes):
                entry = _read(place, role, name)
                first = entries.setdefault(place.resolve(), entry)
                if entry.named and first.named and entry.label != first.label:
                    raise UsageError(f"{place}: has two labels, '{first.label}' and '{entry.label}'")
                if entry.named:
                    entries[place.resolve()] = entry
        except MsaError as error:
            faults.append(error)
    if faults:
        kind = UsageError if any(isinstance(fault, UsageError) for fault in faults) else FormatError
        raise kind(str(faults[0]) if len(faults) == 1 else join_faults("cannot compare these:", map(str, faults)))
    return list(entries.values()), notes


def _split_label(text: str) -> tuple[str | None, Path]:
    """Split LABEL=PATH. A text that is itself an existing path has no label, even with a "=" in it."""
    whole = local_path(text)
    label, sign, path = text.partition("=")
    if not sign or whole.exists():
        return None, whole
    return " ".join(label.split()), local_path(path)


def _find(path: Path, label: str | None, notes: list[str]) -> Iterator[tuple[Path, Role | None, str | None]]:
    """Yield each report below a path, with the role of its model and the user's label, as far as they are known."""
    baselines = [folder for folder in sorted(path.glob("baselines/*")) if folder.is_dir()]
    reports = {folder: list(_own_reports(folder)) for folder in (path, *baselines) if folder.suffix != ".partial"}
    if not any(reports.values()):
        missing = "no report in it; give a run's folder, an evaluation's folder, or a report.json"
        raise UsageError(f"{path}: {missing if path.exists() else 'no such file or folder'}")
    for folder, places in reports.items():
        own = label if folder == path else None
        unlearned = [place for place, role in places if role not in ROLES_OF_NAMES]
        if own and not unlearned:
            raise UsageError(f"{path}: the label '{own}' names an unlearned model, but there is no report of one")
        if not unlearned and (places or folder != path):
            notes.append(f"{folder}: no unlearned model is scored yet")
        yield from ((place, role, own if place in unlearned else None) for place, role in places)


def _own_reports(path: Path) -> Iterator[tuple[Path, Role | None]]:
    if path.is_file():
        yield path, None
        return
    folder = path / "evaluation" if (path / "evaluation").is_dir() else path
    places: dict[str, Role | None] = {".": None, "unlearned": "method", **ROLES_OF_NAMES}
    for name, role in places.items():
        if (place := folder / name / REPORT_FILE).is_file() and not is_run_report(place):
            yield place, role


def _read(place: Path, role: Role | None, label: str | None) -> Entry:
    report = load_report(place)
    method = _method_of(report)
    if label is not None and label.lower() in ROLES_OF_NAMES and (role or method):
        raise UsageError(
            f"{place}: the label '{label}' is for the {label.lower()}, but the report is of an unlearned model"
        )
    if role is None:
        name = label if label is not None else "" if method else place.resolve().parent.name
        role = ROLES_OF_NAMES.get(name.lower(), "method")
    if place.parent.parent.name == "evaluation":
        report = replace(report, metrics={**report.metrics, **_beside(place, role, report)})
    if role != "method":
        return Entry(role, SECTIONS[0], role.capitalize(), report, str(place))
    section = "others" if not method else "msa" if method.get("name") == "msa" else "baselines"
    own = label or (method and _method_label(method)) or _folder_name(place)
    return Entry(role, section, own, report, str(place), bool(label))


def _beside(place: Path, role: Role, report: Report) -> dict[str, Metric]:
    """Return what a run says of one of its models: rows of earlier requests, attacks, and evidence."""
    evaluation, model = place.parent.parent, report.settings.get("model")
    folder, name = evaluation.parent, "unlearned" if role == "method" else role
    revision = model.get("revision") if isinstance(model, Mapping) else None
    again = stage_report(evaluation / EARLIER_SET / place.parent.name)
    known = again.metrics if again and again.settings.get("model") == model else {}
    columns = next((names for names in EARLIER_COLUMNS if known.keys() >= {*names}), ())
    attacked = attack_metrics(folder / ATTACKS_FOLDER, revision) if role == "method" else {}
    evidence = evidence_metrics(load_evidence(folder / EVIDENCE_FOLDER, revision, name), name)
    return {**{column: known[column] for column in columns}, **attacked, **evidence}


def _method_label(method: Mapping[str, Any]) -> str:
    """Return a method's name as in the paper, with what differs from it there: a filter, or a baseline's prior."""
    name, parameters = str(method.get("name", "")), method.get("parameters")
    differs = {
        "prior": method.get("start") == "prior" and name != "msa",
        "held": bool(method.get("hold")),
        "from θ_2": bool(method.get("later")),
        "filtered": isinstance(parameters, Mapping) and bool(parameters.get("filter")),
    }
    details = ", ".join(detail for detail, applies in differs.items() if applies)
    return METHOD_LABELS.get(name, name) + (f" ({details})" if details else "")


def _folder_name(place: Path) -> str:
    """Return the name of a report's folder; for a report below evaluation/, that of the run."""
    folder = place.resolve().parent
    while folder.name in ("unlearned", "evaluation"):
        folder = folder.parent
    return folder.name or str(place)


def _folders(entry: Entry) -> str:
    """Return the name of an entry's folder, or those of its seeds'."""
    return ", ".join(_folder_name(Path(one.source)) for one in [*entry.seeds.values()] or [entry])


def set_apart(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries with labels that differ: equal ones get the folder's name added, then the path.

    Labels that the user gave stay as they are.
    """
    labelled = list(entries)
    for detail_of in (_folders, lambda entry: entry.source):
        details: dict[str, set[str]] = {}
        for entry in labelled:
            details.setdefault(entry.label, set()).add(detail_of(entry))
        labelled = [
            replace(entry, label=f"{entry.label} ({detail_of(entry)})")
            if len(details[entry.label]) > 1 and not entry.named
            else entry
            for entry in labelled
        ]
    return labelled
