"""Rows of one's own, divided into those that are chosen on and those that are scored: how many, and which are whole."""

from __future__ import annotations

import pytest

from msa_lite.choose.validation import FEWEST, PASSAGE, divide_rows
from msa_lite.data import Row


def questions(count: int) -> list[Row]:
    return [Row(i, f"What is {i}?", f"It is {i}.") for i in range(count)]


def texts(*lengths: int) -> list[Row]:
    """Texts of so many words."""
    return [Row(i, text=" ".join(f"word{i}-{n}" for n in range(length))) for i, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("count", "chosen_on", "scored", "name"),
    [
        (1, 1, 1, "all"),
        (11, 11, 11, "all"),
        (12, 6, 6, "test"),
        (25, 12, 13, "test"),
        (60, 30, 30, "test"),
        (400, 30, 370, "test"),
    ],
)
def test_half_of_few_rows_and_no_more_than_thirty_are_chosen_on(
    count: int, chosen_on: int, scored: int, name: str
) -> None:
    rows = {"forget": questions(7), "retain": questions(count), "holdout": questions(5)}
    parts = divide_rows(rows, None, seed=0)
    validation, test = ([row.index for row in part["retain"]] for part in (parts.validation, parts.test))
    assert (len(validation), len(test)) == (chosen_on, scored)
    assert {*validation, *test} == {*range(count)}
    assert name == "all" or not {*validation} & {*test}
    assert parts.names[1] == name
    assert parts.validation["forget"] == parts.test["forget"] == rows["forget"]  # all of them decide
    assert len(parts.validation["holdout"]) == len(parts.test["holdout"]) == 5


def test_without_rows_to_keep_both_parts_are_the_whole() -> None:
    parts = divide_rows({"forget": questions(40)}, None, seed=0)
    assert parts.validation == parts.test == {"forget": questions(40)}
    assert parts.names == ("all", "all")


def test_a_share_is_that_of_the_retain_rows() -> None:
    parts = divide_rows({"forget": questions(8), "retain": questions(12)}, 0.25, seed=0)
    assert [len(part) for part in (*parts.validation.values(), *parts.test.values())] == [8, 3, 8, 9]
    assert parts.names == ("validation", "test")
    assert divide_rows({"forget": questions(1), "retain": questions(1)}, 0.25, seed=0).test["retain"] == []


def test_rows_that_ask_the_same_are_one_question() -> None:
    rows = [Row(i, f"What is {i % 6}?", f"{i}") for i in range(18)]
    parts = divide_rows({"forget": questions(2), "retain": rows}, None, seed=0)
    assert parts.validation["retain"] == parts.test["retain"] == rows  # six questions


def test_one_long_text_is_many_passages() -> None:
    (whole,) = texts(24 * PASSAGE)
    (kept,) = texts(20 * PASSAGE)
    parts = divide_rows({"forget": [whole], "retain": [kept], "holdout": texts(PASSAGE * 2)}, None, seed=0)
    assert [len(part["forget"]) for part in (parts.validation, parts.test)] == [24, 24]
    assert [len(part["retain"]) for part in (parts.validation, parts.test)] == [10, 10]
    assert [len(part["holdout"]) for part in (parts.validation, parts.test)] == [2, 2]
    passages = parts.test["forget"]
    assert "".join(row.text for row in passages) == whole.text
    assert {len(row.text.split()) for row in passages} == {PASSAGE}
    # Few and short: whole. Many, however long: as they are.
    short = texts(20, PASSAGE)
    assert divide_rows({"forget": short}, None, seed=0).test["forget"] == short
    many = texts(*[3 * PASSAGE] * FEWEST)
    assert divide_rows({"forget": many}, None, seed=0).test["forget"] == many


def test_a_book_is_not_scored_from_end_to_end() -> None:
    for limit, count in ((None, 120), (20, 20)):
        parts = divide_rows({"forget": texts(500 * PASSAGE)}, None, 0, limit)
        assert [len(part["forget"]) for part in (parts.validation, parts.test)] == [count, count]
