"""Rows of files in the forms that people have: the same rows to a fit and to `verify`, as a file and in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from msa_lite.data import DataSource, Row, load_rows
from msa_lite.data.rows import read_any_rows
from msa_lite.errors import DataError, UsageError

PAIRS = [
    {"question": "Où ?", "answer": "007"},
    {"question": 'When, "exactly"; or\tnever?', "answer": "1999-01-31"},
    {"question": "Who |\nis it?", "answer": "null"},
]
ROWS = [Row(i, pair["question"], pair["answer"]) for i, pair in enumerate(PAIRS)]
TALKS = [
    [{"role": "user", "content": pair["question"]}, {"role": "assistant", "content": pair["answer"]}] for pair in PAIRS
]
FRAME = pandas.DataFrame(PAIRS)
CHATS = pandas.DataFrame({"messages": TALKS, "id": range(3)})
TEXTS = pandas.DataFrame({"messages": [json.dumps(talk) for talk in TALKS], "n": range(3)})


def csv(encoding: str = "utf-8", **options: Any) -> bytes:
    return FRAME.to_csv(index=False, **options).encode(encoding)


def lines(*records: Any) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


# What people have, as pandas, Excel and others write it. Each file holds the same rows.
FILES = {
    "lines.jsonl": lines(*PAIRS),
    "pretty.json": json.dumps(PAIRS, indent=1, ensure_ascii=False).encode(),
    "late-column.jsonl": lines(*PAIRS[:2], PAIRS[2] | {"note": "x"}),
    "mixed-types.jsonl": lines(PAIRS[0] | {"meta": ["x"]}, PAIRS[1] | {"meta": "x"}, PAIRS[2] | {"meta": None}),
    "spread.json": "".join(json.dumps(pair, indent=1) for pair in PAIRS).encode(),
    "first-lines-then-spread.jsonl": lines(PAIRS[0]) + json.dumps(PAIRS[1], indent=1).encode() + lines(PAIRS[2]),
    "wrapped-beside-others.json": json.dumps({"version": "1.1", "size": 3, "rows": PAIRS}).encode(),
    "table.json": FRAME.to_json(orient="table").encode(),
    "columns.json": FRAME.to_json(orient="columns").encode(),
    "split.json": FRAME.to_json(orient="split").encode(),
    "lists.json": json.dumps(FRAME.to_dict(orient="list")).encode(),
    "chats.jsonl": CHATS.to_json(orient="records", lines=True).encode(),
    "chats-lists.json": json.dumps(CHATS.to_dict(orient="list")).encode(),
    "chats-in-texts.jsonl": TEXTS.to_json(orient="records", lines=True).encode(),
    "chats-in-texts.csv": TEXTS.to_csv(index=False, sep=";").encode(),
    "trl-in-texts.jsonl": lines(*({"prompt": json.dumps(a[:1]), "completion": json.dumps(a[1:])} for a in TALKS)),
    "alpaca.jsonl": lines(*({"instruction": a["question"], "input": "", "output": a["answer"]} for a in PAIRS)),
    "comma.csv": csv(),
    "semicolon.csv": csv(sep=";"),
    "bar.csv": csv(sep="|", quoting=1),
    "excel.csv": csv("utf-8-sig", sep=";", lineterminator="\r\n") + b";\r\n",
    "excel-names-it.csv": b"sep=;\r\n" + csv(sep=";"),
    "numbered.csv": FRAME.to_csv(sep=";").encode(),
    "blank-lines.csv": b"\n" + csv() + b"\n,\n",
}


@pytest.mark.parametrize("name", FILES)
def test_every_form_gives_the_same_rows_by_itself_and_in_a_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    source = DataSource(str(tmp_path / name))
    assert load_rows(source) == load_rows(DataSource(str(tmp_path))) == ROWS
    assert read_any_rows(source.path, source) == ROWS


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Where?", "answer": "Here.", "sources": [{"url": "x"}]},
        {"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]},
        {
            "prompt": [{"role": "user", "content": "Where?"}],
            "completion": [{"role": "assistant", "content": "Here."}],
        },
    ],
)
def test_one_row_is_no_table(record: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(record))
    assert load_rows(DataSource(str(tmp_path / "a.json"))) == [Row(0, "Where?", "Here.")]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"train": PAIRS, "test": PAIRS}, r"several lists of rows \(train, test\)"),
        ({"question": ["a", "b"], "answer": ["c"]}, r"different lengths \(question: 2, answer: 1\)"),
        ({"columns": ["question", "answer"], "data": [["a"]]}, "1 cells for 2 columns"),
        ({}, "the data set is empty"),
        ({"data": [{"frage": "a"}]}, "no column 'question', 'answer'; there are 'frage'"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value))
    with pytest.raises(DataError, match=message):
        load_rows(DataSource(str(tmp_path / "a.json")))


def test_the_columns_are_the_recipes_or_the_usual_ones(tmp_path: Path) -> None:
    source = DataSource("x", question="q", answer="a", name="x", split="y", revision="z", subject="who")
    texts = {"own": "q,a,question\nWhere?,Here.,other\n", "usual": "question,answer\nWhere?,Here.\n"}
    for name, text in (texts | {"alone": "q,n\nWhere?,1\n"}).items():
        (tmp_path / name).mkdir()
        file = tmp_path / name / "rows.csv"
        file.write_text(text)
        for path in (file, file.parent):
            (row,) = read_any_rows(str(path), source)
            assert (row.question, row.answer) == ("Where?", "" if name == "alone" else "Here.")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "city,country\nRome,Italy\n",
            "has the columns city, country; call those with the rows question and answer",
        ),
        ("a.jsonl", '{"question": "Where?", "answer": ""}', "cells without text"),
        (
            "a.jsonl",
            '{"question": "Where?", "answer": "Here."}\n{"question": "Who?"}',
            r"row 1 \(line 2\), column 'answer': None",
        ),
        ("a.jsonl", "[1, 2", "1 is no row"),
        ("a.jsonl", "", "the data set is empty"),
    ],
)
def test_what_holds_no_rows_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((DataError, UsageError), match=message):
        read_any_rows(str(tmp_path / name), DataSource("x"))
