"""Rows from every kind of source, kept where they are streamed, and what becomes of them: ids, labels, masks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_lite.data import (
    IGNORE,
    DataSource,
    Example,
    Prompter,
    Row,
    Template,
    encode,
    encode_qa,
    encode_text,
    kept_head,
    kept_texts,
    load_rows,
    name_rows,
    sample_rows,
    split_rows,
    stream_texts,
    to_batch,
)
from msa_lite.errors import DataError, UsageError
from tests.support.models import tiny_tokenizer

PAIRS = [{"question": "Where?", "answer": "Here."}, {"question": "When?", "answer": "Now."}]


@pytest.fixture
def source(tmp_path: Path) -> DataSource:
    """Two pairs as a folder in Hub layout with one configuration."""
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: small\n  data_files: small.json\n---\n")
    (tmp_path / "small.json").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return DataSource(str(tmp_path), name="small")


def test_pairs_are_read_from_a_configuration_of_a_folder(source: DataSource) -> None:
    rows = load_rows(source)
    assert [(r.index, r.question, r.answer) for r in rows] == [(0, "Where?", "Here."), (1, "When?", "Now.")]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("First line.\n\nSecond line.\n")
    rows = load_rows(DataSource(str(path), format="text"))
    assert [row.text.strip() for row in rows] == ["First line.\n\nSecond line."]


@pytest.mark.parametrize(
    ("cells", "named", "about"),
    [
        ([{"subject": "Ada", "id": 7}, {"subject": "Bo", "id": 7}], None, ["Ada", "Bo"]),
        ([{"author": "Ada", "person": None}, {"author": "Ada", "person": None}], None, ["Ada", "Ada"]),
        ([{"id": 7}, {"id": 7}], None, ["7", "7"]),
        ([{"id": 7}, {"id": 8}], None, ["", ""]),  # one of each row says nothing
        ([{"id": 7}, {"id": 8}], "id", ["7", "8"]),
        ([{"subject": "Ada", "who": "Bo"}, {"subject": "Ada", "who": " "}], "who", ["Bo", ""]),
        ([{"topic": "x"}, {"topic": "x"}], None, ["", ""]),
    ],
)
@pytest.mark.parametrize("format", ["qa", "text"])
def test_a_column_says_whom_a_row_is_about(
    cells: list[dict[str, Any]], named: str | None, about: list[str], format: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "Q?", "answer": "A.", "text": "T."} | cell for cell in cells]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_rows(DataSource(str(path), format, subject=named))
    assert [row.about for row in loaded] == about
    assert {row.sha256 for row in loaded} == {loaded[0].sha256}, "it is no part of the content"


def test_a_column_of_subjects_that_is_named_and_not_there_is_a_fault_and_one_with_the_questions_is_none(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"subject": "Q?", "answer": "A."}))
    assert load_rows(DataSource(str(path), question="subject"))[0].about == ""
    for form in ("qa", "text"):
        with pytest.raises(DataError, match="no column 'who'"):
            load_rows(DataSource(str(path), form, question="subject", text="answer", subject="who"))  # type: ignore[arg-type]


def test_a_missing_column_names_those_that_are_there(source: DataSource) -> None:
    with pytest.raises(
        DataError, match=r"no column 'anser' \(did you mean 'answer'\?\); there are 'question', 'answer'"
    ):
        load_rows(replace(source, answer="anser"))


@pytest.mark.parametrize("path", ["nope.jsonl", "./nope", "a/b/c"])
def test_a_path_that_is_not_there_says_so(path: str) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_rows(DataSource(path))


def test_unknown_configuration_split_and_ending_say_what_there_is(source: DataSource, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="small"):
        load_rows(replace(source, name="large"))
    with pytest.raises(UsageError, match="no split 'test'; there are train"):
        load_rows(replace(source, split="test"))
    other = tmp_path / "rows.xlsx"
    other.write_text("x")
    with pytest.raises(UsageError, match=r"unknown ending '.xlsx'"):
        load_rows(DataSource(str(other)))


def test_samples_and_splits_are_seeded_and_whole() -> None:
    rows = [Row(i, str(i), "x") for i in range(40)]
    sample = sample_rows(rows, 10, seed=3)
    assert sample == sample_rows(rows, 10, seed=3) != sample_rows(rows, 10, seed=4)
    assert len({row.index for row in sample}) == 10
    validation, test = split_rows(rows, 0.15, seed=0)
    assert (len(validation), len(test)) == (6, 34)
    assert sorted(r.index for r in [*validation, *test]) == list(range(40))
    assert validation == sample_rows(rows, 6, seed=0)  # nothing is asked twice, so rows are what is drawn


@pytest.mark.parametrize("kind", ["questions", "texts", "turns"])
def test_rows_that_belong_together_are_on_one_side_of_a_split(kind: str) -> None:
    """Three rows for each of 20 questions, texts or conversations: else the choice would be made by what is scored."""
    rows = [Row(i, f"{i % 20}", f"answer {i}") for i in range(60)]
    if kind == "texts":
        rows = [Row(i, text=f"{i % 20}") for i in range(60)]
    elif kind == "turns":
        rows = [Row(i, f"turn {i // 20}", "So.", earlier=((f"{i % 20}?", "So."),)) for i in range(60)]
    for seed in range(5):
        validation, test = split_rows(rows, 0.15, seed)
        assert (len(validation), len(test)) == (9, 51)  # 3 of 20
        assert not {row.index % 20 for row in validation} & {row.index % 20 for row in test}
        assert all(part == sorted(part, key=lambda row: row.index) for part in (validation, test))


def test_asking_for_a_chat_template_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UsageError, match="has no chat template"):
        Prompter.build(tiny_tokenizer(), "chat", Template())


LONG_ROWS = [Row(0, "Where?", "Here."), Row(1, "Where?", "Here. " * 40), Row(4, "Where? " * 40, "Here.")]


@pytest.mark.parametrize(
    ("window", "max_length", "most", "limit", "way_out"),
    [
        (None, 64, 64, "max_length=64", r"raise max_length to \d+"),
        (100, 64, 64, "max_length=64", "raise max_length to 100"),
        (64, 512, 64, "the window of 64 tokens", None),
    ],
)
def test_rows_are_cut_to_the_shorter_of_length_and_window_and_lost_answers_refused(
    window: int | None, max_length: int, most: int, limit: str, way_out: str | None
) -> None:
    prompter = replace(Prompter.build(tiny_tokenizer(), "plain", Template()), window=window)
    short, long = (prompter.full(row) for row in LONG_ROWS[:2])
    examples, (note,) = encode(LONG_ROWS[:2], DataSource("x"), prompter, max_length)
    assert [e.ids for e in examples] == [short, long[:most]]
    assert [e.ids for e in encode_qa(LONG_ROWS[:2], prompter, max_length)] == [short, long[:most]]
    assert note.startswith(f"1 of 2 rows (1) are longer than {limit}")
    with pytest.raises(DataError, match=rf"1 of 3 rows \(4\): the prompt alone fills {limit}") as refusal:
        encode(LONG_ROWS, DataSource("x"), prompter, max_length)
    for words in (note, str(refusal.value)):
        assert re.search(way_out or "raise", words) is not None if way_out else "raise" not in words
    chunks = encode_text([Row(0, text="abcdefgh" * 100)], prompter, max_length)
    assert max(len(chunk.ids) for chunk in chunks) == most


def test_rows_are_named_by_their_numbers() -> None:
    assert [name_rows(range(n), 40) for n in (1, 2, 12)] == [
        "1 of 40 rows (0)",
        "2 of 40 rows (0 and 1)",
        "12 of 40 rows (0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more)",
    ]


def test_text_becomes_chunks_of_which_every_token_is_learnt_once() -> None:
    tokenizer = tiny_tokenizer()
    rows = [Row(0, text="abcdefgh" * 5), Row(1, text="ijklmnop" * 3)]
    chunks = encode_text(rows, Prompter.build(tokenizer, "plain", Template()), max_length=16)
    assert all(chunk.labels == chunk.ids and chunk.ids[0] == tokenizer.bos_token_id for chunk in chunks)
    assert max(len(chunk.ids) for chunk in chunks) == 16
    joined = [i for chunk in chunks for i in chunk.ids[1:]]
    assert tokenizer.decode(joined) == "abcdefgh" * 5 + "\n\n" + "ijklmnop" * 3


def test_a_last_chunk_too_short_to_predict_anything_is_dropped() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    ids = tokenizer("abcdefghi", add_special_tokens=False)["input_ids"]
    prompter = Prompter.build(tokenizer, "plain", Template())
    chunks = encode_text([Row(0, text="abcdefghi")], prompter, max_length=len(ids) - 1)
    assert [len(chunk.ids) for chunk in chunks] == [len(ids) - 1]


def test_the_mask_comes_from_lengths_even_where_the_pad_token_is_part_of_the_text() -> None:
    batch = to_batch([Example(0, [5, 1, 6], [IGNORE, 1, 6]), Example(1, [7], [7])], 1)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["input_ids"].tolist() == [[5, 1, 6], [7, 1, 1]]
    assert batch["labels"].tolist() == [[IGNORE, 1, 6], [7, IGNORE, IGNORE]]


TEXTS = [f"text {i}\nof two lines" for i in range(9)]


@pytest.fixture(scope="module")
def kept_source(tmp_path_factory: pytest.TempPathFactory) -> DataSource:
    path = tmp_path_factory.mktemp("kept_source") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return DataSource(str(path), "text")


def take(kept_source: DataSource, file: Path, count: int) -> list[str]:
    texts: Iterator[str] = kept_texts(kept_source, file)
    return list(islice(texts, count))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(0, 12), max_size=4), cut=st.integers(0, 40))
def test_the_texts_are_those_of_the_source_after_any_number_of_stops(
    counts: list[int], cut: int, kept_source: DataSource, tmp_path: Path
) -> None:
    file = tmp_path / "kept.jsonl"
    file.unlink(missing_ok=True)
    for count in counts:
        assert take(kept_source, file, count) == TEXTS[:count]
        if file.exists():  # a kill leaves any part of the last line
            content = file.read_bytes()
            file.write_bytes(content[: max(len(content) - cut, content.index(b"\n") + 1)])
    assert take(kept_source, file, 99) == TEXTS


def test_what_was_read_to_its_end_is_not_asked_for_again(kept_source: DataSource, tmp_path: Path) -> None:
    file, copy = tmp_path / "kept.jsonl", tmp_path / "kept_source.jsonl"
    copy.write_text(Path(kept_source.path).read_text())
    moved = replace(kept_source, path=str(copy))
    assert take(moved, file, 99) == TEXTS
    copy.unlink()
    assert take(moved, file, 99) == TEXTS
    assert (kept_head(file) or {})["path"] == str(copy)


def test_another_revision_or_source_begins_anew(kept_source: DataSource, tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    take(kept_source, file, 3)
    assert take(replace(kept_source, revision="a"), file, 2) == TEXTS[:2]
    assert (kept_head(file) or {})["revision"] == "a"
    assert len(file.read_text().splitlines()) == 3
    take(kept_source, file, 1)  # without a revision, what is kept will do
    assert (kept_head(file) or {})["revision"] == "a"
    other = replace(kept_source, split="train")
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
