"""The choice among candidates: which is taken, what is written, which are left out, and who scores them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.choose import choice as module
from msa_lite.choose.choice import TARGET, Candidates, ScoredFolder, Values, choose, help_choose, load_choice
from msa_lite.choose.rules import LeastExtraction, PaperScore
from msa_lite.choose.search import StrengthSearch
from msa_lite.choose.validation import BROKEN, Validation
from msa_lite.errors import DataError, MsaError, NotFiniteError, StageError, UsageError
from msa_lite.evals.benchmarks.benchmark import Item, ItemSet
from msa_lite.evals.benchmarks.qa import QA
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.finished.seal import verify_folder
from msa_lite.pipeline.run.msa import merge_arguments
from msa_lite.recipe import load_recipe
from msa_lite.report import Metric, Report, load_report, write_report
from msa_lite.report.run.choice import candidate_name
from msa_lite.settings import JudgeSettings
from tests.support.benchmark_data import make_prompter
from tests.support.records import write_shares

# Scores of (forget set, retain set) beside a target that has 1 everywhere, and 0.3 on unseen rows: epochs 2 to 4 are
# inside the control's bounds. Of the retain set, above unseen rows, epoch 2 keeps 0.67 / 0.7 = 96 %, epoch 4 29 %.
LEFT = {1: (0.8, 1.0), 2: (0.3, 0.97), 3: (0.3, 1.0), 4: (0.0, 0.5)}


def scored(folder: Path, forget: float, retain: float) -> Path:
    """The folder of a candidate with its records and report."""
    shares = {"_f": forget, "_r": retain}
    names = {"rouge_l": "rouge_l_f", "accuracy": "accuracy_f", "extraction_strength": "extraction_strength"}
    metrics = {names[name]: Metric(forget, 4, None, False) for name in names}
    metrics |= {f"{name}_r": Metric(shares["_r"], 4, None, True) for name in names}
    folder.mkdir(parents=True)
    write_shares(folder, forget, retain)
    write_report(Report("qa", "validation", metrics), folder)
    return folder


def refuse(values: Values | None) -> Any:
    raise AssertionError(f"{values} was scored before")


@pytest.fixture
def candidates(tmp_path: Path) -> Candidates:
    known = {TARGET: scored(tmp_path / "known/target", 1.0, 1.0)}
    for epoch, (forget, retain) in LEFT.items():
        known[f"epoch-{epoch}"] = scored(tmp_path / f"known/epoch-{epoch}", forget, retain)
    return Candidates([{"epoch": epoch} for epoch in LEFT], refuse, "made of nothing", known)


@pytest.fixture
def questions() -> Validation:
    return Validation(QA.over("validation", {}, make_prompter()), LeastExtraction(0.95))


def test_of_what_forgets_alike_what_keeps_most_is_taken_and_nothing_that_is_known_is_scored_again(
    candidates: Candidates, questions: Validation, tmp_path: Path
) -> None:
    choice = choose(candidates, questions, tmp_path / "sweep", "choosing")
    # What is kept where the control's bounds and `keep` are met; else −(|forget − 0.3| + |retain − 1|) / 2.
    assert [row["score"] for row in choice.scores] == pytest.approx([-0.25, 0.957, 1.0, -0.4])
    assert (choice.values, choice.score, choice.doubts) == ({"epoch": 3}, 1.0, [])
    notes = [str(row.get("note")) for row in choice.scores]
    assert "extraction strength is 0.8000, at most 0.3000 wanted" in notes[0]
    assert notes[1:3] == ["None", "None"]
    assert notes[3].startswith("keeps 29%, 95% wanted")
    assert load_choice(tmp_path / "sweep") == choice
    assert verify_folder(tmp_path / "sweep") == []
    assert "| 0.957 |" in (tmp_path / "sweep/table.md").read_text()
    assert json.loads((tmp_path / "sweep/choice.json").read_text())["epoch"] == 3


def test_where_none_keeps_enough_the_gentlest_is_taken_and_doubted(
    candidates: Candidates, questions: Validation, tmp_path: Path
) -> None:
    strong = Candidates(candidates.values[3:], refuse, None, candidates.known)
    choice = choose(strong, questions, tmp_path / "sweep", "choosing")
    assert choice.values == {"epoch": 4}
    assert choice.doubts[0].startswith(
        "no candidate is shown to forget like a model that never saw the rows and to keep 95% of the rest"
    )
    assert "keeps 29%, 95% wanted; distance 0.400" in choice.doubts[0]


def breaking(*broken: Values | None, error: type[MsaError] = NotFiniteError) -> Callable[[Values | None], Any]:
    """How candidates are loaded of which these break."""

    def load(values: Values | None) -> Any:
        assert values in broken, "was scored before"
        raise error("no numbers")

    return load


def without(candidates: Candidates, *names: str, **changes: Any) -> Candidates:
    """The same, some of them not scored yet."""
    known = {name: path for name, path in candidates.known.items() if name not in names}
    return replace(candidates, known=known, **changes)


@pytest.mark.parametrize("epoch", [2, 4])  # the last one too, though nothing comes after it
def test_a_candidate_whose_outputs_are_no_numbers_is_left_out(
    epoch: int, candidates: Candidates, questions: Validation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *values: told.append(text % values))
    broken = without(candidates, f"epoch-{epoch}", load=breaking({"epoch": epoch}))
    choice = choose(broken, questions, tmp_path / "sweep", "choosing")
    assert told == [f"epoch-{epoch}: no numbers; it is left out of the choice"]
    assert choice.values == {"epoch": 3}
    lines = {row["epoch"]: row for row in choice.scores}
    assert lines[epoch] == {"epoch": epoch, "score": None, "met": False, "note": "no numbers"}
    assert all(lines[other]["score"] is not None for other in LEFT if other != epoch)
    assert load_report(tmp_path / f"sweep/epoch-{epoch}").settings == {BROKEN: "no numbers"}
    assert "no numbers" in (tmp_path / "sweep/table.md").read_text()
    assert choose(broken, questions, tmp_path / "sweep", "choosing") == choice
    assert len(told) == 1


def test_without_a_target_or_a_candidate_that_can_be_scored_nothing_is_chosen(
    candidates: Candidates, questions: Validation, tmp_path: Path
) -> None:
    names = [f"epoch-{epoch}" for epoch in LEFT]
    for number, broken in enumerate(
        (
            without(candidates, TARGET, load=breaking(None)),
            without(candidates, *names, load=breaking(*candidates.values)),
            without(candidates, "epoch-1", load=breaking({"epoch": 1}, error=StageError)),  # as of a full disk
        )
    ):
        out = tmp_path / f"sweep-{number}"
        with pytest.raises(StageError, match="no numbers"):
            choose(broken, questions, out, "choosing")
        assert not out.exists()


# What was scored before


NAMES = [TARGET, *(f"epoch-{epoch}" for epoch in LEFT)]


def folders(out: Path) -> set[str]:
    return {path.name for path in out.iterdir() if path.is_dir()}


def test_scores_are_looked_at_by_another_rule_without_scoring_again(
    candidates: Candidates, questions: Validation, tmp_path: Path
) -> None:
    assert choose(candidates, questions, tmp_path / "sweep", "choosing").values == {"epoch": 3}
    nothing = without(candidates, *NAMES)
    score = PaperScore("tofu")  # of its terms, these reports have the extraction strength alone
    choice = choose(nothing, replace(questions, rule=score), tmp_path / "sweep", "choosing")
    assert (choice.values, choice.score) == ({"epoch": 4}, 1.0)
    assert folders(tmp_path / "sweep") == {*NAMES}
    assert verify_folder(tmp_path / "sweep") == []


def test_after_a_stop_another_rule_and_grid_go_on_with_what_is_scored(
    candidates: Candidates, questions: Validation, tmp_path: Path
) -> None:
    out = tmp_path / "sweep"
    with pytest.raises(StageError):
        choose(
            without(candidates, "epoch-4", load=breaking({"epoch": 4}, error=StageError)), questions, out, "choosing"
        )
    rest = without(candidates, *NAMES[:-1], values=candidates.values[2:])
    assert choose(rest, replace(questions, rule=PaperScore("tofu")), out, "choosing").values == {"epoch": 4}
    assert folders(out) == {TARGET, "epoch-3", "epoch-4"}  # of the stopped grid none is left


@pytest.mark.parametrize("other", ["made_of", "questions", "ideal", "judge"])
def test_what_decides_the_scores_has_all_scored_again(
    other: str, candidates: Candidates, questions: Validation, tmp_path: Path
) -> None:
    choice = choose(candidates, questions, tmp_path / "sweep", "choosing")
    ideal = scored(tmp_path / "ideal", 0.1, 1.0)
    (ideal / "manifest.json").write_text(json.dumps({"files": {"forget.jsonl": {"sha256": "0"}}}))
    changes = {
        "made_of": {},
        "questions": {"benchmark": with_items(questions.benchmark, forget=10)},
        "ideal": {"ideal": ideal},
        "judge": {"judge": JudgeSettings("openai", "a model")},
    }
    asked: list[Values | None] = []

    def load(values: Values | None) -> Any:
        asked.append(values)
        raise StageError("asked")

    made_of = "of something else" if other == "made_of" else candidates.made_of
    changed = without(candidates, *NAMES, load=load, made_of=made_of)
    with pytest.raises(StageError, match="asked"):
        choose(changed, replace(questions, **changes[other]), tmp_path / "sweep", "choosing")
    assert asked == [None]
    assert load_choice(tmp_path / "sweep") == choice  # until there is another


def test_mergekit_gets_no_strengths_that_another_grid_was_chosen_by(
    candidates: Candidates, questions: Validation, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    given = {"target": "t", "prior": "p", "output": str(out), "forget": {"data": {"path": "f.jsonl"}}}
    recipe = load_recipe(given, ["forget.alpha=[1,2]"])
    points: list[Values] = [point.values for point in recipe.points]
    left = {candidate_name(point): (1 / float(point["alpha"]), 1.0) for point in points}
    known = {name: scored(tmp_path / f"known/{name}", *shares) for name, shares in left.items()}
    with stage_folder(out / "vectors/forget", "vector", {}):
        pass
    with pytest.raises(UsageError, match="alpha and beta are not chosen yet"):
        merge_arguments(recipe)
    chosen_from = replace(candidates, values=points, known={TARGET: candidates.known[TARGET], **known})
    choose(chosen_from, questions, out / "sweep", "choosing")
    assert (merge_arguments(recipe)["alpha"], merge_arguments(recipe)["forget"]) == (
        [2.0],
        [str(out / "vectors/forget")],
    )
    for other in ("forget.alpha=[1,2,4]", "forget.alpha=[2,4]"):
        with pytest.raises(UsageError, match="alpha and beta are not chosen yet"):
            merge_arguments(load_recipe(given, ["forget.alpha=[1,2]", other]))
    assert merge_arguments(load_recipe(given, ["forget.alpha=4"]))["alpha"] == [4.0]


# What a choice rests on


def with_items(benchmark: Any, **counts: int) -> Any:
    """The same with so many questions in its sets."""
    sets = {name: ItemSet([Item(i, {"question": f"{i}?"}) for i in range(count)]) for name, count in counts.items()}
    return replace(benchmark, sets=sets)


def test_what_the_target_lacks_is_told_before_any_candidate_is_scored(
    candidates: Candidates, questions: Validation, tmp_path: Path
) -> None:
    alone = without(candidates, *NAMES[1:])  # a candidate would be refused
    with pytest.raises(DataError, match="score restor: the target has none of accuracy"):
        choose(alone, replace(questions, rule=PaperScore("restor")), tmp_path / "sweep", "choosing")


def test_candidates_that_differ_have_folders_that_differ() -> None:
    rates: list[Values] = [{"learning_rate": 1e-5}, {"learning_rate": 1.0000001e-5}, {"learning_rate": 2}]
    assert len({candidate_name(values) for values in rates}) == 3
    assert candidate_name({"retain_loss": "kl", "epoch": 3, "scale": 0.5}) == "retain_loss-kl_epoch-3_scale-0.5"


# Candidates that are scored one after the other, by one process or by several


POINTS: list[Values] = [{"alpha": alpha, "beta": beta} for alpha in (0.5, 1.0, 2.0) for beta in (0.0, 1.0)]
POINT_NAMES = [TARGET, *map(candidate_name, POINTS)]


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
    return Counted(QA.over("validation", {}, make_prompter()), LeastExtraction(0.95))


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
    for name in (POINT_NAMES[3], POINT_NAMES[4]):  # killed with some records, and before any
        (work.folder / name).mkdir()
    (work.folder / POINT_NAMES[3] / "forget.jsonl").write_text('{"index": 0}\n')
    assert work.missing(POINT_NAMES) == POINT_NAMES[3:]
    before = {path: path.stat().st_mtime_ns for path in work.folder.rglob("report.json")}
    told: list[int] = []
    work.score(todo(), after=lambda: told.append(len(work.missing(POINT_NAMES))))
    assert validation.names == sorted(POINT_NAMES)
    assert told == [3, 2, 1, 0]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_reports_that_are_known_are_copied_whole(work: ScoredFolder, validation: Counted, tmp_path: Path) -> None:
    known = tmp_path / "known"
    validation.score_into(known, lambda: 0.25)
    (known / "manifest.json").write_text("{}")
    of_another = work.folder / f"{POINT_NAMES[1]}.tmp"  # of a kill amid the copy
    of_another.mkdir()
    (work.folder / POINT_NAMES[1]).mkdir()  # of a kill amid the scores
    given = replace(work, candidates=replace(work.candidates, known={POINT_NAMES[1]: known}))
    given.take_known(POINT_NAMES)
    assert load_report(work.folder / POINT_NAMES[1]).metrics["rouge_l_f"].value == 0.25
    assert not (work.folder / POINT_NAMES[1] / "manifest.json").exists()
    assert not of_another.exists()
    assert POINT_NAMES[1] not in given.missing(POINT_NAMES)
    given.keep(POINT_NAMES)
    assert [path.name for path in work.folder.iterdir()] == [POINT_NAMES[1]]


@pytest.mark.parametrize("search", [None, StrengthSearch(alphas=(0.5, 1.0))], ids=["list", "search"])
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
        before = len(validation.scored)
        for rank in (1, 2):
            help_choose(candidates, validation, tmp_path / "sweep", points[rank::3])
        shares.append(len(validation.scored) - before)
        yield 3

    together = choose(replace(candidates, helped=helped), validation, tmp_path / "sweep", "choosing")
    assert together == alone
    assert validation.names == scored  # none twice
    assert any(shares)
    left = {path.relative_to(tmp_path / "sweep") for path in (tmp_path / "sweep").rglob("*")}
    assert left == {path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*")}
