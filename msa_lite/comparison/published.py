"""The figures of the MSA paper's tables, as printed, and its rule for ratios."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msa_lite.errors import UsageError, nearest
from msa_lite.report.tables.metrics import metric_kind
from msa_lite.report.tables.reports import Metric


@dataclass(frozen=True)
class Ratio:
    """A value's ratio to the reference of its column."""

    value: float
    """1 = as good as the reference."""
    reached: bool = False
    """True where the ideal's value is reached, which is printed +100%."""

    def __str__(self) -> str:
        return "+100%" if self.reached else f"{100 * self.value:.1f}%"


def ratios(values: Sequence[float | None], ideal: float | None, higher_is_better: bool | None) -> list[Ratio | None]:
    """Return the ratios of the methods' values of one metric to the ideal's, or to the best of them; one ratio a value.

    The rule stands in the captions of the MSA paper's tables:

    1. A value that matches or exceeds the ideal's in the metric's direction is +100% (`reached`, 1.0).
    2. Otherwise, where some method reaches the ideal, the reference is the ideal; where none does, the best method.
    3. The ratio is value / reference where higher is better, reference / value where lower is, within 0…1.

    The paper leaves some cases open. Without an ideal the reference is the best method. Missing values have no ratio
    and are no reference. A negative value or reference has no ratio, nor has a division by zero (a best method at 0
    that does not reach the ideal): the quotient would mean nothing. A metric without a direction has no ratios.
    """
    known = [value for value in values if value is not None]
    if higher_is_better is None or not known:
        return [None] * len(values)
    best = max(known) if higher_is_better else min(known)
    reference = ideal if ideal is not None and _reaches(best, ideal, higher_is_better) else best

    def ratio(value: float | None) -> Ratio | None:
        if value is None:
            return None
        if ideal is not None and _reaches(value, ideal, higher_is_better):
            return Ratio(1.0, reached=True)
        part, whole = (value, reference) if higher_is_better else (reference, value)
        return Ratio(part / whole) if part >= 0 and whole > 0 else None

    return [ratio(value) for value in values]


def _reaches(value: float, ideal: float, higher_is_better: bool) -> bool:
    return value >= ideal if higher_is_better else value <= ideal


def best_values(values: Sequence[float | None], higher_is_better: bool | None, at_zero: bool = False) -> list[bool]:
    """Mark the best values, all of those that tie. Without a direction no value is the best.

    at_zero: the value nearest to 0, from either side, is the best.
    """
    known = [value for value in values if value is not None]
    if not known or (higher_is_better is None and not at_zero):
        return [False] * len(values)
    if at_zero:
        nearest = min(map(abs, known))
        return [value is not None and abs(value) == nearest for value in values]
    best = max(known) if higher_is_better else min(known)
    return [value == best for value in values]


_FOLDER = Path(__file__).parent / "paper"
_RATIO = "_ratio"


@dataclass(frozen=True)
class Figure:
    """One figure of a table."""

    metric: Metric
    printed: str
    """The figure as the paper prints it; as a share where it prints percent."""
    ratio: Ratio | None
    """None where the paper prints none."""


@dataclass(frozen=True)
class PublishedTable:
    """A table of the paper."""

    name: str
    source: str
    benchmark: str
    split: str | None
    """None where the paper does not name it."""
    model: str
    notes: tuple[str, ...]
    """Oddities, one sentence each."""
    rows: Mapping[str, Mapping[str, Figure]]
    """Figures by method and metric."""


def published_tables() -> list[str]:
    """Return the names of the tables."""
    return sorted(path.stem for path in _FOLDER.glob("*.csv"))


def load_published(name: str) -> PublishedTable:
    """Load a table by its name. Raise UsageError for an unknown one, with the nearest name and the list."""
    names = published_tables()
    if name not in names:
        raise UsageError(f"published: no table '{name}'{nearest(name.lower(), names)}; choose from {', '.join(names)}")
    lines = (_FOLDER / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    head = [line.removeprefix("# ").partition(": ")[::2] for line in lines if line.startswith("#")]
    facts = dict(head)
    rows = {
        row["model"]: _figures(row, facts.get("percent"))
        for row in csv.DictReader(line for line in lines if not line.startswith("#"))
    }
    notes = tuple(value for key, value in head if key == "note")
    return PublishedTable(name, facts["source"], facts["benchmark"], facts.get("split"), facts["model"], notes, rows)


def _figures(row: Mapping[str, str], percent: str | None) -> dict[str, Figure]:
    return {
        name: _figure(name, text, row.get(name + _RATIO), percent == name)
        for name, text in row.items()
        if name != "model" and not name.endswith(_RATIO)
    }


def _figure(name: str, text: str, ratio: str | None, percent: bool) -> Figure:
    value = float(text)
    if percent:  # shares are in 0…1 here; the decimals stay those that are printed
        decimals = len(text.partition(".")[2]) + 2
        value = round(value / 100, decimals)
        text = f"{value:.{decimals}f}"
    reached = bool(ratio) and str(ratio).startswith("+")
    share = Ratio(round(float(ratio.rstrip("%")) / 100, 3), reached) if ratio else None
    return Figure(Metric(value, 0, None, metric_kind(name).higher_is_better), text, share)
