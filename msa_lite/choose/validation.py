"""What a choice is made by: validation rows, the rule, and the ideal and the judge where the rule wants their terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.choose.evidence import Evidence, Metrics, read_pairs
from msa_lite.choose.rules import Rank, Rule
from msa_lite.choose.shares import why_broken
from msa_lite.errors import NotFiniteError
from msa_lite.evals.benchmark import Benchmark
from msa_lite.evals.evaluation import NO_JUDGE, ideal_identity, judge_records
from msa_lite.evals.judge import JudgeSettings, open_judge
from msa_lite.evals.models import Runner
from msa_lite.evals.records import read_records, run_items, write_records
from msa_lite.io.progress import silent
from msa_lite.report import Report, load_report, write_report
from msa_lite.report.metrics import HOLDOUT, MEMBERSHIP, metric_kind
from msa_lite.report.reports import REPORT_FILE

BROKEN = "broken"  # key in the settings of a report: why there are no metrics


@dataclass(frozen=True)
class Validation:
    """Validation rows, and what is made of a model's scores on them.

    ideal: the folder of the ideal's evaluation on the same rows, None without an ideal. judge: who is asked for judged
    metrics, where the rule wants them. prior: the folder of the prior's evaluation on the forget rows, None where it
    is no yardstick.
    """

    benchmark: Benchmark
    rule: Rule
    ideal: Path | None = None
    judge: JudgeSettings = NO_JUDGE
    prior: Path | None = None

    def describe(self) -> dict[str, Any]:
        """What decides the scores of a model, JSON-able; by which rule they are looked at is another matter."""
        return {
            "questions": self.benchmark.describe(),
            "sets": self._sets,
            "ideal": ideal_identity(self.ideal),
            "judge": self.judge.describe(),
        }

    def describe_rule(self) -> dict[str, Any]:
        """Return what decides the ranks of scored candidates, JSON-able."""
        prior = {"prior": ideal_identity(self.prior)} if self.prior else {}
        return {"rule": self.rule.describe(), **prior}

    @property
    def _sets(self) -> list[str]:
        """The sets that candidates are asked: all, but holdout rows of one's own only where the rule goes by them."""
        wanted = any(metric_kind(name).group in (HOLDOUT, MEMBERSHIP) for name in self.rule.needs())
        return [name for name in self.benchmark.sets if name != "holdout" or wanted]

    @property
    def ideal_metrics(self) -> Metrics | None:
        """What the ideal scores on these rows."""
        return load_report(self.ideal).values() if self.ideal else None

    def rank(self, folder: Path, reference: Path) -> Rank | str:
        """The rank of a candidate beside the target (`reference`), or the reason why it is broken.

        Both are folders with a report, and with records where the rows are to speak. Raises DataError where the target
        or the ideal lacks what candidates are held against.
        """
        report, known = load_report(folder), load_report(reference).values()
        metrics = report.values()
        reason = report.settings.get(BROKEN) or why_broken(metrics, known, self.benchmark.vital)
        if reason:
            return str(reason)
        prior = load_report(self.prior).values() if self.prior else {}
        evidence = Evidence(self.ideal_metrics, prior, read_pairs(type(self.benchmark), folder, reference, known))
        return self.rule.rank(metrics, known, evidence)

    def score_into(
        self, folder: Path, load: Callable[[], Any], about: Mapping[str, Any] | None = None, whole: bool = False
    ) -> Report:
        """The report of a model's scores in a folder, which is made unless it is there already.

        about: what model it is, for the report. whole: whether sets are asked, too, that candidates are not. Sets that
        a stop has left records of are not run again. Raises NotFiniteError for a model whose outputs are no numbers.
        """
        if (folder / REPORT_FILE).is_file():
            report = load_report(folder)
            if BROKEN in report.settings:
                raise NotFiniteError(report.settings[BROKEN])
            return report
        runner, benchmark = Runner(load()), self.benchmark
        folder.mkdir(exist_ok=True)
        records = {}
        for name in benchmark.sets if whole else self._sets:
            path = folder / f"{name}.jsonl"
            if not path.is_file():
                write_records(path, run_items(runner, benchmark, name))
            records[name] = read_records(path)
        reference = {n: read_records(self.ideal / f"{n}.jsonl") for n in benchmark.sets} if self.ideal else None
        judged = judge_records(open_judge(self.judge), benchmark, records, reference, self.judge, silent)
        for name, items in records.items():
            write_records(folder / f"{name}.jsonl", items)
        settings = benchmark.describe() | dict(about or {}) | judged
        report = Report(benchmark.name, benchmark.split, benchmark.metrics(records, reference), settings)
        write_report(report, folder)
        return report

    def write_broken(self, folder: Path, reason: str) -> None:
        """Put down that a model cannot be scored, and why, so that nobody tries again."""
        folder.mkdir(exist_ok=True)
        write_report(Report(self.benchmark.name, self.benchmark.split, {}, {BROKEN: reason}), folder)
