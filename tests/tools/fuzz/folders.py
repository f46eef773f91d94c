"""Cases of `msa-lite verify`: a finished folder in which something was changed, added or taken away."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.tools.fuzz.case import Case
from tests.tools.fuzz.child import run
from tests.tools.fuzz.models import adapter, checkpoint
from tests.tools.fuzz.tree import PLACES, Node, Special, Tree, lay

CHANGES = (
    "none", "flip", "flip", "flip", "manifest", "manifest", "manifest", "add", "add", "drop", "special", "cut", "swap",
)  # fmt: skip
ADDED = (
    "x", ".lock", ".journal.jsonl", ".msa-lite-partial.json", ".replaced", ".replaced/x", "sub/manifest.json",
    "manifest.json.tmp", ".hidden", "sub/x", "model.partial/x", "x.previous/y", "config.json.tmp", "\u00e9", " ",
    "x\udcff", ".lock/x", "manifest.json/x",
)  # fmt: skip


@functools.cache
def finished() -> Tree:
    """Return the files of a finished merge below `out`."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lay(checkpoint(0).tree("target") | adapter(0).tree("forget"), root)
        outcome = run(["merge", "--target", "target", "--forget", "forget", "--out", "out"], root)
        assert outcome.status == 0, outcome.err
        return {
            str(path.relative_to(root)).encode(): path.read_bytes()
            for path in (root / "out").rglob("*")
            if path.is_file()
        }


@st.composite
def verify_cases(draw: Callable[..., Any]) -> Case:
    """A finished folder with one change, or none."""
    tree = dict(finished())
    names = sorted(tree)
    what = draw(st.sampled_from(CHANGES))
    name = b"out/manifest.json" if what == "manifest" else draw(st.sampled_from(names))
    raw = tree[name]
    assert isinstance(raw, bytes)
    statuses, note = (3,), f"{what} {name!r}"
    if what == "none":
        statuses = (0,)
    elif what in ("flip", "manifest") and raw:
        at = draw(st.integers(0, len(raw) - 1))
        tree[name] = raw[:at] + bytes([raw[at] ^ draw(st.integers(1, 255))]) + raw[at + 1 :]
        note += f" byte {at}: {raw[max(0, at - 20) : at + 20]!r}"
    elif what == "add":
        added = draw(st.sampled_from(ADDED)).encode("utf-8", "surrogateescape")
        links = [Special("pipe"), *(Special("link", to) for to in ("nowhere", "/dev/zero", "config.json"))]
        node: Node = draw(st.sampled_from([b"", b"x", b"{}", raw, *links]))
        tree[b"out/" + added] = node
        note += f" {added!r} {str(node)[:50]}"
        if added.startswith(b"manifest.json/"):
            statuses = (0,)  # cannot be laid beside the file of that name
    elif what == "drop":
        del tree[name]
    elif what == "special":
        tree[name] = draw(st.sampled_from(PLACES))
    elif what == "cut":
        tree[name] = raw[: len(raw) // 2]
        statuses = (0, 3) if not raw else (3,)
    else:
        other = draw(st.sampled_from(names))
        tree[name], tree[other] = tree[other], tree[name]
        statuses = (0,) if tree == finished() else (3,)
        note += f" {other!r}"
    arguments = ["verify", "out", *(["--json"] if draw(st.booleans()) else [])]
    edits = [] if statuses == (0,) else [note]
    return Case(
        "verify", tree, arguments, None, edits, statuses=(*statuses, 2) if statuses != (0,) else statuses, outs=()
    )


VERIFY = {"verify": verify_cases()}
