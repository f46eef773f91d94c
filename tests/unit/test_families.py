"""Scores and answers of every family with a causal head in transformers, against transformers one row at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from msa_lite.data import Row
from msa_lite.evals.engine.forward import WORTH_SHARING, common_start, score_bundles
from msa_lite.evals.engine.generate import Decoding, generate, sample_answers
from msa_lite.evals.engine.models import Runner
from tests.support.benchmark_data import make_prompter
from tests.support.families import UNFIT, tiny_family
from tests.support.plain import plain_answer, plain_scores

TOKENS = 12
PROMPTER = make_prompter()
ABOUT = ["Where is it?", "Who was it that stood over there?", "Why?", "It?", "Quo vadis, domine?"]
# Of different lengths; with a beginning in common that is worth sharing.
PROMPTS = [PROMPTER.prompt(Row(0, f"Nobody knows: {about}")) for about in ABOUT]
assert common_start(PROMPTS) >= WORTH_SHARING
TEXTS = [
    [PROMPTER.example(Row(0, question, answer)) for answer in answers]
    for question, answers in {
        "Where is it?": ("It is over there.", "Here."),
        "Who was it that stood over there when nobody looked?": ("Nobody", "It was I."),
        "Why?": ("Because.",),
    }.items()
]
# States of several kinds, sliding windows, soft caps, experts.
TELLING = ["llama", "gpt2", "gemma2", "gemma3_text", "gpt_oss", "mamba", "mamba2", "rwkv", "recurrent_gemma"]
TELLING += ["falcon_h1", "jamba", "qwen3_next"]
# Padding before a prompt, or a cache, goes wrong with these, so that they answer one prompt at a time.
ALONE = {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "git", "marian", "mbart", "mvp", "openai-gpt"}
ALONE |= {"moss_transcribe_diarize", "pegasus", "plbart", "recurrent_gemma", "reformer", "rwkv", "trocr", "whisper"}
ALONE |= {"xlm", "xlstm"}
OTHERS = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in TELLING and kind not in UNFIT]


def answers(runner: Runner, decoding: Decoding = Decoding(TOKENS)) -> list[str]:  # noqa: B008
    batches = generate(runner, PROMPTER.tokenizer, PROMPTS, decoding)
    return [texts[0] for _, texts in sorted(pair for batch in batches for pair in batch)]


@pytest.mark.parametrize("kind", [*TELLING, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_a_family_scores_and_answers_as_one_row_at_a_time(kind: str) -> None:
    model = tiny_family(kind)
    runner = Runner(model)
    scores = dict(pair for batch in score_bundles(runner, TEXTS) for pair in batch)
    for number, texts in enumerate(TEXTS):
        for score, text in zip(scores[number], texts, strict=True):
            assert score.log_probs == pytest.approx(plain_scores(model, text).log_probs, abs=1e-4, rel=1e-5)
    assert answers(runner) == [plain_answer(model, PROMPTER.tokenizer, prompt, TOKENS) for prompt in PROMPTS]
    assert runner.batched is (kind not in ALONE)


@pytest.mark.parametrize("kind", ["llama", "rwkv"])
def test_answers_one_at_a_time_are_cut_stopped_and_drawn_as_in_batches(kind: str) -> None:
    model = tiny_family(kind)
    whole = answers(Runner(model, batched=False))
    pairs = (text[at : at + 2] for text in whole for at in range(1, len(text) - 1))
    stop = (next(pair for pair in pairs if "\ufffd" not in pair), "never said")  # whole characters
    end = model.generate(torch.tensor(PROMPTS[1:2]), max_new_tokens=5, do_sample=False)[0, -1].item()
    model.generation_config.eos_token_id = [1, end]
    model.generation_config.repetition_penalty = 9.0  # a setting that is not used
    ended = answers(Runner(model, batched=False))
    assert ended == [plain_answer(model, PROMPTER.tokenizer, prompt, TOKENS) for prompt in PROMPTS]
    assert ended != whole
    assert model.generation_config.repetition_penalty == 9.0
    stopped = answers(Runner(model, batched=False), Decoding(TOKENS, stop))
    assert stopped == [min((text.split(word)[0] for word in stop), key=len).strip() for text in ended]

    def drawn(**settings: Any) -> list[tuple[int, int, str]]:
        batches = sample_answers(Runner(model, **settings), PROMPTER.tokenizer, PROMPTS, 2, Decoding(6))
        return sorted(sample for batch in batches for sample in batch)

    assert drawn(batched=False) == drawn(budget=1)
    assert len(set(drawn(batched=False))) == 2 * len(PROMPTS)


def test_a_fault_of_batches_alone_is_no_fault_of_the_run() -> None:
    def fail(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if len(inputs["input_ids"]) > 1:
            raise TypeError("no batches")

    model = tiny_family("llama")
    wanted = answers(Runner(model))
    hook = model.base_model.register_forward_pre_hook(fail, with_kwargs=True)
    runner = Runner(model)
    assert answers(runner) == wanted
    assert runner.batched is False
    hook.remove()
