"""The machine that stages run on: its memory, and the time of work from operations and bytes."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from functools import cache

from msa_lite.budget.shape import Shape
from msa_lite.io.models.devices import host_memory

_MAJOR = 75  # the driver's number for the first part of a GPU's compute capability
_BF16 = 8  # from which on it computes in bf16


@dataclass(frozen=True)
class Device:
    """The place where models are tuned and scored."""

    name: str
    """"NVIDIA H200", "CPU", or empty for a size alone."""
    nbytes: int
    """Its memory."""
    is_gpu: bool = True
    has_bf16: bool = True
    """True if it computes in bf16; older GPUs take fp16."""

    def __str__(self) -> str:
        size = f"{self.nbytes / 1e9:.1f}".removesuffix(".0")
        return f"{size} GB ({self.name})" if self.name else f"{size} GB"


def find_gpu() -> Device | None:
    """Return the first GPU that CUDA shows, or None. No memory is taken on it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, major, size, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(100)
    try:
        faults = [
            driver.cuInit(0),
            driver.cuDeviceGet(ctypes.byref(handle), 0),
            driver.cuDeviceGetName(name, len(name), handle),
            driver.cuDeviceTotalMem_v2(ctypes.byref(size), handle),
            driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle),
        ]
    except AttributeError:  # no such function: a stub of the driver
        return None
    if any(faults) or not size.value:
        return None
    return Device(name.value.decode(errors="replace"), size.value, has_bf16=major.value >= _BF16)


def this_device() -> Device:
    """Return the GPU of this machine, or its CPU with the host's memory."""
    return find_gpu() or Device("CPU", host_memory() or 1 << 62, is_gpu=False)


# Dense 16-bit tensor operations a second, by a part of the name, as the makers state them.
_GPUS = {
    "B200": 2.25e15, "H200": 9.9e14, "H100": 9.9e14, "A100": 3.12e14, "L40S": 3.6e14, "L4": 1.2e14, "A10": 1.25e14,
    "A6000": 1.55e14, "5090": 2.1e14, "4090": 1.65e14, "4080": 0.97e14, "4070": 0.58e14, "4060": 0.3e14,
    "3090": 0.71e14, "3080": 0.6e14, "3070": 0.41e14, "3060": 0.26e14, "V100": 1.25e14, "T4": 0.65e14, "2080": 0.54e14,
}  # fmt: skip
_OTHER = 0.3e14  # a GPU that the table lacks: like a small one of 2021
_REACHED = 0.35  # the share of these operations that training reaches with these sizes
_LAYER = 0.003  # seconds of a layer's forward and backward pass on a GPU, however few its rows
_SIDE, _PRODUCT = 1024, 0.5  # rows and columns of the matrices that a CPU multiplies, and for how many seconds
_HOST = 8e10  # operations a second of a few cores in fp64
_BEGIN = 1.5  # seconds that a stage takes beside loading, work and saving: it hashes, seals, and sets a trainer up
_LOADED = 1e9  # bytes a second that a model is loaded at
_SAVED = 5e8  # bytes a second that files are written at, hashes included
_BUS = 1.2e10  # bytes a second from locked RAM to a GPU: PCIe 3.0 × 16, or 4.0 × 8


def speed_of(device: Device) -> float:
    """Return the operations a second that a device reaches: a GPU by its name, a CPU measured in half a second."""
    stated = (speed for name, speed in _GPUS.items() if name in device.name)
    return _REACHED * (next(stated, _OTHER) if device.is_gpu else _product_speed())


@cache
def _product_speed() -> float:
    """Return the operations a second in which this machine multiplies matrices in fp32."""
    import numpy as np

    matrix, count, begin = np.ones((_SIDE, _SIDE), np.float32), 0, time.perf_counter()
    while time.perf_counter() < begin + _PRODUCT:
        np.matmul(matrix, matrix)
        count += 1
    return 2 * _SIDE**3 * count / (time.perf_counter() - begin)


@dataclass(frozen=True)
class Machine:
    """The place where stages run."""

    device: Device
    """The device that tunes and scores."""
    processes: int = 1
    """Those that share a fit of all weights."""
    speed: float | None = None
    """Operations a second, as reached; None where only memory and disk are wanted."""

    @property
    def host(self) -> int | None:
        """Return the bytes of RAM; None where they are not known, as for another machine's GPU."""
        return host_memory() if self.device.name else None

    def seconds(
        self,
        shape: Shape,
        operations: float = 0.0,
        *,
        host: float = 0.0,
        disk: float = 0.0,
        bus: float = 0.0,
        passes: float = 0.0,
        loads: int = 1,
    ) -> float | None:
        """Return the rough time of a stage that loads a model and does so many operations; None without a speed.

        host: operations of the host in fp64. disk, bus: bytes that are written to files, and that come from RAM.
        passes: forward and backward. loads: the models that are loaded.
        """
        if self.speed is None:
            return None
        begin = loads * (_BEGIN + shape.stored / _LOADED)
        layers = passes * shape.layers * _LAYER if self.device.is_gpu else 0.0
        return begin + layers + operations / self.speed + host / _HOST + disk / _SAVED + bus / _BUS


def token_operations(mode: str, checkpointing: bool) -> float:
    """Return the operations of a fit for each weight and token.

    A forward pass takes 2, the gradients of activations 2, those of weights 2. 4-bit weights are unpacked in each pass.
    """
    return (1.3 if mode == "qlora" else 1.0) * ((6 if mode == "full" else 4) + (2 if checkpointing else 0))
