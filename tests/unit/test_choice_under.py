"""A choice that has to hold for rounded weights: the worst score counts, and each model is scored once in each form."""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from msa_lite.choose import candidates as module
from msa_lite.choose.candidates import TARGET, WORK, Candidates, Values
from msa_lite.choose.choice import choose, help_choose
from msa_lite.choose.rules import LeastExtraction, Rank, make_rule
from msa_lite.choose.search import StrengthSearch
from msa_lite.data import Prompter, Template
from msa_lite.errors import NotFiniteError
from msa_lite.evals.qa import Qa
from msa_lite.io.files.writing import digest
from msa_lite.recipe.scores import Select
from msa_lite.report.choice import candidate_name, load_choice
from msa_lite.report.reports import REPORT_FILE, Metric, Report, write_report
from tests.support.models import tiny_tokenizer
from tests.unit.test_candidates import NAMES, POINTS, Counted
from tests.unit.test_choice import scored


@pytest.fixture
def validation() -> Counted:
    questions = Qa("validation", {}, Prompter.build(tiny_tokenizer(), "plain", Template()))
    return Counted(questions, LeastExtraction(0.95))


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A "model" is a number, which rounding changes for as long as it lasts."""

    @contextmanager
    def rounded_model(model: Number, form: str) -> Iterator[None]:
        model.form = form
        yield
        model.form = ""

    monkeypatch.setattr(module, "rounded_model", rounded_model)


class Number:
    """What is left at a point; rounding to NF4 brings back what α below 1.5 removes."""

    def __init__(self, values: Values | None) -> None:
        self.alpha, self.form = float(values["alpha"]) if values else 0.0, ""

    def left(self) -> float:
        if self.form == "int8":
            return float("nan") if self.alpha > 4 else 1 / (1 + self.alpha)
        return 1.0 if self.form == "nf4" and self.alpha < 1.5 else 1 / (1 + self.alpha)


class Watched(Counted):
    """Scores a `Number` by what is left of it."""

    def score_into(self, folder: Path, load: Any, about: Any = None, **others: Any) -> Any:
        left = load().left()
        if left != left:
            raise NotFiniteError("no numbers")
        return super().score_into(folder, lambda: left, about, **others)


def make(points: list[Values], under: tuple[str, ...], **others: Any) -> Candidates:
    return Candidates(points, Number, "made of numbers", under=under, **others)


def watched(validation: Counted) -> Watched:
    return Watched(validation.benchmark, validation.rule)


ALPHAS: list[Values] = [{"alpha": alpha, "beta": 0.0} for alpha in (0.5, 1.0, 2.0)]


def test_the_worst_of_all_forms_counts_and_tables_say_so(validation: Counted, tmp_path: Path) -> None:
    plain = choose(make(ALPHAS, ()), watched(validation), tmp_path / "plain", "choosing")
    # 2/3 and 1/2 are above unseen rows, by half of these distances; without retain rows all is kept.
    assert [line["score"] for line in plain.scores] == pytest.approx([-(2 / 3 - 0.4) / 2, -0.05, 1.0])
    held = choose(make(ALPHAS, ("nf4",)), watched(validation), tmp_path / "held", "choosing")
    assert [line["score"] for line in held.scores] == pytest.approx([-0.3, -0.3, 1.0])
    markdown = (tmp_path / "held/table.md").read_text()
    assert markdown.count("… rounded to NF4") == 4
    assert "with its weights rounded to NF4, each beside the target in the same form" in markdown
    assert "NF4" not in (tmp_path / "plain/table.md").read_text()
    with open(tmp_path / "held/table.csv") as stream:
        rows = [row for row in csv.DictReader(stream) if row["model"] == "candidate, NF4"]
    assert [float(row["rouge_l_f"]) for row in rows] == pytest.approx([1, 1, 1 / 3])
    assert [row["alpha"] for row in rows] == ["0.5", "1.0", "2.0"]
    assert [[*load_choice(tmp_path / name).under] for name in ("held", "plain")] == [["NF4"], []]


def test_the_search_goes_on_until_the_rounded_model_forgets(validation: Counted, tmp_path: Path) -> None:
    search = StrengthSearch(None, (0.0,))
    plain = choose(make([], (), search=search), watched(validation), tmp_path / "plain", "choosing")
    held = choose(make([], ("nf4",), search=search), watched(validation), tmp_path / "held", "choosing")
    assert float(held.values["alpha"]) >= float(plain.values["alpha"])
    assert min(float(line["alpha"]) for line in held.scores if line["score"] > 0) >= 1.5


def test_a_model_that_breaks_when_rounded_is_never_chosen(validation: Counted, tmp_path: Path) -> None:
    points: list[Values] = [*ALPHAS, {"alpha": 8.0, "beta": 0.0}]
    choice = choose(make(points, ("int8", "nf4")), watched(validation), tmp_path / "sweep", "choosing")
    assert choice.scores[-1] == {"alpha": 8.0, "beta": 0.0, "score": None, "met": False, "note": "no numbers"}
    assert choice.values == {"alpha": 2.0, "beta": 0.0}


def test_what_loses_too_much_when_rounded_is_told_with_the_form(validation: Counted, tmp_path: Path) -> None:
    known = {}
    for name, shares in {TARGET: (1.0, 1.0), "epoch-1": (0.3, 1.0), "epoch-2": (0.6, 1.0)}.items():
        known[name] = scored(tmp_path / "known" / name, *shares)
        scored(known[name] / "nf4", *((0.3, 0.5) if name == "epoch-1" else shares))
    candidates = Candidates([{"epoch": 1}, {"epoch": 2}], Number, "nothing", known, under=("nf4",))
    choice = choose(candidates, watched(validation), tmp_path / "sweep", "choosing")
    assert choice.values == {"epoch": 2}
    assert choice.scores[0]["note"].startswith("rounded to NF4: keeps 29%")


def test_the_forms_belong_to_what_decides_a_choice(validation: Counted) -> None:
    plain, held = make(ALPHAS, ()), make(ALPHAS, ("nf4",))
    assert "under" not in plain.inputs(validation) | plain.scored_by(validation)
    assert digest(plain.scored_by(validation)) != digest(held.scored_by(validation))
    assert digest(held.inputs(validation)) != digest(replace(held, under=("nf4", "int8")).inputs(validation))


def test_a_stopped_choice_goes_on_with_the_forms_that_are_missing(validation: Counted, tmp_path: Path) -> None:
    first, second = watched(validation), watched(validation)

    def stop(label: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        choose(make(ALPHAS, ("nf4",)), first, tmp_path / "sweep", "choosing", stop)
    partial = tmp_path / "sweep.partial"
    assert (partial / WORK).is_file()
    name = candidate_name(ALPHAS[1])
    (partial / name / REPORT_FILE).unlink()  # a kill between the form and the model as it is
    choice = choose(make(ALPHAS, ("nf4",)), second, tmp_path / "sweep", "choosing")
    assert [line["score"] for line in choice.scores] == pytest.approx([-0.3, -0.3, 1.0])
    last = candidate_name(ALPHAS[2])
    assert [where for where, _ in second.scored] == [name, "nf4", last]
    again = watched(validation)
    assert choose(make(ALPHAS, ("nf4",)), again, tmp_path / "sweep", "choosing") == choice
    assert again.scored == []


def test_several_processes_score_each_model_once_in_each_form(validation: Counted, tmp_path: Path) -> None:
    loads: list[str] = []

    def load(values: Values | None) -> Number:
        loads.append(candidate_name(values) if values else TARGET)
        return Number(values)

    candidates = replace(make(POINTS, ("nf4", "int8")), load=load)
    shared = watched(validation)
    helper = threading.Thread(target=help_choose, args=(lambda: (candidates, shared), tmp_path / "sweep"))
    helper.start()
    choose(candidates, shared, tmp_path / "sweep", "choosing")
    helper.join()
    assert sorted(loads) == sorted(NAMES)
    assert shared.names == sorted([*NAMES, *["nf4", "int8"] * len(NAMES)])


def test_recipes_name_each_form_once_and_not_beside_a_target_in_4_bits() -> None:
    assert Select.model_validate({"under": ["nf4", "int8"]}).under == ["nf4", "int8"]
    with pytest.raises(ValidationError, match="a form stands twice"):
        Select.model_validate({"under": ["nf4", "nf4"]})
    with pytest.raises(ValidationError, match="leave one of the two out"):
        Select.model_validate({"under": ["nf4"], "four_bit": True})


def test_a_condition_may_name_a_metric_with_rounded_weights(validation: Counted, tmp_path: Path) -> None:
    """The rule wants little left at 4 bits, and leaves the model as it is out of it."""
    rule = make_rule(None, 0.9, None, "extraction_strength", {"nf4.extraction_strength": "<= 0.5"})
    whole = replace(validation, rule=rule)
    for name, (plain, rounded) in {TARGET: (1.0, 1.0), "a": (0.1, 0.9), "b": (0.3, 0.4)}.items():
        for folder, value in ((tmp_path / name, plain), (tmp_path / name / "nf4", rounded)):
            folder.mkdir()
            write_report(Report("qa", "validation", {"extraction_strength": Metric(value, 8, 0.1, False)}), folder)
    weak, firm = (whole.rank(tmp_path / name, tmp_path / TARGET) for name in "ab")
    assert isinstance(weak, Rank)
    assert isinstance(firm, Rank)
    assert (weak.met, firm.met) == (False, True)
    assert weak.note == "nf4.extraction_strength is 0.900, at most 0.500 wanted"
    of_form = whole.rank(tmp_path / "b/nf4", tmp_path / TARGET / "nf4", (tmp_path / "b", tmp_path / TARGET))
    assert isinstance(of_form, Rank)
    assert of_form.met
