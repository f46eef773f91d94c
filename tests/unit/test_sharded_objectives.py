"""Objectives in full mode over two processes: every baseline and a held fit give the vector of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.baselines.methods import METHODS, settings_grid
from msa_lite.baselines.objective import BaselineObjective
from msa_lite.data import IGNORE
from msa_lite.io.weights.hub import fetch
from msa_lite.train import FitSettings, KeptEpochs, VectorFit, run_fit
from msa_lite.train.objectives.held import HeldLoss
from tests.support.fits import PAD, assert_close, assert_same_course, die_before, ragged_rows, read_log, weights
from tests.support.models import tiny_tokenizer
from tests.support.processes import Ended, run_together

Make = Callable[..., Path]
pytestmark = pytest.mark.slow
# Batches of 4, 4 and 1: in the last one, the second process has no row.
FORGET, RETAIN = ragged_rows(9, seed=1), ragged_rows(7, seed=2)
ALTERNATIVES = [
    replace(row, ids=[*row.prompt_ids, 7, 8 + i], labels=[IGNORE] * len(row.prompt_ids) + [7, 8 + i])
    for i, row in enumerate(FORGET)
]
SETTINGS = FitSettings("full", epochs=2, learning_rate=2e-3, batch_size=4, micro_batch_size=2, warmup_epochs=0.5)
CLOSE = 1e-5
DONE = [Ended("", None)] * 2

HELD = "held"
PARAMETERS: dict[str, dict[str, Any]] = {
    "npo": {"retain_loss": "kl"},
    "rmu": {"layer": 0, "steering": 2.0},
    "undial": {"beta": 3.0, "retain_weight": 0.5},
}
CASES = [*METHODS, HELD]
CHOOSES = ("undial", "grad_diff")  # by its scores, after each epoch; the others train to the end


@dataclass
class Nearest:
    """Keeps the epoch with the least loss on the rows to keep, as the model has it; from the files after a stop."""

    def describe(self) -> str:
        return "nearest"

    def __call__(self, model: Any, epoch: int, scores: Path) -> KeptEpochs:
        from msa_lite.evals.engine.models import Runner
        from msa_lite.train.fit.until import measure_loss

        assert not model.training
        scores.mkdir(exist_ok=True)
        path = scores / f"epoch-{epoch}.json"
        if not path.exists():
            assert Runner(model).halves.body is not None  # as all scores are made
            path.write_text(json.dumps(measure_loss(model, RETAIN, PAD, 2)))
        values = {int(file.stem.rpartition("-")[2]): json.loads(file.read_text()) for file in scores.glob("*.json")}
        return KeptEpochs(frozenset([min(values, key=lambda number: values[number])]))


def fit_of(case: str, prior: Path, settings: FitSettings = SETTINGS) -> VectorFit:
    """The fit of a case."""
    source, name = fetch(str(prior)), case.partition(" ")[0]
    objective: Any
    if case == HELD:
        objective = HeldLoss(FORGET, RETAIN, 0.7, PAD, seed=3, full=True)
    else:
        parameters = settings_grid(name, PARAMETERS.get(case, {}))[0]
        alternatives = ALTERNATIVES if METHODS[name].takes == "pairs" else ()
        objective = BaselineObjective(name, parameters, FORGET, RETAIN, PAD, 3, alternatives, full=True)
    after = Nearest() if case in CHOOSES else None
    return VectorFit(source, FORGET, tiny_tokenizer(), settings, objective, after, label=case)


def fit_all(rank: int, cases: list[str], prior: Path, folder: Path) -> None:
    from msa_lite.train.processes.fit import fit_sharded

    for case in cases:
        fit_sharded(fit_of(case, prior), folder / case)


def dies(rank: int, prior: Path, folder: Path) -> None:
    """Fit with a choice of epochs, but the second process is killed in the second epoch."""
    if rank == 1:
        die_before(4)
    fit_all(rank, ["undial"], prior, folder)


def breaks(rank: int, prior: Path, folder: Path, step: int) -> None:
    """Fit with a choice of epochs; the loss of the second process is no number from a step on."""
    from msa_lite.train.processes.fit import _Steps

    own = _Steps._step

    def broken(self: Any, rows: Any, epoch: int, number: int) -> Any:
        values = own(self, rows, epoch, number)
        return {**values, "loss": float("nan")} if number >= step else values

    _Steps._step = broken  # type: ignore[method-assign]
    fit_all(rank, ["grad_diff"], prior, folder)


def trained(folder: Path) -> list[Path]:
    """The folders with weights in a vector's."""
    return sorted(folder.glob("epoch-*")) or [folder]


def assert_same_fit(found: Path, wanted: Path) -> None:
    assert [path.name for path in trained(found)[:-1]] == [path.name for path in trained(wanted)[:-1]]
    for mine, other in zip(trained(found), trained(wanted), strict=True):
        assert_close(weights(mine), weights(other), CLOSE)
    assert_same_course(found, wanted, rel=1e-4)


def test_every_objective_gives_the_vector_of_one_process(make_checkpoint: Make, tmp_path: Path) -> None:
    prior, two, one = make_checkpoint("llama"), tmp_path / "two", tmp_path / "one"
    assert run_together(fit_all, CASES, prior, two) == DONE
    for case in CASES:
        assert_same_fit(two / case, run_fit(fit_of(case, prior), one / case))
        last = weights(trained(two / case)[-1])
        moved = max(float((tensor - weights(prior)[name]).abs().max()) for name, tensor in last.items())
        assert moved > 100 * CLOSE, case
    for case in CHOOSES:
        assert [path.name for path in trained(two / case)] == [path.name for path in trained(one / case)]
        mine, other = ((folder / case / "scores/epoch-2.json").read_text() for folder in (two, one))
        assert json.loads(mine) == pytest.approx(json.loads(other), rel=1e-5)


def test_a_stopped_fit_goes_on_with_its_reference_and_its_scores(make_checkpoint: Make, tmp_path: Path) -> None:
    prior, killed, whole = make_checkpoint("llama"), tmp_path / "killed", tmp_path / "whole"
    assert [outcome.error for outcome in run_together(dies, prior, killed)] == ["StageError", "killed"]
    assert sorted(path.name for path in (killed / "undial.partial").glob("epoch-*")) == ["epoch-1"]
    for folder in (killed, whole):
        assert run_together(fit_all, ["undial"], prior, folder) == DONE
    assert [path.name for path in trained(killed / "undial")] == [path.name for path in trained(whole / "undial")]
    for mine, other in zip(trained(killed / "undial"), trained(whole / "undial"), strict=True):
        assert_close(weights(mine), weights(other))
    assert read_log(killed / "undial") == read_log(whole / "undial")


def test_a_loss_that_is_no_number_leaves_the_epochs_before_it(make_checkpoint: Make, tmp_path: Path) -> None:
    prior = make_checkpoint("llama")
    assert run_together(breaks, prior, tmp_path / "late", 4) == DONE
    assert [path.name for path in trained(tmp_path / "late/grad_diff")] == ["epoch-1"]
    for outcome in run_together(breaks, prior, tmp_path / "early", 1):
        assert outcome.error == "NotFiniteError"
        assert outcome.value.count("nothing was kept") == 1
    assert not (tmp_path / "early").exists() or not list((tmp_path / "early").iterdir())
