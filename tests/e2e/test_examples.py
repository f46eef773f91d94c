"""Every example runs: on models that are made here, or, at tiny size, on the benchmarks' rows beside the repository."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbclient
import nbformat
import pytest
import yaml

from msa_lite.catalogue import BENCHMARKS
from msa_lite.errors import UsageError
from msa_lite.evals.benchmarks.benchmark import BenchmarkSettings
from msa_lite.merger import merge
from msa_lite.report import load_report
from msa_lite.report.tables.metrics import METRICS
from tests.e2e.conftest import read_lines
from tests.support.benchmark_data import make_prompter
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
    assert re.findall(r"^membership, (\w+): .* comes back by .* \(\w+\)$", out, re.M) == ["unlearned"]
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
    lines = read_lines(out / "requests.jsonl")
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


# The example that locates updates: all of it runs at the smallest size, and its results are those of its scores.


LOCALISATION = Path(__file__).parents[2] / "examples/localisation"


@pytest.mark.slow
def test_the_example_locates_updates_in_a_tiny_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["msa-full", "undial"]
    arguments = ["--tiny", "--seeds", "3", "--methods", *methods, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    runpy.run_path(str(LOCALISATION / "run.py"), run_name="__main__")
    rows = read_lines(tmp_path / "scores.jsonl")
    assert [row["method"] for row in rows] == ["target", *methods, "exact undo"]
    target, *unlearned, undo = rows
    assert (target["precision"], target["auc"], target["undone"]) == (None, 0.5, 0)
    for row in unlearned:
        assert row["chance"] < row["chance_within"] == pytest.approx(0.05, rel=0.2)
        assert row["precision"] < 0.5
        assert row["undone"] != 0
    assert [undo[key] for key in ("precision", "auc", "precision_within", "energy")] == [1, 1, 1, 1]
    assert [undo[key] for key in ("cosine", "undone")] == pytest.approx([1, 1])
    out = capsys.readouterr().out
    assert all(out.count(f"| {name} |") == 2 for name in ("target", *methods, "exact undo"))


def test_the_table_of_the_results_is_that_of_the_scores() -> None:
    rows = read_lines(LOCALISATION / "scores.jsonl")
    names = runpy.run_path(str(LOCALISATION / "run.py"))
    assert [row["seed"] for row in rows] == sorted([0, 1, 2] * (len(names["METHODS"]) + 2))
    for columns in names["TABLES"].values():
        assert names["as_markdown"](rows, columns) in (LOCALISATION / "RESULTS.md").read_text()


# LUME, the example of a benchmark from outside: its recipe runs on tiny data, and its scores are those by hand.


LUME = Path(__file__).parents[2] / "examples/lume"
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
    monkeypatch.setattr(sys, "argv", ["lume.py", str(LUME / "olmo-1b.yaml"), *keys])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(LUME / "lume.py"), run_name="__main__")
    assert not ended.value.code
    for model in ("target", "unlearned"):
        report = load_report(tmp_path / "run/evaluation" / model)
        assert report.benchmark == "lume"
        assert (report.metrics["knowledge_f"].n, report.metrics["regurgitation_f"].n) == (4, 3)
        assert None not in (report.metrics["task_aggregate"].value, report.metrics["mia_score"].value)

    lume = runpy.run_path(str(LUME / "lume.py"), run_name="lume")["LUME"].load(
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


# The notebook of the quickstart runs from its first cell to its last, on models of a few thousand weights.


NOTEBOOK = Path(__file__).parents[2] / "examples/quickstart.ipynb"
SMALL = [
    *(f"demo.{name}={count}" for name, count in {"prior": 6, "retain": 6, "forget": 3, "holdout": 2}.items()),
    *("vector.epochs=2", "vector.batch_size=8", "vector.lora.rank=2"),
    *("forget.alpha=[0.5, 1.0]", "retain.beta=0.5", "merge.filter=1", "evaluate.max_new_tokens=4", "verdict=off"),
]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(cell: Any) -> str:
    """What a cell printed and returned, as text."""
    return "".join(output.get("text", "") or str(output.get("data", "")) for output in cell.outputs)


def test_the_notebook_is_stored_without_outputs() -> None:
    for cell in code_cells(nbformat.read(NOTEBOOK, 4)):
        assert (cell.outputs, cell.execution_count) == ([], None), "clear all outputs before you commit it"


@pytest.mark.slow
def test_the_notebook_runs_to_its_last_cell(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    parameters = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source = f"overrides = {SMALL!r}"
    with patch.dict(os.environ, {"PYTHONPATH": str(NOTEBOOK.parents[1]), "HF_HUB_OFFLINE": "1"}):
        nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    run, questions, points, merge, compared = map(outputs_of, code_cells(notebook)[1:])
    assert re.search(r"(?s)forget vector .* 100%.*<caption>RunResult\(runs/quickstart: .*λ = 1", run), "bars and tables"
    assert questions.count("  unlearned  ") == 2
    assert "text/markdown" in str(code_cells(notebook)[3].outputs), points
    assert "weights in" in merge
    assert "twice the α" in compared
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    errors = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert not re.search(r"\.py:\d+|Warning|\[transformers\]|started", errors), "nothing of other packages"
