"""`msa-lite purge`: after it no file holds a row to forget, and what a run leaves for others is as it was."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import msa_lite
from msa_lite.errors import MismatchError, OutputError, StageError, UsageError
from msa_lite.evals.scores.evaluation import finished_inputs
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import NOT_OURS, describe_file, in_use, verify_folder, write_manifest
from msa_lite.pipeline.purge.holdings import HOLDS
from msa_lite.pipeline.purge.purge import purge
from msa_lite.pipeline.run.folder import recipe_text
from msa_lite.pipeline.run.report import report_run
from msa_lite.recipe import load_recipe
from tests.e2e.conftest import CallCli, hashes, tiny_recipe
from tests.support.leftovers import copy_run, forms, holding


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


LATER = (".lock", ".purge.lock", "purged.json")  # times and locks
TREES = ("vectors", "baselines/task_vector/vectors", "history", "target", "prior")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run with a baseline's, whose reports show examples."""
    return copy_run(finished, tmp_path / "run")


def test_purge_removes_of_each_stage_what_its_kind_holds(run: Path) -> None:
    reasons = {holding.name: holding.reason for holding in purge(run).holdings}
    kinds = {str(path.parent.relative_to(run)): read_json(path)["kind"] for path in run.rglob("manifest.json")}
    del kinds["evidence/nearer"]  # undecided here, so it holds no row
    assert {*kinds.values()} == {"vector", "model", "evaluation", "probe", "evidence", "sweep"}
    for name, kind in kinds.items():
        assert reasons.get(name) == (None if kind == "model" else HOLDS[kind]), name


