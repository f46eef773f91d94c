"""A merge of six shards of hand-written tensors that takes a moment, for tests that disturb it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.handmade import KINDS, Adapter, write_checkpoint

ROWS, COLUMNS, SHARDS = 512, 512, 6


def write_inputs(folder: Path) -> dict[str, Any]:
    """A target of six shards and two adapters; the arguments for `merge`, `out` left out."""
    random = np.random.default_rng(0)
    names = [f"layers.{number}" for number in range(SHARDS)]
    arrays = {f"{n}.weight": random.normal(size=(ROWS, COLUMNS)).astype(KINDS["bfloat16"]) for n in names}
    arrays |= {f"{name}.norm": np.ones(COLUMNS, np.float32) for name in names}
    write_checkpoint(folder / "target", arrays, {name: int(name.split(".")[1]) for name in arrays})
    halves = ((4, COLUMNS), (ROWS, 4))
    forget, retain = (Adapter({n: tuple(random.normal(0, 0.1, s) for s in halves) for n in names}) for _ in range(2))  # type: ignore[misc]
    return {
        "target": str(folder / "target"),
        "forget": str(forget.write(folder / "forget")),
        "retain": str(retain.write(folder / "retain")),
        "beta": 0.5,
        "threads": 2,
    }


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stamps(folder: Path) -> dict[str, int]:
    """When each weight file of a folder was last written, by name."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
