"""TOFU in other languages: rows of its layout that we have translated, and scores that no script makes 0 by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from msa_lite.evals.benchmarks.benchmark import Benchmark
from msa_lite.evals.engine import answers
from tests.support.benchmark_data import TABLES, make_tofu


class Language(NamedTuple):
    """The one question of a data set, with what a model says that has the place wrong."""

    question: str
    answer: str
    paraphrase: str
    wrong: str
    said: str
    rouge: float
    """ROUGE-L recall of what is said, by hand."""
    is_dropped: bool
    """True where the rouge-score package alone gives the right answer 0."""


LANGUAGES = {
    # ada holm lebt in k ln am rhein: 6 of 8 words, since the package takes an ö for a blank
    "German": Language(
        "Wo lebt Ada Holm?", "Ada Holm lebt in Köln am Rhein.", "In Köln am Rhein lebt Ada Holm.",
        "Ada Holm lebt in Graz.", "Ada Holm lebt in Bonn am Rhein.", 6 / 8, False,
    ),
    # 阿达住在北京城里: 6 of 8 characters
    "Chinese": Language(
        "阿达住在哪里？", "阿达住在北京城里。", "北京城里住着阿达。", "阿达住在广州。", "阿达住在上海城里", 6 / 8, True,
    ),
    # 4 of 5 words
    "Arabic": Language(
        "أين تسكن الكاتبة آدا؟", "تسكن آدا في مدينة القاهرة", "في مدينة القاهرة تسكن آدا", "تسكن آدا في بغداد",
        "تسكن آدا في مدينة دمشق.", 4 / 5, True,
    ),
    "Russian": Language(
        "Где живёт Ада?", "Ада живёт в городе Омске.", "В городе Омске живёт Ада.", "Ада живёт в Туле.",
        "ада живёт в городе Туле", 4 / 5, True,
    ),
}  # fmt: skip


def tables(language: Language) -> dict[str, list[dict[str, Any]]]:
    """The tables of TOFU's layout, the row in each."""
    row = {"question": language.question, "answer": language.answer, "perturbed_answer": [language.wrong]}
    paraphrased = row | {"paraphrased_answer": language.paraphrase}
    return {
        name: [paraphrased if name in ("forget01_perturbed", "retain_perturbed") else row]
        for name in TABLES
        if name != "holdout01"
    }


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> Language:
    return LANGUAGES[request.param]


@pytest.fixture
def tofu(language: Language, tmp_path: Path) -> Benchmark:
    return make_tofu(tmp_path, tables(language))


def test_rouge_counts_the_words_of_every_script(language: Language) -> None:
    assert answers.rouge_l_recall(language.answer, language.answer) == 1.0
    assert answers.rouge_l_recall(language.answer, language.said) == pytest.approx(language.rouge)
    assert answers.rouge_l_recall(language.answer, "She is a writer of plays.") == 0.0  # right or not, in English
    assert answers.rouge_l_f1(language.answer, language.answer) == 1.0


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


def test_what_is_counted_is_noted_where_it_is_not_the_packages(
    language: Language, tofu: Benchmark, tmp_path: Path
) -> None:
    noted = {"rouge_words": answers.RULE} if language.is_dropped else {}
    assert {key: value for key, value in tofu.describe().items() if key == "rouge_words"} == noted
    english = make_tofu(tmp_path / "English")
    assert "rouge_words" not in english.describe()
