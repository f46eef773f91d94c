"""Validation and test parts of a benchmark and of one's own rows: what is drawn, and what stays together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.choose.validation import FEWEST, PASSAGE, divide_rows
from msa_lite.data import Row, sample_rows
from msa_lite.errors import DataError
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Item, ItemSet
from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.evals.benchmarks.qa import QA, load_qa
from msa_lite.evals.engine.generate import Decoding
from tests.support.benchmark_data import (
    MEMBERSHIP,
    ROWS,
    TABLES,
    TOFU_METRICS,
    make_prompter,
    make_tofu,
    row,
    write_data,
)


def make_qa(**groups: Sequence[int | str | None]) -> Benchmark:
    """Sets of items by the groups of their items; every third row of the data."""
    sets = {
        name: ItemSet([Item(3 * i, {"question": f"{name} {i}"}, group=group) for i, group in enumerate(found)])
        for name, found in groups.items()
    }
    return QA.over("all", sets, make_prompter())


def rows(benchmark: Benchmark, name: str) -> list[int]:
    return [item.index for item in benchmark.sets[name].items]


group_lists = st.lists(st.none() | st.integers(0, 4) | st.sampled_from("ab"), min_size=2, max_size=30)


@settings(max_examples=50)
@given(st.lists(group_lists, min_size=1, max_size=3), st.floats(0.05, 0.5), st.integers())
def test_no_item_is_in_both_parts_and_none_is_lost(
    groups: list[list[int | str | None]], share: float, seed: int
) -> None:
    whole = make_qa(**{f"set{i}": [0, "a", *found] for i, found in enumerate(groups)})
    validation, test = whole.divide(share, seed)
    for name in whole.sets:
        one, other = rows(validation, name), rows(test, name)
        assert sorted(one + other) == rows(whole, name)
        assert one == sorted(one)
        assert other == sorted(other)
        assert one
        assert other
        assert len(one) == max(1, round(share * len(one + other)))
    assert [rows(part, name) for part in whole.divide(share, seed) for name in whole.sets] == [
        rows(part, name) for part in (validation, test) for name in whole.sets
    ]


def test_the_seed_draws_and_the_parts_keep_how_they_are_asked() -> None:
    whole = make_qa(forget=[None] * 40)
    whole = replace(
        whole, sets={"forget": replace(whole.sets["forget"], decoding=Decoding(7), with_z=True, ends=False)}
    )
    parts = whole.divide(0.15, 0)
    assert [part.split for part in parts] == ["all validation", "all test"]
    assert [len(part.sets["forget"].items) for part in parts] == [6, 34]
    for part in parts:
        assert replace(part.sets["forget"], items=[]) == replace(whole.sets["forget"], items=[])
    assert len({tuple(rows(whole.divide(0.15, seed)[0], "forget")) for seed in range(8)}) == 8


def test_rows_that_ask_the_same_question_stay_together() -> None:
    """As where a set holds several answers to one question."""
    items = [Item(i, {"question": f"{i % 20}", "answer": f"{i}"}) for i in range(60)]
    whole = make_qa(retain=[None] * 20)
    whole = replace(whole, sets={"forget": ItemSet(items), **whole.sets})
    for seed in range(5):
        validation, test = whole.divide(0.15, seed)
        assert [len(part.sets["forget"].items) for part in (validation, test)] == [9, 51]  # 3 of 20 questions
        assert not {i % 20 for i in rows(validation, "forget")} & {i % 20 for i in rows(test, "forget")}
        # Where nothing is asked twice, rows are what is drawn.
        assert rows(validation, "retain") == sample_rows(rows(whole, "retain"), 3, seed)


def test_a_sample_of_tofus_questions_keeps_their_authors(tmp_path: Path) -> None:
    tables = TABLES | {"forget01_perturbed": [row(i, 1) for i in range(60)]}
    sampled = make_tofu(tmp_path, tables, limit=30)
    assert {(item.index // 20, item.group) for item in sampled.sets["forget"].items} == {(0, 0), (1, 1), (2, 2)}


def test_muse_says_how_coarse_its_aucs_are(tmp_path: Path) -> None:
    texts = {("privleak", side): [{"text": f"It is {side} {i}"} for i in range(100)] for side in ("forget", "holdout")}
    muse = MUSE.load(make_prompter(), BenchmarkSettings(write_data(tmp_path, ROWS | texts)))
    muse = replace(muse, sets={name: part for name, part in muse.sets.items() if name.startswith("privleak")})
    validation, _ = muse.divide(0.15, 0)
    # √((15 + 15 + 1) / (12 · 15 · 15)) = √0.01148 = 0.107
    assert validation.resolution(["knowmem_r", "min_k", "min_k_pp"]) == (
        "min_k, min_k_pp: measured on 15 × 15 pairs of texts, so that the AUC moves in steps of 1/225, with a standard "
        "error of 0.11 at chance"
    )
    assert str(validation.resolution(["min_k_gap"])).startswith("min_k_gap: measured on 15 × 15 pairs")
    assert validation.resolution(["knowmem_r", "verbmem_f"]) is None


def test_an_auc_rests_on_the_holdout_set_where_there_is_one(tmp_path: Path) -> None:
    tofu = make_tofu(tmp_path)  # 4 questions to be forgotten, 3 that nobody learnt
    assert "4 × 3 pairs of texts, so that the AUC moves in steps of 1/12," in str(tofu.resolution(["min_k"]))
    alone = replace(tofu, sets={name: part for name, part in tofu.sets.items() if name != "holdout"})
    assert alone.resolution(["min_k"]) is None
    assert make_qa(forget=[None], holdout=[None]).resolution(["min_k"]) is None


def test_metrics_are_known_by_name_before_any_model_is_scored(tmp_path: Path) -> None:
    assert {*make_tofu(tmp_path).metric_names()} == TOFU_METRICS | MEMBERSHIP
    rows = {"forget": [Row(0, text="It is over there.")], "retain": [Row(0, "Where is it?", "There.")]}
    names = load_qa(rows, make_prompter()).metric_names()
    assert "rouge_l_r" in names
    assert "rouge_l_f" not in names


def test_a_set_too_small_to_be_divided_is_an_error() -> None:
    whole = make_qa(forget=[None] * 40, retain=[None], holdout=[None] * 5)
    with pytest.raises(DataError) as error:
        whole.divide(0.95, 0)
    assert str(error.value).splitlines() == [
        "0.95 of qa for the choice, and the rest for the scores, leaves a part empty; raise evaluate.limit, where "
        "there is one:",
        "  retain: 1 question cannot be divided",
        "  holdout: 5 questions cannot be divided",
    ]
    with pytest.raises(DataError, match="forget: 0 questions cannot be divided"):
        make_qa(forget=[]).divide(0.5, 0)


def test_whom_an_item_is_about_is_no_part_of_what_is_asked(tmp_path: Path) -> None:
    forget = make_tofu(tmp_path).sets["forget"]
    assert {item.group for item in forget.items} == {0}
    without = replace(forget, items=[replace(item, group=None) for item in forget.items])
    assert without.digest() == forget.digest()


def questions(count: int) -> list[Row]:
    return [Row(i, f"What is {i}?", f"It is {i}.") for i in range(count)]


def texts(*lengths: int) -> list[Row]:
    """Texts of so many words."""
    return [Row(i, text=" ".join(f"word{i}-{n}" for n in range(length))) for i, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("count", "chosen_on", "scored", "name"),
    [
        (1, 1, 1, "all"),
        (11, 11, 11, "all"),
        (12, 6, 6, "test"),
        (25, 12, 13, "test"),
        (60, 30, 30, "test"),
        (400, 30, 370, "test"),
    ],
)
def test_half_of_few_rows_and_no_more_than_thirty_are_chosen_on(
    count: int, chosen_on: int, scored: int, name: str
) -> None:
    rows = {"forget": questions(7), "retain": questions(count), "holdout": questions(5)}
    parts = divide_rows(rows, None, seed=0)
    validation, test = ([row.index for row in part["retain"]] for part in (parts.validation, parts.test))
    assert (len(validation), len(test)) == (chosen_on, scored)
    assert {*validation, *test} == {*range(count)}
    assert name == "all" or not {*validation} & {*test}
    assert parts.names[1] == name
    assert parts.validation["forget"] == parts.test["forget"] == rows["forget"]  # all of them decide
    assert len(parts.validation["holdout"]) == len(parts.test["holdout"]) == 5


def test_without_rows_to_keep_both_parts_are_the_whole() -> None:
    parts = divide_rows({"forget": questions(40)}, None, seed=0)
    assert parts.validation == parts.test == {"forget": questions(40)}
    assert parts.names == ("all", "all")


def test_a_share_is_that_of_the_retain_rows() -> None:
    parts = divide_rows({"forget": questions(8), "retain": questions(12)}, 0.25, seed=0)
    assert [len(part) for part in (*parts.validation.values(), *parts.test.values())] == [8, 3, 8, 9]
    assert parts.names == ("validation", "test")
    assert divide_rows({"forget": questions(1), "retain": questions(1)}, 0.25, seed=0).test["retain"] == []


def test_rows_that_ask_the_same_are_one_question() -> None:
    rows = [Row(i, f"What is {i % 6}?", f"{i}") for i in range(18)]
    parts = divide_rows({"forget": questions(2), "retain": rows}, None, seed=0)
    assert parts.validation["retain"] == parts.test["retain"] == rows  # six questions


def test_one_long_text_is_many_passages() -> None:
    (whole,) = texts(24 * PASSAGE)
    (kept,) = texts(20 * PASSAGE)
    parts = divide_rows({"forget": [whole], "retain": [kept], "holdout": texts(PASSAGE * 2)}, None, seed=0)
    assert [len(part["forget"]) for part in (parts.validation, parts.test)] == [24, 24]
    assert [len(part["retain"]) for part in (parts.validation, parts.test)] == [10, 10]
    assert [len(part["holdout"]) for part in (parts.validation, parts.test)] == [2, 2]
    passages = parts.test["forget"]
    assert "".join(row.text for row in passages) == whole.text
    assert {len(row.text.split()) for row in passages} == {PASSAGE}
    # Few and short: whole. Many, however long: as they are.
    short = texts(20, PASSAGE)
    assert divide_rows({"forget": short}, None, seed=0).test["forget"] == short
    many = texts(*[3 * PASSAGE] * FEWEST)
    assert divide_rows({"forget": many}, None, seed=0).test["forget"] == many


def test_a_book_is_not_scored_from_end_to_end() -> None:
    for limit, count in ((None, 120), (20, 20)):
        parts = divide_rows({"forget": texts(500 * PASSAGE)}, None, 0, limit)
        assert [len(part["forget"]) for part in (parts.validation, parts.test)] == [count, count]
