"""The steps that `msa-lite plan --measure` times, and their peak beside the predicted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msa_lite.budget.needs import CONTEXT, FitCase, fit_need
from msa_lite.budget.shape import read_shape
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import fetch
from msa_lite.train import FitSettings
from msa_lite.train.rungs import time_steps
from tests.gpu import cases
from tests.gpu.test_gpu_memory import TOKENS, WIDE, random_rows


@pytest.mark.parametrize("mode", cases.MODES)
def test_timed_steps_have_the_predicted_peak(mode: Any, tmp_path: Path) -> None:
    prior = cases.write_checkpoint(tmp_path / "prior", WIDE)
    rows = {"forget": random_rows(4, WIDE["vocab_size"])}
    times = time_steps(fetch(str(prior)), rows, {"forget": FitSettings(mode, batch_size=4)}, 0)["forget"]
    case = FitCase(mode, TOKENS, eight_bit=mode == "qlora")
    predicted = fit_need(read_shape(load_checkpoint(prior), "prior"), case, times.rung).nbytes - CONTEXT
    assert times.peak == pytest.approx(predicted, rel=0.1)
    assert times.token > 0
