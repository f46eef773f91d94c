"""Faults that need no model are told before torch and its companions are loaded, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from filelock import FileLock

from tests.support.merges import write_checkpoint
from tests.support.runs import make_run_folder

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "peft", "datasets")
# Commands one after another, as (exit code, what it told, which heavy packages it was the first to load).
RUN = """
import contextlib, io, json, sys
from msa_lite.cli import main

heavy, done = json.loads(sys.argv[1]), []
for command in json.loads(sys.argv[2]):
    sys.argv[1:] = command
    before, err, code = set(sys.modules), io.StringIO(), 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    done.append((code, err.getvalue(), [name for name in heavy if name in sys.modules and name not in before]))
print(json.dumps(done))
"""
LOCKED_FOLDERS = ("run", "locked", "locked/baselines/npo", "locked-training")
LOCKED = "another msa-lite is working in it"
PURGED = "its data was purged"
# Of each command on a recipe: what is changed in it, the exit code, what is told.
OF_RECIPES = [
    ("forget.alhpa=1", 2, "forget.alhpa"),
    ("vector.epochs=-1", 2, "vector.epochs"),
    ("target=./nowhere", 2, "./nowhere: no such folder"),
    ("evaluate.ideal=./nowhere", 2, "./nowhere: no such folder"),
    ("forget.data.path=./nowhere.jsonl", 2, "./nowhere.jsonl: no such file"),
    ("forget.data.path=broken.jsonl", 3, "broken.jsonl: row 1"),
    ("forget.data.path=other.jsonl", 3, "no column 'question', 'answer'"),
    ("output=rows.jsonl", 3, "a file is in the way"),
    ("output=target", 3, "holds something that is no run"),
    ("output=locked", 3, LOCKED),
    ("output=purged", 3, PURGED),
]
ON_RECIPES = (["run"], ["run", "--until=sweep"], ["run", "--until=vectors"], ["baseline", "npo"], ["probe"])
FAULTS = [
    *(([*command, "recipe.yaml", change], code, told) for command in ON_RECIPES for change, code, told in OF_RECIPES),
    (["recipe.yaml", "output=locked"], 3, LOCKED),
    (["recipe.yaml", "earlier=[./nowhere]"], 2, "is no run of msa-lite"),
    (["recipe.yaml", "vector.mode=nlora"], 2, "vector.mode"),
    (["baseline", "npoo", "recipe.yaml"], 2, "npoo"),
    (["plan", "recipe.yaml", "forget.alhpa=1"], 2, "forget.alhpa"),
    (["plan", "recipe.yaml", "target=./nowhere", "prior=./nowhere"], 2, "nowhere"),
    (["train", "training.yaml", "stages.0.epoks=1"], 2, "epoks"),
    (["train", "training.yaml", "model=./nowhere"], 2, "./nowhere: no such folder"),
    (["train", "training.yaml", "stages.0.data.path=./nowhere.jsonl"], 2, "./nowhere.jsonl: no such file"),
    (["train", "training.yaml", "output=locked-training"], 3, LOCKED),
    (["train", "training.yaml", "output=rows.jsonl"], 3, "a file is in the way"),
    (["attack", "target"], 2, "target"),
    (["attack", "begun"], 3, "there is no unlearned model to attack yet"),
    (["attack", "purged"], 3, PURGED),
    (["attack", "run"], 3, LOCKED),
    (["attack", "open", "--attacks", "relaern"], 2, "relaern"),
    (["attack", "open", "forget.alpha=2"], 2, "of a finished run, only"),
    (["attack", "open"], 2, "models/target"),
    (["evaluate", "./nowhere", "--forget", "rows.jsonl", "--out", "out"], 2, "./nowhere: no such folder"),
    (["evaluate", "target", "--forget", "./nowhere.jsonl", "--out", "out"], 2, "./nowhere.jsonl: no such file"),
    (["evaluate", "target", "--forget", "rows.jsonl", "--ideal", "./no", "--out", "out"], 2, "./no: no such folder"),
    (["evaluate", "target", "--out", "out"], 2, "nothing to score"),
    (["ask", "target", "Who?"], 2, "target"),
    (["ask", "begun", "Who?"], 3, "there is no unlearned model to ask yet"),
    (["purge", "target"], 2, "target"),
    (["purge", "run", "--yes"], 3, LOCKED),
    (["report", "target"], 2, "target"),
    (["report", "damaged"], 3, "differs from its manifest"),
    (["report", "run", "--show-examples"], 3, LOCKED),
    (["merge", "--target", "./nowhere", "--forget", "prior", "--out", "out"], 2, "./nowhere: no such folder"),
    (["merge", "--target", "target", "--forget", "prior", "--out", "run"], 3, "run"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with models, data, recipes, and runs in all states."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    random = np.random.default_rng(0)
    for name in ("target", "prior"):
        write_checkpoint(tmp_path / name, {"layers.0.weight": random.normal(size=(8, 6)).astype(np.float32)})
    rows = [{"question": f"Who is {n}?", "answer": f"Number {n}."} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "broken.jsonl").write_text(json.dumps(rows[0]) + '\n{"question": "Who')
    (tmp_path / "other.jsonl").write_text('{"q": "Who?", "a": "You."}\n')
    recipe = {
        "target": "target",
        "prior": "prior",
        "forget": {"data": {"path": "rows.jsonl"}, "alpha": [0.5, 1.0]},
        "output": "out",
    }
    training = {"model": "target", "stages": [{"name": "all", "data": {"path": "rows.jsonl"}}], "output": "out"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "training.yaml").write_text(yaml.safe_dump(training))
    for name in ("run", "open", "purged", "begun", "damaged"):
        make_run_folder(tmp_path / name, output=name)
    (tmp_path / "purged/purged.json").write_text("{}")
    (tmp_path / "begun/model").rename(tmp_path / "begun/elsewhere")
    (tmp_path / "damaged/model/config.json").write_text("{} ")
    locks = [FileLock(tmp_path / name / ".lock") for name in LOCKED_FOLDERS]
    for lock in locks:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    yield tmp_path
    for lock in locks:
        lock.release()


def files(folder: Path) -> list[Path]:
    """All files and folders but locks, which stay."""
    return sorted(path for path in folder.rglob("*") if path.suffix != ".lock" and path.name != ".lock")


def test_faults_that_need_no_model_are_told_before_torch_is_loaded(folder: Path) -> None:
    before = files(folder)
    commands = json.dumps([command for command, _, _ in FAULTS])
    line = [sys.executable, "-c", RUN, json.dumps(HEAVY), commands]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    wrong = [
        (" ".join(command), code, err[-300:], loaded)
        for (command, wanted, told), (code, err, loaded) in zip(FAULTS, results, strict=True)
        if code != wanted or told not in err or loaded
    ]
    assert not wrong, "\n".join(map(str, wrong))
    assert files(folder) == before, "a refusal writes nothing"
