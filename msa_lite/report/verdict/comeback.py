"""Tell whether rows of earlier requests stay forgotten in the model of a later one.

A row *comes back* if the new model recites it, the model of the row's own request did not, and neither does a control
that was asked the same row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from msa_lite.benchmarks import EARLIER_COLUMNS
from msa_lite.report.tables.reports import Metric, stage_report
from msa_lite.report.verdict.figures import Forgotten

EARLIER_SET = "earlier"
"""The set of rows of earlier requests, and the folder of its scores in `evaluation`."""
_MODELS = {"target": "target", "unlearned": "this model", "ideal": "ideal", "holdout": "target on unseen rows"}
_MODELS["prior"] = "prior"


@dataclass(frozen=True)
class EarlierFacts:
    """The rows of earlier requests, asked again."""

    requests: int
    """The earlier requests."""
    total: int
    """The rows that they removed, as far as that is known."""
    scored: Forgotten | None
    """The measurements of those that were asked again; None where none could be."""
    back: Mapping[str, int] = field(default_factory=dict)
    """The rows that come back, by the folder of the run that removed them; without those of which none does."""
    unscored: Mapping[str, str] = field(default_factory=dict)
    """The reason why rows of a request could not be asked, by the folder of its run."""

    @property
    def came_back(self) -> int:
        """Return the number of rows that come back."""
        return sum(self.back.values())

    @property
    def headline(self) -> str:
        """Return the counts in a sentence or two."""
        scored = self.scored
        if scored is None:
            return f"None of the rows of {_requests(self.requests)} could be scored again."
        sample = f", a sample of {self.total}," if scored.rows < self.total else ""
        of = {"holdout": f" of {scored.control_rows}"}
        others = {name: count for name, count in scored.recited.items() if name != "unlearned"}
        counts = [f"{_MODELS[name]}: {count}{of.get(name, '')}" for name, count in others.items()]
        text = f"Of {_rows(scored.rows)} of {_requests(self.requests)}{sample} it recites {scored.recited['unlearned']}"
        return f"{text} ({', '.join(counts)})."

    @property
    def reason(self) -> str | None:
        """Return what comes back, without folders, which a record must not name; None where nothing does."""
        if not self.back or self.scored is None:
            return None
        does = "row of earlier requests comes" if self.came_back == 1 else "rows of earlier requests come"
        them = "it" if self.came_back == 1 else "them"
        return (
            f"{self.came_back} of {self.scored.rows} {does} back: the model of the request had forgotten "
            f"{them}, and this one recites {them}"
        )

    @property
    def warning(self) -> str | None:
        """Return what comes back, with the runs of these requests; None where nothing does."""
        places = ", ".join(f"{run}: {count}" for run, count in self.back.items())
        return self.reason and f"{self.reason} ({places})"

    @property
    def notes(self) -> list[str]:
        """Return a line for each request whose rows could not all be asked."""
        return [f"{run}: rows not scored again: {reason}" for run, reason in self.unscored.items()]

    def renamed(self, names: Mapping[str, str]) -> EarlierFacts:
        """Return the same with other names for the folders of runs, where there are some."""
        back = {names.get(run, run): count for run, count in self.back.items()}
        unscored = {names.get(run, run): reason for run, reason in self.unscored.items()}
        return replace(self, back=back, unscored=unscored)


def _requests(count: int) -> str:
    return "an earlier request" if count == 1 else f"{count} earlier requests"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def earlier_metrics(evaluation: Path, model: str, scored: object) -> dict[str, Metric]:
    """Return the metrics of a run's model on rows of earlier requests, as columns of a table.

    evaluation: the run's folder of evaluations. scored: the model by its evaluation; none of another one are returned.
    """
    report = stage_report(evaluation / EARLIER_SET / model)
    if report is None or report.settings.get("model") != scored:
        return {}
    columns = next((names for names in EARLIER_COLUMNS if report.metrics.keys() >= {*names}), ())
    return {name: report.metrics[name] for name in columns}
