"""What TOFU asks: data sets that are whole or not, rows that are odd, and the published rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import IGNORE, Row
from msa_lite.errors import DataError
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Record
from msa_lite.evals.benchmarks.tofu import TOFU
from msa_lite.evals.engine.models import Runner
from msa_lite.evals.scores.records import run_items
from tests.support.benchmark_data import TABLES, TofuRow, make_prompter, make_tofu, row, write_tofu
from tests.support.plain import wide_model

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "tofu"
needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="TOFU's rows are not on this machine")


def without(*names: str) -> dict[str, list[TofuRow]]:
    return {name: rows for name, rows in TABLES.items() if name not in names}


def test_every_fault_of_a_data_set_is_told_at_once(tmp_path: Path) -> None:
    tables: dict[str, Sequence[Mapping[str, Any]]] = dict(without("retain_perturbed", "world_facts_perturbed"))
    tables["forget01_perturbed"] = [{"question": "Who?", "answer": "I."}]
    with pytest.raises(DataError) as told:
        TOFU.load(make_prompter(), BenchmarkSettings(write_tofu(tmp_path, tables), "forget01"))  # type: ignore[arg-type]
    text = str(told.value)
    assert "no configuration 'retain_perturbed'" in text
    assert "no configuration 'world_facts_perturbed'" in text
    assert "configuration 'forget01_perturbed': no column 'perturbed_answer', 'paraphrased_answer'" in text
    assert "there are " in text
    assert "real_authors" in text.partition("there are ")[2]


def test_only_the_holdout_may_be_absent(tmp_path: Path) -> None:
    whole, rest = make_tofu(tmp_path / "a"), make_tofu(tmp_path / "b", without("holdout01"))
    assert list(whole.sets) == ["forget", "retain", "real_authors", "world_facts", "holdout"]
    assert list(rest.sets) == ["forget", "retain", "real_authors", "world_facts"]
    assert [part.with_z for part in whole.sets.values()] == [True, False, False, False, True]
    assert not any(part.with_z for part in rest.sets.values())
    assert whole.sets["holdout"].decoding is None
    assert all(item.prompt is None for item in whole.sets["holdout"].items)


def test_a_limit_takes_a_sample_by_the_seed(tmp_path: Path) -> None:
    def numbers(**options: Any) -> list[list[int]]:
        return [[item.index for item in part.items] for part in make_tofu(tmp_path, **options).sets.values()]

    two = numbers(limit=2)
    assert [len(found) for found in two] == [2] * 5
    assert all(found == sorted(found) for found in two)
    assert numbers(limit=2) == two
    assert numbers(limit=2, seed=1) != two
    assert numbers(limit=100) == [list(range(len(rows))) for rows in TABLES.values()]


@pytest.mark.parametrize("chat", [False, True])
def test_texts_and_prompts_are_those_of_the_prompter(chat: bool, tmp_path: Path) -> None:
    prompter = make_prompter(chat)
    item = TOFU.load(prompter, BenchmarkSettings(write_tofu(tmp_path), "forget01")).sets["forget"].items[1]
    asked = TABLES["forget01_perturbed"][1]
    assert item.prompt == prompter.prompt(Row(0, asked["question"]))
    assert {name: len(texts) for name, texts in item.texts.items()} == {"answer": 1, "paraphrased": 1, "perturbed": 3}
    answers = {"answer": [asked["answer"]], "paraphrased": [asked["paraphrased_answer"]]}
    for name, said in (answers | {"perturbed": asked["perturbed_answer"]}).items():
        assert item.texts[name] == tuple(prompter.example(Row(1, asked["question"], text)) for text in said)
    assert item.fields == {key: asked[key] for key in ("question", "answer", "perturbed_answer")}


def odd_records(folder: Path, *rows: TofuRow) -> tuple[Benchmark, list[Record]]:
    """The records of a model for rows in the place of the forget set's."""
    tofu = make_tofu(folder, TABLES | {"forget01_perturbed": [*rows, row(9, 3)]})
    return tofu, run_items(Runner(wide_model("llama")), tofu, "forget")


def test_empty_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    tofu, (empty, bare, usual) = odd_records(
        tmp_path,
        row(0, 3) | {"answer": " "},
        row(1, 3) | {"answer": "", "paraphrased_answer": "", "perturbed_answer": ["", "It is here.", " "]},
    )
    assert empty["probability"] is empty["extraction_strength"] is empty["rouge_l"] is None
    assert empty["truth_ratio"] is not None  # of the paraphrased answer
    assert bare["truth_ratio"] is None
    assert len(bare["scores"]["perturbed"]) == 1
    assert None not in (usual["probability"], usual["truth_ratio"], usual["rouge_l"])
    others: dict[str, list[Record]] = {name: [] for name in tofu.sets}
    found = tofu.metrics(others | {"forget": [empty, bare, usual]}, None)
    counted = {name: (found[name].n, found[name].skipped) for name in ("probability_f", "rouge_l_f", "truth_ratio_f")}
    assert counted == {"probability_f": (1, 2), "rouge_l_f": (1, 2), "truth_ratio_f": (2, 1)}
    assert found["min_k"].note == "one of the two sides has no items"
    assert found["model_utility"].value is None


def test_items_beyond_the_window_are_skipped_with_the_reason(tmp_path: Path) -> None:
    long = row(0, 1) | {"question": "Where? " * 300}
    wide = row(1, 1) | {"perturbed_answer": ["Here. " * 200]}
    _, (first, second, _) = odd_records(tmp_path, long, wide)
    assert (first["probability"], first["generated"], first["rouge_l"]) == (None, None, None)
    assert "longer than the 512 tokens" in first["skipped"]
    # One wrong answer is too long: the item's texts are left out together, but there is room to generate.
    assert (second["probability"], second["truth_ratio"]) == (None, None)
    assert second["generated"] is not None
    assert "longer than the 512 tokens" in second["skipped"]


@needs_published
@pytest.mark.parametrize(("split", "count"), [("forget01", 40), ("forget10", 400)])
def test_the_published_rows_are_asked_as_they_are(split: str, count: int) -> None:
    prompter = make_prompter(chat=True)
    tofu = TOFU.load(prompter, BenchmarkSettings(str(PUBLISHED), split, limit=8))
    assert list(tofu.sets) == ["forget", "retain", "real_authors", "world_facts"]
    rows = [json.loads(line) for line in (PUBLISHED / f"{split}_perturbed.json").read_text().splitlines()]
    assert len(rows) == count
    assert len(tofu.sets["forget"].items) == 8
    for item in tofu.sets["forget"].items:
        asked = rows[item.index]
        assert item.fields["question"] == asked["question"]
        assert item.prompt == prompter.prompt(Row(0, asked["question"]))
        (text,) = item.texts["answer"]
        assert text.ids == prompter.full(Row(0, asked["question"], asked["answer"]))
        assert text.labels == [IGNORE] * len(item.prompt or ()) + text.ids[len(item.prompt or ()) :]
        assert len(item.texts["perturbed"]) == 5
    assert len(tofu.sets["world_facts"].items[0].texts["perturbed"]) == 3
