"""Load the figures of the MSA paper's tables: one csv file a table below `paper/`, with the figures as printed.

Each file opens with `# key: value` lines: `source` (paper and label of the table), `benchmark`, `split` where the paper
names it, `model`, `percent` (a metric printed in percent), and `note`s on oddities.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msa_lite.comparison.ratios import Ratio
from msa_lite.errors import UsageError, nearest
from msa_lite.report.metrics import metric_kind
from msa_lite.report.reports import Metric

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
