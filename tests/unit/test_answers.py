"""Right or wrong: which answers equal a reference, contain it, or do neither."""

from __future__ import annotations

import unicodedata
from typing import Literal

import pytest

from msa_lite.evals.engine.answers import accuracy, normalise

Relation = Literal["equal", "contained", "neither"]

# By kind: (reference, answer, relation). "contained": in the answer, but not equal to it.
PAIRS: dict[str, list[tuple[str, str, Relation]]] = {
    "words": [
        ("Yarheath.", "She was born in Yarheath, they say.", "contained"),
        ("New York", "new  YORK\n", "equal"),
        ("Paris", "**Paris**", "equal"),
        ("...", "...", "neither"),
    ],
    "numbers": [
        ("1975", "In 1975.", "contained"),
        ("5", "2.5", "neither"),
        (".5", "5", "neither"),
        ("5", "Wait ...5", "contained"),
        ("1,000", "1000", "neither"),
        ("10²", "102", "neither"),
    ],
    "signs": [
        ("400 euros", "The balance is −400 euros", "neither"),
        ("−400 euros", "The balance is -400 euros.", "contained"),
        ("-400", "− 400", "equal"),
        ("400", "- 400", "equal"),  # an item of a list
        ("-∞", "∞", "neither"),
        ("1e-5", "1e5", "neither"),
        ("1e-5", "1E−5", "equal"),
        ("A -> B", "A->B", "equal"),
        ("5", "< 5", "neither"),
    ],
    "math": [
        ("x=5", "x = 5", "equal"),
        ("5", "x=5", "neither"),
        ("x^2", "x2", "neither"),
        ("√2", "2", "neither"),
        ("-3", "5 - 3", "neither"),
    ],
    "dates": [
        ("1990-05-06", "1990–05–06", "equal"),
        ("1990", "1990-05-06", "neither"),
    ],
    "ranges": [
        ("1990–1995", "1990 - 1995", "equal"),
        ("1990–1995", "1990 1995", "neither"),
        ("1990", "1990 – 1995", "neither"),
        ("5%–10%", "5 % - 10 %", "equal"),
        ("1990", "in 1990 – the year", "contained"),
        ("5\n- 3 apples", "5 3 apples", "equal"),  # a list, not a range
    ],
    "units": [
        ("5", "5 kg", "contained"),
        ("5", "5 %", "neither"),
        ("5 °C", "5℃", "equal"),
        ("5 µm", "5 μm", "equal"),
    ],
    "currencies": [
        ("5", "$ 5", "neither"),
        ("5", "5 €", "neither"),
        ("£5", "￡５", "equal"),
        ("€400", "-€400", "neither"),
    ],
    "blood groups and grades": [
        ("A+", "A−", "neither"),
        ("AB-", "The group is AB−.", "contained"),
        ("A-", "grade A-\nNext", "contained"),
        ("A-", "血液型はA-です", "contained"),
    ],
    "programming languages": [
        ("C++", "C#", "neither"),
        ("node", "node.js", "neither"),
        ("snake_case", "snake case", "neither"),
    ],
    "addresses": [
        ("john@x.org", "Write to <john@x.org>", "neither"),
        ("https://x.org/a", "https://x.org/a/b", "neither"),
        ("x.org/?q=1&r=2", "x.org/?q=1&r=3", "neither"),
    ],
    "versions": [
        ("2.0", "2.0.1", "neither"),
    ],
    "accents": [
        ("café", unicodedata.normalize("NFD", "CAFÉ"), "equal"),
        ("café", "cafe", "neither"),
        ("ᾴ", "\u03b1\u0345\u0301", "equal"),  # marks in another order
    ],
    "hyphenated words": [
        ("rock-'n'-roll", "rock 'n' roll", "equal"),
        ("Paris", "Paris--the capital", "contained"),
    ],
    "quotes": [
        ("O’Brien", "O'Brien", "equal"),
        ("Hawaiʻi", "Hawai'i", "equal"),
    ],
    "Japanese": [
        ("東京", "答えは東京です。", "contained"),
        ("ドン", "ロンドン", "neither"),
        ("ガス", "ｶﾞｽ", "equal"),
        ("カ", "ガ", "neither"),
        ("東京、大阪", "東京，大阪", "equal"),
    ],
    "Chinese": [
        ("北京", "中国的首都是北京。", "contained"),
    ],
    "Thai": [
        ("กรุงเทพ", "เมืองหลวงคือกรุงเทพมหานคร", "contained"),
    ],
    "Lao, Khmer, Burmese": [
        ("ລາວ", "ປະເທດລາວແມ່ນ", "contained"),
        ("ရန်ကုန်", "မြို့ရန်ကုန်", "contained"),
    ],
    "Hindi": [
        ("दिल्ली", "उत्तर दिल्ली है।", "contained"),
        ("की-5", "की 5", "equal"),
    ],
    "Arabic and Persian": [
        ("القاهرة", "العاصمة هي القاهرة.", "contained"),
        ("كِتاب", "كُتاب", "neither"),
        ("نعم", "نعم؟", "equal"),
        ("می‌خواهم", "میخواهم", "equal"),
        ("٥٪", "٥", "neither"),
    ],
    "Cyrillic": [],
    "emoji": [
        ("👍", "👎", "neither"),
        ("❤", "❤️", "equal"),
        ("Paris", "Paris🎉", "contained"),
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
