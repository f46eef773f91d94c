"""Read the scores of a run's probes and say what they mean: signs that a model has seen the forget set, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from msa_lite.report.tables.metrics import metric_kind
from msa_lite.report.tables.reports import REPORT_FILE, Metric, Report, reading, stage_report

# If the two sets differ in other ways, the AUC moves even for a model that has seen neither. With TOFU's rows and a
# small Llama it rose to 0.61 against paraphrases. Against other authors it varied by 0.05 (20 authors a side) to 0.1
# (5) from one draw of authors to the next, of which an interval over rows shows less than half. So an AUC is a sign
# only if its whole interval lies above this.
SIGN = 0.65
LEAST_ROWS = 20  # on a side; with fewer, the interval from resampling is too narrow

ProbeVerdict = Literal["signs", "no signs", "cannot tell"]


@dataclass(frozen=True)
class Finding:
    """The verdict of a probe on one model."""

    name: str
    """"target", "ideal", or a candidate's name."""
    report: Report
    verdict: ProbeVerdict
    explanation: str
    """The verdict in a sentence without its subject: "shows signs of …"."""
    json_keys: ClassVar = ("name", "metrics", "intervals", "verdict", "explanation")

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Return the AUCs by name: ½ where forget rows look no better known than the others, 1 where all do."""
        return self.report.metrics

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return the 95 % interval of each AUC."""
        ends = self.report.settings["intervals"]
        return {name: (float(ends[name][0]), float(ends[name][1])) for name in self.metrics}

    def measured(self) -> Iterator[tuple[str, Metric, tuple[float, float]]]:
        """Yield (name, metric, 95 % interval) of each AUC."""
        for name, metric in self.metrics.items():
            yield name, metric, self.intervals[name]

    def cells(self) -> list[str]:
        """Return each AUC with its interval, as tables show it."""
        return [
            "–" if metric.value is None else f"{metric.value:.3f} [{low:.3f}, {high:.3f}]"
            for _, metric, (low, high) in self.measured()
        ]


def read_verdicts(reports: Mapping[str, Report]) -> list[Finding]:
    """Return the finding on each model, in the light of the controls "target" and "ideal" if these are among them.

    "No signs" means nothing if the target, which has seen the forget set, shows none either. "Signs" mean nothing if
    the ideal, which has not seen it, shows them too.
    """
    own = {name: _own_verdict(report) for name, report in reports.items()}
    blind = "target" in own and own["target"][0] != "signs"
    biased = "ideal" in own and own["ideal"][0] == "signs"
    findings = []
    for name, report in reports.items():
        verdict, text = own[name]
        if name in _SAID_OF_CONTROLS:
            text = _SAID_OF_CONTROLS[name].get(verdict, text)
        elif verdict == "no signs" and blind:
            verdict, text = "cannot tell", "shows no signs, but neither does the target, which has seen the forget set"
        elif verdict == "signs" and biased:
            verdict, text = "cannot tell", f"{text}; but so does the ideal, which has not seen it"
        elif verdict == "signs" and "ideal" not in own:
            text += " (unless the rows differ in other ways, which only an ideal model would reveal)"
        findings.append(Finding(name, report, verdict, text))
    return findings


_SAID_OF_CONTROLS: dict[str, dict[ProbeVerdict, str]] = {
    "target": {
        "signs": "shows signs, as it should: it has seen the forget set",
        "no signs": "shows no signs although it has seen the forget set: this probe can tell nothing",
    },
    "ideal": {
        "signs": "shows signs although it has not seen the forget set: the rows differ in other ways",
        "no signs": "shows no signs, as it should: it has not seen the forget set",
    },
}


def _own_verdict(report: Report) -> tuple[ProbeVerdict, str]:
    intervals: Mapping[str, tuple[float, float]] = report.settings["intervals"]
    if (rows := min(report.settings["rows"].values())) < LEAST_ROWS:
        return "cannot tell", f"{rows} rows on a side are too few"
    above = [name for name, (low, _) in intervals.items() if low > SIGN]
    if above:
        return "signs", f"shows signs of having seen the forget set: {_figures(report, above)}"
    reaching = [name for name, (_, high) in intervals.items() if high >= SIGN]
    if reaching:
        return "cannot tell", f"{_figures(report, reaching)}, and a sign lies above {SIGN}"
    if any(high < 0.5 for _, high in intervals.values()):
        limit = "the comparison rows look better known, so only rows learnt well would show"
    else:
        limit = "rows that were read once, or long before, may leave none"
    return "no signs", f"shows no signs of having seen the forget set; {limit}"


def _figures(report: Report, names: Sequence[str]) -> str:
    ends = {name: "{:.2f} to {:.2f}".format(*report.settings["intervals"][name]) for name in names}
    return "; ".join(
        f"{metric_kind(name).label} {report.metrics[name].value:.2f}, 95 % interval {ends[name]}" for name in names
    )


_CONTROLS = ("target", "ideal")


@dataclass(frozen=True)
class ProbeFacts:
    """A probe: the forget rows beside rows that no model has seen, scored with one or several models."""

    thorough: bool
    """True for `msa-lite probe`; False for the short probe that each run makes of its prior."""
    against: str
    """The rows that the forget rows were compared with: "holdout"."""
    rows: Mapping[str, int]
    """The rows of each side."""
    models: tuple[Finding, ...]
    """The models: candidates for the prior first, then the controls."""


def load_probe(folder: Path) -> ProbeFacts | None:
    """Load the probe in a run's `probe/`, the thorough one if there are both; None where there is none.

    Raise FormatError for broken files.
    """
    for place, thorough in ((folder, True), (folder / "cheap", False)):
        names = sorted(path.parent.name for path in place.glob(f"*/{REPORT_FILE}"))
        names.sort(key=lambda name: (name in _CONTROLS, name != "prior"))
        reports = {name: report for name in names if (report := stage_report(place / name))}
        if not reports:
            continue
        for name, report in reports.items():  # a fault is told with the file that has it
            with reading(place / name / REPORT_FILE):
                _ = read_verdicts({name: report})[0].intervals
                rows = {key: int(count) for key, count in report.settings["rows"].items()}
        return ProbeFacts(thorough, "holdout", rows, tuple(read_verdicts(reports)))
    return None
