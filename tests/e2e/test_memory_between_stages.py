"""One model at a time: whenever a run loads a model, the memory of all earlier ones is free again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.evals.engine import models
from msa_lite.evals.engine.models import Runner, load_model
from msa_lite.train import settings as auto
from msa_lite.train.memory import model as trained
from tests.e2e.conftest import sweep_recipe


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each model that was loaded, how many earlier ones were still in memory."""
    counts: list[int] = []
    references: list[weakref.ref[Any]] = []
    load = models.load_whole

    def count(folder: Path, **how: Any) -> Any:
        counts.append(sum(reference() is not None for reference in references))
        model = load(folder, **how)
        references.append(weakref.ref(model))
        return model

    for module in (models, trained):
        monkeypatch.setattr(module, "load_whole", count)
    return counts


def sweep_small(learnt: Path, output: Path) -> dict[str, Any]:
    """A recipe whose fits go on until the target's loss, which is measured first; two gentle points."""
    recipe = sweep_recipe(learnt, output)
    recipe["forget"]["alpha"] = [0.25]
    recipe["vector"] |= {"epochs": "auto", "learning_rate": 1e-3}
    return recipe


def test_a_run_holds_one_model_at_a_time(
    learnt: Path, tmp_path: Path, beside: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_MOST_PASSES", 5)
    assert msa_lite.run(sweep_small(learnt, tmp_path / "run")) is not None
    assert beside == [0] * len(beside)
    assert len(beside) >= 10  # to compare with, each vector's goal and fit, points, the merged one, test rows


def test_a_scored_model_goes_when_it_is_closed(make_checkpoint: Callable[..., Path]) -> None:
    runner = Runner(load_model(make_checkpoint("llama")))
    scored = weakref.ref(runner.model)
    assert runner.halves
    runner.close()
    assert scored() is None
