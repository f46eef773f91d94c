"""What holds for every input of the metrics, and of the rule for right answers."""

from __future__ import annotations

import tracemalloc
import unicodedata
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from msa_lite.evals.engine import answers, scoring
from msa_lite.evals.engine.answers import accuracy, containment, normalise, split_answer

many = settings(max_examples=50)
matches = st.lists(st.booleans(), min_size=1, max_size=30).map(np.array)
log_probs = st.lists(st.floats(-50, 0), min_size=1, max_size=40).map(np.array)
losses = st.floats(0, 20)
shares = st.floats(0, 1)
# Whole numbers tie often and stay apart under the maps below.
scores = st.lists(st.integers(-50, 50), min_size=1, max_size=30).map(lambda values: np.array(values, float))
words = st.lists(st.sampled_from(["the", "cat", "cats", "sit", "sits", "a", "1975"]), max_size=8).map(" ".join)
RISING: list[Callable[[np.ndarray], np.ndarray]] = [
    lambda x: 3 * x - 7,
    lambda x: x**3,
    lambda x: np.exp(x / 10),
    lambda x: np.arctan(x),
]
rising = st.sampled_from(RISING)


@many
@given(matches)
def test_extraction_strength_goes_by_the_last_mismatch_alone(values: np.ndarray) -> None:
    strength = scoring.extraction_strength(values)
    assert 0 <= strength <= 1
    assert (strength == 1) == values.all()
    assert strength <= scoring.exact_memorization(values) + 1e-12
    if not values.all():
        last = int(np.flatnonzero(~values)[-1])
        before = np.concatenate([np.zeros(last, bool), values[last:]])
        assert scoring.extraction_strength(before) == strength
    assert scoring.extraction_strength(values, floor=True) == pytest.approx(max(strength, 1 / len(values)))


@many
@given(words, words, st.booleans())
def test_rouge_is_that_of_the_package(first: str, second: str, stem: bool) -> None:
    known = RougeScorer(["rougeL"], use_stemmer=stem).score(first, second)["rougeL"]
    assert answers.rouge_l_f1(first, second, stem) == known.fmeasure
    assert not stem or answers.rouge_l_recall(first, second) == known.recall


def test_a_reference_of_a_book_takes_little_more_memory_than_its_text() -> None:
    book = "It is 3.14 by the mill's weir. " * 30_000
    tracemalloc.start()
    try:
        assert answers.rouge_l_recall(book, "by the weir") == 3 / 270_000
        assert answers.accuracy(book, "by the weir") == 0.0
        assert len(normalise(book)) > 750_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(book)
    assert answers.accuracy(book, f"So: {book}") == 1.0


@many
@given(words, words)
def test_rouge_lies_within_0_and_1_and_f1_is_symmetric(first: str, second: str) -> None:
    assert 0 <= answers.rouge_l_recall(first, second) <= 1
    assert answers.rouge_l_f1(first, second) == pytest.approx(answers.rouge_l_f1(second, first))
    assert answers.rouge_l_f1(first, first) == float(bool(first))


@many
@given(scores, scores, rising)
def test_membership_auc_goes_by_the_order_alone(
    first: np.ndarray, second: np.ndarray, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    auc = scoring.membership_auc(first, second)
    assert 0 <= auc <= 1
    assert scoring.membership_auc(change(first), change(second)) == auc
    assert scoring.membership_auc(second, first) == pytest.approx(1 - auc)
    assert scoring.membership_auc(first, first) == 0.5
    assert auc == pytest.approx(np.mean([(b > a) + (b == a) / 2 for a in first for b in second]))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(30, 300))
def test_bootstrap_error_of_a_mean_is_the_textbooks(seed: int, count: int) -> None:
    sample = np.random.default_rng(seed).normal(size=count)
    _, _, error = scoring.mean_and_error(sample)
    # 1000 rounds know a deviation to 1/√2000 ≈ 2.2 %; redrawing gives √((n − 1)/n) of the unbiased one.
    assert scoring.spread(scoring.bootstrap(np.mean, [sample], seed=seed)) == pytest.approx(error, rel=0.15)


