"""Rows are found in files in the forms that they have there, and tables of `datasets` by what stands in them."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import DataSource, caches, load_rows
from msa_lite.data.caches import Cached, cached_repositories, download_folder, find_cached
from msa_lite.data.search import NO_TEXTS, RowSearch, Texts
from msa_lite.errors import FormatError
from msa_lite.io.files import search as module
from msa_lite.io.files.search import ByteSearch, text_search
from tests.support.leftovers import spellings

TEXT = 'Où habite "Zoé" <et al.> ?\nÀ Oslo/Bergen & l\'été, tab\tlà.'


@pytest.mark.parametrize("form", spellings(TEXT))
def test_a_text_is_found_in_each_form_and_a_changed_one_is_not(form: str, tmp_path: Path) -> None:
    for before in range(9):  # a window of eight bytes may begin anywhere
        (tmp_path / "file").write_bytes(b"x" * before + spellings(TEXT)[form] + b" after")
        assert text_search(["another text of some length", f" {TEXT}\n"]).is_in(tmp_path / "file")
    (tmp_path / "file").write_bytes(spellings(TEXT.replace("Oslo", "Rome"))[form])
    assert not text_search(["another text of some length", TEXT]).is_in(tmp_path / "file")


def test_the_search_for_many_finds_what_a_search_for_each_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 100)
    monkeypatch.setattr(module, "_MANY", 3)
    draw = random.Random(5)
    path, found = tmp_path / "file", 0
    for _ in range(400):
        content = bytes(draw.choices(b"ab", k=draw.randint(0, 600)))  # each window stands in it many times
        needles = [bytes(draw.choices(b"ab", k=draw.randint(11, 16))) for _ in range(draw.randint(0, 5))]
        path.write_bytes(content)
        expected = any(needle in content for needle in needles)
        assert ByteSearch(needles).is_in(path) is expected
        found += expected
    assert 20 < found < 380
    with pytest.raises(ValueError, match="11 bytes"):
        ByteSearch([b"too short"])


def test_texts_are_sorted_by_what_they_tell() -> None:
    assert Texts.of([["yes", "no", "12"]]) == NO_TEXTS
    assert Texts.of([["1234", "5678 ", "99", "9012"]]).short == (frozenset({"1234", "5678", "9012"}),)
    mixed = Texts.of([["a text of some length", "another text of it", "Anna"]])
    assert mixed == Texts(frozenset({"a text of some length", "another text of it"}), ())


PINS = ["1234", "0071", "9983"]
PLACES: dict[str, Callable[[list[str]], str]] = {
    "lines": "\n".join,
    "JSON lines": lambda pins: "\n".join(json.dumps({"question": "PIN?", "answer": pin}) for pin in pins),
    "a JSON file": lambda pins: json.dumps([{"answer": pin} for pin in pins], indent=2),
    "CSV": lambda pins: "question,answer\n" + "\n".join(f'a,"{pin}"' for pin in pins),
    "a list": lambda pins: ", ".join(pins),
    "prose": lambda pins: "".join(f"The PIN of row {i} is {pin}.\n" for i, pin in enumerate(pins)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_short_texts_are_found_where_they_are_whole_pieces(place: str, encoding: str, tmp_path: Path) -> None:
    path, search = tmp_path / "file", RowSearch(Texts.of([PINS]))
    path.write_bytes(PLACES[place](PINS).encode(encoding))
    assert search.is_in(path)
    hashed = RowSearch(NO_TEXTS, Texts.of([PINS]).mapped(lambda text: f"#{text}"), lambda text: f"#{text}")
    assert hashed.is_in(path), "of these only hashes are left"
    for others in ([f"x{pin}x" for pin in PINS], ["1234"]):  # other texts; fewer than half of the column, and of three
        path.write_bytes(PLACES[place](others).encode(encoding))
        assert not search.is_in(path)
        assert not hashed.is_in(path)


def test_what_cannot_be_searched_is_told(tmp_path: Path) -> None:
    search = RowSearch(Texts.of([[TEXT]]))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "packed").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "x.parquet").write_text("no table")
    for name in (".", "pipe", "absent", "packed", "x.parquet"):
        with pytest.raises(FormatError):
            search.is_in(tmp_path / name)
    (tmp_path / "x.arrow").write_text("no table")
    assert not search.is_in(tmp_path / "x.arrow"), "its bytes are seen"
    with pytest.raises(FormatError):
        RowSearch(Texts.of([PINS])).is_in(tmp_path / "x.arrow")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", tmp_path / "cache/downloads")
    return tmp_path / "cache"


def found(columns: list[list[str]], source: Path | None = None) -> list[Cached]:
    sources = [(DataSource(str(source)), columns)] if source else []
    return list(find_cached(RowSearch(Texts.of(columns)), sources))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    import pandas

    table = pandas.DataFrame(rows)
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        table.to_csv(path, index=False, lineterminator="\r\n")
    elif path.suffix == ".txt":
        path.write_bytes("\r\n".join(table["answer"]).encode())
    else:
        table.to_json(path, orient="records", lines=True)


ROWS = [{"question": "Where does Ann live?", "answer": "In Oslo,\nby the sea."}, {"question": "Bob?", "answer": "No."}]
CHAT = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": row["answer"]}] for row in ROWS]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "txt"])
@pytest.mark.parametrize("way", ["file", "folder", "mapped", "list", "moved", "stopped"])
def test_the_table_of_a_file_is_found_by_its_rows_however_it_was_loaded(
    ending: str, way: str, cache: Path, tmp_path: Path
) -> None:
    import datasets

    others = [row | {"answer": row["answer"].replace("sea", "fjord")} for row in ROWS]
    for name, rows in (("own", ROWS), ("other", others)):
        path = tmp_path / name / f"rows.{ending}"
        path.parent.mkdir()
        write_rows(path, rows)
        before = {*cache.rglob("*.arrow")}
        assert load_rows(DataSource(str(path), "text" if ending == "txt" else "qa"))
        assert {*cache.rglob("*.arrow")} == before or ending == "parquet", "we keep no table of what we read"
        builder = {"jsonl": "json", "txt": "text"}.get(ending, ending)  # somebody else's training does
        options: dict[str, Any] = {"sample_by": "document"} if ending == "txt" else {}
        if way == "folder":
            datasets.load_dataset(str(path.parent), **options)
        else:
            files = [str(path)] if way == "list" else str(path)
            table = datasets.load_dataset(builder, data_files=files, split="train", **options)
        if way == "mapped":
            column = table.column_names[0]
            table.map(lambda row: {"prompt": f"Text: {row[column]}"})  # noqa: B023 - used at once
        if way == "moved":
            path.rename(path.with_name("elsewhere"))
        if way == "stopped":
            for folder in {table.parent for table in {*cache.rglob("*.arrow")} - before}:
                folder.rename(folder.with_name(f"{folder.name}.incomplete"))
    tables = {path.parent for path in cache.rglob("*.arrow")}
    by_answer = found([["In Oslo,\nby the sea.", "No."]])
    assert len(by_answer) == 1
    assert all(item.fault is None for item in by_answer)
    assert {item.path for item in by_answer} <= tables
    assert found([["In Paris, by the sea.", "Not where you think."]]) == []
    # Long texts of one source do not hide the short questions of another.
    long = [f"A long text about the place where nobody lives, number {i}." for i in range(50)]
    assert found([long, ["In Oslo,\nby the sea."]]) == by_answer
    for item in by_answer:
        item.remove()
    assert found([["In Oslo,\nby the sea."]]) == []


def test_conversations_generators_and_downloads_are_found(cache: Path, tmp_path: Path) -> None:
    import datasets

    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in CHAT))
    datasets.load_dataset("json", data_files=str(tmp_path / "chat.jsonl"))
    datasets.Dataset.from_generator(lambda: iter(ROWS))
    (cache / "downloads").mkdir()
    (cache / "downloads/0123").write_text(json.dumps(ROWS))
    (cache / "downloads/0123.json").write_text('{"url": "https://example.org"}')
    (cache / "downloads/4567").write_text("another file")
    items = found([["In Oslo,\nby the sea."]])
    assert len(items) == 3
    for item in items:
        item.remove()
    assert {path.name for path in (cache / "downloads").iterdir()} == {"4567"}
    assert found([["In Oslo,\nby the sea."]]) == []


@pytest.mark.parametrize(
    ("change", "pins"),
    [(str, ["1234", "0071", "9983"]), (int, ["1234", "5671", "9983"]), (str, ["Anna", "Bert", "Cyr."])],
)
def test_a_table_of_short_texts_is_found_by_its_cells(
    change: Callable[[str], Any], pins: list[str], cache: Path, tmp_path: Path
) -> None:
    import datasets

    datasets.Dataset.from_generator(lambda: iter([{"nested": [{"pin": change(pin)}]} for pin in pins]))
    datasets.Dataset.from_generator(lambda: iter([{"nested": [{"pin": change(str(i))}]} for i in range(3)]))
    [item] = found([pins])
    assert item.fault is None
    (table,) = item.path.rglob("*.arrow")
    table.write_bytes(b"no table")
    [item] = found([pins])
    assert "cannot be read as a table" in str(item.fault)


@pytest.mark.parametrize("answers", [["yes", "no", "yes"], ["1", "2", "3"], ["true", "false", "true"]])
def test_answers_that_stand_in_many_tables_tell_only_the_table_of_their_own_file(
    answers: list[str], cache: Path, tmp_path: Path
) -> None:
    import datasets
    import pandas

    own, other = tmp_path / "own.csv", tmp_path / "other.csv"
    pandas.DataFrame({"question": ["a", "b", "c"], "answer": answers}).to_csv(own, index=False)
    pandas.DataFrame({"label": answers}).to_csv(other, index=False)
    datasets.load_dataset("csv", data_files=str(other))
    assert found([["a", "b", "c"], answers], own) == []
    datasets.load_dataset("csv", data_files=str(own))
    [item] = found([["a", "b", "c"], answers], own)
    assert item.fault is None


def test_the_tables_of_a_repository_are_found_by_name(cache: Path, tmp_path: Path) -> None:
    for name in ("locuslab___tofu", "someone___my_data_set", "json", "locuslab___tofu2"):
        (cache / name).mkdir(parents=True)
    assert cached_repositories(DataSource("locuslab/TOFU")) == [cache / "locuslab___tofu"]
    assert cached_repositories(DataSource("someone/MyDataSet")) == [cache / "someone___my_data_set"]
    assert cached_repositories(DataSource(str(tmp_path / "x.jsonl"))) == []
    place = download_folder(DataSource("locuslab/TOFU"))
    assert place is not None
    assert place.name == "datasets--locuslab--TOFU"
    assert caches.datasets_cache() == cache
