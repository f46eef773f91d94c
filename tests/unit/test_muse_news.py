"""MUSE-News: its data beside that of MUSE-Books, its forget sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from msa_lite.data import DataSource, load_rows
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings
from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.pipeline.prepare.run import _pin_benchmark
from msa_lite.recipe import load_recipe
from tests.support.benchmark_data import FOLDS, NEWS, ROWS, make_prompter, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data") / "MUSE-News", NEWS)


def load(data: str, split: str | None = None) -> Benchmark:
    return MUSE.load(make_prompter(), BenchmarkSettings(data, split))


# The data


def test_news_is_asked_as_books_and_reports_tell_them_apart(data: str, tmp_path: Path) -> None:
    books = load(write_data(tmp_path / "copy", ROWS))
    news = load(data)
    assert (books.split, news.split, load(data, "books").split) == ("books", "news", "books")
    assert load(str(tmp_path / "copy"), "news").split == "news"
    assert news.describe() == books.describe() | {"split": "news"}


@pytest.mark.parametrize(
    ("evaluate", "home"),
    [
        ({}, "muse-bench/MUSE-Books"),
        ({"split": "books"}, "muse-bench/MUSE-Books"),
        ({"split": "news"}, "muse-bench/MUSE-News"),
        ({"split": "news", "data": "mine/copy"}, "mine/copy"),
    ],
)
def test_a_run_takes_the_data_of_its_split(
    evaluate: dict[str, str], home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msa_lite.pipeline.prepare.run.pinned_data", lambda place: f"{place}@commit")
    rows = {"data": {"path": "rows.jsonl"}}
    recipe = load_recipe(
        {"target": "t", "prior": "p", "forget": rows, "output": "o", "evaluate": {"benchmark": "muse", **evaluate}}
    )
    pinned = _pin_benchmark(recipe).evaluate
    assert pinned
    assert pinned.data == f"{home}@commit"


def forget_rows(data: str, *overrides: str) -> set[str]:
    """The texts that the shipped recipe forgets, read from a folder in the place of the Hub."""
    place = load_recipe("muse/news", overrides).forget.data
    assert place.path == "muse-bench/MUSE-News"
    return {row.text for row in load_rows(DataSource(data, name=place.name, split=place.split, format="text"))}


def test_the_recipes_forget_sets_grow_or_follow_one_another(data: str) -> None:
    first = forget_rows(data)
    grown = [forget_rows(data, f"forget.data.split=forget_{fold}") for fold in FOLDS]
    assert [len(rows) for rows in grown] == [2, 4, 6, 8]
    assert first == grown[0] < grown[1] < grown[2] < grown[3]
    sust = "forget.data.name=sust"
    requests = [first, *(forget_rows(data, sust, f"forget.data.split=forget_{fold}") for fold in FOLDS[1:])]
    assert [len(rows) for rows in requests] == [2, 2, 2, 2]
    assert set.union(*requests) == grown[-1]  # disjoint, since their sizes add up
