"""What the end-to-end tests share: a tiny model history made by the demo, a merge's inputs, and a Hub on loopback."""

from __future__ import annotations

import functools
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from msa_lite.cli import main
from msa_lite.demo import HistorySettings, make_groups, make_history
from msa_lite.errors import MsaError
from msa_lite.io.files.writing import hash_file
from msa_lite.merger import merge
from msa_lite.pipeline.prepare.run import Run, msa_scope, prepare
from msa_lite.recipe import load_recipe
from tests.support.drawing import Drawing
from tests.support.hub import HubServer
from tests.support.hub_clients import Hub, HubPythons
from tests.support.merges import contents, write_inputs
from tests.support.vary import model_seed

CallCli = Callable[..., tuple[int, str, str]]
PEOPLE = {"prior": 6, "retain": 6, "forget": 3, "holdout": 2}
SIZES: dict[str, Any] = {"hidden_size": 32, "layers": 1, "vocabulary": 300}
SHORT = SIZES | {"prior_epochs": 2, "tuning_epochs": 2, "prior_learning_rate": 5e-3, "tuning_learning_rate": 5e-3}

QUICK = ["membership", "prompt"]  # attacks
FEW = ["attack.rows=4"]


def make_tiny_history(folder: Path, **settings: Any) -> Path:
    """Make a history of few people, by settings beside those of `SHORT`."""
    make_history(folder, make_groups(PEOPLE, seed=0), HistorySettings(**SHORT | settings, seed=model_seed(0)))
    return folder