@pytest.mark.pictures
def test_no_row_is_left_and_the_rest_works_on(
    run: Path, history: Path, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(history, run / "history")  # as a demo's run has it
    (run / "tracking/sweep").mkdir(parents=True)
    (run / "tracking/sweep/samples.txt").write_bytes(forms(history)[0])
    rows = forms(history)
    before, kept = holding(run, rows), hash_file(run / "model/manifest.json")
    assert {"evaluation/target/forget.jsonl", "sweep/target/forget.jsonl", "history/data/forget.jsonl"} <= before
    assert {"report.html", "report.json"} <= before

    status, out, _ = call_cli("purge", run)
    assert status == 0
    assert f"To remove what holds the data: msa-lite purge {run} --yes" in out
    assert f"the data itself: {history / 'data/forget.jsonl'} (forget.data)" in out
    assert f"the target, which knows the data: {history / 'target'}" in out
    assert holding(run, rows) == before, "a list changes nothing"
    assert not (run / "purged.json").exists()

    status, out, _ = call_cli("purge", run, "--yes", "--json")
    result = json.loads(out)
    assert (status, result["removed"], result["left_alone"]) == (0, True, [])
    assert holding(run, rows) == set()
    assert not (run / "tracking").exists()
    assert result["not_removed"][0] == f"the data itself: {history / 'data/forget.jsonl'} (forget.data)"
    assert [name for name in TREES if (run / name).exists()] == []
    assert not list(run.rglob("*.jsonl"))
    assert hash_file(run / "model/manifest.json") == kept
    kept_files = ("record.key", "record.json", "recipe.yaml", "verdict.json", "report.html")
    assert [name for name in kept_files if not (run / name).is_file()] == []
    note = json.loads((run / "purged.json").read_text())
    assert [entry["name"] for entry in note["removed"]] == [entry["name"] for entry in result["holdings"]]

    assert call_cli("verify", run)[0] == 0
    assert call_cli("compare", run)[0] == 0
    assert call_cli("ask", run, "Who?", "--json")[0] == 0
    status, out, _ = call_cli("report", run)
    assert status == 0
    assert "vectors: purged on " in out
    status, _, err = call_cli("run", run / "recipe.yaml")
    assert status == 3
    assert "its data was purged, and a run would fit the vectors again" in err
    assert call_cli("baseline", "npo", run / "recipe.yaml")[0] == 3

    status, out, _ = call_cli("purge", run, "--yes")
    assert status == 0
    assert f"{run}: nothing that msa-lite made in it holds the data since it was purged (" in out
    assert json.loads((run / "purged.json").read_text()) == note


def test_scores_without_records_serve_no_other_run(run: Path, history: Path, recipe: dict[str, Any]) -> None:
    purge(run / "baselines/task_vector", remove=True)
    assert verify_folder(run / "evaluation/unlearned") == []
    assert (run / "evaluation/unlearned/forget.jsonl").is_file(), "the run above is another one"
    with pytest.raises(MismatchError, match="the records were removed"):
        finished_inputs(run / "baselines/task_vector/evaluation/unlearned")
    # The recipe's own run looks at the scores of its baselines.
    shutil.rmtree(run / "evaluation/target")
    assert msa_lite.run(str(run / "recipe.yaml")) is not None
    assert (run / "evaluation/target/forget.jsonl").is_file()


def test_a_search_prints_the_files_in_which_rows_stand(
    run: Path, history: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    row = json.loads((history / "data/forget.jsonl").read_text().splitlines()[0])
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "said.txt").write_text(f"said: {row['question']} I think")
    (notes / "log.json").write_text(json.dumps({"said": json.dumps(row)}))
    (notes / "milk.txt").write_text("buy milk")
    (notes / "link.txt").symlink_to(notes / "said.txt")
    os.mkfifo(notes / "pipe")
    before = hashes(run, *LATER)
    status, out, _ = call_cli("purge", run, "--search", notes, "--search", run / "vectors")
    assert (status, out.split()) == (0, [str(notes / "log.json"), str(notes / "said.txt")])
    status, out, _ = call_cli("purge", run, "--search", run, "--json")
    assert {Path(name).name for name in json.loads(out)["found"]} >= {"forget.jsonl", "report.json"}
    assert hashes(run, *LATER) == before
    assert call_cli("purge", run, "--search", notes, "--yes")[0] == 2
    status, _, err = call_cli("purge", run, "--search", tmp_path / "absent")
    assert (status, "no such folder" in err) == (2, True)
    rows = tmp_path / "rows"
    rows.mkdir()
    shutil.copy(history / "data/retain.jsonl", rows / "train.jsonl")
    shutil.copy(history / "data/forget.jsonl", rows / "test.jsonl")
    text = (run / "recipe.yaml").read_text()
    text = text.replace(str(history / "data/forget.jsonl"), str(rows)).replace("split: null", "split: test", 1)
    (run / "recipe.yaml").write_text(text)
    status, out, _ = call_cli("purge", run, "--search", notes)
    assert (status, out.split()) == (0, [str(notes / "log.json"), str(notes / "said.txt")])
    (run / "recipe.yaml").write_text(text.replace(str(rows), str(tmp_path / "gone.jsonl")))
    status, _, err = call_cli("purge", run, "--search", notes)
    assert (status, "put their files back to search" in err) == (2, True)


def test_what_a_kill_leaves_between_two_renames_goes_too(run: Path, history: Path) -> None:
    (run / "vectors/forget").rename(run / "vectors/forget.previous")
    (run / "model").rename(run / "model.previous")
    (run / "report.html.tmp").write_bytes(forms(history)[0])
    (run / "prompt.json").write_text("{}")
    result = purge(run, remove=True)
    assert holding(run, forms(history)) == set()
    assert not (run / "vectors").exists()
    assert not (run / "prompt.json").exists()
    kept = {remark.name: remark.reason for remark in result.kept}
    assert kept["model.previous"] == "the unlearned model"
    assert result.strays == []


def test_files_of_others_and_links_are_left_alone_and_named(run: Path, tmp_path: Path, history: Path) -> None:
    outside = tmp_path / "outside"
    (run / "vectors").rename(outside)
    (run / "vectors").symlink_to(outside)
    (run / "copies").mkdir()
    (run / "copies/vectors").symlink_to(outside)
    (run / "notes").mkdir()
    (run / "notes/mine.txt").write_bytes(forms(history)[0])
    (run / "todo.txt").write_text("buy milk")
    (run / "evaluation/target/copy.jsonl").write_text("{}")
    (run / "evaluation/ideal/manifest.json").write_text("{}")
    manifest = json.loads((run / "evaluation/unlearned/manifest.json").read_text())
    escaping = manifest["files"]["forget.jsonl"]
    (tmp_path / "victim.jsonl").write_text("mine")
    manifest["files"]["../../../victim.jsonl"] = escaping
    write_manifest(run / "evaluation/unlearned", manifest)
    before = hashes(outside, *LATER)
    result = purge(run)
    with pytest.raises(StageError, match=r"evaluation/ideal/forget.jsonl: .*its manifest.json is damaged"):
        purge(run, remove=True)
    left = {remark.name: remark.reason for remark in result.strays}
    assert left["copies/vectors"] == left["vectors"] == f"a link to {outside}, which is not followed"
    assert left["notes/"] == left["todo.txt"] == left["evaluation/target/copy.jsonl"] == NOT_OURS
    assert "its manifest.json is damaged" in left["evaluation/ideal/forget.jsonl"]
    assert hashes(outside, *LATER) == before
    assert (tmp_path / "victim.jsonl").read_text() == "mine"
    assert holding(run, forms(history)) == {"notes/mine.txt", "evaluation/ideal/forget.jsonl"}


def reseal(folder: Path, kind: str | None = None) -> None:
    """Write a manifest that fits whatever lies in a folder."""
    manifest = read_json(folder / "manifest.json")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    manifest["files"] = {str(path.relative_to(folder)): describe_file(path) for path in files}
    write_manifest(folder, manifest | ({"kind": kind} if kind else {}))


def test_what_is_known_by_its_content_goes_or_stays_under_any_name(run: Path, history: Path) -> None:
    (run / "model").rename(run / "my model")
    shutil.copytree(run / "vectors/forget", run / "moments.bak")
    shutil.copytree(run / "evaluation/target", run / "old/scores")
    reseal(run / "baselines/task_vector/vectors/forget", "evaluation")  # whose reports alone would stay
    (run / "sweep/rows.bin").write_bytes(forms(history)[0])
    reseal(run / "sweep")
    stages = read_json(run / "stages.json")
    for stage in stages["stages"]:  # as an earlier version wrote it
        stage["holds"] = forms(history)[0].decode()
    (run / "stages.json").write_text(json.dumps(stages))
    (run / "my model/README.md").write_text("edited by its owner")
    shutil.copytree(run / "evaluation", run / "attacks/prompt")  # and no record has the hash of its report
    (run / "attacks/prompt/report.json").write_text("{}")
    shutil.copytree(run / "my model", run / "other")
    (run / "other/model.safetensors").write_bytes((history / "target/model.safetensors").read_bytes())
    reseal(run / "other")
    record = (run / "record.json").read_text()
    (run / "record.json").write_text("{}")
    strays = {"my model/", "other/", "record.json", "verdict.json", "attacks/prompt/report.json"}
    assert {remark.name for remark in purge(run).strays} == strays, "without a record, nobody knows a model"
    (run / "record.json").write_text(record)
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("forget.jsonl", "retain.jsonl"))
    strays = {"my model/README.md", "attacks/prompt/report.json"}
    assert {remark.name for remark in purge(run).strays} == strays, "the rows are others, so a search shows nothing"
    (run / "recipe.yaml").write_text(text)
    result = purge(run, remove=True)
    assert {remark.name: remark.reason for remark in result.kept}["my model"] == "the unlearned model"
    assert (result.strays, holding(run, forms(history))) == ([], set())
    assert (run / "attacks/prompt/report.json").exists(), "it was searched"
    assert purge(run, remove=True).holdings == []
    left = {str(path.relative_to(run)) for path in run.rglob("*.safetensors")}
    assert left == {"my model/model.safetensors", "baselines/task_vector/model/model.safetensors"}


