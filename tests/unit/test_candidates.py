"""Candidates scored by several who meet in a folder: none twice, none lost, and what a kill leaves is taken up."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from msa_lite.choose.candidates import TARGET, WORK, Candidates, SharedWork, Values
from msa_lite.choose.choice import choose, help_choose
from msa_lite.choose.rules import LeastExtraction
from msa_lite.choose.search import StrengthSearch
from msa_lite.choose.validation import BROKEN, Validation
from msa_lite.data import Prompter, Template
from msa_lite.errors import NotFiniteError, StageError
from msa_lite.evals.benchmarks.qa import Qa
from msa_lite.report import Metric, Report, load_report, write_report
from msa_lite.report.choice import candidate_name
from tests.support.models import tiny_tokenizer
from tests.support.processes import wait_until
from tests.support.records import write_shares

POINTS: list[Values] = [{"alpha": alpha, "beta": beta} for alpha in (0.5, 1.0, 2.0) for beta in (0.0, 1.0)]
NAMES = [TARGET, *map(candidate_name, POINTS)]


@dataclass(frozen=True)
class Counted(Validation):
    """Validation rows on which a "model" is what it scores; who scored which is kept."""

    meet: int = 0  # who begins a point waits until so many have begun one
    scored: list[tuple[str, str]] = field(default_factory=list)

    def score_into(self, folder: Path, load: Any, about: Any = None, **_: Any) -> Report:
        self.scored.append((folder.name, threading.current_thread().name))
        if folder.name != TARGET:  # before which the one that chooses begins no point
            wait_until(lambda: len({who for _, who in self.scored}) >= self.meet)
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
        return sorted(name for name, _ in self.scored)


def strength(values: Values | None) -> float:
    """What is left at a point: less at a larger alpha."""
    return 1.0 / (1.0 + float(values["alpha"])) if values else 1.0


@pytest.fixture
def validation() -> Counted:
    return Counted(Qa("validation", {}, Prompter.build(tiny_tokenizer(), "plain", Template())), LeastExtraction(0.95))


@pytest.fixture
def work(validation: Counted, tmp_path: Path) -> SharedWork:
    (tmp_path / "sweep.partial").mkdir()
    return SharedWork(tmp_path / "sweep.partial", Candidates(POINTS, strength, "of nothing"), validation)


def todo(points: list[Values] = POINTS) -> Mapping[str, Values | None]:
    return {TARGET: None} | {candidate_name(values): values for values in points}


def test_what_has_a_report_is_not_scored_and_what_a_kill_left_half_done_is(
    work: SharedWork, validation: Counted
) -> None:
    work.open(POINTS)
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


def test_what_somebody_else_has_claimed_is_left_to_them(work: SharedWork, validation: Counted) -> None:
    work.open(POINTS)
    with FileLock(work.folder / ".locks" / NAMES[2]):
        work.score(todo())
        assert work.missing(NAMES) == [NAMES[2]]
    work.score(todo())  # the lock is gone with its holder, whether it ended or was killed
    assert validation.names == sorted(NAMES)


def test_a_broken_candidate_is_put_down_once_and_a_broken_target_is_an_error(
    work: SharedWork, validation: Counted, tmp_path: Path
) -> None:
    work.open(POINTS)
    nan = replace(work, candidates=replace(work.candidates, load=lambda values: float("nan") if values else 1.0))
    nan.score(todo())
    assert load_report(work.folder / NAMES[1]).settings == {BROKEN: "no numbers"}
    nan.score(todo())
    assert validation.names == sorted(NAMES)
    (tmp_path / "other").mkdir()
    other = replace(
        nan, folder=tmp_path / "other", candidates=replace(nan.candidates, load=lambda values: float("nan"))
    )
    other.open(POINTS)
    with pytest.raises(NotFiniteError, match="no numbers"):
        other.score(todo())
    assert other.missing(NAMES) == NAMES


def test_work_is_known_by_all_that_decides_it(work: SharedWork) -> None:
    changes: list[dict[str, Any]] = [{"values": POINTS[1:]}, {"made_of": "other vectors"}]
    keys = {replace(work, candidates=replace(work.candidates, **change)).key for change in changes}
    keys.add(replace(work, validation=replace(work.validation, rule=LeastExtraction(0.5))).key)
    assert len(keys | {work.key}) == 4
    same = Candidates([dict(values) for values in POINTS], lambda values: None, "of nothing")
    assert replace(work, candidates=same).key == work.key


def test_the_rows_are_hashed_once_however_often_somebody_looks(
    work: SharedWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed, own = [], Validation.describe

    def describe(self: Validation) -> dict[str, Any]:
        hashed.append(self)
        return own(self)

    monkeypatch.setattr(Validation, "describe", describe)
    work.open(POINTS)
    assert [work.todo() for _ in range(3)] == [todo()] * 3
    assert len(hashed) == 1


def test_who_comes_late_scores_nothing_and_leaves_nothing_in_the_way(
    work: SharedWork, validation: Counted, tmp_path: Path
) -> None:
    work.open(POINTS)
    work.score(todo(POINTS[:1]))
    (work.folder / WORK).unlink()
    shutil.rmtree(work.folder / ".locks")
    for folder in (work.folder, tmp_path / "sweep"):  # closed, and then renamed
        left = sorted(folder.parent.rglob("*"))
        work.score(todo())
        assert sorted(folder.parent.rglob("*")) == left
        if folder == work.folder:
            folder.rename(tmp_path / "sweep")
    assert validation.names == sorted([TARGET, NAMES[1]])


def test_reports_that_are_known_are_copied_whole(work: SharedWork, validation: Counted, tmp_path: Path) -> None:
    known = tmp_path / "known"
    validation.score_into(known, lambda: 0.25)
    (known / "manifest.json").write_text("{}")
    of_another = work.folder / f"{NAMES[1]}.tmp"  # of a kill amid the copy
    of_another.mkdir()
    (work.folder / NAMES[1]).mkdir()  # of a kill amid the scores
    given = replace(work, candidates=replace(work.candidates, known={NAMES[1]: known}))
    given.open(POINTS)
    assert load_report(work.folder / NAMES[1]).metrics["rouge_l_f"].value == 0.25
    assert not (work.folder / NAMES[1] / "manifest.json").exists()
    assert not of_another.exists()
    assert NAMES[1] not in given.missing(NAMES)
    given.close(NAMES)
    assert [path.name for path in work.folder.iterdir()] == [NAMES[1]]


def choosing(validation: Counted, out: Path, **changes: Any) -> threading.Thread:
    """Another "process" that helps with the choice, at work."""
    candidates = Candidates(POINTS, strength, "of nothing", **changes)
    arguments = (lambda: (candidates, validation), out)
    thread = threading.Thread(target=help_choose, args=arguments, name="helper", daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("search", [None, StrengthSearch(betas=(0.0, 0.5))], ids=["list", "search"])
def test_one_chooses_and_others_help_until_all_is_scored(
    validation: Counted, tmp_path: Path, search: StrengthSearch | None
) -> None:
    candidates = Candidates(POINTS, strength, "of nothing", search=search)
    alone = choose(candidates, validation, tmp_path / "alone", "choosing")
    scored, validation = validation.names, replace(validation, meet=2, scored=[])
    (tmp_path / "sweep.partial").mkdir()  # where the first one opens its work
    helpers = [choosing(validation, tmp_path / "sweep", search=search) for _ in range(2)]
    together = choose(candidates, validation, tmp_path / "sweep", "choosing")
    for helper in helpers:
        helper.join(timeout=600)
        assert not helper.is_alive()
    assert together == alone
    assert validation.names == scored  # none twice
    assert len({who for _, who in validation.scored}) == 2  # the helpers share a name
    left = {path.relative_to(tmp_path / "sweep") for path in (tmp_path / "sweep").rglob("*")}
    assert left == {path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*")}
    assert not (tmp_path / "sweep.partial").exists()


def test_who_comes_when_the_choice_is_made_has_nothing_to_do(validation: Counted, tmp_path: Path) -> None:
    choose(Candidates(POINTS, strength, "of nothing"), validation, tmp_path / "sweep", "choosing")
    scored = len(validation.scored)
    helper = choosing(validation, tmp_path / "sweep")
    helper.join(timeout=600)
    assert not helper.is_alive()
    assert len(validation.scored) == scored
    assert not (tmp_path / "sweep.partial").exists()


def test_who_computes_other_inputs_warns_once_and_waits(
    work: SharedWork,
    validation: Counted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("msa_lite.choose.choice._PATIENCE", 0.3)

    def stop(values: Values | None) -> float:
        raise StageError("stopped")

    others = replace(work.candidates, made_of="other vectors", load=stop)
    with pytest.raises(StageError, match="stopped"):
        choose(others, validation, tmp_path / "sweep", "choosing")
    validation.scored.clear()
    helper = choosing(validation, tmp_path / "sweep")
    wait_until(lambda: bool(caplog.records))
    time.sleep(1.0)  # the helper looks a few times more
    assert helper.is_alive()
    fault = "computes other inputs than the process that chooses. Are package versions, and files at these paths"
    assert [fault in record.message for record in caplog.records] == [True]
    assert validation.scored == []
    choose(work.candidates, validation, tmp_path / "sweep", "choosing")
    helper.join(timeout=600)
    assert not helper.is_alive()


def test_an_error_ends_the_choice_and_scores_stay(work: SharedWork, validation: Counted, tmp_path: Path) -> None:
    def load(values: Values | None) -> float:
        if values == POINTS[2]:
            raise StageError("the disk has gone")
        return strength(values)

    with pytest.raises(StageError, match="the disk has gone"):
        choose(replace(work.candidates, load=load), validation, tmp_path / "sweep", "choosing")
    assert not (tmp_path / "sweep").exists()
    choose(work.candidates, validation, tmp_path / "sweep", "choosing")
    assert validation.names == sorted([*NAMES, candidate_name(POINTS[2])])  # it alone was begun twice
