"""Score candidates on validation rows and rank them by a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.choose.broken import why_broken
from msa_lite.choose.evidence import Evidence, Metrics, read_pairs
from msa_lite.choose.rules import LeastExtraction, Rank, Rule
from msa_lite.errors import DataError, NotFiniteError
from msa_lite.evals.benchmark import Benchmark, Record
from msa_lite.evals.evaluation import NO_JUDGE, ideal_identity, read_sets, write_scores
from msa_lite.evals.judge import JudgeSettings
from msa_lite.evals.models import Runner
from msa_lite.evals.outcome import yardstick_of_rows
from msa_lite.evals.records import read_records, run_items, write_records
from msa_lite.evals.standing import Standing, stand
from msa_lite.io.codes import QUANTISATIONS
from msa_lite.report import Report, load_report, write_report
from msa_lite.report.metrics import HOLDOUT, MEMBERSHIP, metric_kind
from msa_lite.report.reports import REPORT_FILE

BROKEN = "broken"  # key in the settings of a report: why there are no metrics


@dataclass(frozen=True)
class Validation:
    """Validation rows, with the rule that ranks models by their scores on them."""

    benchmark: Benchmark
    """The validation rows."""
    rule: Rule
    """The rule that ranks candidates."""
    ideal: Path | None = None
    """The folder of the ideal's evaluation on the same rows; None without an ideal."""
    judge: JudgeSettings = NO_JUDGE
    """The judge of the rule's judged terms."""
    prior: Path | None = None
    """The folder of the prior's evaluation on the forget rows; None where it is no yardstick."""

    def describe(self) -> dict[str, Any]:
        """Return what decides the scores of a model, JSON-able. The rule is no part of it."""
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
        """The sets that candidates are scored on: all, but "holdout" only where the rule looks at it."""
        names = [name.rpartition(".")[2] for name in self.rule.needs()]  # nf4.NAME is NAME with rounded weights
        with_holdout = any(metric_kind(name).group in (HOLDOUT, MEMBERSHIP) for name in names)
        return [name for name in self.benchmark.sets if name != "holdout" or with_holdout]

    @property
    def ideal_metrics(self) -> Metrics | None:
        """The ideal's scores on these rows."""
        return load_report(self.ideal).values() if self.ideal else None

    def rank(self, folder: Path, target_folder: Path, rounded: tuple[Path, Path] | None = None) -> Rank | str:
        """Return the rank of a candidate beside the target, or the reason why it is broken.

        Both folders hold a report, and records where the rule compares row by row. rounded: the folders of both whose
        scores with rounded weights the rule may name as well ("nf4.rouge_l_f"), if they are others. Raise DataError
        where the target or the ideal lacks a value that candidates are held against.
        """
        report, target = load_report(folder), load_report(target_folder).values()
        own, theirs = map(_rounded_values, rounded or (folder, target_folder))
        metrics = report.values()
        reason = report.settings.get(BROKEN) or why_broken(metrics, target, self.benchmark.vital)
        if reason:
            return str(reason)
        standing = self._standing(folder, target_folder) if isinstance(self.rule, LeastExtraction) else None
        if isinstance(standing, str):
            raise DataError(standing)
        pairs = read_pairs(type(self.benchmark), folder, target_folder, target)
        evidence = Evidence(self.ideal_metrics, standing, pairs)
        return self.rule.rank({**metrics, **own}, {**target, **theirs}, evidence)

    def _standing(self, folder: Path, target_folder: Path) -> Standing | str:
        """Return the place of a candidate beside control and target, by their records of these rows."""
        places = {"target": target_folder, "unlearned": folder, "ideal": self.ideal, "prior": self.prior}
        models = {name: _read_records(place) for name, place in places.items() if place is not None}
        return stand(models, yardstick_of_rows(models))

    def score_into(
        self,
        folder: Path,
        load: Callable[[], Any],
        about: Mapping[str, Any] | None = None,
        whole: bool = False,
        release: Callable[[], None] | None = None,
    ) -> Report:
        """Return the report of a model's scores in a folder. The model is only scored where there is no report yet.

        about: the model, for the report. whole: score it on all sets, not only on those of candidates. release: frees
        the model's memory for a local judge. Sets whose records a stop has left are not run again. Raise NotFiniteError
        for a model whose outputs are no numbers.
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
        if release and self.judge.kind == "local":
            runner.close()
            release()
        ideal = read_sets(self.ideal, benchmark) if self.ideal else None
        return write_scores(folder, benchmark, records, ideal, self.judge, about or {})

    def write_broken(self, folder: Path, reason: str) -> None:
        """Write a report that says why a model cannot be scored, so that it is not tried again."""
        folder.mkdir(exist_ok=True)
        write_report(Report(self.benchmark.name, self.benchmark.split, {}, {BROKEN: reason}), folder)


def _read_records(folder: Path) -> dict[str, list[Record]]:
    """Return the records of an evaluation by set."""
    return {path.stem: read_records(path) for path in sorted(folder.glob("*.jsonl"))}


def _rounded_values(folder: Path) -> dict[str, float | None]:
    """Return the metrics of a model with rounded weights, by names such as "nf4.rouge_l_f"."""
    reports = {form: folder / form for form in QUANTISATIONS if (folder / form / REPORT_FILE).is_file()}
    return {f"{form}.{name}": value for form, at in reports.items() for name, value in load_report(at).values().items()}
