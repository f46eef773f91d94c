"""The runs of examples/real_model: what is fixed before them, what a stop or a fault leaves, its command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import run
from experiments import EXPERIMENTS, FULL, SIZES
from plan import State, fix_plan

from msa_lite.errors import MismatchError, UsageError

SMALL = SIZES["small"]
NAMES = {experiment.name: experiment for experiment in EXPERIMENTS}


def test_the_plan_is_fixed_once_and_may_only_grow(tmp_path: Path) -> None:
    fix_plan(tmp_path, "small", SMALL, [0], EXPERIMENTS[:2], "a model")
    first = json.loads((tmp_path / "plan.json").read_text())
    fix_plan(tmp_path, "small", SMALL, [1], EXPERIMENTS[:3], "a model")
    second = json.loads((tmp_path / "plan.json").read_text())
    assert (first["seeds"], second["seeds"]) == ([0], [0, 1])
    assert second["experiments"][:2] == first["experiments"]
    assert [entry["name"] for entry in second["experiments"]] == [one.name for one in EXPERIMENTS[:3]]
    changed = [replace(EXPERIMENTS[0], overrides=FULL), *EXPERIMENTS[1:3]]
    with pytest.raises(UsageError, match=r"msa-lora(.|\n)*") as fault:
        fix_plan(tmp_path, "small", replace(SMALL, epochs=9), [0], changed, "a model")
    assert "size small" in str(fault.value)
    assert json.loads((tmp_path / "plan.json").read_text()) == second


@pytest.mark.parametrize(
    ("fault", "note"),
    [(MismatchError("they do not fit"), "they do not fit"), (ValueError("a bug"), "ValueError: a bug")],
)
def test_a_fault_is_noted_and_tried_again_and_a_done_experiment_is_not(
    fault: Exception, note: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("seed: 0\n")
    with State(tmp_path / "state.json", "c0ffee").timed("a", recipe, "msa-lite a.yaml", tmp_path / "runs/a"):
        raise fault
    state = State(tmp_path / "state.json", "c0ffee")
    entry = json.loads((tmp_path / "state.json").read_text())["experiments"]["a"]
    assert (entry["error"], entry["folder"], entry["commit"]) == (note, "runs/a", "c0ffee")
    assert not state.is_done("a", recipe)
    with state.timed("a", recipe, "msa-lite a.yaml", tmp_path / "runs/a"):
        pass
    assert State(tmp_path / "state.json", "c0ffee").is_done("a", recipe)
    recipe.write_text("seed: 1\n")
    assert not state.is_done("a", recipe), "another recipe is another experiment"


def test_a_new_run_shares_only_what_is_the_same(tmp_path: Path) -> None:
    first = tmp_path / "runs/msa-lora"
    for name in ("evaluation/target", "evaluation/prior", "evaluation/unlearned", "vectors/forget", "sweep"):
        (first / name).mkdir(parents=True)
        (first / name / "manifest.json").write_text("{}")
    (first / "recipe.yaml").write_text("# A run of msa-lite\n")

    def shared(name: str) -> set[str]:
        folder = tmp_path / "runs" / name
        run.share(first, folder, NAMES[name])
        found = {str(file.parent.relative_to(folder)) for file in folder.rglob("manifest.json")}
        run.share(first, folder, NAMES[name])  # what is there stays
        return found

    assert shared("lora-r8") == {"evaluation/target", "evaluation/prior"}
    assert shared("bf16") == {"evaluation/target", "evaluation/prior", "vectors/forget"}
    assert shared("prior-base") == {"evaluation/target"}
    assert shared("text-before") == set()
