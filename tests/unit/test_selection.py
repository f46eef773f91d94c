"""The scores that choose a point (α, β), against values worked out by hand; and what is advised after a choice."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.catalogue import BENCHMARKS, paper_scores
from msa_lite.choose.choice import few_rows, strength_advice
from msa_lite.choose.rules import LeastExtraction, Metrics, PaperScore, Rank, check_rule, make_rule, why_broken
from msa_lite.errors import DataError, UsageError
from msa_lite.evals.benchmarks.benchmark import find_benchmark

TARGET = {"rouge_l_r": 1.0}
TOFU = {"model_utility": 0.5, "acc_forget": 0.8, "acc_recover": 0.4, "acc_retain": 0.7, "extraction_strength": 0.1}
MUSE = {
    "min_k": 0.5, "min_k_pp": 0.6, "min_k_gap": 0.1, "min_k_pp_gap": 0.2, "verbmem_f": 0.2, "extraction_strength": 0.1,
    "exact_memorization": 0.5, "knowmem_r": 0.6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("score", "metrics", "value"),
    [
        # 0.5² · 0.8 · 0.4² · 0.7 · (1 − 0.1)² = 0.25 · 0.8 · 0.16 · 0.7 · 0.81 = 0.018144, to the power of 1/8
        ("tofu", TOFU, 0.018144 ** (1 / 8)),
        ("tofu-printed", TOFU, math.exp(0.018144 / 8)),
        # (1 − 0.5)(1 − 0.6)(1 − 0.2)(1 − 0.1)²(1 − 0.5) · 0.6² = 0.5 · 0.4 · 0.8 · 0.81 · 0.5 · 0.36 = 0.023328
        ("muse", MUSE, 0.023328 ** (1 / 8)),
        # the same with (1 − 0.1)(1 − 0.2) = 0.72 in the place of (1 − 0.5)(1 − 0.6) = 0.2
        ("muse-gap", MUSE, (0.023328 / 0.2 * 0.72) ** (1 / 8)),
        # the same with (1 − 0.6)² = 0.16 in the place of 0.36
        ("muse-printed", MUSE, math.exp(0.023328 / 0.36 * 0.16 / 8)),
        ("restor", {"accuracy": 0.4431}, 0.4431),
        ("tofu", {"model_utility": 1.0, "extraction_strength": 0.0}, 1.0),
        # A factor of 0 counts as a millionth, (1e-6² · 1²)^(1/4): the other terms still order points that share it.
        ("tofu", {"model_utility": 0.0, "extraction_strength": 0.0}, 1e-3),
        ("tofu", {"model_utility": 0.0, "extraction_strength": 0.75}, 1e-3 * 0.5),
    ],
)
def test_a_papers_score_is_the_weighted_geometric_mean(score: str, metrics: Metrics, value: float) -> None:
    assert PaperScore(score).rank(metrics, metrics) == Rank(True, pytest.approx(value))


def test_the_target_decides_which_terms_are_in() -> None:
    rule, alone = PaperScore("tofu"), {"model_utility": 0.5, "extraction_strength": 0.1}
    # Without a judge: (0.5² · 0.9²)^(1/4) = √0.45, whatever one says of a candidate.
    unjudged = dict.fromkeys(TOFU) | alone
    for metrics in (alone, unjudged, TOFU | {"rouge_l_f": 0.1}):
        assert rule.rank(metrics, unjudged).value == pytest.approx(0.45**0.5)
    head = (
        "the choice leaves out acc_forget, acc_recover, acc_retain (3 of the 5 terms of the paper's score, 4 of its 8 "
    )
    assert rule.notes(unjudged, "no judge is set") == [f"{head}weights): no judge is set"]
    assert rule.notes(unjudged | {"extraction_strength": None})[1] == (
        "the choice leaves out extraction_strength (1 of the 5 terms of the paper's score, 2 of its 8 weights): the "
        "target has no value for it"
    )
    assert rule.notes(TOFU) == []
    # A term that only the candidate lacks is at its lowest: 1e-6² in the place of 0.4².
    assert rule.rank(TOFU | {"acc_recover": None}, TOFU).value == pytest.approx((0.018144 / 0.16 * 1e-12) ** (1 / 8))
    with pytest.raises(DataError, match=r"score muse: the target has none of min_k, min_k_pp, .*, knowmem_r"):
        PaperScore("muse").rank(MUSE, dict.fromkeys(MUSE))


def test_the_printed_form_orders_the_other_way_where_it_punishes_what_is_kept() -> None:
    more = MUSE | {"knowmem_r": 0.7}
    for score, better in (("muse", True), ("muse-gap", True), ("muse-printed", False)):
        rule = PaperScore(score)
        assert (rule.rank(more, MUSE) > rule.rank(MUSE, MUSE)) is better


def test_rules_are_made_of_what_a_recipe_says_and_recorded() -> None:
    assert make_rule(None, 0.9) == make_rule("extraction", 0.9) == LeastExtraction(0.9)
    assert make_rule("muse-gap", 0.9) == PaperScore("muse-gap")
    assert [score for score in paper_scores() if PaperScore(score).needs_ideal] == ["muse-gap"]
    margins = {"inside": "bounds of the control", "recited": 0.1, "left": 0.2, "else": "parity"}
    assert LeastExtraction(0.9).describe() == {"score": "extraction", "keep": 0.9} | margins
    assert PaperScore("restor").describe() == {"score": "restor", "weights": {"accuracy": 1}}
    with pytest.raises(UsageError, match="did you mean 'muse-gap'"):
        make_rule("musegap", 0.9)


def test_a_rule_is_refused_where_its_metrics_are_not_measured() -> None:
    there = ["extraction_strength", "rouge_l_r", "rouge_l_f"]
    check_rule(LeastExtraction(0.95), there, "benchmark qa")
    check_rule(PaperScore("tofu"), ["model_utility", "extraction_strength"], "without a judge")
    with pytest.raises(UsageError, match=r"benchmark qa: does not measure .*\n  model_utility"):
        check_rule(PaperScore("tofu"), there, "benchmark qa")


@pytest.mark.parametrize(
    ("metrics", "reference", "why"),
    [
        (TARGET | {"rouge_l_r": 0.004}, TARGET, "0.004 is left of the target's probability_r and rouge_l_r"),
        (TARGET | {"rouge_l_r": 0.006}, TARGET, None),
        (TARGET | {"rouge_l_r": None}, TARGET, "0 is left of"),
        ({"probability_r": 1e-9}, {"probability_r": 0.5}, "2e-09 is left of"),
        (MUSE | {"knowmem_r": 0.0}, MUSE, "knowmem_r is 0, the target's 0.6"),
        (TOFU | {"model_utility": 0.0}, TOFU, "model_utility is 0, the target's 0.5"),
        ({"accuracy": 0.0}, {"accuracy": 0.648}, "accuracy is 0, the target's 0.65"),
        ({"accuracy": 0.0, "knowmem_r": 0.0}, {"accuracy": 0.0, "knowmem_r": None}, None),
        ({"rouge_l_f": 0.0}, {"rouge_l_f": 1.0}, None),
    ],
)
def test_what_keeps_nothing_is_broken(metrics: Metrics, reference: Metrics, why: str | None) -> None:
    vital = {name for kind in map(find_benchmark, BENCHMARKS) for name in kind.vital}
    found = why_broken(metrics, reference, vital)
    assert found is None if why is None else found is not None and found.startswith(why)


# What is advised after a choice: by the scores, and not by the place in the grid alone


ENOUGH, LOST = Rank(True, 0.97, aim="enough"), Rank(False, -0.3, 0.7, aim="gentler", note="keeps 70%, 90% wanted")
NEITHER = Rank(False, -0.1, 0.8, aim="neither", note="9 of 40 are recited; keeps 80%, 90% wanted")
REMEDIES = ["vector.mode full", "more retain rows"]


def weak(kept: float = 0.95) -> Rank:
    return Rank(False, -0.2, kept, aim="stronger", note="9 of 40 are recited")


Ranks = dict[tuple[float, ...], Rank | str]
"""By α, β and, with a filter, λ."""


def advice(ranks: Ranks, best: tuple[float, ...]) -> list[str]:
    points: list[dict[str, Any]] = [dict(zip(("alpha", "beta", "filter"), point, strict=False)) for point in ranks]
    return strength_advice(points, [*ranks.values()], [*ranks].index(best), REMEDIES)


BOTH_LOSE = "gentler points know too much, stronger ones lose too much. Try vector.mode full, or more retain rows"
LAST_FILTER = "λ 16 is the largest tried; a larger one may be nearer or not (merge.filter=64)"
CASES: dict[str, tuple[Ranks, tuple[float, ...], list[str]]] = {
    "enough at the largest": ({(0.5, 0.0): weak(), (1.0, 0.0): ENOUGH}, (1.0, 0.0), []),
    "enough at the smallest": ({(0.5, 0.5): ENOUGH, (1.0, 0.5): LOST}, (0.5, 0.5), []),
    "too weak at the largest": (
        {(0.5, 0.0): weak(), (1.0, 0.0): weak()}, (1.0, 0.0), ["an alpha larger than 1 may forget more"],
    ),
    "nothing forgets": (
        {(1.0, 0.0): weak(1.0), (8.0, 0.0): weak(1.0)}, (1.0, 0.0),
        ["no point forgets, up to alpha 8, and all of them keep enough"],
    ),
    **{
        f"weak, then {name}": ({(0.5, 0.0): weak(), (1.0, 0.0): beyond}, (0.5, 0.0), [BOTH_LOSE])
        for name, beyond in (("lost", LOST), ("neither", NEITHER), ("broken", "no numbers"))
    },
    "too little beta": (
        {(0.5, 0.0): LOST, (0.5, 0.5): weak(), (1.0, 0.5): LOST}, (0.5, 0.5),
        [BOTH_LOSE, "beta 0.5 is the largest tried; a larger one may be nearer"],
    ),
    "lost at the smallest": (
        {(0.5, 0.0): LOST, (1.0, 0.0): "no numbers"}, (0.5, 0.0),
        ["no alpha below 0.5 was tried; a smaller one may keep more (forget.alpha=[0.125, 0.25, 0.5])\n"],
    ),
    "a rule that only orders": (
        {(0.5, 0.5): Rank(True, 0.1), (1.0, 1.0): Rank(True, 0.2)}, (1.0, 1.0),
        [f"{name} 1 is the largest tried; a larger one may be better" for name in ("alpha", "beta")],
    ),
    "the largest of its λ, though another one lost there": (
        {(4.0, 0.0, 1.0): weak(0.8), (8.0, 0.0, 1.0): NEITHER, (4.0, 0.0, 16.0): weak(), (8.0, 0.0, 16.0): weak()},
        (8.0, 0.0, 16.0), ["(forget.alpha=[8, 12, 16] merge.filter=16)"],
    ),
    "only orders, with λ": (
        {(1.0, 0.0, 4.0): Rank(True, 0.2), (2.0, 0.0, 4.0): Rank(True, 0.1), (1.0, 0.0, 16.0): Rank(True, 0.3),
         (0.5, 0.0, 16.0): Rank(True, 0.2)}, (1.0, 0.0, 16.0), ["alpha 1 is the largest tried", LAST_FILTER],
    ),
    "lost at the smallest of the search": (
        {(0.0625, 0.0): LOST, (0.12, 0.0): LOST}, (0.0625, 0.0),
        ["may keep more (forget.alpha=[0.015625, 0.03125, 0.0625]); the forget vector may"],
    ),
    "lost at both ends of the search": (
        {(0.12, 0.0, 4.0): LOST, (0.12, 0.0, 16.0): LOST, (0.0625, 0.0, 16.0): LOST}, (0.0625, 0.0, 16.0),
        ["forget.alpha=[0.015625, 0.03125, 0.0625] merge.filter=16", LAST_FILTER],
    ),
    **{
        f"both lose, with λ = {best:g}": (
            {(alpha, 0.0, λ): rank for λ in (4.0, 16.0) for alpha, rank in ((0.5, weak()), (1.0, LOST))},
            (0.5, 0.0, best), [BOTH_LOSE, *told],
        )
        for best, told in ((4.0, []), (16.0, [LAST_FILTER]))
    },
    "neither at the smallest": (
        {(0.0625, 0.0, 4.0): NEITHER, (0.12, 0.0, 4.0): LOST}, (0.0625, 0.0, 4.0),
        [BOTH_LOSE, "alpha 0.0625 is the smallest tried; a smaller one may be nearer (forget.alpha=[0.015625, "],
    ),
    "both lose with the only λ": (
        {(0.5, 0.0, 16.0): weak(), (1.0, 0.0, 16.0): LOST}, (0.5, 0.0, 16.0), [BOTH_LOSE],
    ),
    "enough with the largest λ": (
        {(0.5, 0.0, 4.0): weak(), (0.5, 0.0, 16.0): ENOUGH}, (0.5, 0.0, 16.0), [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_advice_goes_by_scores_and_edges(name: str) -> None:
    ranks, best, wanted = CASES[name]
    found = advice(ranks, best)
    assert len(found) == len(wanted)
    assert all(words in f"{line}\n" for words, line in zip(wanted, found, strict=True)), found


def test_few_rows_and_rows_that_both_parts_share_are_told() -> None:
    sets = {name: SimpleNamespace(items=[None] * count) for name, count in (("forget", 9), ("retain", 30))}
    asked: Any = SimpleNamespace(sets=sets, split="validation")
    assert few_rows(asked) == ["it rests on few rows (forget: 9)"]
    asked.split = "all"
    few, shared = few_rows(asked)
    assert few == "it rests on few rows (forget: 9)"
    assert shared.startswith("there are too few retain rows to divide (30)")
