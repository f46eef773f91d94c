"""Codes and rounded weights beside those of bitsandbytes, and plain absmax beside fp64 arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from msa_lite.io.weights.blocks import QUANTISATIONS

SHAPES = [(96, 64), (50, 100), (7, 34), (3, 200), (1, 6), (64, 576)]  # rows of an odd length cost seconds in theirs
KINDS = ["normal", "heavy", "zeros", "equal"]


def make_weights(shape: tuple[int, int], kind: str) -> np.ndarray:
    """Return fp32 weights that fp16 and bf16 hold, too."""
    random = np.random.default_rng(shape[1])
    weights = random.normal(0, 0.02, shape) if kind == "normal" else random.standard_t(2, shape)
    weights = np.full(shape, 0.25) if kind == "equal" else weights
    rounded: np.ndarray = np.round(weights * 1024).astype(np.float32) / 1024
    if kind == "zeros":
        rounded.reshape(-1)[: rounded.size // 2] = 0
        rounded[0] = 0
    return rounded


def encoded(form: str, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of a matrix in the order of its weights, and what its groups scale each weight by."""
    parts = [(group, *QUANTISATIONS[form].encode(group)) for group in QUANTISATIONS[form].groups(weights)]
    codes = np.concatenate([part.reshape(-1) for _, part, _ in parts])
    scales = np.concatenate([np.broadcast_to(scale, group.shape).reshape(-1) for group, _, scale in parts])
    return codes, scales


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_is_that_of_bitsandbytes(shape: tuple[int, int], kind: str) -> None:
    import torch
    from bitsandbytes import functional

    weights = make_weights(shape, kind)
    packed, state = functional.quantize_4bit(torch.from_numpy(weights), blocksize=64, quant_type="nf4")
    packed = packed.reshape(-1).numpy()
    theirs = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[: weights.size]
    ours, scales = encoded("nf4", weights)
    midpoints: Any = (state.code[1:] + state.code[:-1]).numpy() / 2
    scaled = weights.reshape(-1) / np.maximum(scales, 1e-30)
    is_tie = (np.abs(scaled[:, None] - midpoints) < 1e-6).any(1)
    assert (ours != theirs).sum() <= is_tie.sum()
    assert np.array_equal(ours[~is_tie], theirs[~is_tie])
    rounded = functional.dequantize_4bit(*functional.quantize_4bit(torch.from_numpy(weights), quant_type="nf4"))
    same = ours == theirs
    assert np.allclose(
        QUANTISATIONS["nf4"].round(weights).reshape(-1)[same], rounded.numpy().reshape(-1)[same], rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_that_of_bitsandbytes(shape: tuple[int, int]) -> None:
    import torch
    from bitsandbytes import functional

    weights = make_weights(shape, "normal")
    theirs, scales, _ = functional.int8_vectorwise_quant(torch.from_numpy(weights).half())
    ours, own_scales = QUANTISATIONS["int8"].encode(weights)
    assert np.array_equal(own_scales[:, 0], scales.numpy())
    scaled = weights.astype(np.float64) * 127 / own_scales
    is_tie = np.abs(np.abs(scaled - np.trunc(scaled)) - 0.5) < 1e-4
    assert np.array_equal(ours[~is_tie], theirs.numpy()[~is_tie])
    rounded = functional.int8_vectorwise_dequant(theirs, scales).numpy()
    assert np.allclose(QUANTISATIONS["int8"].round(weights)[~is_tie], rounded[~is_tie], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_int4_is_plain_absmax_by_groups_of_a_row(shape: tuple[int, int], kind: str) -> None:
    weights = make_weights(shape, kind)
    wanted = np.zeros(shape)
    for row in range(shape[0]):
        for start in range(0, shape[1], 128):
            group = weights[row, start : start + 128].astype(np.float64)
            step = np.abs(group).max() / 7
            if step:
                wanted[row, start : start + 128] = np.round(group / step) * step
    rounded = QUANTISATIONS["int4"].round(weights)
    is_tie = ~np.isclose(rounded, wanted, rtol=1e-6, atol=0)  # then both neighbours are half a step away
    assert np.allclose(np.abs(weights - rounded)[is_tie], np.abs(weights - wanted)[is_tie], rtol=1e-5, atol=0)


def test_weights_that_are_rounded_already_stay() -> None:
    for form in QUANTISATIONS.values():
        once = form.round(make_weights((64, 576), "normal"))
        assert np.allclose(form.round(once), once, rtol=1e-6, atol=0), form.name
