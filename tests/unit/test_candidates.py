"""Candidates scored into a folder: none twice, none lost, and what a kill leaves is taken up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.choose.choice import TARGET, Candidates, ScoredFolder, Values, choose, help_choose
from msa_lite.choose.rules import LeastExtraction
from msa_lite.choose.search import StrengthSearch
from msa_lite.choose.validation import Validation
from msa_lite.data import Prompter, Template
from msa_lite.errors import NotFiniteError
from msa_lite.evals.benchmarks.qa import QA
from msa_lite.report import Metric, Report, load_report, write_report
from msa_lite.report.run.choice import candidate_name
from tests.support.models import tiny_tokenizer
from tests.support.records import write_shares

POINTS: list[Values] = [{"alpha": alpha, "beta": beta} for alpha in (0.5, 1.0, 2.0) for beta in (0.0, 1.0)]
NAMES = [TARGET, *map(candidate_name, POINTS)]


@dataclass(frozen=True)
class Counted(Validation):
    """Validation rows on which a "model" is what it scores; what was scored is kept."""

    scored: list[str] = field(default_factory=list)

    def score_into(self, folder: Path, load: Any, about: Any = None, **_: Any) -> Report:
        self.scored.append(folder.name)
        forget: float = load()
        if forget != forget:
            raise NotFiniteError("no numbers")
        names = ("rouge_l_f", "accuracy_f", "extraction_strength")
        report = Report("qa", "validation", {name: Metric(forget, 4, None, False) for name in names})
        folder.mkdir(parents=True, exist_ok=True)
        write_shares(folder, forget, unseen=0.4)
        write_report(report, folder)
        return report

    @property
    def names(self) -> list[str]:
        """What was scored, sorted."""
        return sorted(self.scored)


def strength(values: Values | None) -> float:
    """What is left at a point: less at a larger alpha."""
    return 1.0 / (1.0 + float(values["alpha"])) if values else 1.0


@pytest.fixture
def validation() -> Counted:
    return Counted(
        QA.over("validation", {}, Prompter.build(tiny_tokenizer(), "plain", Template())), LeastExtraction(0.95)
    )


@pytest.fixture
def work(validation: Counted, tmp_path: Path) -> ScoredFolder:
    (tmp_path / "sweep.partial").mkdir()
    return ScoredFolder(tmp_path / "sweep.partial", Candidates(POINTS, strength, "of nothing"), validation)


def todo(points: list[Values] = POINTS) -> Mapping[str, Values | None]:
    return {TARGET: None} | {candidate_name(values): values for values in points}


def test_what_has_a_report_is_not_scored_and_what_a_kill_left_half_done_is(
    work: ScoredFolder, validation: Counted
) -> None:
    work.score(todo(POINTS[:2]))
    for name in (NAMES[3], NAMES[4]):  # killed with some records, and before any
        (work.folder / name).mkdir()
    (work.folder / NAMES[3] / "forget.jsonl").write_text('{"index": 0}\n')
    assert work.missing(NAMES) == NAMES[3:]
    before = {path: path.stat().st_mtime_ns for path in work.folder.rglob("report.json")}
    told: list[int] = []
    work.score(todo(), after=lambda: told.append(len(work.missing(NAMES))))
    assert validation.names == sorted(NAMES)
    assert told == [3, 2, 1, 0]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_reports_that_are_known_are_copied_whole(work: ScoredFolder, validation: Counted, tmp_path: Path) -> None:
    known = tmp_path / "known"
    validation.score_into(known, lambda: 0.25)
    (known / "manifest.json").write_text("{}")
    of_another = work.folder / f"{NAMES[1]}.tmp"  # of a kill amid the copy
    of_another.mkdir()
    (work.folder / NAMES[1]).mkdir()  # of a kill amid the scores
    given = replace(work, candidates=replace(work.candidates, known={NAMES[1]: known}))
    given.take_known(NAMES)
    assert load_report(work.folder / NAMES[1]).metrics["rouge_l_f"].value == 0.25
    assert not (work.folder / NAMES[1] / "manifest.json").exists()
    assert not of_another.exists()
    assert NAMES[1] not in given.missing(NAMES)
    given.keep(NAMES)
    assert [path.name for path in work.folder.iterdir()] == [NAMES[1]]


@pytest.mark.parametrize("search", [None, StrengthSearch(betas=(0.0, 0.5))], ids=["list", "search"])
def test_the_processes_of_a_launch_share_the_points_and_the_choice_is_that_of_one(
    validation: Counted, tmp_path: Path, search: StrengthSearch | None
) -> None:
    candidates = Candidates(POINTS, strength, "of nothing", search=search)
    alone = choose(candidates, validation, tmp_path / "alone", "choosing")
    scored = validation.names
    validation.scored.clear()
    shares: list[int] = []

    @contextmanager
    def helped(points: Sequence[Values]) -> Iterator[int]:
        for rank in (1, 2):
            help_choose(candidates, validation, tmp_path / "sweep", points[rank::3])
        shares.append(len(validation.scored))
        yield 3

    together = choose(replace(candidates, helped=helped), validation, tmp_path / "sweep", "choosing")
    assert together == alone
    assert validation.names == scored  # none twice
    assert shares[0] > 1
    left = {path.relative_to(tmp_path / "sweep") for path in (tmp_path / "sweep").rglob("*")}
    assert left == {path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*")}
