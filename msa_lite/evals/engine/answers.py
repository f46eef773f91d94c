"""Compare a generated answer with the right one, by words, numbers and the signs that carry meaning.

Case, white space, quotes and closing punctuation do not count. Signs do: −400 is not 400, A+ is not A−, C++ is not C#,
5 % is not 5, 2.0 is not 2.0.1. Texts are compared as sequences of tokens:

- a run of letters with their combining marks, or a run of digits with superscripts. One `.`, `,`, `:` or `_` between
  two runs joins them: 1,000 and node.js are one token. Numbers are not parsed, so 1,000 is not 1000.
- a single sign: # % ° + = / ^ < > & @, currencies, other mathematical signs, and a minus that counts (`_mark_minus`).
- a single character of a script that is written without spaces, with its marks; neighbouring katakana are one token.
- a single emoji or other symbol, and a flag.

A reference stands in an answer only where both ends are open (`Tokens.is_open`): no other word, number or sign touches
it there. So 400 is not found in −400, in 400 % or in 1.400, but in 400 euros. This rule is msa-lite's own; no
benchmark publishes it. ROUGE-L is TOFU's and MUSE's, but for scripts that its package does not read.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

RULE = "words and signs"
"""The name of this rule in manifests. Change it with the rule, so that scores by the former one are made anew."""

# Kinds of characters, each a letter, so that patterns can be matched on a text's kinds.
_LETTER, _DIGIT, _MARK, _SPACELESS, _KATAKANA = "wdmjk"
_SPACE, _BREAK = " x"
_SYMBOL, _FLAG = "or"  # emoji and the like; half a flag
_CURRENCY, _SIGN = "cy"
_KIND_OF = {
    char: kind
    for kind, chars in {
        "e": "e",  # the letter, which may be that of 1e-5
        _DIGIT: "⁺⁻₊₋",
        ".": ".",
        ",": ",:٫٬",
        "_": "_",
        "h": "-‐‑‒–",  # a hyphen, a dash or a minus, as its neighbours tell
        "t": "−",  # a true minus
        "s": "˗",  # a minus in the result of `normalise`
        "p": "%‰‱٪°",  # behind a number
        "b": "<>≤≥≦≧±",  # before a number
        "i": "∞√",
        _SIGN: "#&@/^",
        _SPACE: "\t",
        "n": "\n\r\v\f\x85\u2028\u2029",
        _BREAK: "*`~|ʻʼ",  # Markdown's marks; letters that serve as apostrophes
    }.items()
    for char in chars
}
_SPACELESS_NAMES = ("CJK ", "HIRAGANA ", "IDEOGRAPHIC ", "THAI ", "LAO ", "KHMER ", "MYANMAR ")
_KATAKANA_NAMES = ("KATAKANA",)
_OF_CATEGORY = {"L": _LETTER, "N": _DIGIT, "M": _MARK, "Sc": _CURRENCY, "Sm": _SIGN, "So": _SYMBOL, "Zs": _SPACE}

_MARKED = re.compile(r"([wedk])m+")
_LEADING_DOT = re.compile(r"(?<![wed.,])\.(?=d)")
_BETWEEN_NUMBERS = re.compile(r"(?<=[dpc])(?:[ht]| +[ht] +)(?=d|c ?d)")
_BEFORE_NUMBER = re.compile(r"(?<![wedht])(?:[ht](?=d|c ?d|i)|t(?= +(?:d|c ?d|i)))|(?<=de)[ht](?=d)")
_IN_ARROW = re.compile(r"(?<![wedht])[ht](?=b)|(?<=b)[ht]")
_BEHIND_WORD = re.compile(r"(?<=[wed])[ht]+(?![htwed]|x+[wed])")
_TOKEN = re.compile(r"(?:[wem]+|d+)(?:(?:[.,]|_+)(?:[we]+|d+))*|jm*|k+|rr|[sSBcpbiyor]")
_FAR = 1 << 16  # characters
_DASHES = str.maketrans(dict.fromkeys("-‐‑‒–−", "˗"))
# Kinds of two neighbours that belong together across a space; s and B: a minus before, and between, numbers.
_BOUND = frozenset(["dp", "dc", "cd", "bd", "bc", "bs", "sd", "sc", "si", "Bd", "Bc", "dB", "pB", "cB"])


class _Folded(dict[int, str | None]):
    """The form in which a character counts, by its code: None for those that do not; made at the first use."""

    def __missing__(self, code: int) -> str | None:
        char = chr(code)
        name = unicodedata.name(char, "")
        is_format = unicodedata.category(char) == "Cf" and not name.startswith("TAG ")  # tags are parts of flags
        if is_format or "VARIATION SELECTOR" in name:
            self[code] = None
        elif char in "℃℉" or unicodedata.decomposition(char).startswith(("<wide>", "<narrow>", "<small>")):
            self[code] = unicodedata.normalize("NFKC", char)
        else:
            self[code] = char
        return self[code]


class _Kinds(dict[int, str]):
    """The kind of a character by its code; made at the first use."""

    def __missing__(self, code: int) -> str:
        self[code] = kind = _KIND_OF.get(chr(code)) or _kind(chr(code))
        return kind


_FOLDED, _KINDS = _Folded(), _Kinds()


def _kind(char: str) -> str:
    """Return the kind of a character by its category and its script."""
    category, name = unicodedata.category(char), unicodedata.name(char, "")
    if category[0] == "L" or category == "Nl":
        if name.startswith(_KATAKANA_NAMES):
            return _KATAKANA
        if name.startswith(_SPACELESS_NAMES):
            return _SPACELESS
    if name.startswith("REGIONAL INDICATOR"):
        return _FLAG
    if name.startswith("TAG "):
        return _SYMBOL
    return _OF_CATEGORY.get(category) or _OF_CATEGORY.get(category[0], _BREAK)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text."""

    words: list[str]
    """The tokens; equal texts have equal ones."""
    spans: Sequence[tuple[int, int]]
    """The start and the end of each."""
    kinds: str
    """The kind of each character of the text."""

    def is_open(self, at: int) -> bool:
        """Return True if a match may begin before the token at this place, or end there.

        It may where something that is no token lies between the neighbours, or white space across which they do not
        belong together, and beside characters of scripts without spaces and symbols.
        """
        if not 0 < at < len(self.spans):
            return True
        end, start = self.spans[at - 1][1], self.spans[at][0]
        left, right, gap = self.kinds[end - 1], self.kinds[start], self.kinds[end:start]
        if not gap:
            return left in "jkorm" or right in "jkor"
        return not gap.isspace() or left + right not in _BOUND

    def contains(self, words: list[str]) -> bool:
        """Return True if these tokens stand here in one piece, open at both ends."""
        size = len(words)
        return any(
            word == words[0] and self.words[at : at + size] == words and self.is_open(at) and self.is_open(at + size)
            for at, word in enumerate(self.words)
        )


