"""What a rule makes of scores row by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from msa_lite.choose.evidence import Evidence, Metrics, read_pairs, surely_misses
from msa_lite.choose.rules import Condition, Constrained
from msa_lite.evals.qa import Qa
from msa_lite.evals.records import write_records

Scores = Sequence[tuple[float, float]]


def means(pairs: dict[str, Scores]) -> tuple[Metrics, Metrics]:
    """(the candidate's metrics, the target's)."""
    own, other = ({n: sum(p[i] for p in s) / len(s) for n, s in pairs.items()} for i in (0, 1))
    return own, other


def answers(rows: int, known: int, lost: int) -> Scores:
    """Right and wrong answers; of those that the target has right, so many are lost."""
    return [(float(i >= lost and i < known), float(i < known)) for i in range(rows)]


def test_an_interval_needs_two_rows_and_knows_its_direction() -> None:
    assert not surely_misses([(0.0, 1.0)], 0.95, at_least=True)
    assert surely_misses([(0.0, 1.0)] * 2, 0.95, at_least=True)
    assert not surely_misses([(0.95, 1.0)] * 9, 0.95, at_least=True)  # the bound itself
    assert surely_misses([(0.5, 1.0)] * 9, 0.4, at_least=False)
    assert not surely_misses([(0.3, 1.0)] * 9, 0.4, at_least=False)
    # −0.45 ± 0.55 · 6.31 / √2 for two rows
    assert not surely_misses([(1.0, 1.0), (0.0, 1.0)], 0.95, at_least=True)


@pytest.mark.parametrize(("miss", "surely"), [(1.30, False), (1.40, True)])
def test_the_interval_is_of_95_percent_on_one_side(miss: float, surely: bool) -> None:
    # −miss ± 1 by turns: deviation √(4/3), error √(4/3)/2 = 0.577. Student's t of three degrees is 2.353 at 95 %, so
    # the border is 1.359; it is 0.946 at 90 % and 1.837 at 97.5 %.
    pairs = [(5 - miss + (1 if i % 2 else -1), 5.0) for i in range(4)]
    assert surely_misses(pairs, 1.0, at_least=True) == surely
    assert surely_misses([(10 - own, 5.0) for own, _ in pairs], 1.0, at_least=False) == surely


@pytest.mark.parametrize("text", [">= 0.3", "<= 0.3", ">= 0.6 * target", "<= 0.6 * ideal", ">= 300", "<= 300"])
@pytest.mark.parametrize(("beyond", "wanted"), [(0.0, 0.0), (1e-12, 0.0), (1e-10, 0.0), (1e-7, 1e-7), (0.5, 0.5)])
def test_a_billionth_of_a_bound_is_forgiven_and_no_more(text: str, beyond: float, wanted: float) -> None:
    condition, bound = Condition.parse("accuracy_r", text), 300.0 if "300" in text else 0.3
    beside = Evidence(ideal={"accuracy_r": 0.5})
    value = bound * (1 - beyond if condition.at_least else 1 + beyond)
    found = condition.shortfall({"accuracy_r": value}, {"accuracy_r": 0.5}, beside)
    assert found == pytest.approx(wanted, rel=1e-4)
    better = bound * (1 + beyond if condition.at_least else 1 - beyond)
    assert condition.shortfall({"accuracy_r": better}, {"accuracy_r": 0.5}, beside) == 0


def test_conditions_beside_the_target_know_the_noise_too() -> None:
    rule = Constrained("extraction_strength", False, (Condition.parse("accuracy_r", ">= 0.95 * target"),))
    for rows, lost, met in ((16, 1, True), (400, 38, False)):
        pairs = {"accuracy_r": answers(rows, rows, lost)}
        metrics, target = means(pairs)
        metrics = {**metrics, "extraction_strength": 0.1}
        assert not rule.rank(metrics, target).met
        rank = rule.rank(metrics, target, evidence=Evidence(pairs=pairs))
        assert rank.met == met
    assert rank.note == "accuracy_r is 0.905, at least 0.950 wanted"
    number = Constrained("extraction_strength", False, (Condition.parse("accuracy_r", ">= 0.95"),))
    assert not number.rank(metrics, target, evidence=Evidence(pairs=pairs)).met  # a number is a number


def test_rows_are_paired_by_their_index_and_speak_for_metrics_that_are_their_means(tmp_path: Path) -> None:
    target, own = tmp_path / "target", tmp_path / "own"
    for folder, shift in ((target, 0.0), (own, -0.1)):
        folder.mkdir()
        rows = [{"index": i, "rouge_l": 0.5 + i / 10 + shift, "accuracy": None, "question": "?"} for i in (3, 1)]
        write_records(folder / "retain.jsonl", rows if folder == target else rows[::-1])
        write_records(folder / "forget.jsonl", [{"index": 0, "extraction_strength": 0.5, "loss": 2.0}])
    write_records(target / "holdout.jsonl", [{"index": 0, "rouge_l": 0.5}])  # not asked of candidates
    metrics = {"rouge_l_r": 0.7, "accuracy_r": None, "extraction_strength": 0.5, "rouge_l_h": 0.5, "loss_f": 0.1}
    pairs = read_pairs(Qa, own, target, metrics)
    assert {*pairs} == {"rouge_l_r", "extraction_strength"}
    assert [*pairs["rouge_l_r"]] == [pytest.approx((0.7, 0.8)), pytest.approx((0.5, 0.6))]
    assert read_pairs(Qa, own, tmp_path / "nobody", metrics) == {}
