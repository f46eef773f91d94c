"""A sweep that scores each point with rounded weights, too: what is written, and that it leaves no trace elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

import msa_lite
from msa_lite.evals.models import Runner, load_model
from msa_lite.evals.records import read_records, run_items
from msa_lite.io.finished.seal import verify_folder
from msa_lite.io.weights.blocks import rounded_model
from msa_lite.pipeline.prepare.run import msa_scope, prepare
from msa_lite.recipe import load_recipe
from msa_lite.report import load_report
from msa_lite.report.choice import candidate_name
from tests.e2e.conftest import sweep_recipe


@pytest.mark.slow
def test_points_are_scored_as_the_merged_model_is_once_its_weights_are_rounded(learnt: Path, tmp_path: Path) -> None:
    recipe = sweep_recipe(learnt, tmp_path / "run")
    recipe["forget"]["alpha"], recipe["retain"]["beta"] = [0.5, 1.0], [0.5]
    plain = msa_lite.sweep(recipe)
    assert plain is not None
    names = [candidate_name(line) for line in ({"alpha": alpha, "beta": 0.5} for alpha in (0.5, 1.0))]
    sweep = plain.folder / "sweep"
    before = {name: load_report(sweep / name).metrics for name in ("target", *names)}
    recipe["select"]["under"] = ["nf4"]
    held = msa_lite.sweep(recipe)
    assert held is not None
    # In one loaded model, one point after the other: each finds the weights as they were.
    assert {name: load_report(sweep / name).metrics for name in ("target", *names)} == before
    assert all(load_report(sweep / name / "nf4").metrics != before[name] for name in ("target", *names))
    assert verify_folder(sweep) == []
    assert held.notes[0].count(f"{held.choice.score:.4f}") in (0, 2)  # both figures are of the model as it is
    validation = prepare(load_recipe(recipe), msa_scope(load_recipe(recipe))).validation
    assert validation is not None
    runner = Runner(load_model(held.merged.folder))
    with rounded_model(runner.model, "nf4"):
        records = run_items(runner, validation, "forget")
    assert records == read_records(sweep / candidate_name(held.choice.values) / "nf4/forget.jsonl")
