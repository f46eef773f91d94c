"""Points set on a device of torch against the CPU's own: the same bits, whatever the vectors and the rounding.

The device is torch's CPU, whose products come from another library than numpy's. tests/gpu has the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msa_lite.io.weights.hub import fetch
from msa_lite.merger import OnDevice, OpenMerge, Precision, as_tensor, open_merge

Make = Callable[..., Path]
WEIGHTS = [{"forget": -0.75, "retain": 0.5}, {"forget": -1.3, "retain": 0.0}, {"forget": 0.0, "retain": 0.0}]
SHAPE = {"hidden_size": 64, "intermediate_size": 96}


def opened(target: Path, prior: Path, vectors: Mapping[str, Path], precision: Precision) -> OpenMerge:
    sources = {name: fetch(str(folder)) for name, folder in vectors.items()}
    return open_merge(fetch(str(target)), sources, fetch(str(prior)), precision)


def filled(merge: OpenMerge, weights: Mapping[str, float], device: OnDevice | None) -> tuple[dict[Any, Any], int]:
    """The rows of every tensor, by tensor and first row, and how many blocks the device made."""
    rows: dict[Any, Any] = {}
    made = 0

    def put(name: str, part: slice, values: Any) -> None:
        nonlocal made
        made += isinstance(values, torch.Tensor)
        rows[name, part.start] = (as_tensor(values) if isinstance(values, np.ndarray) else values).clone()

    merge.fill(weights, put, device)
    return rows, made


def compare(merge: OpenMerge, device: OnDevice) -> list[int]:
    """Assert that every point has the same bits both ways; return how many blocks the device made of each."""
    counts = []
    for weights in WEIGHTS:
        (here, none), (there, made) = filled(merge, weights, None), filled(merge, weights, device)
        assert none == 0
        assert here.keys() == there.keys()
        for key, values in here.items():
            assert values.dtype == there[key].dtype
            assert torch.equal(values.view(torch.uint8), there[key].view(torch.uint8)), key
        counts.append(made)
    return counts


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("bfloat16", "same"),
        ("float32", "same"),
        ("float16", "same"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float16"),
    ],
)
@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
def test_points_on_a_device_have_the_bits_of_the_merge(
    make_checkpoint: Make, make_adapter: Make, stored: str, dtype: str, full: bool
) -> None:
    target, prior = (make_checkpoint("llama", seed, stored, **SHAPE) for seed in (0, 1))
    vectors = {"forget": make_adapter("llama", 1, model=SHAPE), "retain": make_adapter("llama", 2, r=3, model=SHAPE)}
    if full:
        vectors = {name: make_checkpoint("llama", seed, **SHAPE) for seed, name in enumerate(vectors, 2)}
    merge = opened(target, prior, vectors, Precision(dtype))
    assert all(compare(merge, OnDevice(torch.device("cpu"))))


@pytest.mark.parametrize("precision", [Precision(rounding="stochastic", seed=3), Precision(exact=True)])
def test_what_a_device_would_round_otherwise_is_left_to_the_cpu(
    make_checkpoint: Make, make_adapter: Make, precision: Precision
) -> None:
    target = make_checkpoint("llama", 0, "bfloat16")
    vectors = {"forget": make_adapter("llama", 1), "retain": make_adapter("llama", 2)}
    merge = opened(target, make_checkpoint("llama", 1), vectors, precision)
    assert compare(merge, OnDevice(torch.device("cpu"))) == [0] * len(WEIGHTS)


def test_a_device_that_adds_up_products_in_another_order_makes_none(
    make_checkpoint: Make, make_adapter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of such a device, products are summed in fp64."""
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: torch.mm(a.double(), b.double()).float())
    target = make_checkpoint("llama", 0, **SHAPE)
    vectors = {"forget": make_adapter("llama", 1, model=SHAPE), "retain": make_adapter("llama", 2, model=SHAPE)}
    device = OnDevice(torch.device("cpu"))
    assert not device.agrees(64, 16, 64)
    assert compare(opened(target, target, vectors, Precision()), device)[0] == 0