many_texts = settings(max_examples=100)
# Characters that the rule tells apart. Half the texts consist of them alone.
_TELLING = "aeZé5²٣ -–−—.,:_%°$€<±+=/#@'’\"()*\n\t\u00a0\u200d\ufe0f\u0301\u0e49กที京カンー🎉🇩🇪∞ｶﾞＡ％"
texts = st.one_of(
    st.text(st.sampled_from(_TELLING), max_size=12),
    st.text(st.one_of(st.sampled_from(_TELLING), st.characters(exclude_categories=["Cs"])), max_size=20),
)
short = st.text("a5-+. ", max_size=4)  # often equal
references = texts.filter(lambda text: bool(normalise(text)))
surroundings = st.text("  \n\t\u00a0“”‘’\"'()[]«»!?;…", max_size=4)
closings = st.text("“”‘’\"')]»!?;…", max_size=3)
plain_words = st.lists(st.text("abcdefghijklmnopqrstuvwxyzéłж", min_size=1, max_size=6), min_size=1, max_size=4).map(
    " ".join
)
numbers = st.one_of(st.integers(0, 10**6).map(str), st.floats(0.1, 10**4).map(lambda value: f"{value:.2f}"))
minuses = st.sampled_from("-‐‑‒–−－﹣")
units = st.sampled_from(["", " euros", "%", " %", " kg", "°", " €"])


@many_texts
@given(references, surroundings, closings)
def test_quotes_spaces_and_closing_punctuation_around_it_change_nothing(
    reference: str, before: str, behind: str
) -> None:
    text = f"{before} {reference} {behind}"
    assert normalise(text) == normalise(reference)
    assert accuracy(reference, text) == 1.0


@many_texts
@given(plain_words, surroundings, surroundings)
def test_quotes_and_punctuation_may_touch_a_word(reference: str, before: str, behind: str) -> None:
    assert normalise(before + reference + behind) == normalise(reference)
    assert accuracy(reference, before + reference + behind) == 1.0


@many_texts
@given(plain_words)
def test_case_does_not_count(reference: str) -> None:
    for other in (reference.upper(), reference.title(), reference.swapcase()):
        assert normalise(other) == normalise(reference)
        assert accuracy(reference, other) == accuracy(other, reference) == 1.0


@many_texts
@given(texts)
def test_composition_does_not_count(text: str) -> None:
    forms = {normalise(unicodedata.normalize(form, text)) for form in ("NFC", "NFD")}
    assert forms == {normalise(text)}


@many_texts
@given(numbers, minuses, units, plain_words)
def test_a_sign_always_counts(number: str, minus: str, unit: str, around: str) -> None:
    plain, plus, below = (f"{sign}{number}{unit}" for sign in ("", "+", minus))
    assert len({normalise(text) for text in (plain, plus, below)}) == 3
    for text, others in ((plain, (plus, below)), (plus, (below,)), (below, (plus,))):
        assert accuracy(text, f"{around} {text} {around}") == 1.0
        for other in others:
            assert accuracy(text, other) == accuracy(text, f"{around} {other}, {around}") == 0.0


@many_texts
@given(numbers, minuses, minuses, units)
def test_all_minus_signs_are_one(number: str, one: str, other: str, unit: str) -> None:
    assert normalise(f"{one}{number}{unit}") == normalise(f"{other}{number}{unit}")
    assert normalise(f"A{one}") == normalise(f"a{other}") != normalise("A")


@many_texts
@given(texts)
def test_what_is_normalised_stays_as_it_is(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@many_texts
@given(short, short)
def test_equality_goes_both_ways_and_is_that_of_the_tokens(one: str, other: str) -> None:
    equal = normalise(one) == normalise(other)
    assert equal == (split_answer(one).words == split_answer(other).words)
    if equal and normalise(one):
        assert accuracy(one, other) == accuracy(other, one) == 1.0


@many_texts
@given(references, plain_words, plain_words)
def test_a_reference_is_found_between_words(reference: str, before: str, behind: str) -> None:
    # In quotes, since signs bind across a blank: 5 is not found in "5 %".
    assert accuracy(reference, f"{before}“ {reference} ”{behind}") == 1.0


@many_texts
@given(plain_words, plain_words, plain_words)
def test_words_are_found_between_words_but_not_as_parts_of_them(reference: str, before: str, behind: str) -> None:
    assert accuracy(reference, f"{before} {reference} {behind}") == 1.0
    assert accuracy(reference, f"q{reference}") == accuracy(reference, f"{reference}q") == 0.0
    assert accuracy(reference, f"@{reference}") == accuracy(reference, f"{reference}+") == 0.0


@many_texts
@given(st.text(st.sampled_from("東京大阪ひらがなกรุงเทพที่"), min_size=1, max_size=6), plain_words)
def test_scripts_without_spaces_are_found_anywhere(reference: str, around: str) -> None:
    reference = reference.lstrip("ิีุู่้")  # a mark alone belongs to the character before it
    if reference:
        for text in (f"は{reference}は", f"{around}{reference}{around}", f"5{reference}5"):
            assert accuracy(reference, text) == 1.0


@many_texts
@given(st.lists(texts, max_size=4), texts)
def test_containment_is_the_best_accuracy(answers: list[str], generated: str) -> None:
    assert containment(answers, generated) == max((accuracy(answer, generated) for answer in answers), default=0.0)
