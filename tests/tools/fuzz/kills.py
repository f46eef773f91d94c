"""Kills at every file operation of a command, and signals at random moments; one rerun must end in the same files."""

from __future__ import annotations

import collections
import gc
import importlib
import json
import pkgutil
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import msa_lite
from tests.tools.fuzz.areas import preload
from tests.tools.fuzz.child import Outcome, run
from tests.tools.fuzz.states import Content, Recorder, State, load_states, read_content

_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT)
_HANG = 120.0  # seconds; a whole run with fits
_STATES = ".states"
_WORK = frozenset({"home", ".stdout", ".stderr", _STATES})
# Names that hold times or the like in any run, killed or not.
_VARY = ("train_log.jsonl", "purged.json", ".lock", ".purge.lock")
_KEYED = ("record.key", "record.json")
_KEYED_HASH = re.compile(rb"hmac-sha256:[0-9a-f]+")
_NUMBER = re.compile(r"\d+(\.\d+)?")
Breach = str  # a line of JSON: the scene, what is wrong, and where it was killed


@dataclass(frozen=True)
class Scene:
    """A command that is killed. lay: makes its inputs in a folder. share: of all signals."""

    arguments: tuple[str, ...]
    lay: Callable[[Path], None]
    share: float
    heavy: bool = True
    begin: Callable[[Path], None] = lambda root: None
    """Lays `out` as it is before the command, where it works on one that is there."""


def _merge_inputs(root: Path) -> None:
    from tests.support.merges import write_inputs

    write_inputs(root)


def _history(root: Path) -> None:
    from msa_lite.demo import HistorySettings, make_groups, make_history
    from tests.e2e.conftest import PEOPLE, SHORT, sweep_recipe, tiny_recipe

    make_history(root / "history", make_groups(PEOPLE, seed=0), HistorySettings(**SHORT))  # type: ignore[arg-type]
    recipes = {name: tiny_recipe(Path("history"), Path("out")) for name in ("plain", "until", "again")}
    recipes["until"]["vector"] |= {"epochs": "auto", "learning_rate": 1e-5, "batch_size": 64}  # which is tried again
    recipes["again"]["forget"]["alpha"] = 0.75
    recipes["baseline"] = sweep_recipe(Path("history"), Path("out"))
    recipes["run"] = sweep_recipe(Path("history"), Path("out"))
    recipes["run"]["forget"]["alpha"] = "auto"  # searched, with a filter and a hold
    for name in ("until", "run"):
        del recipes[name]["evidence"], recipes[name]["retain"]["beta"]
    recipes["run"]["evaluate"] |= {"max_new_tokens": 3, "limit": 4}
    for recipe in recipes.values():
        recipe["verdict"] = False
    for name, recipe in recipes.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump(recipe))


def _finished_run(root: Path) -> None:
    from tests.tools.fuzz.runs import made

    shutil.copytree(made() / "run", root / "out")


def _other_run(root: Path) -> None:
    assert run(("run", "plain.yaml"), root, _HANG).status == 0


_MERGE = ("merge", "--target", "target", "--forget", "forget", "--retain", "retain", "--beta", "0.5", "--out", "out")
_ROWS = ("--forget", "history/data/forget.jsonl", "--retain", "history/data/retain.jsonl", "--max-new-tokens", "6")
SCENES = {
    "merge": Scene(_MERGE, _merge_inputs, 0.45, heavy=False),
    "merge --as adapter": Scene((*_MERGE, "--as", "adapter"), _merge_inputs, 0.25, heavy=False),
    "plain run": Scene(("run", "plain.yaml"), _history, 0.05),
    "until": Scene(("run", "until.yaml", "--until", "vectors"), _history, 0.0),
    "evaluate": Scene(("evaluate", "history/target", *_ROWS, "--out", "out"), _history, 0.06),
    "run": Scene(("run", "run.yaml"), _history, 0.04),
    "again": Scene(("run", "again.yaml"), _history, 0.0, begin=_other_run),
    "baseline": Scene(("baseline", "grad_ascent", "baseline.yaml"), _history, 0.0),
    "purge": Scene(("purge", "out", "--yes"), lambda root: None, 0.1, begin=_finished_run),
}


def _get_ready(scene: Scene) -> None:
    """Load what the commands need, once for all; leave out the pictures, which take longer than a tiny run."""
    preload("run" if scene.heavy else "merge")
    if scene.heavy:
        for module in pkgutil.walk_packages(msa_lite.__path__, "msa_lite."):
            importlib.import_module(module.name)
        importlib.import_module("msa_lite.report.page.run_files")._pictures = lambda story: {}
    gc.collect()
    gc.freeze()  # or each of a fit's collections goes through all that is loaded


