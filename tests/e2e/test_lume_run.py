"""The recipes of LUME, WMDP and RWKU on tiny models: each runs as it is shipped, with other models and a short fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import msa_lite
from msa_lite.cli import cli
from msa_lite.recipe import load_recipe
from msa_lite.report import load_report
from tests.support.lume_data import ROWS, write_lume

FIT = {"vector.epochs": 2, "vector.learning_rate": 5e-3, "vector.max_length": 64, "vector.lora": "{rank: 2}"}


def overrides(**places: Any) -> list[str]:
    return [f"{key.replace('__', '.')}={value}" for key, value in places.items()]


@pytest.fixture
def small() -> list[str]:
    return [f"{key}={value}" for key, value in FIT.items()]


def test_lume_runs_and_scores_what_it_publishes(history: Path, small: list[str], tmp_path: Path) -> None:
    data = write_lume(tmp_path)
    keys = overrides(
        target=history / "target", prior=history / "prior", tokenizer=history / "prior",
        forget__data__path=f"{data}/forget.jsonl", retain__data__path=f"{data}/retain.jsonl",
        evaluate__retain__path=f"{data}/retain.jsonl", evaluate__data=data, output=tmp_path / "run",
        verdict="false", forget__alpha=1.0, retain__beta=1.0,
    )  # fmt: skip
    msa_lite.run(load_recipe("lume/olmo-1b", [*small, *keys]))
    for name in ("target", "unlearned"):
        report = load_report(tmp_path / "run" / "evaluation" / name)
        assert report.benchmark == "lume"
        assert (report.metrics["knowledge_f"].n, report.metrics["regurgitation_f"].n) == (4, 3)
        assert report.metrics["task_aggregate"].value is not None
        assert report.metrics["probability_f"].n == len(ROWS["forget"])


@pytest.mark.parametrize("name", ["wmdp/cyber", "rwku/stephen-king"])
def test_recipes_without_a_prior_make_a_model_and_score_nothing(
    name: str, history: Path, small: list[str], tmp_path: Path
) -> None:
    for side in ("forget", "retain"):
        texts = [{"text": f"{row['input']} {row['output']}", "subject": side} for row in ROWS[side]]
        (tmp_path / f"{side}.jsonl").write_text("\n".join(map(json.dumps, texts)))
    plain = [f"{side}.data.{key}=null" for side in ("forget", "retain") for key in ("name", "split")]
    keys = overrides(
        target=history / "target", forget__data__path=tmp_path / "forget.jsonl",
        retain__data__path=tmp_path / "retain.jsonl", output=tmp_path / "run",
    )  # fmt: skip
    msa_lite.run(load_recipe(name, [*plain, *small, *keys]))
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert not (tmp_path / "run" / "evaluation").exists()


def test_rwkus_questions_are_scored_as_rows_by_person(history: Path, tmp_path: Path) -> None:
    rows = [
        {"query": f"Who sat there on day {i}?", "answer": "a cat", "level": "2", "type": "simple question",
         "subject": f"Person {i % 2}"}
        for i in range(4)
    ]  # fmt: skip
    (tmp_path / "forget_level2.json").write_text(json.dumps(rows, indent=4))
    words = ["evaluate", str(history / "target"), "--columns", "question=query", "--max-new-tokens", "30",
             "--forget", str(tmp_path / "forget_level2.json"), "--out", str(tmp_path / "scores")]  # fmt: skip
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert load_report(tmp_path / "scores").metrics["rouge_l_f"].n == 4
    records = [json.loads(line) for line in (tmp_path / "scores" / "forget.jsonl").read_text().splitlines()]
    assert {record["subject"] for record in records} == {"Person 0", "Person 1"}
