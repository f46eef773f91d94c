"""The removal record at the end of a run: what it holds, what it never holds, and how long it stays the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.errors import FormatError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.hub import hash_content
from msa_lite.record.check import check_record
from msa_lite.record.seal import KEY_FILE, RECORD_FILE, load_record, record_hash
from tests.e2e.conftest import CallCli, tiny_recipe


@pytest.fixture(scope="module")
def finished(history: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The recipe of a finished run."""
    recipe = tiny_recipe(history, tmp_path_factory.mktemp("removal") / "run") | {"request": "GDPR 2026-017"}
    msa_lite.run(recipe)
    return recipe


@pytest.fixture
def run(finished: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of the run, for a test to disturb."""
    return Path(shutil.copytree(finished["output"], tmp_path / "copy"))


def forget_rows(history: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (history / "data/forget.jsonl").read_text().splitlines()]


def test_the_record_says_what_was_done(finished: dict[str, Any], history: Path) -> None:
    run = Path(finished["output"])
    record = load_record(run / RECORD_FILE)
    assert (record.request, record.method, record.strengths) == ("GDPR 2026-017", "msa", {"alpha": 1.0, "beta": 0.5})
    for name in ("target", "prior", "ideal"):
        assert record.models[name].revision == hash_content(history / name)
        assert record.models[name].name == "local folder"
    assert record.result.revision == hash_content(run / "model")
    assert [(vector.name, vector.weight) for vector in record.vectors] == [("forget", -1.0), ("retain", 0.5)]
    hashes = [hash_content(run / "vectors" / name) for name in ("forget", "retain")]
    assert [vector.revision for vector in record.vectors] == hashes
    assert record.row_counts == {"forget": 18, "retain": 18}
    verdict = json.loads((run / "verdict.json").read_text())
    assert (record.verdict.outcome, record.verdict.sentence) == (verdict["outcome"], verdict["sentence"])
    names = ["recipe.yaml", "verdict.json", "model/manifest.json", "report.json", "report.html"]
    assert record.files == {name: hash_file(run / name) for name in names}
    assert record.started <= record.finished


def test_the_record_holds_no_row_no_path_and_no_plain_hash(finished: dict[str, Any], history: Path) -> None:
    run = Path(finished["output"])
    text = (run / RECORD_FILE).read_text()
    rows = forget_rows(history)
    parts = [part for row in rows for part in row.values()]
    words = {word for part in parts for word in part.split() if word.istitle() and len(word) > 5}
    hashes = [json.loads(line)["sha256"] for line in (run / "vectors/forget/rows.jsonl").read_text().splitlines()]
    paths = [str(run), str(history), str(Path.home()), os.sep + "tmp"]
    manifest = load_manifest(run / "vectors/forget")
    assert manifest is not None
    derived = [manifest["inputs"]["examples"], manifest["files"]["rows.jsonl"]["sha256"]]
    assert len(words) > 3
    assert [item for item in [*parts, *words, *hashes, *paths, *derived] if item in text] == []
    assert (run / KEY_FILE).read_text().strip() not in text
    assert stat.S_IMODE((run / KEY_FILE).stat().st_mode) == 0o600
    assert any(value in (run / "recipe.yaml").read_text() for value in paths)  # where such things do stand


def test_a_rerun_leaves_the_record_and_a_changed_one_writes_it_anew(
    finished: dict[str, Any], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = finished | {"output": str(run)}
    msa_lite.run(recipe)  # of the copy: its recipe.yaml has another output
    before = (run / RECORD_FILE).read_bytes()
    msa_lite.run(recipe)
    assert (run / RECORD_FILE).read_bytes() == before
    made = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    labels: list[str] = []
    msa_lite.run(recipe | {"request": "another"}, progress=lambda label, done, total: labels.append(label))
    assert "changed since the last run: output" in caplog.text  # it is a copy
    assert "request" not in caplog.text
    assert labels == []  # the id of a request decides no result
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")} == made
    assert load_record(run / RECORD_FILE).request == "another"
    key = (run / KEY_FILE).read_bytes()
    msa_lite.run(recipe, ["forget.alpha=0.5"])
    record = load_record(run / RECORD_FILE)
    assert record.strengths["alpha"] == 0.5
    assert record.result.revision == hash_content(run / "model")
    assert (run / KEY_FILE).read_bytes() == key
    assert check_record(run).faults == []


def test_the_recipe_holds_no_plain_hash_of_the_rows_either(
    finished: dict[str, Any], run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notes = [line for line in (run / "recipe.yaml").read_text().splitlines() if line.startswith("# rows learnt")]
    keyed = [f"# rows learnt, {name}: hmac-sha256:…" for name in ("forget", "retain")]
    assert [re.sub("[0-9a-f]{64}", "…", line) for line in notes] == keyed
    for text, warned in (("hmac-sha256:0", True), ("sha256:0", False)):  # the latter is an earlier version's
        changed = re.sub("(?<=rows learnt, forget: ).*", text, (run / "recipe.yaml").read_text())
        (run / "recipe.yaml").write_text(changed)
        caplog.clear()
        msa_lite.run(finished | {"output": str(run)})
        assert ("content of rows learnt, forget" in caplog.text) is warned


def test_verify_checks_run_record_and_rows(run: Path, history: Path, call_cli: CallCli) -> None:
    status, out, err = call_cli("verify", run)
    assert (status, "not signed" in err) == (0, True)
    assert "agrees with recipe.yaml, verdict.json, model/manifest.json, report.html, report.json" in out
    status, out, _ = call_cli("verify", run, "--rows", history / "data/forget.jsonl")
    assert (status, out.splitlines()[-1]) == (0, "18 of 18 rows were to be forgotten")
    status, out, _ = call_cli("verify", run, "--rows", history / "data/retain.jsonl")
    assert (status, out.splitlines()[-1]) == (0, "0 of 36 rows were to be forgotten")
    (run / RECORD_FILE).write_text((run / RECORD_FILE).read_text().replace("GDPR 2026-017", "GDPR 2026-018"))
    status, _, err = call_cli("verify", run)
    assert (status, "record_sha256 does not fit it" in err) == (3, True)


def test_a_damaged_key_is_told_before_any_work(finished: dict[str, Any], run: Path) -> None:
    (run / KEY_FILE).write_text("broken")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    with pytest.raises(FormatError, match="put a copy of the right one there"):
        msa_lite.run(finished | {"output": str(run)}, ["forget.alpha=0.25"])
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_requests_chain(recipe: dict[str, Any], history: Path, tmp_path: Path, call_cli: CallCli) -> None:
    lines = (history / "data/forget.jsonl").read_text().splitlines(keepends=True)
    for name, part in {"one": lines[:9], "two": lines[9:]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    places = {name: tmp_path / name for name in ("one", "two")}
    recipe |= {"evaluate": None}
    for name, place in places.items():
        recipe["forget"]["data"]["path"] = str(tmp_path / f"{name}.jsonl")
        recipe |= {"output": str(place), "request": name, "earlier": [str(places["one"])] if name == "two" else []}
        msa_lite.run(recipe)
    record = load_record(places["two"] / RECORD_FILE)
    assert [(item.request, item.record_sha256) for item in record.earlier] == [("one", record_hash(places["one"]))]
    assert record.previous_sha256 == hash_file(places["one"] / RECORD_FILE)
    first = load_record(places["one"] / RECORD_FILE)
    assert {vector.revision for vector in first.vectors} < {vector.revision for vector in record.vectors}
    assert sorted(vector.weight for vector in record.vectors) == [-1.0, -1.0, 1.0]  # one retain vector for both
    assert "Σ" in record.formula
    status, out, err = call_cli("verify", places["two"])
    assert (status, "error" in err) == (0, False)
    assert f"{places['one'] / RECORD_FILE}: the earlier request one, as {places['two'] / RECORD_FILE} names it" in out
    _, out, _ = call_cli("verify", places["two"], "--rows", history / "data/forget.jsonl")
    assert out.splitlines()[0] == f"row 0: among the rows to forget of the earlier run {places['one']}"
    assert out.splitlines()[9:] == [
        *(f"row {number}: among the rows to forget" for number in range(9, 18)),
        "18 of 18 rows were to be forgotten",
    ]
