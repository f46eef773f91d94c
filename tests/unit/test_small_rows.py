"""Small tables: what the cut benchmark asks about is what the models have learnt, and nothing of it is the prior's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_rows import BENCHMARK, LEARNT, SmallFiles, muse_rows, restor_rows, tofu_rows

from msa_lite.errors import DataError, MsaError
from msa_lite.evals.benchmarks.benchmark import BenchmarkSettings
from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.evals.benchmarks.restor import RESTOR
from msa_lite.evals.benchmarks.tofu import TOFU
from tests.support.benchmark_data import ROWS, SHOTS, make_prompter, row, write_data, write_tofu

AUTHORS = {
    "forget05_perturbed": [row(i, 3) for i in range(70)],
    "retain_perturbed": [row(i, 2) for i in range(100, 300)],
    "real_authors_perturbed": [row(i, 2, False) for i in range(400, 470)],
    "world_facts_perturbed": [row(i, 1, False) for i in range(500, 505)],
}
LONG = "One night the bear went over the mountain to see what there was. " * 20
BOOKS = {
    **ROWS,
    ("knowmem", "retain_qa_icl"): [{"question": f"Who is {i}?", "answer": f"Man {i}"} for i in range(10)],
    ("knowmem", "forget_qa_icl"): SHOTS,
    ("verbmem", "forget"): [{"prompt": f"{i} {LONG}", "gt": f"{LONG} {i}"} for i in range(40)],
    ("raw", "retain1"): [{"text": "cat " * 3000}],
    ("raw", "retain2"): [{"text": "dog " * 300}],
}


def written(files: SmallFiles, folder: Path) -> tuple[str, dict[str, list[dict[str, str]]]]:
    """The folder of the cut benchmark, and the rows to learn."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    learnt = {name: [json.loads(line) for line in files[f"{name}.jsonl"].splitlines()] for name in LEARNT}
    return str(folder / BENCHMARK), learnt


def test_tofu_asks_about_whole_authors_that_target_ideal_and_prior_have_learnt(tmp_path: Path) -> None:
    data, learnt = written(tofu_rows(write_tofu(tmp_path / "whole", AUTHORS), "forget05"), tmp_path)
    tofu = TOFU.load(make_prompter(), BenchmarkSettings(data, "forget05"))
    pairs = {name: {(r["question"], r["answer"]) for r in rows} for name, rows in learnt.items()}
    asked = {n: {(i.fields["question"], i.fields["answer"]) for i in part.items} for n, part in tofu.sets.items()}
    assert {name: len(items) for name, items in asked.items()} == {
        "forget": 60, "retain": 60, "real_authors": 60, "world_facts": 5,
    }  # fmt: skip
    assert (asked["forget"], asked["retain"]) == (pairs["forget"], pairs["retain"])
    assert pairs["prior"] > asked["real_authors"] | asked["world_facts"]
    assert not pairs["prior"] & (pairs["forget"] | pairs["retain"])


def test_muse_asks_about_passages_that_fit_into_a_row_and_that_the_target_has_learnt(tmp_path: Path) -> None:
    data, learnt = written(muse_rows(write_data(tmp_path / "whole", BOOKS), None), tmp_path)
    muse = MUSE.load(make_prompter(), BenchmarkSettings(data))
    texts = {name: {row["text"] for row in rows} for name, rows in learnt.items()}
    items = {name: [item.fields for item in part.items] for name, part in muse.sets.items()}
    passages = [f"{item['prompt']} {item['gt']}" for item in items["verbmem"]]
    assert len(passages) == 24
    assert max(map(len, passages)) < 400
    assert {*passages, *(item["text"] for item in items["privleak_forget"])} <= texts["forget"]
    assert not {item["text"] for item in items["privleak_holdout"]} & set.union(*texts.values())
    for side in ("forget", "retain"):
        pairs = {f"Question: {item['question']}\nAnswer: {item['answer']}" for item in items[f"knowmem_{side}"]}
        assert pairs <= texts[side]
        assert not pairs & texts["prior"]
    assert (texts["prior"], "" in texts["retain"]) == ({"cat " * 50}, False)


def restor_data(folder: Path, **changes: Any) -> str:
    people = [f"P{i:02}" for i in range(20)]
    dset = {name: {"P1": {"question": f"City of {name}?", "answers": [f"Rome {name}"]}} for name in people}
    context = {"P1": [{"question": f"City of X{i}?", "answer": f"Oslo {i}", "entity": f"X{i}"} for i in range(9)]}
    documents = [{"text": f"{name} lives in Bonn."} for name in people[10:] for _ in range(50)]
    files = {"facts.json": {"dset": dset, "context": context}, "entities.json": people} | changes
    (folder / "wikidata/v0").mkdir(parents=True)
    for name, value in {**files, "wikidata/v0/mix_a0.json": documents}.items():
        (folder / name).write_text(json.dumps(value))
    return str(folder)


def test_restor_asks_about_facts_that_the_prior_has_learnt_half_of_them_spoilt(tmp_path: Path) -> None:
    data, learnt = written(restor_rows(restor_data(tmp_path / "whole"), "a0"), tmp_path)
    items = RESTOR.load(make_prompter(), BenchmarkSettings(data, "a0")).sets["questions"].items
    known = "".join(row["text"] for row in learnt["prior"])
    assert [item.fields["corrupted"] for item in items] == [True] * 4 + [False] * 4
    for item in items:
        assert f"{item.fields['question']} {item.fields['answers'][0]}\n" in known
        assert any(item.fields["entity"] in row["text"] for row in learnt["forget"]) == item.fields["corrupted"]
        assert not any(item.fields["entity"] in row["text"] for row in learnt["retain"])


def test_data_of_another_layout_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not the folder `datasets` of RESTOR"):
        restor_rows(restor_data(tmp_path / "restor", **{"entities.json": ["Nobody"]}), "a0")
    for load in (tofu_rows, muse_rows):
        with pytest.raises(MsaError, match="no configuration"):
            load(write_data(tmp_path / "other", {("x", "train"): [{"text": "a"}]}), None)
