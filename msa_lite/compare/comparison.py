"""Models side by side in the MSA paper's form: one row a model, the metrics as columns, ratios beside the values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msa_lite.compare.agreement import check_agreement, merge_references, same_rows
from msa_lite.compare.caveats import caveats
from msa_lite.compare.common_rows import on_common_rows
from msa_lite.compare.entries import SECTIONS, Entry, Role, read_entries, set_apart, with_reports
from msa_lite.compare.published import PublishedTable, load_published
from msa_lite.compare.ratios import Ratio, best_values, ratios
from msa_lite.errors import UsageError, nearest
from msa_lite.report.metrics import metric_kind
from msa_lite.report.reports import Report
from msa_lite.report.table import heading, number

# The columns of the paper's tables; RESTOR's only one, and those of questions of one's own in the same spirit.
_COLUMNS = {
    "tofu": (
        "acc_forget", "acc_recover", "acc_retain",
        "extraction_strength", "model_utility", "rouge_l_f", "forget_quality",
    ),
    "muse": (
        "extraction_strength", "exact_memorization", "verbmem_f", "min_k", "min_k_pp", "knowmem_r", "privleak",
    ),
    "restor": ("accuracy",),
    "qa": (
        "rouge_l_f", "accuracy_f", "extraction_strength", "rouge_l_r", "accuracy_r", "rouge_l_h", "accuracy_h",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A metric: its name, its heading with the arrow of its direction, and the direction, None where there is none."""

    name: str
    heading: str
    higher_is_better: bool | None


@dataclass(frozen=True)
class Cell:
    """What a row says in a column. value: None where it is missing. n: items in it, None where that is not known.

    ratio: by `ratios`, of methods only, where there are several. best: whether no method of its part of the table is
    better, where there are several. shown: the value as tables show it, a published one as it was printed.
    """

    value: float | None
    stderr: float | None
    n: int | None
    ratio: Ratio | None
    best: bool
    shown: str


@dataclass(frozen=True)
class TableRow:
    """One model. section: see `entries.SECTIONS`. source: its report.json, or the published table."""

    label: str
    section: str
    role: Role
    source: str
    method: Mapping[str, Any]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Comparison:
    """The table as data; `formats` renders it. split: None for published figures whose split is not known.

    published: the heading of the rows of a paper. notes: what has to be known to read the table, one line each.
    """

    benchmark: str
    split: str | None
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...]
    published: str | None = None

    @property
    def title(self) -> str:
        """Benchmark and split."""
        return f"{self.benchmark}, {self.split}" if self.split else self.benchmark

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form: each row's metrics by name, a ratio as number with whether the ideal is reached."""
        rows = [
            {
                "model": row.label,
                "section": row.section,
                "role": row.role,
                "source": row.source,
                "method": dict(row.method) or None,
                "metrics": {
                    column.name: _cell_dict(cell) for column, cell in zip(self.columns, row.cells, strict=True)
                },
            }
            for row in self.rows
        ]
        columns = [asdict(column) for column in self.columns]
        return {
            "benchmark": self.benchmark, "split": self.split, "columns": columns, "rows": rows,
            "notes": list(self.notes),
        }  # fmt: skip


def _cell_dict(cell: Cell) -> dict[str, Any]:
    ratio = cell.ratio
    return {
        "value": cell.value,
        "stderr": cell.stderr,
        "n": cell.n,
        "ratio": ratio.value if ratio else None,
        "reaches_ideal": ratio.reached if ratio else None,
        "best": cell.best,
    }


