"""The rule of the ratios: worked out by hand for each of its branches, and held against those that the paper prints."""

from __future__ import annotations

import pytest

from msa_lite.comparison.published import Ratio, best_values, load_published, published_tables, ratios
from msa_lite.report.tables.metrics import metric_kind

REACHED = Ratio(1.0, reached=True)
LAST_DIGIT = 0.005 + 1e-9  # by which a figure with two decimals may be off
# The one column of the paper that does not follow its own rule: its best method is marked +100% below the ideal.
MISPRINT = ("tofu-c4-forget10-llama-3.2-1b", "acc_recover")


@pytest.mark.parametrize(
    ("values", "ideal", "higher", "wanted"),
    [
        # Some reach the ideal of 0.5, exactly or by more: the others are divided by it, 0.375 / 0.5.
        ([0.5, 0.9, 0.375], 0.5, True, [REACHED, REACHED, Ratio(0.75)]),
        # None reaches 0.9: to the best, 0.8, which is 100.0% without a plus; 0.2 / 0.8.
        ([0.8, 0.2], 0.9, True, [Ratio(1.0), Ratio(0.25)]),
        # The same where lower is better: 0.1 / 0.4, the ideal over the value.
        ([0.1, 0.05, 0.4], 0.1, False, [REACHED, REACHED, Ratio(0.25)]),
        # None is as low as 0.1: the best, 0.2, over the value.
        ([0.2, 0.8], 0.1, False, [Ratio(1.0), Ratio(0.25)]),
        # No ideal: to the best.
        ([0.5, 0.25], None, True, [Ratio(1.0), Ratio(0.5)]),
        # Missing values are passed over; they are not the lowest.
        ([None, 0.2, 0.4], 0.1, False, [None, Ratio(1.0), Ratio(0.5)]),
        ([None, None], 0.1, True, [None, None]),
        ([], 0.1, True, []),
        # No direction: no ratio.
        ([0.5, 0.25], 0.5, None, [None, None]),
        # Zeros: 0 of the ideal's 0.5 is nothing; an ideal of 0 is reached by 0, and nothing of it is left for 0.2.
        ([0.5, 0.0], 0.5, True, [REACHED, Ratio(0.0)]),
        ([0.0, 0.2], 0.0, False, [REACHED, Ratio(0.0)]),
        # All methods at 0, below the ideal: 0 / 0 says nothing.
        ([0.0, 0.0], 0.5, True, [None, None]),
        ([0.0, 0.2], None, False, [None, Ratio(0.0)]),
        # Negative: −1 of 2 is no share, though it may be beyond the ideal.
        ([-1.0, 2.0], 3.0, True, [None, Ratio(1.0)]),
        ([-1.0, 2.0], -1.0, False, [REACHED, None]),
    ],
)
def test_each_branch_of_the_rule(
    values: list[float | None], ideal: float | None, higher: bool | None, wanted: list[Ratio | None]
) -> None:
    assert ratios(values, ideal, higher) == wanted


def test_the_best_are_marked_with_all_ties() -> None:
    assert best_values([0.5, None, 0.5, 0.4], True) == [True, False, True, False]
    assert best_values([0.5, 0.4], False) == [False, True]
    assert best_values([-3.0, 3.0, 40.0], None, at_zero=True) == [True, True, False]
    assert best_values([0.5, 0.4], None) == [False, False]
    assert best_values([None], True) == [False]


@pytest.mark.parametrize("name", published_tables())
def test_the_ratios_that_the_paper_prints_follow_the_rule(name: str) -> None:
    """Values are printed with two decimals, so a ratio may lie between those of the outermost values they stand for."""
    rows = load_published(name).rows
    for metric in next(iter(rows.values())):
        column = {model: row[metric] for model, row in rows.items()}
        printed = {model: figure for model, figure in column.items() if figure.ratio}
        direction = column["Ideal"].metric.higher_is_better
        if direction is None or not metric_kind(metric).has_ratio or not printed:
            assert not printed
            continue
        assert set(printed) == set(column) - {"Target", "Ideal"}
        sign = 1 if direction else -1
        ideal, values = column["Ideal"].metric.value, [figure.metric.value for figure in printed.values()]
        some = any(figure.ratio and figure.ratio.reached for figure in printed.values())
        reference = ideal if some else max(values) if direction else min(values)  # type: ignore[type-var]
        wrong = []
        for model, figure in printed.items():
            value, ratio = figure.metric.value, figure.ratio
            assert value is not None and ideal is not None and reference is not None and ratio is not None  # noqa: PT018
            beyond = sign * (value - ideal)
            part, whole = (value, reference) if direction else (reference, value)
            low, high = (part - LAST_DIGIT) / (whole + LAST_DIGIT), (part + LAST_DIGIT) / (whole - LAST_DIGIT)
            fits = beyond > -2 * LAST_DIGIT if ratio.reached else low - 6e-4 < ratio.value < high + 6e-4
            if not fits or (not ratio.reached and beyond > 2 * LAST_DIGIT):
                wrong.append(model)
        assert bool(wrong) == ((name, metric) == MISPRINT), (metric, wrong)
