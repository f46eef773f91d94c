"""The metrics against values worked out by hand: scores of items, and aggregates with n, error and direction."""

from __future__ import annotations

import math

import numpy as np
import pytest

from msa_lite.evals.benchmarks.aggregates import (
    harmonic_metric,
    mean_metric,
    missing_metric,
)
from msa_lite.evals.engine import answers, scoring
from msa_lite.report import Metric


def test_probability_is_the_geometric_mean_over_all_answer_tokens() -> None:
    # Uniform logits over V give 1/V for any length; (0.5 · 0.125)^(1/2) = 0.25.
    assert scoring.probability(np.full(7, -math.log(50))) == pytest.approx(1 / 50)
    assert scoring.probability(np.log([0.5, 0.125])) == pytest.approx(0.25)
    assert scoring.mean_loss(np.log([0.5, 0.125])) == pytest.approx(2 * math.log(2))  # (1 + 3)/2 · ln 2
    assert scoring.probability(np.array([])) is None
    assert scoring.mean_loss(np.array([])) is None


def test_choice_probability_is_the_correct_answers_share() -> None:
    # 0.3 / (0.3 + 0.2 + 0.1)
    assert scoring.choice_probability(0.3, [0.2, 0.1]) == pytest.approx(0.5)
    assert scoring.choice_probability(0.3, [0.2, None]) == pytest.approx(0.6)
    assert scoring.choice_probability(0.0, [0.0]) == 0.0  # underflow is not a division by zero
    assert scoring.choice_probability(None, [0.2]) is None
    assert scoring.choice_probability(0.3, [None]) is None


def test_truth_ratio_is_wrong_over_correct_probability() -> None:
    # Wrong ½ and ⅛, correct ½: geometric √(1/16) / ½ = ½; arithmetic (5/16) / ½ = 5/8.
    correct, wrong = math.log(2), [math.log(2), math.log(8)]
    assert scoring.truth_ratio(correct, wrong) == pytest.approx(1 / 2)
    assert scoring.truth_ratio(correct, wrong, arithmetic=True) == pytest.approx(5 / 8)
    assert scoring.truth_ratio(correct, [math.log(2), None]) == pytest.approx(1.0)
    assert scoring.truth_ratio(None, wrong) is None
    assert scoring.truth_ratio(correct, [None, None]) is None


@pytest.mark.parametrize(
    ("wrong_loss", "ratio", "forget", "utility"),
    [
        (2.0, 1.0, 1.0, 0.0),  # as likely as the truth
        (2.0 + math.log(4), 0.25, 0.25, 0.75),
        (2.0 - math.log(4), 4.0, 0.25, 0.0),  # likelier than the truth
        (60.0, 0.0, 0.0, 1.0),
    ],
)
def test_truth_ratio_becomes_a_score_of_forgetting_and_one_of_utility(
    wrong_loss: float, ratio: float, forget: float, utility: float
) -> None:
    found = scoring.truth_ratio(2.0, [wrong_loss] * 5)
    assert found == pytest.approx(ratio, abs=1e-8, rel=1e-8)
    assert scoring.truth_ratio_forget(found) == pytest.approx(forget, abs=1e-8, rel=1e-8)
    assert scoring.truth_ratio_utility(found) == pytest.approx(utility, abs=1e-8, rel=1e-8)


@pytest.mark.parametrize(
    ("matches", "value"),
    [
        ([True] * 10, 1.0),  # everything follows from nothing
        ([False] * 10, 0.0),  # never right; a loop that ends one step early would give 0.1
        ([False] * 4 + [True] * 6, 0.6),  # right from k* = 4 on
        ([True] * 9 + [False], 0.0),  # wrong at the end: no suffix is right
        ([True, False, True, True], 0.5),
        ([False], 0.0),
        ([], 0.0),
    ],
)
def test_extraction_strength_is_the_share_of_the_right_suffix(matches: list[bool], value: float) -> None:
    assert scoring.extraction_strength(np.array(matches, bool)) == pytest.approx(value)


def test_rouge_l_recall_stems_and_counts_the_reference() -> None:
    # LCS of (the, cat, sit, down) and (the, cat, sit) after stemming is 3 of the reference's 4 words.
    assert answers.rouge_l_recall("The cats sitting down", "the cat sits") == pytest.approx(3 / 4)
    assert answers.rouge_l_recall("red", "a long answer with red in it") == 1.0
    assert answers.rouge_l_recall("", "anything") == 0.0
    assert answers.rouge_l_recall("words", "") == 0.0


def test_a_text_without_a_word_is_told() -> None:
    assert [answers.has_word(text) for text in ("_", "5", "ก", "", "…")] == [True] * 3 + [False] * 2


def test_min_k_is_the_mean_surprise_of_the_least_likely_tokens() -> None:
    # N = 5, share 0.4: the two least likely, ⅛ and ¼, so (3 + 2)/2 · ln 2
    assert scoring.min_k(np.log([0.5, 0.125, 1.0, 0.25, 0.5])) == pytest.approx(2.5 * math.log(2))
    assert scoring.min_k(np.array([-1.0, -3.0, -2.0])) == 3.0  # ⌊0.4 · 3⌋ = 1
    assert scoring.min_k(np.array([-1.0, -3.0, -2.0]), share=1.0) == 2.0
    assert scoring.min_k(np.array([-1.0, -3.0]), share=0.4) == 3.0  # ⌊0.4 · 2⌋ = 0, but one token it is
    assert scoring.min_k(np.array([])) is None


