"""Rows of files as a plain installation reads them: the same rows as `datasets` gives, where it is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from msa_lite.data import DataSource, load_rows
from msa_lite.data.rows import read_any_rows
from msa_lite.errors import DataError, UsageError

PAIRS = [{"question": "Où ?", "answer": "007"}, {"question": 'When, "exactly"?', "answer": "1999-01-31"}]
TURNS = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
FILES = {
    "a.jsonl": "".join(json.dumps(row) + "\n" for row in PAIRS),
    "b.json": "\ufeff" + json.dumps(PAIRS, ensure_ascii=False, indent=1),
    "c.csv": '\ufeffquestion,answer\nOù ?,007\n\n"When, ""exactly""?",1999-01-31\n',
    "d.jsonl": json.dumps({"messages": [*TURNS, *TURNS]}),
    "e.jsonl": json.dumps({"instruction": "Where?", "input": "In Rome.", "output": "Here."}),
    "f.jsonl": json.dumps({"prompt": "Where?", "completion": "Here.", "id": 3}),
    "g.json": json.dumps({"question": "Where?", "answer": "Here."}) + json.dumps({"question": "Who?", "answer": "I."}),
}


@pytest.mark.parametrize("name", FILES)
def test_the_rows_are_those_of_datasets(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    source = DataSource(str(tmp_path / name))
    assert read_any_rows(source.path, source) == load_rows(source)


def test_texts_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "b.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    for name in ("a.txt", "b.jsonl"):
        source = DataSource(str(tmp_path / name), "text")
        assert read_any_rows(source.path, source) == load_rows(source)
        assert read_any_rows(source.path, DataSource("x")) == load_rows(source), "whatever the run's format is"


def test_the_columns_are_the_recipes_or_the_usual_ones(tmp_path: Path) -> None:
    source = DataSource("x", question="q", answer="a")
    (tmp_path / "own.csv").write_text("q,a,question\nWhere?,Here.,other\n")
    (tmp_path / "usual.csv").write_text("question,answer\nWhere?,Here.\n")
    (tmp_path / "alone.csv").write_text("q,n\nWhere?,1\n")
    for name, answer in {"own.csv": "Here.", "usual.csv": "Here.", "alone.csv": ""}.items():
        (row,) = read_any_rows(str(tmp_path / name), source)
        assert (row.question, row.answer) == ("Where?", answer)
    assert read_any_rows(str(tmp_path / "usual.csv"), replace(source, name="x", split="y", revision="z"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "city,country\nRome,Italy\n",
            "has the columns city, country; call those with the rows question and answer",
        ),
        ("a.jsonl", '{"question": "Where?", "answer": ""}', "cells without text"),
        ("a.jsonl", '{"question": "Where?", "answer": "Here."}\n{"question": "Who?"}', "row 1, column 'answer': None"),
        ("a.jsonl", "[1, 2", "not JSON"),
        ("a.jsonl", "", "the data set is empty"),
        ("a.csv", "question,answer\n", "the data set is empty"),
    ],
)
def test_what_holds_no_rows_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((DataError, UsageError), match=message):
        read_any_rows(str(tmp_path / name), DataSource("x"))
