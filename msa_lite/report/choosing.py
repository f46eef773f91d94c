"""Read the choice of a run, of α and β or of a baseline's epoch, from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError
from msa_lite.io.files.reading import read_object, read_text
from msa_lite.report.reports import REPORT_FILE, Metric, is_finite_number, reading, stage_report
from msa_lite.report.update import form_label

CHOICE_FILE = "choice.json"
CHOICE_TABLE = "table.md"
SYMBOLS = {"alpha": "α", "beta": "β"}
_EXTRACTION, _MAXIMISE, _MINIMISE = "extraction", "maximise ", "minimise "
_NO_VALUES = ("score", "met", "note")


def candidate_name(values: Mapping[str, float | int | str]) -> str:
    """Return the name of a candidate's folder: `alpha-0.5_beta-1`; no two candidates share one."""
    return "_".join(f"{key}-{v if isinstance(v, str) else format(v, '.12g')}" for key, v in values.items())


def value_text(value: object) -> str:
    """Return one of a candidate's values as tables and pictures show it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_symbols(values: Mapping[str, object]) -> str:
    """Return a candidate's values in words: "α = 1, β = 0.5"."""
    return ", ".join(f"{SYMBOLS.get(key, key)} = {value_text(value)}" for key, value in values.items())


@dataclass(frozen=True)
class ScoredPoint:
    """One candidate of a choice."""

    values: Mapping[str, float | int | str]
    """The values that tell it from the others: {"alpha": 0.5, "beta": 1.0}, {"epoch": 3}."""
    metrics: Mapping[str, Metric]
    """Its metrics on the validation rows; empty where it is broken."""
    score: float | None
    """The number that the rule ranks by; higher is better. None for a broken candidate."""
    met: bool
    """True if it meets the rule's conditions."""
    note: str | None
    """The reason why it is broken, or the condition that it misses."""
    chosen: bool
    """True for the one that was taken."""


@dataclass(frozen=True)
class Choosing:
    """A finished choice: all candidates, the rule, and the reasons for doubt."""

    rule: str
    """The rule's name: "extraction", "tofu", "minimise rouge_l_f"."""
    part: str
    """The rows that all candidates were scored on: "validation"."""
    chosen: Mapping[str, float | int | str]
    """The values of the one that was taken."""
    points: tuple[ScoredPoint, ...]
    """All candidates in the order in which they were tried."""
    target: Mapping[str, Metric]
    """The target's metrics on the same rows."""
    ideal: Mapping[str, Metric] | None
    """The ideal's, where there is one."""
    doubts: tuple[str, ...]
    """Reasons to doubt the choice."""
    table: str
    """All candidates as a Markdown table; empty where the folder lacks it."""
    under: tuple[str, ...] = ()
    """The names of the forms of quantisation that all were scored in as well; the worst score counts."""

    @property
    def heading(self) -> str:
        """Return the name of the rule's score, with the arrow of its direction."""
        return score_heading(self.rule)

    def shown_score(self, point: ScoredPoint) -> float | None:
        """Return the score to show; None where the candidate is broken or does not meet the conditions."""
        return shown_score(self.rule, point.score, point.met)

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names of the values that candidates differ in: ("alpha", "beta")."""
        return tuple(dict.fromkeys(key for point in self.points for key in point.values))


def score_heading(rule: str) -> str:
    """Return the name of a rule's score, with the arrow of its direction.

    The rule "extraction" ranks by what is kept, among the points that have forgotten. Rules that name a metric rank by
    it, or by its negative.
    """
    if rule.startswith(_MINIMISE):
        return f"{rule.removeprefix(_MINIMISE)} ↓"
    if rule.startswith(_MAXIMISE):
        return f"{rule.removeprefix(_MAXIMISE)} ↑"
    return "kept ↑" if rule == _EXTRACTION else f"score ({rule}) ↑"


def shown_score(rule: str, score: float | None, met: bool = True) -> float | None:
    """Return the number to show under `score_heading`; None where there is none."""
    if score is None or not met:
        return None
    return -score + 0.0 if rule.startswith(_MINIMISE) else score


def load_choosing(folder: Path) -> Choosing | None:
    """Load the choice in a run's `sweep/`; None where there is none. Raise FormatError for broken files."""
    path = folder / CHOICE_FILE
    if not path.is_file():
        return None
    choice = read_object(path)
    with reading(path):
        rule, lines, doubts = choice["rule"], choice["scores"], tuple(map(str, choice["doubts"]))
        chosen = {k: v for k, v in choice.items() if k not in ("score", "met", "rule", "scores", "doubts")}
        points = tuple(_point(folder, line, chosen) for line in lines)
        if not isinstance(rule, str):
            raise TypeError("rule")
    target, ideal = stage_report(folder / "target"), stage_report(folder / "ideal")
    if target is None:
        raise FormatError(f"{folder / 'target'}: the choice has no report of the target")
    table = folder / CHOICE_TABLE
    return Choosing(
        rule=rule,
        part=target.split,
        chosen=chosen,
        points=points,
        target=target.metrics,
        ideal=ideal.metrics if ideal else None,
        doubts=doubts,
        table=read_text(table) if table.is_file() else "",
        under=tuple(form_label(path.parent.name) for path in sorted((folder / "target").glob(f"*/{REPORT_FILE}"))),
    )


def _point(folder: Path, line: Mapping[str, Any], chosen: Mapping[str, Any]) -> ScoredPoint:
    values = {key: value for key, value in line.items() if key not in _NO_VALUES}
    if not all(is_finite_number(value) or isinstance(value, str) for value in values.values()):
        raise TypeError(f"values {values}")
    if line["score"] is not None and not is_finite_number(line["score"]):
        raise TypeError(f"score {line['score']}")
    name = candidate_name(values)
    report = stage_report(folder / name) if "/" not in name else None
    note = line.get("note")
    return ScoredPoint(
        values,
        report.metrics if report else {},
        line["score"],
        bool(line["met"]),
        None if note is None else str(note),
        dict(values) == dict(chosen),
    )
