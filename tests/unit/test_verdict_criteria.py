"""The verdict: each outcome and each boundary, from handmade bounds; and the bounds, from handmade records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.evals.benchmarks.benchmark import find_benchmark
from msa_lite.evals.benchmarks.restor import RESTOR
from msa_lite.evals.verdict.outcome import is_recited
from msa_lite.io.files.writing import json_form
from msa_lite.report.verdict.criteria import Criterion, criteria_of
from msa_lite.report.verdict.figures import Bound, EarlierFacts, Forgotten, Kept
from msa_lite.report.verdict.verdict import NoVerdict, Verdict, load_verdict, make_verdict, write_verdict
from msa_lite.settings import Margins
from tests.support.records import around, known, make_forgotten, make_kept, question, text, unknown

NAN = float("nan")
FORGOTTEN, KEPT = make_forgotten(), make_kept(rows=120)


def weighed(benchmark: str, models: Mapping[str, Any]) -> tuple[Forgotten, Kept | None]:
    """The verdict's numbers for records that something can be said of."""
    found = find_benchmark(benchmark).weigh(models)
    assert not isinstance(found, str)
    return found


def judged(benchmark: str, models: Mapping[str, Any]) -> Verdict:
    return make_verdict(*weighed(benchmark, models))


# The criteria


def left(value: float, half: float = 0.02) -> dict[str, Any]:
    return {"left": {"extraction_strength": around(0.05), "probability": around(value, half)}}


@pytest.mark.parametrize(
    ("excess", "back", "outcome", "word"),
    [
        (Bound(0.0, -0.03, 0.04), {}, "PASS", None),
        (Bound(0.02, -0.02, 0.06), {"runs/a": 1}, "PASS", "1 of 60 row of earlier requests comes back"),
        (Bound(0.0, -0.4, 0.4), {}, "PASS", None),  # few rows decide nothing
        (Bound(0.15, 0.05, 0.25), {"runs/a": 9}, "PARTLY", "earlier requests: 9 of 60 questions are still recited"),
        (Bound(0.3, 0.2, 0.4), {}, "FAIL", "surely more than 10 points"),
        (None, {}, "PASS", None),
    ],
)
def test_rows_of_earlier_requests_count_by_the_margin_of_recited_rows(
    excess: Bound | None, back: dict[str, int], outcome: str, word: str | None, tmp_path: Path
) -> None:
    recited = {"target": 60, "unlearned": 9, "ideal": 0}
    scored = replace(FORGOTTEN, rows=60, control_rows=60, recited=recited, excess=excess)
    verdict = make_verdict(FORGOTTEN, KEPT, earlier=EarlierFacts(50, 140, scored, back))
    assert verdict.outcome == outcome
    assert any(word in reason for reason in verdict.reasons) if word else verdict.reasons == ()
    assert ("earlier requests" in verdict.criteria) != ("earlier requests" in make_verdict(FORGOTTEN, KEPT).criteria)
    assert not any("runs/a" in reason for reason in verdict.reasons), "a record names no folder"
    for told in (verdict, NoVerdict("nobody can say", verdict.earlier)):
        write_verdict(told, tmp_path)
        assert load_verdict(tmp_path) == told


@pytest.mark.parametrize(
    ("changes", "kept", "outcome", "word"),
    [
        ({}, KEPT, "PASS", None),
        ({"excess": Bound(0.02, -0.06, 0.101)}, KEPT, "PARTLY", "undecided: too few"),
        ({"excess": Bound(0.2, 0.1, 0.3)}, KEPT, "PARTLY", "still recited"),
        ({"excess": Bound(0.2, 0.101, 0.3)}, KEPT, "FAIL", "surely more than 10 points"),
        ({"excess": None, "control": None, "control_rows": 0, "left": {}}, KEPT, "PARTLY", "evaluate.ideal"),
        (left(0.18), KEPT, "PASS", None),
        (left(0.19), KEPT, "PARTLY", "undecided: too few"),
        (left(0.65), KEPT, "PARTLY", "somebody with the weights can tell"),
        ({"left": {"extraction_strength": around(0.4)}}, KEPT, "PARTLY", "completes the data better"),
        ({"left": {}, "recited": {"target": 1, "unlearned": 0, "ideal": 1}}, KEPT, "PARTLY", "nothing to forget"),
        ({"changed": 0}, KEPT, "FAIL", "nothing has changed"),
        ({}, replace(KEPT, share=around(0.86)), "PARTLY", "undecided: too few"),
        ({}, replace(KEPT, share=around(0.8)), "PARTLY", "85 % is wanted"),
        ({}, replace(KEPT, share=around(0.69)), "PARTLY", "85 % is wanted"),
        ({}, replace(KEPT, share=around(0.67)), "FAIL", "surely less than 70 %"),
        ({}, replace(KEPT, fitted=True), "PARTLY", "used every row to keep"),
        ({}, None, "PARTLY", "retain.data"),
        ({"excess": Bound(0.0, -0.1, NAN)}, KEPT, "PARTLY", "not a number"),
        ({"excess": Bound(0.9, 0.8, 1.0)}, None, "FAIL", "still recited"),
    ],
)
def test_each_bound_decides_the_outcome(changes: dict[str, Any], kept: Kept | None, outcome: str, word: str) -> None:
    verdict = make_verdict(replace(FORGOTTEN, **changes), kept)
    assert verdict.outcome == outcome
    assert bool(verdict.reasons) == (outcome != "PASS")
    assert word is None or word in " ".join(verdict.reasons)


