"""Answers and scores of tokens against transformers, one by one, whatever the batches, the order and what is shared."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.data import IGNORE, Example, Row, Template
from msa_lite.errors import StageError
from msa_lite.evals.engine.forward import TokenScores, known_beginning, score_bundles
from msa_lite.evals.engine.generate import Decoding, generate
from msa_lite.evals.engine.models import Runner, load_model
from msa_lite.io.models import heads
from tests.support.benchmark_data import PLAIN, make_prompter
from tests.support.models import VOCABULARY
from tests.support.plain import (
    KINDS,
    SPECIAL,
    WINDOW,
    Crowded,
    broken_model,
    plain_answer,
    plain_scores,
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


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mpt"])
def test_answers_stop_at_the_end_of_the_window(kind: str) -> None:
    model = wide_model(kind)
    long = (PROMPTS[1] * WINDOW)[: WINDOW - 3]
    found = answers(model, [PROMPTS[0]] * 7 + [long])  # so many that go on that the ended one stays in the batch
    # Of 512 places three are left.
    assert found == [
        *[[plain_answer(model, PROMPTER.tokenizer, PROMPTS[0], TOKENS)]] * 7,
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


# Scores of tokens against a plain computation, whatever the batches, the order and what texts share.


Bundle = Sequence[Example]


def question(about: str, answers: Sequence[str], template: Template = PLAIN, chat: bool = False) -> list[Example]:
    prompter = make_prompter(chat, template)
    return [prompter.example(Row(0, about, answer)) for answer in answers]


def text(content: str) -> Example:
    """Running text: every token but the first is scored."""
    ids = make_prompter().tokenizer(content)["input_ids"]
    return Example(0, ids, [IGNORE, *ids[1:]])


EMPTY = Example(0, [0, 5, 6], [IGNORE] * 3)
BUNDLES: list[Bundle] = [
    question("Where is it?", ["It is over there.", "Here.", "It is not over there, it is elsewhere."]),
    question("Who was it that stood over there when nobody looked?", ["Nobody", "It was I."]),
    question("Where?", ["There."]),
    [*question("Where is it?", ["There."]), *question("Quo vadis, domine?", ["Romam"])],  # nothing in common
    [question("Where is it?", ["There."])[0], EMPTY, question("Where is it?", ["Here."])[0]],
    [EMPTY],
    [],
    [text("It is over there, where else would it be?")],
    [text("It is over there, as it was."), text("It is over there, as it is.")],  # one beginning, all of it scored
    question("Why?", ["Because.", "Because.", "Because. I said so."]),  # the same text twice
    question("Where is it?", ["It is over there.", "is it?"], Template("Question: {question}\nAnswer: ", "{answer}")),
    [Example(0, [7], [7]), Example(0, [], [])],  # nothing that anything comes before
    [Example(0, [0, 5, 3, 4, *rest, 6], [IGNORE, 5, IGNORE, 4, IGNORE, 3, 6]) for rest in ([5, 3], [4, 3])],  # some
    # One system message before all of them, and as much again in common to some.
    question("Where is it?", ["It is over there.", "Here."], chat=True),
    question("Where is it?", ["Nowhere.", "It is not over there."], chat=True),
    question("Where is it? " * 8, ["It is over there."] * 2, chat=True),
    question("Who?", ["Nobody", "It was I, who stood over there."], chat=True),
]


def score(
    model: Any, bundles: Sequence[Bundle], budget: int = ALL, hidden: int | None = None
) -> list[list[TokenScores]]:
    found = [
        pair for batch in score_bundles(Runner(model, budget), bundles, with_z=True, hidden=hidden) for pair in batch
    ]
    assert sorted(index for index, _ in found) == list(range(len(bundles)))
    return [scores for _, scores in sorted(found, key=lambda pair: pair[0])]


def assert_equal(found: Sequence[Sequence[TokenScores]], wanted: Sequence[Sequence[TokenScores]]) -> None:
    """Log-probabilities to 1e-5, z to 1e-4 (or 1e-5 of it); the same tokens are right."""
    for one, other in zip(found, wanted, strict=True):
        for mine, plain in zip(one, other, strict=True):
            assert mine.z is not None
            assert plain.z is not None
            assert mine.log_probs == pytest.approx(plain.log_probs, abs=1e-5, rel=1e-5)
            assert mine.matches.tolist() == plain.matches.tolist()
            assert mine.z == pytest.approx(plain.z, abs=1e-4, rel=1e-5)


def plain_of(model: Any, bundles: Sequence[Bundle], hidden: int | None = None) -> list[list[TokenScores]]:
    nothing = TokenScores(np.zeros(0), np.zeros(0, bool), np.zeros(0))
    return [
        [plain_scores(model, item, hidden) if len(item.ids) > 1 else nothing for item in bundle] for bundle in bundles
    ]


@pytest.mark.parametrize("kind", [*KINDS, *SPECIAL])
def test_scores_equal_a_plain_loop_in_any_batches_and_order(kind: str) -> None:
    model = wide_model(kind)
    wanted = plain_of(model, BUNDLES)
    for budget in (1, 64, ALL):
        assert_equal(score(model, BUNDLES, budget), wanted)
    order = random.Random(0).sample(range(len(BUNDLES)), len(BUNDLES))
    assert_equal(score(model, [BUNDLES[i] for i in order], 200), [wanted[i] for i in order])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_a_token_may_be_hidden_wherever_it_stands(kind: str) -> None:
    model = wide_model(kind)
    hidden = make_prompter().tokenizer("e")["input_ids"][1]
    assert any(hidden in item.ids[1:-3] for bundle in BUNDLES for item in bundle)
    for budget in (1, ALL):
        assert_equal(score(model, BUNDLES, budget, hidden), plain_of(model, BUNDLES, hidden))
    shown, unseen = (plain_scores(model, BUNDLES[1][0], token) for token in (None, hidden))
    assert np.abs(shown.log_probs - unseen.log_probs).max() > 0.01


def test_a_vocabulary_is_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("llama", "gemma2"):
        model = wide_model(kind)
        wanted = score(model, BUNDLES)
        monkeypatch.setattr(heads, "_BLOCK_BYTES", 4 * VOCABULARY * 3)
        assert_equal(score(model, BUNDLES), wanted)
        assert_equal(score(model, BUNDLES, budget=0), wanted)  # the budget that is found by itself
        monkeypatch.undo()


def test_a_uniform_prediction_is_no_surprise_either_way() -> None:
    import copy

    import torch

    model = copy.deepcopy(wide_model("qwen2"))
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    for one in score(model, BUNDLES[:1])[0]:
        # Each of 300 tokens has log(1/300); none is above or below the mean.
        assert one.log_probs == pytest.approx(-np.log(VOCABULARY), abs=1e-5, rel=1e-5)
        assert one.z == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("prompt", "labels", "matches", "known"),
    [
        ([0, 5], [IGNORE, IGNORE, 6, 7, 8], [True, True, True], [6, 7, 8]),
        ([0, 5], [IGNORE, IGNORE, 6, 7, 8], [True, False, True], [6]),
        ([0, 5], [IGNORE, IGNORE, 6, 7, 8], [False, True, True], []),
        ([0, 5], [IGNORE, 5, 6, 7, 8], [False, True, True, False], [6, 7]),  # the prompt is scored, too
        ([0, 4], [IGNORE, IGNORE, 6, 7, 8], [True, True, True], []),  # another prompt
        ([0, 5], [IGNORE, IGNORE, IGNORE, 7, 8], [True, True], []),  # nobody knows about the token behind it
        ([0, 5, 6, 7, 8], [IGNORE, IGNORE, 6, 7, 8], [True, True, True], []),
        ([], [IGNORE, 5, 6, 7, 8], [True] * 4, []),
    ],
)
def test_scores_tell_how_far_a_model_recites_a_text(
    prompt: list[int], labels: list[int], matches: list[bool], known: list[int]
) -> None:
    scores = TokenScores(np.zeros(len(matches)), np.array(matches))
    assert known_beginning(prompt, Example(0, [0, 5, 6, 7, 8], labels), scores) == known


@pytest.mark.parametrize("options", [{}, {"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_adapters_are_scored_as_they_are(
    options: dict[str, Any], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from tests.support.models import save_adapter, tiny_model

    below = make_checkpoint("qwen2", max_position_embeddings=512)
    prior = tiny_model("qwen2", max_position_embeddings=512)
    prior.name_or_path = str(below)
    folder = save_adapter(tmp_path / "adapter", prior, scale=0.5, **options)
    model = load_model(folder)
    found = score(model, BUNDLES)
    assert_equal(found, plain_of(model, BUNDLES))
    assert not np.allclose(found[0][0].log_probs, score(load_model(below), BUNDLES)[0][0].log_probs, atol=1e-3)


def test_a_batch_of_texts_too_large_for_the_memory_is_halved() -> None:
    model = wide_model("llama")
    wanted = score(model, BUNDLES)
    longest = max(len(item.ids) for bundle in BUNDLES for item in bundle)
    with Crowded(model, 2 * longest):
        runner = Runner(model, ALL)
        found = dict(pair for batch in score_bundles(runner, BUNDLES, with_z=True) for pair in batch)
    assert_equal([found[i] for i in range(len(BUNDLES))], wanted)
    assert 0 < runner.budget < ALL


@pytest.mark.parametrize("budget", [1, ALL])
def test_a_single_item_too_large_for_the_memory_is_said(budget: int) -> None:
    with (
        Crowded(wide_model("llama"), 8),
        pytest.raises(StageError, match="out of memory with a single item of 3 texts"),
    ):
        score(wide_model("llama"), BUNDLES[:1], budget)


@pytest.mark.parametrize("where", ["head", "embeddings"])
def test_outputs_that_are_no_numbers_are_no_scores(where: str) -> None:
    for bundle in (BUNDLES[0], BUNDLES[7]):  # answers to one question, and running text
        with pytest.raises(StageError, match="no numbers \\(NaN\\)"):
            score(broken_model(where), [bundle])
