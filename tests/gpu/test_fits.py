"""Fits on a GPU: losses near the CPU's in every mode and stored dtype, kill and resume, every baseline."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from msa_lite.baselines.methods import METHODS
from msa_lite.io.models import heads as precision
from msa_lite.train import FitSettings
from msa_lite.train.memory.model import load_trainable
from msa_lite.train.memory.rungs import Rung
from tests.gpu import cases
from tests.support.fits import VOCABULARY, assert_same_bits, steps_at

Make = Callable[..., Path]
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # 4-bit blocks have 64 weights


@pytest.mark.parametrize("mode", cases.MODES)
def test_losses_are_near_those_of_the_cpu(make_checkpoint: Make, tmp_path: Path, mode: str) -> None:
    prior = make_checkpoint("llama", **SIZES)
    ours = cases.fit_losses(str(prior), str(tmp_path / "gpu"), mode)
    assert ours == pytest.approx(cases.on_cpu("fit_losses", prior, tmp_path / "cpu", mode), rel=0.02)
    assert ours[-1] < ours[0]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("mode", cases.MODES)
def test_priors_of_other_dtypes_learn_alike(make_checkpoint: Make, tmp_path: Path, mode: str, dtype: str) -> None:
    losses = [
        cases.fit_losses(str(make_checkpoint("llama", dtype=stored, **SIZES)), str(tmp_path / stored), mode)
        for stored in (dtype, "bfloat16")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("mode", cases.MODES)
def test_a_killed_fit_resumes(make_checkpoint: Make, tmp_path: Path, mode: str) -> None:
    cases.assert_resumes(make_checkpoint("llama", **SIZES), tmp_path, mode, atol=1e-3)


def test_every_baseline_starts_with_the_losses_of_the_cpu(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama", vocab_size=VOCABULARY, **SIZES)
    names = [name for name in METHODS if name != "task_vector"]
    ours = cases.baseline_losses(str(prior), str(tmp_path / "gpu"), names, ["lora", "full"])
    plain = cases.on_cpu("baseline_losses", prior, tmp_path / "cpu", names, ["lora", "full"])
    assert ours.keys() == plain.keys()
    for case, losses in ours.items():
        assert all(map(math.isfinite, losses)), case
        assert losses[0] == pytest.approx(plain[case][0], rel=0.05, abs=0.05), case


def test_gpus_without_bf16_scale_the_loss(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A T4 says that it supports bf16, which it emulates."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert precision.choose_precision() == "fp16"
    prior = make_checkpoint("llama", **SIZES)
    for mode in cases.MODES:
        losses = cases.fit_losses(str(prior), str(tmp_path / mode), mode)
        cpu = cases.on_cpu("fit_losses", prior, tmp_path / f"{mode}-cpu", mode)
        assert losses[0] == pytest.approx(cpu[0], rel=0.02)
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_layers_that_stream_give_the_bits_of_resident_ones(make_checkpoint: Make, tmp_path: Path, mode: str) -> None:
    """Copies on a stream of their own come in time, and never while the former layer still computes."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "tie_word_embeddings": False}
    prior, settings = make_checkpoint("llama", **sizes), FitSettings(mode, lora_rank=4, lora_alpha=8)  # type: ignore[arg-type]
    rung = Rung(2, checkpointing=True)
    streamed = replace(rung, layers_streamed=True)
    wanted = steps_at(load_trainable(prior, settings), rung)
    for spill in (None, tmp_path):
        model = load_trainable(prior, settings, spill=spill)
        assert_same_bits(steps_at(model, streamed), wanted)
        homes = [home for of_layer in model.msa_lite_streams._homes for home in of_layer]
        assert all(home.is_pinned() for home in homes)
        assert all(parameter.device.type == "cuda" for parameter in model.parameters())
    losses, _ = steps_at(load_trainable(prior, settings), replace(streamed, head_streamed=True))
    assert losses == pytest.approx(wanted[0], rel=1e-3)
