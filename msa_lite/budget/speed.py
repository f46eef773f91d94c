"""This machine and its speed: the time of a stage from operations and bytes, or from steps that were timed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from msa_lite.budget.shape import Shape
from msa_lite.io.models.devices import host_memory
from msa_lite.io.models.waiting import RAM_SHARE
from msa_lite.train.rungs import StepTimes

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


# Dense 16-bit tensor operations a second and bytes a second, by a part of the name, as the makers state them.
_GPUS = (
    ("B200", 2.25e15, 8.0e12), ("H200", 9.9e14, 4.8e12), ("H100", 9.9e14, 3.35e12), ("A100", 3.12e14, 2.0e12),
    ("L40S", 3.6e14, 8.6e11), ("L4", 1.2e14, 3.0e11), ("A10", 1.25e14, 6.0e11), ("A6000", 1.55e14, 7.7e11),
    ("5090", 2.1e14, 1.8e12), ("4090", 1.65e14, 1.0e12), ("4080", 0.97e14, 7.2e11), ("4070", 0.58e14, 5.0e11),
    ("4060", 0.3e14, 2.7e11), ("3090", 0.71e14, 9.4e11), ("3080", 0.6e14, 7.6e11), ("3070", 0.41e14, 4.5e11),
    ("3060", 0.26e14, 3.6e11), ("V100", 1.25e14, 9.0e11), ("T4", 0.65e14, 3.2e11), ("2080", 0.54e14, 4.5e11),
)  # fmt: skip
_OTHER = (0.3e14, 3.0e11)  # a GPU that the table lacks: like a small one of 2021
_CPU = (1.0e11, 2.0e10)  # two cores in fp32
_REACHED = 0.35  # the share of the stated operations that training reaches with these sizes
_STREAMED = 0.5  # the share of the stated bytes a second that decoding reaches
_STEP = 0.02  # seconds of a decoding step on a GPU, whatever the model
_LAYER = 0.003  # seconds of a layer's forward and backward pass on a GPU, however few its rows
_BUS = 1.2e10  # bytes a second from locked RAM to a GPU: PCIe 3.0 × 16, or 4.0 × 8
_DISK = 2e9  # bytes a second from an NVMe disk
_BUDGET = 8192  # tokens of a batch that is scored while layers stream (`evals.models`)


@dataclass(frozen=True)
class Speed:
    """The speed of a device."""

    operations: float
    """Per second, as reached."""
    nbytes: float
    """Bytes per second, as reached."""
    source: str
    """The subject and verb after "the speed that": "two cores reach"."""
    layer: float = 0.0
    """Seconds of a layer's forward and backward pass at least."""


@dataclass(frozen=True)
class ScoreTimes:
    """The times of scoring, as measured."""

    load: float
    """Seconds of loading the model."""
    token: float
    """Seconds of scoring a token."""
    new_token: float
    """Seconds of generating a token of an answer, in batches."""


@dataclass(frozen=True)
class Measured:
    """The times measured on this machine, in the place of estimates."""

    mode: str
    """The mode of the fits that were timed."""
    fits: Mapping[str, StepTimes]
    """By the name of the vector; at least one."""
    scores: ScoreTimes | None
    """None where nothing is scored."""

    @property
    def steps(self) -> int:
        """Return the steps of fits that were timed."""
        return sum(times.steps for times in self.fits.values())

    def fit(self, name: str | None) -> StepTimes:
        """Return the times of a fit's steps; those of another one, if that of this name was not timed."""
        return self.fits[name] if name is not None and name in self.fits else next(iter(self.fits.values()))


def speed_of(device: Device) -> Speed:
    """Return the speed of a device by its name."""
    if not device.is_gpu:
        return Speed(_CPU[0] * _REACHED, _CPU[1] * _STREAMED, "two cores reach")
    known = next((row for row in _GPUS if row[0] in device.name), None)
    operations, nbytes = known[1:] if known else _OTHER
    source = f"the maker of the {known[0]} states" if known else "a small GPU reaches"
    return Speed(operations * _REACHED, nbytes * _STREAMED, source, _LAYER)


def token_operations(mode: str, checkpointing: bool) -> float:
    """Return the operations of a fit for each weight and token.

    A forward pass takes 2, the gradients of activations 2, those of weights 2. 4-bit weights are unpacked in each pass.
    """
    return (1.3 if mode == "qlora" else 1.0) * ((6 if mode == "full" else 4) + (2 if checkpointing else 0))


def fit_seconds(shape: Shape, mode: str, checkpointing: bool, tokens: float, speed: Speed, passes: float = 0) -> float:
    """Return the seconds of a fit's passes over so many tokens, in so many forward passes."""
    weights = shape.in_linear + shape.vocabulary * shape.hidden
    counted = token_operations(mode, checkpointing) * weights * tokens / speed.operations
    return max(counted, passes * shape.layers * speed.layer)


def optimizer_seconds(trained: int, speed: Speed) -> float:
    """Return the seconds of a step of AdamW: it reads weight, gradient and two states in fp32, and writes three."""
    return 7 * 4 * trained / speed.nbytes


def score_seconds(shape: Shape, questions: float, tokens: float, new_tokens: float, batch: int, speed: Speed) -> float:
    """Return the seconds of scoring and answering so many questions of so many tokens each, in batches."""
    forward = 2 * shape.weights * questions * tokens / speed.operations
    steps = new_tokens * -(-questions // max(1, batch))
    width = 2 if shape.stored < 3 * shape.weights else 4
    decode = steps * max(_STEP, width * shape.weights / speed.nbytes)
    return forward + decode


def bus_seconds(nbytes: int, host: int | None) -> float:
    """Return the seconds in which so many bytes of weights pass from the host to the GPU.

    host: its RAM, if it is known. What finds no room there comes from a disk.
    """
    from_disk = nbytes - min(nbytes, int(RAM_SHARE * host)) if host else 0
    return (nbytes - from_disk) / _BUS + from_disk / _DISK


def stream_seconds(
    streamed: int, questions: float, tokens: float, new_tokens: float, batch: int, host: int | None = None
) -> float:
    """Return the seconds that so many bytes of weights take from RAM, in each batch and for each token of answers."""
    passes = -(-questions * tokens // _BUDGET) + new_tokens * -(-questions // max(1, batch))
    return passes * bus_seconds(streamed, host)
