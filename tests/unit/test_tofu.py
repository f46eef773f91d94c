"""TOFU's metrics by hand: a few made-up records, with the working beside each number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.errors import DataError
from msa_lite.evals.benchmarks.aggregates import NO_IDEAL, NOT_JUDGED
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Record
from msa_lite.evals.benchmarks.tofu import TOFU
from msa_lite.evals.engine import answers
from msa_lite.evals.engine.forward import TokenScores
from msa_lite.evals.scores.records import token_record
from msa_lite.report import Metric
from msa_lite.settings import JudgeSettings
from tests.support.benchmark_data import (
    MEMBERSHIP,
    TABLES,
    TOFU_METRICS,
    UTILITY,
    made_up,
    make_prompter,
    make_tofu,
    token_scores,
    write_tofu,
)

LN2 = math.log(2)


@pytest.fixture(scope="module")
def tofu(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    return make_tofu(tmp_path_factory.mktemp("tofu"))


@pytest.fixture(scope="module")
def full(tofu: Benchmark) -> dict[str, list[Record]]:
    """Records of every set that hold the same everywhere: the right answer at 1/2, paraphrased at 1/4, each wrong one
    at 1/8; generated is half of the right answer's four words."""
    found: dict[str, list[Record]] = {}
    for name, part in tofu.sets.items():
        for index in range(len(part.items)):
            wrong = part.items[index].fields.get("perturbed_answer", [])
            texts = {"answer": [token_scores([0.5] * 3, "111")], "perturbed": [token_scores([0.125])] * len(wrong)}
            if name in ("forget", "retain"):
                texts["paraphrased"] = [token_scores([0.25, 0.25])]
            found.setdefault(name, []).append(made_up(tofu, name, index, "It is there", **texts))
    return found


@pytest.fixture(scope="module")
def records(full: dict[str, list[Record]]) -> dict[str, list[Record]]:
    """The same with a single record where that saves the bootstrap."""
    return full | {name: full[name][:1] for name in ("world_facts", "holdout")}


def one(
    tofu: Benchmark, records: dict[str, list[Record]], set_name: str, changed: Sequence[Record]
) -> dict[str, Metric]:
    """Metrics where one set has other records."""
    return tofu.metrics(records | {set_name: list(changed)}, None)


def test_a_record_holds_the_scores_of_its_texts(tofu: Benchmark) -> None:
    record = made_up(
        tofu,
        "forget",
        0,
        "There, author 0",
        answer=[token_scores([1 / 2, 1 / 2, 1 / 8, 1], "1011")],
        paraphrased=[token_scores([1 / 4, 1 / 4])],
        perturbed=[token_scores([1 / 8]), token_scores([1 / 2])],
    )
    # (ln 2 + ln 2 + ln 8 + 0) / 4 = 5/4 ln 2, the end token counted
    assert record["probability"] == pytest.approx(2 ** (-5 / 4))
    # Without the end token: right, wrong, right. Behind the first two of three all is right: 1 − 2/3.
    assert record["extraction_strength"] == pytest.approx(1 / 3)
    assert record["exact_memorization"] == pytest.approx(2 / 3)
    # ⌊0.4 · 3⌋ = 1: the least likely token alone
    assert record["min_k"] == pytest.approx(math.log(8))
    # Wrong answers: the geometric mean of 1/8 and 1/2 is 1/4; so is the paraphrased right one.
    assert record["truth_ratio"] == pytest.approx(1)
    # 2^(−5/4) beside itself and 1/8 + 1/2
    assert record["choice_probability"] == pytest.approx(2 ** (-5 / 4) / (2 ** (-5 / 4) + 5 / 8))
    # "author 0 is over there" in "there author 0": the longest common subsequence is "author 0".
    assert record["rouge_l"] == pytest.approx(2 / 5)


def test_the_last_token_is_left_out_of_membership_alone(tofu: Benchmark) -> None:
    scores = TokenScores(np.array([-1.0, -2, -3, -4, -5]), np.ones(5, bool), np.array([0.5, 1, -1, 2, -6]))
    whole, cut = (token_record(scores, drop_last, es_floor=False) for drop_last in (False, True))
    # ⌊0.4 · 5⌋ = 2 of all five: (4 + 5)/2 and (6 + 1)/2; ⌊0.4 · 4⌋ = 1 of the first four: 4 and 1
    assert (whole["min_k"], whole["min_k_pp"]) == pytest.approx((4.5, 3.5))
    assert (cut["min_k"], cut["min_k_pp"]) == pytest.approx((4, 1))
    for record in (whole, cut):  # 15/5
        assert (record["n_tokens"], record["loss"], record["probability"]) == pytest.approx((5, 3, math.exp(-3)))


