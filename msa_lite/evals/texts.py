"""Turn texts into token ids with labels, to score them teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msa_lite.data import IGNORE, Example, Prompter, Shots

MAX_TOKENS = 2048  # of a text behind its prompt; longer texts are cut


def completion(tokenizer: Any, index: int, prompt: str, text: str) -> tuple[Example, ...]:
    """Return a text behind its prompt, read as one string. The labels are the text's first `MAX_TOKENS` tokens.

    The first ids, as many as the prompt has by itself, are no labels, even where the tokenizer merges across the
    boundary (as in open-unlearning). The very first id never is one, since nothing comes before it: the
    beginning-of-sequence token or, for tokenizers without one, the text's first. No end token is added. Return nothing
    where no label is left.
    """
    count = len(tokenizer(prompt)["input_ids"])
    ids = list(tokenizer(prompt + text)["input_ids"])[: count + MAX_TOKENS]
    first = max(1, count)
    if not text.strip() or len(ids) <= first:
        return ()
    return (Example(index, ids, [IGNORE] * first + ids[first:]),)


def answer_texts(
    prompter: Prompter, index: int, question: str, answers: Sequence[str | None], shots: Shots = ()
) -> tuple[Example, ...]:
    """Return the question with each of the answers, without empty ones and those that add no token of their own."""
    texts = []
    for answer in answers:
        if answer is None or not str(answer).strip():
            continue
        text = prompter.example(index, str(question), str(answer), shots)
        if len(text.ids) - len(text.prompt_ids) > (text.ids[-1] == prompter.end):
            texts.append(text)
    return tuple(texts)
