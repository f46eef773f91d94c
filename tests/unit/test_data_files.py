"""Files of rows: whatever they hold, they are read or refused with the row's number, and no process ends by it."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_lite.data import DataSource, load_rows, sources
from msa_lite.data.rows import read_any_rows, stream_texts
from msa_lite.data.sources import load_table, stream_table
from msa_lite.errors import DataError, MsaError, UsageError

GOOD = b'{"question": "Where?", "answer": "There."}'
DEEP = b'{"question": ' + b"[" * 100_000 + b"]" * 100_000 + b', "answer": "b"}'
PAIR = ("Where?", "There.")
NO_ROWS = [
    b"null", b"5", b"true", b'"text"', b"[1]", b"[null]", DEEP, b"[" * 100_000, b'{"answer": "a", "answer": "b"}',
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


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.csv", HEAD + b"a,b\na\0,b\n", "line 3: a zero byte"),
        ("rows.csv", HEAD + b"a,\xe9\n", r"line 2: not UTF-8 text \(byte 0xe9.*iconv -f WINDOWS-1252"),
        ("rows.csv", b"\xef\xbb\xbf" + HEAD + b"who,,\na,b\n", r"row 0 \(line 2\): 3 cells for 2 columns"),
        ("rows.csv", HEAD + b"a,b\n\nc,d,e\n", r"row 1 \(line 4\): 3 cells for 2 columns.* a comma in double quotes"),
        ("rows.csv", b"question;answer\na;b;c\n", r"row 0 \(line 2\): .* a semicolon in double quotes"),
        ("rows.csv", HEAD + b'a,"b\nc,d\n', r"row 0 \(line \d\): not CSV"),
        ("rows.csv", HEAD + b"a\nb,c\n", r"row 0 \(line 2\), column 'answer': None"),
        ("rows.csv", HEAD + b"a,b\rc", r"row 1 \(line 3\), column 'answer': None"),
        ("rows.csv", b"question,answer,answer\na,b,c\n", "column 'answer' stands twice"),
        ("rows.csv", b"question^answer\na^b\n", r"there are 'question\^answer'.*none of , ; \| and tabs"),
        ("rows.jsonl", b"\n\n" + GOOD + b'\n\n{"question": "a\n', r"row 1 \(line 5\): not JSON"),
        ("rows.jsonl", GOOD + b'\n{\n"question": 1\n"answer": 2}', r"row 1 \(line 2\): not JSON .* in line 4"),
        ("rows.jsonl", "{}\n5".encode("utf-16"), "is UTF-16, which is not read; .*iconv -f UTF-16 -t"),
        ("rows.json", "[{}]".encode("utf-16-be").replace(b"\0[", b"\xfe\xff\0["), "is UTF-16"),
        ("rows.json", b'[{"question": "\n\xe9"}]', "line 2: not UTF-8 text"),
        ("rows.jsonl", GOOD + b'\n{"question": "\xe9"}', r"row 1 \(line 2\): not UTF-8 .*iconv -f WINDOWS-1252"),
        ("rows.jsonl", GOOD.decode().encode("utf-16-le"), r"row 0 \(line 1\): a zero byte.*iconv -f UTF-16LE"),
        ("rows.json", b'[\n{},\n{},\n"a"\n]', r'row 2 \(line 4\): "a" is no row'),
        ("rows.jsonl", b" \n", "the data set is empty"),
        ("rows.txt", b"one\ntwo\0", "line 2: a zero byte"),
        ("rows.txt", b"one\n\xe2\x82", "line 2: not UTF-8"),
        ("rows.parquet", b"garbage" * 9, "rows.parquet: cannot be read"),
        ("rows.parquet", b"PAR1" + b"\x15" * 99 + (9999).to_bytes(4, "little") + b"PAR1", "cannot be read"),
        ("rows.jsonl.gz", b"garbage", "rows.jsonl.gz: cannot be read"),
        ("rows.jsonl.gz", gzip.compress(GOOD * 99, mtime=0)[:40], "cannot be read"),
        ("rows.json", b"[{}, {} {}]", r"row 1 \(line 1\): not JSON"),
        ("rows.json", b'[{},\n{"answer": 1, "answer": 2}]', r"row 1 \(line 2\): not JSON .*'answer' stands twice"),
        ("rows.json", b'{"question": {"0": "a"}, "answer": {"1": "b"}}', r"row 0, column 'answer': None"),
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


def test_a_card_with_aliases_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", GOOD)
    write(tmp_path, "README.md", b"---\na: &a [x, x]\nb: [*a, *a]\n---\n")
    with pytest.raises(DataError, match="aliases"):
        load_rows(DataSource(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("rows.jsonl", GOOD + b"\n\n" + GOOD, [PAIR] * 2),
        ("rows.jsonl", GOOD + b"\r\n" + GOOD + b"\r\n", [PAIR] * 2),
        ("rows.jsonl", b"\xef\xbb\xbf" + GOOD, [PAIR]),
        ("rows.jsonl", GOOD + b" " + GOOD, [PAIR] * 2),
        ("rows.json", b"[" + GOOD + b"," + GOOD + b"]", [PAIR] * 2),
        ("rows.json", json.dumps(json.loads(GOOD), indent=1).encode() * 3, [PAIR] * 3),
        ("rows.json", b'{"question": {"0": "a", "1": "b"}, "answer": {"1": "d", "0": "c"}}', ["ac", "bd"]),
        ("rows.csv", HEAD + b'"a\nb",c\n', [("a\nb", "c")]),
        ("rows.csv", b"a|b|c|d,question,answer\nx,y,z\n", ["yz"]),
        ("rows.csv", HEAD.replace(b"\n", b"\r") + b"a,b\rc,d", ["ab", "cd"]),
        ("rows.tsv", b"question\tanswer\nx, y\tz\n", [("x, y", "z")]),
        ("rows.jsonl", b'{"question": "{[{[", "answer": "' + b"[" * 300 + b'"}', [("{[{[", "[" * 300)]),
        ("rows.jsonl", '{"question": "\\u00e9 é", "answer": "\\ud83d\\ude00"}'.encode(), [("é é", "😀")]),
    ],
)
def test_sound_files_of_every_form_are_read(name: str, content: bytes, wanted: list[Any], tmp_path: Path) -> None:
    file = write(tmp_path, name, content)
    for path in (file, str(tmp_path)):
        assert [(row.question, row.answer) for row in load_rows(DataSource(path))] == list(map(tuple, wanted))


WORDS = [
    "02116", "+4915112345670", "1.10", "TRUE", "1E5", "NA", "null", "nan", "inf", "-Infinity", "2024-01-05", "1:30",
    " a ", "two\nlines", "two\r\nlines", "old\rMac", '"', '""', "a, b; c|d\te", "\u2028", "{}", "[1]", "#", "\ufeff",
    '{"from": "Rome", "to": "Oslo"}', '[{"role": "x"}]', '{"a": NaN}',
]  # fmt: skip
CELLS = st.sampled_from(WORDS) | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9)
NUMBERS = st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
FULL = CELLS.filter(str.strip)
MARKS = {"csv": ",", "tsv": "\t", "semicolon.csv": ";", "bar.csv": "|", "csv.gz": ","}
COLUMNS = ("question", "answer", "note")


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    table=st.lists(st.tuples(FULL, FULL | NUMBERS, CELLS), min_size=1, max_size=5),
    columns=st.permutations(COLUMNS),
    ending=st.sampled_from(["jsonl", "json", "jsonl.gz", "parquet", *MARKS]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_a_file_and_a_folder_of_it_are_read_as_the_standard_library_reads_them(
    table: list[tuple[Any, ...]], columns: list[str], ending: str, quoting: Any, tmp_path: Path
) -> None:
    records = [{key: dict(zip(COLUMNS, cells, strict=True))[key] for key in columns} for cells in table]
    texts = [{key: str(value) for key, value in record.items()} for record in records]
    folder, text = Path(tempfile.mkdtemp(dir=tmp_path)), io.StringIO(newline="")
    file = folder / f"train.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(texts), file)
    elif mark := MARKS.get(ending):
        writer = csv.DictWriter(text, columns, delimiter=mark, quoting=quoting)
        writer.writeheader()
        writer.writerows(texts)
        texts = [*csv.DictReader(io.StringIO(text.getvalue(), newline=""), delimiter=mark)]
    else:
        text.write(json.dumps(records) if ending == "json" else "\n".join(map(json.dumps, records)))
    if ending != "parquet":
        content = text.getvalue().encode()
        file.write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    wanted = [(record["question"], record["answer"]) for record in texts]
    source = DataSource(str(file))
    for rows in (load_rows(source), load_rows(DataSource(str(folder))), read_any_rows(source.path, source)):
        assert [(row.question, row.answer) for row in rows] == wanted
    assert [*stream_texts(replace(source, format="text", text="answer"))] == [answer for _, answer in wanted]


@pytest.mark.parametrize(
    "number", ["1.10", "1E5", "-0", "-0.0", "1e999", "3.0", "9223372036854775808", "0.1e-7", "0", "-" + "9" * 5000]
)
def test_numbers_of_json_are_as_they_are_written(number: str, tmp_path: Path) -> None:
    for name, text in {"a.jsonl": "{%s}\n{%s}", "a.json": "[{%s},\n{%s}]"}.items():
        cells = f'"question": {number}, "answer": {number}, "other": "\\u00e9"'
        rows = load_rows(DataSource(write(tmp_path, name, (text % (cells, cells)).encode())))
        assert [(row.question, row.answer) for row in rows] == [(number, number)] * 2


NO_TEXT = ["NaN", "Infinity", "-Infinity", "null", "[1]", '{"a": "b"}', '""', '" "']


@pytest.mark.parametrize("cell", NO_TEXT)
@pytest.mark.parametrize("column", ["question", "answer", "instruction", "input", "output", "text", "subject", "who"])
def test_what_is_no_text_is_refused_in_every_column_that_is_read(column: str, cell: str, tmp_path: Path) -> None:
    pair = {"instruction": "a", "output": "b", "input": "c"} if column in ("instruction", "input", "output") else None
    good: dict[str, Any] = (pair or {"question": "a", "answer": "b", "text": "c"}) | {column: "d"}
    bad = json.dumps(good | {column: "CELL"}).replace('"CELL"', cell)
    file = write(tmp_path, "rows.jsonl", f"{json.dumps(good)}\n{bad}\n".encode())
    source = DataSource(file, "text" if column == "text" else "qa", subject="who" if column == "who" else None)
    may_be_empty = column in ("subject", "who", "input", "instruction") and cell in ("null", '""', '" "')
    is_no_name = column == "subject" and cell[0] in "[{"  # and the recipe does not name the column
    if may_be_empty or is_no_name:
        assert len(load_rows(source)) == 2
        return
    for path in (file, str(tmp_path)):
        with pytest.raises(DataError, match=rf"row 1 \(line 2\), column '{column}': "):
            load_rows(DataSource(path, source.format, subject=source.subject))


@pytest.mark.parametrize("cell", ["NaN", "Infinity"])
def test_a_number_that_json_does_not_have_is_refused_in_tools(cell: str, tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": float(cell)}}]}
    talk = json.dumps({"messages": [{"role": "user", "content": "a"}, call]})
    with pytest.raises(DataError, match=rf"row 0 \(line 1\), column 'messages', message 1: {cell} in a tool"):
        load_rows(DataSource(write(tmp_path, "a.jsonl", talk.encode())))


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        (pa.array(["weir", "mill"]).dictionary_encode(), ["weir", "mill"]),
        (pa.array(["weir", "mill"], pa.string_view()), ["weir", "mill"]),
        (pa.array([2**62, -1]), [str(2**62), "-1"]),
        (pa.array([datetime.datetime(2024, 1, 5)] * 2), "of type datetime"),
        (pa.array([b"weir"] * 2), "of type bytes"),
        (pa.array([decimal.Decimal("1.10")] * 2), "of type Decimal"),
        (pa.array([1.5, float("nan")]), "1.5 is no text but of type float; write it as text"),
        (pa.array([["weir"]] * 2), "of type list"),
        (pa.array([{"a": 1}] * 2), "of type dict"),
        (pa.array([1.1] * 2, pa.float32()), "of type float"),
        (pa.array([1, 2], pa.duration("s")), "of type timedelta"),
        (pa.nulls(2), "None"),
        (pa.array([10**8] * 2, pa.int32()).cast(pa.date32()), r"no value of date32.*; write it as text"),
        (pa.array([True, False]), ["True", "False"]),
    ],
)
def test_cells_of_parquet_are_texts_whole_numbers_or_refused(column: Any, texts: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["A?", "B?"], "answer": column}), tmp_path / "rows.parquet")
    for path in (tmp_path / "rows.parquet", tmp_path):
        if isinstance(texts, list):
            assert [row.answer for row in load_rows(DataSource(str(path)))] == texts
            continue
        with pytest.raises(DataError, match=rf"row 0, column 'answer': .*{texts}"):
            load_rows(DataSource(str(path)))


def test_a_fault_in_a_folder_names_the_file(tmp_path: Path) -> None:
    write(tmp_path, "train-a.jsonl", GOOD + b"\n")
    write(tmp_path, "train-b.jsonl", b'\n{"question": "Who?"}\n')
    with pytest.raises(DataError, match=r"train-b.jsonl, row 1 \(line 2\), column 'answer': None"):
        load_rows(DataSource(str(tmp_path)))
    write(tmp_path, "train-b.jsonl", b"\n[1]")
    with pytest.raises(DataError, match=r"train-b.jsonl: row 0 \(line 2\): "):
        load_rows(DataSource(str(tmp_path)))


@pytest.mark.parametrize(("first", "second"), [("a.jsonl", "b.csv"), ("train.jsonl", "forget.jsonl")])
def test_files_of_a_folder_that_are_not_read_are_named(
    first: str, second: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources.logger, "propagate", True)
    write(tmp_path, first, GOOD)
    write(tmp_path, "test.jsonl" if first == "train.jsonl" else "c.jsonl", GOOD)
    write(tmp_path, "requirements.txt", b"torch\n")
    load_rows(DataSource(str(tmp_path)))
    assert not caplog.text
    write(tmp_path, second, HEAD + b"a,b\n" if second.endswith("csv") else GOOD)
    load_rows(DataSource(str(tmp_path)))
    assert f"rows of {second} are not read" in caplog.text


@pytest.mark.parametrize("path", ["../rows.jsonl", "https://example.org/rows.jsonl"])
def test_a_card_that_names_files_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write(tmp_path, "rows.jsonl", GOOD)
    write(tmp_path, "set/README.md", f"---\nconfigs:\n- config_name: a\n  data_files: {path}\n---\n".encode())
    with pytest.raises(MsaError, match=r"outside of it|cannot be loaded"):
        load_rows(DataSource(str(tmp_path / "set")))


def test_reading_writes_nothing_into_the_cache_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, tmp_path / "cache")
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table({"question": ["A?"], "answer": ["B."], "text": ["C"]}), tmp_path / "set/train.parquet")
    write(tmp_path, "set/train.jsonl.gz", gzip.compress(GOOD))
    assert load_rows(DataSource(str(tmp_path / "set")))
    assert list(stream_table(DataSource(str(tmp_path / "set"), "text")))
    assert not (tmp_path / "cache").exists()


def test_long_texts_in_csv_files_are_read(tmp_path: Path) -> None:
    text = "word, " * 50_000
    [row] = load_table(DataSource(write(tmp_path, "rows.csv", f'question,answer\nwho,"{text}"\n'.encode())))
    assert row["answer"] == text
