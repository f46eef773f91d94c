"""Two commands in one run at once: one of them gives way, and no row comes back after a purge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import filelock
import pytest

import msa_lite
from msa_lite.errors import MsaError, OutputError
from msa_lite.io.finished.seal import verify_stages
from msa_lite.pipeline.run import folder as folder_module
from msa_lite.pipeline.run import report as report_module
from msa_lite.pipeline.run.report import report_run
from tests.e2e.conftest import FEW
from tests.support.leftovers import copy_run, forms, holding

Moment = Literal["before its lock", "within"]


def recipe_of(run: Path) -> str:
    return str(run / "recipe.yaml")


VERBS: dict[str, Callable[[Path], object]] = {
    "run": lambda run: msa_lite.run(recipe_of(run)),
    "vector": lambda run: msa_lite.run_vectors(recipe_of(run)),
    "sweep": lambda run: msa_lite.sweep(recipe_of(run)),
    "baseline, there already": lambda run: msa_lite.run_baseline("task_vector", recipe_of(run)),
    "baseline, new": lambda run: msa_lite.run_baseline("grad_ascent", recipe_of(run)),
    "attack": lambda run: msa_lite.attack(run, ["membership"], overrides=FEW),
    "report": report_run,
    "report --show-examples": lambda run: report_run(run, show_examples=True),
    "purge": lambda run: msa_lite.purge(run, remove=True),
}
OWN_FOLDER = ("baseline, there already", "baseline, new")  # they work beside the recipe's own run


def may_go_together(one: str, other: str) -> bool:
    """A plain report writes no row; a baseline has a folder of its own."""
    if "report" in (one, other):
        return True
    return one != other and any(verb in OWN_FOLDER for verb in (one, other)) and "purge" not in (one, other)


PAIRS = [
    pytest.param(one, other, moment, marks=() if "purge" in (one, other) else pytest.mark.slow)
    for one in VERBS
    for other in VERBS
    for moment in ("before its lock", "within")
]


@pytest.fixture
def _refusals_write_nothing() -> None:
    """Of two verbs at once, the other one may write."""


@pytest.mark.parametrize(("first", "second", "moment"), PAIRS)
def test_two_verbs_at_once(
    first: str,
    second: str,
    moment: Moment,
    finished: Path,
    history: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = copy_run(finished, tmp_path / "run")
    faults: dict[str, MsaError | None] = {}
    started = list[str]()

    def start(role: str, verb: str) -> None:
        try:
            VERBS[verb](run)
            faults[role] = None
        except MsaError as error:
            faults[role] = error

    def interrupt() -> None:
        if not started:
            started.append(second)
            start("second", second)

    class Interrupted(filelock.FileLock):  # type: ignore[misc]
        """The lock of a run, with somebody who starts the second verb before or after it is taken."""

        def acquire(self, *arguments: Any, **options: Any) -> Any:
            is_of_run = Path(self.lock_file).name == ".lock" and not Path(self.lock_file).parent.suffix
            if is_of_run and moment == "before its lock":
                interrupt()
            proxy = super().acquire(*arguments, **options)
            if is_of_run and moment == "within":
                interrupt()
            return proxy

    monkeypatch.setattr(filelock, "FileLock", Interrupted)
    if first == "report":  # it takes no lock

        def load(folder: Path, examples: Any = ()) -> Any:
            story = load_story(folder, examples)
            interrupt()
            return story

        load_story = report_module.load_story
        monkeypatch.setattr(report_module, "load_story", load)
    start("first", first)
    monkeypatch.undo()

    assert faults.keys() == {"first", "second"}
    assert all(isinstance(fault, OutputError | None) for fault in faults.values()), faults
    both = not any(isinstance(faults[role], OutputError) for role in ("first", "second"))
    if moment == "within":
        assert both is may_go_together(first, second), faults
        assert faults["first"] is None, "who holds the lock goes on"
    elif second == "purge" and first not in ("report", "report --show-examples", "purge"):
        assert isinstance(faults["first"], OutputError), "who comes after a purge is refused"
    purged = [role for role, verb in (("first", first), ("second", second)) if verb == "purge" and not faults[role]]
    assert (run / "purged.json").exists() is bool(purged)
    if purged:
        assert holding(run, forms(history)) == set()
        assert json.loads((run / "purged.json").read_text())["ended"]
    assert not list(run.rglob("*.tmp"))
    assert not [name for name, problems in verify_stages(run).items() if problems]


@pytest.mark.parametrize("verb", ["run", "baseline, there already", "baseline, new"])
def test_a_run_is_locked_while_its_inputs_are_prepared(
    verb: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that are stored as adapters or codes are then written into its folder."""
    run, prepare = copy_run(finished, tmp_path / "run"), folder_module.prepare
    refused = []

    def prepare_beside_a_purge(*arguments: Any) -> Any:
        with pytest.raises(OutputError, match="another msa-lite is working"):
            msa_lite.purge(run, remove=True)
        refused.append(True)
        return prepare(*arguments)

    monkeypatch.setattr(folder_module, "prepare", prepare_beside_a_purge)
    VERBS[verb](run)
    assert refused


def test_a_baseline_that_is_refused_leaves_no_folder_in_a_run(finished: Path, tmp_path: Path) -> None:
    run = copy_run(finished, tmp_path / "run")
    with pytest.raises(MsaError, match="nowhere"):
        msa_lite.run_baseline("npo", recipe_of(run), [f"evaluate.ideal={tmp_path}/nowhere"])
    assert [path.name for path in (run / "baselines").iterdir()] == ["task_vector"]