def over(value: float, high: float, limit: float = 0.1) -> Criterion:
    return Criterion("", "", Bound(value, 0.0, high), limit)


PRINTED: dict[str, tuple[str, Criterion, tuple[str, str, str]]] = {
    "alike, but beyond": ("missed", over(0.1003, 0.2), ("10.03 %", "at most 20.0 %", "at most 10 %")),
    "alike, but within": ("shown", over(0.0996, 0.0998, 0.0999), ("9.96 %", "at most 9.98 %", "at most 9.99 %")),
    "noise of floats": ("shown", over(0.4 - 0.3, 0.4 - 0.3), ("10.0 %", "at most 10.0 %", "at most 10 %")),
    "a small limit": ("shown", over(0.0003, 0.0004, 0.0004), ("0.0 %", "at most 0.04 %", "at most 0.04 %")),
    "no number": ("absent", over(0.05, NAN), ("–", "–", "at most 10 %")),
    "too little": ("missed", Criterion("", "", Bound(0.84996, 0.8, 0.9), 0.85, at_least=True),
                   ("84.996 %", "at least 80.0 %", "at least 85 %")),
}  # fmt: skip


@pytest.mark.parametrize("case", PRINTED)
def test_a_figure_is_printed_on_its_own_side_of_the_limit(case: str) -> None:
    state, criterion, texts = PRINTED[case]
    assert (criterion.state, criterion.texts) == (state, texts)


def test_what_is_counted_is_printed_in_counts() -> None:
    none, one = (criteria_of(make_forgotten(3000, changed=changed), None, Margins()) for changed in (0, 1))
    assert (none["changed"].texts, "changed" in one) == (("0 of 3000", "at least 0", "at least 1"), False)


def test_a_recipe_may_set_the_margins_and_the_criteria_print_them() -> None:
    strict = Margins(recited=0.05, left=0.11, kept=0.94)
    verdict = make_verdict(FORGOTTEN, KEPT, margins=strict)
    assert verdict.outcome == "PARTLY"
    criteria = json_form(verdict)["criteria"]
    assert all(figure in criteria for figure in ("5 points", "11 %", "94 %", "the ideal"))
    lenient = Margins(kept=0.5)
    assert make_verdict(FORGOTTEN, replace(KEPT, share=around(0.6)), margins=lenient).outcome == "PASS"
    assert make_verdict(FORGOTTEN, replace(KEPT, share=around(0.4)), margins=lenient).outcome == "FAIL"


def test_what_would_settle_it_is_named_in_rows() -> None:
    few = replace(FORGOTTEN, rows=20, excess=Bound(0.0, -0.103, 0.103))
    (reason,) = make_verdict(few, KEPT).reasons
    assert "about 22 instead of 20 questions to forget" in reason
    assert "would pass" in reason
    both = make_verdict(few, replace(KEPT, rows=30, share=around(0.9, 0.1))).reasons
    assert "about 120 instead of 30 questions to keep" in both[0]  # half as wide with four times the rows
    hopeless = make_verdict(FORGOTTEN, replace(KEPT, share=around(0.851, 0.1))).reasons
    assert "many more than 120 questions to keep" in hopeless[0]


def test_few_rows_and_remarks_are_told_and_decide_nothing() -> None:
    verdict = make_verdict(replace(FORGOTTEN, rows=6), KEPT, ["the fit fell short"])
    assert verdict.outcome == "PASS"
    assert verdict.reasons == ("the verdict rests on few rows (forget: 6)", "the fit fell short")