def test_an_empty_paraphrase_leaves_no_truth_ratio(
    tofu: Benchmark, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    rows = [TABLES["forget01_perturbed"][0] | {"paraphrased_answer": text} for text in ("Over there.", " ")]
    loaded = make_tofu(tmp_path, {**TABLES, "forget01_perturbed": rows}).sets["forget"].items
    assert [len(item.texts["paraphrased"]) for item in loaded] == [1, 0]
    texts = {"answer": [token_scores([1 / 2])], "perturbed": [token_scores([1 / 8])]}
    lacking = made_up(tofu, "forget", 0, **texts, paraphrased=[])
    assert lacking["truth_ratio"] is None
    found = one(tofu, records, "forget", [lacking, *records["forget"][1:]])["truth_ratio_f"]
    assert (found.n, found.skipped) == (3, 1)
    # Real authors have no paraphrases: 1/8 beside the answer's 1/2.
    assert made_up(tofu, "real_authors", 0, **texts)["truth_ratio"] == pytest.approx(1 / 4)


NO_TEXT = [float("nan"), float("-inf"), ["a"], {"a": 1}]


@pytest.mark.parametrize("column", ["question", "answer", "paraphrased_answer", "paraphrased_question"])
@pytest.mark.parametrize("cell", NO_TEXT)
def test_a_cell_that_is_no_text_is_refused(column: str, cell: Any, tmp_path: Path) -> None:
    rows = TABLES["forget01_perturbed"]
    with pytest.raises(DataError, match=rf"_perturbed': .*jsonl, row 1 \(line 2\), column '{column}': .* no text"):
        make_tofu(tmp_path, {**TABLES, "forget01_perturbed": [rows[0], rows[1] | {column: cell}]})


@pytest.mark.parametrize("cells", ["It is 3 miles away.", *([cell] for cell in NO_TEXT)])
def test_wrong_answers_that_are_no_texts_are_refused(cells: Any, tmp_path: Path) -> None:
    rows = [found | {"perturbed_answer": cells} for found in TABLES["retain_perturbed"]]
    with pytest.raises(DataError, match=r"retain_perturbed': .*row 0 \(line 1\), column 'perturbed_answer'.* is no "):
        make_tofu(tmp_path, {**TABLES, "retain_perturbed": rows})


def test_numbers_of_a_data_set_are_as_they_are_written(tmp_path: Path) -> None:
    number = "It costs {}."
    rows = [row | {"answer": number, "perturbed_answer": [number, number]} for row in TABLES["forget01_perturbed"]]
    data = Path(write_tofu(tmp_path, {**TABLES, "forget01_perturbed": rows}))
    file = data / "forget01_perturbed/train.jsonl"
    file.write_text(file.read_text().replace(f'"{number}"', "1.10").replace("1.10]", "0]"))
    item = TOFU.load(make_prompter(), BenchmarkSettings(str(data), "forget01")).sets["forget"].items[0]
    assert (item.fields["answer"], item.fields["perturbed_answer"]) == ("1.10", ["1.10", "0"])


@pytest.mark.parametrize("missing", [None, " "])
def test_an_empty_question_is_not_asked(missing: str | None, records: dict[str, list[Record]], tmp_path: Path) -> None:
    rows = list(TABLES["forget01_perturbed"])
    rows[1] = rows[1] | {"question": missing}
    tofu = make_tofu(tmp_path, {**TABLES, "forget01_perturbed": rows})
    item = tofu.sets["forget"].items[1]
    assert item not in tofu.sets["forget"].scored
    assert item not in tofu.sets["forget"].answered
    record = tofu.score(tofu, "forget", {"index": 1, **item.fields})
    scores = ("probability", "extraction_strength", "exact_memorization", "truth_ratio", "rouge_l")
    assert [record[name] for name in scores] == [None] * 5
    changed = records | {"forget": [records["forget"][0], record, *records["forget"][2:]]}
    found = tofu.metrics(changed, changed)
    for name in ("probability_f", "rouge_l_f", "truth_ratio_f", "extraction_strength", "exact_memorization"):
        assert (found[name].n, found[name].skipped) == (3, 1)
    asked = tofu.judge_calls(changed, records, JudgeSettings())
    assert [ask.index for ask in asked if ask.set_name == "forget"] == [0, 2, 3]


def test_the_forget_metrics_are_means_over_items(tofu: Benchmark, records: dict[str, list[Record]]) -> None:
    halves = {"answer": [token_scores([0.5, 0.5, 1], "111")], "perturbed": [token_scores([0.25])]}
    low = made_up(tofu, "forget", 0, "", paraphrased=[token_scores([0.5])], **halves)  # R = 1/2
    high = made_up(
        tofu, "forget", 1, "Author 1 is over there!", paraphrased=[token_scores([0.0625])], **halves
    )  # R = 4
    found = one(tofu, records, "forget", [low, high])
    assert found["truth_ratio_f"].value == pytest.approx((1 / 2 + 1 / 4) / 2)
    # sd of 1/2 and 1/4 is 1/(4 √2); through √2
    assert found["truth_ratio_f"].stderr == pytest.approx(1 / 8)
    assert found["probability_f"].value == pytest.approx(math.exp(-2 * LN2 / 3))
    assert found["rouge_l_f"].value == pytest.approx(1 / 2)
    assert found["extraction_strength"].value == found["exact_memorization"].value == 1
    assert {name: found[name].higher_is_better for name in ("probability_f", "rouge_l_f", "truth_ratio_f")} == {
        "probability_f": False, "rouge_l_f": False, "truth_ratio_f": True,
    }  # fmt: skip


def test_model_utility_is_the_harmonic_mean_of_its_parts(tofu: Benchmark, full: dict[str, list[Record]]) -> None:
    found = tofu.metrics(full, None)
    # retain: p = 1/2; 3 words of 5; R = (1/8)/(1/4) = 1/2. Real authors: two wrong answers of 1/8 beside 1/2;
    # R = (1/8)/(1/2). World facts: one wrong answer.
    wanted = {
        "probability_r": 1 / 2, "rouge_l_r": 2 / 5, "truth_ratio_r": 1 / 2,
        "probability_ra": 0.5 / 0.75, "rouge_l_ra": 2 / 5, "truth_ratio_ra": 3 / 4,
        "probability_wf": 0.5 / 0.625, "rouge_l_wf": 2 / 5, "truth_ratio_wf": 3 / 4,
    }  # fmt: skip
    assert {name: found[name].value for name in UTILITY} == pytest.approx(wanted)
    assert found["model_utility"].value == pytest.approx(9 / sum(1 / value for value in wanted.values()))
    outside = [value for name, value in wanted.items() if not name.endswith("_r")]
    assert found["model_utility_ra_wf"].value == pytest.approx(6 / sum(1 / value for value in outside))
    assert (found["model_utility"].n, found["model_utility"].skipped) == (3 + 2 + 3, 0)
    assert found["model_utility"].stderr == pytest.approx(0, abs=1e-12)  # the records of a set are all alike


def test_one_part_at_zero_takes_model_utility_to_zero(tofu: Benchmark, records: dict[str, list[Record]]) -> None:
    changed = [record | {"rouge_l": 0.0} for record in records["world_facts"]]
    found = one(tofu, records, "world_facts", changed)
    assert found["model_utility"].value == found["model_utility_ra_wf"].value == 0
    changed = [record | {"rouge_l": None} for record in records["world_facts"]]
    found = one(tofu, records, "world_facts", changed)
    assert found["model_utility"].value is None
    assert found["model_utility"].note
    assert found["probability_wf"].value is not None


def test_forget_quality_is_a_test_between_two_models(tofu: Benchmark, records: dict[str, list[Record]]) -> None:
    def with_ratios(*ratios: float | None) -> dict[str, list[Record]]:
        forget = [record | {"truth_ratio": ratio} for record, ratio in zip(records["forget"], ratios, strict=True)]
        return records | {"forget": forget}

    low, high = with_ratios(0.1, 0.2, 0.3, 0.4), with_ratios(0.5, 0.6, 0.7, 0.8)
    # Of the C(8, 4) = 70 ways to deal eight values two put them as far apart as can be.
    assert tofu.metrics(low, high)["forget_quality"].value == pytest.approx(2 / 70)
    partly = tofu.metrics(with_ratios(0.1, None, 0.3, 0.4), high)["forget_quality"]
    # Three of four: 2 / C(7, 3)
    assert (partly.value, partly.n, partly.skipped) == (pytest.approx(2 / 35), 3, 1)
    undefined = with_ratios(None, None, None, None)
    for mine, ideal, side in ((low, undefined, "ideal"), (undefined, low, "model")):
        found = tofu.metrics(mine, ideal)["forget_quality"]
        assert (found.value, found.n, found.skipped) == (None, 0, 4)
        assert found.note == f"no item of the {side} has this score"
    alone = tofu.metrics(low, None)["forget_quality"]
    assert (alone.value, alone.n, alone.note) == (None, 0, NO_IDEAL)


def test_membership_is_scored_beside_a_holdout(tofu: Benchmark, full: dict[str, list[Record]]) -> None:
    def sides(forget: Sequence[float], holdout: Sequence[float]) -> dict[str, list[Record]]:
        found = dict(full)
        for name, values in (("forget", forget), ("holdout", holdout)):
            pairs = zip(full[name], values, strict=False)
            found[name] = [record | {"min_k": value, "min_k_pp": -value} for record, value in pairs]
        return found

    mine, ideal = sides([1, 2], [1.5, 3]), sides([2, 2], [2, 2])
    found = tofu.metrics(mine | {"world_facts": []}, ideal)
    # 1 < 1.5, 1 < 3 and 2 < 3, but 2 > 1.5: three of four pairs; turned around, one of four. The ideal has ties only.
    assert {name: found[name].value for name in MEMBERSHIP} == {
        "min_k": 3 / 4, "min_k_pp": 1 / 4, "min_k_gap": 1 / 4, "min_k_pp_gap": 1 / 4,
    }  # fmt: skip
    assert found["min_k"].n == 4
    alone = tofu.metrics(mine | {"world_facts": []}, None)
    assert (alone["min_k"].value, alone["min_k_gap"].value, alone["min_k_gap"].note) == (3 / 4, None, NO_IDEAL)


def test_every_metric_has_a_name_and_a_reason_where_it_has_no_value(
    tofu: Benchmark, records: dict[str, list[Record]], tmp_path: Path
) -> None:
    assert set(tofu.metrics(records, None)) == TOFU_METRICS | MEMBERSHIP
    without = make_tofu(tmp_path, {name: rows for name, rows in TABLES.items() if name != "holdout01"})
    shown = {name: items for name, items in records.items() if name != "holdout"}
    assert set(without.metrics(shown, shown)) == TOFU_METRICS
    assert all(metric.note for metric in tofu.metrics(records, None).values() if metric.value is None)
    judged = {name: metric.note for name, metric in tofu.metrics(records, records).items() if name[:4] == "acc_"}
    assert judged == dict.fromkeys(("acc_forget", "acc_recover", "acc_retain"), NOT_JUDGED)


def test_what_a_judges_reply_is_worth(tofu: Benchmark, records: dict[str, list[Record]]) -> None:
    ideal = {name: [record | {"generated": "Nobody knows."} for record in items] for name, items in records.items()}
    asked = {(item.set_name, item.index): item for item in tofu.judge_calls(records, ideal, JudgeSettings())}
    assert len(asked) == 4 + 3
    worth = {
        "forget": {"Author 0 is": (0, 0), "Nobody knows": (1, 1), "It is 1 miles": (1, 0), "Z": (1, 0)},
        "retain": {"Author 10 is": (1,), "Nobody knows": (1,), "It is 1 miles": (0,), "Z": (0,)},
    }
    keys = {"forget": ("acc_forget", "acc_recover"), "retain": ("acc_retain",)}
    for name, wanted in worth.items():
        item = asked[name, 0]
        assert len(item.ask.letters) == 2 + {"forget": 3, "retain": 2}[name]
        for start, values in wanted.items():
            lines = [line for line in item.ask.user.splitlines() if line[1:].startswith(f". {start}")]
            letter = lines[0][0] if lines else "Z"
            assert item.scores[letter] == dict(zip(keys[name], values, strict=True)) | {"merged": False}


def test_judged_metrics_are_means_of_what_was_judged(tofu: Benchmark, records: dict[str, list[Record]]) -> None:
    said = [(0, 0, True), (1, 1, True), (1, 0, False)]
    forget = [
        record | {"judge": {"valid": valid, "acc_forget": forgotten, "acc_recover": recovered, "merged": False}}
        for record, (forgotten, recovered, valid) in zip(records["forget"], said, strict=False)
    ]
    found = tofu.metrics(records | {"forget": [*forget, records["forget"][3]]}, records)
    assert found["acc_forget"].value == pytest.approx(2 / 3)
    assert found["acc_recover"].value == pytest.approx(1 / 3)
    assert (found["acc_forget"].n, found["acc_forget"].skipped) == (3, 1)
    assert "1 replies of the judge were invalid" in str(found["acc_forget"].note)
    assert found["acc_retain"].note == NOT_JUDGED
    for record in forget[:2]:
        record["judge"]["merged"] = True
    assert "for 2 items the right" in str(tofu.metrics(records | {"forget": forget}, records)["acc_recover"].note)
    assert tofu.metrics(records | {"forget": forget}, None)["acc_forget"].note == NO_IDEAL


def test_paraphrases_are_given_in_the_order_of_the_questions_or_not_at_all(tmp_path: Path) -> None:
    forget = [row | {"paraphrased_question": f"Say: {row['question']}"} for row in TABLES["forget01_perturbed"]]
    data = write_tofu(tmp_path / "with", {**TABLES, "forget01_perturbed": forget})
    questions = [str(row["question"]) for row in reversed(forget)]
    settings = BenchmarkSettings(data, "forget01")
    assert TOFU.wordings(settings, questions) == {"paraphrased": [f"Say: {question}" for question in questions]}
    assert TOFU.wordings(settings, [*questions, "Where is nobody?"]) == {}
    without = BenchmarkSettings(write_tofu(tmp_path / "without"), "forget01")
    assert TOFU.wordings(without, questions) == {}


# In other languages. By name: the right answer, what a model says that has the place wrong, its ROUGE-L recall by hand,
# and whether the rouge-score package alone gives the right answer 0.

LANGUAGES = {
    # ada holm lebt in k ln am rhein: 6 of 8 words, since the package takes an ö for a blank
    "German": ("Ada Holm lebt in Köln am Rhein.", "Ada Holm lebt in Bonn am Rhein.", 6 / 8, False),
    "Chinese": ("阿达住在北京城里。", "阿达住在上海城里", 6 / 8, True),  # of 8 characters
    "Arabic": ("تسكن آدا في مدينة القاهرة", "تسكن آدا في مدينة دمشق.", 4 / 5, True),
    "Russian": ("Ада живёт в городе Омске.", "ада живёт в городе Туле", 4 / 5, True),
}


@pytest.mark.parametrize(("answer", "said", "rouge", "is_dropped"), LANGUAGES.values(), ids=LANGUAGES)
def test_rouge_counts_the_words_of_every_script_and_notes_where_they_are_not_the_packages(
    answer: str, said: str, rouge: float, is_dropped: bool, tmp_path: Path
) -> None:
    assert answers.rouge_l_recall(answer, answer) == answers.rouge_l_f1(answer, answer) == 1.0
    assert answers.rouge_l_recall(answer, said) == pytest.approx(rouge)
    assert answers.rouge_l_recall(answer, "She is a writer of plays.") == 0.0  # right or not, in English
    tables = {name: [found | {"answer": answer} for found in rows] for name, rows in TABLES.items()}
    assert make_tofu(tmp_path / "told", tables).describe().get("rouge_words") == (answers.RULE if is_dropped else None)
    assert "rouge_words" not in make_tofu(tmp_path / "English").describe()


def test_a_text_of_two_scripts_goes_by_most_of_its_letters() -> None:
    told = {
        "Ada, 阿达, lives in 1968 AD": False,
        "阿达于1968年出生在北京": True,
        "Tác giả sống ở Hà Nội": False,
        "…": False,
    }
    assert {text: answers.is_other_script(text) for text in told} == told
    # 阿 达 于 1968 年 出 生 在 北 京: the year alone is 1 of 10, where the package would have 1 of 1
    assert answers.rouge_l_recall("阿达于1968年出生在北京", "1968") == pytest.approx(1 / 10)
    # ada lives in 1968 ad: the name in Chinese does not count, as in published English numbers
    assert answers.rouge_l_recall("Ada, 阿达, lives in 1968 AD", "ada lives in 1968") == pytest.approx(4 / 5)
