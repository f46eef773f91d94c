"""The precision of a fit on each kind of device, and what is held in which dtype; the 8-bit optimiser."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msa_lite.budget.needs import Need
from msa_lite.budget.plan import StageCost
from msa_lite.budget.speed import Device
from msa_lite.errors import MismatchError, NotFiniteError, UsageError
from msa_lite.io.models import devices, transit
from msa_lite.io.models import devices as memory
from msa_lite.io.models import heads as precision
from msa_lite.io.models.heads import autocast, choose_precision, nf4
from msa_lite.pipeline.stages import stage as planning_check
from msa_lite.train import FitSettings, check_mode
from msa_lite.train.fit.loop import Loop, VectorFit, _make_callback
from msa_lite.train.memory.model import load_trainable
from tests.support.fits import ROWS, SETTINGS, Killed, compute_in_bf16, fit, kill_at, read_log, weights

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("quick_fits")
cpu_with_bf16 = pytest.mark.skipif(not precision._cpu_has_bf16(), reason="this CPU has no instructions for bf16")


def have_gpu(patch: pytest.MonkeyPatch, major: int) -> None:
    """Have torch report a GPU of this compute capability."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    patch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    patch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)  # by emulation


@pytest.mark.parametrize(("major", "best", "dtype"), [(7, "fp16", torch.float16), (8, "bf16", torch.bfloat16)])
def test_a_gpu_without_bf16_computes_in_fp16_although_it_emulates_bf16(
    major: int, best: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpu(monkeypatch, major)
    assert torch.cuda.is_bf16_supported()
    assert choose_precision() == best
    assert choose_precision("fp32") == "fp32"
    assert nf4().bnb_4bit_compute_dtype == dtype
    options = FitSettings(mode="qlora").trainer_options()
    assert options == {"bf16": best == "bf16", "fp16": best == "fp16", "optim": "paged_adamw_8bit"}
    assert "optim" not in FitSettings(mode="lora").trainer_options()
    assert "optim" not in FitSettings(mode="qlora", optimizer="adamw").trainer_options()


def test_bf16_is_refused_where_a_device_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False, "cpu_name": "x"})
    with pytest.raises(UsageError, match="bf16 on a CPU needs AMX or AVX512-BF16, which this one lacks"):
        check_mode("lora", compute="bf16")
    check_mode("lora", compute="auto")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    check_mode("lora", compute="bf16")
    assert (choose_precision(), choose_precision("bf16")) == ("fp32", "bf16")
    have_gpu(monkeypatch, 7)
    with pytest.raises(UsageError, match="Tesla T4 has no bf16"):
        check_mode("lora", compute="bf16")


