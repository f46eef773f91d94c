"""Aggregates with n, standard error and direction, or None with the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from msa_lite.evals.benchmarks.aggregates import (
    NO_IDEAL,
    NOT_JUDGED,
    harmonic_metric,
    judged_metric,
    mean_metric,
    membership_metrics,
    missing_metric,
    privleak_metric,
)
from msa_lite.evals.benchmarks.benchmark import Record
from msa_lite.report import Metric


def test_a_mean_counts_what_it_leaves_out() -> None:
    found = mean_metric("rouge_l_f", [1, 0, None, 1])  # mean 2/3, sd √(1/3), through √3
    assert (found.value, found.stderr) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (found.n, found.skipped, found.higher_is_better) == (3, 1, False)
    assert mean_metric("rouge_l_r", [0.25], "as said") == Metric(0.25, 1, None, True, 0, "as said")
    assert mean_metric("rouge_l_r", [None, None]) == Metric(None, 0, None, True, 2, "no item has this score")
    assert mean_metric("rouge_l_h", []) == Metric(None, 0, None, None, 0, "the set has no items")
    assert missing_metric("privleak", "why") == Metric(None, 0, None, None, 0, "why")


def test_the_error_of_a_harmonic_mean_is_that_of_redrawn_items() -> None:
    draw = np.random.default_rng(1)
    sets = {name: draw.uniform(0.2, 0.8, 200) for name in "abc"}
    found = harmonic_metric("model_utility", {name: {"score": values.tolist()} for name, values in sets.items()})
    means = np.array([values.mean() for values in sets.values()])
    assert found.value == pytest.approx(3 / (1 / means).sum())
    # To first order: ∂h/∂m = h²/(3 m²), and the sets are independent.
    errors = np.array([values.std(ddof=1) / math.sqrt(200) for values in sets.values()])
    wanted = math.sqrt((((3 / (1 / means).sum()) ** 2 / 3 / means**2 * errors) ** 2).sum())
    assert found.stderr == pytest.approx(wanted, rel=0.1)
    assert (found.n, found.skipped, found.higher_is_better) == (600, 0, True)


def test_scores_of_one_item_are_redrawn_together() -> None:
    rising = np.linspace(0.1, 0.9, 50)
    together = harmonic_metric("model_utility", {"a": {"x": rising.tolist(), "y": rising.tolist()}})
    against = harmonic_metric("model_utility", {"a": {"x": rising.tolist(), "y": rising[::-1].tolist()}})
    assert (together.value, against.value) == (pytest.approx(0.5), pytest.approx(0.5))
    assert together.stderr is not None
    assert against.stderr is not None
    assert against.stderr < 0.2 * together.stderr  # what one gains the other loses


def test_a_harmonic_mean_takes_what_is_defined_of_an_item() -> None:
    found = harmonic_metric(
        "model_utility", {"a": {"x": [0.5, None, 0.5], "y": [0.25, 0.25, 0.25]}, "b": {"x": [1.0, 1.0]}}
    )
    assert found.value == pytest.approx(3 / (2 + 4 + 1))
    assert (found.n, found.skipped) == (4, 1)
    assert found.stderr == pytest.approx(0, abs=1e-12)  # redraws in which nothing is defined do not count
    single = harmonic_metric("model_utility", {"a": {"x": [0.5, 0.5]}, "b": {"x": [1.0]}})
    assert (single.value, single.stderr) == (pytest.approx(2 / 3), None)
    lacking = harmonic_metric("model_utility", {"a": {"x": [None, None]}, "b": {"x": [1.0, 1.0]}})
    assert (lacking.value, lacking.n, lacking.note) == (None, 0, "one of its parts has no items")
    assert harmonic_metric("model_utility", {"a": {"x": []}, "b": {"x": [1.0]}}).value is None


def sides(forget: Sequence[float | None], holdout: Sequence[float | None]) -> tuple[list[Record], list[Record]]:
    """Records whose Min-K is given; Min-K++ is the same."""
    one, other = ([{"min_k": value, "min_k_pp": value} for value in values] for values in (forget, holdout))
    return one, other


def test_membership_is_a_matter_of_two_sides() -> None:
    found = membership_metrics(sides([1, 2, None], [3, 4]), sides([1, 3], [2, 3]))
    # All of the forget side lie below the holdout: 1. The ideal: 1 < 2, 1 < 3, 3 > 2, 3 = 3: 2½ of 4.
    assert (found["min_k"].value, found["min_k"].n, found["min_k"].skipped) == (1, 4, 1)
    assert found["min_k"].stderr == 0
    assert found["min_k_gap"].value == pytest.approx(1 - 5 / 8)
    assert {name: metric.higher_is_better for name, metric in found.items()} == dict.fromkeys(found, False)
    empty = membership_metrics(sides([None], [1.0]), sides([], [1.0]))
    assert (empty["min_k"].value, empty["min_k"].note) == (None, "one of the two sides has no items")
    assert empty["min_k_gap"].note == "one of the ideal's two sides has no items"


def test_privleak_is_the_aucs_beside_each_other() -> None:
    # (1 − 1/2) beside (1 − 3/4): twice as much, 100 % more.
    found = privleak_metric(sides([1, 3], [1, 3]), sides([1, 3], [2, 4]))
    assert (found.value, found.note, found.higher_is_better) == (pytest.approx(100), "best at 0", None)
    assert found.stderr is not None
    assert privleak_metric(sides([1], [2]), None) == missing_metric("privleak", NO_IDEAL)
    assert privleak_metric(sides([1, 2], [3, 4]), sides([1, 3], [2, 4])).value == pytest.approx(-100)


def test_judged_scores_are_counted_with_what_went_wrong() -> None:
    def judged(value: float, valid: bool = True, merged: bool = False) -> Record:
        return {"judge": {"acc_retain": value, "valid": valid, "merged": merged}}

    found = judged_metric("acc_retain", [judged(1), judged(0), {}])
    assert (found.value, found.n, found.skipped, found.note) == (0.5, 2, 1, None)
    notes = judged_metric("acc_retain", [judged(1, valid=False), judged(0, merged=True)])
    assert "1 replies of the judge were invalid" in str(notes.note)
    assert "for 1 items the right answer and the ideal's were one candidate" in str(notes.note)
    assert notes.higher_is_better is True
    assert judged_metric("acc_retain", [{}, {}]) == missing_metric("acc_retain", NOT_JUDGED)
    assert judged_metric("acc_retain", []) == missing_metric("acc_retain", NOT_JUDGED)
