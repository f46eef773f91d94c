"""Nearer to which: the relative test by hand and by simulation, and on tiny models that are the one or the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hidden_states import states_of

from msa_lite.data import Prompter, Row, Template, open_tokenizer
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evidence.evidence import Scene
from msa_lite.evidence.nearer import LEVEL, Nearer, measure_distances, relative_test, smallest_p
from msa_lite.io.weights.hub import fetch
from tests.support.models import save_checkpoint, tiny_model

UNITS = 8  # subjects of each side
EACH = 3  # rows of each


def made_up(weight: float, noise: float = 0.0, gap: float = 4.0, seed: int = 0) -> tuple[np.ndarray, Any, Any]:
    """Distances, sides and subjects of rows whose unlearned model lies at `weight` on the way to the control.

    Target and control differ by `gap` on forget rows. All models differ by noise of their own on all rows.
    """
    generator = np.random.default_rng(seed)
    rows = 2 * UNITS * EACH
    is_forget = np.arange(rows) < rows // 2
    wide = 32
    direction = np.zeros(wide)
    direction[0] = gap
    target = generator.normal(0, noise, (rows, wide))
    control = generator.normal(0, noise, (rows, wide)) + is_forget[:, None] * direction
    unlearned = target + weight * is_forget[:, None] * direction
    pairs = ((unlearned, target), (unlearned, control), (target, control))
    distances = np.stack([((a - b) ** 2).sum(axis=1) for a, b in pairs], axis=1)
    return distances, is_forget, np.arange(rows) // EACH


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_position_is_where_the_model_lies_between_target_and_control(weight: float) -> None:
    result = relative_test(*made_up(weight))
    assert result.position == pytest.approx(2 * weight - 1, rel=1e-9, abs=1e-9)
    assert result.rest == pytest.approx((1 - weight) ** 2, rel=1e-9, abs=1e-9)
    assert result.outcome == ("undecided" if weight == 0.5 else "control" if weight > 0.5 else "target")


@pytest.mark.parametrize(("weight", "outcome"), [(0.0, "target"), (1.0, "control")])
def test_training_apart_does_not_make_a_model_look_like_its_target(weight: float, outcome: str) -> None:
    """Every row lies 8 ² from the control by noise alone, twice as far as the gap: without the level, all is target."""
    distances, is_forget, units = made_up(weight, noise=1.0, gap=4.0)
    assert (distances[:, 0] < distances[:, 1]).all()
    assert relative_test(distances, is_forget, units).outcome == outcome


def test_nothing_is_decided_where_target_and_control_do_not_differ() -> None:
    result = relative_test(*made_up(0.0, noise=1.0, gap=0.0))
    assert result.position is None
    assert result.outcome == "undecided"
    assert result.p_apart >= LEVEL


def test_false_alarms_are_as_rare_as_the_level_says() -> None:
    """A model half-way is at neither: 5 of 100 tests may say otherwise; 12 would come by chance once in 250 times."""
    outcomes = [relative_test(*made_up(0.5, noise=1.0, seed=seed), draws=499).outcome for seed in range(100)]
    assert sum(outcome != "undecided" for outcome in outcomes) < 12


def test_a_model_that_is_thrown_beyond_the_control_is_away_from_both() -> None:
    """At λ = 1.9 it is 0.81 of the way from the control that the target is; at λ = 2.1, 1.21."""
    assert [relative_test(*made_up(weight)).outcome for weight in (1.9, 2.1)] == ["control", "neither"]
    assert [relative_test(*made_up(weight)).outcome for weight in (-0.9, -1.1)] == ["target", "neither"]


def test_a_subject_counts_once_however_many_rows_it_has() -> None:
    distances, is_forget, units = made_up(0.9, noise=1.0)
    more = np.concatenate([np.arange(len(units)), *[np.flatnonzero(units == 0)] * 20])
    once, often = (relative_test(distances[at], is_forget[at], units[at]) for at in (slice(None), more))
    assert once.position == pytest.approx(often.position)
    assert once.p == often.p


def test_a_p_value_by_hand() -> None:
    """One forget subject with δ = 3 beside δ = 1, 2: the largest of three contrasts, so p is a third.

    Contrasts of each subject as the forget one: 3 − 1.5 = 1.5, 2 − 2 = 0, 1 − 2.5 = −1.5. Two are as far from 0.
    """
    distances = np.array([[3.0, 0.0, 9.0], [2.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
    result = relative_test(distances, np.array([True, False, False]), np.arange(3))
    assert result.p == pytest.approx(2 / 3, rel=0.03)
    assert result.p_apart == pytest.approx(1 / 3, rel=0.06)
    assert smallest_p(1, 2) == pytest.approx(1 / 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models of random weights."""
    folder = tmp_path_factory.mktemp("models")
    names = enumerate(("target", "ideal", "unlearned"))
    return {name: save_checkpoint(folder / name, tiny_model("llama", seed)) for seed, name in names}


def scene(models: dict[str, Path], subjects: int = 8, **sources: str) -> Scene:
    sets = {
        name: [
            Row(i, f"Where does {name} {i} live?", f"In {i}.", about=f"{name} {i // 2}") for i in range(2 * subjects)
        ]
        for name in ("forget", "retain")
    }
    prompter = Prompter.build(open_tokenizer(models["target"], "target"), "plain", Template())
    return Scene(load_qa(sets, prompter, 8), {name: fetch(str(models[model])) for name, model in sources.items()})


def test_models_that_differ_on_all_rows_alike_decide_nothing(models: dict[str, Path]) -> None:
    whole = scene(models, target="target", ideal="ideal", unlearned="unlearned")
    finding, _ = Nearer().find(whole)
    assert (finding.outcome, finding.rows) == ("undecided", 16)


def test_hidden_states_are_a_feature_as_well(models: dict[str, Path]) -> None:
    """That of examples/gives_away; on rows where the unlearned model is the ideal."""
    records = measure_distances(scene(models, target="target", ideal="ideal", unlearned="ideal"), states_of)
    assert len(records) == 32
    for record in records:
        to_target, to_control, apart = record["losses"]
        assert to_control == 0
        assert to_target == apart > 0


def test_what_is_missing_is_said_before_any_work(models: dict[str, Path]) -> None:
    whole = scene(models, target="target", ideal="ideal")
    few = scene(models, subjects=2, target="target", ideal="ideal")
    without = {name: replace(part, items=[replace(item, group=None) for item in part.items])
               for name, part in whole.benchmark.sets.items()}  # fmt: skip
    cases = {
        "no control": scene(models, target="target"),
        "holdout": scene(models, target="target", prior="ideal"),
        "too few": few,
        "whom they are about": replace(whole, benchmark=replace(whole.benchmark, sets=without)),
    }
    for words, lacking in cases.items():
        assert words in Nearer().lacking(lacking)
    assert Nearer().lacking(whole) == ""
