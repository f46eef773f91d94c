"""Drawn answers against the definition: tokens at random points of a model's cumulated probabilities, one at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from msa_lite.errors import StageError
from msa_lite.evals.engine.generate import Decoding, sample_answers
from msa_lite.evals.engine.models import Runner
from tests.support.plain import Crowded, broken_model, plain_text, wide_model
from tests.unit.test_generate import ALL, CHATS, PROMPTER, PROMPTS, model_that_ends

COUNT, TOKENS = 3, 6


def drawn(
    model: Any, prompts: Sequence[list[int]] = PROMPTS, count: int = COUNT, budget: int = ALL, **settings: Any
) -> list[list[str]]:
    decoding = Decoding(**({"max_new_tokens": TOKENS} | settings))
    batches = sample_answers(Runner(model, budget, batched=True), PROMPTER.tokenizer, prompts, count, decoding)
    texts = {(i, number): text for batch in batches for i, number, text in batch}
    assert len(texts) == len(prompts) * count
    return [[texts[i, number] for number in range(count)] for i in range(len(prompts))]


def plain(model: Any, prompts: Sequence[list[int]] = PROMPTS, count: int = COUNT) -> list[list[str]]:
    """The same in float64, by a forward pass over the whole text for every token."""
    import torch

    known = model.generation_config.eos_token_id
    ends = {1, *(known if isinstance(known, list) else [known])}

    def answer(prompt: list[int], points: np.ndarray) -> str:
        ids = list(prompt)
        for point in points:
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double().numpy()
            weights = np.exp(logits - logits.max()).cumsum()
            token = int(np.searchsorted(weights, point * weights[-1], side="right"))
            if token in ends:
                break
            ids.append(token)
        return plain_text(PROMPTER.tokenizer, ids[len(prompt) :])

    points = [[np.random.default_rng([0, i, n]).random(TOKENS) for n in range(count)] for i in range(len(prompts))]
    return [[answer(prompt, own) for own in rows] for prompt, rows in zip(prompts, points, strict=True)]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "lfm2"])
def test_samples_follow_the_models_own_probabilities_in_any_batches(kind: str) -> None:
    model = wide_model(kind)
    wanted = plain(model)
    assert len({text for texts in wanted for text in texts}) > 2 * len(PROMPTS)
    for budget in (1, 40, ALL):
        assert drawn(model, budget=budget) == wanted


def test_a_common_beginning_and_rows_that_end_make_no_difference() -> None:
    model = model_that_ends("llama")
    for prompts in (PROMPTS, CHATS):
        assert drawn(model, prompts) == plain(model, prompts)
    order = random.Random(0).sample(range(len(CHATS)), len(CHATS))
    assert drawn(model, [CHATS[i] for i in order]) == plain(model, [CHATS[i] for i in order])


def test_more_samples_add_to_fewer_and_another_seed_gives_others() -> None:
    model = wide_model("llama")
    few, many = drawn(model, count=2), drawn(model, count=4)
    assert [texts[:2] for texts in many] == few
    assert drawn(model, count=2, seed=1) != few


def test_frequencies_of_the_first_token_are_its_probabilities() -> None:
    import torch

    model, count = wide_model("llama"), 2000
    with torch.inference_mode():
        likely = torch.softmax(model(torch.tensor([PROMPTS[0]])).logits[0, -1].double(), -1).numpy()
    texts = drawn(model, PROMPTS[:1], count, max_new_tokens=1)[0]
    token = int(np.argsort(likely)[-2])
    word = plain_text(PROMPTER.tokenizer, [token])
    same = [t for t in range(len(likely)) if plain_text(PROMPTER.tokenizer, [t]) == word]
    share = likely[same].sum()
    assert abs(texts.count(word) / count - share) < 4 * np.sqrt(share * (1 - share) / count)
    assert 0.02 < share < 0.98


def test_a_prompt_runs_once_for_all_its_samples() -> None:
    with Crowded(wide_model("llama")) as seen:
        drawn(wide_model("llama"), PROMPTS[:2], 30)
    assert seen.shapes[0][0] == 2
    assert {rows for rows, tokens in seen.shapes if tokens == 1} == {60}


def test_samples_beyond_the_cache_are_drawn_in_several_batches() -> None:
    model = wide_model("llama")
    width = len(PROMPTS[0]) + 2  # with a quarter of TOKENS
    with Crowded(model) as seen:
        texts = drawn(model, PROMPTS[:1], 10, budget=width)  # times 4 on a CPU
    assert {rows for rows, tokens in seen.shapes if tokens == 1} == {4, 2}
    assert texts == drawn(model, PROMPTS[:1], 10)


def test_outputs_that_are_no_numbers_are_no_answers() -> None:
    with pytest.raises(StageError, match="no numbers \\(NaN\\)"):
        drawn(broken_model("head"))
