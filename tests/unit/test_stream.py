"""The stream of a merge: ranges copied in pieces, progress that counts each byte once, new noise in each block."""

from __future__ import annotations

from pathlib import Path

import pytest

from msa_lite.merger import merge
from msa_lite.merger.checks import memory
from msa_lite.merger.stream import stream
from tests.support.merges import ROWS, SHARDS, contents, write_inputs


def test_a_range_that_is_longer_than_a_piece_is_copied_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = write_inputs(tmp_path)
    at_once = contents(merge(**inputs, out=tmp_path / "at once").folder)
    monkeypatch.setattr(stream, "_COPY", 1000)  # bytes; each norm has 2048
    in_pieces = contents(merge(**inputs, out=tmp_path / "in pieces").folder)
    assert {n: d for n, d in in_pieces.items() if n != "manifest.json"} == {
        n: d for n, d in at_once.items() if n != "manifest.json"
    }


def test_progress_ends_with_the_last_block_of_the_last_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = write_inputs(tmp_path)
    monkeypatch.setattr(memory, "BLOCK", 512 * 100)  # six blocks a tensor
    steps: list[tuple[int, int]] = []
    merge(**inputs, out=tmp_path / "out", progress=lambda title, done, amount: steps.append((done, amount)))
    (amount,) = {amount for _, amount in steps}
    done = [done for done, _ in steps]
    assert amount == SHARDS * (ROWS * 512 * 2 + 512 * 4)
    assert done == sorted(done)
    assert len({*done} - {0, amount}) >= 6 * SHARDS
    assert max(step for step in done if step < amount) >= amount - 2 * 512 * 512
