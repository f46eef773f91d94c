"""Texts that are kept as they are taken: the same again, no matter where the taking was stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_lite.data import DataSource, kept_head, kept_texts, stream_texts
from msa_lite.errors import DataError

TEXTS = [f"text {i}\nof two lines" for i in range(9)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> DataSource:
    path = tmp_path_factory.mktemp("source") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return DataSource(str(path), "text")


def take(source: DataSource, file: Path, count: int) -> list[str]:
    texts: Iterator[str] = kept_texts(source, file)
    return list(islice(texts, count))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(0, 12), max_size=4), cut=st.integers(0, 40))
def test_the_texts_are_those_of_the_source_after_any_number_of_stops(
    counts: list[int], cut: int, source: DataSource, tmp_path: Path
) -> None:
    file = tmp_path / "kept.jsonl"
    file.unlink(missing_ok=True)
    for count in counts:
        assert take(source, file, count) == TEXTS[:count]
        if file.exists():  # a kill leaves any part of the last line
            content = file.read_bytes()
            file.write_bytes(content[: max(len(content) - cut, content.index(b"\n") + 1)])
    assert take(source, file, 99) == TEXTS


def test_what_was_read_to_its_end_is_not_asked_for_again(source: DataSource, tmp_path: Path) -> None:
    file, copy = tmp_path / "kept.jsonl", tmp_path / "source.jsonl"
    copy.write_text(Path(source.path).read_text())
    moved = replace(source, path=str(copy))
    assert take(moved, file, 99) == TEXTS
    copy.unlink()
    assert take(moved, file, 99) == TEXTS
    assert (kept_head(file) or {})["path"] == str(copy)


def test_another_revision_or_source_begins_anew(source: DataSource, tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    take(source, file, 3)
    assert take(replace(source, revision="a"), file, 2) == TEXTS[:2]
    assert (kept_head(file) or {})["revision"] == "a"
    assert len(file.read_text().splitlines()) == 3
    take(source, file, 1)  # without a revision, what is kept will do
    assert (kept_head(file) or {})["revision"] == "a"
    other = replace(source, split="train")
    take(other, file, 1)
    assert (kept_head(file) or {})["split"] == "train"


def test_a_cell_without_text_is_named_when_it_is_come_to(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one"}\n{"text": " "}\n')
    texts = stream_texts(DataSource(str(path), "text"))
    assert next(texts) == "one"
    with pytest.raises(DataError, match=r"row 1 \(line 2\), column 'text': ' '"):
        next(texts)
    with pytest.raises(DataError, match=r"no column 'body'; there are 'text'"):
        next(stream_texts(DataSource(str(path), "text", text="body")))
    path.write_text("\n")
    with pytest.raises(DataError, match="the data set is empty"):
        next(stream_texts(DataSource(str(path), "text")))
