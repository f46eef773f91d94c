"""Memory that really runs out, in a fit, while scoring and while generating: smaller batches, the same results."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from msa_lite.errors import MsaError
from msa_lite.evals.engine.models import load_model
from msa_lite.train import FitSettings
from tests.gpu import cases
from tests.gpu.test_gpu_memory import random_rows
from tests.tools.memory_model import LLAMA

SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SETTINGS = FitSettings("lora", lora_rank=8, epochs=2, batch_size=16, learning_rate=1e-3)


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_checkpoint(tmp_path_factory.mktemp("prior") / "model", SIZES)


def used_by(work: Any) -> tuple[Any, int]:
    """Return (the result of a call, the bytes of the GPU that it took at most)."""
    cases.resident()
    torch.cuda.reset_peak_memory_stats()
    return work(), torch.cuda.max_memory_reserved()


def test_a_fit_takes_smaller_batches(prior: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "msa_lite.notices")
    rows = random_rows(16, SIZES["vocab_size"], 1024)
    whole, most = used_by(lambda: cases.measure_fit(prior, rows, tmp_path / "whole", SETTINGS))
    before = cases.resident()
    for share in (0.7, 0.5, 0.4, 0.3, 0.2):
        caplog.clear()
        with cases.limited(share * most):
            fit = cases.measure_fit(prior, rows, tmp_path / f"{share}", SETTINGS)
        assert fit.loads == 1
        assert fit.losses == pytest.approx(whole.losses, rel=0.01)
        assert cases.resident() == before
        if fit.micro < whole.micro:
            break
    assert fit.micro < whole.micro
    assert "out of memory with" in caplog.text


def test_nothing_fits(prior: Path, tmp_path: Path) -> None:
    with cases.limited(150e6), pytest.raises(MsaError, match="memory"):
        cases.measure_fit(prior, random_rows(16, SIZES["vocab_size"], 1024), tmp_path / "vector", SETTINGS)
    assert not (tmp_path / "vector").exists()


def test_scoring_takes_smaller_batches(prior: Path) -> None:
    model, rows = load_model(prior), random_rows(64, SIZES["vocab_size"], 1024)
    (whole, budget), most = used_by(lambda: cases.score_all(model, rows))
    with cases.limited(0.5 * most):
        scores, lower = cases.score_all(model, rows)
    assert lower < budget
    for ours, wanted in zip(scores, whole, strict=True):
        assert ours == pytest.approx(wanted, rel=0.02, abs=0.05)  # in bf16, products differ with the batch


def test_generating_takes_smaller_batches(prior: Path) -> None:
    model, draw = load_model(prior), random.Random(0)
    prompts = [[draw.randrange(3, LLAMA["eos_token_id"] + 30000) for _ in range(512)] for _ in range(128)]
    (whole, budget), most = used_by(lambda: cases.answer_all(model, prompts, 64))
    with cases.limited(0.6 * most):
        answers, lower = cases.answer_all(model, prompts, 64)
    assert lower < budget
    assert len(answers) == len(whole)
    assert sum(ours == wanted for ours, wanted in zip(answers, whole, strict=True)) > 0.5 * len(whole)
