"""Whether a target knows the forget rows and its prior does not, from handmade records."""

from __future__ import annotations

from typing import Any

import pytest

from msa_lite.evals.verdict.knowledge import find_fault, weak_sets
from tests.support.records import known, text, unknown


@pytest.mark.parametrize(
    ("target", "prior", "kind"),
    [
        (known(24), unknown(24, 0.1), None),
        (known(14) + unknown(10, 0.8, 0.6), unknown(24, 0.4, 0.1), None),  # recites only some of its rows
        (unknown(24, 0.15), unknown(24, 0.1), "unknown"),  # wrong prompt
        (unknown(24), unknown(24), "unknown"),
        (known(1) + unknown(23), unknown(24), "unknown"),  # one row of many is no knowledge
        (known(2) + unknown(22, 0.38, 0.36), unknown(24, 0.28, 0.16), "unknown"),  # a system message too many
        (known(24), known(24), "seen"),
        (known(24), known(13) + unknown(11), "seen"),
        (known(24), known(11) + unknown(13), None),
        (known(1), unknown(1), None),
        ([], [], None),
    ],
)
def test_target_and_prior_are_compared_row_by_row(
    target: list[dict[str, Any]], prior: list[dict[str, Any]], kind: str | None
) -> None:
    fault = find_fault(target, prior)
    assert (fault and fault.kind) == kind
    if fault:
        assert f"of {len(target)} rows the target recites" in fault.figures


@pytest.mark.parametrize(
    ("retain", "holdout", "words"),
    [
        (known(9), unknown(9), []),
        (known(9), known(9), ["no control: the target recites 9 of 9"]),
        (known(9), known(5) + unknown(4), ["no control: the target recites 5 of 9"]),
        (known(9), known(4) + unknown(5), []),
        (unknown(9), unknown(9), ["does not know the retain rows"]),
        (unknown(9), [], ["does not know the retain rows"]),
        (known(9), [], []),
        (unknown(7), known(7), []),  # too few
    ],
)
def test_sets_that_can_show_nothing_are_told(
    retain: list[dict[str, Any]], holdout: list[dict[str, Any]], words: list[str]
) -> None:
    notes = weak_sets(known(12) + unknown(12), unknown(24), retain, holdout)
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_rows_that_score_like_those_that_nobody_learnt_are_other_rows() -> None:
    target, prior = unknown(24, 0.8, 0.1), unknown(24, 0.1)  # it has learnt how such answers begin
    assert find_fault(target, prior) is None
    fault = find_fault(target, prior, retain=known(24))
    assert fault is not None
    assert fault.kind == "other rows"
    assert "retain rows 1.00" in fault.figures
    fault = find_fault(target, prior, holdout=unknown(24, 0.8, 0.1))
    assert fault is not None
    assert fault.kind == "other rows"
    assert "holdout rows 0.30" in fault.figures
    assert find_fault(target, prior, retain=known(7), holdout=unknown(7, 0.6)) is None  # too few to compare with
    assert find_fault(known(24), prior, retain=known(24), holdout=unknown(24, 0.6)) is None


def test_what_can_be_guessed_of_unseen_rows_is_no_sign_that_the_prior_saw_them() -> None:
    prior = known(14) + unknown(10)
    assert find_fault(known(24), prior, holdout=known(10) + unknown(14)) is None
    fault = find_fault(known(24), prior, holdout=unknown(24))
    assert fault is not None
    assert fault.kind == "seen"


@pytest.mark.parametrize(
    ("target", "prior", "kind"), [(0.95, 0.4, None), (0.46, 0.4, None), (0.41, 0.4, "unknown"), (0.95, 0.95, "seen")]
)
def test_texts_are_compared_by_the_tokens_predicted(target: float, prior: float, kind: str | None) -> None:
    fault = find_fault([text(target)] * 3, [text(prior)] * 3)
    assert (fault and fault.kind) == kind


@pytest.mark.parametrize(("spread", "known_apart"), [(0.37, True), (0.43, False)])
def test_a_gain_counts_where_its_interval_of_95_percent_lies_above_zero(spread: float, known_apart: bool) -> None:
    # A gain of 0.2 ± spread by turns, of 16 rows: error spread · √(16/15) / 4, times 1.96. The border is a spread of
    # 0.395; at 90 % it is 0.471.
    target = [text(0.5 + (spread if i % 2 else -spread)) for i in range(16)]
    assert (find_fault(target, [text(0.3)] * 16) is None) == known_apart
