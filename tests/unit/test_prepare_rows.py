"""The rows of a run: kept apart by their use, each once, sampled for a vector; and what they cannot show."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_lite.choose.validation import FEWEST
from msa_lite.data import Row
from msa_lite.errors import DataError
from msa_lite.pipeline.prepare.questions import (
    count_repeated,
    divide_retain,
    each_once,
    least_bound,
    limits_of_evidence,
    separate_sets,
)
from msa_lite.recipe import Recipe, load_recipe

A, B, C, D = (Row(i, f"Question {name}?", f"Answer {name}.") for i, name in enumerate("ABCD"))
TURN = Row(4, "And then?", "Yes.", earlier=(("Question A?", "Answer A."),))
TEXT = Row(5, text="Once upon a time.")


def same(row: Row) -> Row:
    """The row as another file has it: with other capitals and signs, in another place, with another answer."""
    earlier = tuple((question.lower(), answer) for question, answer in row.earlier)
    return Row(99, row.question.upper(), f"Not: {row.answer}" if row.answer else "", row.text.upper(), earlier)


def make_rows(count: int, start: int = 0) -> list[Row]:
    return [Row(i, f"q{start + i}", f"a{start + i}") for i in range(count)]


def make_recipe(sample: str | None = "match_forget", **changes: Any) -> Recipe:
    recipe = {"target": "t", "prior": "p", "output": "o", "forget": {"data": {"path": "f"}, "alpha": "auto"},
              "retain": {"data": {"path": "r", "sample": sample}, "beta": "auto"},
              "evaluate": {"ideal": "i"}}  # fmt: skip
    return load_recipe(recipe | changes)


@pytest.mark.parametrize("row", [A, TURN, TEXT])
def test_rows_to_forget_are_taken_out_of_every_other_set(row: Row) -> None:
    whole = {
        "forget": [row, B],
        "evaluate.forget": [C],
        "retain": [same(row), D],
        "evaluate.retain": [D, same(C)],
        "evaluate.holdout": [same(row), same(D), Row(7, "New?", "Yes.")],
    }
    rows, notes = separate_sets(whole)
    assert {place: len(part) for place, part in rows.items()} == {
        "forget": 2, "evaluate.forget": 1, "retain": 1, "evaluate.retain": 1, "evaluate.holdout": 1,
    }  # fmt: skip
    assert rows["retain"] == rows["evaluate.retain"] == [D]
    assert rows["evaluate.holdout"][0].question == "New?"
    assert [note.partition(" rows")[0] for note in notes] == [
        "retain: 1 of 2", "evaluate.retain: 1 of 2", "evaluate.holdout: 2 of 3",
    ]  # fmt: skip


def test_the_same_words_after_other_turns_are_another_question() -> None:
    other = Row(0, TURN.question, TURN.answer, earlier=(("Question B?", "Answer B."),))
    plain = Row(1, TURN.question, TURN.answer)
    rows = {"forget": [TURN], "retain": [other, plain, Row(2, "?!", "a"), Row(3, "!?", "a")]}
    assert separate_sets(rows) == (rows, [])


@pytest.mark.parametrize("place", ["retain", "evaluate.retain", "evaluate.holdout"])
def test_a_set_of_which_nothing_is_left_is_refused(place: str) -> None:
    with pytest.raises(DataError, match=rf"^{place}: all 2 rows stand in the forget"):
        separate_sets({"forget": [A, B], place: [same(B), same(A)]})


def test_a_row_that_stands_twice_is_counted_once() -> None:
    again = Row(8, "question a", "answer a")
    rows = [A, again, Row(9, A.question, "Another answer."), TEXT, Row(10, text=TEXT.text)]
    assert [row.index for row in each_once(rows)] == [0, 9, 5]
    assert [note.partition(" rows")[0] for note in count_repeated({"forget": rows, "retain": [B]})] == ["2 of 5 forget"]


@given(forget=st.integers(1, 30), retain=st.integers(1, 80), seed=st.integers(0, 5))
def test_a_sample_is_as_large_as_the_forget_set_and_not_scored_while_enough_is_left(
    forget: int, retain: int, seed: int
) -> None:
    rows = {"forget": make_rows(forget, 1000), "retain": make_rows(retain)}
    whole, learnt, scored = divide_retain(make_recipe(seed=seed), rows)
    assert whole == rows["retain"]
    assert len(learnt) == min(forget, retain)
    assert divide_retain(make_recipe(seed=seed), rows) == (whole, learnt, scored)
    if retain - forget >= FEWEST:
        assert sorted(learnt + scored, key=lambda row: row.index) == rows["retain"]
    else:
        assert scored == rows["retain"]


@pytest.mark.parametrize("sample", ["match_forget", None])
@given(named=st.integers(1, 40), seed=st.integers(0, 5))
def test_rows_that_the_recipe_names_for_scores_are_not_learnt(sample: str | None, named: int, seed: int) -> None:
    retain = make_rows(40)
    rows = {"forget": make_rows(20, 1000), "retain": retain, "evaluate.retain": retain[:named]}
    whole, learnt, _ = divide_retain(make_recipe(sample, seed=seed), rows)
    assert whole == (retain[named:] if named <= 20 else retain), "too few others: all are learnt"
    assert {row.question for row in learnt} <= {row.question for row in whole}
    assert len(learnt) == (20 if sample else len(whole))


def test_without_a_sample_all_rows_are_learnt_and_scored() -> None:
    rows = {"forget": make_rows(5, 1000), "retain": make_rows(40)}
    assert divide_retain(make_recipe(None), rows) == (rows["retain"],) * 3


def test_turns_of_one_conversation_are_not_torn_apart() -> None:
    turns = [Row(i, f"turn {i % 3}", "a", earlier=(("first " + str(i // 3), "b"),)) for i in range(90)]
    _, learnt, scored = divide_retain(make_recipe(), {"forget": make_rows(10, 1000), "retain": turns})
    assert len(learnt) == 10
    assert {row.thread for row in learnt} & {row.thread for row in scored} == set()


ENOUGH = {"forget": make_rows(30), "retain": make_rows(60, 100)}
PLAIN = {"filter": "off"}
WITHOUT_SAMPLE: dict[str, Any] = {"data": {"path": "r"}, "beta": "auto"}
ONE_POINT: dict[str, Any] = {"forget": {"data": {"path": "f"}, "alpha": 1}, "retain": None}
BOOK = [Row(0, text="a word " * 3000)]
MOST_LEARNT = {"retain": make_rows(31, 100), "evaluate.retain": [*make_rows(16, 100), *make_rows(14, 400)]}


@pytest.mark.parametrize(
    ("changes", "rows", "words"),
    [
        ({}, {}, []),
        ({}, {"forget": make_rows(11)}, ["few forget rows (11)", "PASS cannot be reached with 11"]),
        ({"evaluate": {"ideal": "i", "limit": 20}}, {}, ["PASS cannot be reached with 20"]),
        ({"evaluate": {}}, {}, ["no holdout rows and no ideal"]),
        ({"evaluate": {}}, {"evaluate.holdout": make_rows(30, 200)}, []),
        ({"evaluate": {}}, {"forget": make_rows(21), "evaluate.holdout": make_rows(90, 200)}, ["PASS cannot"]),
        ({}, {"retain": make_rows(41, 100)}, ["30 of the 41 retain rows"]),  # too few are left by the sample
        ({"retain": WITHOUT_SAMPLE}, MOST_LEARNT, ["16 of the 30 retain rows"]),
        ({"retain": WITHOUT_SAMPLE | {"beta": 0}}, {}, ["kept cannot be shown"]),  # the filter's part
        ({"retain": WITHOUT_SAMPLE | {"beta": 0}, "merge": PLAIN}, {}, []),
        ({"retain": WITHOUT_SAMPLE | {"beta": 0}, "merge": PLAIN, "vector": {"hold": 1.0}}, {}, ["kept cannot"]),
        ({"retain": WITHOUT_SAMPLE}, {"evaluate.retain": make_rows(30, 300)}, []),
        ({"retain": WITHOUT_SAMPLE}, {"evaluate.retain": make_rows(40, 100)}, ["kept cannot be shown"]),
        ({"retain": None}, {"forget": make_rows(30) * 2}, ["30 of 60 forget rows repeat"]),
        ({}, {"forget": BOOK}, []),  # 50 passages
        (ONE_POINT, {"forget": BOOK}, ["few forget rows (1)", "PASS"]),
        (ONE_POINT | {"evaluate": None}, {"forget": make_rows(2)}, []),
        ({"evaluate": {"benchmark": "tofu"}}, {"forget": make_rows(2)}, []),
    ],
)  # fmt: skip
def test_each_limit_is_told_where_it_is_one(
    changes: dict[str, Any], rows: dict[str, list[Row]], words: list[str]
) -> None:
    notes = limits_of_evidence(make_recipe(**changes), ENOUGH | rows)
    assert len(notes) == len(words), notes
    assert all(word in note for word, note in zip(words, notes, strict=True)), notes


def test_baselines_fit_no_retain_vector() -> None:
    recipe = make_recipe(retain=WITHOUT_SAMPLE)
    assert limits_of_evidence(recipe, ENOUGH, fits_retain=False) == []


@pytest.mark.parametrize(("rows", "bound"), [(20, 0.103), (24, 0.088), (48, 0.046)])
def test_the_bound_is_that_of_agresti_and_caffo(rows: int, bound: float) -> None:
    assert least_bound(rows, rows) == pytest.approx(bound, abs=5e-4, rel=1e-6)
