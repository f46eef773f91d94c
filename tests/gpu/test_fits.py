"""Fits on a GPU: losses near the CPU's in every mode and stored dtype, kill and resume, every baseline."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from msa_lite.baselines.methods import METHODS
from msa_lite.io.models import heads as precision
from tests.gpu import cases
from tests.support.fits import VOCABULARY

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
