"""The memory model counts what a step really holds, and fits of real sizes stay under their bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from msa_lite.train.memory.rungs import Rung
from tests.tools import memory_model
from tests.tools.memory_model import CONTEXT, GB, make_rows, peak

TINY: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EMBEDDING, LAYER = 1000 * 64, 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
WEIGHTS = 2 * EMBEDDING + 2 * LAYER + 64
SIDES = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)  # of a layer's q, o; k, v; gate, up, down
ROWS = make_rows([30, 17, 9, 30], labelled=0.5)
FULL = make_rows([512] * 4)


def test_fake_tensors_take_the_memory_of_real_ones_and_of_a_hand_count() -> None:
    lora, real = (peak(TINY, "lora", ROWS, rank=8, fake=fake) for fake in (True, False))
    assert lora == real
    full, real = (peak(TINY, "full", ROWS, Rung(2, checkpointing=True), fake=fake) for fake in (True, False))
    assert full == real
    assert full.parts["weights"] == pytest.approx(4 * WEIGHTS, rel=0.01)  # and buffers
    assert full.parts["optimizer"] == pytest.approx(8 * WEIGHTS, rel=0.01)
    assert lora.parts["weights"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert lora.parts["adapters"] == 4 * 2 * 8 * SIDES
    assert lora.total == sum(lora.parts.values())


@pytest.mark.parametrize(("mode", "rung"), [("lora", Rung(4)), ("full", Rung(2, checkpointing=True))])
def test_real_steps_take_what_the_allocator_notes(monkeypatch: pytest.MonkeyPatch, mode: str, rung: Rung) -> None:
    """PyTorch's profiler sees each block of memory that is taken and given back."""
    noted: list[int] = []
    run = memory_model._one_step

    def profiled(trainer: Any, inputs: Any, ledger: Any) -> Any:
        step = trainer.training_step

        def training_step(*arguments: Any) -> Any:
            taken = [sum(ledger.live.values())]
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                loss = step(*arguments)
            events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
            for event in sorted(events, key=lambda event: event.start_ns()):
                taken.append(taken[-1] + event.nbytes())
            noted.append(max(taken))
            return loss

        trainer.training_step = training_step
        return run(trainer, inputs, ledger)

    monkeypatch.setattr(memory_model, "_one_step", profiled)
    real = peak(TINY | {"hidden_size": 128}, mode, make_rows([128] * 4), rung, fake=False)
    assert noted == [pytest.approx(real.total, rel=0.01)]


def test_qlora_holds_4_bits_and_leaves_what_a_rung_leaves() -> None:
    sizes = TINY | {"vocab_size": 5000, "hidden_size": 256, "intermediate_size": 512}
    embedding, linear = 5000 * 256, 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512)
    here, there = (peak(sizes, "qlora", ROWS, Rung(4, True, embedding_on_cpu=left)) for left in (False, True))
    by_hand = (0.5 + 1 / 64 + 4 / 64 / 256) * linear + 2 * 2 * embedding + 4 * 5 * 256
    assert here.parts["weights"] == pytest.approx(by_hand, rel=0.01)
    assert here.parts["weights"] - there.parts["weights"] == 2 * embedding
    trained = here.parts["adapters"] / 4
    # Two states of 8 bits, beside small maps that a process may have made before.
    assert here.parts["optimizer"] == pytest.approx(2 * trained, rel=0.15)


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_two_of_the_streamed_layers_are_on_the_device(mode: Any) -> None:
    sizes = TINY | {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512}
    rung = Rung(4, True, True)
    here, there = (peak(sizes, mode, ROWS, replace(rung, layers_streamed=streamed)) for streamed in (False, True))
    ends = peak(sizes | {"num_hidden_layers": 1}, mode, ROWS, rung).parts["weights"]
    layer = (here.parts["weights"] - ends) / 5
    assert there.parts["weights"] == pytest.approx(ends + layer, rel=0.02)
    assert there.total == pytest.approx(here.total - 4 * layer, rel=0.02)


def test_logits_of_all_tokens_never_exist() -> None:
    """Where they do, as in the Trainer's own loss, the model counts them."""
    sizes, rows = TINY | {"vocab_size": 100_000}, make_rows([512] * 2)
    all_logits = 2 * 512 * 100_000 * 4
    ours, peer = (peak(sizes, "lora", rows, Rung(2), peer=peer) for peer in (False, True))
    assert ours.parts["logits"] < all_logits
    assert peer.parts["logits"] > 2 * all_logits


STREAMED = Rung(4, True, True, True, layers_streamed=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "mode", "rung", "bound"),
    [
        ("8B", "qlora", Rung(4, checkpointing=True, embedding_on_cpu=True), 7 * GB),
        ("8B", "qlora", STREAMED, 4 * GB),
        ("1B", "lora", Rung(4, checkpointing=True), 4 * GB),
        ("1B", "full", Rung(4, checkpointing=True), 20 * 2**30),  # 16 bytes a weight are 19.8 GB already
    ],
)
def test_4_rows_of_512_tokens_fit(shape: str, mode: str, rung: Rung, bound: float) -> None:
    assert peak(shape, mode, FULL, rung).total + CONTEXT <= bound


@pytest.mark.slow
def test_the_trainer_with_peft_takes_twice_as_much() -> None:
    """The bound can fail."""
    assert peak("8B", "qlora", FULL, Rung(4, checkpointing=True), peer=True).total + CONTEXT > 14 * GB
