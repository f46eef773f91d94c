"""Who may import whom, read from the source; and what stays out of memory until it is needed."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import msa_lite
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.pipeline.prepare import models
from tests.tools.arrows import (
    PACKAGE,
    find_circle,
    folder_graph,
    imported_rooms,
    module_graph,
    module_of,
    room_of,
    sources,
)

# Room of the package → the rooms that it imports from, wherever the import stands. Exactly these: an arrow that nobody
# needs any more has to go.
ARROWS = {
    "errors": set[str](),
    "catalogue": set[str](),
    "settings": {"io"},
    "strengths": set[str](),
    "io": {"errors"},
    "recipe": {"catalogue", "errors", "io", "settings", "strengths"},
    "data": {"errors", "io", "settings"},
    "report": {"catalogue", "errors", "io", "settings", "strengths"},
    "record": {"catalogue", "errors", "io", "report"},
    "train": {"data", "errors", "io"},
    "budget": {"errors", "io", "report", "train"},
    "merger": {"errors", "io", "report", "strengths"},
    "baselines": {"data", "errors", "io", "train"},
    "demo": {"data", "errors", "io", "train"},
    "evals": {"catalogue", "data", "errors", "io", "report", "settings"},
    "attacks": {"catalogue", "data", "errors", "evals", "io", "report", "settings", "train"},
    "evidence": {"catalogue", "data", "errors", "evals", "io", "report"},
    "publish": {"errors", "io", "report"},
    "comparison": {"catalogue", "errors", "io", "report"},
    "choose": {"catalogue", "data", "errors", "evals", "io", "report", "settings", "strengths"},
    "pipeline": {
        "attacks", "baselines", "budget", "catalogue", "choose", "comparison", "data", "demo", "errors", "evals",
        "evidence", "io", "merger", "publish", "recipe", "record", "report", "settings",
        "strengths", "train",
    },
    "web": {"catalogue", "errors", "io", "pipeline", "report"},
    "cli": {
        "baselines", "budget", "catalogue", "comparison", "data", "errors", "evals", "io", "merger", "pipeline",
        "publish", "recipe", "record", "report", "settings", "web",
    },
    "__main__": {"cli"},
    "__init__": {"comparison", "data", "evals", "io", "merger", "pipeline", "publish", "train", "web"},
}  # fmt: skip
# Folder inside a room → the folders of the same room that it imports from. Exactly these, as for rooms. The lowest come
# first: an arrow leads to a folder further up in the table.
FOLDERS = {
    "io": {
        "console": set[str](),
        "files": {"console"},
        "finished": {"console", "files"},
        "weights": {"console", "files", "finished"},
        "models": {"console", "files", "weights"},
        "launch": {"files"},
    },
    "evals": {
        "engine": set[str](),
        "judge": {"engine"},
        "verdict": {"engine"},
        "benchmarks": {"engine", "judge", "verdict"},
        "scores": {"benchmarks", "engine", "judge"},
    },
    "report": {
        "tables": set[str](),
        "verdict": {"tables"},
        "run": {"tables", "verdict"},
        "page": {"run", "tables", "verdict"},
    },
    "merger": {
        "formula": set[str](),
        "fidelity": {"formula"},
        "vectors": set[str](),
        "checks": {"fidelity", "formula", "vectors"},
        "unseen": {"formula"},
        "moments": {"formula", "unseen"},
        "filtering": {"checks", "fidelity", "formula", "moments", "vectors"},
        "mergekit": {"checks", "fidelity", "formula", "vectors"},
        "stream": {"checks", "fidelity", "formula", "mergekit", "vectors"},
        "adapters": {"checks", "fidelity", "formula", "vectors"},
    },
    "train": {
        "settings": set[str](),
        "scratch": set[str](),
        "objectives": set[str](),
        "memory": {"objectives", "settings"},
        "experts": set[str](),
        "moments": {"experts", "objectives"},
        "fit": {"memory", "objectives", "settings"},
        "processes": {"fit", "memory", "objectives", "settings"},
    },
    "pipeline": {
        "prepare": set[str](),
        "stages": {"prepare"},
        "run": {"prepare", "stages"},
        "baseline": {"prepare", "run", "stages"},
        "attack": {"baseline", "prepare", "run", "stages"},
        "purge": {"attack", "prepare", "run"},
        "staged": {"prepare", "run", "stages"},
        "verbs": {"attack", "baseline", "prepare", "run", "staged", "stages"},
        "table": {"baseline", "prepare", "run", "staged", "stages", "verbs"},
    },
}
# Modules that hold arithmetic alone: the formula, and the scores of one item.
PURE = ("merger/formula.py", "evals/engine/scoring.py", "evals/engine/answers.py")


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_from_exactly_the_rooms_of_the_table(room: str) -> None:
    places: dict[str, str] = {}
    for path in (path for path in sources() if room_of(path) == room):
        for line, other in imported_rooms(path.read_text(), module_of(path).rpartition(".")[0]):
            places.setdefault(other, f"{path.relative_to(PACKAGE)}:{line}")
    places.pop(room, None)
    assert {other: place for other, place in places.items() if other not in ARROWS[room]} == {}
    assert sorted(ARROWS[room] - places.keys()) == [], "arrows that no import needs any more"


def test_every_room_has_its_arrows() -> None:
    assert {room_of(path) for path in sources()} == ARROWS.keys()


@pytest.mark.parametrize("room", FOLDERS)
def test_the_folders_of_a_room_import_from_exactly_the_folders_of_the_table_none_of_them_higher(room: str) -> None:
    assert folder_graph(room) == FOLDERS[room]
    order = list(FOLDERS[room])
    for place, folder in enumerate(order):  # so there is no circle either
        assert FOLDERS[room][folder] <= {*order[:place]}, folder


def test_no_imports_go_in_a_circle() -> None:
    assert find_circle(ARROWS) == []
    assert find_circle(module_graph()) == []
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


@pytest.mark.parametrize("name", PURE)
def test_the_modules_of_arithmetic_import_nothing_of_ours(name: str) -> None:
    path = PACKAGE / name
    assert list(imported_rooms(path.read_text(), module_of(path).rpartition(".")[0])) == []


def public_names(path: Path) -> Iterator[str]:
    """Yield the public classes, functions and constants that a module defines."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def test_a_public_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in sources():
        commands = {name for name in public_names(path) if room_of(path) == "cli" and name.endswith("_command")}
        for name in set(public_names(path)) - commands - {"logger"}:
            homes.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import msa_lite.recipe", ["recipe"]),
        ("from msa_lite import merge, recipe", ["__init__", "recipe"]),
        ("def f():\n    from msa_lite.io.weights.hub import fetch", ["io"]),
        ("if TYPE_CHECKING:\n    from msa_lite.cli import main", ["cli"]),
        ("from . import scoring\nfrom .. import merger\nfrom ..io.hub import fetch", ["evals", "merger", "io"]),
        ("import msa_lite_extra, numpy", []),
    ],
)
def test_imports_are_found_in_every_form(source: str, parts: list[str]) -> None:
    assert [part for _, part in imported_rooms(source, "msa_lite.evals")] == parts


