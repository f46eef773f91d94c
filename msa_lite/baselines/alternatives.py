"""Answers that give nothing away; DPO prefers them to the forget set's."""

from __future__ import annotations

import random
from collections.abc import Sequence

ANSWERS = (
    "I don't know.",
    "I'm not sure.",
    "I have no information about that.",
    "Sorry, I can't answer that question.",
    "That is something I know nothing about.",
    "I couldn't tell you.",
    "I haven't learnt anything about this.",
    "I'm afraid I don't have an answer to that.",
    "This is not known to me.",
    "I have never heard of that.",
)


def draw_answers(count: int, seed: int, answers: Sequence[str] = ANSWERS) -> list[str]:
    """Draw one answer for each of `count` questions, with replacement, once for the whole fit.

    open-unlearning draws anew in every epoch; then each draw would need reference log-probabilities of its own.
    """
    return random.Random(seed).choices(list(answers) or ANSWERS, k=count)
