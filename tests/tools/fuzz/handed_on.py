"""Cases of what is handed on: a finished run in which sealed files were changed, swapped, removed or added.

What is right is found by hashlib: `verify` ends with 0 only if nothing that the record seals has changed, else it names
each file; `report` seals nothing but its own two files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.tools.fuzz.case import Case
from tests.tools.fuzz.child import Outcome, run
from tests.tools.fuzz.runs import run_tree
from tests.tools.fuzz.tree import PLACES, Node, Special, Tree, lay, read_tree
from tests.tools.fuzz.values import flipped

_RUN, _OTHER, _MODEL = b"run/", b"run/baselines/task_vector/", b"run/model/"
_REPORTS = (b"report.html", b"report.json")
_GO_ALONG = (*_REPORTS, b"verdict.json", b"recipe.yaml", b"attacks/report.json", b"attacks/membership/report.json")
_ADDED = (b"attacks/prompt/report.json", b"attacks/prompts/report.json", b"report2.html", b"record.json.bak")
_LOADED = b"chat_template.jinja"  # in a model's folder: not in its record
_EDITS: dict[str, Callable[[bytes], bytes]] = {
    "PASS": lambda raw: raw.replace(b"FAIL", b"PASS").replace(b"PARTLY", b"PASS"),
    "CRLF": lambda raw: raw.replace(b"\n", b"\r\n"),
    "line end": lambda raw: raw + b"\n",
    "mark": lambda raw: b"\xef\xbb\xbf" + raw,
    "half": lambda raw: raw[: len(raw) // 2],
    "empty": lambda raw: b"",
    "touched": lambda raw: raw,
}


@functools.cache
def _states() -> tuple[Tree, ...]:
    """Return a finished run as it is, and as it is once its report shows examples."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lay(run_tree(), root)
        outcome = run(["report", "run", "--show-examples"], root, 120)
        assert outcome.status == 0, outcome.err
        return run_tree(), read_tree(root, "run")


def _sealed(tree: Tree, home: bytes) -> dict[bytes, str]:
    """Return the hashes of a run's record by the path of the file."""
    record = json.loads(tree[home + b"record.json"])  # type: ignore[arg-type]
    result = {f"{record['result']['name']}/{name}": item["sha256"] for name, item in record["result"]["files"].items()}
    return {home + name.encode(): sha256 for name, sha256 in (record["files"] | result).items()}


def _differs(node: Node, sha256: str | None) -> bool:
    return not isinstance(node, bytes) or hashlib.sha256(node).hexdigest() != sha256


def _digits(key: Node) -> bytes | None:
    """Return what counts of a key's file, which no record seals: neither white space at the ends nor a mark."""
    return key.removeprefix(b"\xef\xbb\xbf").strip() if isinstance(key, bytes) else None


def _changed(whole: Tree, tree: Tree, downloaded: bool) -> set[bytes]:
    """Return the paths that `verify` has to name as faults. downloaded: by `--record`, for the model alone."""
    found = set[bytes]()
    for home in (_RUN,) if downloaded else (_RUN, _OTHER):
        record, key = home + b"record.json", home + b"record.key"
        if record not in tree:
            continue
        if tree[record] != whole[record]:
            found.add(record)
            continue
        sealed = _sealed(whole, home)
        ours = {home + name for name in (*_GO_ALONG, _ADDED[0])}
        for name in sealed.keys() | ours:
            is_manifest = name.endswith(b"/manifest.json")
            if name in tree and _differs(tree[name], sealed.get(name)) and not (downloaded and is_manifest):
                found.add(name)
            if name not in tree and name.startswith(_MODEL) and not (downloaded and is_manifest):
                found.add(name)
        is_gone = key not in tree or tree[key] == Special("link", "nowhere")
        if not downloaded and not is_gone and _digits(tree[key]) != _digits(whole[key]):
            found.add(key)
    if not downloaded:  # the manifest of the model's folder has its card, too
        found |= {name for name in whole if name.startswith(_MODEL) and tree.get(name) != whole[name]}
    return found | {name for name in tree if name == _MODEL + _LOADED and _RUN + b"record.json" in tree}


