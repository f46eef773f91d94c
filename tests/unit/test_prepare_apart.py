"""Rows that stand in two sets, and rows that stand twice in one."""

from __future__ import annotations

import pytest

from msa_lite.data import Row
from msa_lite.errors import DataError
from msa_lite.pipeline.prepare.questions import count_repeated, each_once, separate_sets

A, B, C, D = (Row(i, f"Question {name}?", f"Answer {name}.") for i, name in enumerate("ABCD"))
TURN = Row(4, "And then?", "Yes.", earlier=(("Question A?", "Answer A."),))
TEXT = Row(5, text="Once upon a time.")


def same(row: Row) -> Row:
    """The row as another file has it: with other capitals and signs, in another place, with another answer."""
    earlier = tuple((question.lower(), answer) for question, answer in row.earlier)
    return Row(99, row.question.upper(), f"Not: {row.answer}" if row.answer else "", row.text.upper(), earlier)


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
