"""Forms of questions with answers that are known by their columns, and what is wrong with those that are not."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import DataSource, Row, load_rows, split_rows
from msa_lite.errors import DataError

OPENAI = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "Here."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "Now."},
]
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": NAMES[m["role"]], "value": m["content"]} for m in OPENAI]
TURNS = [
    Row(0, "Where?", "Here.", system="Be brief."),
    Row(1, "When?", "Now.", earlier=(("Where?", "Here."),), system="Be brief."),
]


def source(folder: Path, *records: dict[str, Any], **options: Any) -> DataSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataSource(str(path), **options)


@pytest.mark.parametrize(
    ("record", "rows"),
    [
        ({"messages": OPENAI}, TURNS),
        ({"conversations": SHAREGPT, "id": "x"}, TURNS),
        ({"prompt": OPENAI[:2], "completion": OPENAI[2:3]}, TURNS[:1]),
        ({"prompt": "Where?", "completion": " Here."}, [Row(0, "Where?", " Here.")]),
        ({"instruction": "Translate.", "input": "ici", "output": "here"}, [Row(0, "Translate.\n\nici", "here")]),
        ({"instruction": "Where?", "input": "", "output": "Here."}, [Row(0, "Where?", "Here.")]),
        ({"instruction": "Where?", "output": "Here."}, [Row(0, "Where?", "Here.")]),
        ({"question": "Where?", "answer": "Here.", "messages": OPENAI}, [Row(0, "Where?", "Here.")]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Where?"}]}, OPENAI[2]]},
            [Row(0, "Where?", "Here.")],
        ),
    ],
    ids=["openai", "sharegpt", "trl", "pair", "alpaca", "empty", "no-input", "both", "parts"],
)
def test_rows_are_known_by_their_columns(tmp_path: Path, record: dict[str, Any], rows: list[Row]) -> None:
    assert load_rows(source(tmp_path, record)) == rows


def test_turns_of_many_conversations_have_numbers_of_their_own(tmp_path: Path) -> None:
    rows = load_rows(source(tmp_path, {"chat": OPENAI}, {"chat": OPENAI[1:3]}, {"chat": OPENAI}, messages="chat"))
    assert [row.index for row in rows] == [0, 1, 2, 3, 4]
    assert [row.question for row in rows] == ["Where?", "When?", "Where?", "Where?", "When?"]


def test_the_turns_of_a_conversation_stay_on_one_side_of_a_split() -> None:
    rows = [
        Row(2 * i + turn, "Why?" if turn else f"{i}?", "So.", earlier=((f"{i}?", "So."),) * turn)
        for i in range(20)
        for turn in (0, 1)
    ]
    validation, test = split_rows(rows, 0.15, seed=0)
    assert (len(validation), len(test)) == (6, 34)
    assert not {row.index // 2 for row in validation} & {row.index // 2 for row in test}


def test_the_identity_of_a_plain_row_is_what_it_was_and_that_of_a_turn_has_all_that_is_shown() -> None:
    from msa_lite.io.files.writing import digest

    assert Row(0, "Where?", "Here.").sha256 == digest(["Where?", "Here.", ""])
    assert len({row.sha256 for row in [*TURNS, Row(0, "Where?", "Here."), Row(0, "When?", "Now.")]}) == 4


def test_answers_of_weight_0_are_shown_but_are_no_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weighted = [*OPENAI[:2], OPENAI[2] | {"weight": 0}, OPENAI[3], OPENAI[4] | {"weight": 1}]
    with caplog.at_level(logging.WARNING, logger="msa_lite"):
        assert load_rows(source(tmp_path, {"messages": weighted})) == [replace(TURNS[1], index=0)]
    assert "1 answers have weight 0" in caplog.text
    with pytest.raises(DataError, match="all answers have weight 0"):
        load_rows(source(tmp_path, {"messages": weighted[:3]}))


def test_a_question_without_an_answer_at_the_end_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="msa_lite"):
        assert load_rows(source(tmp_path, {"messages": OPENAI[:4]})) == TURNS[:1]
    assert "1 conversations end in a question, which is left out" in caplog.text


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (OPENAI[2:], r"message 0: expected a message of the user, got one of the assistant"),
        ([OPENAI[1], *OPENAI[1:]], r"message 1: expected a message of the assistant, got one of the user"),
        ([*OPENAI[1:3], OPENAI[0]], r"message 2: a system message comes first"),
        ([{"role": "critic", "content": "x"}], r"message 0: role 'critic' is not handled, only system,"),
        ([OPENAI[1], {"role": "tool", "content": "x"}], r"message 1: expected a message of the assistant, got one of"),
        ([OPENAI[1], {"role": "assistant", "content": " "}], r"message 1: its content is no text but ' '"),
        ([OPENAI[1], {"role": "assistant", "content": [{"type": "text", "text": None}]}], "a part .* has no text"),
        (OPENAI[:2], "no message of the assistant, so there is nothing to learn"),
        ("Where?", "expected a list of messages, got 'Where\\?'"),
        (["Where?", OPENAI[0]], "'Where\\?' is no message with a role and content"),
        (str(OPENAI), "expected a list of messages, got .*Python's form: write it with json.dumps"),
    ],
)
def test_a_conversation_that_is_none_is_told_with_its_row(tmp_path: Path, messages: Any, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(DataError, match=rf"row 0 \(line 1\), column 'messages'.*{words}"):
        load_rows(DataSource(str(path)))


def test_all_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    broken = [{"instruction": "Where?", "input": "", "output": text} for text in ("Here.", "", " ")]
    with pytest.raises(DataError) as caught:
        load_rows(source(tmp_path, *broken))
    assert "row 1 (line 2), column 'output': ''" in str(caught.value)
    assert "row 2 (line 3), column 'output': ' '" in str(caught.value)


def test_columns_that_are_named_are_not_guessed_around(tmp_path: Path) -> None:
    record = {"instruction": "Where?", "output": "Here.", "messages": OPENAI}
    with pytest.raises(
        DataError, match=r"no column 'frage'.*Name them in `columns`, as \{question: instruction, answer"
    ):
        load_rows(source(tmp_path, record, question="frage"))
    with pytest.raises(DataError, match=r"no column 'message' \(did you mean 'messages'\?\)"):
        load_rows(source(tmp_path, record, messages="message"))
