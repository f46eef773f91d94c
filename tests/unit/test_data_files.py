"""Files of rows: whatever they hold, they are read or refused with the row's number, and no process ends by it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_lite.data import DataSource, load_rows
from msa_lite.data.sources import check_file, load_table
from msa_lite.errors import DataError, MsaError, UsageError

GOOD = b'{"question": "Where?", "answer": "There."}'
DEEP = b'{"question": ' + b"[" * 100_000 + b"]" * 100_000 + b', "answer": "b"}'
NO_ROWS = [
    b"null", b"5", b"true", b'"text"', b"[1]", b"[null]", DEEP, b"[" * 100_000, b'{"question": ' + b"9" * 5000 + b"}",
    b'{"question": "\\ud800"}', b'{"question": "a\0b"}', b'{"question": "\xff"}', b"{", b"\x1f\x8b", b"{} {} null",
]  # fmt: skip
HEAD = b"question,answer\n"


def write(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


@pytest.mark.parametrize("bad", NO_ROWS, ids=lambda bad: ascii(bad[:30]))
@pytest.mark.parametrize(("place", "before"), [("file", 0), ("folder", 1)])
def test_what_is_no_row_is_refused_with_its_number(bad: bytes, before: int, place: str, tmp_path: Path) -> None:
    file = write(tmp_path, "rows.jsonl", b"".join([GOOD + b"\n"] * before) + bad + b"\n")
    with pytest.raises(DataError, match=r"rows.jsonl: (row \d+ \(line \d+\): |not JSON)") as caught:
        load_rows(DataSource(file if place == "file" else str(tmp_path)))
    if before and not bad.startswith(b"{} "):
        assert f"row {before} (line {before + 1}): " in str(caught.value)


@pytest.mark.parametrize("items", [[None], [1], [{"question": "a", "answer": "b"}, None], [[1]], ["a", 1], [{}, "a"]])
def test_a_list_of_anything_but_rows_is_refused(items: list[Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row \d \(line 1\): "):
        load_rows(DataSource(write(tmp_path, "rows.json", json.dumps(items).encode())))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.csv", HEAD + b"a,b\na\0,b\n", "line 3: a zero byte"),
        ("rows.csv", HEAD + b"a,\xe9\n", r"line 2: not UTF-8 text \(byte 0xe9.*iconv -f WINDOWS-1252"),
        ("rows.csv", HEAD + b"a,b\n\nc,d,e\n", r"row 1 \(line 4\): 3 cells for 2 columns.* a comma in double quotes"),
        ("rows.csv", b"question;answer\na;b;c\n", r"row 0 \(line 2\): .* a semicolon in double quotes"),
        ("rows.csv", HEAD + b'a,"b\nc,d\n', r"row 0 \(line \d\): not CSV"),
        ("rows.csv", HEAD + b"a\nb,c\n", r"row 0 \(line 2\), column 'answer': None"),
        ("rows.csv", b"question,answer,answer\na,b,c\n", "column 'answer' stands twice"),
        ("rows.csv", b"question^answer\na^b\n", r"there are 'question\^answer'.*none of , ; \| and tabs"),
        ("rows.jsonl", b"\n\n" + GOOD + b'\n\n{"question": "a\n', r"row 1 \(line 5\): not JSON"),
        ("rows.jsonl", GOOD + b'\n{\n"question": 1\n"answer": 2}', r"row 1 \(line 2\): not JSON .* in line 4"),
        ("rows.jsonl", b"{\n}\n{}{\n}\n5", r"row 3 \(line 5\): 5 is no row"),
        ("rows.jsonl", "{}\n5".encode("utf-16"), r"row 1 \(line 2\): 5 is no row"),
        ("rows.json", b'[{"question": "\n\xe9"}]', "line 2: not UTF-8 text"),
        ("rows.jsonl", b"\xff\xfe" + GOOD[:41], "begins as UTF-16"),
        (
            "rows.jsonl",
            GOOD + b'\n{"question": "\xe9"}',
            r"row 1 \(line 2\): not UTF-8 .*byte 0xe9.*iconv -f WINDOWS-1252",
        ),
        ("rows.jsonl", GOOD.decode().encode("utf-16-le"), r"row 0 \(line 1\): a zero byte.*iconv -f UTF-16LE"),
        ("rows.csv", HEAD.decode().encode("utf-16-le"), r"line 1: a zero byte.*iconv -f UTF-16LE"),
        ("rows.jsonl", b'\n["a", "b"]\n["c", "d"]', r'row 0 \(line 2\): \["a", "b"\] is no row'),
        ("rows.json", b'[\n{},\n{},\n"a"\n]', r'row 2 \(line 4\): "a" is no row'),
        ("rows.jsonl", b" \n", "the data set is empty"),
        ("rows.txt", b"one\ntwo\0", "line 2: a zero byte"),
        ("rows.txt", b"one\n\xff", "line 2: not UTF-8"),
        ("rows.txt", b"one\n\xe2\x82", "line 2: not UTF-8"),
        ("rows.parquet", b"garbage" * 9, "not a parquet file"),
        ("rows.parquet", b"PAR1" + b"\x15" * 99 + (9999).to_bytes(4, "little") + b"PAR1", "cut off"),
        ("rows.jsonl", gzip.compress(GOOD, mtime=0), r"row 0 \(line 1\): not UTF-8"),
    ],
)
def test_text_that_is_none_is_refused(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        load_rows(DataSource(write(tmp_path, name, content), "text" if name.endswith("txt") else "qa"))


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(MsaError) as caught:
        load_rows(DataSource(str(tmp_path)))
    assert caught.value.exit_code == 3
    with pytest.raises(UsageError):
        load_rows(DataSource(str(tmp_path / "rows.jsonl")))
    (tmp_path / "rows.jsonl").unlink()
    (tmp_path / "rows.jsonl").symlink_to("/dev/zero")
    with pytest.raises(DataError):
        load_rows(DataSource(str(tmp_path)))


@pytest.mark.parametrize("name", ["~nobody/x.jsonl", "a" * 300 + ".jsonl", "a\0b.jsonl", "\ud800.jsonl"])
def test_names_that_can_be_no_path_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        load_rows(DataSource(name))


def test_a_card_with_aliases_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", GOOD)
    write(tmp_path, "README.md", b"---\na: &a [x, x]\nb: [*a, *a]\n---\n")
    with pytest.raises(DataError, match="aliases"):
        load_rows(DataSource(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "count"),
    [
        ("rows.jsonl", GOOD + b"\n\n" + GOOD, 2),
        ("rows.jsonl", GOOD + b"\r\n" + GOOD + b"\r\n", 2),
        ("rows.jsonl", b"\xef\xbb\xbf" + GOOD, 1),
        ("rows.jsonl", GOOD + b" " + GOOD, 2),
        ("rows.json", b"[" + GOOD + b"," + GOOD + b"]", 2),
        ("rows.json", b"\n [" + GOOD + b"]", 1),
        ("rows.json", json.dumps(json.loads(GOOD), indent=1).encode() * 3, 3),
        ("rows.csv", HEAD + b'"a\nb",c\n', 1),
        ("rows.csv", b"a|b|c|d,question,answer\nx,y,z\n", 1),
        ("rows.tsv", b"question\tanswer\nx, y\tz\n", 1),
        ("rows.ndjson", GOOD + b"\n" + GOOD, 2),
        ("rows.jsonl", b'{"question": "{[{[", "answer": "' + b"[" * 300 + b'"}', 1),
        ("rows.jsonl", '{"question": "\\u00e9 é", "answer": "\\ud83d\\ude00"}'.encode(), 1),
    ],
)
def test_sound_files_of_every_form_are_read(name: str, content: bytes, count: int, tmp_path: Path) -> None:
    assert len(load_rows(DataSource(write(tmp_path, name, content)))) == count


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(["question", "answer", "x"]), part),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines=st.lists(JSON.map(json.dumps).map(str.encode) | st.binary(max_size=9) | st.just(GOOD), max_size=4))
def test_any_lines_are_rows_or_refused(lines: list[bytes], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(lines))
    try:
        check_file(file)
    except DataError:
        return
    if file.read_bytes().lstrip().startswith(b"["):  # a list of rows, over all lines
        assert all(isinstance(row, dict | str) for row in json.loads(file.read_bytes()))
        return
    values = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line.strip()]
    assert all(isinstance(value, dict) for value in values)


@pytest.mark.parametrize(
    "cells",
    [("007", "1.50"), ("1e5", "true"), ("NA", "null"), ("None", "nan"), ("1999-01-01", "12:30"), (" a ", "-")],
)
@pytest.mark.parametrize("others", [[], [("1.0", "")]])
def test_cells_of_csv_files_are_texts_as_they_are_written(
    cells: tuple[str, str], others: list[tuple[str, str]], tmp_path: Path
) -> None:
    lines = ["question,answer", *(",".join(row) for row in (cells, *others))]
    table = load_table(DataSource(write(tmp_path, "rows.csv", "\n".join(lines).encode())))
    assert [(row["question"], row["answer"]) for row in table] == [cells, *others]


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n\n"])
@pytest.mark.parametrize("row", [b"who,me,you", b"who,,"])
def test_rows_with_more_cells_than_columns_are_not_shifted(start: bytes, row: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, "rows.csv", start + HEAD + row + b"\na,b\n")
    with pytest.raises(DataError, match=r"row 0 \(line \d\): 3 cells for 2 columns"):
        load_table(DataSource(path))


@pytest.mark.parametrize("text", ["1999-01-31", "1999-01-31 10:00:00Z", "10:30", "1e5"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "chat.jsonl"])
def test_texts_that_look_like_dates_or_numbers_stay_as_they_are(name: str, text: str, tmp_path: Path) -> None:
    rows: list[Any] = [{"question": "When?", "answer": text}] * 2
    if name == "chat.jsonl":
        turns = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": text}]
        rows = [{"messages": turns}] * 2
    lines = json.dumps(rows) if name == "rows.json" else "\n".join(map(json.dumps, rows))
    path = write(tmp_path, name, lines.encode())
    assert [(row.question, row.answer) for row in load_rows(DataSource(path))] == [("When?", text)] * 2


def test_long_texts_in_csv_files_are_read(tmp_path: Path) -> None:
    text = "word, " * 50_000
    [row] = load_table(DataSource(write(tmp_path, "rows.csv", f'question,answer\nwho,"{text}"\n'.encode())))
    assert row["answer"] == text
