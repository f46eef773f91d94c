"""Put models side by side in the MSA paper's form, in five formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from msa_lite.catalogue import BENCHMARKS, evidence_metric
from msa_lite.comparison.agreement import caveats, check_agreement, merge_references
from msa_lite.comparison.entries import ROLES_OF_NAMES, SECTIONS, Entry, ModelValue, read_entries, set_apart
from msa_lite.comparison.published import PublishedTable, Ratio, best_values, load_published, ratios
from msa_lite.comparison.seeds import join_seeds
from msa_lite.errors import MismatchError, UsageError, join_faults, nearest
from msa_lite.report.tables.formats import Cell, Section, TextTable, csv_lines, html_page, html_table, latex, markdown
from msa_lite.report.tables.metrics import ATTACKED, EARLIER_GROUP, EVIDENT, metric_kind
from msa_lite.report.tables.reports import Report, heading, number


@dataclass(frozen=True)
class Column:
    """A metric of a comparison."""

    name: str
    heading: str
    """Its label, with the arrow of its direction."""
    higher_is_better: bool | None
    """None where neither way is better."""


@dataclass(frozen=True)
class Comparison:
    """Models side by side as data. `formats` writes it as text."""

    benchmark: str
    split: str | None
    """None for published figures of an unknown split."""
    columns: tuple[Column, ...]
    rows: tuple[Entry, ...]
    notes: tuple[str, ...]
    """Remarks that a reader needs, one line each."""
    published: str | None = None
    """The heading of the rows of a paper."""
    json_keys: ClassVar = ("benchmark", "split", "columns", "rows", "notes")

    @property
    def title(self) -> str:
        """Return the benchmark and the split."""
        return f"{self.benchmark}, {self.split}" if self.split else self.benchmark

    def _repr_html_(self) -> str:
        return html_table(comparison_table(self))


def compare(
    paths: str | Path | Iterable[str | Path] = (),
    published: str | None = None,
    metrics: Sequence[str] | None = None,
) -> Comparison:
    """Put reports side by side, as in the MSA paper.

    paths: folders of runs and evaluations, and report.json files, each also as LABEL=PATH; see `read_entries`. Runs of
    one recipe with several seeds are one row (`join_seeds`). published: the name of a table of the paper. Its figures
    follow in separate rows, with its printed ratios, or else ratios to its own ideal by the same rule. metrics: the
    columns, by name. Default: those of the paper. Columns without any value are left out, and the notes say why.

    Raise UsageError for missing paths and unknown names, FormatError for broken reports, MismatchError for reports that
    cannot be compared, each with all faults.
    """
    table = load_published(published) if published else None
    entries, notes = read_entries(paths)
    if not entries and not table:
        raise UsageError("nothing to compare: give folders of runs or evaluations, reports, or a published table")
    entries, seed_notes = join_seeds(entries)
    try:
        check_agreement(entries, table)
        own = sorted(set_apart(merge_references(entries)), key=_place)
    except MismatchError as error:
        raise MismatchError(join_faults(str(error), seed_notes)) from error
    printed = _published_entries(table) if table else []
    all_columns = _choose_columns([*own, *printed], metrics)
    columns = [one for one in all_columns if any(entry.value(one.name) is not None for entry in (*own, *printed))]
    if not columns:
        raise UsageError(f"no report has a value of {', '.join(column.name for column in all_columns) or 'any metric'}")
    return Comparison(
        (own or printed)[0].report.benchmark,
        own[0].report.split if own else table.split if table else None,
        tuple(columns),
        (*_with_values(own, columns), *_with_values(printed, columns)),
        (
            *caveats(own, printed, [(column.name, column in columns) for column in all_columns], table),
            *seed_notes,
            *notes,
        ),
        f"published: {table.model}" if table else None,
    )


def _place(entry: Entry) -> tuple[int, bool]:
    return SECTIONS.index(entry.section), entry.role == "ideal"


def _published_entries(table: PublishedTable) -> list[Entry]:
    entries = []
    for label, figures in table.rows.items():
        report = Report(table.benchmark, table.split or "", {name: figure.metric for name, figure in figures.items()})
        role = ROLES_OF_NAMES.get(label.lower(), "method")
        entries.append(Entry(role, "published", label, report, table.name, figures=figures))
    return entries


def _choose_columns(entries: Sequence[Entry], names: Sequence[str] | None) -> list[Column]:
    """Return the columns of these names, or those of the benchmark that some report has.

    Raise UsageError for names that no report has.
    """
    directions = {name: metric.higher_is_better for entry in entries for name, metric in entry.report.metrics.items()}
    if names is not None:
        unknown = [f"'{name}'{nearest(name, directions)}" for name in names if name not in directions]
        if unknown:
            raise UsageError(f"no report has the metric {', '.join(unknown)}; choose from {', '.join(directions)}")
        chosen = list(dict.fromkeys(names))
    else:
        entry = BENCHMARKS.get(entries[0].report.benchmark)
        columns = (entry and entry.columns) or directions
        groups = (EARLIER_GROUP, ATTACKED)
        beside = [name for name in directions if metric_kind(name).group in groups or _is_evident(name, entries)]
        chosen = list(dict.fromkeys(name for name in (*columns, *beside) if name in directions))
    return [Column(name, heading(name, directions[name]), directions[name]) for name in chosen]


def _is_evident(name: str, entries: Sequence[Entry]) -> bool:
    """Check whether a metric is evidence that tells more than the scores: not 0 for all, and no count of rows told."""
    is_more = metric_kind(name).group == EVIDENT and name != evidence_metric("says", "tells")
    return is_more and any(entry.value(name) for entry in entries)


def _with_values(entries: Sequence[Entry], columns: Sequence[Column]) -> list[Entry]:
    """Return the entries of one part with their values: its methods beside one another and beside its ideal."""
    methods = [entry for entry in entries if entry.role == "method"]
    several = len(methods) > 1  # of one alone, each value would be the best, and 100 % of itself
    cells: list[dict[str, ModelValue]] = [{} for _ in entries]
    for column in columns:
        name, direction, kind = column.name, column.higher_is_better, metric_kind(column.name)
        values = [entry.value(name) for entry in methods]
        ideal = next((entry.value(name) for entry in entries if entry.role == "ideal"), None)
        shares = iter(ratios(values, ideal, direction if kind.has_ratio and several else None))
        best = iter(best_values(values, direction, kind.best_at_zero))
        for entry, own in zip(entries, cells, strict=True):
            mark = (next(shares), next(best) and several) if entry.role == "method" else (None, False)
            own[name] = _model_value(entry, name, *mark)
    return [replace(entry, cells=own) for entry, own in zip(entries, cells, strict=True)]


def _model_value(entry: Entry, name: str, ratio: Ratio | None, best: bool) -> ModelValue:
    metric, figure = entry.report.metrics.get(name), entry.figures.get(name)
    if metric is None or metric.value is None:
        return ModelValue(None, None, None, None, False, number(None))
    if figure:
        return ModelValue(metric.value, None, None, figure.ratio or ratio, best, figure.printed)
    return ModelValue(metric.value, metric.stderr, metric.n, ratio, best, number(metric.value))


def comparison_table(comparison: Comparison) -> TextTable:
    """Return one row a model; a section each for references, MSA, baselines, other models and published figures."""
    sections = []
    for name, entries in groupby(comparison.rows, key=lambda row: row.section):
        rows = []
        for entry in entries:
            values = entry.cells.values()
            cells = (Cell(value.text, value.best, value.stderr, str(value.ratio or "")) for value in values)
            rows.append([Cell(entry.label), *cells])
        sections.append(Section(rows, (comparison.published or "") if name == "published" else ""))
    headings = ["model", *(column.heading for column in comparison.columns)]
    return TextTable(headings, sections, comparison.title, comparison.notes)


def comparison_csv(comparison: Comparison) -> str:
    """Return one line a model; for each metric METRIC, METRIC_stderr, METRIC_n, METRIC_ratio (as printed), METRIC_best.

    Values have all their digits; what is missing is empty. Notes have no place in it.
    """
    ends = ("", "_stderr", "_n", "_ratio", "_best")
    lines: list[list[object]] = [["section", "model", *(f"{c.name}{end}" for c in comparison.columns for end in ends)]]
    for row in comparison.rows:
        parts = ((v.value, v.stderr, v.n, v.ratio, str(v.best).lower()) for v in row.cells.values())
        lines.append([row.section, row.label, *(part for value in parts for part in value)])
    return csv_lines(lines)


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "md": lambda comparison: markdown(comparison_table(comparison)),
    "tex": lambda comparison: latex(comparison_table(comparison)),
    "csv": comparison_csv,
    "html": lambda comparison: html_page(comparison_table(comparison)),
}
"""Writers of a comparison by the name of the format."""
