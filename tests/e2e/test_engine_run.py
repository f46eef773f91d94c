"""`evaluate.engine: vllm` in a run and on the command line, by a stand-in of vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.errors import UsageError
from msa_lite.evals.engine import ENGINE_FILE
from msa_lite.evals.records import read_records
from msa_lite.io.finished.seal import load_manifest
from msa_lite.recipe import load_recipe
from tests.e2e.conftest import CallCli, sweep_recipe
from tests.support.vllm_stand_in import StandIn, install


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install(monkeypatch)


def test_a_run_gives_vllm_the_test_rows_alone(history: Path, tmp_path: Path, vllm: StandIn) -> None:
    recipe = sweep_recipe(history, tmp_path / "run")
    recipe["retain"]["beta"] = 0.0
    recipe["evaluate"]["engine"] = "vllm"
    result = msa_lite.run(recipe)
    assert result is not None
    scored = {f"evaluation/{name}" for name in ("ideal", "target", "unlearned")}
    assert {str(path.parent.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob(ENGINE_FILE)} == scored
    for folder in scored:
        manifest = load_manifest(tmp_path / "run" / folder)
        assert manifest is not None
        assert manifest["inputs"]["engine"] == "vllm"
        assert ENGINE_FILE in manifest["files"]
    assert len(vllm.kwargs) == 3
    assert vllm.running == 0
    assert "run by vLLM" in (tmp_path / "run/report.md").read_text()
    labels: list[str] = []
    msa_lite.run(recipe, progress=lambda label, done, total: labels.append(label))
    assert labels == []
    # The other engine's scores are made anew, and nothing else is; the checks before the fits have the target's.
    msa_lite.run(recipe, ["evaluate.engine=transformers"], progress=lambda label, *_: labels.append(label))
    assert set(labels) == {"scores: ideal", "scores: unlearned"}
    assert not list((tmp_path / "run").rglob(ENGINE_FILE))


def test_a_run_is_refused_before_its_first_stage_where_vllm_cannot_work(
    recipe: dict[str, Any], vllm: StandIn, tmp_path: Path
) -> None:
    recipe["evaluate"]["engine"] = "vllm"
    vllm.device = "none"
    with pytest.raises(UsageError, match="no GPU"):
        msa_lite.run(recipe)
    assert not (tmp_path / "run").exists()


def test_the_command_takes_an_engine_or_the_recipes(
    history: Path, recipe: dict[str, Any], vllm: StandIn, call_cli: CallCli, tmp_path: Path
) -> None:
    recipe["evaluate"]["engine"] = "vllm"
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert load_recipe(tmp_path / "recipe.yaml").evaluate.engine == "vllm"  # type: ignore[union-attr]
    arguments = ["evaluate", history / "target", "--recipe", tmp_path / "recipe.yaml", "--limit", "3", "--json"]
    for out, engine, count in (("one", None, 1), ("two", "transformers", 1), ("three", "vllm", 2)):
        more = ["--engine", engine] if engine else []
        code, stdout, _ = call_cli(*arguments, "--out", tmp_path / out, *more)
        assert code == 0
        assert ("engine" in json.loads(stdout)["settings"]) == (out != "two")
        assert len(vllm.kwargs) == count
    answers = [[r["generated"] for r in read_records(tmp_path / out / "forget.jsonl")] for out in ("one", "two")]
    assert answers[0] == answers[1]


def test_a_dry_run_refuses_an_engine_that_cannot_work(
    history: Path, vllm: StandIn, call_cli: CallCli, tmp_path: Path
) -> None:
    vllm.device = "none"
    arguments = ["evaluate", history / "target", "--forget", history / "data/forget.jsonl", "--out", tmp_path / "out"]
    code, _, stderr = call_cli(*arguments, "--engine", "vllm", "--dry-run")
    assert code == 2
    assert "no GPU" in stderr