class Stage:
    """A scene laid out in a folder, with what its command leaves undisturbed."""

    def __init__(self, name: str, root: Path) -> None:
        """Lay the scene, and run its command twice: the first run fills the caches, the second is recorded."""
        self.name, self.root, self.scene = name, root, SCENES[name]
        _get_ready(self.scene)
        shutil.rmtree(root, ignore_errors=True)
        (root / "home").mkdir(parents=True)
        self.scene.lay(root)
        self.scene.begin(root)
        self.begun = State("", "", read_content(root, _WORK), {})
        self.run()
        self.begun.restore(root, _WORK)
        started = time.monotonic()
        first = self.run(recorder=Recorder(root, _WORK, root / _STATES))
        self.usual = time.monotonic() - started
        assert first.status == 0, first.err
        self.whole = self._files()

    def run(self, **options: Any) -> Outcome:
        """Run the command."""
        return run(self.scene.arguments, self.root, _HANG, **options)

    def states(self) -> list[State]:
        """Return the states that a kill may leave."""
        return load_states(self.root / _STATES)

    def rerun(self, place: str) -> list[Breach]:
        """Run the command once more; return what is wrong with how it ends. place: where it was killed."""
        again = self.run()
        files = self._files()
        names = sorted(
            name for name in files.keys() | self.whole.keys() if files.get(name, "") != self.whole.get(name, "")
        )
        if again.status != 0:
            return [self.breach(f"status: the rerun ended with {again.status}", place, again.err)]
        return (
            [self.breach(f"number: other files than an undisturbed run: {names[:5]}", place, again.err)]
            if names
            else []
        )

    def breach(self, fault: str, place: str, err: str) -> Breach:
        """Return a breach of the contract."""
        return json.dumps({"area": f"kill {self.name}", "breaches": [fault], "edits": [place], "err": err[-6000:]})

    def _files(self) -> Content:
        """Return the bytes of each file, and the folders.

        Each run has a random key of its own, so hashes made with it do not count, and of key and record only that they
        are there.
        """
        files = {}
        for name, content in read_content(self.root, _WORK).items():
            file = name.rpartition("/")[2]
            if file not in _VARY:
                files[name] = b"" if file in _KEYED else content and _KEYED_HASH.sub(b"", content)
        return files


def choose_states(states: Sequence[State], most: int, by_place: bool = True) -> list[State]:
    """Return at most so many states of each kind: of operation, and of place without its numbers."""
    kinds = collections.defaultdict[tuple[str, str], list[State]](list)
    for state in states:
        kinds[state.operation, _NUMBER.sub("#", state.place) if by_place else ""].append(state)
    strides = [(kind, -(-len(kind) // most)) for kind in kinds.values()]
    chosen = {id(state) for kind, stride in strides for state in kind[stride // 2 :: stride]}
    return [state for state in states if id(state) in chosen]


def play_states(stage: Stage, states: Iterable[State]) -> tuple[collections.Counter[str], list[Breach]]:
    """Run a stage's command once from each state; return counts, and each breach."""
    counts: collections.Counter[str] = collections.Counter()
    breaches: list[Breach] = []
    for state in states:
        state.restore(stage.root, _WORK)
        counts[f"killed at {state.operation}"] += 1
        found = stage.rerun(f"{state.operation} {state.place}")
        counts["BREACH"] += len(found)
        breaches += found
    return counts, breaches


def play_kills(stage: Stage, kills: int, seed: int) -> tuple[collections.Counter[str], list[Breach]]:
    """Send a scene's command its share of signals; return counts, and each breach.

    After one to three of one start after another the command runs to its end: it must exit with 0 and leave the files
    of an undisturbed run, and nothing beside.
    """
    chance = random.Random(f"{seed} {stage.name}")
    counts: collections.Counter[str] = collections.Counter()
    breaches: list[Breach] = []
    wanted = round(kills * stage.scene.share)
    while counts["killed"] < wanted and counts["not reached"] < 3 * wanted:
        stage.begun.restore(stage.root, _WORK)
        moments = []
        for _ in range(chance.choice((1, 1, 2, 3))):
            moment = (stage.usual * 1.1 * chance.random() ** chance.choice((1.0, 0.5)), chance.choice(_SIGNALS))
            killed = stage.run(kill=moment)
            moments.append(moment)
            counts["killed" if killed.status != 0 else "not reached"] += 1
            if fault := _of_kill(killed, moment[1]):
                breaches.append(stage.breach(fault, str(moments), killed.err))
        breaches += stage.rerun(str(moments))
    counts["BREACH"] = len(breaches)
    return counts, breaches


def _of_kill(outcome: Outcome, number: int) -> str | None:
    if outcome.hung:
        return "hang: a signal did not end it"
    if outcome.status not in (0, -number, 130 if number == signal.SIGINT else 0):
        return f"status: {outcome.status} after signal {number}"
    # An interrupt within a destructor is lost: Python prints it and goes on.
    if outcome.err.count("Traceback") > outcome.err.count("Exception ignored in"):
        return f"traceback: after signal {number}"
    return None
