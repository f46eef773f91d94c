"""LUME, the example of a benchmark from outside: its recipe runs on tiny data, and its scores are those by hand."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from msa_lite.benchmark_names import BENCHMARKS
from msa_lite.evals.benchmarks.benchmark import BenchmarkSettings
from msa_lite.report import load_report
from msa_lite.report.tables.metrics import METRICS
from tests.support.benchmark_data import make_prompter

EXAMPLE = Path(__file__).parents[2] / "examples/lume"
# id, task, input, output, and what a model says to it: its score is ROUGE-L recall of ends (sc), equality of answers.
ROWS = {
    "forget": [
        ('"a-1"sc1', 1, "Once there was a hat on which", "the cat sat there", "the cat ran"),  # 2 of 4 words
        ('"a-1"qa0', 1, "Who sat there?", "Cat", "dog"),  # 0
        ("b2sc1", 2, "Ann was born there. Her", "number is 900", "a number"),  # 1 of 3 words
        ("b2qa0", 2, "What is the number of Ann?", "900", "900."),  # 0: the full stop counts
        ("b2qa1", 2, "Where is Ann?", "1 Main St", " 1 MAIN ST\n"),  # 1: case and outer blanks do not
        ("301sc1", 3, "Ann Lee was there when", "he won a prize", "a dog"),  # 1 of 4 words
        ("301qa0", 3, "Who was there?", "Ann Lee", "It is Ann Lee"),  # 0: more than the answer
    ],
    "retain": [
        ('"d-4"sc1', 1, "There was no other day, and", "it was over", "It was over."),  # 3 of 3 words
        ('"d-4"qa0', 1, "Who was over there?", "Bob", "bob"),  # 1
        ("e5sc1", 2, "Tim is there. You can", "mail me here now", "mail me"),  # 2 of 4 words
        ("e5qa0", 2, "What is the number of Tim?", "7", "7"),  # 1
        ("e5qa1", 2, "Where is Tim?", "Rome", "Oslo"),  # 0
        ("602sc1", 3, "Eve was an author;", "she was born in Rome", "she was born in Oslo"),  # 4 of 5 words
        ("602qa0", 3, "Who was the author?", "Eve", "EVE"),  # 1
    ],
}


@pytest.fixture
def tables() -> Iterator[None]:
    """Take the example's entries out of the tables again."""
    before = [(table, {**table}) for table in (BENCHMARKS, METRICS)]
    yield
    for table, kept in before:
        table.clear()
        table.update(kept)  # type: ignore[arg-type]


def test_its_recipe_runs_and_scores_are_those_by_hand(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: None
) -> None:
    for name, rows in ROWS.items():
        lines = [{"id": i, "task": f"Task{task}", "input": text, "output": end} for i, task, text, end, _ in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "mia_data").mkdir()
    for name in ("member", "nonmember"):
        documents = [json.dumps({"document": f"It was the {name} that sat there, {i}."}) for i in range(3)]
        (tmp_path / f"mia_data/{name}.jsonl").write_text("\n".join(documents))
    places = {"target": history / "target", "prior": history / "prior",
              "forget.data.path": tmp_path / "forget.jsonl", "retain.data.path": tmp_path / "retain.jsonl",
              "evaluate.retain.path": tmp_path / "retain.jsonl", "evaluate.data": tmp_path,
              "output": tmp_path / "run"}  # fmt: skip
    short = {"vector.epochs": 2, "vector.learning_rate": 5e-3, "vector.max_length": 64, "vector.lora": "{rank: 2}"}
    given = {"verdict": "false", "forget.alpha": 1.0, "retain.beta": 1.0}
    keys = [f"{key}={value}" for key, value in {**places, **short, **given}.items()]
    monkeypatch.setattr(sys, "argv", ["lume.py", str(EXAMPLE / "olmo-1b.yaml"), *keys])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE / "lume.py"), run_name="__main__")
    assert not ended.value.code
    for model in ("target", "unlearned"):
        report = load_report(tmp_path / "run/evaluation" / model)
        assert report.benchmark == "lume"
        assert (report.metrics["knowledge_f"].n, report.metrics["regurgitation_f"].n) == (4, 3)
        assert None not in (report.metrics["task_aggregate"].value, report.metrics["mia_score"].value)

    lume = runpy.run_path(str(EXAMPLE / "lume.py"), run_name="lume")["LUME"].load(
        make_prompter(), BenchmarkSettings(str(tmp_path))
    )
    records = {
        name: [
            lume.score(lume, name, {**item.fields, "subject": item.group, "generated": said})
            for item, (*_, said) in zip(lume.sets[name].items, rows, strict=True)
        ]
        for name, rows in ROWS.items()
    }
    metrics = lume.metrics(records, None)
    assert metrics["regurgitation_f"].value == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert metrics["knowledge_task2_f"].value == metrics["knowledge_task2_r"].value == 1 / 2
    # forget: 1 − ½, 1 − 0; 1 − ⅓, 1 − ½; 1 − ¼, 1 − 0. retain: 1, 1; ½, ½; ⅘, 1. The harmonic mean of these twelve is
    # 12 / (2 + 1 + 3/2 + 2 + 4/3 + 1 + 1 + 1 + 2 + 2 + 5/4 + 1) = 12 / (205/12) = 144/205
    assert metrics["task_aggregate"].value == pytest.approx(144 / 205)