def compare(
    paths: str | Path | Iterable[str | Path] = (),
    published: str | None = None,
    metrics: Sequence[str] | None = None,
) -> Comparison:
    """Put reports side by side, as in the MSA paper.

    paths: folders of runs and evaluations, and report.json files, each also as LABEL=PATH; see `read_entries`.
    published: name of a table of the paper, whose figures follow in rows of their own, with the ratios that it prints,
    or else by the same rule beside its own ideal. metrics: the columns, by name; None for those of the paper. Columns
    without any value are left out, and the notes say why. Reports on other rows of the same data, as of runs with and
    without a choice, are computed anew, from their records, on the rows that all of them were scored on.

    Raises UsageError for what is missing or unknown, FormatError for broken reports, MismatchError for reports that
    cannot stand side by side, each with all faults.
    """
    table = load_published(published) if published else None
    entries, notes = read_entries(paths)
    if not entries and not table:
        raise UsageError("nothing to compare: give folders of runs or evaluations, reports, or a published table")
    check_agreement(entries, table)
    if not same_rows(entries):
        entries = with_reports(entries, on_common_rows([Path(entry.source) for entry in entries]))
    own = sorted(set_apart(merge_references(entries)), key=_place)
    printed = _published_entries(table) if table else []
    asked = _choose_columns([*own, *printed], metrics)
    columns = [column for column in asked if _has_values(column, [*own, *printed])]
    if not columns:
        raise UsageError(f"no report has a value of {', '.join(column.name for column in asked) or 'any metric'}")
    return Comparison(
        (own or printed)[0].report.benchmark,
        own[0].report.split if own else table.split if table else None,
        tuple(columns),
        (*_rows(own, columns), *_rows(printed, columns)),
        (*caveats(own, printed, [(column.name, column in columns) for column in asked], table), *notes),
        f"published: {table.model}" if table else None,
    )


def _place(entry: Entry) -> tuple[int, bool]:
    return SECTIONS.index(entry.section), entry.role == "ideal"


def _published_entries(table: PublishedTable) -> list[Entry]:
    roles: dict[str, Role] = {"Target": "target", "Ideal": "ideal"}
    return [
        Entry(
            roles.get(label, "method"),
            "published",
            label,
            Report(table.benchmark, table.split or "", {name: figure.metric for name, figure in figures.items()}),
            table.name,
            figures=figures,
        )
        for label, figures in table.rows.items()
    ]


def _choose_columns(entries: Sequence[Entry], names: Sequence[str] | None) -> list[Column]:
    """The columns asked for, or those of the benchmark that some report has. Raises UsageError for unknown names."""
    found = {name: metric.higher_is_better for entry in entries for name, metric in entry.report.metrics.items()}
    if names is not None:
        unknown = [f"'{name}'{nearest(name, found)}" for name in names if name not in found]
        if unknown:
            raise UsageError(f"no report has the metric {', '.join(unknown)}; choose from {', '.join(found)}")
        chosen = list(dict.fromkeys(names))
    else:
        chosen = [name for name in _COLUMNS.get(entries[0].report.benchmark, found) if name in found]
    return [Column(name, heading(name, found[name]), found[name]) for name in chosen]


def _has_values(column: Column, entries: Sequence[Entry]) -> bool:
    return any(entry.value(column.name) is not None for entry in entries)


def _rows(entries: Sequence[Entry], columns: Sequence[Column]) -> list[TableRow]:
    """Rows of one part, whose methods and ideal are held against each other."""
    cells = zip(*(_cells(entries, column) for column in columns), strict=True)
    return [
        TableRow(entry.label, entry.section, entry.role, entry.source, entry.method, tuple(row))
        for entry, row in zip(entries, cells, strict=True)
    ]


def _cells(entries: Sequence[Entry], column: Column) -> list[Cell]:
    """One column of a part: for each entry its value, and what it is beside the others'."""
    name, direction, kind = column.name, column.higher_is_better, metric_kind(column.name)
    methods = [entry for entry in entries if entry.role == "method"]
    values = [entry.value(name) for entry in methods]
    ideal = next((entry.value(name) for entry in entries if entry.role == "ideal"), None)
    if len(methods) < 2:  # of one alone, each value would be the best, and 100 % of itself
        return [_cell(entry, name, None, False) for entry in entries]
    found = ratios(values, ideal, direction if kind.has_ratio else None)
    best = best_values(values, direction, kind.best_at_zero)
    marks = {id(entry): mark for entry, *mark in zip(methods, found, best, strict=True)}
    return [_cell(entry, name, *marks.get(id(entry), (None, False))) for entry in entries]


def _cell(entry: Entry, name: str, ratio: Ratio | None, best: bool) -> Cell:
    metric = entry.report.metrics.get(name)
    if metric is None or metric.value is None:
        return Cell(None, None, None, None, False, number(None))
    figure = entry.figures.get(name)
    if figure:
        return Cell(metric.value, None, None, figure.ratio or ratio, best, figure.printed)
    return Cell(metric.value, metric.stderr, metric.n, ratio, best, number(metric.value))
