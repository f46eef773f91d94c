"""Rows are found in files in the forms that they have there, and tables of `datasets` by what stands in them."""

from __future__ import annotations

import html
import json
import os
import unicodedata
from pathlib import Path

import pytest

from msa_lite.data import DataSource, load_rows
from msa_lite.data import kept as caches
from msa_lite.data.kept import cached_repositories, cached_tables, download_folder
from msa_lite.errors import FormatError
from msa_lite.io.files import spellings as search
from msa_lite.io.files.spellings import holds_any, needles, sample_texts

TEXT = 'Where does "Åsa" live? <In> Oslo & Bergen'


@pytest.mark.parametrize("form", [TEXT, json.dumps(TEXT), json.dumps(TEXT, ensure_ascii=False), html.escape(TEXT)])
def test_a_text_is_found_in_each_form(form: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(f"before {form} after", "utf-8")
    assert holds_any(path, needles(["another text", TEXT]))
    assert not holds_any(path, needles(["another text", "yes"]))
    assert not holds_any(path, [])


def test_a_text_across_two_blocks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_BLOCK", 10)
    path = tmp_path / "file"
    for before in range(25):
        path.write_bytes(b"x" * before + b"a row of text" + b"y" * 7)
        assert holds_any(path, [b"nothing", b"a row of text"])
    assert not holds_any(path, [b"a row of a text"])


def test_pipes_and_folders_are_no_files_to_search(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(FormatError):
            holds_any(path, [b"a"])


def test_short_texts_say_nothing_and_many_are_thinned_out_in_large_files() -> None:
    assert needles(["yes", " no ", "12345"]) == []
    texts = [f"text {i}" for i in range(1000)]
    assert sample_texts(texts, 1000) == texts
    few = sample_texts(texts, 10**13)
    assert 8 <= len(few) <= 16
    assert set(few) <= set(texts)
    assert sample_texts([], 5) == []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "txt"])
def test_the_table_of_a_file_is_found_by_its_rows(ending: str, cache: Path, tmp_path: Path) -> None:
    import datasets
    import pandas

    rows = pandas.DataFrame(
        {"question": ["Where does Ann live?", "And Bob?"], "answer": ["In Oslo, by the sea.", "No."]}
    )
    own, other = tmp_path / f"own.{ending}", tmp_path / f"other.{ending}"
    for path, table in ((own, rows), (other, rows.replace("sea", "fjord", regex=True))):
        if ending == "parquet":
            table.to_parquet(path)
        elif ending == "csv":
            table.to_csv(path, index=False)
        elif ending == "txt":
            path.write_text("\n".join(table["answer"]))
        else:
            table.to_json(path, orient="records", lines=True)
        before = list(cache.rglob("*.arrow"))
        assert load_rows(DataSource(str(path), "text" if ending == "txt" else "qa"))
        assert list(cache.rglob("*.arrow")) == before or ending == "parquet", "we keep no table of what we read"
        builder = {"jsonl": "json", "txt": "text"}.get(ending, ending)  # somebody else's training does
        datasets.load_dataset(builder, data_files=str(path), **({"sample_by": "document"} if ending == "txt" else {}))
    tables = sorted(path.parent.parent.parent for path in cache.rglob("*.arrow"))
    assert len(tables) == 2
    [(found, is_read)] = cached_tables([["In Oslo, by the sea."]])
    assert found in tables
    assert is_read
    assert list(cached_tables([["In Paris, by the sea.", "Not where you think."]])) == []
    # Long texts of one source do not hide the short questions of another.
    long = [f"A long text about the place where nobody lives, number {i}." for i in range(50)]
    assert {folder for folder, _ in cached_tables([long, ["In Oslo, by the sea."]])} == {found}


@pytest.mark.parametrize("pins", [["1234", "0071", "9983"], ["Anna", "Robert", "Cyril"]])
def test_a_table_of_short_texts_is_found_by_its_cells(pins: list[str], cache: Path, tmp_path: Path) -> None:
    import datasets
    import pandas

    own, other = tmp_path / "own.csv", tmp_path / "other.csv"
    pandas.DataFrame({"question": ["a", "b", "c"], "answer": pins}).to_csv(own, index=False)
    pandas.DataFrame({"question": ["a", "b", "c"], "answer": [f"x{pin}x" for pin in pins]}).to_csv(other, index=False)
    for path in (own, other):
        datasets.load_dataset("csv", data_files=str(path), features=datasets.Features(
            {"question": datasets.Value("string"), "answer": datasets.Value("string")}))  # fmt: skip
    [(found, is_read)] = cached_tables([pins])
    assert is_read
    (table,) = found.rglob("*.arrow")
    assert pins[0] in datasets.Dataset.from_file(str(table))["answer"]
    table.write_bytes(b"no table")
    assert list(cached_tables([pins])) == [(found, False)] or [is_read for _, is_read in cached_tables([pins])] == [
        False
    ]


@pytest.mark.parametrize("answers", [["yes", "no", "yes"], ["1", "2", "3"], ["true", "false", "true"]])
def test_answers_that_stand_in_many_tables_tell_none(answers: list[str], cache: Path, tmp_path: Path) -> None:
    import datasets
    import pandas

    pandas.DataFrame({"label": answers}).to_csv(tmp_path / "others.csv", index=False)
    datasets.load_dataset("csv", data_files=str(tmp_path / "others.csv"))
    assert list(cache.rglob("*.arrow"))
    assert list(cached_tables([answers])) == []


def test_a_text_is_found_with_other_line_ends_accents_and_encodings(tmp_path: Path) -> None:
    text, path = 'Où habite Zoé ?\nÀ "Oslo".', tmp_path / "file"
    for written in (text.replace("\n", "\r\n"), text.replace("\n", "\r"), unicodedata.normalize("NFD", text)):
        for raw in (written.encode(), written.encode("utf-16-le"), json.dumps(written).encode()):
            path.write_bytes(b"before " + raw)
            assert holds_any(path, needles([text])), raw
    path.write_text('"Où habite Zoé ?\nÀ ""Oslo""."', "utf-8")
    assert holds_any(path, needles([text]))


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