@st.composite
def handed_on_cases(draw: Callable[..., Any]) -> Case:
    """A finished run with a few changes, checked whole or by its model and record, or reported again."""
    before = draw(st.integers(0, 1))
    whole, other = _states()[before], _states()[1 - before]
    tree, notes = dict(whole), list[str]()
    names = [home + name for home in (_RUN, _RUN, _RUN, _OTHER) for name in (*_GO_ALONG, b"record.json", b"record.key")]
    names = [name for name in (*names, *(name for name in whole if name.startswith(_MODEL))) if name in whole]
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        name = draw(st.sampled_from(names))
        raw = whole[name]
        assert isinstance(raw, bytes)
        what = draw(st.sampled_from(["flip", "flip", "swap", "drop", "add", "special", "older", "other's", *_EDITS]))
        if what == "flip" and raw:
            tree[name] = draw(flipped(raw))
        elif what == "swap":
            second = draw(st.sampled_from(names))
            tree[name], tree[second] = whole[second], raw
            what += f" {second!r}"
        elif what == "drop":
            tree.pop(name, None)
        elif what == "add":
            added = draw(st.sampled_from([*(_RUN + new for new in _ADDED), _MODEL + _LOADED]))
            tree[added] = raw
            what += f" {added!r}"
        elif what == "special":
            tree[name] = draw(st.sampled_from(PLACES))
        elif what == "older":
            tree[name] = other.get(name, raw)
        elif what == "other's":
            tree[name] = whole.get(name.replace(_RUN, _OTHER, 1), raw)
        elif what in _EDITS:
            tree[name] = _EDITS[what](raw)
        notes.append(f"{what} {name!r} {tree.get(name) if isinstance(tree.get(name), Special) else ''}")
    if draw(st.integers(0, 14)) == 0:
        return Case(
            "handed on", tree, ["report", "run"], functools.partial(_seals_its_own, whole), notes, (0, 2, 3),
            "Is a directory", outs=("run",), memory=1 << 30, seconds=120.0,
        )  # fmt: skip
    downloaded = draw(st.booleans())
    expected = _changed(whole, tree, downloaded)
    record = tree.get(b"run/record.json")
    status = 3 if expected else 0
    if downloaded and record in (None, Special("link", "nowhere")):
        status, expected = 2, set()
    arguments = ["verify", *(["run/model", "--record", "run/record.json"] if downloaded else ["run"])]
    arguments += ["--json"] if draw(st.booleans()) else []
    check = functools.partial(_names, expected)
    edits = notes if status else []
    return Case("handed on", tree, arguments, check, edits, (status,), outs=(), checked=(0, 3), seconds=60.0)


def _names(expected: set[bytes], root: Path, outcome: Outcome) -> list[str]:
    """Return the files that the command should have named as faults."""
    faults = json.loads(outcome.out)["faults"] if outcome.out.startswith("{") else outcome.err.splitlines()
    told = " ".join(faults)
    return [f"not named: {name!r}" for name in expected if name.removeprefix(_RUN).decode() not in told]


def _seals_its_own(whole: Tree, root: Path, outcome: Outcome) -> list[str]:
    """Return the files of which a report has changed the hash in the record, and of its own that it has not sealed."""
    if not (root / "run/record.json").is_file():
        return []
    files = json.loads((root / "run/record.json").read_text())["files"]
    former = json.loads(whole[b"run/record.json"])["files"]  # type: ignore[arg-type]
    reports = [name.decode() for name in _REPORTS]
    others = files.keys() | former.keys() - {*reports}
    found = [name for name in others if name not in reports and files.get(name) != former.get(name)]
    if (root / "run/verdict.json").exists():
        hashes = {name: hashlib.sha256((root / "run" / name).read_bytes()).hexdigest() for name in reports}
        found += [name for name, sha256 in hashes.items() if files.get(name) != sha256]
    return [f"sealed: {name}" for name in found]


HANDED_ON = {"handed on": handed_on_cases()}
