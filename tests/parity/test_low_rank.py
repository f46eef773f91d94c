"""An adapter from full checkpoints: the best product of a rank for each linear layer, against numpy's SVD and PEFT."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from msa_lite.errors import MismatchError
from msa_lite.io.finished.seal import load_manifest
from msa_lite.merger import merge_adapters
from msa_lite.merger.adapters.modules import approximate
from tests.support.models import load

RANK = 6


@pytest.mark.parametrize("shape", [(40, 300), (300, 40), (5, 9)])
@pytest.mark.parametrize("fall", [0.5, 0.95])
def test_the_product_is_nearly_the_best_of_its_rank(shape: tuple[int, int], fall: float) -> None:
    draw, size = np.random.default_rng(1), min(shape)
    u, v = (np.linalg.qr(draw.standard_normal((side, size)))[0] for side in shape)
    values = fall ** np.arange(size)
    matrix = (u * values) @ v.T
    parts = [slice(start, start + 7) for start in range(0, shape[0], 7)]
    (b, a), whole, kept = approximate(lambda: ((part, matrix[part]) for part in parts), shape, min(RANK, size))
    assert whole == pytest.approx(np.sum(values**2))
    assert np.sum((matrix - b @ a) ** 2) == pytest.approx(whole - kept, rel=1e-6, abs=1e-9)
    assert np.sum(values[:RANK] ** 2) * 0.985 <= kept <= np.sum(values[:RANK] ** 2) * (1 + 1e-9)


def test_full_checkpoints_become_an_adapter_that_says_what_it_keeps(
    make_checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import PeftModel

    target, tuned, prior = (make_checkpoint("qwen2", seed=seed) for seed in (0, 1, 2))
    with caplog.at_level(logging.WARNING, "msa_lite"):
        merged = merge_adapters(
            str(target), tmp_path / "out", forget=str(tuned), alpha=0.5, prior=str(prior), max_rank=RANK
        )
    before, after, start = (load_file(folder / "model.safetensors") for folder in (target, tuned, prior))
    change = {name: -0.5 * (after[name].astype(float) - start[name]) for name in before}
    linear = [name for name in change if name.endswith("proj.weight") or name == "lm_head.weight"]
    assert merged.modules == len(linear) == 15
    model = PeftModel.from_pretrained(load(target)[0], tmp_path / "out").double()
    result = {name: value.numpy() for name, value in model.merge_and_unload().state_dict().items()}
    lost, kept = 0.0, (load_manifest(tmp_path / "out") or {})["kept"]
    for name, delta in change.items():
        found = result[name] - before[name] if name in linear else np.zeros_like(delta)
        lost += np.sum((delta - found) ** 2)
        if name in linear:
            best = np.sum(np.linalg.svd(delta, compute_uv=False)[:RANK] ** 2) / np.sum(delta**2)
            assert 0.9 * best <= kept[name.removesuffix(".weight")] <= best * (1 + 1e-6)
        else:
            torch.testing.assert_close(torch.tensor(result[name]), torch.tensor(before[name]).double())
    total = sum(np.sum(delta**2) for delta in change.values())
    assert merged.truncation_loss == pytest.approx((lost / total) ** 0.5, rel=1e-4)
    assert "tensors are no linear layers and stay the target's, among them model.embed_tokens.weight" in caplog.text


def test_without_a_rank_full_checkpoints_are_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    target, tuned = (str(make_checkpoint("qwen2", seed=seed)) for seed in (0, 1))
    with pytest.raises(MismatchError, match=r"give --max-rank:\n.*the forget vector is a full checkpoint"):
        merge_adapters(target, tmp_path / "out", forget=tuned, prior=target)
