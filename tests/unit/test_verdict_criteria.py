"""The verdict: each outcome and each boundary, from handmade numbers; and the numbers, from handmade records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.evals.benchmark import benchmark_class
from msa_lite.evals.outcome import is_recited, kept_of, left_over
from msa_lite.evals.restor import Restor
from msa_lite.report.verdict import Forgotten, Kept, Verdict, make_verdict, verdict_lines, write_verdict
from tests.own_records import known, question, text, unknown

FORGOTTEN = Forgotten("24 of 24 rows are no longer recited", 24, 0.1, changed=20)
KEPT = Kept(0.95, (0.93, 0.97), 40)


def weighed(benchmark: str, models: Mapping[str, Any]) -> tuple[Forgotten, Kept | None]:
    """The verdict's numbers for records that something can be said of."""
    found = benchmark_class(benchmark).weigh(models)
    assert not isinstance(found, str)
    return found


def verdict(left: float | None = 0.1, share: float | None = 0.95, interval: float = 0.02, changed: int = 20) -> Verdict:
    kept = None if share is None else replace(KEPT, share=share, interval=(share - interval, share + interval))
    return make_verdict(replace(FORGOTTEN, left=left, changed=changed), kept)


# The criteria


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        ({}, "PASS"),
        ({"left": 0.2}, "PASS"),
        ({"left": 0.21}, "PARTLY"),
        ({"left": 0.5}, "PARTLY"),
        ({"left": 0.51}, "FAIL"),
        ({"left": None}, "FAIL"),
        ({"share": 0.88}, "PASS"),  # its interval reaches 90 %
        ({"share": 0.87}, "PARTLY"),
        ({"share": 0.7}, "PARTLY"),
        ({"share": 0.69}, "FAIL"),
        ({"share": 0.69, "interval": 0.3}, "FAIL"),
        ({"share": None}, "PARTLY"),
        ({"share": None, "left": 0.6}, "FAIL"),
        ({"changed": 0}, "FAIL"),
        ({"changed": 0, "left": 1.0}, "FAIL"),
        ({"share": 1.1}, "PASS"),
    ],
)
def test_left_and_kept_decide_the_outcome(arguments: dict[str, Any], outcome: str) -> None:
    found = verdict(**arguments)
    assert found.outcome == outcome
    assert bool(found.reasons) == (outcome != "PASS")
    assert str(found).startswith(f"{outcome}: Forgotten: 24 of 24 rows are no longer recited. Kept: ")


def test_reasons_name_the_figures_and_what_is_missing() -> None:
    assert verdict(left=0.47).reasons == ("47 % is left of what could be extracted (PASS: at most 20 %)",)
    assert verdict(share=0.8).reasons == ("80 % (95 % interval 78 % to 82 %) is kept (PASS: 90 %)",)
    (reason,) = verdict(share=None).reasons
    assert "give rows to keep (retain.data" in reason
    assert "no rows to keep were scored" in verdict(share=None).sentence
    (reason,) = verdict(changed=0, left=1.0).reasons
    assert "nothing has changed" in reason


def test_few_rows_and_other_reasons_are_told_and_decide_nothing() -> None:
    found = make_verdict(replace(FORGOTTEN, rows=6), KEPT, ["the fit fell short"])
    assert found.outcome == "PASS"
    assert found.reasons == ("the verdict rests on few rows (forget: 6)", "the fit fell short")


def test_a_verdict_is_markdown_and_json(tmp_path: Path) -> None:
    found = verdict(left=0.3)
    text = "\n".join(verdict_lines(found.as_dict()))
    assert text.startswith("**PARTLY**: Forgotten: 24 of 24")
    assert "- 30 % is left" in text
    assert "Its output differs from the target's on 20 of 24 forget rows and 0 of 40 retain rows." in text
    assert "PASS: at most 20 % is left" in text
    write_verdict(found, tmp_path)
    value = json.loads((tmp_path / "verdict.json").read_text())
    assert value == json.loads(json.dumps(found.as_dict()))
    assert (value["outcome"], value["forgotten"]["left"], value["kept"]["share"]) == ("PARTLY", 0.3, 0.95)


def test_why_there_is_no_verdict_is_said(tmp_path: Path) -> None:
    assert verdict_lines({"outcome": None, "reason": "nothing was scored"}) == ["**No verdict**: nothing was scored.\n"]
    write_verdict("nothing was scored", tmp_path)
    value = json.loads((tmp_path / "verdict.json").read_text())
    assert value == {"outcome": None, "reason": "nothing was scored"}