def test_a_verdict_is_a_value_and_json(tmp_path: Path) -> None:
    verdict = make_verdict(replace(FORGOTTEN, **left(0.3)), KEPT)
    assert "30 % is left" in verdict.reasons[0]
    assert verdict.changes == "Its output differs from the target's on 48 of 48 forget rows and 0 of 120 retain rows."
    write_verdict(verdict, tmp_path)
    value = json.loads((tmp_path / "verdict.json").read_text())
    assert value == json.loads(json.dumps(json_form(verdict)))
    assert (value["outcome"], value["forgotten"]["left"]["probability"]["value"]) == ("PARTLY", 0.3)
    assert value["margins"] == {"recited": 0.1, "left": 0.2, "kept": 0.85}
    assert json_form(NoVerdict("nothing was scored")) == {"outcome": None, "reason": "nothing was scored"}


# The bounds of questions


def rows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record | {"index": at} for at, record in enumerate(records)]


def test_an_ideal_passes_and_a_target_fails_where_there_are_enough_rows() -> None:
    ideal = {"forget": rows(unknown(48)), "retain": rows(known(60))}
    target = {"forget": rows(known(48)), "retain": rows(known(60))}
    models = {"target": target, "ideal": ideal}
    assert judged("qa", models | {"unlearned": ideal}).outcome == "PASS"
    assert judged("qa", models | {"unlearned": target}).outcome == "FAIL"
    half = {"forget": rows([*known(24), *unknown(24)]), "retain": rows(known(60))}
    assert judged("qa", models | {"unlearned": half}).outcome == "FAIL"
    damaged = {"forget": rows(unknown(48)), "retain": rows([*known(20), *unknown(40)])}
    assert judged("qa", models | {"unlearned": damaged}).outcome == "FAIL"
    few = {name: {part: of[:20] for part, of in sets.items()} for name, sets in models.items()}
    assert judged("qa", few | {"unlearned": few["ideal"]}).outcome == "PARTLY"


def test_the_control_is_the_best_that_there_is() -> None:
    target = {"forget": known(24), "retain": known(40)}
    models: dict[str, Any] = {"target": target, "unlearned": {"forget": unknown(24), "retain": known(40)}}
    nothing, _ = weighed("qa", models)
    assert (nothing.control, nothing.excess, nothing.left) == (None, None, {})
    models["prior"] = {"forget": unknown(24, es=0.1)}
    assert weighed("qa", models)[0].control == "prior"
    models["target"] = target | {"holdout": [*known(1), *unknown(29)]}
    holdout, _ = weighed("qa", models)
    assert (holdout.control, holdout.control_rows, holdout.recited["holdout"]) == ("holdout", 30, 1)
    models["ideal"] = {"forget": unknown(24)}
    ideal, _ = weighed("qa", models)
    assert (ideal.control, ideal.control_rows) == ("ideal", 24)
    assert ideal.recited == {"target": 24, "unlearned": 0, "ideal": 0, "prior": 0}


def test_the_gap_left_is_worked_by_hand() -> None:
    # target 0.9, control 0.1 or 0.3, unlearned 0.5: (0.5 − 0.1) / 0.8 = 0.5 and (0.5 − 0.3) / 0.6 = 1/3
    target, unlearned = known(24), unknown(24, es=0.5, probability=0.5)
    for control, value in ((0.1, 0.5), (0.3, 1 / 3), (0.7, -1.0)):
        models = {"target": {"forget": target}, "unlearned": {"forget": unlearned}}
        forgotten, kept = weighed("qa", models | {"ideal": {"forget": unknown(24, probability=control)}})
        assert kept is None
        assert forgotten.left["probability"].value == pytest.approx(value)
    near, _ = weighed("qa", models | {"ideal": {"forget": unknown(24, es=1.0, probability=0.88)}})
    assert near.left == {}  # the target differs by less than can be told


def test_the_bounds_of_the_gap_are_those_of_a_bootstrap() -> None:
    import random

    import numpy as np

    chance = random.Random(1)
    target, ideal, unlearned = (
        rows([question("Yes", "No", 0, 0, min(1.0, max(0.0, chance.gauss(mean, 0.1)))) for _ in range(60)])
        for mean in (0.9, 0.2, 0.4)
    )
    models = {"target": {"forget": target}, "ideal": {"forget": ideal}, "unlearned": {"forget": unlearned}}
    bound = weighed("qa", models)[0].left["probability"]
    t, i, u = (np.array([r["probability"] for r in side]) for side in (target, ideal, unlearned))
    draws = np.random.default_rng(0).integers(60, size=(4000, 60))
    values = (u[draws].mean(1) - i[draws].mean(1)) / (t[draws].mean(1) - i[draws].mean(1))
    low, high = np.quantile(values, [0.05, 0.95])
    assert (bound.low, bound.high) == pytest.approx((low, high), rel=0.05)


