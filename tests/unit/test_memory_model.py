"""The memory model counts what a step really holds, and a fit of each mode stays under its bound."""

from __future__ import annotations

from typing import Any

import pytest

from tests.memory_model import make_rows, peak

TINY: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS = make_rows([30, 17, 9, 30], labelled=0.5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_fake_tensors_take_the_memory_of_real_ones(mode: str, checkpointing: bool) -> None:
    fake, real = (peak(TINY, mode, ROWS, checkpointing=checkpointing, fake=fake) for fake in (True, False))
    assert fake == real


def test_static_parts_are_those_of_a_hand_count() -> None:
    embedding, layer = 1000 * 64, 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    weights = 2 * embedding + 3 * layer + 64
    full, lora = peak(TINY, "full", ROWS), peak(TINY, "lora", ROWS, rank=8)
    assert full.parts["weights"] == pytest.approx(4 * weights, rel=0.01)  # and buffers
    assert full.parts["optimizer"] == pytest.approx(8 * weights, rel=0.01)
    sides = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)  # q, o; k, v; gate, up, down
    assert lora.parts["weights"] == pytest.approx(2 * weights, rel=0.01)
    assert lora.parts["adapters"] == 4 * 3 * 8 * sides
    assert lora.total == sum(lora.parts.values())
