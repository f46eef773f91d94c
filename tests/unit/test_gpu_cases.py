"""The bodies of the GPU tests run on the CPU, so that the first GPU finds no misspelt name in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from msa_lite.demo import HistorySettings, make_groups, make_history
from msa_lite.evals.engine.models import load_model
from msa_lite.train import FitSettings
from tests.e2e.conftest import PEOPLE, SHORT
from tests.gpu import cases
from tests.support.fits import ROWS, VOCABULARY
from tests.unit.test_budget import TINY

Make = Callable[..., Path]
SIZES = {"hidden_size": 64, "intermediate_size": 128}


def test_a_fit_is_measured(tmp_path: Path) -> None:
    prior = cases.write_checkpoint(tmp_path / "prior", TINY, torch.float32, shard=100_000)
    assert len(list(prior.glob("*.safetensors"))) > 1
    settings = FitSettings("full", epochs=2, batch_size=4, micro_batch_size=2)
    fit = cases.measure_fit(prior, ROWS, tmp_path / "vector", settings)
    assert (len(fit.losses), fit.micro, fit.peak, fit.loads) == (4, 2, 0, 1)
    assert fit.tokens_per_second > 0


@pytest.mark.slow
def test_fits_resume(make_checkpoint: Make, tmp_path: Path) -> None:
    cases.assert_resumes(make_checkpoint("llama"), tmp_path, "lora")


def test_4_bit_models(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama", **SIZES)
    cases.assert_qlora(prior)
    losses = cases.fit_losses(str(prior), str(tmp_path / "vector"), "qlora")
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_baselines(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama", vocab_size=VOCABULARY)
    losses = cases.baseline_losses(str(prior), str(tmp_path), ["npo"], ["lora", "full"])
    assert {name: len(steps) for name, steps in losses.items()} == {"npo lora": 4, "npo full": 4}


def test_scores_and_answers(make_checkpoint: Make) -> None:
    model = load_model(make_checkpoint("llama"))
    scores, budget = cases.score_all(model, ROWS, 64)
    assert [len(row) for row in scores] == [sum(label != -100 for label in row.labels[1:]) for row in ROWS]
    answers, _ = cases.answer_all(model, [row.prompt_ids for row in ROWS], 4, 64)
    assert (len(answers), budget) == (len(ROWS), 64)


@pytest.mark.slow
def test_a_process_without_gpu_has_the_same_losses(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama")
    ours = cases.fit_losses(str(prior), str(tmp_path / "here"), "lora")
    assert cases.on_cpu("fit_losses", prior, tmp_path / "there", "lora") == ours
    assert tuple(cases.on_cpu("model_peak", TINY, "lora", 2, 16)) == cases.model_peak(TINY, "lora", 2, 16)


@pytest.mark.slow
def test_a_run_leaves_no_model(tmp_path: Path) -> None:
    sizes = SHORT | {"hidden_size": 64}
    make_history(tmp_path / "history", make_groups(PEOPLE, seed=0), HistorySettings(**sizes))  # type: ignore[arg-type]
    assert cases.run_everything(tmp_path / "history", tmp_path / "run") == 0
    assert cases.models_alive() == []
