"""Rounded weights beside those of bitsandbytes, and plain absmax beside fp64 arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes import functional

from msa_lite.attacks.quantise import QUANTISATIONS

SHAPES = [(96, 64), (50, 100), (7, 34), (3, 200), (1, 6), (64, 576)]  # rows of an odd length cost seconds in theirs
KINDS = ["normal", "heavy", "zeros", "equal"]


def make_weights(shape: tuple[int, int], kind: str) -> np.ndarray:
    """Return fp32 weights that fp16 and bf16 hold, too."""
    random = np.random.default_rng(shape[1])
    weights = random.normal(0, 0.02, shape) if kind == "normal" else random.standard_t(2, shape)
    weights = np.full(shape, 0.25) if kind == "equal" else weights
    coarse: np.ndarray = np.round(weights * 1024).astype(np.float32) / 1024
    if kind == "zeros":
        coarse.reshape(-1)[: coarse.size // 2] = 0
        coarse[0] = 0
    return coarse


def rounded(form: str, weights: np.ndarray) -> np.ndarray:
    """Return weights, rounded by us."""
    result: np.ndarray = QUANTISATIONS[form].round(torch.from_numpy(weights)).numpy()
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_is_that_of_bitsandbytes(shape: tuple[int, int], kind: str) -> None:
    weights = make_weights(shape, kind)
    packed, state = functional.quantize_4bit(torch.from_numpy(weights), blocksize=64, quant_type="nf4")
    theirs = functional.dequantize_4bit(packed, state).numpy()
    midpoints: Any = (state.code[1:] + state.code[:-1]).numpy() / 2
    scales = np.repeat(state.absmax.numpy(), 64)[: weights.size].reshape(shape)
    is_tie = (np.abs((weights / np.maximum(scales, 1e-30))[..., None] - midpoints) < 1e-6).any(-1)
    assert np.allclose(rounded("nf4", weights)[~is_tie], theirs[~is_tie], rtol=1e-6, atol=0)
    assert is_tie.mean() < 0.01


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_that_of_bitsandbytes(shape: tuple[int, int]) -> None:
    weights = make_weights(shape, "normal")
    codes, scales, _ = functional.int8_vectorwise_quant(torch.from_numpy(weights).half())
    scaled = weights.astype(np.float64) * 127 / scales.numpy()[:, None]
    is_tie = np.abs(np.abs(scaled - np.trunc(scaled)) - 0.5) < 1e-4
    theirs = functional.int8_vectorwise_dequant(codes, scales).numpy()
    assert np.allclose(rounded("int8", weights)[~is_tie], theirs[~is_tie], rtol=1e-6, atol=0)


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
    ours = rounded("int4", weights)
    is_tie = ~np.isclose(ours, wanted, rtol=1e-6, atol=0)  # then both neighbours are half a step away
    assert np.allclose(np.abs(weights - ours)[is_tie], np.abs(weights - wanted)[is_tie], rtol=1e-5, atol=0)


def test_weights_that_are_rounded_already_stay() -> None:
    for form in QUANTISATIONS:
        once = rounded(form, make_weights((64, 576), "normal"))
        assert np.allclose(rounded(form, once), once, rtol=1e-6, atol=0), form
