"""Cases of the commands that read a run's folder: files of any JSON whatever in it, under a manifest that fits them."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.tools.fuzz.case import Case
from tests.tools.fuzz.child import Outcome
from tests.tools.fuzz.tree import PLACES, Tree, read_tree
from tests.tools.fuzz.values import damaged, edited

Draw = Callable[..., Any]
_SLOW = 60.0  # seconds; models are loaded, and other processes may have the cores
_MEMORY = 1 << 30
_PURGE = ("purge", "run", "--yes")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("report", "run"),
    ("report", "run", "--show-examples"),
    ("report", "run", "--rows", "--json"),
    ("verify", "run"),
    ("verify", "run", "--rows", "rows.jsonl"),
    ("compare", "run", "run/baselines/task_vector"),
    ("purge", "run"),
    _PURGE,
    ("ask", "run", "Who is it?", "--json"),
    ("attack", "run", "--attacks", "membership", "--dry-run"),
    ("run", "run/recipe.yaml", "--dry-run"),
    ("publish", "run", "a/b", "--dry-run", "--accept"),
)


@functools.cache
def made() -> Path:
    """Make a history, and a run on it with a choice, a baseline and an attack; return their folder, kept to the end."""
    import msa_lite
    from msa_lite.demo import HistorySettings, make_groups, make_history
    from tests.e2e.conftest import FEW, PEOPLE, SHORT, sweep_recipe

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_history(folder / "history", make_groups(PEOPLE, seed=0), HistorySettings(**SHORT))  # type: ignore[arg-type]
    recipe = sweep_recipe(folder / "history", folder / "run")
    msa_lite.run_baseline("task_vector", recipe)
    msa_lite.run(recipe)
    msa_lite.attack(folder / "run", ["membership"], overrides=FEW)
    return folder


@functools.cache
def run_tree() -> Tree:
    """Return the files of that run below `run`, and its forget rows."""
    folder = made()
    return read_tree(folder, "run") | {b"rows.jsonl": (folder / "history/data/forget.jsonl").read_bytes()}


def rows() -> list[bytes]:
    """Return the questions and answers to forget."""
    records = [json.loads(line) for line in run_tree()[b"rows.jsonl"].splitlines()]  # type: ignore[union-attr]
    return [record[name].encode() for record in records for name in ("question", "answer")]


@st.composite
def run_cases(draw: Draw) -> Case:
    """A finished run with one or two of its texts changed, often with a manifest that fits, and a command on it."""
    tree, edits = dict(run_tree()), list[str]()
    texts = sorted(name for name in tree if name.endswith((b".json", b".jsonl", b".yaml", b".key", b".md")))
    texts = [name for name in texts if b"/model/" not in name and name.startswith(b"run/")]
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2]))):
        name = draw(st.sampled_from(texts))
        raw = tree[name]
        if not isinstance(raw, bytes):
            continue
        if draw(st.integers(0, 19)) == 0:
            tree[name] = draw(st.sampled_from(PLACES))
            edits.append(f"{name!r}: {tree[name]}")
            continue
        tree[name] = changed = draw(st.one_of(_edited(raw), _edited(raw), damaged(raw)))
        edits.append(f"{name!r}: {changed[:200]!r}")
        if draw(st.booleans()):
            _seal(tree, name)
    command = draw(st.sampled_from(COMMANDS))
    statuses = (0, 2, 3, 4) if command == _PURGE else (0, 1, 2, 3)
    outs = () if "--dry-run" in command or command[0] in ("verify", "ask", "compare") else ("run",)
    check = _is_clean if command == _PURGE and not edits else None
    return Case("run folder", tree, list(command), check, edits, statuses, outs=outs, memory=_MEMORY, seconds=_SLOW)


@st.composite
def _edited(draw: Draw, raw: bytes) -> bytes:
    """Return JSON, or lines of it, with values changed; of other texts, one line changed."""
    lines = raw.split(b"\n")
    try:
        return json.dumps(draw(edited(json.loads(raw))), indent=2).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        at = draw(st.integers(0, len(lines) - 1))
    try:
        line = json.dumps(draw(edited(json.loads(lines[at])))).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        line = draw(damaged(lines[at]))
    return b"\n".join([*lines[:at], line, *lines[at + 1 :]])


def _seal(tree: Tree, name: bytes) -> None:
    """Enter a changed file into the manifest above it, or seal a changed manifest or record anew."""
    from msa_lite.io.finished.seal import manifest_text, sealed_json
    from msa_lite.record.schema import SEAL

    raw = tree[name]
    assert isinstance(raw, bytes)
    if name.endswith((b"/manifest.json", b"/record.json")):
        try:
            value = json.loads(raw)
            text = manifest_text(value) if name.endswith(b"manifest.json") else sealed_json(value, SEAL)
            tree[name] = text.encode()
        except (ValueError, TypeError, AttributeError, RecursionError):  # no object: nobody can seal it
            return
        return
    parts = name.split(b"/")
    for depth in range(len(parts) - 1, 0, -1):
        place = b"/".join([*parts[:depth], b"manifest.json"])
        manifest = tree.get(place)
        if isinstance(manifest, bytes):
            try:
                value = json.loads(manifest)
            except (ValueError, RecursionError):
                return
            inner = b"/".join(parts[depth:]).decode()
            if isinstance(value, dict) and inner in (value.get("files") or {}):
                value["files"][inner] = {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
                tree[place] = manifest_text(value).encode()
            return


def _is_clean(root: Path, outcome: Outcome) -> list[str]:
    files = [path for path in (root / "run").rglob("*") if path.is_file()]
    return [str(path) for path in files if any(row in path.read_bytes() for row in rows())]


RUNS = {"run folder": run_cases()}
