"""What a run cannot show is told from its data alone."""

from __future__ import annotations

from typing import Any

import pytest

from msa_lite.data import Row
from msa_lite.pipeline.prepare.questions import least_bound, limits_of_evidence
from msa_lite.recipe import Recipe, load_recipe


def make_rows(count: int, start: int = 0) -> list[Row]:
    return [Row(i, f"q{start + i}", f"a{start + i}") for i in range(count)]


def make_recipe(**changes: Any) -> Recipe:
    recipe = {"target": "t", "prior": "p", "output": "o", "forget": {"data": {"path": "f"}, "alpha": "auto"},
              "retain": {"data": {"path": "r", "sample": "match_forget"}, "beta": "auto"},
              "evaluate": {"ideal": "i"}}  # fmt: skip
    return load_recipe(recipe | changes)


ENOUGH = {"forget": make_rows(30), "retain": make_rows(60, 100)}
PLAIN = {"filter": "off"}
WITHOUT_SAMPLE: dict[str, Any] = {"data": {"path": "r"}, "beta": "auto"}
ONE_POINT: dict[str, Any] = {"forget": {"data": {"path": "f"}, "alpha": 1}, "retain": None}
BOOK = [Row(0, text="a word " * 3000)]


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


def test_most_of_the_scored_rows_learnt_is_told_too() -> None:
    recipe = make_recipe(retain=WITHOUT_SAMPLE)
    rows = ENOUGH | {"retain": make_rows(31, 100), "evaluate.retain": [*make_rows(16, 100), *make_rows(14, 400)]}
    assert "16 of the 30 retain rows" in limits_of_evidence(recipe, rows)[0]


@pytest.mark.parametrize(("rows", "bound"), [(20, 0.103), (24, 0.088), (48, 0.046)])
def test_the_bound_is_that_of_agresti_and_caffo(rows: int, bound: float) -> None:
    assert least_bound(rows, rows) == pytest.approx(bound, abs=5e-4, rel=1e-6)
