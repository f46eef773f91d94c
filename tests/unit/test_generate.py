"""Answers against transformers' own `generate`, one prompt at a time, whatever the batches and the order."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest

from msa_lite.data import Row
from msa_lite.errors import StageError
from msa_lite.evals.engine.generate import Decoding, generate
from msa_lite.evals.engine.models import Runner
from tests.support.benchmark_data import make_prompter
from tests.support.plain import (
    KINDS,
    SPECIAL,
    WINDOW,
    Crowded,
    broken_model,
    plain_answer,
    plain_tokens,
    wide_model,
)

ALL = 10**6
TOKENS = 12
PROMPTER = make_prompter()
ABOUT = ["Where is it?", "Who was it that stood over there?", "Why?", "Quo vadis, domine?", "Is it so?" * 5, "", "It?"]
PROMPTS = [PROMPTER.prompt(Row(0, about)) for about in ABOUT]
# Behind a system message that is the same for all; the end token, 1, ends each turn.
CHATS = [make_prompter(chat=True).prompt(Row(0, about)) for about in ABOUT]


def answers(
    model: Any,
    prompts: Sequence[list[int]] = PROMPTS,
    decoding: Decoding = Decoding(TOKENS),  # noqa: B008
    budget: int = ALL,
    hidden: int | None = None,
    tokenizer: Any = PROMPTER.tokenizer,
    batched: bool | None = True,
    known: Sequence[list[int]] = (),
) -> list[list[str]]:
    batches = generate(Runner(model, budget, batched), tokenizer, prompts, decoding, known=known, hidden=hidden)
    found = dict(pair for batch in batches for pair in batch)
    return [found[i] for i in range(len(prompts))]


def plain(model: Any, hidden: int | None = None, prompts: Sequence[list[int]] = PROMPTS) -> list[list[str]]:
    return [[plain_answer(model, PROMPTER.tokenizer, prompt, TOKENS, hidden)] for prompt in prompts]


def model_that_ends(kind: str) -> Any:
    """A model whose end tokens come at different places of its answers to PROMPTS, and for some not at all."""
    model = copy.deepcopy(wide_model(kind))
    seen = [plain_tokens(model, prompt, TOKENS) for prompt in PROMPTS[:5]]
    model.generation_config.eos_token_id = [1, seen[0][2], seen[1][6], seen[2][0]]
    return model


@pytest.mark.parametrize("kind", [*KINDS, *SPECIAL])
def test_answers_equal_those_of_transformers(kind: str) -> None:
    model = wide_model(kind)
    wanted = plain(model)
    assert len({text for (text,) in wanted}) > 3
    for budget in (1, ALL):
        assert answers(model, budget=budget) == wanted
    order = random.Random(0).sample(range(len(PROMPTS)), len(PROMPTS))
    assert answers(model, [PROMPTS[i] for i in order]) == [wanted[i] for i in order]


@pytest.mark.parametrize("kind", [*KINDS, "gemma2", "mistral"])
def test_rows_that_have_ended_leave_the_batch(kind: str) -> None:
    model = model_that_ends(kind)
    wanted = plain(model)
    with Crowded(model) as seen:
        assert answers(model) == wanted
    rows = [shape[0] for shape in seen.shapes]
    assert rows[0] == len(PROMPTS)
    assert sum(rows) < 0.9 * TOKENS * len(PROMPTS)
    assert sorted(rows, reverse=True) == rows


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "lfm2"])
def test_a_beginning_that_is_known_is_not_generated(kind: str, batched: bool) -> None:
    model = model_that_ends(kind)
    whole, wanted = [plain_tokens(model, prompt, TOKENS) for prompt in PROMPTS], plain(model)
    known = [tokens[:count] for count, tokens in enumerate(whole)]
    assert answers(model, known=known, batched=batched) == wanted
    with Crowded(model) as seen:
        assert answers(model, known=whole, batched=batched) == wanted
    assert not seen.shapes
    row = next(row for row, tokens in enumerate(whole) if len(tokens) > 2)
    with Crowded(model) as seen:
        answers(model, PROMPTS[row : row + 1], known=[whole[row][:-2]], batched=batched)
    assert len(seen.shapes) == 2


def test_a_known_beginning_goes_no_further_than_the_answer() -> None:
    model = wide_model("llama")
    more = [plain_tokens(model, prompt, 2 * TOKENS) for prompt in PROMPTS]
    assert answers(model, known=more) == plain(model)  # cut at the most tokens of an answer
    stop = (answers(model)[0][0][4:6],)
    decoding = Decoding(TOKENS, stop)
    with Crowded(model) as seen:
        found = answers(model, PROMPTS[:1], decoding, known=[more[0][: TOKENS - 1]])
    assert found == answers(model, PROMPTS[:1], decoding)
    assert not seen.shapes  # the stop string is in what is known
    full = (PROMPTS[1] * WINDOW)[:WINDOW]
    assert answers(model, [full], known=[[5, 6]]) == [[""]]


@pytest.mark.parametrize("kind", [*KINDS, *SPECIAL])
def test_what_all_prompts_begin_with_makes_no_difference(kind: str) -> None:
    models = (wide_model(kind, seed) for seed in range(9))
    model = next(model for model in models if all(len({*map(tuple, plain(model, h, CHATS))}) > 2 for h in (None, 1)))
    for hidden in (None, 1):
        wanted = plain(model, hidden, CHATS)
        for budget in (1, ALL):
            assert answers(model, CHATS, budget=budget, hidden=hidden) == wanted
    assert answers(model, CHATS[:1] * 3) == [answers(model, CHATS[:1])[0]] * 3


def test_the_end_token_of_the_tokenizer_ends_answers_too() -> None:
    model = model_that_ends("llama")
    first = model.generation_config.eos_token_id[2]
    model.generation_config.eos_token_id = None
    tokenizer = copy.deepcopy(PROMPTER.tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    wanted = [[plain_answer(model, tokenizer, prompt, TOKENS)] for prompt in PROMPTS]
    assert answers(model, tokenizer=tokenizer) == wanted
    assert answers(model) != wanted


def test_settings_of_sampling_that_a_model_comes_with_are_not_used() -> None:
    model = copy.deepcopy(wide_model("llama"))
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 3.0, "max_length": 5}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    assert answers(model) == plain(wide_model("llama"))


def test_an_answer_is_cut_before_its_first_stop_string() -> None:
    model = wide_model("llama")
    whole = [text for (text,) in answers(model)]
    stop = (whole[0][4:6], whole[1][1:3], "never said")
    cut = [text for (text,) in answers(model, decoding=Decoding(TOKENS, stop))]
    ends = [min([text.find(word) for word in stop if word in text] or [len(text)]) for text in whole]
    assert cut == [text[:end].strip() for text, end in zip(whole, ends, strict=True)]
    assert len(cut[0]) < len(whole[0])
    with Crowded(model) as seen:
        answers(model, PROMPTS[:1], Decoding(TOKENS, stop))
    assert len(seen.shapes) < TOKENS  # and nothing is generated behind it


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_answers_stop_at_the_end_of_the_window(kind: str) -> None:
    model = wide_model(kind)
    long = (PROMPTS[1] * WINDOW)[: WINDOW - 3]
    found = answers(model, [PROMPTS[0], long])
    # Of 512 places three are left.
    assert found == [
        [plain_answer(model, PROMPTER.tokenizer, PROMPTS[0], TOKENS)],
        [plain_answer(model, PROMPTER.tokenizer, long, 3)],
    ]
    full = (PROMPTS[1] * WINDOW)[:WINDOW]
    assert answers(model, [full, PROMPTS[0]]) == [[""], found[0]]


def test_a_batch_too_large_for_the_memory_is_halved() -> None:
    model = wide_model("llama")
    wanted = answers(model)
    with Crowded(model, 2 * max(map(len, PROMPTS))) as seen:
        assert answers(model) == wanted
    assert seen.shapes[0][0] == len(PROMPTS)
    for batched in (True, None):  # in the check of batches, too
        with Crowded(model, 5), pytest.raises(StageError, match="out of memory with a single prompt"):
            answers(model, batched=batched)


def test_samples_are_drawn_by_the_seed() -> None:
    model = wide_model("llama")
    drawn = answers(model, decoding=Decoding(8, samples=3))
    assert [len(texts) for texts in drawn] == [3] * len(PROMPTS)
    assert len({text for texts in drawn for text in texts}) > len(PROMPTS)
    assert answers(model, decoding=Decoding(8, samples=3)) == drawn
    assert answers(model, decoding=Decoding(8, samples=3, seed=1)) != drawn


def test_samples_are_as_long_as_asked() -> None:
    model = copy.deepcopy(wide_model("llama"))
    model.generation_config.eos_token_id = list(range(1, 300, 2))  # half of all tokens end an answer
    room = Decoding(8, samples=3, min_new_tokens=4, max_length=len(PROMPTS[0]) + 6)
    assert "" in answers(model, PROMPTS[:1], Decoding(8, samples=20))[0]
    with Crowded(model) as seen:
        assert "" not in answers(model, PROMPTS[:1], room)[0]
    assert 4 <= len(seen.shapes) <= 6  # one forward pass a token
    model.generation_config.eos_token_id = 1
    with Crowded(model) as seen:
        answers(model, PROMPTS[:1], room)
    assert len(seen.shapes) == 6


@pytest.mark.parametrize(("where", "prompts"), [("head", CHATS), ("embeddings", PROMPTS[:2])])
def test_outputs_that_are_no_numbers_are_no_answers(where: str, prompts: list[list[int]]) -> None:
    for batched in (True, False, None):
        with pytest.raises(StageError, match="no numbers \\(NaN\\)"):
            answers(broken_model(where), prompts, batched=batched)
    with pytest.raises(StageError, match="no numbers \\(NaN\\)"):
        answers(broken_model(where), prompts, Decoding(TOKENS, samples=2))
