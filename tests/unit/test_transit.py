"""Layers that wait in RAM: a fit's losses and gradients are those of weights that are on the device, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msa_lite.errors import StageError
from msa_lite.io.models import ends, streaming, transit
from msa_lite.io.models.transit import Transit
from msa_lite.train.memory.model import load_trainable
from msa_lite.train.memory.rungs import Rung, can_stream
from msa_lite.train.objectives.held import HeldLoss
from tests.support.families import tiny_family
from tests.support.fits import ROWS, SETTINGS, assert_same_bits, steps_at
from tests.support.models import save_checkpoint, tiny_model

# Five layers: a step meets them upwards twice and downwards twice.
DEEP: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5, "tie_word_embeddings": False},
    "qwen2": {"num_hidden_layers": 5},
    "gpt2": {"n_layer": 5},
}


@pytest.fixture(scope="module")
def priors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("priors")
    made = {kind: save_checkpoint(folder / kind, tiny_model(kind, **sizes)) for kind, sizes in DEEP.items()}
    return made | {kind: save_checkpoint(folder / kind, tiny_family(kind)) for kind in ("qwen2_moe", "mamba")}


def load_aligned(folder: Path, settings: Any) -> Any:
    """A resident model whose weights lie as a device's allocator places them, which files do not. Sums depend on it."""
    model = load_trainable(folder, settings)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize(
    ("kind", "mode", "checkpointing"),
    [
        ("llama", "lora", False),
        ("llama", "lora", True),
        ("llama", "qlora", False),
        ("llama", "qlora", True),
        ("qwen2", "qlora", True),
        ("gpt2", "lora", True),
        ("gpt2", "qlora", True),
        ("qwen2_moe", "lora", True),
        ("mamba", "lora", True),
    ],
)
def test_losses_and_gradients_are_those_of_resident_layers(
    kind: str, mode: Any, checkpointing: bool, priors: dict[str, Path], tmp_path: Path
) -> None:
    settings, rung = replace(SETTINGS, mode=mode), Rung(2, checkpointing)
    streamed = replace(rung, layers_streamed=True)
    wanted = steps_at(load_aligned(priors[kind], settings), rung)
    assert_same_bits(steps_at(load_trainable(priors[kind], settings), streamed), wanted)
    assert_same_bits(steps_at(load_trainable(priors[kind], settings, spill=tmp_path), streamed), wanted)


@pytest.mark.parametrize(
    ("mode", "targets"), [("lora", "all-linear"), ("qlora", ("q_proj",)), ("qlora", ("gate_proj", "down_proj"))]
)
def test_a_held_fit_and_few_adapters_are_the_same_too(mode: Any, targets: Any, priors: dict[str, Path]) -> None:
    """The reference runs without gradients in between; without an adapter behind it, a 4-bit layer saves nothing."""
    settings = replace(SETTINGS, mode=mode, lora_targets=targets)
    both = [
        steps_at(load_aligned(priors["llama"], settings), rung, HeldLoss(ROWS, ROWS[::-1], 2.0, 0, 0))
        for rung in (Rung(2, True), Rung(2, True, layers_streamed=True))
    ]
    assert_same_bits(both[1], both[0])


def test_only_two_layers_are_on_the_device_and_nothing_of_an_earlier_one_is_left(
    priors: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer is spoilt before each copy; what is still computed with the former layer would be no number."""
    model, made = load_trainable(priors["llama"], SETTINGS), list[Any]()
    empty_bytes, copy = transit.empty_bytes, Transit._copy
    weights = {name: p.clone() for name, p in model.named_parameters() if ".layers." in name and not p.requires_grad}

    def noted(nbytes: int, *device: Any) -> Any:
        made.append(empty_bytes(nbytes, *device))
        return made[-1]

    def spoilt(self: Any, number: int) -> None:
        buffer = self._buffers[number % 2]
        buffer.fill_(255)  # NaN, whatever the dtype
        copy(self, number)
        order.append(number)

    order: list[int] = []
    monkeypatch.setattr(transit, "empty_bytes", noted)
    monkeypatch.setattr(Transit, "_copy", spoilt)
    losses, _ = steps_at(model, Rung(2, True, layers_streamed=True))
    assert all(loss == loss for loss in losses)
    *homes, first, second = made
    assert len(homes) == 5
    places = {
        name: next(i for i, buffer in enumerate((first, second)) if _is_within(p, buffer))
        for name, p in model.named_parameters()
        if name in weights
    }
    assert {int(name.split(".layers.")[1][0]) % 2 == place for name, place in places.items()} == {True}
    assert {0, 1, 2, 3, 4} == {*order}


def _is_within(tensor: Any, buffer: Any) -> bool:
    return 0 <= tensor.data_ptr() - buffer.data_ptr() < len(buffer)


def test_layers_beyond_ram_wait_in_files_that_leave_nothing(
    priors: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = steps_at(load_aligned(priors["llama"], SETTINGS), Rung(2))
    monkeypatch.setattr(streaming, "free_ram", lambda: 60_000)
    monkeypatch.setattr(transit, "_file_system", lambda folder: "ext4")
    places: list[Any] = []
    file_memory = transit.file_memory
    monkeypatch.setattr(transit, "file_memory", lambda *given: (places.append(given), file_memory(*given))[1])
    ours = steps_at(load_trainable(priors["llama"], SETTINGS, spill=tmp_path), Rung(2, layers_streamed=True))
    assert 0 < len(places) < 5
    assert_same_bits(ours, wanted)
    assert not [*tmp_path.iterdir()]


def test_a_disk_that_fills_up_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transit.os, "posix_fallocate", full)
    with pytest.raises(StageError, match=r"no room for layers .*No space left"):
        transit.file_memory(1000, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_head_in_blocks_of_rows_differs_by_rounding_alone(
    priors: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = steps_at(load_trainable(priors["llama"], SETTINGS), Rung(2, layers_streamed=True))
    monkeypatch.setattr(ends, "HEAD_BLOCK", 32 * 4 * 7)  # seven rows of 32 weights; the vocabulary is no multiple
    rows = ends.PassingRows(torch.randn(150, 32), torch.device("cpu"))
    assert torch.equal(torch.cat([block.clone() for _, block in rows.each()]), rows.matrix)
    losses, gradients = steps_at(
        load_trainable(priors["llama"], SETTINGS), Rung(2, layers_streamed=True, head_streamed=True)
    )
    assert losses == pytest.approx(wanted[0], rel=1e-6)
    for name, gradient in wanted[1].items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max())), name


@pytest.mark.parametrize(("change", "streams"), [("none", True), ("trained", False), ("shared", False)])
def test_layers_that_are_trained_or_share_weights_do_not_stream(change: str, streams: bool) -> None:
    model = tiny_model("llama", num_hidden_layers=3).requires_grad_(change == "trained")
    if change == "shared":
        model.model.layers[2].mlp = model.model.layers[0].mlp
    assert can_stream(model) is streams


@pytest.mark.parametrize(("results", "locked"), [([0, 0, 0], 3), ([0, 1], 1)])
def test_memory_is_locked_in_place_as_far_as_the_system_lets(
    results: Sequence[int], locked: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: Iterator[int] = iter(results)
    freed: list[int] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: next(answers), cudaHostUnregister=freed.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffers = [torch.empty(64, dtype=torch.uint8) for _ in range(3)]
    pinned = transit.pin(buffers)
    assert [each.data_ptr() for each in pinned] == [each.data_ptr() for each in buffers[:locked]]
    assert ("cannot be locked" in caplog.text) is (locked < 3)
    transit.unpin(pinned)
    assert freed == [each.data_ptr() for each in pinned]
