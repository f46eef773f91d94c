"""What holds for every reference and every answer: what counts, what does not, and where a match may begin and end."""

from __future__ import annotations

import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.evals.engine.answers import accuracy, containment, normalise, split_answer

many = settings(max_examples=100)
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
words = st.lists(st.text("abcdefghijklmnopqrstuvwxyzéłж", min_size=1, max_size=6), min_size=1, max_size=4).map(" ".join)
numbers = st.one_of(st.integers(0, 10**6).map(str), st.floats(0.1, 10**4).map(lambda value: f"{value:.2f}"))
minuses = st.sampled_from("-‐‑‒–−－﹣")
units = st.sampled_from(["", " euros", "%", " %", " kg", "°", " €"])


@many
@given(references, surroundings, closings)
def test_quotes_spaces_and_closing_punctuation_around_it_change_nothing(
    reference: str, before: str, behind: str
) -> None:
    text = f"{before} {reference} {behind}"
    assert normalise(text) == normalise(reference)
    assert accuracy(reference, text) == 1.0


@many
@given(words, surroundings, surroundings)
def test_quotes_and_punctuation_may_touch_a_word(reference: str, before: str, behind: str) -> None:
    assert normalise(before + reference + behind) == normalise(reference)
    assert accuracy(reference, before + reference + behind) == 1.0


@many
@given(words)
def test_case_does_not_count(reference: str) -> None:
    for other in (reference.upper(), reference.title(), reference.swapcase()):
        assert normalise(other) == normalise(reference)
        assert accuracy(reference, other) == accuracy(other, reference) == 1.0


@many
@given(texts)
def test_composition_does_not_count(text: str) -> None:
    forms = {normalise(unicodedata.normalize(form, text)) for form in ("NFC", "NFD")}
    assert forms == {normalise(text)}


@many
@given(numbers, minuses, units, words)
def test_a_sign_always_counts(number: str, minus: str, unit: str, around: str) -> None:
    plain, plus, below = (f"{sign}{number}{unit}" for sign in ("", "+", minus))
    assert len({normalise(text) for text in (plain, plus, below)}) == 3
    for text, others in ((plain, (plus, below)), (plus, (below,)), (below, (plus,))):
        assert accuracy(text, f"{around} {text} {around}") == 1.0
        for other in others:
            assert accuracy(text, other) == accuracy(text, f"{around} {other}, {around}") == 0.0


@many
@given(numbers, minuses, minuses, units)
def test_all_minus_signs_are_one(number: str, one: str, other: str, unit: str) -> None:
    assert normalise(f"{one}{number}{unit}") == normalise(f"{other}{number}{unit}")
    assert normalise(f"A{one}") == normalise(f"a{other}") != normalise("A")


@many
@given(texts)
def test_what_is_normalised_stays_as_it_is(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@many
@given(short, short)
def test_equality_goes_both_ways_and_is_that_of_the_tokens(one: str, other: str) -> None:
    equal = normalise(one) == normalise(other)
    assert equal == (split_answer(one).words == split_answer(other).words)
    if equal and normalise(one):
        assert accuracy(one, other) == accuracy(other, one) == 1.0


@many
@given(references, words, words)
def test_a_reference_is_found_between_words(reference: str, before: str, behind: str) -> None:
    # In quotes, since signs bind across a blank: 5 is not found in "5 %".
    assert accuracy(reference, f"{before}“ {reference} ”{behind}") == 1.0


@many
@given(words, words, words)
def test_words_are_found_between_words_but_not_as_parts_of_them(reference: str, before: str, behind: str) -> None:
    assert accuracy(reference, f"{before} {reference} {behind}") == 1.0
    assert accuracy(reference, f"q{reference}") == accuracy(reference, f"{reference}q") == 0.0
    assert accuracy(reference, f"@{reference}") == accuracy(reference, f"{reference}+") == 0.0


@many
@given(st.text(st.sampled_from("東京大阪ひらがなกรุงเทพที่"), min_size=1, max_size=6), words)
def test_scripts_without_spaces_are_found_anywhere(reference: str, around: str) -> None:
    reference = reference.lstrip("ิีุู่้")  # a mark alone belongs to the character before it
    if reference:
        for text in (f"は{reference}は", f"{around}{reference}{around}", f"5{reference}5"):
            assert accuracy(reference, text) == 1.0


@many
@given(st.lists(texts, max_size=4), texts)
def test_containment_is_the_best_accuracy(answers: list[str], generated: str) -> None:
    assert containment(answers, generated) == max((accuracy(answer, generated) for answer in answers), default=0.0)
