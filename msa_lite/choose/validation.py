"""Divide rows into a part to choose by and a part to score; score and rank candidates on the first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from msa_lite.choose.rules import LeastExtraction, Rank, Rule, why_broken
from msa_lite.data import Row, sample_rows, split_rows
from msa_lite.errors import DataError, NotFiniteError
from msa_lite.evals.benchmarks.benchmark import Benchmark
from msa_lite.evals.engine.models import Runner
from msa_lite.evals.judge.base import describe_judge
from msa_lite.evals.scores.evaluation import NO_JUDGE, ideal_identity, read_sets, write_scores
from msa_lite.evals.scores.records import read_records, records_by_set, run_items, write_records
from msa_lite.evals.verdict.outcome import Standing, stand, yardstick_of_rows
from msa_lite.report import Report, load_report, write_report
from msa_lite.report.run.choice import WHOLE
from msa_lite.report.tables.metrics import MEMBERSHIP, metric_kind
from msa_lite.report.tables.reports import REPORT_FILE
from msa_lite.settings import JudgeSettings

ENOUGH = 30  # validation rows of a set
FEWEST = 12  # rows of a set that can be halved; with fewer, a division costs more than it gives
PASSAGE = 120  # words of a passage, into which long texts are cut if there are few
MOST_PASSAGES = 120  # of a set

RowsBySet = Mapping[str, list[Row]]


@dataclass(frozen=True)
class Parts:
    """Rows by set."""

    validation: dict[str, list[Row]]
    """The rows that the choice is made on."""
    test: dict[str, list[Row]]
    """The rows of the final scores."""
    names: tuple[str, str] = ("validation", "test")
    """The names of the two parts; "all" where a part has all rows."""


def divide_rows(rows: RowsBySet, share: float | None, seed: int, limit: int | None = None) -> Parts:
    """Divide the retain set; all forget and holdout rows are in both parts.

    The vector is fitted to all forget rows, and the promise concerns exactly these, so all of them decide. share: the
    validation part of the retain set's questions (texts). None: `ENOUGH` rows, or half of a set that has no more than
    twice as many; a set of fewer than `FEWEST` is in both parts, whole. Long texts of a set that has few are first cut
    into passages, at most `limit` of them.
    """
    if share is None:
        rows = _as_passages(rows, limit or MOST_PASSAGES, seed)
    validation, test = dict(rows), dict(rows)
    count = len(_units(rows.get("retain", ())))
    if count and (share is not None or count >= FEWEST):
        part = share or min(ENOUGH, count // 2) / count
        validation["retain"], test["retain"] = split_rows(rows["retain"], part, seed)
        return Parts(validation, test)
    return Parts(validation, test, (WHOLE, WHOLE))


def _units(rows: Sequence[Row]) -> list[str]:
    """Return the units to draw from: questions, conversations or texts. Rows with the same question stay together."""
    return list(dict.fromkeys(row.thread for row in rows))


def _as_passages(rows: Mapping[str, list[Row]], most: int, seed: int) -> dict[str, list[Row]]:
    """Cut texts into passages in sets that hold few of them, so that one long text is more than one row.

    Holdout texts are cut if the forget texts are, since the two are compared. most: passages of a set; of more, a
    seeded sample is taken.
    """
    cut = {
        name: bool(part) and all(row.text for row in part) and len(_units(part)) < FEWEST for name, part in rows.items()
    }
    cut["holdout"] = cut["forget"] and all(row.text for row in rows.get("holdout", ()))
    return {name: sample_rows(_passages(part), most, seed) if cut[name] else part for name, part in rows.items()}


def _passages(rows: Sequence[Row]) -> list[Row]:
    """Return the passages of texts, of about equal length, numbered through."""
    passages = []
    for row in rows:
        words = re.findall(r"\s*\S+", row.text)
        count = max(1, round(len(words) / PASSAGE))
        ends = [round(number * len(words) / count) for number in range(count + 1)]
        passages += ["".join(words[start:end]) for start, end in pairwise(ends)]
    return [Row(number, text=text) for number, text in enumerate(passages)]


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
    unjudged: str = ""
    """Why the rule's judged terms have no values, in words; empty if they have. It decides nothing."""
    prior: Path | None = None
    """The folder of the prior's evaluation on the forget rows; None where it is no yardstick."""

    def describe(self) -> dict[str, Any]:
        """Return what decides the scores of a model, JSON-able. The rule is no part of it."""
        return {
            "questions": self.benchmark.describe(),
            "sets": self._sets,
            "ideal": ideal_identity(self.ideal),
            "judge": describe_judge(self.judge),
        }

    def describe_rule(self) -> dict[str, Any]:
        """Return what decides the ranks of scored candidates, JSON-able."""
        prior = {"prior": ideal_identity(self.prior)} if self.prior else {}
        return {"rule": self.rule.describe(), **prior}

    @property
    def _sets(self) -> list[str]:
        """The sets that candidates are scored on: all, but "holdout" only where the rule looks at it."""
        with_holdout = any(metric_kind(name).group == MEMBERSHIP for name in self.rule.needs)
        return [name for name in self.benchmark.sets if name != "holdout" or with_holdout]

    def rank(self, folder: Path, target_folder: Path) -> Rank | str:
        """Return the rank of a candidate beside the target, or the reason why it is broken.

        Both folders hold a report, and records where the rule looks at them. Raise DataError where the target or the
        control lacks a value that candidates are held against.
        """
        report, target = load_report(folder), load_report(target_folder).values()
        metrics = report.values()
        reason = report.settings.get(BROKEN) or why_broken(metrics, target, self.benchmark.vital)
        if reason:
            return str(reason)
        standing = self._standing(folder, target_folder) if isinstance(self.rule, LeastExtraction) else None
        if isinstance(standing, str):
            raise DataError(standing)
        return self.rule.rank(metrics, target, standing)

    def _standing(self, folder: Path, target_folder: Path) -> Standing | str:
        """Return the place of a candidate beside control and target, by their records of these rows."""
        places = {"target": target_folder, "unlearned": folder, "ideal": self.ideal, "prior": self.prior}
        models = {name: records_by_set(place) for name, place in places.items() if place is not None}
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