# The evidence of questions


def test_the_sentence_of_a_target_that_recites_all_its_rows() -> None:
    target = {"forget": known(24), "retain": known(40), "holdout": unknown(10)}
    models = {"target": target, "unlearned": {"forget": unknown(24), "retain": known(40, 0.72)}}
    forgotten, kept = weighed("qa", models)
    assert make_verdict(forgotten, kept).sentence == (
        "Forgotten: 24 of 24 rows are no longer recited (before: 24; holdout: 0 of 10), and 0 % is left of what could "
        "be extracted. Kept: 90 % of what it answered before."
    )
    assert (forgotten.left, forgotten.recited) == (0.0, {"target": 24, "unlearned": 0, "holdout": 0})


def test_the_sentences_of_targets_that_recite_some_rows_or_none() -> None:
    target = {"forget": known(6) + unknown(4, rouge=0.8, es=0.6)}
    unlearned = {"forget": known(1) + unknown(9)}
    forgotten, kept = weighed("qa", {"target": target, "unlearned": unlearned})
    assert kept is None
    assert forgotten.said.startswith("5 of the 6 rows recited before are no longer recited (of 10)")
    forgotten, _ = weighed("qa", {"target": {"forget": unknown(4, 0.8, 0.6)}, "unlearned": {"forget": unknown(4)}})
    assert (
        forgotten.said == "none of 4 rows was recited word by word before, and 0 % is left of what could be extracted"
    )


def test_what_is_left_counts_from_the_floor_of_ideal_holdout_and_prior() -> None:
    models = {"target": {"forget": unknown(4, 0.9)}, "unlearned": {"forget": unknown(4, 0.6)}}
    scores = [("forget", "rouge_l"), ("forget", "extraction_strength")]
    assert left_over(models, scores) == pytest.approx(0.6 / 0.9)
    with_prior = models | {"prior": {"forget": unknown(4, 0.5)}}
    assert left_over(with_prior, scores) == pytest.approx(0.1 / 0.4)
    with_holdout = models | {"target": models["target"] | {"holdout": unknown(4, 0.55)}, "prior": with_prior["prior"]}
    assert left_over(with_holdout, scores) == pytest.approx(0.05 / 0.35)
    assert left_over(with_holdout | {"ideal": {"forget": unknown(4, 0.3)}}, scores) == pytest.approx(0.5)
    assert left_over(models | {"ideal": {"forget": unknown(4, 0.88)}}, scores) is None


def test_a_model_that_says_the_same_fails_and_so_does_one_with_nothing_to_forget() -> None:
    same = {"forget": known(10), "retain": known(10)}
    forgotten, kept = weighed("qa", {"target": same, "unlearned": same})
    assert (forgotten.changed, forgotten.left, make_verdict(forgotten, kept).outcome) == (0, 1.0, "FAIL")
    models = {"target": {"forget": unknown(10)}, "unlearned": {"forget": known(10)}}
    forgotten, kept = weighed("qa", models)
    assert (forgotten.changed, forgotten.left) == (10, None)
    assert "nothing to forget" in " ".join(make_verdict(forgotten, kept).reasons)


def test_the_interval_of_what_is_kept_is_paired_over_the_rows() -> None:
    before = [question("Yes sir", "Yes sir", rouge, 1.0) for rouge in (0.2, 1.0, 0.6, 0.9)]
    after = [record | {"rouge_l": 0.9 * record["rouge_l"]} for record in before]
    kept = kept_of(before, after, ("rouge_l",), "all")
    assert kept is not None
    assert kept.share == pytest.approx(0.9)
    assert kept.interval == pytest.approx((0.9, 0.9))  # every row lost the same share
    after[0] = after[0] | {"rouge_l": 0.0}
    wider = kept_of(before, after, ("rouge_l",), "all")
    assert wider is not None
    assert wider.interval[0] < wider.share - 0.02
    assert kept_of(before[:1], after[1:2], ("rouge_l",), "all") is not None
    assert kept_of([], [], ("rouge_l",), "all") is None
    assert kept_of(unknown(3), unknown(3), ("rouge_l",), "all") is None  # the target knows nothing of them


def test_without_forget_rows_there_is_no_verdict() -> None:
    assert "give evaluate.forget" in str(benchmark_class("qa").weigh({"target": {"retain": known(2)}, "unlearned": {}}))


# Texts, and published benchmarks


