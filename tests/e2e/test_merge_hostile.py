"""Inputs that change while a merge reads them, and damaged partial folders. Kills: test_hostile_names."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.errors import StageError
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.seal import JOURNAL, verify_folder
from msa_lite.merger import merge
from tests.support.merges import Adapter, contents, read_checkpoint, stamps, write_checkpoint


def append(path: Path) -> None:
    with open(path, "ab") as stream:
        stream.write(b" ")


def flip(path: Path) -> None:
    """Change a byte and nothing else."""
    with open(path, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))


def put_another(path: Path) -> None:
    """Rename a copy with the same size and time of change into its place."""
    shutil.copy2(path, path.with_suffix(".new"))
    os.rename(path.with_suffix(".new"), path)


CHANGES: list[Callable[[Path], Any]] = [append, flip, put_another, Path.unlink, os.utime, lambda p: os.truncate(p, 9)]
SHARD = "target/model-00004.safetensors"
FILES = [
    "target/config.json", "target/model.safetensors.index.json", "forget/adapter_model.safetensors",
    "forget/adapter_config.json", "prior/model.safetensors",
]  # fmt: skip


@pytest.fixture
def copies(inputs: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Inputs of a merge below tmp_path, a prior and a tuned checkpoint among them."""
    folder = tmp_path / "inputs"
    for name in ("target", "forget"):
        shutil.copytree(inputs[name], folder / name)
    random = np.random.default_rng(1)
    names = [f"layers.{number}" for number in range(6)]
    shapes = {f"{name}.weight": (512, 512) for name in names} | {f"{name}.norm": (512,) for name in names}
    for name in ("prior", "retain"):
        arrays = {key: random.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
        write_checkpoint(folder / name, arrays)
    time.sleep(0.02)  # a change is in another tick of the file system's clock
    return {name: str(folder / name) for name in ("target", "forget", "retain", "prior")} | {"beta": 0.5}


@pytest.mark.parametrize(
    ("name", "change", "moment"),
    [(SHARD, change, "at the start") for change in CHANGES]
    + [(SHARD, append, "at the end"), *((name, flip, "at the end") for name in FILES)],
)
def test_a_file_that_changes_while_it_is_read_is_named_and_nothing_stays(
    copies: dict[str, Any], tmp_path: Path, name: str, change: Callable[[Path], Any], moment: str
) -> None:
    path, changed = tmp_path / "inputs" / name, []

    def disturb(label: str, done: int, total: int) -> None:
        if not changed and (moment == "at the start" or done == total):
            changed.append(change(path))

    with pytest.raises(StageError, match=rf"(?s)files changed or vanished while they were read.*{name}") as caught:
        merge(**copies, out=tmp_path / "out", progress=disturb)
    assert caught.value.exit_code == 4
    assert os.listdir(tmp_path) == ["inputs"]


def test_files_that_are_read_by_others_or_come_anew_are_no_change(copies: dict[str, Any], tmp_path: Path) -> None:
    def disturb(*_: object) -> None:
        (tmp_path / "inputs/target/README.md").write_text("notes")
        (tmp_path / "inputs/target/extra.json").write_text("{}")
        (tmp_path / "inputs/target/config.json").read_bytes()
        (tmp_path / "inputs/target/config.json").chmod(0o600)

    assert verify_folder(merge(**copies, out=tmp_path / "out", progress=disturb).folder) == []


class _StopError(Exception):
    """As if the merge was killed."""


def interrupted(inputs: dict[str, Any], out: Path) -> Path:
    """Stop a merge when some of its shards are done; its partial folder."""

    def stop(label: str, done: int, total: int) -> None:
        if done > total * 0.7:
            raise _StopError

    with pytest.raises(_StopError):
        merge(**inputs, out=out, progress=stop)
    return out.with_name("out.partial")


def test_a_finished_shard_that_was_damaged_is_written_again(
    inputs: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    partial = interrupted(inputs, tmp_path / "out")
    done = sorted(json.loads(line)["file"] for line in (partial / JOURNAL).read_text().split("\n") if line)
    assert len(done) >= 3
    before = stamps(partial)
    for name, place in zip(done, (8, 5000, -1), strict=False):
        content = bytearray((partial / name).read_bytes())
        content[place] ^= 1
        (partial / name).write_bytes(content)
        os.utime(partial / name, ns=(before[name], before[name]))
    merge(**inputs, out=tmp_path / "out")
    after = stamps(tmp_path / "out")
    assert [name for name in done if before[name] == after[name]] == done[3:]
    assert contents(tmp_path / "out") == undisturbed


ELSEWHERE = {"file": "../../x", "sha256": "", "changes": {}}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lines: [b"\xff\xfe\x00" * 99, *lines],
        lambda lines: [b'{"file": "a", "sha256": 5, "changes": []}', b"[" * 100_000, b'"\\ud800"', b"9" * 5000],
        lambda lines: [line.replace(b'"weights": ', b'"weights": 1') for line in lines],
        lambda lines: [line[: len(line) // 2] for line in lines],
        lambda lines: [json.dumps(ELSEWHERE | {"line": digest(ELSEWHERE)}).encode()],
    ],
)
def test_a_damaged_journal_costs_shards_and_nothing_else(
    inputs: dict[str, Any], undisturbed: dict[str, bytes], tmp_path: Path, spoil: Callable[[list[bytes]], list[bytes]]
) -> None:
    journal = interrupted(inputs, tmp_path / "out") / JOURNAL
    journal.write_bytes(b"\n".join(spoil([line for line in journal.read_bytes().split(b"\n") if line])))
    merge(**inputs, out=tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed


def test_the_noise_of_stochastic_rounding_is_another_in_each_tensor_and_block(tmp_path: Path) -> None:
    rows, columns = 1024, 1024  # two blocks
    weights = np.full((rows, columns), 1.0, np.float16)
    names = ("layers.0", "layers.1")
    write_checkpoint(tmp_path / "target", {f"{name}.weight": weights for name in names})
    half_a_step = np.full((1, columns), 2.0**-12, np.float32), np.ones((rows, 1), np.float32)
    forget = Adapter(dict.fromkeys(names, half_a_step), lora_alpha=1).write(tmp_path / "forget")
    options: dict[str, Any] = {"forget": str(forget), "rounding": "stochastic"}
    moved: list[np.ndarray] = []
    for seed in (0, 1):
        out = merge(str(tmp_path / "target"), tmp_path / str(seed), **options, seed=seed).folder
        moved += [read_checkpoint(out)[f"{name}.weight"] != weights for name in names]
    blocks = [half for tensor in moved for half in np.split(tensor, 2)]
    for number, one in enumerate(blocks):
        assert 0.2 < one.mean() < 0.8
        for other in blocks[:number]:
            assert abs(float(np.corrcoef(one.ravel(), other.ravel())[0, 1])) < 0.05
