"""What a recipe's models are asked, by what it is chosen, and what attacks take; or why there is nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.choose.rules import LeastExtraction, PaperScore
from msa_lite.data import DataSource, Row, load_rows
from msa_lite.errors import MsaError, UsageError
from msa_lite.evals.benchmarks.benchmark import Benchmark
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.pipeline.attack.campaign import asked_rows
from msa_lite.pipeline.prepare.questions import Questions, load_questions, terms_left_out
from msa_lite.recipe import Recipe, load_recipe
from tests.support.benchmark_data import ROWS, TABLES, make_prompter, row, write_tofu
from tests.support.benchmark_data import write_data as write_muse

JUDGE = {"kind": "openai"}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, DataSource]:
    """Eight questions to forget, twelve to keep, five that nobody learnt, and six texts; TOFU's forget questions are
    among the first."""
    tables: dict[str, list[dict[str, Any]]] = {
        "forget": [row(i, 0, False) for i in range(8)],
        "retain": [row(i, 0, False) for i in range(100, 112)],
        "holdout": [row(i, 0, False) for i in range(200, 205)],
        "texts": [{"text": f"It is over there, {i} cats sat, where is it?"} for i in range(6)],
    }
    for name, rows in tables.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    formats = {"texts": "text"}
    return {name: DataSource(str(tmp_path / f"{name}.jsonl"), formats.get(name, "qa")) for name in tables}  # type: ignore[arg-type]


def ask(
    data: Mapping[str, DataSource],
    evaluate: Mapping[str, Any] | None = None,
    select: Mapping[str, Any] | None = None,
    choice: Any = True,
    **sets: str,
) -> Questions:
    """The questions of a recipe. sets: which data go where ("forget", "evaluate.holdout"); "forget" is the forget set,
    and "retain" the retain set, unless said otherwise."""
    used = {"forget": "forget", "retain": "retain"} | {
        key.replace("evaluate_", "evaluate."): n for key, n in sets.items()
    }
    given = {"target": "t", "prior": "p", "output": "o", "forget": {"data": {"path": "x"}, "alpha": [0.5, 1]}}
    recipe = Recipe.model_validate(given | {"evaluate": evaluate or {}, "select": select or {}})
    rows = {name: load_rows(data[key]) for name, key in used.items() if key}
    return load_questions(recipe, rows, choice, make_prompter())


def indices(part: Benchmark | None) -> dict[str, set[int]]:
    return {name: {item.index for item in found.items} for name, found in part.sets.items()}


def sizes(part: Benchmark | None) -> dict[str, int]:
    return {name: len(rows) for name, rows in indices(part).items()}


# One's own questions and texts


def test_questions_of_ones_own_are_divided_and_holdout_rows_are_in_both_parts(data: dict[str, DataSource]) -> None:
    found = ask(data, select={"validation": 0.25}, evaluate_holdout="holdout")
    validation, test = found.validation, found.test
    one, other = indices(validation), indices(test)
    assert sizes(validation) == {"forget": 8, "retain": 3, "holdout": 5}
    assert all(one[name] == other[name] for name in ("forget", "holdout"))
    assert one["retain"] | other["retain"] == set(range(12))
    assert not one["retain"] & other["retain"]
    assert (validation.split, test.split) == ("validation", "test")
    assert found.rule == LeastExtraction(0.9)


def test_few_rows_are_chosen_on_and_scored_whole_and_it_is_said(
    data: dict[str, DataSource], caplog: pytest.LogCaptureFixture
) -> None:
    found = ask(data, retain="holdout")
    assert "5 retain rows are too few to divide" in caplog.text
    validation, test = found.validation, found.test
    assert sizes(validation) == {"forget": 8, "retain": 5}
    assert validation.split == "all"
    assert validation.describe() == test.describe()
    texts = ask(data, select={"validation": 0.5}, forget="texts")  # they are chosen by as questions are
    assert sizes(texts.validation) == {"forget": 6, "retain": 6}
    assert isinstance(texts.rule, LeastExtraction)


@pytest.mark.parametrize("choice", [False, "if possible"])
def test_without_a_choice_all_rows_are_asked_once(data: dict[str, DataSource], choice: Any, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(2 * (json.dumps(row(0, 0, False)) + "\n"))
    one = {**data, "one": DataSource(str(tmp_path / "one.jsonl"))}
    found = ask(one, select={"validation": 0.15}, choice=choice, forget="one")
    assert found.validation is None
    assert sizes(found.test) == {"forget": 1, "retain": 12}
    assert found.test.split == "all"
    # One row cannot be divided, two can.
    assert ask(data, select={"validation": 0.15}, choice="if possible").validation is not None
    # Unless a share is asked for, one row is chosen on and scored.
    assert (ask(one, choice=choice, forget="one").validation is None) == (choice is False)


def test_null_evaluation_asks_nothing_and_no_rows_are_warned_of(
    data: dict[str, DataSource], caplog: pytest.LogCaptureFixture
) -> None:
    forget = {"data": {"path": "x"}, "alpha": 1}
    values = {"target": "t", "prior": "p", "output": "o", "forget": forget, "evaluate": None}
    nothing = load_questions(Recipe.model_validate(values), {}, False, make_prompter())
    assert (nothing.validation, nothing.test) == (None, None)
    assert ask(data, choice=False, forget="", retain="").test is None
    assert "nothing can be scored: there are no rows" in caplog.text


@pytest.mark.parametrize(
    ("evaluate", "select", "sets", "told"),
    [
        (
            {"limit": 1},
            {"validation": 0.15},
            {},
            "retain: 1 rows\n  select.validation auto divides no",
        ),
        ({}, {"validation": 0.99}, {}, "retain: 12 rows"),
        ({}, {}, {"forget": ""}, "forget: no questions; give evaluate.forget"),
        ({}, {"score": "tofu"}, {}, "benchmark qa: does not measure what the choice needs (tofu):\n  model_utility\n"),
        ({}, {"score": "muse-gap"}, {}, "'muse-gap' compares with the ideal model; give evaluate.ideal"),
    ],
)
def test_what_cannot_be_chosen_by_is_told(
    data: dict[str, DataSource], evaluate: dict[str, Any], select: dict[str, Any], sets: dict[str, str], told: str
) -> None:
    with pytest.raises(MsaError) as error:
        ask(data, evaluate, select, **sets)
    assert told in str(error.value)
    assert error.value.exit_code == 2


# Published benchmarks


@pytest.fixture
def tofu(tmp_path: Path) -> dict[str, Any]:
    tables = TABLES | {
        "forget01_perturbed": [row(i, 1) for i in range(40)],
        "retain_perturbed": [row(i, 1) for i in range(100, 140)],
        "holdout01": [{"question": f"Where was {i}?", "answer": f"It was {i} miles away."} for i in range(40)],
    }
    return {"benchmark": "tofu", "split": "forget01", "data": write_tofu(tmp_path / "tofu", tables)}


def test_a_benchmarks_own_score_divides_the_benchmark(data: dict[str, DataSource], tofu: dict[str, Any]) -> None:
    found = ask(data, tofu, {"score": "tofu", "validation": 0.2})
    validation, test = found.validation, found.test
    one, other = indices(validation), indices(test)
    assert (validation.split, test.split) == ("forget01 validation", "forget01 test")
    assert all(not one[name] & other[name] for name in one)
    assert (len(one["forget"]), len(other["forget"])) == (8, 32)
    assert sorted(len(part.sets["forget"].items) for part in found.everything) == [8, 32]
    assert found.published == found.everything, "a filter sees none of its questions, those that chose included"
    assert not found.judged
    assert isinstance(found.rule, PaperScore)
    with pytest.raises(UsageError, match=r"no questions; give evaluate\.forget, or select\.score: tofu"):
        ask(data, tofu, forget="")
    # Nothing is divided where nothing is chosen.
    assert sizes(ask(data, tofu, choice=False).test)["forget"] == 40


def test_by_extraction_the_benchmark_leaves_out_what_was_chosen_by(
    data: dict[str, DataSource], tofu: dict[str, Any]
) -> None:
    found = ask(data, tofu, {"validation": 0.5})
    validation, test = found.validation, found.test
    assert (validation.name, validation.split) == ("qa", "validation")
    assert (test.name, test.split) == ("tofu", "forget01 test")
    seen, tested = ({item.fields["question"] for item in part.sets["retain"].items} for part in (validation, test))
    assert len(seen) == 6
    assert not seen & tested
    assert sizes(test)["forget"] == 40, "all forget rows decide, and all are scored"
    (everything,) = found.everything
    assert len(everything.sets["forget"].items) == 40, "attacks take all of them"


def test_a_judge_is_asked_of_validation_rows_where_the_score_wants_it(
    data: dict[str, DataSource], tofu: dict[str, Any]
) -> None:
    judged = tofu | {"judge": JUDGE}
    assert ask(data, judged, {"score": "tofu"}).judged
    local = tofu | {"judge": {"kind": "local", "model": "m"}}
    assert not ask(data, local, {"score": "tofu"}).judged  # it would be in memory beside the target
    assert not ask(data, judged).judged  # by extraction, one's own questions decide


@pytest.mark.parametrize(
    ("judge", "select", "why"),
    [
        ({"kind": "none"}, {}, "no judge is set. Set evaluate.judge, of kind openai"),
        ({"kind": "local", "model": "m"}, {}, "a local judge is never asked during the choice"),
        ({"kind": "openai"}, {}, None),
        ({"kind": "none"}, {"score": "extraction"}, None),
    ],
)
def test_a_run_says_which_terms_its_choice_leaves_out(
    judge: dict[str, Any], select: dict[str, Any], why: str | None
) -> None:
    evaluate = {"benchmark": "tofu", "ideal": "i", "judge": judge}
    values = {"target": "t", "prior": "p", "forget": {"data": {"path": "f"}, "alpha": [1, 2]}, "output": "o"}
    recipe = load_recipe(values | {"evaluate": evaluate, "select": {"score": "tofu"} | select})
    notes = terms_left_out(recipe)
    assert [note.partition("weights): ")[2].startswith(why or "-") for note in notes] == [True] * (why is not None)


def test_muse_is_chosen_by_its_own_score_and_says_how_coarse_it_is(
    data: dict[str, DataSource], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = {("privleak", side): [{"text": f"It is {side} {i}"} for i in range(100)] for side in ("forget", "holdout")}
    more = {
        ("verbmem", "forget"): ROWS["verbmem", "forget"] * 3,
        ("knowmem", "retain_qa"): ROWS["knowmem", "forget_qa"],
    }
    muse = {"benchmark": "muse", "data": write_muse(tmp_path / "muse", ROWS | texts | more)}
    found = ask(data, muse, forget="texts")
    assert found.rule == PaperScore("muse")
    assert "measured on 15 × 15 pairs of texts, so that the AUC moves in steps of 1/225" in caplog.text


# All questions about the forget set, which attacks take, however a choice has divided them

ASKED = [Row(at, f"Who is {at}?", f"The man {at}.") for at in range(5)]
SAME = Row(5, ASKED[0].question, ASKED[0].answer)
OTHER = Row(6, ASKED[0].question, "Another man.")

PARTS: dict[str, tuple[Sequence[Row] | None, Sequence[Row] | None, list[int]]] = {
    "divided": ([ASKED[3], ASKED[0]], [ASKED[1], ASKED[2], ASKED[4]], [0, 1, 2, 3, 4]),
    "whole in both": (ASKED, ASKED, [0, 1, 2, 3, 4]),
    "chosen by some of all": (ASKED[2:4], ASKED, [0, 1, 2, 3, 4]),
    "nothing chosen": (None, ASKED, [0, 1, 2, 3, 4]),
    "the same twice": (None, [*ASKED, SAME], [0, 1, 2, 3, 4]),
    "another answer": ([ASKED[0]], [ASKED[1], OTHER], [0, 1, 6]),
    "another system message": (None, [ASKED[0], replace(SAME, system="Be brief.")], [0, 5]),
    "nothing asked": (None, None, []),
}


@pytest.mark.parametrize("case", PARTS)
def test_all_forget_rows_are_attacked_in_the_order_of_the_data_each_once(case: str) -> None:
    *parts, expected = PARTS[case]
    validation, test = (load_qa({"forget": rows}, make_prompter(), 40) if rows else None for rows in parts)
    rows = asked_rows(Questions(LeastExtraction(0.9), validation, test).everything, "forget")
    assert [row.index for row in rows] == expected
    assert all(row.question and row.answer for row in rows)
