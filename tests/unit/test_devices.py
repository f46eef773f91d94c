"""What is said of a GPU before any work: one that nobody uses, one that others use, one that does not work."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msa_lite.budget.needs import Need
from msa_lite.budget.plan import StageCost
from msa_lite.budget.speed import Device
from msa_lite.errors import MismatchError, UsageError
from msa_lite.io.models import devices, transit
from msa_lite.pipeline.stages import stage as planning_check

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