def test_min_k_pp_is_the_same_over_standard_scores() -> None:
    # N = 5: the two least are −1.5 and −0.5
    assert scoring.min_k_pp(np.array([0.5, -1.5, 2.0, -0.5, 1.0])) == 1.0
    assert scoring.min_k_pp(np.zeros(7)) == 0.0  # a uniform distribution
    assert scoring.min_k_pp(np.array([])) is None


def shifted(count: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Two samples whose empirical distributions are steps/count apart at most."""
    first = 2.0 * np.arange(count)
    return first, first + 2 * steps - 1 if steps else first


@pytest.mark.parametrize(
    ("count", "steps", "value"),
    [
        (40, 0, 1.0),
        (40, 4, 0.9900),
        (40, 13, 0.0286),
        (40, 40, 1.86e-23),  # samples that lie apart give the least value there is, as in open-unlearning's tables
        (400, 92, 1.10e-09),  # of the MSA paper's tables for forget10, of 400 questions
        (400, 106, 9.34e-13),
        (400, 400, 1.06e-239),
    ],
)
def test_forget_quality_is_the_p_value_of_the_greatest_distance(count: int, steps: int, value: float) -> None:
    assert scoring.forget_quality(*shifted(count, steps)) == pytest.approx(value, rel=5e-3)


def test_forget_quality_by_counting() -> None:
    # 2 against 2 that lie apart: D = 1 in 2 of the (4 choose 2) = 6 orders
    assert scoring.forget_quality([1.0, None, 2.0], [3.0, 4.0]) == pytest.approx(1 / 3)
    assert scoring.forget_quality([None], [1.0]) is None
    assert scoring.forget_quality([1.0], []) is None


def test_membership_auc_counts_pairs() -> None:
    # holdout 2 beats 1, ties 2; holdout 3 beats both: (1 + ½ + 1 + 1) / 4
    assert scoring.membership_auc([1.0, 2.0], [2.0, 3.0]) == pytest.approx(3.5 / 4)
    assert scoring.membership_auc([1.0, None], [2.0, None, 3.0]) == 1.0
    assert scoring.membership_auc([5.0] * 3, [5.0] * 4) == 0.5
    assert scoring.membership_auc([], [1.0]) is None
    assert scoring.membership_auc([1.0], [None]) is None


@pytest.mark.parametrize(
    ("auc", "ideal", "published"),
    [
        # OLMo-2-7B: priors at 500B and 3691B tokens, then NPO and GradDiff. Llama-3.1-8B: RMU and GradDiff.
        (0.14, 0.45, 56.38),
        (0.37, 0.45, 14.67),
        (1.00, 0.45, -99.93),
        (0.50, 0.45, -9.47),
        (0.74, 0.51, -46.44),
        (0.32, 0.51, 38.06),
    ],
)
def test_priv_leak_agrees_with_the_published_tables(auc: float, ideal: float, published: float) -> None:
    # The MSA paper prints both AUCs with two digits, so each is known to ±0.005. Two of its rows do not fit within
    # that: OLMo-2's prior at 3859B tokens (0.23 gives 40, printed 23.45) and, by 0.1, its task vector.
    least = scoring.priv_leak(auc + 0.005, ideal - 0.005)
    most = scoring.priv_leak(auc - 0.005, ideal + 0.005)
    assert least <= published <= most


def auc(*samples: np.ndarray) -> float | None:
    return scoring.membership_auc(*samples)


def test_bootstrap_error_is_the_same_for_the_same_seed_and_needs_two_items() -> None:
    sample = np.random.default_rng(0).random(20)
    first = scoring.spread(scoring.bootstrap(np.mean, [sample], seed=3))
    assert first == scoring.spread(scoring.bootstrap(np.mean, [sample], seed=3))
    assert first != scoring.spread(scoring.bootstrap(np.mean, [sample], seed=4))
    assert scoring.spread(scoring.bootstrap(auc, [sample, sample[:1]])) is None
    assert scoring.spread(scoring.bootstrap(np.mean, [np.ones(5)])) == 0.0


def test_bootstrap_error_leaves_out_redraws_in_which_nothing_is_defined() -> None:
    def first(items: np.ndarray) -> float | None:
        count = int((items == 0).sum())
        return None if count == 0 else float(count - 1)

    # Of four equally likely redraws one has it twice, two once, one not at all: 1, 0, 0 and nothing. The variance of
    # 1, 0, 0 is 2/9.
    assert scoring.spread(scoring.bootstrap(first, [np.arange(2)])) == pytest.approx(math.sqrt(2) / 3, rel=0.05)


def test_no_right_answer_of_29_is_no_certainty() -> None:
    from scipy.stats import binomtest

    for value in (0.0, 1.0):
        interval = binomtest(int(29 * value), 29).proportion_ci(0.95, "wilson")
        mean, count, error = scoring.mean_and_error([value] * 29)
        assert (mean, count) == (value, 29)
        assert error == pytest.approx((interval.high - interval.low) / 2 / 1.96, rel=1e-4)
    assert scoring.mean_and_error([0.0]) == (0.0, 1, None)
    assert scoring.mean_and_error([0.5, 0.5])[2] == 0.0


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
    assert scoring.harmonic_mean([0.5, None]) is scoring.harmonic_mean([]) is None