def test_what_is_not_known_is_named_until_it_is_moved_or_named(
    run: Path, history: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    row = forms(history)[0]
    weights = bytearray((run / "model/model.safetensors").read_bytes())
    weights[-9:] = bytes(9)
    (run / "model/model.safetensors").write_bytes(weights)
    shutil.copytree(run / "model", run / "relearnt")
    reseal(run / "relearnt")
    shutil.copytree(run / "vectors/forget", run / "copy")
    (run / "copy/manifest.json").unlink()
    for name in ("notes/mine.txt", "notes/more.txt", "evaluation/.journal.jsonl", ".lock", "report.json~"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(row)
    (run / "verdict.json").write_text(json.dumps(read_json(run / "verdict.json") | {"more": row.decode()}))
    (run / "baselines/task_vector/model/README.md").write_bytes(b"Its owner quotes: " + row)
    report = read_json(run / "evaluation/ideal/report.json")
    (run / "evaluation/ideal/report.json").write_text(json.dumps(report | {"split": row.decode()}, ensure_ascii=False))
    reseal(run / "evaluation/ideal")
    (run / "vectors/forget/train_log.jsonl").unlink()
    (run / "vectors/forget/train_log.jsonl").symlink_to(tmp_path / "log")
    os.mkfifo(run / "pipe")
    shutil.copytree(run / "baselines/task_vector/vectors/forget", tmp_path / "beside/copy")
    strange = {
        ".lock", "copy/", "evaluation/.journal.jsonl", "model/model.safetensors", "notes/", "pipe",
        "report.json~", "vectors/forget/train_log.jsonl", "verdict.json", "baselines/task_vector/model/README.md",
    }  # fmt: skip
    assert {remark.name for remark in purge(run).strays} == strange - {"model/model.safetensors"}, "by sizes alone"
    for path in ("record.key", "..", str(run), "evaluation/target/report.json", "vectors/forget/train_log.jsonl/x"):
        assert call_cli("purge", run, "--yes", "--also", "copy", "--also", path)[0] == 2, path
    assert (run / "baselines/task_vector/vectors/forget").exists()

    status, _, err = call_cli("purge", run, "--yes")
    named = {line.strip().partition(": ")[0] for line in err.splitlines() if line.startswith("  ")}
    assert (status, named) == (4, strange | {"evaluation/ideal/report.json"})
    assert "evaluation/ideal/report.json: a row to forget stands in it" in err
    assert read_json(run / "purged.json")["ended"] is None
    assert not (run / "baselines/task_vector/vectors/forget").exists()
    assert not (run / "relearnt").exists(), "the record's manifest is in model/"
    left = {path.name for path in (run / "vectors/forget").iterdir()}
    assert left == {"train_log.jsonl", "manifest.json"}, "of a stage with a link"
    assert not (run / "report.html").exists(), "it is not made of what is not known"

    also = [part for name in strange - {"notes/"} for part in ("--also", name)]
    shutil.rmtree(run / "evaluation/ideal")
    assert call_cli("purge", run, "--yes", *also, "--also", run / "notes/mine.txt")[0] == 4
    assert [path.name for path in (run / "notes").iterdir()] == ["more.txt"]
    (run / "notes").rename(tmp_path / "notes")
    status, out, _ = call_cli("purge", run, "--yes", "--json")
    assert (status, json.loads(out)["left_alone"], holding(run, forms(history))) == (0, [], set())
    assert f"made from them: {tmp_path / 'beside/copy'}" in " ".join(json.loads(out)["not_removed"])
    assert read_json(run / "purged.json")["ended"]


@pytest.mark.parametrize("stage", ["vectors/forget", "evaluation/target"])
def test_a_stage_whose_manifest_is_damaged_gets_no_all_clear(stage: str, run: Path, call_cli: CallCli) -> None:
    (run / stage / "manifest.json").write_text("7")
    for _ in range(2):
        code, _, err = call_cli("purge", str(run), "--yes")
        assert (code, stage in err) == (4, True)
        assert json.loads((run / "purged.json").read_text())["ended"] is None
    shutil.rmtree(run / stage)
    assert call_cli("purge", str(run), "--yes")[0] == 0


def test_a_run_in_which_a_process_works_is_left_alone(run: Path) -> None:
    before = hashes(run, *LATER)
    for place in (run, run / "baselines/task_vector"):
        with FileLock(place / ".lock"), pytest.raises(OutputError, match="another msa-lite is working"):
            purge(run, remove=True)
        with in_use(place), pytest.raises(OutputError, match=rf"a page of this run is open \(process {os.getpid()}\)"):
            purge(run, remove=True)
        assert hashes(run, *LATER) == before
    with FileLock(run / ".lock"):
        assert purge(run).holdings, "a list may be had at any time"
        report_run(run)
        with pytest.raises(OutputError, match="another msa-lite is working"):
            report_run(run, show_examples=True)  # which a purge beside it would not see


def test_what_cannot_be_removed_is_named_and_the_rest_goes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def refuse(path: Any, **options: Any) -> None:
        if str(path).endswith("adapter_model.safetensors") and "retain" not in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StageError, match=r"vectors/forget/adapter_model\.safetensors: Permission denied"):
        purge(run, remove=True)
    assert not list((run / "evaluation").rglob("*.jsonl"))
    assert json.loads((run / "purged.json").read_text())["ended"] is None
    monkeypatch.undo()
    with pytest.raises(OutputError, match="its data was purged"):
        msa_lite.run(str(run / "recipe.yaml"))
    purge(run, remove=True)
    assert not (run / "vectors").exists()


def test_a_run_that_was_just_begun_is_listed(tmp_path: Path, history: Path, call_cli: CallCli) -> None:
    recipe = tiny_recipe(history, tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text(recipe_text("run", "msa-lite", load_recipe(recipe)))
    status, out, _ = call_cli("purge", tmp_path / "run", "--yes")
    assert status == 0
    assert f"{tmp_path / 'run'}: nothing that msa-lite made in it holds the data\n" in out
    assert not (tmp_path / "run/purged.json").exists(), "nothing was removed, so it may run"
    status, _, err = call_cli("purge", tmp_path)
    assert status == 2
    assert "no run of msa-lite" in err
    with pytest.raises(UsageError):
        purge(tmp_path / "absent")