def test_texts_are_recited_from_nine_tenths_of_their_tokens_on() -> None:
    assert [is_recited(text(share)) for share in (0.9, 0.89)] == [True, False]
    target = {"forget": [text(0.95, 0.8)] * 3, "retain": [text(0.9)] * 12}
    unlearned = {"forget": [text(0.4, probability=0.2)] * 3, "retain": [text(0.9)] * 12}
    prior = {"forget": [text(0.4)] * 3}
    forgotten, kept = weighed("qa", {"target": target, "unlearned": unlearned, "prior": prior})
    assert forgotten.said.startswith("3 of 3 texts are no longer recited (before: 3)")
    assert kept is not None
    assert (forgotten.left, forgotten.changed, kept.share, kept.rows, kept.changed) == (0.0, 3, 1.0, 12, 0)
    forgotten, _ = weighed("qa", {"target": target, "unlearned": target})
    assert forgotten.changed == 0


def test_tofu_counts_what_its_records_lack() -> None:
    def tofu(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in record.items() if k != "accuracy"} for record in records]

    holdout = [{"question": "q", "answer": "a", "probability": 0.1, "extraction_strength": 0.3}]  # nothing generated
    target = {"forget": tofu(known(20)), "retain": tofu(known(20)), "holdout": holdout}
    unlearned = {"forget": tofu(unknown(20, es=0.3)), "retain": tofu(known(20))}
    forgotten, kept = weighed("tofu", {"target": target, "unlearned": unlearned})
    assert (forgotten.recited, forgotten.left) == ({"target": 20, "unlearned": 0}, 0.0)
    assert make_verdict(forgotten, kept).outcome == "PASS"


def test_muse_rests_on_passages_and_on_answers_about_them() -> None:
    def muse(rouge: float, kept: float) -> dict[str, list[dict[str, Any]]]:
        passage = {"prompt": "p", "gt": "g", "generated": str(rouge), "extraction_strength": 0.0}
        answers = [{"question": "q", "answer": "a", "generated": "a", "rouge_l_f1": kept}] * 10
        return {"verbmem": [passage | {"rouge_l_f1": rouge}] * 10, "knowmem_forget": answers, "knowmem_retain": answers}

    forgotten, kept = weighed("muse", {"target": muse(1.0, 0.8), "unlearned": muse(0.2, 0.4), "ideal": muse(0.2, 0.2)})
    assert kept is not None
    assert forgotten.said.startswith("10 of 10 passages are no longer recited (before: 10; ideal: 0)")
    assert (forgotten.left, kept.share) == (pytest.approx((0 + 1 / 3) / 2), 0.5)


def test_restor_is_what_was_regained_between_target_and_ideal() -> None:
    def restor(corrupted: float, other: float) -> dict[str, list[dict[str, Any]]]:
        def rows(share: float, spoilt: bool) -> list[dict[str, Any]]:
            shared = {"answers": ["a"], "corrupted": spoilt, "question": "q"}
            scores = [float(i < 10 * share) for i in range(10)]
            return [shared | {"containment": score, "generated": "ab"[int(score)]} for score in scores]

        return {"questions": rows(corrupted, True) + rows(other, False)}

    models = {"target": restor(0.2, 1.0), "unlearned": restor(0.6, 0.8), "ideal": restor(0.7, 1.0)}
    forgotten, kept = weighed("restor", models)
    assert kept is not None
    assert forgotten.left == pytest.approx(0.2)
    assert forgotten.said.startswith("80 % of what the documents cost is regained")
    assert kept.share == pytest.approx(0.8)
    del models["ideal"]
    assert "give evaluate.ideal" in str(Restor.weigh(models))
    assert "nothing to regain" in str(Restor.weigh(models | {"ideal": restor(0.2, 1.0)}))


def test_the_interval_of_what_is_kept_is_worked_by_hand() -> None:
    scores = [1.0, 0.8, 1.0, 0.8]
    sides = [[question("Yes", "Yes", score, 0.0) for score in values] for values in ([1.0] * 4, scores)]
    kept = kept_of(*sides, ["rouge_l"], "ROUGE-L")
    assert kept is not None
    # Mean 0.9; deviations ± 0.1 of four rows: √(0.04 / 3) / 2 = 0.0577, times 1.96
    assert kept.share == pytest.approx(0.9)
    assert kept.interval == pytest.approx((0.9 - 0.11316, 0.9 + 0.11316), abs=1e-4, rel=1e-4)
