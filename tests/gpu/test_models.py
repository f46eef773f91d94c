"""Models as a GPU holds them: in 4 bits, larger than it, and points of a sweep with the bits of the merged model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from msa_lite.evals.engine.models import load_model
from msa_lite.io.models import heads as precision
from msa_lite.io.models.streaming import is_streamed
from tests.gpu import cases
from tests.parity.test_points import assert_points_are_merges, make_job
from tests.support.fits import ROWS
from tests.support.plain import set_small_gpu

Make = Callable[..., Path]
SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_qlora_holds_only_norms_and_adapters_in_fp32(make_checkpoint: Make, stored: str) -> None:
    cases.assert_qlora(make_checkpoint("llama", dtype=stored, **SIZES))


def test_4_bit_targets_are_16_bits_wide_otherwise(make_checkpoint: Make) -> None:
    model = load_model(make_checkpoint("llama", **SIZES), four_bit=True)
    cases.assert_quantised(model)
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    assert dtypes == {precision.dtype_of(precision.choose_precision())}


@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_points_have_the_bits_of_the_merged_model(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, stored: str, rounding: str, full: bool
) -> None:
    job = make_job(
        make_checkpoint("llama", 0, stored), make_checkpoint("llama", 1, stored), tmp_path, rounding=rounding
    )
    vectors = {"forget": make_adapter("llama", 1), "retain": make_adapter("llama", 2)}
    if full:
        vectors = {"forget": make_checkpoint("llama", 2), "retain": make_checkpoint("llama", 3)}
    assert_points_are_merges(job, vectors, tmp_path / "out")


def test_a_model_larger_than_the_gpu_scores_and_takes_points_alike(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama")
    wanted, _ = cases.score_all(load_model(folder), ROWS)
    set_small_gpu(monkeypatch, folder)
    model = load_model(folder)
    assert is_streamed(model)
    assert model.device.type == model.model.layers[0].mlp.up_proj.weight.device.type == "cuda"
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "cpu"
    assert cases.score_all(model, ROWS)[0] == wanted
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "cpu"
    job = make_job(folder, make_checkpoint("llama", 1), tmp_path)
    assert_points_are_merges(job, {"forget": make_adapter("llama", 1)}, tmp_path / "out")
