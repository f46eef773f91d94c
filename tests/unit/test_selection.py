"""The scores that choose a point (α, β), against values worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from msa_lite.errors import DataError
from msa_lite.evals import selection

TARGET = {
    "rouge_l_f": 1.0, "accuracy_f": 0.9, "extraction_strength": 1.0,
    "rouge_l_r": 1.0, "accuracy_r": 0.8, "extraction_strength_r": 1.0,
    "rouge_l_h": 0.6, "accuracy_h": 0.1, "extraction_strength_h": 0.2,
}  # fmt: skip


def test_exposure_is_what_is_left_above_unseen_rows() -> None:
    # (0.8 − 0.6)/0.4 = 0.5, (0.3 − 0.1)/0.8 = 0.25, and 0.1 is below the 0.2 of unseen rows: 0. Mean 0.25.
    point = {"rouge_l_f": 0.8, "accuracy_f": 0.3, "extraction_strength": 0.1}
    assert selection.exposure(point, TARGET) == pytest.approx(0.25)
    assert selection.exposure(TARGET, TARGET) == 1.0
    # Without a holdout set the level is 0: (0.8/1 + 0.3/0.9 + 0.1/1) / 3
    alone = {name: value for name, value in TARGET.items() if not name.endswith("_h")}
    assert selection.exposure(point, alone) == pytest.approx((0.8 + 1 / 3 + 0.1) / 3)


def test_selection_forgets_most_among_points_that_keep_enough() -> None:
    forgotten = {"rouge_l_f": 0.6, "accuracy_f": 0.1, "extraction_strength": 0.2}
    keeps = TARGET | forgotten | {"extraction_strength_r": 0.96}
    assert selection.kept_share(keeps, TARGET) == pytest.approx(0.96)
    assert selection.selection_score(keeps, TARGET, keep=0.95) == 1.0
    # accuracy falls from 0.8 to 0.6, so 0.75 is kept: below 0.95, the score is the loss
    assert selection.selection_score(keeps | {"accuracy_r": 0.6}, TARGET, keep=0.95) == pytest.approx(-0.25)
    # without retain rows there is nothing to keep
    assert selection.selection_score(forgotten, {"rouge_l_f": 1.2}, keep=0.95) == pytest.approx(0.5)


def test_tofu_score_is_the_weighted_geometric_mean() -> None:
    # 0.5² · 0.8 · 0.4² · 0.7 · (1 − 0.1)² = 0.25 · 0.8 · 0.16 · 0.7 · 0.81 = 0.018144, to the power of 1/8
    point = {"model_utility": 0.5, "acc_forget": 0.8, "acc_recover": 0.4, "acc_retain": 0.7, "extraction_strength": 0.1}
    assert selection.tofu_score(point) == pytest.approx(0.018144 ** (1 / 8))
    assert selection.tofu_score(dict.fromkeys(point, 1.0) | {"extraction_strength": 0.0}) == 1.0


def test_tofu_score_without_a_judge_is_the_mean_of_what_is_left() -> None:
    # (0.5² · 0.9²)^(1/4) = √0.45
    point = {"model_utility": 0.5, "extraction_strength": 0.1}
    assert selection.tofu_score(point) == pytest.approx(0.45**0.5)
    assert selection.tofu_score(point | {"acc_forget": None, "acc_recover": None}) == selection.tofu_score(point)
    assert selection.tofu_score(point | {"rouge_l_f": 0.1}) == selection.tofu_score(point)


def test_muse_score_rewards_what_is_known_of_the_retain_set() -> None:
    # (1 − 0.5)(1 − 0.6)(1 − 0.2)(1 − 0.1)²(1 − 0.5) · 0.6² = 0.5 · 0.4 · 0.8 · 0.81 · 0.5 · 0.36 = 0.023328
    point = {"min_k": 0.5, "min_k_pp": 0.6, "verbmem_f": 0.2, "extraction_strength": 0.1, "exact_memorization": 0.5}
    score = selection.muse_score(point | {"knowmem_r": 0.6})
    assert score == pytest.approx(0.023328 ** (1 / 8))
    assert selection.muse_score(point | {"knowmem_r": 0.7}) > score


def test_a_factor_of_zero_counts_as_a_millionth() -> None:
    # (1e-6² · 1²)^(1/4) = 1e-3: the other terms still order points that share a zero
    assert selection.tofu_score({"model_utility": 0.0, "extraction_strength": 0.0}) == pytest.approx(1e-3)
    assert selection.tofu_score({"model_utility": 0.0, "extraction_strength": 0.5}) < 1e-3


@pytest.mark.parametrize("score", [selection.tofu_score, selection.muse_score])
def test_a_score_of_nothing_is_an_error(score: Callable[[dict[str, float | None]], float]) -> None:
    with pytest.raises(DataError, match="extraction_strength"):
        score({"extraction_strength": None, "rouge_l_f": 0.5})
