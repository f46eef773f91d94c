"""The verdict at the end of a run, and the checks before it: what is printed and written, and the exit codes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from msa_lite.errors import MismatchError
from msa_lite.evals.benchmarks.benchmark import Benchmark
from msa_lite.evals.scores import records
from msa_lite.evals.scores.records import ANSWERS_FILE
from tests.e2e.conftest import CallCli
from tests.support.pages import page_text


def make_recipe(knowing: Path, output: Path) -> dict[str, Any]:
    """A recipe that forgets, and damages much besides."""
    return {
        "target": str(knowing / "target"),
        "prior": str(knowing / "prior"),
        "forget": {"data": {"path": str(knowing / "data/forget.jsonl")}, "alpha": 1.0},
        "retain": {"data": {"path": str(knowing / "data/retain.jsonl")}, "beta": 0.0},
        "vector": {"lora": {"rank": 8, "alpha": 16}, "epochs": 10, "learning_rate": 2e-2, "batch_size": 8,
                   "warmup_epochs": 1},
        "evaluate": {"max_new_tokens": 40},
        "output": str(output),
    }  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(knowing: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose stages the tests take up."""
    folder = tmp_path_factory.mktemp("verdict") / "run"
    msa_lite.run(make_recipe(knowing, folder))
    return folder


@pytest.fixture
def recipe(knowing: Path, run_folder: Path, tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(make_recipe(knowing, run_folder)))
    return str(path)


def read(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
    return value


def test_a_run_that_forgets_too_little_fails_with_all_files_there(
    recipe: str, run_folder: Path, call_cli: CallCli
) -> None:
    status, stdout, stderr = call_cli(recipe, "forget.alpha=0.5")
    assert status == 1, stderr
    verdict = read(run_folder)
    counts = re.match(r"It still answers (\d+) of the 18 questions .*\(before: 18; .*: 0\)\. ", verdict["sentence"])
    assert counts, verdict["sentence"]
    assert int(counts[1]) == verdict["forgotten"]["recited"]["unlearned"] > 0
    assert stdout.startswith(f"FAIL  {verdict['sentence']}\n")
    assert f"FAIL: {verdict['sentence']}" in stderr
    assert "--accept" in stderr
    assert (verdict["outcome"], verdict["forgotten"]["control"]) == ("FAIL", "prior")
    assert verdict["forgotten"]["excess"]["low"] > verdict["margins"]["recited"]
    assert "surely more than 10 points above the control" in verdict["reasons"][0]
    text = page_text(run_folder)
    assert verdict["sentence"] in text
    assert "\nFAIL\n" in text
    assert (run_folder / "model/config.json").is_file()
    # At the end, ten questions side by side, half of them to be forgotten; the report keeps them to itself.
    assert (stdout.count("\nforget  "), stdout.count("\nretain  "), stdout.count("\n  unlearned  ")) == (5, 5, 10)
    assert "Some questions side by side" not in page_text(run_folder)


@pytest.mark.parametrize("how", ["--accept", "verdict=off"])
def test_a_failure_can_be_accepted(how: str, recipe: str, call_cli: CallCli) -> None:
    status, stdout, stderr = call_cli(recipe, "forget.alpha=0.1", how)
    assert (status, stdout.partition("  ")[0]) == (0, "FAIL"), stderr


def test_without_rows_to_keep_the_verdict_says_so_loudly_and_exits_with_0(
    recipe: str, run_folder: Path, call_cli: CallCli
) -> None:
    status, stdout, stderr = call_cli(recipe, "retain=null", "--json")
    assert status == 0, stderr
    result = json.loads(stdout)
    assert result["verdict"] == read(run_folder)
    assert (result["verdict"]["outcome"], result["verdict"]["kept"]) == ("PARTLY", None)
    assert f"PARTLY  {result['verdict']['sentence']}" in stderr
    assert "give rows to keep" in stderr
    # All that there is to show are rows to be forgotten.
    assert call_cli("report", run_folder, "--show-examples")[0] == 0
    assert (run_folder / "report.html").read_text().count('<article class="example">') == 10


# Before the work


def other_rows(knowing: Path, folder: Path) -> dict[str, Any]:
    recipe = make_recipe(knowing, folder / "new")
    recipe["forget"]["data"]["path"] = str(knowing / "data/holdout.jsonl")
    return recipe


def other_prompt(knowing: Path, folder: Path) -> dict[str, Any]:
    return make_recipe(knowing, folder / "new") | {"prompt": {"prompt": "Tell me, friend! {question}\n\nWell,"}}


@pytest.mark.parametrize("spoil", [other_rows, other_prompt])
def test_rows_that_the_target_does_not_know_stop_a_run_before_it_fits(
    spoil: Any, knowing: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(spoil(knowing, tmp_path)))
    status, stdout, stderr = call_cli(str(path))
    assert (status, stdout) == (3, ""), stderr
    assert "does not know the rows to forget" in stderr
    assert (stderr.count("question     "), stderr.count("  expected   "), stderr.count("  target     ")) == (2, 2, 2)
    assert "--accept" in stderr
    kept = {path.name for path in (tmp_path / "new").iterdir()} - {".lock", "record.key"}
    assert kept == {"recipe.yaml", "stages.json", "evaluation", ANSWERS_FILE}, "nothing was fitted"


def test_what_a_refused_run_has_scored_is_not_scored_again(
    knowing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not with --accept, and not for the final scores of the same rows; a purge finds what was kept."""
    scored: list[str] = []
    ask = records._ask

    def note(runner: Any, benchmark: Benchmark, part: Any, texts: Any, prompts: Any) -> Any:
        if benchmark.name != "probe":
            scored.extend(item.fields["question"] for item in texts)
        return ask(runner, benchmark, part, texts, prompts)

    monkeypatch.setattr(records, "_ask", note)
    recipe = other_rows(knowing, tmp_path)
    recipe["evaluate"]["holdout"] = {"path": str(knowing / "data/forget.jsonl")}
    with pytest.raises(MismatchError, match="the scores stay in"):
        msa_lite.run(recipe)
    assert len(scored) == 2 * 12, "target and prior on the forget rows, and nothing else"
    whole = shutil.copytree(tmp_path / "new", tmp_path / "purged")
    assert any(one.name.startswith("evaluation") for one in msa_lite.purge(whole).holdings), "the rows stand in there"
    scored.clear()
    with caplog.at_level("WARNING", logger="msa_lite"):
        result = msa_lite.run(recipe, ["vector.epochs=2"], accept=True)
    assert "does not know the rows to forget" in caplog.text
    assert result is not None
    assert result.verdict is not None
    assert (result.verdict.outcome, result.verdict.forgotten.known) == ("PARTLY", False)
    assert "there was nothing to forget" in result.verdict.reasons[0]
    forget = {json.loads(line)["question"] for line in (knowing / "data/holdout.jsonl").read_text().splitlines()}
    others = [question for question in scored if question not in forget]
    assert len(scored) - len(others) == 12, "the unlearned model alone is asked the forget rows anew"
    assert len(others) == 2 * (36 + 18), "target and unlearned model, once each"
