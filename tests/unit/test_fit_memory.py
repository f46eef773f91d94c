"""How a fit steps down when memory runs out: the order, one load, what is said, and that the result stays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from msa_lite.errors import StageError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.models.devices import is_out_of_memory
from msa_lite.train import FitSettings
from msa_lite.train.fit import vector as fit
from msa_lite.train.memory.model import load_trainable
from msa_lite.train.memory.rungs import Rung, Static, ladder, set_up, step_fault
from tests.support.fits import ROWS, SETTINGS, CrossEntropy, Killed, Watch, assert_close, keeping, steps_of, weights
from tests.support.fits import fit as run_fit

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("quick_fits")
EACH = keeping([1], [1, 2], [1, 2, 3])


@pytest.fixture(scope="module")
def prior(make_checkpoint: Make) -> Path:
    return make_checkpoint("llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def plain(prior: Path, quick_fits: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a fit with enough memory makes."""
    return run_fit(prior, tmp_path_factory.mktemp("plain") / "v", objective=CrossEntropy())


@dataclass
class Device:
    """A small GPU: `room` bytes are free, and a step on a rung above `fits` finds no memory from `epoch` on."""

    fits: Callable[[Rung], bool]
    epoch: int = 0
    probes: bool = True
    room: int = 10**9
    loads: int = 0
    rung: Rung | None = None

    def step(self, rows: Sequence[int], epoch: int, micro: int) -> None:
        if self.rung and epoch >= self.epoch and not self.fits(self.rung):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 8 GiB")


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., Device]:
    """on_device(fits, …) → a device that counts loads, on which all fits run from now on."""
    caplog.set_level(logging.INFO)

    def start(fits: Callable[[Rung], bool], **changes: Any) -> Device:
        device = Device(fits, **changes)

        def load(*given: Any, **named: Any) -> Any:
            device.loads += 1
            return load_trainable(*given, **named)

        def bring(model: Any, rung: Rung, folder: Path) -> None:
            device.rung = rung
            set_up(model, replace(rung, states_on_cpu=False), folder)  # pinned memory needs a GPU

        monkeypatch.setattr("msa_lite.train.memory.rungs.free_bytes", lambda: device.room if device.probes else None)
        monkeypatch.setattr("msa_lite.train.memory.rungs.total_bytes", lambda: 8 * 10**9)
        monkeypatch.setattr(fit, "load_trainable", load)
        monkeypatch.setattr(fit, "set_up", bring)
        return device

    return start


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "out of memory with" in record.getMessage()]


RUNGS = [
    Rung(4),
    Rung(4, True),
    Rung(4, True, True),
    Rung(4, True, True, True),
    Rung(2, True, True, True),
    Rung(1, True, True, True),
    *(Rung(micro, True, True, True, True) for micro in (4, 2, 1)),
    *(Rung(micro, True, True, True, True, True) for micro in (4, 2, 1)),
]


