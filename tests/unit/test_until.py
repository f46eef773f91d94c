"""The rules of open-ended fits: batch, epochs and rate by default; when a fit ends, and at which rate the next is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msa_lite.io.files.writing import json_form
from msa_lite.io.weights.hub import Source
from msa_lite.train.fit.until import SAMPLE, Attempt, Course, Until, next_rate, sample_examples, why_stop
from msa_lite.train.settings import auto_batch, auto_rate, most_epochs
from tests.support.fits import ragged_rows

TARGET = Source("target", Path("target"), "sha256:1")


def until(**changes: Any) -> Until:
    return Until(TARGET, load=lambda: None, **changes)


def course(*attempts: Attempt, goal: float = 1.0, start: float = 3.0) -> Course:
    return Course(goal, start, list(attempts))


# Defaults


@pytest.mark.parametrize(
    ("rows", "batch"),
    [(1, 4), (8, 4), (24, 4), (32, 4), (33, 8), (40, 8), (64, 8), (65, 16), (128, 16), (129, 32), (4000, 32)],
)
def test_a_batch_leaves_five_steps_an_epoch_where_it_can(rows: int, batch: int) -> None:
    assert auto_batch(rows) == batch


@pytest.mark.parametrize(
    ("rows", "batch", "forget", "retain"), [(1, 4, 60, 60), (24, 4, 60, 33), (400, 32, 46, 15), (40000, 32, 5, 1)]
)
def test_there_are_at_most_so_many_epochs(rows: int, batch: int, forget: int, retain: int) -> None:
    assert most_epochs(rows, batch) == forget
    assert most_epochs(rows, batch, retain=True) == retain


def test_rates_fall_with_size_and_are_higher_for_adapters() -> None:
    sizes = [1_600_000, 30_000_000, 135_000_000, 1_200_000_000, 8_000_000_000]
    full, lora = ([auto_rate(mode, size) for size in sizes] for mode in ("full", "lora"))
    assert full == sorted(full, reverse=True)
    assert lora == sorted(lora, reverse=True)
    assert all(one < two for one, two in zip(full, lora, strict=True))
    assert auto_rate("qlora", sizes[0]) == lora[0]
    assert auto_rate("lora", sizes[2], lora_alpha=16) == pytest.approx(4 * lora[2], rel=0.05)
    assert auto_rate("full", sizes[2], lora_alpha=16) == full[2]
    assert (full[2], lora[3], full[4]) == (3.4e-5, 2.0e-4, 1.2e-5)


def test_a_large_set_is_measured_by_a_seeded_sample() -> None:
    rows = ragged_rows(SAMPLE + 10, seed=0)
    assert sample_examples(rows[:SAMPLE], 0) == rows[:SAMPLE]
    one, again, other = (sample_examples(rows, seed) for seed in (0, 0, 1))
    assert len(one) == SAMPLE
    assert one == again != other


# The end


@pytest.mark.parametrize(
    ("losses", "steps", "wanted"),
    [
        ([2.0], 20, ""),
        ([2.0, 1.11], 20, ""),
        ([2.0, 1.09], 20, "known"),  # 95 % of the way from 3 to 1
        ([0.5], 9, ""),  # too few steps
        ([0.5], 10, "known"),
        ([6.1], 10, "diverged"),
        ([6.1], 9, ""),
        ([2.9] * 3, 30, ""),
        ([2.9] * 4, 40, "slow"),  # a third of the epochs, and less than a sixth of the way
        ([2.5] * 4, 40, ""),
        ([2.5] * 12, 90, "cap"),
        ([1.0] * 12, 90, "known"),
    ],
)
def test_a_fit_ends_when_enough_is_learnt_or_enough_was_tried(losses: list[float], steps: int, wanted: str) -> None:
    assert why_stop(until(tries=3), course(Attempt(1e-3, losses, steps)), most=12) == wanted
    if wanted == "slow":  # without another try, it goes on
        assert why_stop(until(tries=1), course(Attempt(1e-3, losses, steps)), most=12) == ""


def test_a_target_that_knows_no_more_than_the_prior_ends_the_fit_early() -> None:
    assert why_stop(until(), course(Attempt(1e-3, [2.9], 10), goal=3.1), most=12) == "known"


# Another try


def ended(rate: float, loss: float, why: str = "cap") -> Attempt:
    return Attempt(rate, [loss], 100, why)


@pytest.mark.parametrize(
    ("tries", "wanted"),
    [
        ([], 1e-3),
        ([ended(1e-3, 1.9)], None),  # more than half of the way
        ([ended(1e-3, 2.5)], 3e-3),
        ([ended(1e-3, 9.0, "diverged")], 3.3e-4),
        ([ended(1e-3, 2.5), ended(3e-3, 2.2)], 9e-3),
        ([ended(1e-3, 2.5), ended(3e-3, 2.7)], 1.7e-3),  # between the two
        ([ended(1e-3, 2.5), ended(3e-3, 9.0, "diverged")], 1.7e-3),
        ([ended(1e-3, 9.0, "diverged"), ended(3.3e-4, 2.5)], 5.7e-4),
        ([ended(1e-3, 9.0, "diverged"), ended(3.3e-4, 9.0, "diverged")], 1.1e-4),
        ([ended(1e-3, 2.5), ended(3e-3, 2.4), ended(9e-3, 2.3)], None),  # no more than three
    ],
)
def test_the_next_rate_follows_from_those_tried(tries: list[Attempt], wanted: float | None) -> None:
    assert next_rate(until(tries=3), course(*tries), 1e-3) == pytest.approx(wanted)
    assert not tries or next_rate(until(tries=1), course(*tries), 1e-3) is None  # a rate that was given is the only one


def test_the_best_try_is_the_one_nearest_to_the_target() -> None:
    assert course(ended(1e-3, 2.5), ended(3e-3, 1.2), ended(9e-3, 0.1, "diverged")).best.rate == 3e-3
    assert course(ended(1e-3, 0.9), ended(3e-3, 0.1)).best.rate == 1e-3  # both know the rows


def test_a_course_is_read_as_it_was_written() -> None:
    found = course(ended(1e-3, 2.5), Attempt(3e-3, [2.9], 5))
    assert json_form(Course.from_json(json_form(found))) == json_form(found)


def test_the_rule_is_told_by_the_target_and_not_by_its_loss() -> None:
    assert until().describe() == until().describe()
    assert until().describe() != until(tries=3).describe()
    other = Until(Source("target", Path("target"), "sha256:2"), load=lambda: None)
    assert until().describe() != other.describe()