def test_an_8_bit_optimiser_needs_its_package_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else own(name))
    with pytest.raises(UsageError, match=r"vector.optimizer adamw_8bit needs bitsandbytes: pip install"):
        check_mode("lora", "adamw_8bit")
    check_mode("lora", "adamw")


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_where_bf16_is_computed_frozen_matrices_are_held_in_16_bits_and_norms_are_exact(
    mode: Any, stored: str, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_bf16(monkeypatch)
    folder = make_checkpoint("llama", dtype=stored, hidden_size=64, intermediate_size=128)  # bitsandbytes' blocks
    model = load_trainable(folder, replace(SETTINGS, mode=mode))
    for name, parameter in model.named_parameters():
        if mode == "full" or "lora_" in name:
            assert (parameter.dtype, parameter.requires_grad) == (torch.float32, True), name
        elif parameter.dtype != torch.uint8:  # of 4-bit layers
            is_wide = parameter.dim() == 1 and (mode == "qlora" or stored != "bfloat16")
            assert parameter.dtype == (torch.float32 if is_wide else torch.bfloat16), name
            assert not parameter.requires_grad
    if mode != "full":
        exact = {name.rpartition("model.")[2]: value for name, value in weights(folder).items() if value.dim() == 1}
        found = {name.rpartition("model.")[2]: p for name, p in model.named_parameters() if p.dim() == 1}
        assert found.keys() == exact.keys()
        assert all(torch.equal(found[name].float(), exact[name].float()) for name in exact)
    body = model.get_base_model().model if mode != "full" else model.model
    with autocast(model):
        states = body(input_ids=torch.tensor([ROWS[0].ids])).last_hidden_state
    assert states.dtype == (torch.float32 if mode == "full" else torch.bfloat16)


def test_on_a_cpu_all_is_fp32(make_checkpoint: Make) -> None:
    model = load_trainable(make_checkpoint("llama", dtype="bfloat16"), SETTINGS)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with autocast(model):
        assert not torch.is_autocast_enabled("cpu")


def test_in_fp16_the_states_between_layers_are_fp32(make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over all layers may leave fp16's range."""
    monkeypatch.setattr("msa_lite.train.memory.model.choose_precision", lambda compute: "fp16")
    model = load_trainable(make_checkpoint("llama", dtype="bfloat16"), SETTINGS)
    dtypes = {name: p.dtype for name, p in model.named_parameters() if "lora_" not in name}
    assert {dtype for name, dtype in dtypes.items() if "norm" not in name} == {torch.float16}
    assert {dtype for name, dtype in dtypes.items() if "norm" in name} == {torch.float32}
    assert model.get_input_embeddings()(torch.tensor([[1, 2]])).dtype == torch.float32
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert bool(model(input_ids=torch.tensor([ROWS[0].ids])).logits.isfinite().all())


@cpu_with_bf16
def test_bf16_on_a_cpu_is_used_when_it_is_asked_for(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama", initializer_range=0.3)
    exact, coarse = (
        weights(fit(prior, tmp_path / compute, replace(SETTINGS, mode="full", compute=compute)))  # type: ignore[arg-type]
        for compute in ("auto", "bf16")
    )
    before = weights(prior)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.weight"):
        one, two = exact[name] - before[name], coarse[name] - before[name]
        assert not torch.equal(one, two)
        assert float(torch.nn.functional.cosine_similarity(one.flatten(), two.flatten(), dim=0)) > 0.8
        assert coarse[name].dtype == torch.float32


def test_an_8_bit_optimiser_learns_as_well_and_a_stopped_fit_goes_on_to_the_same_weights(
    make_checkpoint: Make, tmp_path: Path
) -> None:
    import bitsandbytes

    made: list[int] = []
    step = bitsandbytes.optim.AdamW.step
    prior = make_checkpoint("llama", hidden_size=64, intermediate_size=128)
    settings = replace(SETTINGS, mode="full", optimizer="adamw_8bit")

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        result = step(self, *given, **named)
        made.append(sum(state["state1"].dtype == torch.uint8 for state in self.state.values()))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitsandbytes.optim.AdamW, "step", counted)
        whole = fit(prior, tmp_path / "whole", settings)
    assert made
    assert all(made)  # matrices of 4096 numbers and more have states of a byte
    losses = [line["loss"] for line in read_log(whole)]
    assert losses[-1] < losses[0]
    with pytest.raises(Killed):
        fit(prior, tmp_path / "cut", settings, progress=kill_at(3))
    resumed = weights(fit(prior, tmp_path / "cut", settings))
    assert all(torch.equal(resumed[name], value) for name, value in weights(whole).items())


# Steps that overflow


def log_of(watch: Any, losses: list[tuple[float, float]]) -> None:
    for step, (loss, norm) in enumerate(losses, 1):
        state = SimpleNamespace(global_step=step, epoch=step / 10)
        watch.on_log(None, state, SimpleNamespace(), {"loss": loss, "grad_norm": norm, "learning_rate": 0.1})


def test_a_skipped_step_in_fp16_is_no_broken_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch_of(name: str) -> Any:
        monkeypatch.setattr("msa_lite.train.fit.loop.choose_precision", lambda compute: name)
        unused: Any = None
        return _make_callback(
            Loop(VectorFit(unused, ROWS, unused, SETTINGS), tmp_path, unused), lambda line, number: None
        )

    infinite = float("inf")
    log_of(watch_of("fp16"), [(2.0, infinite), (2.0, infinite), (1.9, 0.5)])
    lines = read_log(tmp_path)
    assert [line.get("grad_norm") for line in lines] == [None, None, 0.5]
    with pytest.raises(NotFiniteError):  # in bf16 there is no scale that could be too large
        log_of(watch_of("bf16"), [(2.0, infinite)])
    with pytest.raises(NotFiniteError):
        log_of(watch_of("fp16"), [(float("nan"), 1.0)])
    with pytest.raises(NotFiniteError, match="gradient norm inf"):  # no scale is small enough
        log_of(watch_of("fp16"), [(2.0, infinite)] * 30)


# The allocator


def test_segments_grow_unless_the_user_has_set_the_allocator_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "linux")
    for name in (memory._ALLOCATOR, *memory._OLD_ALLOCATORS):
        monkeypatch.delenv(name, raising=False)
    for name in memory._OLD_ALLOCATORS:
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:64")
            memory.avoid_fragments()
            assert memory._ALLOCATOR not in memory.os.environ
    monkeypatch.setenv(memory._ALLOCATOR, "")
    memory.avoid_fragments()
    assert memory.os.environ[memory._ALLOCATOR] == ""
    monkeypatch.delenv(memory._ALLOCATOR)
    memory.avoid_fragments()
    assert memory.os.environ[memory._ALLOCATOR] == "expandable_segments:True"


def test_settings_at_their_defaults_leave_manifests_as_they_were() -> None:
    recorded = FitSettings().describe()
    assert {"optimizer", "compute"}.isdisjoint(recorded)
    changed = FitSettings(optimizer="adamw", compute="fp32").describe()
    assert changed == recorded | {"optimizer": "adamw", "compute": "fp32"}


# What is said of a GPU before any work: one that nobody uses, one that others use, one that does not work.


GB = 10**9


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    devices.check_device.cache_clear()
    yield
    devices.check_device.cache_clear()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level("WARNING", logger="msa_lite"):
        devices.check_device()
        devices.check_device()  # told once
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("cuda", "visible", "reason"),
    [
        ("12.8", "", "CUDA_VISIBLE_DEVICES hides it"),
        (None, None, "made for CPUs alone"),
        ("12.8", None, "made for CUDA 12.8; update the driver"),
    ],
)
def test_a_gpu_that_is_not_used_is_worth_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cuda: Any, visible: Any, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(devices.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = lines(caplog)
    assert len(found) == 1
    assert found[0].startswith("this machine has an NVIDIA GPU, but the CPU is used: ")
    assert reason in found[0]


def test_a_machine_without_a_gpu_is_worth_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    monkeypatch.setattr(devices.Path, "glob", lambda *_: iter(()))
    assert lines(caplog) == []
    assert devices.bytes_of_others() == 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of 16 GB, of which this process holds 2 GB and half a GB of context."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: 2 * GB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (13 * GB + GB // 2, 16 * GB))
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
    return monkeypatch


def test_a_gpu_of_its_own_is_worth_none(gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog) == []


def test_a_gpu_that_others_use_is_told_with_what_they_leave(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.setattr(torch.cuda, "mem_get_info", lambda number: (5 * GB, 16 * GB))
    found = lines(caplog)
    assert len(found) == 1
    assert found[0].startswith("Tesla T4: other processes use 7.9 of its 16.0 GB, so 8.1 GB are left")


def test_a_gpu_that_does_not_work_ends_the_run(gpu: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with")

    gpu.setattr(torch, "ones", fail)
    with pytest.raises(UsageError, match=r"Tesla T4 does not work \(CUDA error: no kernel image is .* device\)\."):
        devices.check_device()


def test_the_allocator_is_set_up_before_the_gpu_is_used(gpu: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    gpu.setattr(devices, "avoid_fragments", lambda: calls.append("allocator"))
    gpu.setattr(torch.cuda, "is_available", lambda: calls.append("CUDA") or True)
    devices.check_device()
    assert calls[:2] == ["allocator", "CUDA"]


def test_each_process_of_a_launcher_looks_at_its_own_gpu(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.own_gpu() == 0
    for rank, number in (("1", 1), ("2", 0)):
        gpu.setenv("LOCAL_RANK", rank)
        assert devices.own_gpu() == number


def test_the_runs_own_check_counts_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_check, "this_device", lambda: Device("Tesla T4", 16 * GB))
    monkeypatch.setattr(planning_check, "bytes_of_others", lambda: 8 * GB)
    device = planning_check._free_device()
    assert device.nbytes == 8 * GB
    assert device.name == "Tesla T4: other processes hold 8.0 GB of 16.0 GB"
    monkeypatch.setattr(planning_check, "bytes_of_others", lambda: 0)
    assert planning_check._free_device() == Device("Tesla T4", 16 * GB)


@pytest.mark.parametrize(
    ("kind", "force", "refused"), [("fit", False, True), ("scores", False, True), ("fit", True, False)]
)
def test_layers_without_room_to_wait_in_are_refused_before_work(
    kind: Any, force: bool, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = StageCost(f"the {kind}", kind, Need({"weights": GB}), waiting=14 * GB)
    stage: Any = SimpleNamespace(cost=lambda facts, machine: [cost], folder=tmp_path / "not-there-yet" / "vector")
    monkeypatch.setattr(planning_check, "_free_device", lambda: Device("Tesla T4", 16 * GB))
    monkeypatch.setattr(planning_check, "free_ram", lambda: 8 * GB)
    monkeypatch.setattr(transit, "_file_system", lambda folder: "ext4")
    monkeypatch.setattr(transit.shutil, "disk_usage", lambda folder: SimpleNamespace(free=GB))
    check: Any = partial(planning_check.check_memory, [stage], None, 1, lambda machine: iter(()), force)
    if refused:
        with pytest.raises(
            MismatchError, match=f"the {kind}: layers of 14 GB would wait in RAM, of which 8 GB are free"
        ):
            check()
        assert not (tmp_path / "not-there-yet").exists()
    monkeypatch.setattr(transit.shutil, "disk_usage", lambda folder: SimpleNamespace(free=8 * GB))
    assert check() is None  # the rest waits in a file
