"""The choice among candidates that were scored before: which is taken, what is written, which are left out."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import Prompter, Template
from msa_lite.errors import MsaError, NotFiniteError, StageError
from msa_lite.evals import candidates as module
from msa_lite.evals.candidates import TARGET, Candidates, Values, candidate_name
from msa_lite.evals.choice import choose, load_choice
from msa_lite.evals.qa import Qa
from msa_lite.evals.selection import Exposure
from msa_lite.evals.validation import BROKEN, Validation
from msa_lite.io.manifest import verify_folder
from msa_lite.report import Metric, Report, load_report, write_report
from tests.conftest import tiny_tokenizer

# What is left of a target that knows everything: (forget set, retain set). Least of the forget set, where 95 % of the
# retain set are left, is at epochs 2 and 3.
LEFT = {1: (0.8, 1.0), 2: (0.3, 0.96), 3: (0.3, 1.0), 4: (0.0, 0.5)}


def scored(folder: Path, forget: float, retain: float) -> Path:
    """The folder of a candidate with its report."""
    shares = {"_f": forget, "_r": retain}
    names = {"rouge_l": "rouge_l_f", "accuracy": "accuracy_f", "extraction_strength": "extraction_strength"}
    metrics = {names[name]: Metric(forget, 4, None, False) for name in names}
    metrics |= {f"{name}_r": Metric(shares["_r"], 4, None, True) for name in names}
    folder.mkdir(parents=True)
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
    return Validation(Qa("validation", {}, Prompter.build(tiny_tokenizer(), "plain", Template())), Exposure(0.95))


def test_the_first_of_equals_is_taken_and_nothing_that_is_known_is_scored_again(
    candidates: Candidates, questions: Validation, tmp_path: Path
) -> None:
    choice = choose(candidates, questions, tmp_path / "sweep", "choosing")
    # 1 − exposure where enough is kept, kept − 1 where it is not.
    assert [row["score"] for row in choice.scores] == pytest.approx([0.2, 0.7, 0.7, -0.5])
    assert (choice.values, choice.score, choice.doubts) == ({"epoch": 2}, pytest.approx(0.7), [])
    assert load_choice(tmp_path / "sweep") == choice
    assert verify_folder(tmp_path / "sweep") == []
    with open(tmp_path / "sweep/table.csv") as stream:
        table = list(csv.DictReader(stream))
    assert [row["epoch"] for row in table] == ["", "1", "2", "3", "4"]  # the target first
    assert (float(table[2]["score"]), table[2]["rouge_l_r"], table[2]["chosen"]) == (pytest.approx(0.7), "0.96", "true")
    assert "| 0.700 |" in (tmp_path / "sweep/table.md").read_text()
    assert json.loads((tmp_path / "sweep/choice.json").read_text())["epoch"] == 2


def test_where_none_keeps_enough_the_gentlest_is_taken_and_doubted(
    candidates: Candidates, questions: Validation, tmp_path: Path
) -> None:
    strong = Candidates(candidates.values[3:], refuse, None, candidates.known)
    choice = choose(strong, questions, tmp_path / "sweep", "choosing")
    assert choice.values == {"epoch": 4}
    assert "no candidate left 95% of the target's retain scores, so the one that left most (50%)" in choice.doubts[0]


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
    assert choice.values == {"epoch": 3 if epoch == 2 else 2}
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


def test_candidates_that_differ_have_folders_that_differ() -> None:
    rates: list[Values] = [{"learning_rate": 1e-5}, {"learning_rate": 1.0000001e-5}, {"learning_rate": 2}]
    assert [candidate_name(values) for values in rates] == [
        "learning_rate-1e-05",
        "learning_rate-1.0000001e-05",
        "learning_rate-2",
    ]
    assert candidate_name({"retain_loss": "kl", "epoch": 3, "scale": 0.5}) == "retain_loss-kl_epoch-3_scale-0.5"
