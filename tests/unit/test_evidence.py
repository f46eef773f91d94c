"""What a rule makes of the prior's level and of scores row by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from msa_lite.choose.evidence import Evidence, Metrics, read_pairs, surely_misses
from msa_lite.choose.rules import Condition, Constrained, LeastExtraction, Rank
from msa_lite.choose.shares import extractable_share, kept_share, lost_too_much
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


def fading(rows: int, share: float, spread: float = 0.05) -> Scores:
    """Scores around 0.8, of which this share is left, with noise of each row's own."""
    known = [0.8 + (spread if i % 2 else -spread) for i in range(rows)]
    return [(share * value + (spread if i // 2 % 2 else -spread), value) for i, value in enumerate(known)]


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        # A real run: .312 → .188 of 16 answers. The mean decides, though two answers may be noise.
        (
            {"accuracy_r": answers(16, 5, 2), "rouge_l_r": fading(16, 0.96), "probability_r": fading(16, 0.96)},
            "keeps 87% (probability 96%, ROUGE-L recall 96%, accuracy 60%), 95% wanted",
        ),
        ({"accuracy_r": answers(16, 16, 2), "rouge_l_r": fading(16, 0.98), "probability_r": fading(16, 0.98)}, None),
        ({"accuracy_r": answers(40, 40, 8)}, "keeps 80% (accuracy 80%), 95% wanted"),
        ({"accuracy_r": answers(40, 40, 3)}, "keeps 92% (accuracy 92%), 95% wanted"),
        ({"accuracy_r": answers(40, 40, 2)}, None),
        # Probability moves with every row: what is lost is seen in sixteen.
        (
            {"accuracy_r": answers(16, 16, 0), "probability_r": fading(16, 0.8)},
            "keeps 87% (probability 80%, accuracy 100%), 95% wanted",
        ),
        # A mean that is enough makes up for no answers that are lost for good, unless there are too few to say so.
        (
            {"accuracy_r": answers(900, 900, 171), "probability_r": fading(900, 1.0), "rouge_l_r": fading(900, 1.0)},
            "keeps 95% (probability 100%, ROUGE-L recall 100%, accuracy 81%), 95% wanted",
        ),
        (
            {"accuracy_r": answers(16, 16, 3), "probability_r": fading(16, 1.0), "rouge_l_r": fading(16, 1.0)},
            None,
        ),
        ({"accuracy_r": answers(4, 4, 1)}, "keeps 75% (accuracy 75%), 95% wanted"),
        ({"accuracy_r": answers(1, 1, 1)}, "keeps 0% (accuracy 0%), 95% wanted"),
        # Documents.
        (
            {"probability_r": fading(12, 0.8), "exact_memorization_r": fading(12, 0.97)},
            "keeps 86% (probability 80%, exact memorization 97%), 95% wanted",
        ),
    ],
)
def test_too_much_is_lost_where_the_mean_says_so_or_a_single_metric_beyond_noise(
    pairs: dict[str, Scores], why: str | None
) -> None:
    metrics, target = means(pairs)
    found = lost_too_much(metrics, target, 0.95, pairs)
    assert found == why
    rank = LeastExtraction(0.95).rank(metrics, target, evidence=Evidence(pairs=pairs))
    assert (rank.met, rank.note) == (why is None, why)


def test_while_much_is_left_a_loss_that_may_be_noise_counts_as_none() -> None:
    kept = {"accuracy_r": answers(16, 5, 2), "rouge_l_r": fading(16, 0.96), "probability_r": fading(16, 0.96)}
    metrics, target = means(kept)
    assert lost_too_much(metrics, target, 0.95, kept, doubt=True) is None
    assert lost_too_much(metrics, target, 0.95, kept) is not None
    sure = {"accuracy_r": answers(40, 40, 8)}
    assert lost_too_much(*means(sure), 0.95, sure, doubt=True) == "keeps 80% (accuracy 80%), 95% wanted"
    far = {"accuracy_r": answers(4, 4, 1)}  # is never kept, whatever the rows say
    assert lost_too_much(*means(far), 0.95, far, doubt=True) == "keeps 75% (accuracy 75%), 95% wanted"
    for left, met in ((0.21, True), (0.2, False)):
        own, before = {**metrics, "rouge_l_f": left}, {**target, "rouge_l_f": 1.0}
        assert LeastExtraction(0.95).rank(own, before, evidence=Evidence(pairs=kept)).met == met


def test_without_rows_the_means_are_compared() -> None:
    target = {"rouge_l_r": 0.8, "accuracy_r": 0.5}
    assert lost_too_much({"rouge_l_r": 0.72, "accuracy_r": 0.5}, target, 0.95, {}) is None
    lost = lost_too_much({"rouge_l_r": 0.68, "accuracy_r": 0.5}, target, 0.95, {})
    assert lost == "keeps 92% (ROUGE-L recall 85%, accuracy 100%), 95% wanted"
    assert lost_too_much({}, {}, 0.95, {}) is None


def test_probability_counts_twice_in_what_is_kept_and_gains_make_up_for_no_loss() -> None:
    target = {"probability_r": 0.8, "rouge_l_r": 0.8, "accuracy_r": 0.5}
    assert kept_share({"probability_r": 0.4, "rouge_l_r": 0.8, "accuracy_r": 0.5}, target) == 0.75
    assert kept_share({"probability_r": 0.8, "rouge_l_r": 0.8, "accuracy_r": 0.25}, target) == 0.875
    assert kept_share({"probability_r": 0.4, "rouge_l_r": 0.8, "accuracy_r": 1.0}, target) == 0.75


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


def test_the_prior_says_what_a_model_scores_that_never_saw_the_rows() -> None:
    target = {"rouge_l_f": 0.9, "rouge_l_h": 0.2, "accuracy_f": 1.0, "extraction_strength": 0.8}
    prior = {"rouge_l_f": 0.4, "accuracy_f": 0.0, "extraction_strength": 0.1}
    at_prior = {"rouge_l_f": 0.4, "accuracy_f": 0.0, "extraction_strength": 0.1}
    assert extractable_share(at_prior, target, prior) == 0
    assert extractable_share(at_prior, target) == pytest.approx((0.2 / 0.7 + 0 + 0.1 / 0.8) / 3)
    assert extractable_share(at_prior | {"rouge_l_f": 0.65}, target, prior) == pytest.approx(0.5 / 3)
    assert extractable_share(target, target, target) == 0  # a prior that knows them, too
    rank = LeastExtraction(0.95).rank(at_prior, target, evidence=Evidence(prior=prior))
    assert rank == Rank(True, 1.0)
    assert rank.aim == "enough"


def test_what_is_all_but_forgotten_is_forgotten_and_keeping_decides() -> None:
    target = {"rouge_l_f": 1.0, "rouge_l_r": 1.0}
    rule = LeastExtraction(0.9)
    clean, gentle = ({"rouge_l_f": 0.0, "rouge_l_r": 0.92}, {"rouge_l_f": 0.1, "rouge_l_r": 0.99})
    assert rule.rank(gentle, target) > rule.rank(clean, target)
    assert rule.rank({"rouge_l_f": 0.11, "rouge_l_r": 1.0}, target) < rule.rank(clean, target)
    assert rule.rank({"rouge_l_f": 0.11, "rouge_l_r": 1.0}, target).aim == "stronger"
    assert rule.rank({"rouge_l_f": 0.0, "rouge_l_r": 0.5}, target).aim == "gentler"


def test_a_loss_hardly_too_large_is_better_than_nothing_forgotten() -> None:
    target = {"rouge_l_f": 1.0, "rouge_l_r": 1.0}
    rule = LeastExtraction(0.9)
    ranks = {
        (left, kept): rule.rank({"rouge_l_f": left, "rouge_l_r": kept}, target)
        for left, kept in [(0.5, 0.9), (0.05, 0.85), (0.05, 0.81), (0.4, 0.88), (0.95, 1.0), (1.0, 1.0), (0.0, 0.7)]
    }
    assert sorted(ranks, key=lambda point: ranks[point], reverse=True) == [*ranks]
    # −(0.9 − kept)₊ − (left − 0.1)₊, and kept − 2 where more than 0.1 too little is kept
    assert [rank.value for rank in ranks.values()] == pytest.approx([0.5, -0.05, -0.09, -0.32, -0.85, -0.9, -1.3])
    assert [rank.met for rank in ranks.values()] == [True] + [False] * 6
    assert [rank.aim for rank in ranks.values()] == ["stronger"] + ["gentler"] * 3 + ["stronger"] * 2 + ["gentler"]
    assert [rank.left for rank in ranks.values()] == [left for left, _ in ranks]
    assert ranks[0.95, 1.0].note == "leaves 95% of what can be extracted, at most 50% wanted"
    both = rule.rank({"rouge_l_f": 0.6, "rouge_l_r": 0.85}, target)
    assert both.note == (
        "keeps 85% (ROUGE-L recall 85%), 90% wanted; leaves 60% of what can be extracted, at most 50% wanted"
    )
    assert rule.unmet(both) == (
        "no candidate keeps 90% of the target's retain scores and leaves at most 50% of what can be extracted, so the "
        f"nearest was chosen; it {both.note}"
    )


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