@pytest.fixture(scope="session")
def history(quick_fits: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_history(tmp_path_factory.mktemp("history"))


@pytest.fixture(scope="session")
def knowing(quick_fits: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history whose target knows its rows by heart."""
    rates = {"prior_learning_rate": 2e-2, "tuning_learning_rate": 2e-2}
    return make_tiny_history(tmp_path_factory.mktemp("knowing"), tuning_epochs=30, **rates, batch_size=8)


@pytest.fixture(scope="session")
def learnt(quick_fits: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that know something, so that points differ and strong ones break."""
    more = {"prior_epochs": 5, "tuning_epochs": 15, "tuning_learning_rate": 1e-2}
    return make_tiny_history(tmp_path_factory.mktemp("learnt"), **more, batch_size=8)


def write_recipe(recipe: dict[str, Any], folder: Path) -> str:
    """Write a recipe into a folder; return the file's path."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def prepared(recipe: dict[str, Any] | str) -> Run:
    """The run of a recipe after all checks, before any work."""
    loaded = load_recipe(recipe)
    return prepare(loaded, msa_scope(loaded))


def times(folder: Path, pattern: str = "manifest.json") -> dict[str, int]:
    """When each file below a folder that fits a pattern was written, by its path in the folder."""
    paths = (path for path in folder.rglob(pattern) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in paths}


def hashes(folder: Path, *skip: str) -> dict[str, str]:
    """The hash of each file below a folder, by its path in the folder, those with some names left out."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in skip)
    return {str(path.relative_to(folder)): hash_file(path) for path in paths}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The values of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def tiny_recipe(history: Path, output: Path) -> dict[str, Any]:
    """A recipe over the history that runs in seconds."""
    return {
        "target": str(history / "target"),
        "prior": str(history / "prior"),
        "forget": {"data": {"path": str(history / "data/forget.jsonl")}, "alpha": 1.0},
        "retain": {"data": {"path": str(history / "data/retain.jsonl"), "sample": "match_forget"}, "beta": 0.5},
        "vector": {"lora": {"rank": 2, "alpha": 4}, "epochs": 2, "learning_rate": 5e-3, "batch_size": 8},
        "evaluate": {
            "ideal": str(history / "ideal"),
            "holdout": {"path": str(history / "data/holdout.jsonl")},
            "max_new_tokens": 6,
            "limit": 8,
        },
        "evidence": {"collect": []},
        "verdict": False,  # models that have learnt this little know no row
        "output": str(output),
    }


@pytest.fixture
def recipe(history: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe over the history that runs in seconds; its output is tmp_path/run."""
    return tiny_recipe(history, tmp_path / "run")


def sweep_recipe(history: Path, output: Path) -> dict[str, Any]:
    """A recipe with a grid of two by two points."""
    recipe = tiny_recipe(history, output)
    recipe["forget"]["alpha"], recipe["retain"]["beta"] = [0.5, 1.0], [0.0, 0.5]
    recipe["select"] = {"validation": 0.25}
    recipe["vector"] |= {"epochs": 2, "warmup_epochs": 0}
    return recipe


@pytest.fixture(scope="session")
def finished(history: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a choice between two points, and a task vector's in its `baselines`. Tests change copies."""
    return finish(sweep_recipe(history, tmp_path_factory.mktemp("finished") / "run"))


def finish(recipe: dict[str, Any]) -> Path:
    """Run a recipe of `sweep_recipe` over two points, with a task vector in its `baselines`; return its folder."""
    recipe["retain"]["beta"] = 0.0
    del recipe["evidence"]  # all of it, as by default
    msa_lite.run_baseline("task_vector", recipe)
    result = msa_lite.run(recipe)
    assert result is not None
    return result.folder


@pytest.fixture(scope="session")
def chosen(history: Path, tmp_path_factory: pytest.TempPathFactory, drawing: Drawing) -> tuple[dict[str, Any], Path]:
    """(recipe, folder) of a run for a request, with a choice of four points and the page of its report."""
    recipe = sweep_recipe(history, tmp_path_factory.mktemp("chosen") / "run") | {"request": "GDPR 2026-017"}
    recipe["retain"]["beta"] = [0.5, 1.0]
    with drawing():
        return recipe, msa_lite.run(recipe).folder


@pytest.fixture(scope="session")
def attacked(finished: Path, tmp_path_factory: pytest.TempPathFactory, drawing: Drawing) -> Path:
    """A copy of a finished run, with its baseline, after two attacks, and the page of its report."""
    folder = tmp_path_factory.mktemp("attacked") / "run"
    shutil.copytree(finished, folder)
    with drawing():
        msa_lite.attack(folder, QUICK, overrides=FEW)
    return folder


@pytest.fixture
def grid(history: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe with a grid of two by two points; its output is tmp_path/run."""
    return sweep_recipe(history, tmp_path / "run")


@pytest.fixture
def small(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe with no more than a baseline needs."""
    recipe["evaluate"] = {"max_new_tokens": 4, "limit": 8}
    recipe["select"] = {"validation": 0.25}
    recipe["vector"] |= {"learning_rate": 1e-3, "warmup_epochs": 0}
    return recipe


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The arguments of a merge that takes a moment, `out` left out."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def undisturbed(inputs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of that merge without an accident, manifest included."""
    return contents(merge(**inputs, out=tmp_path_factory.mktemp("calm") / "out").folder)


@pytest.fixture
def call_cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CallCli:
    """call_cli(*arguments) → (exit code, stdout, stderr) of `msa-lite` in this process."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["msa-lite", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture(scope="session")
def hub_pythons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubPythons]:
    pythons = HubPythons(tmp_path_factory.mktemp("hub"))
    yield pythons
    pythons.close()


@pytest.fixture
def hub(hub_pythons: HubPythons) -> Iterator[Hub]:
    shutil.rmtree(hub_pythons.home, ignore_errors=True)
    with HubServer(hub_pythons.port) as server:
        yield Hub(server, hub_pythons)
        assert [path for _, path in server.requests if not path.startswith("/")] == [], "another host was asked"


@pytest.fixture(autouse=True)
def _refusals_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check of every refusal that a test provokes (exit status 2 or 3) that it came before anything was written.

    All checks there are have a test, and so all of them are held to it. Locks do not count. One refusal rests on
    scores; it says that they stay.
    """

    def marks() -> dict[str, tuple[int, int]]:
        files = {}
        for place, folders, names in os.walk(tmp_path):
            for name in [*folders, *(name for name in names if not name.endswith(".lock"))]:
                state = os.lstat(os.path.join(place, name))
                is_folder = stat.S_ISDIR(state.st_mode)
                files[os.path.join(place, name)] = (0, 0) if is_folder else (state.st_size, state.st_mtime_ns)
        return files

    def held(verb: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(verb)
        def call(*arguments: Any, **options: Any) -> Any:
            before = marks()
            try:
                return verb(*arguments, **options)
            except MsaError as error:
                after = marks()
                changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
                if error.exit_code in (2, 3) and changed and "the scores stay in" not in str(error):
                    pytest.fail(f"{error}\nAfter this was written: {sorted(changed)[:5]}")
                raise

        return call

    for name in ("run", "run_baseline", "run_vectors", "sweep", "attack", "merge", "evaluate", "train_stages"):
        monkeypatch.setattr(msa_lite, name, held(getattr(msa_lite, name)))