def test_kept_counts_exact_answers_above_the_level_of_unseen_rows() -> None:
    """A model that lost half of its exact answers, though ROUGE-L and probability hardly fell."""
    before = rows([*known(81, 0.75), *unknown(59, rouge=0.86, es=0.4, probability=0.75)])
    after = rows([*known(40, 0.7), *unknown(100, rouge=0.85, es=0.4, probability=0.7)])
    models = {
        "target": {"forget": known(20), "retain": before},
        "unlearned": {"forget": unknown(20), "retain": after},
        "ideal": {"forget": unknown(20, rouge=0.51)},
    }
    _, kept = weighed("qa", models)
    assert kept is not None
    assert kept.recited == {"target": 81, "unlearned": 40}
    # accuracy 40/81; ROUGE-L (0.893 − 0.51) / (0.941 − 0.51); probability 0.6 / 0.65
    rouge = [(81 + 59 * 0.86) / 140, (40 + 85) / 140]
    assert kept.shares["accuracy"] == pytest.approx(40 / 81)
    assert kept.shares["rouge_l"] == pytest.approx((rouge[1] - 0.51) / (rouge[0] - 0.51))
    assert kept.shares["probability"] == pytest.approx(0.6 / 0.65)
    assert kept.share.value == pytest.approx(sum(kept.shares.values()) / 4)
    assert make_verdict(FORGOTTEN, kept).outcome == "PARTLY"


def test_a_gain_makes_up_for_no_loss_and_rows_that_are_not_known_say_nothing() -> None:
    before, after = known(40, 0.5), [*known(30, 0.9), *unknown(10, probability=0.9)]
    models = {"target": {"forget": known(20), "retain": before}, "unlearned": {"forget": unknown(20), "retain": after}}
    _, kept = weighed("qa", models)
    assert kept is not None
    assert kept.shares["probability"] == pytest.approx(1.8)
    assert kept.share.value == pytest.approx((0.75 * 3 + 1) / 4)
    unheard = {"target": {"forget": known(20), "retain": unknown(30)}, "ideal": {"forget": unknown(20)}}
    assert weighed("qa", unheard | {"unlearned": {"forget": unknown(20), "retain": unknown(30)}})[1] is None


