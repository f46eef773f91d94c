"""Kills: signals at random moments of a command, which is then run again and must end in the same files."""

from __future__ import annotations

import collections
import json
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.tools.fuzz.areas import preload
from tests.tools.fuzz.child import Outcome, run
from tests.tools.fuzz.tree import snapshot

_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_HANG = 120.0  # seconds; a whole run with fits
_WORK = {"home"}
# Names that hold times or the like in any run, killed or not.
_VARY = ("train_log.jsonl", "purged.json")
_KEYED = ("record.key", "record.json")
_KEYED_HASH = re.compile(rb"hmac-sha256:[0-9a-f]+")


@dataclass(frozen=True)
class Scene:
    """A command that is killed. lay: makes its inputs in a folder. share: of all kills."""

    arguments: tuple[str, ...]
    lay: Callable[[Path], None]
    share: float
    heavy: bool = False
    begin: Callable[[Path], None] = lambda root: None
    """Lays `out` as it is before the command, where it works on one that is there."""


def _merge_inputs(root: Path) -> None:
    from tests.support.merges import write_inputs

    write_inputs(root)


def _history(root: Path) -> None:
    from msa_lite.demo import HistorySettings, make_groups, make_history
    from tests.e2e.conftest import PEOPLE, SHORT, sweep_recipe, tiny_recipe

    make_history(root / "history", make_groups(PEOPLE, seed=0), HistorySettings(**SHORT))  # type: ignore[arg-type]
    for name, recipe in (("run", tiny_recipe), ("sweep", sweep_recipe)):
        (root / f"{name}.yaml").write_text(yaml.safe_dump(recipe(Path("history"), Path("out"))))


def _finished_run(root: Path) -> None:
    from tests.tools.fuzz.runs import made

    shutil.copytree(made() / "run", root / "out")


_MERGE = (
    "merge",
    "--target",
    "target",
    "--forget",
    "forget",
    "--retain",
    "retain",
    "--beta",
    "0.5",
    "--out",
    "out",
)
_ROWS = ("--forget", "history/data/forget.jsonl", "--retain", "history/data/retain.jsonl", "--max-new-tokens", "6")
SCENES = {
    "merge": Scene(_MERGE, _merge_inputs, 0.45),
    "merge --as adapter": Scene((*_MERGE, "--as", "adapter"), _merge_inputs, 0.25),
    "vector": Scene(("run", "run.yaml", "--until", "vectors"), _history, 0.05, heavy=True),
    "evaluate": Scene(("evaluate", "history/target", *_ROWS, "--out", "out"), _history, 0.06, heavy=True),
    "sweep": Scene(("run", "sweep.yaml", "--until", "sweep"), _history, 0.05, heavy=True),
    "run": Scene(("run", "run.yaml"), _history, 0.04, heavy=True),
    "purge": Scene(("purge", "out", "--yes"), lambda root: None, 0.1, heavy=True, begin=_finished_run),
}


def play_kills(name: str, kills: int, seed: int, root: Path) -> tuple[collections.Counter[str], list[str]]:
    """Kill a scene's command its share of times; return counts, and each breach.

    After one to three kills of one start after another the command runs to its end: it must exit with 0 and leave the
    files of an undisturbed run, and nothing beside.
    """
    scene = SCENES[name]
    preload("run" if scene.heavy else "merge")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    (root / "home").mkdir()
    scene.lay(root)
    inputs = snapshot(root, _WORK)
    usual = 0.0
    for _ in range(2):  # the first run finds nothing in the caches
        _clear(root, inputs, scene)
        started = time.monotonic()
        first = run(scene.arguments, root, _HANG)
        usual = time.monotonic() - started
        assert first.status == 0, first.err
    whole = _contents(root, inputs)
    chance = random.Random(f"{seed} {name}")
    counts: collections.Counter[str] = collections.Counter()
    breaches: list[str] = []
    wanted = max(1, round(kills * scene.share))
    while counts["killed"] < wanted and counts["not reached"] < 3 * wanted:
        _clear(root, inputs, scene)
        moments = []
        for _ in range(chance.choice((1, 1, 2, 3))):
            moment = (usual * 1.1 * chance.random() ** chance.choice((1.0, 0.5)), chance.choice(_SIGNALS))
            killed = run(scene.arguments, root, _HANG, moment)
            moments.append(moment)
            counts["killed" if killed.status != 0 else "not reached"] += 1
            if fault := _of_kill(killed, moment[1]):
                breaches.append(
                    json.dumps(
                        {
                            "area": f"kill {name}",
                            "breaches": [fault],
                            "edits": [str(moments)],
                            "arguments": [],
                            "err": killed.err[-6000:],
                        }
                    )
                )
                counts["BREACH"] += 1
        again = run(scene.arguments, root, _HANG)
        faults = _of_rerun(again, _contents(root, inputs), whole, snapshot(root, _WORK), inputs)
        if faults:
            counts["BREACH"] += 1
            breaches.append(
                json.dumps(
                    {
                        "area": f"kill {name}",
                        "breaches": faults,
                        "edits": [str(moments)],
                        "arguments": [],
                        "err": again.err[-6000:],
                    }
                )
            )
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


def _of_rerun(
    again: Outcome, contents: dict[str, bytes], whole: dict[str, bytes], after: dict[str, str], inputs: dict[str, str]
) -> list[str]:
    if again.status != 0:
        return [f"status: the rerun ended with {again.status}"]
    found = []
    if contents != whole:
        names = [name for name in contents.keys() | whole.keys() if contents.get(name) != whole.get(name)]
        found.append(f"number: other files than an undisturbed run: {sorted(names)[:5]}")
    if changed := [name for name, mark in inputs.items() if after.get(name) != mark]:
        found.append(f"escape: {changed[:5]}")
    return found


def _contents(root: Path, inputs: dict[str, str]) -> dict[str, bytes]:
    """Return the bytes of each file that is no input, by path.

    Each run has a random key of its own, so hashes made with it do not count, and of key and record only that they are
    there.
    """
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if name not in inputs and name.split("/")[0] not in _WORK and path.is_file() and path.name not in _VARY:
            found[name] = b"" if path.name in _KEYED else _KEYED_HASH.sub(b"", path.read_bytes())
    return found


def _clear(root: Path, inputs: dict[str, str], scene: Scene) -> None:
    for path in root.iterdir():
        if path.name not in inputs and path.name not in _WORK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    scene.begin(root)
