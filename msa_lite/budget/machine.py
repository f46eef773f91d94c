"""The memory of this machine, found without torch: of its first GPU by the driver, of the host by the system."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from msa_lite.io.memory import host_memory

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
