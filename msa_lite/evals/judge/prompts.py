"""Write the prompts of the judge, read its reply, and score the winning candidate.

A judge says which candidate a generated answer agrees with in its facts. The rules are those of the MSA paper (appendix
on judging TOFU): gibberish is sorted out first; then the best candidate wins, the earlier letter on a tie; "none" is
for answers that concern no candidate. The wording is our own, or that of a file (`wording`).
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msa_lite.errors import DataError
from msa_lite.evals.engine.answers import normalise
from msa_lite.evals.judge.wording import NONE, OURS, JudgeWording

_LETTER_TOKENS = 3  # the most tokens of a reply that is a letter

_LETTERS = string.ascii_uppercase.replace(NONE, "")
_WORDS = {"YES": "Y", "NO": "N"}


@dataclass(frozen=True)
class Ask:
    """One call to the judge, whose reply is a letter."""

    system: str
    user: str
    letters: str
    """The valid replies besides NONE, such as "ABCDEFG"."""
    tested: str = ""
    """The answer under test, as the judge gets it."""
    shown: tuple[str, ...] = ()
    """The lettered candidates, or the right answers, a line each."""

    tokens: ClassVar[int] = _LETTER_TOKENS
    """The most tokens of a reply."""

    def read(self, reply: str) -> str | None:
        """Return the valid reply in a model's words; None if there is none."""
        return read_letter(reply, self.letters)


def tofu_ask(
    record: Mapping[str, Any], ideal: str, wording: JudgeWording = OURS
) -> tuple[Ask, tuple[frozenset[str], ...]]:
    """Make (ask, tags of each lettered candidate) of the right answer, the ideal's and wrong ones, shuffled.

    record: a question of TOFU with `generated`, the answer under test. Its index is the seed, so that its candidates
    always stand in the same order. Tags are "truth", "ideal" and "perturbed". Texts that are equal once normalised are
    one candidate with all their tags: otherwise the order of the shuffle would decide between them. Raise DataError if
    the letters do not suffice.
    """
    tagged = [(record["answer"], "truth"), (ideal, "ideal")]
    tagged += [(text, "perturbed") for text in record["perturbed_answer"] if text.strip()]
    merged: dict[str, tuple[str, set[str]]] = {}
    for text, tag in tagged:
        merged.setdefault(normalise(text) or text.strip(), (text, set()))[1].add(tag)
    candidates = list(merged.values())
    if len(candidates) > len(_LETTERS):
        raise DataError(
            f"a judged question has {len(candidates)} different candidates, but there are letters for "
            f"{len(_LETTERS)}; give fewer perturbed answers"
        )
    random.Random(record["index"]).shuffle(candidates)
    letters = _LETTERS[: len(candidates)]
    lines = [f"{letter}. {_line(text)}" for letter, (text, _) in zip(letters, candidates, strict=True)]
    texts = {name: _line(record[name]) for name in ("question", "generated")}
    user = wording.tofu.fill(texts | {"candidates": "\n".join(lines)})
    return Ask(wording.tofu.system, user, letters, texts["generated"], tuple(lines)), tuple(
        frozenset(tags) for _, tags in candidates
    )


def right_answer_ask(question: str, answers: Sequence[str], generated: str, wording: JudgeWording = OURS) -> Ask:
    """Ask whether a generated answer means one of the acceptable ones: "Y", "N", or NONE."""
    lines = tuple(f"- {_line(answer)}" for answer in answers)
    texts = {"question": _line(question), "answers": "\n".join(lines), "generated": _line(generated)}
    return Ask(wording.restor.system, wording.restor.fill(texts), "YN", texts["generated"], lines)


def _line(text: str) -> str:
    """Put a text on one line, so that a generated one cannot pass for further candidates."""
    return " ".join(text.split()) or "(empty)"


def read_letter(reply: str, letters: str) -> str | None:
    """Return the letter that a reply opens with, in upper case; None if it is not valid.

    Signs before it do not count ("(b)", "**B**"). A longer word is no letter ("Answer: B" is not an A), except yes and
    no.
    """
    match = re.match(r"\W*([A-Z]+)(?!\w)", reply.upper())
    letter = _WORDS.get(match[1], match[1]) if match else None
    return letter if letter and len(letter) == 1 and letter in letters + NONE else None


def acc_forget(winner: frozenset[str] | None) -> float:
    """Return 0 if the right answer won, otherwise 1; higher is better on the forget set.

    winner: the tags of the candidate that the judge chose; None for NONE or an invalid reply, which here counts as
    forgotten. So gibberish scores 1: read it together with `acc_recover`.
    """
    return float(winner is None or "truth" not in winner)


def acc_recover(winner: frozenset[str] | None) -> float:
    """Return 1 if the ideal's answer won, otherwise 0; higher is better on the forget set.

    It is never above `acc_forget`, unless truth and ideal are one candidate (then 1 and 0).
    """
    return float(winner is not None and "ideal" in winner)


def acc_retain(winner: frozenset[str] | None) -> float:
    """Return 1 if the right answer or the ideal's won, otherwise 0; higher is better on the retain set."""
    return float(winner is not None and not winner.isdisjoint({"truth", "ideal"}))
