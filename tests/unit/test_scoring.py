"""The metrics against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from msa_lite.evals import scoring


def test_probability_is_the_geometric_mean_over_all_answer_tokens() -> None:
    # Uniform logits over V give 1/V for any length; (0.5 · 0.125)^(1/2) = 0.25.
    assert scoring.probability(np.full(7, -math.log(50))) == pytest.approx(1 / 50)
    assert scoring.probability(np.log([0.5, 0.125])) == pytest.approx(0.25)
    assert scoring.probability(np.array([])) is None


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


def test_exact_memorization_is_the_share_of_right_tokens() -> None:
    assert scoring.exact_memorization(np.array([True, True, False, True])) == 0.75
    assert scoring.exact_memorization(np.array([], bool)) is None


def test_rouge_l_recall_stems_and_counts_the_reference() -> None:
    # LCS of (the, cat, sit, down) and (the, cat, sit) after stemming is 3 of the reference's 4 words.
    assert scoring.rouge_l_recall("The cats sitting down", "the cat sits") == pytest.approx(3 / 4)
    assert scoring.rouge_l_recall("red", "a long answer with red in it") == 1.0
    assert scoring.rouge_l_recall("", "anything") == 0.0
    assert scoring.rouge_l_recall("words", "") == 0.0


@pytest.mark.parametrize(
    ("reference", "generated", "value"),
    [
        ("Yarheath.", "She was born in Yarheath, they say.", 1.0),
        ("Yar", "Yarheath", 0.0),  # whole words only
        ("1975", "In 1975.", 1.0),
        ("Łódź", "w łódź", 1.0),  # any script
        ("...", "...", 0.0),
    ],
)
def test_accuracy_wants_the_whole_reference_in_whole_words(reference: str, generated: str, value: float) -> None:
    assert scoring.accuracy(reference, generated) == value


def test_mean_leaves_out_undefined_items_and_gives_the_standard_error() -> None:
    # mean 2, deviations ±1: s = √2, s/√2 = 1
    assert scoring.mean_and_error([1.0, None, 3.0]) == (2.0, 2, pytest.approx(1.0))
    assert scoring.mean_and_error([5.0]) == (5.0, 1, None)
    assert scoring.mean_and_error([None]) == (None, 0, None)
