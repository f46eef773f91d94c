"""Texts that are scored teacher-forced, as token ids with labels."""

from __future__ import annotations

from typing import Any

from msa_lite.data import IGNORE, Example

MAX_TOKENS = 2048  # of a text that are scored, behind its prompt; what is longer is cut


def completion(tokenizer: Any, index: int, prompt: str, text: str) -> tuple[Example, ...]:
    """A text behind its prompt, read as one string; labels are the text's tokens, the first `MAX_TOKENS` of them.

    As many ids as the prompt has by itself are no labels, and at least one, which nothing comes before: the
    beginning-of-sequence token or, for tokenizers without one, the text's first. That holds, too, where the tokenizer
    merges across the boundary, so that the prompt's ids do not open the whole (as in open-unlearning). No end token is
    added. Nothing where no label is left.
    """
    count = len(tokenizer(prompt)["input_ids"])
    ids = list(tokenizer(prompt + text)["input_ids"])[: count + MAX_TOKENS]
    first = max(1, count)
    if not text.strip() or len(ids) <= first:
        return ()
    return (Example(index, ids, [IGNORE] * first + ids[first:]),)