def test_rows_of_a_subject_count_together_in_every_bound() -> None:
    def about(records: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        return [record | {"subject": at // size} for at, record in enumerate(rows(records))]

    # Of eight people with six rows each, one is still known whole.
    lists = {"target": known(48), "ideal": unknown(48), "unlearned": [*known(6), *unknown(42)]}
    alone = {name: {"forget": rows(records)} for name, records in lists.items()}
    together = {name: {"forget": about(records, 6)} for name, records in lists.items()}
    apart, clustered = weighed("qa", alone)[0], weighed("qa", together)[0]
    assert (apart.subjects, clustered.subjects) == (None, 8)
    assert apart.excess is not None
    assert clustered.excess is not None
    assert clustered.excess.high > apart.excess.high + 0.05
    assert clustered.left["probability"].high > apart.left["probability"].high + 0.05
    assert "8 subjects" in json_form(make_verdict(clustered, None))["criteria"]
    assert "independent" in json_form(make_verdict(apart, None))["criteria"]


def test_without_forget_rows_there_is_no_verdict() -> None:
    assert "give evaluate.forget" in str(find_benchmark("qa").weigh({"target": {"retain": known(2)}, "unlearned": {}}))


# Texts, and published benchmarks


def test_texts_are_recited_from_nine_tenths_of_their_tokens_on() -> None:
    assert [is_recited(text(share)) for share in (0.9, 0.89)] == [True, False]
    target = {"forget": [text(0.95, 0.8)] * 3, "retain": [text(0.9, 0.7)] * 12}
    unlearned = {"forget": [text(0.4, probability=0.2)] * 3, "retain": [text(0.9, 0.7)] * 12}
    prior = {"forget": [text(0.4, probability=0.2)] * 3}
    forgotten, kept = weighed("qa", {"target": target, "unlearned": unlearned, "prior": prior})
    assert forgotten.recited == {"target": 3, "unlearned": 0, "prior": 0}
    assert {name: gap.value for name, gap in forgotten.left.items()} == {"extraction_strength": 0.0, "probability": 0.0}
    assert kept is not None
    assert (forgotten.unit, kept.unit, kept.share.value) == ("texts", "texts", 1.0)
    assert kept.recited == {"target": 12, "unlearned": 12}
    assert weighed("qa", {"target": target, "unlearned": target})[0].changed == 0


def test_tofu_counts_what_its_records_lack() -> None:
    def tofu(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in record.items() if k != "accuracy"} for record in records]

    holdout = [{"question": "q", "answer": "a", "probability": 0.1, "extraction_strength": 0.3}]  # nothing generated
    target = {"forget": tofu(known(40)), "retain": tofu(known(40)), "holdout": holdout}
    unlearned = {"forget": tofu(unknown(40)), "retain": tofu(known(40))}
    models = {"target": target, "unlearned": unlearned}
    assert weighed("tofu", models)[0].control is None
    forgotten, kept = weighed("tofu", models | {"ideal": {"forget": tofu(unknown(40))}})
    assert forgotten.recited == {"target": 40, "unlearned": 0, "ideal": 0}
    assert make_verdict(forgotten, kept).outcome == "PASS"


def test_muse_rests_on_passages_and_on_answers_about_them() -> None:
    def muse(rouge: float, kept: float) -> dict[str, list[dict[str, Any]]]:
        scores = dict.fromkeys(("extraction_strength", "probability", "rouge_l_f1"), rouge)
        passage = {"prompt": "p", "gt": "g", "generated": str(rouge), **scores}
        answers = [{"question": "q", "answer": "a", "generated": "a", "rouge_l_f1": kept}] * 10
        return {"verbmem": [passage] * 10, "knowmem_forget": answers, "knowmem_retain": answers}

    models = {"target": muse(1.0, 0.8), "unlearned": muse(0.2, 0.4), "ideal": muse(0.2, 0.2)}
    forgotten, kept = weighed("muse", models)
    assert forgotten.recited == {"target": 10, "unlearned": 0, "ideal": 0}
    gaps = {name: round(gap.value, 3) for name, gap in forgotten.left.items()}
    assert gaps == {"extraction_strength": 0.0, "probability": 0.0, "rouge_l_f1 (knowmem_forget)": 0.333}
    assert kept is not None
    assert kept.share.value == pytest.approx(1 / 3)  # (0.4 − 0.2) / (0.8 − 0.2): unseen questions have 0.2
    assert kept.recited == {}


def test_restor_is_what_was_regained_between_target_and_ideal() -> None:
    def restor(corrupted: float, other: float) -> dict[str, list[dict[str, Any]]]:
        def questions(share: float, spoilt: bool) -> list[dict[str, Any]]:
            shared = {"answers": ["a"], "corrupted": spoilt, "question": "q"}
            scores = [float(i < 10 * share) for i in range(10)]
            return [shared | {"containment": score, "generated": "ab"[int(score)]} for score in scores]

        return {"questions": questions(corrupted, True) + questions(other, False)}

    models = {"target": restor(0.2, 1.0), "unlearned": restor(0.6, 0.8), "ideal": restor(0.7, 1.0)}
    forgotten, kept = weighed("restor", models)
    assert kept is not None
    assert forgotten.recited == {"target": 8, "unlearned": 4, "ideal": 3}  # wrong answers
    assert forgotten.left["wrong"].value == pytest.approx(0.2)
    assert (kept.share.value, kept.recited) == (pytest.approx(0.8), {"target": 10, "unlearned": 8})
    del models["ideal"]
    assert "give evaluate.ideal" in str(RESTOR.weigh(models))
    assert "nothing to regain" in str(RESTOR.weigh(models | {"ideal": restor(0.2, 1.0)}))


def test_a_text_is_changed_by_the_least_difference_of_its_probability() -> None:
    rows = [text(1.0, probability=0.5)] * 12
    other = [*rows[:10], text(1.0, probability=0.50001), text(1.0, probability=0.4)]
    forgotten = weighed("qa", {"target": {"forget": rows}, "unlearned": {"forget": other}})[0]
    assert forgotten.changed == 2


def test_a_prior_of_other_rows_has_no_count_of_them() -> None:
    target = [record | {"index": at} for at, record in enumerate(known(12))]
    models = {name: {"forget": target} for name in ("target", "unlearned", "ideal", "prior")}
    assert weighed("qa", models)[0].recited["prior"] == 12
    models["prior"] = {"forget": target[::-1]}
    assert "prior" not in weighed("qa", models)[0].recited
