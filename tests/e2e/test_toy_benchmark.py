"""A benchmark that one file and one entry add: evaluated, chosen by and compared like those that msa-lite has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.benchmarks import BENCHMARKS
from msa_lite.errors import MsaError
from msa_lite.evals.judge import JudgeSettings
from tests.support import toy
from tests.support.pages import page_text


@pytest.fixture
def data(history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The toy's data, with its entry in the table."""
    monkeypatch.setitem(BENCHMARKS, "toy", toy.ENTRY)
    for name in ("forget", "retain"):
        rows = (history / f"data/{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "toy").mkdir(exist_ok=True)
        (tmp_path / f"toy/{name}.jsonl").write_text("".join(rows[:6]))
    return str(tmp_path / "toy")


def test_a_model_is_evaluated_on_it(history: Path, data: str, tmp_path: Path) -> None:
    out = tmp_path / "scores"
    ideal = str(history / "ideal")
    toy = msa_lite.PublishedBenchmark("toy", data=data)
    reports = msa_lite.evaluate(str(history / "target"), out, toy, ideal=ideal, limit=3)
    assert {*reports["model"].metrics} == {*reports["ideal"].metrics} == {"likeness_f", "likeness_r"}
    records = [json.loads(line) for line in (out / "forget.jsonl").read_text().splitlines()]
    assert reports["model"].metrics["likeness_f"].value == pytest.approx(sum(r["likeness"] for r in records) / 3)
    for questions, judge, told in (
        (toy, JudgeSettings("local", "m"), "judge: not for toy"),
        (replace(toy, compat=["tofu"]), JudgeSettings(), "changes nothing in toy"),
        (replace(toy, benchmark="toi"), JudgeSettings(), "did you mean 'toy'"),
    ):
        with pytest.raises(MsaError, match=told):
            msa_lite.evaluate(str(history / "target"), tmp_path / "no", questions, judge=judge)


def test_a_run_chooses_by_it_and_is_compared(recipe: dict[str, Any], data: str) -> None:
    recipe["evaluate"] = {"benchmark": "toy", "data": data, "ideal": recipe["evaluate"]["ideal"]}
    recipe["forget"]["data"]["format"] = recipe["retain"]["data"]["format"] = "qa"
    recipe["forget"]["alpha"], recipe["select"] = [0.5, 1.0], {"score": "toy"}
    result = msa_lite.run(recipe)
    folder = Path(recipe["output"])
    choice = json.loads((folder / "sweep/choice.json").read_text())
    assert choice["rule"] == "toy"
    assert {line["alpha"] for line in choice["scores"]} == {0.5, 1.0}
    assert result.reports["unlearned"].split == "whole test"
    assert "the benchmark does not say" in page_text(folder)
    table = msa_lite.compare([folder])
    assert [column.name for column in table.columns] == ["likeness_r", "likeness_f"]