@pytest.mark.parametrize("lowest", [1, 3, 5, 6, 9])
def test_the_first_rung_that_fits_is_taken_after_one_load(
    lowest: int,
    plain: Path,
    prior: Path,
    tmp_path: Path,
    on_device: Callable[..., Device],
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = on_device(lambda rung: RUNGS.index(rung) >= lowest)
    folder = run_fit(prior, tmp_path / "v", objective=CrossEntropy(before=device.step))
    assert (device.loads, device.rung) == (1, RUNGS[lowest])
    found = lines(caplog)
    assert len(found) == lowest
    assert found[0] == (
        "vector: out of memory with 4 rows at a time (CUDA out of memory. Tried to allocate 2.00 GiB); going on with 4 "
        "rows at a time, checkpointing"
    )
    if RUNGS[lowest].micro == 4:  # the layers are streamed with the bits that they have on the device
        assert hash_file(folder / "adapter_model.safetensors") == hash_file(plain / "adapter_model.safetensors")
    else:
        assert_close(weights(folder), weights(plain), 1e-3)


def test_a_fit_that_fits_changes_nothing_and_says_nothing(
    prior: Path, tmp_path: Path, on_device: Callable[..., Device], caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(SETTINGS, lora_dropout=0.25)  # a probe draws random numbers, which must be put back
    plain = run_fit(prior, tmp_path / "plain", settings, objective=CrossEntropy())
    device = on_device(lambda rung: True)
    folder = run_fit(prior, tmp_path / "v", settings, objective=CrossEntropy(before=device.step))
    assert (device.loads, device.rung, lines(caplog)) == (1, Rung(4), [])
    assert hash_file(folder / "adapter_model.safetensors") == hash_file(plain / "adapter_model.safetensors")


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_late_end_of_memory_keeps_what_is_done(
    mode: Any, prior: Path, tmp_path: Path, on_device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpointing leaves the numbers as they are, so the result is that of a fit with enough memory, bit for bit."""
    from msa_lite.train.objectives.plain import PlainLoss

    settings, seen = replace(SETTINGS, mode=mode), []
    monkeypatch.setattr(
        "msa_lite.train.objectives.plain.can_share", lambda halves: False
    )  # or checkpointing changes the sums
    plain = run_fit(prior, tmp_path / "plain", settings)
    device = on_device(lambda rung: rung.checkpointing, epoch=1, probes=False)
    step = PlainLoss.step

    def watched(self: Any, model: Any, rows: Any, epoch: int, micro: int, backward: Any) -> Any:
        seen.append(epoch)
        device.step(rows, epoch, micro)
        return step(self, model, rows, epoch, micro, backward)

    monkeypatch.setattr(PlainLoss, "step", watched)
    folder = run_fit(prior, tmp_path / "v", settings)
    assert seen == [0, 0, 1, 1, 1, 2, 2]  # epoch 0 is not run again
    assert device.loads == 1
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6]
    name = "adapter_model.safetensors" if mode == "lora" else "model.safetensors"
    assert hash_file(folder / name) == hash_file(plain / name)


def test_an_early_end_of_memory_starts_from_the_prior_again(
    plain: Path, prior: Path, tmp_path: Path, on_device: Callable[..., Device]
) -> None:
    """There is no save yet, and the adapter has moved."""
    device, steps = on_device(lambda rung: rung.checkpointing, probes=False), [0]

    def second(rows: Sequence[int], epoch: int, micro: int) -> None:
        steps[0] += 1
        if steps[0] == 2:
            device.step(rows, epoch, micro)

    folder = run_fit(prior, tmp_path / "v", objective=CrossEntropy(before=second))
    assert (device.loads, steps) == (1, [8])
    assert hash_file(folder / "adapter_model.safetensors") == hash_file(plain / "adapter_model.safetensors")


def test_a_fit_that_was_killed_goes_on_at_its_rung(
    prior: Path, tmp_path: Path, on_device: Callable[..., Device]
) -> None:
    plain = run_fit(prior, tmp_path / "plain", objective=CrossEntropy(), after_epoch=Watch(EACH))
    device = on_device(lambda rung: rung.checkpointing, epoch=1, probes=False)

    def kill(epoch: int) -> None:
        if epoch == 3:
            raise Killed

    with pytest.raises(Killed):
        run_fit(prior, tmp_path / "v", objective=CrossEntropy(before=device.step), after_epoch=Watch(EACH, before=kill))
    device = on_device(lambda rung: True, probes=False)
    folder = run_fit(prior, tmp_path / "v", objective=CrossEntropy(), after_epoch=Watch(EACH))
    assert device.rung == Rung(4, True)
    for epoch in (1, 2, 3):
        assert_close(weights(folder / f"epoch-{epoch}"), weights(plain / f"epoch-{epoch}"))


def test_saves_of_another_optimiser_or_of_an_older_version_are_not_resumed(prior: Path, tmp_path: Path) -> None:
    def kill(epoch: int) -> None:
        if epoch == 3:
            raise Killed

    for spoil in (lambda path: path.unlink(), lambda path: path.write_text('{"has_8bit_states": true}')):
        out = tmp_path / str(id(spoil))
        with pytest.raises(Killed):
            run_fit(prior, out, objective=CrossEntropy(), after_epoch=Watch(EACH, before=kill))
        spoil(tmp_path / f"{out.name}.partial/checkpoints/rung.json")
        watch = Watch(EACH)
        run_fit(prior, out, objective=CrossEntropy(), after_epoch=watch)
        assert watch.calls == [1, 2, 3]
        assert watch.known[0] == []


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_weights_that_do_not_fit_stream_from_ram_or_end_with_numbers_too(
    mode: Any,
    prior: Path,
    tmp_path: Path,
    on_device: Callable[..., Device],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = replace(SETTINGS, mode=mode)
    plain = run_fit(prior, tmp_path / "plain", settings, objective=CrossEntropy())

    def load(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8")

    device = on_device(lambda rung: rung.layers_streamed)
    monkeypatch.setattr("msa_lite.train.fit.vector.total_bytes", lambda: 8 * 10**9)
    monkeypatch.setattr("msa_lite.train.memory.model.load_whole", load)
    if mode != "full":
        folder = run_fit(prior, tmp_path / "v", settings, objective=CrossEntropy(before=device.step))
        assert (device.loads, device.rung) == (2, Rung(4, True, True, True, True))
        assert "layers wait in RAM and stream" in caplog.text
        assert hash_file(folder / "adapter_model.safetensors") == hash_file(plain / "adapter_model.safetensors")
    monkeypatch.setattr("msa_lite.io.models.streaming.load_whole", load)
    change = {"full": "vector.mode lora", "lora": "vector.mode qlora", "qlora": "a larger GPU"}[mode]
    with pytest.raises(StageError, match=rf"8 GB in all \(CUDA out of memory.*GiB\)\. .* choose {change}"):
        run_fit(prior, tmp_path / "w", settings)


def test_bytes_that_never_fit_are_found_without_a_step(
    prior: Path, tmp_path: Path, on_device: Callable[..., Device]
) -> None:
    objective = CrossEntropy()
    on_device(lambda rung: True, room=1000)
    with pytest.raises(StageError, match=r"gradients and optimiser need .* kB, 1 kB are free"):
        run_fit(prior, tmp_path / "v", replace(SETTINGS, mode="full"), objective=objective)
    assert objective.steps == []


# The rungs themselves


def test_an_embedding_on_the_cpu_leaves_outputs_gradients_and_saves_as_they_are(prior: Path, tmp_path: Path) -> None:
    model, other = (load_trainable(prior, SETTINGS) for _ in range(2))
    set_up(other, Rung(4, True, True))
    assert not any("embed" in name for name, _ in other.named_parameters())
    assert other.get_input_embeddings().weight.shape == model.get_input_embeddings().weight.shape
    assert other.device == model.device
    ids = torch.tensor([ROWS[0].ids])
    for one in (model, other):
        one.train()
        one(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert_close({name: p.grad for name, p in other.named_parameters() if p.requires_grad}, wanted)
    assert any(bool(grad.any()) for grad in wanted.values())
    other.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    assert hash_file(tmp_path / "a/adapter_model.safetensors") == hash_file(tmp_path / "b/adapter_model.safetensors")
    set_up(other, Rung(4, True, True))  # twice is as once


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        (replace(SETTINGS, mode="full"), False),
        (SETTINGS, True),
        (replace(SETTINGS, lora_targets=("q_proj", "embed_tokens")), False),
    ],
)
def test_an_embedding_that_is_trained_or_shared_stays(
    settings: FitSettings, tied: bool, make_checkpoint: Make, on_device: Callable[..., Device]
) -> None:
    on_device(lambda rung: True)
    model = load_trainable(make_checkpoint("llama", tie_word_embeddings=tied), settings)
    assert not any(rung.embedding_on_cpu for rung in ladder(model, [4, 2]))


def test_a_probe_finds_no_fault_of_another_kind(prior: Path, on_device: Callable[..., Device]) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    on_device(lambda rung: True)
    with pytest.raises(RuntimeError, match="assert triggered"):
        step_fault(load_trainable(prior, SETTINGS), CrossEntropy(before=broken), SETTINGS, [0, 1, 2, 3], 4)


def test_static_bytes_are_those_of_weights_gradients_and_states(prior: Path) -> None:
    model = load_trainable(prior, SETTINGS)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    every = sum(p.numel() for p in model.parameters())
    assert Static.of(model, SETTINGS) == Static(4 * every, 4 * trained, 8 * trained)
    small = Static.of(model, replace(SETTINGS, optimizer="adamw_8bit")).optimizer
    assert 2 * trained < small < 2.1 * trained


# Errors


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"), True),
        (RuntimeError("HIP out of memory. Tried to allocate"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("Error 2: out of memory at line 380 in file /src/csrc/ops.cu"), True),  # bitsandbytes
        (MemoryError(), True),
        (raised_from(ValueError("cannot load"), RuntimeError("CUDA out of memory.")), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling"), False),
        (ValueError("out of memory is what the user typed"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_all_words_for_a_full_memory_are_known(error: Exception, known: bool) -> None:
    assert is_out_of_memory(error) == known
