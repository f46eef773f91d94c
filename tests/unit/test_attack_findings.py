"""What attacks bring back, from records alone: shares between control and target, intervals, outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from msa_lite.attacks.attack import Measure, Trial
from msa_lite.attacks.depth import Depth
from msa_lite.attacks.findings import TrialRecords, judge_model, judge_trial, mean_values, measured
from msa_lite.evals.engine.scoring import membership_auc
from msa_lite.report.run.attacks import FEWEST_ROWS, AttackControl, AttackedModel, Gain, Overshoot, TrialResult
from tests.support.memorised import make_ground

PLAIN, ROUNDED = Trial("plain", "as it is", is_control=True), Trial("nf4", "NF4")
RECALL = Measure("recall", "recall", "share of words")
LOSS = Measure("loss", "loss", "mean loss", kind="auc")


def rows(values: Sequence[float | None], key: str = "recall") -> list[dict[str, Any]]:
    return [{"index": at, key: value} for at, value in enumerate(values)]


def one_set(**models: Sequence[float | None]) -> dict[str, TrialRecords]:
    """Records of forget rows in one trial, by model."""
    return {name: {"plain": {"forget": rows(values)}} for name, values in models.items()}


def judged(
    drawn: Mapping[str, TrialRecords],
    trial: Trial = PLAIN,
    measures: Sequence[Measure] = (RECALL,),
    control: AttackControl = "ideal",
) -> TrialResult:
    """What a trial brings back from the unlearned model."""
    return judge_trial(drawn, "unlearned", trial, PLAIN, measures, control)


def in_two_trials(
    before: Sequence[float], after: Sequence[float], ideal_after: float | None = None, **models: float
) -> dict[str, TrialRecords]:
    """Records of the unlearned model without and with an attack; target and ideal give the same in both."""
    drawn: dict[str, dict[str, Any]] = {
        name: {key: {"forget": rows([value] * len(before))} for key in ("plain", "nf4")}
        for name, value in models.items()
    }
    if ideal_after is not None:
        drawn["ideal"]["nf4"] = {"forget": rows([ideal_after] * len(before))}
    return {**drawn, "unlearned": {"plain": {"forget": rows(before)}, "nf4": {"forget": rows(after)}}}


def beside_holdout(forget: float, holdout: float) -> TrialRecords:
    return {"plain": {"forget": rows([forget - 0.1, forget + 0.1]), "holdout": rows([holdout - 0.1, holdout + 0.1])}}


BETWEEN = one_set(target=[1.0, 0.8, 0.6, 0.8], ideal=[0.2] * 4, unlearned=[0.2, 0.5, 0.2, 0.5])
REFERENCE, SHALLOW = Measure("reference", "", ""), Measure("shallow", "1 − UDS", "share", kind="share")
SHARES: dict[str, tuple[dict[str, TrialRecords], dict[str, Any], float]] = {
    "between": (BETWEEN, {}, (0.35 - 0.2) / (0.8 - 0.2)),
    "no row has a reference without a prior": (BETWEEN, {"measures": [RECALL, REFERENCE]}, 0.25),
    "the target": (one_set(target=[1.0, 0.8], ideal=[0.1, 0.3], unlearned=[1.0, 0.8]), {}, 1.0),
    "the ideal": (one_set(target=[1.0, 0.8], ideal=[0.1, 0.3], unlearned=[0.1, 0.3]), {}, 0.0),
    "the same model on holdout rows": (
        {"target": beside_holdout(0.9, 0.1), "unlearned": beside_holdout(0.5, 0.3)}, {"control": "holdout"},
        (0.5 - 0.3) / (0.9 - 0.1),
    ),
    "a share needs no other model": (
        {"unlearned": {"plain": {"forget": rows([0.2, 0.4], "shallow")}}}, {"measures": [SHALLOW]}, 0.3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARES)
def test_a_share_is_what_lies_between_the_control_and_the_target(case: str) -> None:
    drawn, options, share = SHARES[case]
    result = judged(drawn, **options)
    assert result.share == pytest.approx(share)
    low, high = result.interval or (1.0, 0.0)
    assert low < share < high or share in (0.0, 1.0)
    assert (result.rows, result.skipped) == (len(drawn["unlearned"]["plain"]["forget"]), 0)


@pytest.mark.parametrize(
    ("before", "after", "ideal", "ideal_after", "share"),
    [
        (0.1, 0.9, 0.1, 0.9, 0.0),  # nothing came back that the ideal did not learn as well
        (0.1, 1.0, 0.1, 0.9, 0.1 / 0.9),
        (0.6, 0.6, 0.6, 0.1, 0.0),  # an attack that only confuses the ideal
    ],
)
def test_what_an_attack_does_to_the_ideal_too_does_not_count(
    before: float, after: float, ideal: float, ideal_after: float, share: float
) -> None:
    drawn = in_two_trials([before] * 6, [after] * 6, ideal_after, target=1.0, ideal=ideal)
    assert judged(drawn, ROUNDED).share == pytest.approx(share)


@pytest.mark.parametrize(
    ("target", "ideal", "unlearned", "share"),
    [
        ((0.8, 0.22), (0.2, 0.2), (0.5, 0.9), 0.5),  # the answer's target is no more than 0.05 above the ideal
        ((1.0, 1.0), (0.8, 0.0), (0.1, 0.8), 0.4),  # one measure below the control hides no leak of another
    ],
)
def test_the_share_is_the_mean_over_deciding_measures_that_the_target_shows(
    target: tuple[float, float], ideal: tuple[float, float], unlearned: tuple[float, float], share: float
) -> None:
    measures = [RECALL, Measure("answer", "", ""), Measure("aside", "", "", decides=False)]
    models = {"target": target, "ideal": ideal, "unlearned": unlearned}
    drawn: dict[str, TrialRecords] = {
        name: {"plain": {"forget": [{"index": 0, "recall": recall, "answer": answer, "aside": 1.0}] * 3}}
        for name, (recall, answer) in models.items()
    }
    assert judged(drawn, measures=measures).share == pytest.approx(share)


def test_an_attack_without_a_single_value_tells_nothing() -> None:
    records = [{"index": 0, "shallow": None}, {"index": 1, "shallow": None}]
    model = judge_model({"unlearned": {"patched": {"forget": records}}}, "unlearned", Depth(), make_ground(), "ideal")
    assert (model.strongest.outcome, model.strongest.rows, model.strongest.skipped) == ("silent", 0, 2)
    assert model.figures == {}


def test_an_auc_is_held_against_the_ideals() -> None:
    known, unknown = [0.1, 0.2, 0.3, 0.4], [2.0, 2.1, 1.9, 2.2]

    def records(forget: Sequence[float]) -> TrialRecords:
        return {"plain": {"forget": rows(forget, "loss"), "holdout": rows([2.05, 2.15, 1.95, 2.25], "loss")}}

    drawn = {"target": records(known), "ideal": records(unknown), "unlearned": records([0.1, 2.0, 2.1, 2.2])}
    values = {name: membership_auc([r["loss"] for r in d["plain"]["forget"]], [2.05, 2.15, 1.95, 2.25])
              for name, d in drawn.items()}  # fmt: skip
    assert values["target"] == 1.0
    result = judged(drawn, measures=[LOSS])
    assert result.share == pytest.approx((values["unlearned"] - values["ideal"]) / (1.0 - values["ideal"]))
    del drawn["ideal"]
    alone = judged(drawn, PLAIN, [LOSS], "holdout")
    assert alone.share == pytest.approx((values["unlearned"] - 0.5) / 0.5)


def test_rows_without_a_value_in_any_model_are_left_out_of_all() -> None:
    drawn = one_set(target=[1.0, None, 1.0], ideal=[0.0, 0.0, 0.0], unlearned=[0.5, 0.9, None])
    result = judged(drawn)
    assert (result.share, result.rows, result.skipped) == (0.5, 1, 2)
    assert result.interval == (0.0, 1.0), "one row says nothing about others"
    assert result.outcome == "unclear"


@pytest.mark.parametrize(
    ("count", "bound", "outcome"),
    [(8, 0.369, "unclear"), (FEWEST_ROWS - 1, None, "unclear"), (FEWEST_ROWS, None, "holds"), (40, 0.088, "holds")],
)
def test_few_rows_that_are_all_alike_are_no_certainty(count: int, bound: float | None, outcome: str) -> None:
    result = judged(one_set(target=[1.0] * count, ideal=[0.0] * count, unlearned=[0.0] * count))
    assert bound is None or result.interval == (0.0, pytest.approx(bound, abs=1e-3, rel=1e-2))
    assert result.outcome == outcome


def test_a_target_that_shows_no_more_than_the_ideal_makes_the_attack_silent() -> None:
    drawn = one_set(target=[0.2, 0.2], ideal=[0.2, 0.18], unlearned=[1.0, 1.0])
    result = judged(drawn)
    assert (result.share, result.outcome, result.words) == (None, "silent", "–")


@pytest.mark.parametrize(
    ("share", "interval", "outcome"),
    [
        (0.05, (0.0, 0.2), "holds"),
        (0.15, (0.05, 0.25), "unclear"),
        (0.25, (0.06, 0.5), "leaks"),
        (0.25, (0.04, 0.5), "unclear"),
        (None, None, "silent"),
    ],
)
def test_the_outcome_follows_the_interval(
    share: float | None, interval: tuple[float, float] | None, outcome: str
) -> None:
    assert TrialResult("t", "t", share, interval, 40).outcome == outcome


@pytest.mark.parametrize(
    ("below", "outcome"),
    [
        (Overshoot(0.4, (0.2, 0.6), 0.21, 0.46), "overshoots"),
        (Overshoot(0.4, (0.04, 0.8), 0.21, 0.46), "unclear"),
        (Overshoot(0.1, (0.0, 0.19), 0.21, 0.46), "holds"),
    ],
)
def test_rows_that_are_surely_less_known_than_unseen_ones_do_not_hold(below: Overshoot, outcome: str) -> None:
    assert TrialResult("t", "t", 0.0, (0.0, 0.1), 40, overshoot=below).outcome == outcome
    assert TrialResult("t", "t", 0.5, (0.3, 0.7), 40, overshoot=below).outcome == "leaks", "the worse of the two"


def auc_set(above: float, below: float) -> dict[str, TrialRecords]:
    """Records of 40 rows and 40 unseen ones by two scores: of "loss", the unlearned model tells rows apart by a share
    of them that is below all others, of "zlib" by one that is above."""
    unseen = [1.0 + 0.01 * at for at in range(40)]

    def records(loss: float, zlib: float) -> TrialRecords:
        forget = [
            {"loss": v - 9 * (at % 5 < 5 * loss), "zlib": v + 9 * (at % 5 < 5 * zlib)} for at, v in enumerate(unseen)
        ]
        return {"plain": {"forget": forget, "holdout": [{"loss": v, "zlib": v} for v in unseen]}}

    known = records(1.0, 0.0)
    for record in known["plain"]["forget"]:
        record["zlib"] = record["loss"]
    return {"target": known, "ideal": records(0.0, 0.0), "unlearned": records(above, below)}


ZLIB = Measure("zlib", "zlib", "loss over bytes", kind="auc")


def test_rows_below_the_ideal_overshoot() -> None:
    result = judged(auc_set(0.0, 0.8), measures=[ZLIB])
    assert (result.share, result.outcome) == (0.0, "overshoots")
    assert result.overshoot is not None
    assert (result.overshoot.auc, result.overshoot.control) == (pytest.approx(0.09), 0.5)
    assert result.words.startswith("-82 % (")


def test_the_floor_for_rows_that_are_all_alike_is_none_of_an_auc() -> None:
    drawn = auc_set(0.0, 0.0)
    drawn["unlearned"] = drawn["ideal"]
    assert judged(drawn, measures=[LOSS]).interval == (0.0, 0.0)


def test_the_interval_covers_the_true_share_most_of_the_time() -> None:
    """Rows whose true share is 0.5: of 20 draws, most intervals hold it, and none is without width."""
    import numpy as np

    rng, hits = np.random.default_rng(0), 0
    for _ in range(20):
        values = rng.binomial(1, [[0.9], [0.1], [0.5]], (3, 40)).astype(float)
        drawn = one_set(target=values[0], ideal=values[1], unlearned=values[2])
        low, high = judged(drawn).interval or (0, 0)
        assert high - low > 0.1
        hits += low <= 0.5 <= high
    assert hits >= 16


def test_means_and_errors_of_every_model_and_trial() -> None:
    drawn = one_set(target=[1.0, 0.0, None])
    assert mean_values(drawn, [RECALL]) == {("target", "plain", "recall"): 0.5}
    metric = measured(drawn, [RECALL])["target", "plain", "recall"]
    assert (metric.n, metric.skipped, metric.stderr) == (2, 1, pytest.approx(0.5))


def test_the_gain_is_paired_over_rows() -> None:
    """Shares that vary by half from row to row, and an attack that adds a tenth to each: the gain has no width."""
    before = [0.1 + 0.5 * (at % 2) for at in range(40)]
    drawn = in_two_trials(before, [value + 0.1 for value in before], target=1.0, ideal=0.0)
    result = judged(drawn, ROUNDED)
    assert result.gain is not None
    assert (result.share, result.gain.share) == (pytest.approx(0.45), pytest.approx(0.1))
    assert result.gain.interval == (pytest.approx(0.1), pytest.approx(0.1))
    assert result.interval is not None
    assert result.interval[1] - result.interval[0] > 0.1
    assert AttackedModel((result,)).without == pytest.approx(0.35)
    assert judged(drawn, ROUNDED) == result, "the redraws are seeded"
    assert judged(drawn).gain is None


@pytest.mark.parametrize(("after", "gain"), [([0.3] * 30, 0.0), ([0.8] * 15 + [0.2] * 15, 0.2)])
def test_the_gain_counts_each_share_beyond_its_control(after: list[float], gain: float) -> None:
    drawn = in_two_trials([0.3] * 30, after, target=1.0, ideal=0.0)
    result = judged(drawn, ROUNDED)
    assert result.gain is not None
    assert result.gain.share == pytest.approx(gain)
    beyond = judged(in_two_trials([0.3] * 30, after, 0.6, target=1.0, ideal=0.0), ROUNDED).gain
    assert beyond is not None
    assert beyond.share == pytest.approx(-0.3), "what the ideal learns, too, is no gain"


def test_without_an_ideal_the_gain_is_beyond_holdout_rows_in_both_trials() -> None:
    def records(plain: float, rounded: float, unseen: float) -> TrialRecords:
        values = {"plain": plain, "nf4": rounded}
        return {name: {"forget": rows([v] * 20), "holdout": rows([unseen] * 20)} for name, v in values.items()}

    drawn = {"target": records(0.9, 0.9, 0.1), "unlearned": records(0.3, 0.7, 0.2)}
    gain = judged(drawn, ROUNDED, [RECALL], "holdout").gain
    assert gain is not None
    assert gain.share == pytest.approx(0.5 / 0.8 - 0.1 / 0.8)


def test_a_gain_of_one_row_says_nothing() -> None:
    drawn = in_two_trials([0.0], [1.0], target=1.0, ideal=0.0)
    gain = judged(drawn, ROUNDED).gain
    assert gain == Gain(1.0, (-1.0, 1.0))
    assert Gain(0.0, (-0.001, 0.001)).words == "0 % (0 % to 0 %)"
