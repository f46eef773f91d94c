"""Right or wrong: which answers equal a reference, contain it, or do neither."""

from __future__ import annotations

import unicodedata
from typing import Literal

import pytest

from msa_lite.evals.engine.answers import accuracy, containment, normalise

Relation = Literal["equal", "contained", "neither"]

# By kind: (reference, answer, relation). "contained": in the answer, but not equal to it.
PAIRS: dict[str, list[tuple[str, str, Relation]]] = {
    "words": [
        ("Yarheath.", "She was born in Yarheath, they say.", "contained"),
        ("Yar", "Yarheath", "neither"),
        ("New York", "new  YORK\n", "equal"),
        ("New York", "NewYork", "neither"),
        ("Paris", "Paris & London", "contained"),
        ("Paris", "Paris – the capital", "contained"),
        ("Paris", "**Paris**", "equal"),
        ("Paris", "_Paris_", "equal"),
        ("Paris", "- Paris\n- London", "contained"),
        ("...", "...", "neither"),
        ("", "anything", "neither"),
    ],
    "numbers": [
        ("1975", "In 1975.", "contained"),
        ("5", "2.5", "neither"),
        (".5", "5", "neither"),
        (".5", "It is .5, roughly", "contained"),
        ("5", "Wait ...5", "contained"),
        ("2", "1..2", "contained"),
        ("1,000", "1000", "neither"),
        ("1,000", "about 1,000, or so", "contained"),
        ("10²", "102", "neither"),
        ("10", "10²", "neither"),
        ("٣٫٥", "٣٥", "neither"),
        ("½", "2½", "neither"),
    ],
    "signs": [
        ("400 euros", "The balance is −400 euros", "neither"),
        ("−400 euros", "The balance is -400 euros.", "contained"),
        ("-400", "−400", "equal"),
        ("-400", "－400", "equal"),
        ("-400", "− 400", "equal"),
        ("400", "− 400", "neither"),
        ("400", "- 400", "equal"),  # an item of a list
        ("-400", "-$ 400", "neither"),
        ("5", "(-5)", "neither"),
        ("5", "+5", "neither"),
        ("-∞", "∞", "neither"),
        ("1e-5", "1e5", "neither"),
        ("1e-5", "1E−5", "equal"),
        ("10⁻⁵", "10⁵", "neither"),
        ("Na⁺", "Na⁻", "neither"),
        ("A -> B", "A->B", "equal"),
        ("A -> B", "A > B", "neither"),
        ("5", "< 5", "neither"),
    ],
    "math": [
        ("x=5", "x = 5", "equal"),
        ("5", "x = 5", "contained"),
        ("5", "x=5", "neither"),
        ("x ≥ 5", "x > 5", "neither"),
        ("x^2", "x2", "neither"),
        ("1/2", "12", "neither"),
        ("√2", "2", "neither"),
        ("5 - 3", "5-3", "equal"),
        ("-3", "5 - 3", "neither"),
        ("-3", "= -3", "contained"),
    ],
    "dates": [
        ("1990-05-06", "1990–05–06", "equal"),
        ("1990-05-06", "1990/05/06", "neither"),
        ("06.05.1990", "06051990", "neither"),
        ("1990", "1990-05-06", "neither"),
        ("3:30", "330", "neither"),
        ("3:30 pm", "3:30pm", "equal"),
    ],
    "ranges": [
        ("1990–1995", "1990-1995", "equal"),
        ("1990–1995", "1990 - 1995", "equal"),
        ("1990–1995", "1990 1995", "neither"),
        ("1990", "1990–1995", "neither"),
        ("1990", "1990 – 1995", "neither"),
        ("$5-$10", "$5 – $10", "equal"),
        ("5%–10%", "5 % - 10 %", "equal"),
        ("1990", "in 1990 – the year", "contained"),
        ("5\n- 3 apples", "5 3 apples", "equal"),  # a list, not a range
    ],
    "units": [
        ("5", "5 kg", "contained"),
        ("5", "5kg", "neither"),
        ("5kg", "5 KG", "equal"),
        ("5", "5 %", "neither"),
        ("50%", "50 %", "equal"),
        ("5 ‰", "5 %", "neither"),
        ("5 °C", "5°C", "equal"),
        ("5 °C", "5℃", "equal"),
        ("5", "5°", "neither"),
        ("5 µm", "5 μm", "equal"),
    ],
    "currencies": [
        ("$5", "5", "neither"),
        ("5", "$5", "neither"),
        ("5", "$ 5", "neither"),
        ("5", "5 €", "neither"),
        ("£5", "￡５", "equal"),
        ("€400", "-€400", "neither"),
        ("-€400", "−€400", "equal"),
    ],
    "blood groups and grades": [
        ("A+", "A−", "neither"),
        ("A+", "A +", "equal"),
        ("A", "A-", "neither"),
        ("AB-", "The group is AB−.", "contained"),
        ("A-", "grade A-\nNext", "contained"),
        ("B-", "b–", "equal"),
        ("A-", "血液型はA-です", "contained"),
    ],
    "programming languages": [
        ("C++", "C#", "neither"),
        ("C", "in C, mostly", "contained"),
        ("node.js", "nodejs", "neither"),
        ("node", "node.js", "neither"),
        ("snake_case", "snake case", "neither"),
        ("F#", "It is F#.", "contained"),
        (".NET", "NET", "equal"),  # a dot counts before digits, not before letters
    ],
    "addresses": [
        ("john@x.org", "JOHN@X.ORG", "equal"),
        ("john@x.org", "Write to <john@x.org>", "neither"),
        ("john@x.org", "Write to (john@x.org).", "contained"),
        ("john.a@x.org", "johna@x.org", "neither"),
        ("https://x.org/a", "See https://x.org/a.", "contained"),
        ("https://x.org/a", "https://x.org/a/b", "neither"),
        ("x.org/?q=1&r=2", "x.org/?q=1&r=3", "neither"),
        ("AT&T", "AT & T", "equal"),
    ],
    "versions": [
        ("2.0", "2.0.1", "neither"),
        ("v2.0", "V 2.0", "equal"),
        ("Python 3.1", "Python 3.11", "neither"),
    ],
    "accents": [
        ("café", unicodedata.normalize("NFD", "CAFÉ"), "equal"),
        ("café", "cafe", "neither"),
        ("Straße", "STRASSE", "equal"),
        ("naïve", "na\u00adïve", "equal"),
        ("ᾴ", "\u03b1\u0345\u0301", "equal"),  # marks in another order
    ],
    "hyphenated words": [
        ("well-known", "well known", "equal"),
        ("known", "well‑known", "contained"),
        ("COVID-19", "COVID 19", "equal"),
        ("rock-'n'-roll", "rock 'n' roll", "equal"),
        ("Paris", "Paris--the capital", "contained"),
    ],
    "quotes": [
        ("O’Brien", "O'Brien", "equal"),
        ("O’Brien", "O Brien", "equal"),
        ("Hawaiʻi", "Hawai'i", "equal"),
        ("Paris", "“Paris”", "equal"),
        ("Paris", '"Paris," he said', "contained"),
        ("x", "`x`", "equal"),
    ],
    "Japanese": [
        ("東京", "答えは東京です。", "contained"),
        ("東京", "「東京」", "equal"),
        ("ドン", "ロンドン", "neither"),
        ("ロンドン", "首都はロンドンです", "contained"),
        ("ガス", "ｶﾞｽ", "equal"),
        ("ガス", "カス", "neither"),
        ("カ", "ガ", "neither"),
        ("5", "答えは5です", "contained"),
        ("5", "答えは−5です", "neither"),
        ("ＡＢＣ", "abc", "equal"),
        ("東京、大阪", "東京，大阪", "equal"),
        ("東京都", "東京\u3000都", "equal"),
    ],
    "Chinese": [
        ("北京", "中国的首都是北京。", "contained"),
        ("1949年", "成立于1949年10月", "contained"),
        ("49年", "1949年", "neither"),
    ],
    "Thai": [
        ("กรุงเทพ", "เมืองหลวงคือกรุงเทพมหานคร", "contained"),
        ("ที", "ที่", "neither"),
        ("น้ำ", "นำ", "neither"),
        ("๕", "๒๕", "neither"),
    ],
    "Lao, Khmer, Burmese": [
        ("ລາວ", "ປະເທດລາວແມ່ນ", "contained"),
        ("ភ្នំពេញ", "រាជធានីភ្នំពេញ", "contained"),
        ("ရန်ကုန်", "မြို့ရန်ကုန်", "contained"),
    ],
    "Hindi": [
        ("दिल्ली", "उत्तर दिल्ली है।", "contained"),
        ("कि", "क", "neither"),
        ("−5", "उत्तर −5 है", "contained"),
        ("की-5", "की 5", "equal"),
    ],
    "Arabic and Persian": [
        ("القاهرة", "العاصمة هي القاهرة.", "contained"),
        ("القاهرة", "قاهرة", "neither"),
        ("كِتاب", "كُتاب", "neither"),
        ("نعم", "نعم؟", "equal"),
        ("می‌خواهم", "میخواهم", "equal"),
        ("٥٪", "٥", "neither"),
    ],
    "Cyrillic": [
        ("МОСКВА", "Столица — Москва.", "contained"),
        ("й", unicodedata.normalize("NFD", "й"), "equal"),
    ],
    "emoji": [
        ("👍", "👎", "neither"),
        ("👍", "Yes 👍!", "contained"),
        ("👍", "Yes👍", "contained"),
        ("❤", "❤️", "equal"),
        ("Paris", "Paris🎉", "contained"),
        ("🇩🇪", "🇫🇷", "neither"),
        ("🇪🇫", "🇩🇪🇫🇷", "neither"),
        ("\U0001f3f4\U000e0067\U000e0062\U000e0065", "\U0001f3f4\U000e0067\U000e0062\U000e0073", "neither"),
    ],
}


@pytest.mark.parametrize(
    ("reference", "answer", "relation"),
    [pytest.param(*pair, id=f"{kind}: {pair[0]} | {pair[1]}") for kind, pairs in PAIRS.items() for pair in pairs],
)
def test_an_answer_equals_a_reference_contains_it_or_does_neither(
    reference: str, answer: str, relation: Relation
) -> None:
    has_tokens = normalise(reference) != ""
    assert (has_tokens and normalise(reference) == normalise(answer)) == (relation == "equal")
    assert accuracy(reference, answer) == float(relation != "neither")


def test_texts_that_count_as_the_same_are_written_alike() -> None:
    assert normalise(" “Cafe\u0301”,  ÉTÉ: −5%. ") == "café été ˗ 5 %"
    assert normalise("A- ﾄﾞﾝ (1990 – 95)") == "a ˗ ドン 1990 ˗ 95"
    assert normalise("“…”") == ""


def test_containment_wants_any_of_the_answers() -> None:
    assert containment(["New York City", "NYC"], "He lives in NYC.") == 1.0
    assert containment(["New York City", "NYC"], "He lives in New York.") == 0.0
    assert containment(["...", "NYC"], "...") == 0.0
    assert containment([], "anything") == 0.0