def split_answer(text: str) -> Tokens:
    """Return the tokens of a text."""
    text, kinds = _read(text)
    spans = [match.span() for match in _TOKEN.finditer(kinds)]
    return Tokens([text[start:end] for start, end in spans], spans, kinds)


def iter_words(text: str) -> Iterator[str]:
    """Yield the words of `split_answer`, which would take forty times a book's memory."""
    text, kinds = _read(text)
    return (text[match.start() : match.end()] for match in _TOKEN.finditer(kinds))


def _read(text: str) -> tuple[str, str]:
    """Return a text without differences that do not count, and the kind of each character."""
    text = _fold(text)
    kinds = text.translate(_KINDS)
    if "m" in kinds:
        kinds = _MARKED.sub(lambda match: match[1] * len(match[0]), kinds)
    if "." in kinds:
        kinds = _LEADING_DOT.sub("d", kinds)
    if "h" in kinds or "t" in kinds:
        kinds, text = _mark_minus(kinds), text.translate(_DASHES)
    return text, kinds


def _fold(text: str) -> str:
    """Return a text without differences that do not count: case, width, composition, characters without a shape."""
    if text.isascii():
        return text.lower()
    visible = unicodedata.normalize("NFD", text.translate(_FOLDED))
    return unicodedata.normalize("NFC", visible.casefold())


def _mark_minus(kinds: str) -> str:
    """Return kinds in which each minus that counts has a kind of its own; other hyphens and dashes are breaks.

    It counts between two numbers (1990–1995), with or without spaces; before a number that touches no word (−5, −€5,
    1e−5); and behind a word that nothing follows at once (A−). It does not between letters, or letter and digit
    (well-known, COVID-19), nor alone between words.
    """
    kinds = _BETWEEN_NUMBERS.sub(lambda match: match[0].replace("h", "B").replace("t", "B"), kinds)
    kinds = _IN_ARROW.sub("s", _BEFORE_NUMBER.sub("s", kinds))
    return _BEHIND_WORD.sub(lambda match: "S" * len(match[0]), kinds)


