"""Validation and test parts, the rows of a run kept apart by their use, and what so few of them cannot show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.choose.validation import FEWEST, PASSAGE, divide_rows
from msa_lite.data import DataSource, Example, Row, sample_rows
from msa_lite.errors import DataError
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Item, ItemSet
from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.evals.benchmarks.qa import QA, load_qa
from msa_lite.evals.engine.generate import Decoding
from msa_lite.pipeline.prepare import lengths
from msa_lite.pipeline.prepare.division import count_repeated, divide_retain, each_once, separate_sets
from msa_lite.pipeline.prepare.lengths import FilterRows, find_filter_rows, fit_rows
from msa_lite.pipeline.prepare.questions import least_bound, limits_of_evidence, load_questions
from msa_lite.pipeline.stages.facts import count_questions
from msa_lite.recipe import Recipe, load_recipe
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


# The rows of a run: kept apart by their use, each once, sampled for a vector; and what they cannot show.


A, B, C, D = (Row(i, f"Question {name}?", f"Answer {name}.") for i, name in enumerate("ABCD"))
TURN = Row(4, "And then?", "Yes.", earlier=(("Question A?", "Answer A."),))
TEXT = Row(5, text="Once upon a time.")


def same(row: Row) -> Row:
    """The row as another file has it: with other capitals and signs, in another place, with another answer."""
    earlier = tuple((question.lower(), answer) for question, answer in row.earlier)
    return Row(99, row.question.upper(), f"Not: {row.answer}" if row.answer else "", row.text.upper(), earlier)


def make_rows(count: int, start: int = 0) -> list[Row]:
    return [Row(i, f"q{start + i}", f"a{start + i}") for i in range(count)]


def make_recipe(sample: str | None = "match_forget", **changes: Any) -> Recipe:
    recipe = {"target": "t", "prior": "p", "output": "o", "forget": {"data": {"path": "f"}, "alpha": "auto"},
              "retain": {"data": {"path": "r", "sample": sample}, "beta": "auto"},
              "evaluate": {"ideal": "i"}}  # fmt: skip
    return load_recipe(recipe | changes)


@pytest.mark.parametrize("row", [A, TURN, TEXT])
def test_rows_to_forget_are_taken_out_of_every_other_set(row: Row) -> None:
    whole = {
        "forget": [row, B],
        "evaluate.forget": [C],
        "retain": [same(row), D],
        "evaluate.retain": [D, same(C)],
        "evaluate.holdout": [same(row), same(D), Row(7, "New?", "Yes.")],
    }
    rows, notes = separate_sets(whole)
    assert {place: len(part) for place, part in rows.items()} == {
        "forget": 2, "evaluate.forget": 1, "retain": 1, "evaluate.retain": 1, "evaluate.holdout": 1,
    }  # fmt: skip
    assert rows["retain"] == rows["evaluate.retain"] == [D]
    assert rows["evaluate.holdout"][0].question == "New?"
    assert [note.partition(" rows")[0] for note in notes] == [
        "retain: 1 of 2", "evaluate.retain: 1 of 2", "evaluate.holdout: 2 of 3",
    ]  # fmt: skip


def test_the_same_words_after_other_turns_are_another_question() -> None:
    other = Row(0, TURN.question, TURN.answer, earlier=(("Question B?", "Answer B."),))
    plain = Row(1, TURN.question, TURN.answer)
    spoken = replace(TURN, system="Be brief.")
    rows = {"forget": [TURN], "retain": [other, plain, spoken, Row(2, "?!", "a"), Row(3, "!?", "a")]}
    assert separate_sets(rows) == (rows, [])
    assert each_once([TURN, spoken]) == [TURN, spoken]


@pytest.mark.parametrize("place", ["retain", "evaluate.retain", "evaluate.holdout", "evaluate.forget", "forget"])
def test_rows_that_earlier_requests_removed_are_neither_kept_nor_a_control(place: str) -> None:
    whole, is_left_out = {"forget": [C], place: [A, B, D]}, place.rpartition(".")[2] != "forget"
    rows, notes = separate_sets(whole, {row.sha256 for row in (A, D)})
    assert rows[place] == ([B] if is_left_out else [A, B, D])
    assert [note.partition(" rows")[0] for note in notes] == ([f"{place}: 2 of 3"] if is_left_out else [])


@pytest.mark.parametrize("place", ["retain", "evaluate.retain", "evaluate.holdout"])
def test_a_set_of_which_nothing_is_left_is_refused(place: str) -> None:
    with pytest.raises(
        DataError, match=rf"^{place}: all 2 rows stand in the forget.* or in that of an earlier request"
    ):
        separate_sets({"forget": [A], place: [same(A), B]}, {B.sha256})


def filter_rows(recipe: Recipe, rows: dict[str, list[Row]], choice: Any = True) -> tuple[set[str], set[str]]:
    """The questions or texts of the rows that a filter is measured on, and those that the final scores keep."""
    prompter = make_prompter()
    fitted = fit_rows(recipe, dict.fromkeys(rows, DataSource("x")), rows, prompter)
    spared = find_filter_rows(recipe, fitted, prompter)
    test = load_questions(recipe, fitted.rows, choice, prompter).test
    final = test.sets["retain"].items if test and "retain" in test.sets else []
    assert sorted(row.thread for row in spared.rows) == sorted({row.thread for row in spared.rows}), "each once"
    assert len(spared.examples) == len(spared.rows) or any(row.text for row in spared.rows)
    return {row.thread for row in spared.rows}, {item.fields.get("question") or item.fields["text"] for item in final}


UNSCORED = {
    "evaluate": None, "forget": {"data": {"path": "f"}, "alpha": 1}, "retain": {"data": {"path": "r"}, "beta": 0}
}  # fmt: skip
OTHERS = {"evaluate": {"ideal": "i", "holdout": {"path": "h"}, "retain": {"path": "e"}}}
TOFU = {"evaluate": {"benchmark": "tofu", "ideal": "i"}}
TWINS = [Row(90 + i, f"Q{i}?", "A") for i in range(300, 320)]  # of rows that evaluate.retain names
LONG = [Row(i, text=" ".join(f"w{i}x{j}" for j in range(600))) for i in range(6)]


@pytest.mark.parametrize(
    ("changes", "rows", "choice", "counts"),  # of rows in the filter, and in the final scores
    [
        ({}, {"retain": make_rows(60)}, True, (10 + 20, 25)),  # the sample and holdout rows
        ({}, {"retain": make_rows(60)}, False, (10 + 20, 50)),
        ({}, {"retain": make_rows(190)}, True, (10 + 50 + 20, 100)),  # half of those beyond 80 others, too
        ({"evaluate": {"ideal": "i", "limit": 20}}, {"retain": make_rows(60)}, True, (10 + 30 + 20, 10)),
        ({}, {"retain": make_rows(21)}, True, (10 + 20, 11)),  # too few left: all are scored; one seed draws both
        (OTHERS, {"retain": make_rows(60), "evaluate.retain": make_rows(20, 300)}, True, (60 + 20, 10)),
        (OTHERS, {"retain": make_rows(60), "evaluate.retain": make_rows(11, 300)}, True, (60 + 20, 11)),
        (OTHERS, {"retain": make_rows(60) + TWINS, "evaluate.retain": make_rows(20, 300)}, True, (60 + 20, 10)),
        ({"retain": None, "evaluate": {"holdout": {"path": "h"}}}, {}, True, (20, 0)),
        ({"retain": {"data": {"path": "r"}}}, {"retain": make_rows(60)}, True, (60 + 20, 30)),  # no others to score
        (UNSCORED, {"retain": make_rows(60)}, False, (60 + 20, 0)),
        (TOFU, {"retain": make_rows(60)}, None, (10 + 20, 0)),  # the user's own rows choose
        (TOFU | {"select": {"score": "tofu"}}, {"retain": make_rows(60)}, None, (10 + 40 + 20, 0)),  # 10 are asked
        (OTHERS, {"retain": make_rows(60), "evaluate.retain": LONG}, True, (60 + 20, 15)),
    ],
    ids=["a sample", "no choice", "many", "a limit", "few left", "others are scored", "few others", "twins of others",
         "none to keep", "no sample", "nothing scored", "published", "published, by its score", "texts"],
)  # fmt: skip
def test_a_filter_sees_all_rows_but_those_that_choose_or_are_kept_at_the_end(
    changes: dict[str, Any], rows: dict[str, list[Row]], choice: bool | None, counts: tuple[int, int]
) -> None:
    recipe = make_recipe(**changes)
    whole = {"forget": make_rows(10, 1000), "evaluate.holdout": make_rows(20, 2000), **rows}
    if choice is None:  # its own questions are not at hand
        fitted = fit_rows(recipe, dict.fromkeys(whole, DataSource("x")), whole, make_prompter())
        left = [row.question for row in fitted.rows["retain"]]
        asked, final = [f"{question.upper()}!" for question in left[:10]], set()
        seen = {row.question for row in find_filter_rows(recipe, fitted, make_prompter(), asked).rows}
    else:
        seen, final = filter_rows(recipe, whole, choice)
        given = {"forget": {"data": {"path": "f"}, "alpha": 2}, "merge": {"filter": 4}}
        if choice:  # with α and λ given, the vectors of the search serve
            assert filter_rows(make_recipe(**changes | given), whole, False)[0] == seen
    assert (len(seen), len(final) * (choice is not None)) == counts
    assert not {question.lower() for question in seen} & final or "data" in changes.get("retain", {}), "kept rows"
    assert not {f"q{1000 + i}" for i in range(10)} & seen, "rows to forget"


def test_a_filter_of_many_rows_draws_evenly_and_rows_about_one_subject_stand_together(monkeypatch: Any) -> None:
    monkeypatch.setattr(lengths, "MOST_ROWS", 40)
    retain = [replace(row, about=f"subject {row.index % 20}") for row in make_rows(300)]
    holdout = [replace(row, index=1000 + row.index) for row in make_rows(100, 2000)]
    rows = {"forget": make_rows(10, 1000), "retain": retain, "evaluate.holdout": holdout}
    recipe, prompter = make_recipe(**UNSCORED), make_prompter()
    fitted = fit_rows(recipe, dict.fromkeys(rows, DataSource("x")), rows, prompter)
    kept = [example.index for example in find_filter_rows(recipe, fitted, prompter).examples]
    assert (len(kept), sum(index < 1000 for index in kept)) == (40, 30)
    assert kept != sorted(kept)
    subjects = [index % 20 for index in kept if index < 1000]
    assert subjects == sorted(subjects, key=subjects.index)


@pytest.mark.parametrize(
    ("rows", "sizes", "told"),
    [
        ([A] * 37, [9] * 37, "few rows for the filter (37 "),
        ([A] * 37, [9000] * 37, "Give 200 rows of"),
        ([A] * 200, [9] * 200, ""),
        ([TEXT], [513] * 2, "few tokens of text for the filter (1,024 "),
        ([TEXT] * 300, [4] * 300, "Give 16,000 tokens of text of"),
        ([TEXT], [513] * 32, ""),
        ([TEXT, *[A] * 200], [513], "few tokens of text for the filter (512 "),
    ],
)
def test_few_rows_of_a_filter_are_told_and_of_texts_their_tokens(rows: list[Row], sizes: list[int], told: str) -> None:
    notes = FilterRows(rows, [Example(0, [7] * size, [7] * size) for size in sizes]).notes
    assert len(notes) == bool(told)
    assert told in "".join(notes)


def test_rows_without_room_for_an_answer_stay_out_of_the_filter() -> None:
    recipe = make_recipe(retain=None, vector={"max_length": 40}, evaluate={"holdout": {"path": "h"}})
    rows = {"forget": [A], "evaluate.holdout": [Row(0, "Who? " * 90, "I."), Row(1, "Who?", "I. " * 90), C]}
    fitted = fit_rows(recipe, dict.fromkeys(rows, DataSource("x")), rows, make_prompter())
    assert {e.index for e in find_filter_rows(recipe, fitted, make_prompter()).examples} == {1, C.index}
    fitted = replace(fitted, rows={**fitted.rows, "evaluate.holdout": rows["evaluate.holdout"][:1]})
    with pytest.raises(DataError, match="no rows to keep with room for an answer"):
        find_filter_rows(recipe, fitted, make_prompter())


def test_a_row_that_stands_twice_is_counted_once() -> None:
    again = Row(8, "question a", "answer a")
    rows = [A, again, Row(9, A.question, "Another answer."), TEXT, Row(10, text=TEXT.text)]
    assert [row.index for row in each_once(rows)] == [0, 9, 5]
    assert [note.partition(" rows")[0] for note in count_repeated({"forget": rows, "retain": [B]})] == ["2 of 5 forget"]


@given(forget=st.integers(1, 30), retain=st.integers(1, 200), seed=st.integers(0, 5))
def test_a_sample_is_as_large_as_the_forget_set_and_not_scored_while_enough_is_left_as_the_plan_counts(
    forget: int, retain: int, seed: int
) -> None:
    rows = {"forget": make_rows(forget, 1000), "retain": make_rows(retain)}
    whole, learnt, scored, spare = divide_retain(make_recipe(seed=seed), rows)
    assert whole == rows["retain"]
    assert len(learnt) == min(forget, retain)
    assert count_questions(make_recipe(), {"forget": forget, "retain": retain})["retain"] == len(scored)
    assert divide_retain(make_recipe(seed=seed), rows) == (whole, learnt, scored, spare)
    if retain - forget >= FEWEST:
        assert sorted(learnt + scored + spare, key=lambda row: row.index) == rows["retain"]
        assert len(spare) == max(0, retain - forget - 80) // 2
    else:
        assert scored == rows["retain"]


@pytest.mark.parametrize("sample", ["match_forget", None])
@given(named=st.integers(1, 40), seed=st.integers(0, 5))
def test_rows_that_the_recipe_names_for_scores_are_not_learnt(sample: str | None, named: int, seed: int) -> None:
    retain = make_rows(40)
    rows = {"forget": make_rows(20, 1000), "retain": retain, "evaluate.retain": retain[:named]}
    whole, learnt, *_ = divide_retain(make_recipe(sample, seed=seed), rows)
    assert whole == (retain[named:] if named <= 20 else retain), "too few others: all are learnt"
    assert {row.question for row in learnt} <= {row.question for row in whole}
    assert len(learnt) == (20 if sample else len(whole))


def test_without_a_sample_all_rows_are_learnt_and_scored() -> None:
    rows = {"forget": make_rows(5, 1000), "retain": make_rows(40)}
    assert divide_retain(make_recipe(None), rows) == (*(rows["retain"],) * 3, [])


def test_turns_of_one_conversation_are_not_torn_apart() -> None:
    turns = [Row(i, f"turn {i % 3}", "a", earlier=(("first " + str(i // 3), "b"),)) for i in range(90)]
    _, learnt, scored, _ = divide_retain(make_recipe(), {"forget": make_rows(10, 1000), "retain": turns})
    assert len(learnt) == 10
    assert {row.thread for row in learnt} & {row.thread for row in scored} == set()


ENOUGH = {"forget": make_rows(30), "retain": make_rows(60, 100)}
PLAIN = {"filter": "off"}
WITHOUT_SAMPLE: dict[str, Any] = {"data": {"path": "r"}, "beta": "auto"}
ONE_POINT: dict[str, Any] = {"forget": {"data": {"path": "f"}, "alpha": 1}, "retain": None}
BOOK = [Row(0, text="a word " * 3000)]
MOST_LEARNT = {"retain": make_rows(31, 100), "evaluate.retain": [*make_rows(16, 100), *make_rows(14, 400)]}


@pytest.mark.parametrize(
    ("changes", "rows", "words"),
    [
        ({}, {}, []),
        ({}, {"forget": make_rows(11)}, ["few forget rows (11)", "PASS cannot be reached with 11"]),
        ({"evaluate": {"ideal": "i", "limit": 20}}, {}, ["PASS cannot be reached with 20"]),
        ({"evaluate": {}}, {}, ["no holdout rows and no ideal"]),
        ({"evaluate": {}}, {"evaluate.holdout": make_rows(30, 200)}, []),
        ({"evaluate": {}}, {"forget": make_rows(21), "evaluate.holdout": make_rows(90, 200)}, ["PASS cannot"]),
        ({}, {"retain": make_rows(41, 100)}, ["30 of the 41 retain rows"]),  # too few are left by the sample
        ({"retain": WITHOUT_SAMPLE}, MOST_LEARNT, ["16 of the 30 retain rows"]),
        ({"retain": WITHOUT_SAMPLE | {"beta": 0}}, {}, ["kept cannot be shown"]),  # the filter's part
        ({"retain": WITHOUT_SAMPLE | {"beta": 0}, "merge": PLAIN}, {}, []),
        ({"retain": WITHOUT_SAMPLE | {"beta": 0}, "merge": PLAIN, "vector": {"hold": 1.0}}, {}, ["kept cannot"]),
        ({"retain": WITHOUT_SAMPLE}, {"evaluate.retain": make_rows(30, 300)}, []),
        ({"retain": WITHOUT_SAMPLE}, {"evaluate.retain": make_rows(40, 100)}, ["kept cannot be shown"]),
        ({"retain": None}, {"forget": make_rows(30) * 2}, ["30 of 60 forget rows repeat"]),
        ({}, {"forget": BOOK}, []),  # 50 passages
        (ONE_POINT, {"forget": BOOK}, ["few forget rows (1)", "PASS"]),
        (ONE_POINT | {"evaluate": None}, {"forget": make_rows(2)}, []),
        ({"evaluate": {"benchmark": "tofu"}}, {"forget": make_rows(2)}, []),
    ],
)  # fmt: skip
def test_each_limit_is_told_where_it_is_one(
    changes: dict[str, Any], rows: dict[str, list[Row]], words: list[str]
) -> None:
    notes = limits_of_evidence(make_recipe(**changes), ENOUGH | rows)
    assert len(notes) == len(words), notes
    assert all(word in note for word, note in zip(words, notes, strict=True)), notes


def test_baselines_fit_no_retain_vector() -> None:
    recipe = make_recipe(retain=WITHOUT_SAMPLE)
    assert limits_of_evidence(recipe, ENOUGH, fits_retain=False) == []


@pytest.mark.parametrize(("rows", "bound"), [(20, 0.103), (24, 0.088), (48, 0.046)])
def test_the_bound_is_that_of_agresti_and_caffo(rows: int, bound: float) -> None:
    assert least_bound(rows, rows) == pytest.approx(bound, abs=5e-4, rel=1e-6)
