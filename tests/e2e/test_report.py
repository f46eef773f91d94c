"""The report of a run: at its end, and by `msa-lite report` on a folder that is there, whole or not, sound or not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.evals.scores.records import read_records
from tests.e2e.conftest import CallCli, sweep_recipe, tiny_recipe
from tests.support.drawing import Drawing
from tests.support.pages import page_text

FORMS = ("report.html", "report.json")


@pytest.fixture(scope="module")
def done(history: Path, tmp_path_factory: pytest.TempPathFactory, drawing: Drawing) -> tuple[dict[str, Any], Path]:
    """A run with a choice, an ideal and the page of its report."""
    recipe = sweep_recipe(history, tmp_path_factory.mktemp("report") / "run")
    with drawing():
        result = msa_lite.run(recipe)
    assert result is not None
    return recipe, result.folder


@pytest.fixture
def run(done: tuple[dict[str, Any], Path], tmp_path: Path) -> Path:
    """The run's folder, to be changed."""
    shutil.copytree(done[1], tmp_path / "run")
    return tmp_path / "run"


def forms(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in FORMS}


def texts_of(run: Path) -> set[str]:
    """Every question and answer of the data, and what the models said."""
    records = [record for path in run.glob("evaluation/*/*.jsonl") for record in read_records(path)]
    return {record[key].strip() for record in records for key in ("question", "answer") if record.get(key)}


@pytest.mark.pictures
def test_a_run_and_the_command_write_the_same_bytes(run: Path, call_cli: CallCli) -> None:
    before = forms(run)
    status, stdout, stderr = call_cli("report", run)
    assert status == 0, stderr
    assert forms(run) == before
    values = json.loads(before["report.json"])
    lines = stdout.splitlines()
    assert lines[0] == f"{values['outcome']}  {values['sentence']}"
    assert values["sentence"] in page_text(run)
    assert lines[1:] == [f"report: {run / name}" for name in FORMS]
    assert (values["kind"], values["missing"], values["strengths"].keys()) == ("run", [], {"alpha", "beta"})
    assert set(values["metrics"]["accuracy_f"]["models"]) == {"target", "unlearned", "ideal"}
    assert len(values["choice"]["points"]) == 4
    status, stdout, _ = call_cli("report", run, "--json")
    assert (status, json.loads(stdout)) == (0, values)
    # A copy of the folder tells the same, and `verify` takes the report for no strange file.
    assert call_cli("verify", run)[0] == 0


@pytest.mark.pictures
def test_no_row_of_the_data_is_in_it_unless_somebody_asks(run: Path, call_cli: CallCli) -> None:
    texts = texts_of(run)
    assert len(texts) > 20
    assert not [text for text in texts for form in forms(run).values() if text.encode() in form]
    assert call_cli("report", run, "--show-examples")[0] == 0
    shown = json.loads((run / "report.json").read_text())["examples"]
    assert len(shown) == 10
    assert {example["set_name"] for example in shown} == {"forget", "retain"}
    assert set(shown[0]["answers"]) == {"target", "unlearned", "ideal"}
    for form in forms(run).values():
        assert any(example["question"].encode() in form for example in shown)
    assert call_cli("report", run)[0] == 0
    assert not [text for text in texts for form in forms(run).values() if text.encode() in form]


def test_an_unfinished_run_says_what_is_missing(run: Path, call_cli: CallCli) -> None:
    shutil.rmtree(run / "evaluation/unlearned")
    (run / "evaluation/unlearned.partial").mkdir()
    for name in ("verdict.json", *FORMS):
        (run / name).unlink()
    status, stdout, stderr = call_cli("report", run)
    assert status == 0, stderr
    assert stdout.startswith("This run is not finished")
    assert "missing: evaluation/unlearned: the unlearned model is not scored yet\n" in stdout
    assert "missing: verdict.json: there is no verdict yet\n" in stdout
    text = page_text(run)
    assert "extraction strength" in text
    assert "target | ideal |" in text


@pytest.mark.parametrize("name", ["evaluation/target/forget.jsonl", "sweep/choice.json"])
def test_a_changed_folder_has_no_report(name: str, run: Path, call_cli: CallCli) -> None:
    for form in FORMS:
        (run / form).unlink()
    (run / name).write_text((run / name).read_text() + " ")
    status, stdout, stderr = call_cli("report", run)
    assert (status, stdout) == (3, ""), stderr
    assert re.search(rf"{re.escape(str(run))}: differs from its manifest \(1 of \d+ folders\):\n  {name}: ", stderr)
    assert not [form for form in FORMS if (run / form).exists()]
    verified = [line for line in call_cli("verify", run)[2].splitlines() if not line.startswith("note: ")]
    assert verified[:2] == stderr.splitlines()[:2], "it is verify's own message"


def test_a_sweep_that_merges_another_model_leaves_no_report_of_the_one_before(
    done: tuple[dict[str, Any], Path], run: Path
) -> None:
    recipe = done[0] | {"output": str(run)}
    msa_lite.sweep(recipe)
    assert (run / "report.json").is_file(), "the model is the same"
    msa_lite.sweep(recipe, ["forget.alpha=[0.25,0.75]"])
    assert not [name for name in ("verdict.json", *FORMS) if (run / name).exists()]
    story = msa_lite.report_run(run)
    assert story.sentence.startswith("This run is not finished")
    assert "unlearned" not in story.reports, "they are of the model before"
    assert "unlearned" in story.validation


@pytest.mark.pictures
def test_what_goes_by_mail_names_paths_as_the_recipe_has_them(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = "models: #1"  # YAML has to quote it
    (tmp_path / models).symlink_to(history)
    monkeypatch.chdir(tmp_path)
    for recipe in (tiny_recipe(Path(models), Path("run")), Path("run/recipe.yaml")):
        assert msa_lite.run(recipe) is not None
        texts = {
            name: Path("run", name).read_text()
            for name in ("report.html", "report.json", "record.json", "verdict.json", "model/README.md")
        }
        assert [name for name, text in texts.items() if str(tmp_path) in text or str(history) in text] == []
        assert f"'{models}/target'" in page_text(Path("run"))
        assert f"{tmp_path}/{models}/target" in Path("run/recipe.yaml").read_text(), "a rerun works from anywhere"