def normalise(text: str) -> str:
    """Return the tokens of a text with single blanks between them: equal for texts that count as the same.

    A minus that counts is written ˗ (U+02D7), so that the result of the result is the same.
    """
    words = iter_words(text)
    # All words in a list would take ten times the text.
    return " ".join(iter(lambda: " ".join(islice(words, _FAR)), ""))


def accuracy(reference: str, generated: str) -> float:
    """Return 1 when the generation contains the whole reference, token by token and open at both ends; otherwise 0.

    Strict on long answers: a paraphrase of the right fact counts as wrong. A reference without any token counts as 0.
    """
    tokens, start = split_answer(generated), reference[: _FAR + 4 * len(generated)]
    if len(start) < len(reference) and len(split_answer(start).words) > len(tokens.words) + _FAR // 100:
        return 0.0  # a reference of a book is not split
    words = split_answer(reference).words
    return float(bool(words) and tokens.contains(words))


def containment(answers: Iterable[str], generated: str) -> float:
    """Return 1 when the generation contains any of the acceptable answers whole, as for `accuracy`; otherwise 0.

    The accuracy of RESTOR without a judge. It is msa-lite's own rule: Rezaei et al., 2024, ask a model whether the
    answer means the same. Here a right answer in other words counts as wrong, and so does an item without acceptable
    answers.
    """
    tokens = split_answer(generated)
    wanted = (split_answer(answer).words for answer in answers)
    return float(any(words and tokens.contains(words) for words in wanted))


@lru_cache(1 << 16)
def _stem(word: str) -> str:
    from rouge_score.tokenizers import DefaultTokenizer

    return "".join(DefaultTokenizer(use_stemmer=True).tokenize(word))


def _rouge_words(text: str, stem: bool, other: bool) -> Iterator[str]:
    """Yield the words of ROUGE-L, those of the rouge-score package or, in scripts in which it has none, our own."""
    if other:
        return iter_words(text)
    words = (match[0] for match in re.finditer("[a-z0-9]+", text.lower()))
    return map(_stem, words) if stem else words


def _rouge(reference: str, generated: str, stem: bool) -> tuple[float, float]:
    """Return precision and recall: |LCS| by the words of each. Both are 0 where one has none.

    The table of the rouge-score package would have a number for each pair of words. Here one number holds a bit for
    each generated word, 0 once the longest common subsequence has grown there (Hyyrö, 2004).
    """
    other = is_other_script(reference)
    places: dict[str, int] = defaultdict(int)
    size = count = 0
    for size, word in enumerate(_rouge_words(generated, stem, other), 1):
        places[word] |= 1 << (size - 1)
    whole = left = (1 << size) - 1
    for word in _rouge_words(reference, stem, other):
        count += 1
        if word in places:
            hits = left & places[word]
            left = ((left + hits) | (left - hits)) & whole
    common = size - left.bit_count()
    return (common / size, common / count) if common else (0.0, 0.0)


def is_other_script(text: str) -> bool:
    """Return True if less than half of a text's letters and digits are a-z, A-Z or 0-9.

    The rouge-score package drops all others. Of Chinese, Arabic or Russian nothing is left, so that a perfect answer
    scores 0. German or Vietnamese keep most letters, though an ö splits its word.
    """
    if text.isascii():
        return False
    ours = [char.isascii() for char in text if char.isalnum()]
    return 2 * sum(ours) < len(ours)


def rouge_l_recall(reference: str, generated: str) -> float:
    """Return the ROUGE-L recall of a generated answer, |LCS| / |reference| in words, Porter stemmer; in [0, 1].

    TOFU's ROUGE, by the rouge-score package, which counts [a-z0-9] alone. References in another script
    (`is_other_script`) are counted in the tokens of `split_answer`, without a stemmer: single characters in Chinese,
    Japanese or Thai. For TOFU in Chinese, arXiv 2606.03291 gives the package a tokenizer of dictionary words, so its
    values differ; for Russian it gives none, so that its ROUGE is 0 there.
    """
    return _rouge(reference, generated, True)[1]


def rouge_l_f1(reference: str, generated: str, stem: bool = True) -> float:
    """Return ROUGE-L F1, 2·|LCS| / (|reference| + |generated|) in words; in [0, 1]. Package and words as the recall's.

    MUSE's verbatim and knowledge memorization (Shi et al., 2024). stem: the Porter stemmer, which open-unlearning uses
    and MUSE's own code does not (it also gives percent).
    """
    precision, recall = _rouge(reference, generated, stem)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def has_word(text: str) -> bool:
    """Return True if a text has a letter, a digit or an underscore, so that ROUGE-L has something to count."""
    return re.search(r"\w", text) is not None
