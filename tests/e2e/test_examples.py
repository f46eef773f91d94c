"""Every example runs: on models that are made here, or, at tiny size, on the benchmarks' rows beside the repository."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from msa_lite.errors import UsageError
from msa_lite.merger import merge
from tests.support.fits import weights
from tests.support.hub import HubServer
from tests.support.hub_clients import REPO, client_of

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TESTED = {"attack", "evaluate", "merge", "publish", "sweep", "vector"}
CallExample = Callable[..., str]


@pytest.fixture
def call_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CallExample:
    """call_example(name, *arguments) → stdout of an example that runs in this process."""

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_there_is_a_test_for_every_example_and_a_line_about_it() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED
    listed = re.findall(r"^\| \[([\w./]+)\]\(([\w./]+)\) \|", (EXAMPLES / "README.md").read_text(), re.M)
    assert {place for _, place in listed} == {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}


def test_merge(
    call_example: CallExample, make_checkpoint: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    target, vectors = make_checkpoint("llama"), [make_adapter("llama", seed=seed) for seed in (1, 2)]
    arguments = ["--target", target, "--forget", vectors[0], "--retain", vectors[1]]
    out = call_example("merge", *arguments, "--alpha", 0.5, "--beta", 0.25, "--out", tmp_path / "merged")
    assert "weights in" in out
    before, after = weights(target), weights(tmp_path / "merged")
    halves = [weights(merge(target, tmp_path / f"{i}", forget=vector).folder) for i, vector in enumerate(vectors)]
    for name, value in after.items():
        forget, retain = (before[name] - half[name] for half in halves)
        assert value.allclose(before[name] - 0.5 * forget + 0.25 * retain, atol=1e-6), name


def test_vector(call_example: CallExample, history: Path, tmp_path: Path) -> None:
    sets = [f"--{name}={history}/data/{name}.jsonl" for name in ("forget", "retain")]
    models = [f"--{name}={history / name}" for name in ("target", "prior")]
    short = ["vector.epochs=2", "vector.learning_rate=5e-3", "vector.lora.rank=2"]
    out = call_example("vector", *models, *sets, f"--out={tmp_path / 'run'}", *short)
    folders = [tmp_path / "run/vectors" / name for name in ("forget", "retain")]
    assert [line for line in out.splitlines() if " vector: " in line] == [f"{f.name} vector: {f}" for f in folders]
    assert json.loads((folders[0] / "adapter_config.json").read_text())["r"] == 2
    command = out.splitlines()[-1].partition("examples/")[2].split()
    call_example("merge", *command[1:-1], tmp_path / "merged")
    assert (tmp_path / "merged/manifest.json").is_file()


def test_sweep(call_example: CallExample, finished: Path, tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", yaml.safe_load((finished / "recipe.yaml").read_text())
    shutil.copytree(finished, run)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"output": str(run)}))
    out = call_example("sweep", tmp_path / "recipe.yaml")
    assert len(re.findall(r"^α = [\d.]+ +β = 0 ", out, re.M)) == 2
    assert re.search(r"^chosen: α = (0\.5|1)", out, re.M)
    assert "in memory" in out


def test_evaluate(call_example: CallExample, history: Path, tmp_path: Path) -> None:
    sets = [f"--{name}={history}/data/{name}.jsonl" for name in ("forget", "retain")]
    models = [f"{name}={history / name}" for name in ("target", "ideal")]
    out = call_example("evaluate", *models, *sets, "--limit", 2, "--out", tmp_path / "scores")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert lines["metric"].split() == ["metric", "target", "ideal"]
    for place, name in enumerate(("target", "ideal")):
        report = json.loads((tmp_path / "scores" / name / "report.json").read_text())
        assert lines["probability_r"].split(" ± ")[place].endswith(f"{report['metrics']['probability_r']['value']:.3f}")


def test_attack(call_example: CallExample, attacked: Path, tmp_path: Path) -> None:
    run = shutil.copytree(attacked, tmp_path / "run")
    out = call_example("attack", run, "--attacks", "membership", "--rows", 4)
    assert re.findall(r"^membership, (\w+): (?:brings back|tells)", out, re.M) == ["unlearned"]
    assert f"all of it: {run}/attacks" in out


@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")
def test_publish(
    call_example: CallExample, make_checkpoint: Callable[..., Path], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    model = merge(make_checkpoint("llama"), tmp_path / "model", forget=make_adapter("llama")).folder
    with HubServer() as hub, client_of(hub):
        out = call_example("publish", model, REPO)
        assert out.startswith(f"model: {hub.url}/{REPO} (private, commit ")
        assert {"model.safetensors", "README.md"} <= hub.on(REPO).keys()
        assert f"new_version: {REPO}" in out
        assert "bytes" not in call_example("publish", model, REPO), "a second time, all files are there"
        with pytest.raises(UsageError, match="license"):
            call_example("publish", model, "alice/open", "--public")
        assert hub.branch_names("alice/open") == []


@pytest.mark.slow
def test_fifty_requests_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, out = EXAMPLES / "fifty_requests/run.py", tmp_path / "out"
    command = [sys.executable, str(script), "--small", "--requests", "3", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
    lines = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert [(line["method"], line["number"]) for line in lines] == [
        (method, number) for method in ("msa", "npo", "grad_diff") for number in (1, 2, 3)
    ]
    rows = [len((out / f"rows/request-{n:02}.jsonl").read_text().splitlines()) for n in (1, 2, 3)]
    assert [line["rows"] for line in lines] == rows * 3
    assert [line["earlier_scored"] for line in lines] == [0, rows[0], rows[0] + rows[1]] * 3
    assert all(min(line[key] for key in ("seconds", "cpu_seconds", "peak_mb", "disk_mb")) > 0 for line in lines)
    assert "| NPO, sequential |" in (out / "RESULTS.md").read_text()
    before = (out / "requests.svg").read_bytes()
    times = {path: path.stat().st_mtime_ns for path in out.glob("*/*/model/manifest.json")}
    assert len(times) == 3
    shutil.rmtree(out / "msa/03")
    (out / "costs/msa-03.json").unlink()  # as after a kill
    subprocess.run([*command, "--methods", "msa"], check=True, capture_output=True, timeout=600)
    again = {path: path.stat().st_mtime_ns for path in times}
    assert [path.parent.parent.name for path in times if again[path] != times[path]] == ["03"]
    assert before.startswith(b"<?xml")


def test_the_stored_results_of_fifty_requests_are_those_of_its_figure_and_tables(tmp_path: Path) -> None:
    folder = EXAMPLES / "fifty_requests"
    sys.path.insert(0, str(folder))
    try:
        from request_figure import write_figure
        from request_results import NAMES, read_results, tables_of
    finally:
        sys.path.remove(str(folder))
    requests, last = read_results(folder)
    assert {request.method for request in requests} == last.keys() == NAMES.keys()
    text = (folder / "RESULTS.md").read_text()
    assert [table for table in tables_of(requests, last) if table not in text] == []
    assert tables_of([replace(requests[0], kept=0.123), *requests[1:]], last)[0] not in text
    write_figure(requests, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (folder / "requests.svg").read_bytes()
