"""Rows of one's own, divided into those that are chosen on and those that are scored: how many, and which are whole."""

from __future__ import annotations

import pytest

from msa_lite.choose.division import FEWEST, PASSAGE, divide_rows
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
        (8, 8, 8, "all"),
        (11, 11, 11, "all"),
        (12, 6, 6, "test"),
        (24, 12, 12, "test"),
        (25, 12, 13, "test"),
        (40, 20, 20, "test"),
        (60, 30, 30, "test"),
        (400, 30, 370, "test"),
    ],
)
def test_half_of_few_rows_and_no_more_than_thirty_are_chosen_on(
    count: int, chosen_on: int, scored: int, name: str
) -> None:
    parts = divide_rows({"forget": questions(count), "holdout": questions(5)}, None, seed=0)
    validation, test = ([row.index for row in part["forget"]] for part in (parts.validation, parts.test))
    assert (len(validation), len(test)) == (chosen_on, scored)
    assert {*validation, *test} == {*range(count)}
    assert name == "all" or not {*validation} & {*test}
    assert parts.names[1] == name
    assert len(parts.validation["holdout"]) == len(parts.test["holdout"]) == 5


@pytest.mark.parametrize(
    ("forget", "retain", "chosen_on", "scored", "names"),
    [
        (24, 200, (12, 30), (12, 170), ("validation", "test")),
        (24, 5, (12, 5), (12, 5), ("validation", "test")),  # so few are watched whole
        (8, 200, (8, 30), (8, 200), ("validation", "all")),
        (8, 5, (8, 5), (8, 5), ("all", "all")),
    ],
)
def test_each_set_is_divided_by_itself(
    forget: int, retain: int, chosen_on: tuple[int, int], scored: tuple[int, int], names: tuple[str, str]
) -> None:
    parts = divide_rows({"forget": questions(forget), "retain": questions(retain)}, None, seed=0)
    assert tuple(map(len, parts.validation.values())) == chosen_on
    assert tuple(map(len, parts.test.values())) == scored
    assert parts.names == names


def test_a_share_is_what_it_says() -> None:
    parts = divide_rows({"forget": questions(8), "retain": questions(12)}, 0.25, seed=0)
    assert [len(part) for part in (*parts.validation.values(), *parts.test.values())] == [2, 3, 6, 9]
    assert parts.names == ("validation", "test")
    assert divide_rows({"forget": questions(1)}, 0.25, seed=0).test == {"forget": []}


def test_rows_that_ask_the_same_are_one_question() -> None:
    rows = [Row(i, f"What is {i % 6}?", f"{i}") for i in range(18)]
    parts = divide_rows({"forget": rows}, None, seed=0)
    assert parts.validation == parts.test == {"forget": rows}  # six questions


def test_one_long_text_is_many_passages() -> None:
    (whole,) = texts(24 * PASSAGE)
    parts = divide_rows({"forget": [whole], "retain": questions(40), "holdout": texts(PASSAGE * 2)}, None, seed=0)
    assert [len(part["forget"]) for part in (parts.validation, parts.test)] == [12, 12]
    assert [len(part["holdout"]) for part in (parts.validation, parts.test)] == [2, 2]
    passages = sorted([*parts.validation["forget"], *parts.test["forget"]], key=lambda row: row.index)
    assert "".join(row.text for row in passages) == whole.text
    assert {len(row.text.split()) for row in passages} == {PASSAGE}
    # Few and short: whole, on both sides. Many, however long: as they are.
    short = texts(20, PASSAGE)
    assert divide_rows({"forget": short}, None, seed=0).test["forget"] == short
    many = texts(*[3 * PASSAGE] * FEWEST)
    parts = divide_rows({"forget": many}, None, seed=0)
    assert [*parts.validation["forget"], *parts.test["forget"]] != many
    assert {row.text for part in (parts.validation, parts.test) for row in part["forget"]} == {r.text for r in many}


def test_a_book_is_not_scored_from_end_to_end() -> None:
    for limit, counts in ((None, [30, 90]), (20, [10, 10])):
        parts = divide_rows({"forget": texts(500 * PASSAGE)}, None, 0, limit)
        assert [len(part["forget"]) for part in (parts.validation, parts.test)] == counts
