"""Peaks of fits at real sizes: under their bounds, near the memory model, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msa_lite.budget.needs import FitCase, Need, fit_need, fit_rungs
from msa_lite.budget.shape import read_shape
from msa_lite.data import Example
from msa_lite.demo import HistorySettings, make_groups, make_history
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.train import FitSettings
from tests.e2e.conftest import PEOPLE, SHORT
from tests.gpu import cases
from tests.tools.memory_model import CONTEXT, GB, SHAPES

TOKENS = 512
WIDE = SHAPES["1B"] | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}


def random_rows(count: int, vocabulary: int, tokens: int = TOKENS) -> list[Example]:
    """Rows of random tokens, all labelled."""
    draw = random.Random(0)
    rows = ([draw.randrange(3, vocabulary) for _ in range(tokens)] for _ in range(count))
    return [Example(index, ids, ids) for index, ids in enumerate(rows)]


def predicted(prior: Path, mode: Any, bound: float, micro: int | None = None) -> Need:
    """Return what `msa-lite plan` says for 4 such rows on a GPU of this size, CUDA's context included."""
    shape, case = read_shape(load_checkpoint(prior), prior.name), FitCase(mode, TOKENS, eight_bit=mode == "qlora")
    needs = [fit_need(shape, case, rung) for rung in fit_rungs(shape, case, [micro] if micro else [4, 2, 1])]
    return next((need for need in needs if need.nbytes <= bound), needs[-1])


def settings_of(mode: Any, micro: Any = "auto") -> FitSettings:
    return FitSettings(mode, epochs=3, batch_size=4, micro_batch_size=micro)


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint_of(shape) → folder of random weights in bf16; only the last one is kept on the disk."""
    import shutil

    made: dict[str, Path] = {}

    def make(shape: str) -> Path:
        if shape not in made:
            for name in list(made):
                shutil.rmtree(made.pop(name))
            made[shape] = cases.write_checkpoint(tmp_path_factory.mktemp("random") / shape, SHAPES[shape])
        return made[shape]

    return make


@pytest.mark.parametrize(
    ("shape", "mode", "bound"), [("1B", "lora", 4 * GB), ("1B", "full", 20 * 2**30), ("8B", "qlora", 7 * GB)]
)
def test_a_fit_of_4_rows_of_512_tokens_fits(
    checkpoint_of: Callable[..., Path], tmp_path: Path, measured: Any, shape: str, mode: str, bound: float
) -> None:
    """On a GPU of the bound's size, of which CUDA takes a part."""
    prior, rows = checkpoint_of(shape), random_rows(4, SHAPES[shape]["vocab_size"])
    with cases.limited(bound - CONTEXT):
        fit = cases.measure_fit(prior, rows, tmp_path / "vector", settings_of(mode))
    plan = predicted(prior, mode, bound).nbytes - CONTEXT
    measured(f"{shape} {mode} 4 × {TOKENS}", fit, plan)
    assert fit.micro == 4
    assert fit.loads == 1
    assert plan == pytest.approx(fit.peak, rel=0.1)  # the mean over all of the table should be 0.03


@pytest.mark.parametrize("mode", cases.MODES)
def test_a_large_vocabulary_makes_no_large_logits(tmp_path: Path, measured: Any, mode: str) -> None:
    prior, rows = cases.write_checkpoint(tmp_path / "prior", WIDE), random_rows(4, WIDE["vocab_size"])
    fit = cases.measure_fit(prior, rows, tmp_path / "vector", settings_of(mode, 4))
    measured(f"128k tokens, {mode} 4 × {TOKENS}", fit, predicted(prior, mode, 1e12, 4).nbytes - CONTEXT)
    total, logits = cases.on_cpu("model_peak", WIDE, mode, 4, TOKENS)
    assert fit.peak == pytest.approx(total, rel=0.1, abs=50e6)
    all_logits = 4 * TOKENS * WIDE["vocab_size"] * 4
    assert logits < all_logits / 2


def test_nothing_is_left_on_the_gpu(tmp_path: Path) -> None:
    history = tmp_path / "history"
    make_history(history, make_groups(PEOPLE, seed=0), HistorySettings(**(SHORT | {"hidden_size": 64})))  # type: ignore[arg-type]
    sizes = [cases.run_everything(history, tmp_path / f"run-{i}") for i in range(3)]
    assert sizes[2] == sizes[1]  # the first one pays for workspaces that stay
    assert not cases.models_alive()