HEAVY = {"torch", "transformers", "datasets", "peft", "accelerate", "scipy", "openai", "matplotlib"}
COMMANDS = (
    "--help",
    "compare --published restor-olmo-2-7b --format html",
    "recipes list",
    "plan quickstart --gpu 8GB",
)
CODE = """
import json, runpy, sys
import msa_lite.evals
loaded = {"import": [*sys.modules]}
for command in sys.argv[1:]:
    sys.argv = ["msa-lite", *command.split()]
    try:
        runpy.run_module("msa_lite", run_name="__main__")
    except SystemExit as end:
        assert not end.code, command
    loaded[command] = [*sys.modules]
print()
print(json.dumps(loaded))
"""


def loaded_by(*commands: str, cwd: Path | None = None) -> dict[str, set[str]]:
    """Run commands one after the other in one new Python; return the heavy packages that are loaded after each."""
    command = [sys.executable, "-c", CODE, *commands]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=cwd)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert list(loaded) == ["import", *commands]
    assert "msa_lite" in loaded["import"]
    return {command: HEAVY & set(names) for command, names in loaded.items()}


def test_help_and_listings_load_neither_torch_nor_transformers() -> None:
    assert loaded_by(*COMMANDS) == {name: set() for name in ("import", *COMMANDS)}


def test_the_plan_of_a_run_that_is_there_counts_tokens_without_torch(
    tmp_path: Path,
    make_checkpoint: Callable[..., Path],
    make_adapter: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "runs/quickstart"
    for name in ("target", "prior", "ideal"):
        shutil.copytree(make_checkpoint("llama"), run / "history" / name)
    (run / "history/data").mkdir()
    for name in ("forget", "retain", "holdout"):
        rows = [json.dumps({"question": f"Where is {name} {i}?", "answer": "It is over there."}) for i in range(9)]
        (run / "history/data" / f"{name}.jsonl").write_text("\n".join(rows))
    form = {"lora_rank": 16, "lora_alpha": 32.0, "lora_targets": ["gate_proj", "up_proj", "down_proj"]}
    adapter = make_adapter("llama", r=16, lora_alpha=32, target_modules=form["lora_targets"])
    with stage_folder(run / "vectors/forget", "vector", {"settings": {"mode": "lora", **form}}) as partial:
        shutil.copytree(adapter, partial, dirs_exist_ok=True)
    plan = "plan quickstart"
    assert loaded_by(plan, cwd=tmp_path) == {"import": set(), plan: {"transformers"}}

    asked = list[int]()  # the ranks of adapters that PEFT is asked about
    planned = models.planned_adapter
    monkeypatch.setattr(models, "planned_adapter", lambda p, fit: (asked.append(fit.lora_rank), planned(p, fit))[1])
    monkeypatch.chdir(tmp_path)
    for rank in (16, 8):
        msa_lite.plan("quickstart", [f"vector.lora.rank={rank}"], gpu="8GB")
    assert asked == [8], "the run has an adapter of rank 16"
