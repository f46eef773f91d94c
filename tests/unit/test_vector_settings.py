"""How a recipe's `vector` section becomes settings of a fit: what it says, and what is left to us."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.errors import UsageError
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import fetch
from msa_lite.pipeline.run.vectors import check_learns, first_epoch, fit_settings, fit_until
from msa_lite.recipe import load_recipe
from msa_lite.train import FitSettings
from msa_lite.train.settings import auto_rate, most_epochs

Make = Callable[..., Path]


@pytest.fixture
def make_job(make_checkpoint: Make) -> Callable[..., Any]:
    """make_job(*overrides, rows=24, method="msa", start="prior") → as much of a job as fits ask for."""
    source = fetch(str(make_checkpoint("llama")))

    def make(*overrides: str, rows: int = 24, method: str = "msa", start: str = "prior") -> Any:
        values = {"target": "t", "prior": "p", "forget": {"data": {"path": "f.jsonl"}}, "output": "runs/x"}
        examples: dict[str, Sequence[int]] = {"forget": range(rows), "retain": range(10 * rows)}
        scope = SimpleNamespace(method=method, start=start)
        sources = {"prior": source, "target": source}
        return SimpleNamespace(recipe=load_recipe(values, overrides), scope=scope, examples=examples, sources=sources)

    return make


def test_what_is_left_to_us_suits_rows_and_model(make_job: Callable[..., Any]) -> None:
    job = make_job()
    forget, retain = fit_settings(job, "forget"), fit_settings(job, "retain")
    assert (forget.batch_size, forget.epochs) == (4, most_epochs(24, 4))
    assert (retain.batch_size, retain.epochs) == (32, most_epochs(240, 32, retain=True))
    assert (forget.schedule, forget.warmup_steps) == ("constant", 4)
    weights = sum(math.prod(entry.shape) for entry in load_checkpoint(job.sources["prior"].folder).tensors.values())
    assert forget.learning_rate == auto_rate("lora", weights)
    smaller = fit_settings(make_job("vector.lora.alpha=16"), "forget")
    assert smaller.learning_rate == auto_rate("lora", weights, 16)
    assert fit_settings(make_job("vector.mode=full"), "forget").learning_rate == auto_rate("full", weights)
    rules = [fit_until(make_job(*overrides), "forget") for overrides in ((), ("vector.learning_rate=1e-3",))]
    assert [rule and rule.tries for rule in rules] == [3, 1]  # a rate that was given is not tried again


def test_numbers_are_taken_as_they_are(make_job: Callable[..., Any]) -> None:
    job = make_job("vector={epochs: 3, learning_rate: 0.01, batch_size: 6, warmup_epochs: 0.5}", "seed=7")
    found = fit_settings(job, "forget")
    assert (found.epochs, found.learning_rate, found.batch_size, found.warmup_epochs) == (3, 0.01, 6, 0.5)
    assert (found.schedule, found.warmup_steps, found.seed) == ("linear", None, 7)
    assert fit_until(job, "forget") is None
    assert fit_settings(make_job("vector.epochs=3"), "forget").warmup_epochs == 1.0
    assert fit_settings(make_job("vector.warmup_epochs=2"), "forget").describe()["warmup_epochs"] == 2.0


def test_the_retain_vector_takes_its_own_settings_and_the_rest_from_the_forget_vector(
    make_job: Callable[..., Any],
) -> None:
    vector = "vector={epochs: 5, learning_rate: 0.01, batch_size: 6, micro_batch_size: 6, weight_decay: 0.5}"
    plain = make_job(vector)
    own = "{epochs: 3, learning_rate: 0.02, batch_size: 4, warmup_epochs: 0.5, weight_decay: 0.1}"
    job = make_job(vector, "retain={data: {path: r.jsonl}}", f"retain.vector={own}")
    assert fit_settings(job, "forget") == fit_settings(plain, "forget") == fit_settings(plain, "retain")
    assert fit_settings(job, "retain") == replace(
        fit_settings(plain, "retain"),
        epochs=3,
        learning_rate=0.02,
        batch_size=4,
        micro_batch_size=4,  # of 6, the largest that divides the batch
        warmup_epochs=0.5,
        weight_decay=0.1,
    )
    alone = make_job(vector, "retain={data: {path: r.jsonl}, vector: {epochs: 3}}")
    assert fit_settings(alone, "retain") == replace(fit_settings(plain, "retain"), epochs=3)


@pytest.mark.parametrize(("forget", "retain", "open_ended"), [(5, "auto", "retain"), ("auto", 3, "forget")])
def test_one_vector_may_have_fixed_epochs_and_the_other_none(
    forget: Any, retain: Any, open_ended: str, make_job: Callable[..., Any]
) -> None:
    overrides = (f"vector.epochs={forget}", f"retain={{data: {{path: r.jsonl}}, vector: {{epochs: {retain}}}}}")
    job, tuned = make_job(*overrides), make_job(*overrides, method="task_vector", start="target")
    for name, epochs in (("forget", forget), ("retain", retain)):
        settings, is_open = fit_settings(job, name), name == open_ended
        assert (fit_until(job, name) is not None) == is_open
        assert settings.schedule == ("constant" if is_open else "linear")
        assert is_open or settings.epochs == epochs
        assert fit_until(tuned, name) is None
        assert fit_settings(tuned, name).epochs == (5 if is_open else epochs)


@pytest.mark.parametrize(("method", "start"), [("task_vector", "target"), ("npo", "target"), ("npo", "prior")])
def test_baselines_have_five_epochs(method: str, start: str, make_job: Callable[..., Any]) -> None:
    job = make_job(method=method, start=start)
    assert fit_until(job, "forget") is None
    found = fit_settings(job, "forget")
    assert (found.epochs, found.schedule, found.warmup_epochs, found.warmup_steps) == (5, "linear", 1.0, None)
    assert fit_settings(job, "forget", epochs=2).epochs == 2


def test_a_micro_batch_is_a_bound_where_the_batch_is_left_to_us(make_job: Callable[..., Any]) -> None:
    for micro, wanted in ((1, 1), (3, 2), (4, 4), (16, 4)):
        assert fit_settings(make_job(f"vector.micro_batch_size={micro}"), "forget").micro_batch_size == wanted


@pytest.mark.parametrize(("rows", "first"), [(1, 2), (7, 2), (8, 2), (9, 1), (100, 1)])
def test_an_epoch_of_one_step_learns_nothing_while_the_rate_is_0(rows: int, first: int) -> None:
    settings = FitSettings(batch_size=8, epochs=1)
    assert first_epoch(settings, rows) == first
    for warmup, earliest in ((0.0, 1), (0.5, 1), (1.0, first), (2.0, first)):
        assert first_epoch(replace(settings, warmup_epochs=warmup), rows) == earliest
    check_learns("forget", replace(settings, epochs=first), rows)
    if first == 2:
        with pytest.raises(UsageError, match=f"forget: its {rows} rows are one step of batch_size 8"):
            check_learns("forget", settings, rows)


@pytest.mark.parametrize("epochs", [0.0, 0.3, 0.5, 0.9, 1.0, 1.25, 1.5, 2.0])
def test_a_warm_up_in_epochs_has_whole_steps_rounded_down(epochs: float) -> None:
    for steps in range(1, 9):
        assert FitSettings(warmup_epochs=epochs).count_warmup(steps) == int(epochs * steps)
        assert FitSettings(warmup_epochs=epochs, warmup_steps=3).count_warmup(steps) == 3
