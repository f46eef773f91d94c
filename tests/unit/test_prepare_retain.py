"""The retain rows that a vector learns, and those that are scored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msa_lite.choose.validation import FEWEST
from msa_lite.data import Row
from msa_lite.pipeline.prepare.questions import divide_retain
from msa_lite.recipe import Recipe, load_recipe


def make_rows(count: int, start: int = 0) -> list[Row]:
    return [Row(i, f"q{start + i}", f"a{start + i}") for i in range(count)]


def make_recipe(sample: str | None = "match_forget", seed: int = 0) -> Recipe:
    models = {"target": "t", "prior": "p", "output": "o", "seed": seed}
    sets = {"forget": {"data": {"path": "f"}}, "retain": {"data": {"path": "r", "sample": sample}}}
    return load_recipe(models | sets)


@given(forget=st.integers(1, 30), retain=st.integers(1, 80), seed=st.integers(0, 5))
def test_a_sample_is_as_large_as_the_forget_set_and_not_scored_while_enough_is_left(
    forget: int, retain: int, seed: int
) -> None:
    rows = {"forget": make_rows(forget, 1000), "retain": make_rows(retain)}
    whole, learnt, scored = divide_retain(make_recipe(seed=seed), rows)
    assert whole == rows["retain"]
    assert len(learnt) == min(forget, retain)
    assert divide_retain(make_recipe(seed=seed), rows) == (whole, learnt, scored)
    if retain - forget >= FEWEST:
        assert sorted(learnt + scored, key=lambda row: row.index) == rows["retain"]
    else:
        assert scored == rows["retain"]


@pytest.mark.parametrize("sample", ["match_forget", None])
@given(named=st.integers(1, 40), seed=st.integers(0, 5))
def test_rows_that_the_recipe_names_for_scores_are_not_learnt(sample: str | None, named: int, seed: int) -> None:
    retain = make_rows(40)
    rows = {"forget": make_rows(20, 1000), "retain": retain, "evaluate.retain": retain[:named]}
    whole, learnt, _ = divide_retain(make_recipe(sample, seed), rows)
    assert whole == (retain[named:] if named <= 20 else retain), "too few others: all are learnt"
    assert {row.question for row in learnt} <= {row.question for row in whole}
    assert len(learnt) == (20 if sample else len(whole))


def test_without_a_sample_all_rows_are_learnt_and_scored() -> None:
    rows = {"forget": make_rows(5, 1000), "retain": make_rows(40)}
    assert divide_retain(make_recipe(None), rows) == (rows["retain"],) * 3


def test_turns_of_one_conversation_are_not_torn_apart() -> None:
    turns = [Row(i, f"turn {i % 3}", "a", earlier=(("first " + str(i // 3), "b"),)) for i in range(90)]
    _, learnt, scored = divide_retain(make_recipe(), {"forget": make_rows(10, 1000), "retain": turns})
    assert len(learnt) == 10
    assert {row.thread for row in learnt} & {row.thread for row in scored} == set()
