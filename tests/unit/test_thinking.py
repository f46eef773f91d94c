"""Chat templates with an empty block of thoughts before answers: where the answer begins."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from msa_lite.data import IGNORE, Prompter, PromptSettings, Row, Template, encode_qa, make_prompter
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine.models import Runner
from msa_lite.evals.engine.prompt_search import prompt_forms
from msa_lite.evals.scores.records import run_items
from tests.support.models import CHATML, HARMONY, LLAMA3, chat_tokenizer
from tests.support.plain import wide_model

IM = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
EMPTY = "<think>\n\n</think>\n\n"


def thinking(block: str = EMPTY, opened: str = "") -> str:
    """A template with a block before the last answer, and with a beginning of it at the end of prompts."""
    return (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and loop.last and '</think>' not in m['content'] %}" + block + "{% endif %}"
        "{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + opened + "{% endif %}"
    )


# What stands before an answer, and what the template's own prompt ends in.
TEMPLATES = {
    "qwen3": (EMPTY, ""),
    "opened": (EMPTY, "<think>\n"),
    "glm": ("<think></think>\n", ""),
    "r1": ("", "<think>\n"),
    "words": ("[THINK][/THINK]", ""),
    "with an answer's tag": ("<think>\n\n</think>\n<answer>\n", ""),
}
ROW = Row(0, "Where is it?", "It is over there.")
TALK = replace(ROW, earlier=(("Who?", "I."),), system="Be brief.")


def build(name: str, mode: Any = "answer") -> Prompter:
    return Prompter.build(chat_tokenizer(thinking(*TEMPLATES[name]), IM, "<|im_end|>"), "chat", Template(), None, mode)


def learnt(prompter: Prompter, row: Row) -> str:
    [example] = encode_qa([row], prompter)
    return str(prompter.tokenizer.decode([label for label in example.labels if label != IGNORE]))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("row", [ROW, TALK])
def test_the_answer_begins_behind_the_block_and_the_block_belongs_to_the_prompt(name: str, row: Row) -> None:
    prompter, block = build(name), TEMPLATES[name][0]
    assert learnt(prompter, row) == "It is over there.<|im_end|>"
    prompt = prompter.tokenizer.decode(prompter.prompt(row))
    assert prompt.endswith(f"Where is it?<|im_end|>\n<|im_start|>assistant\n{block}")
    assert prompter.tokenizer.decode(encode_qa([row], prompter)[0].prompt_ids) == prompt


def test_the_templates_own_prompt_is_used_on_request() -> None:
    prompter = build("qwen3", "template")
    assert learnt(prompter, ROW) == f"{EMPTY}It is over there.<|im_end|>"
    talk = [{"role": "user", "content": ROW.question}]
    own = prompter.tokenizer.apply_chat_template(talk, add_generation_prompt=True)
    assert prompter.prompt(ROW) == list(own["input_ids"])


@pytest.mark.parametrize("mode", ["answer", "template"])
def test_the_probability_is_that_of_the_answer_alone_or_with_the_block(mode: Any) -> None:
    prompter, model = build("qwen3", mode), wide_model("llama")
    [record] = run_items(Runner(model), load_qa({"forget": [ROW]}, prompter, 2), "forget")
    text = f"<|im_start|>user\nWhere is it?<|im_end|>\n<|im_start|>assistant\n{EMPTY}It is over there.<|im_end|>"
    ids, places = (
        prompter.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[key]
        for key in ("input_ids", "offset_mapping")
    )
    first = text.index("It is" if mode == "answer" else EMPTY)
    count = sum(begin < first for begin, _ in places)
    with torch.no_grad():
        logs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    wanted = torch.stack([logs[i - 1, ids[i]] for i in range(count, len(ids))]).mean().exp()
    assert record["scores"]["answer"][0]["n_tokens"] == len(ids) - count
    assert record["scores"]["answer"][0]["probability"] == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize(
    ("template", "added"),
    [
        (CHATML, IM[:2]),
        (LLAMA3, ["<|eot_id|>"]),
        (HARMONY, ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]),
        (CHATML.replace("You are Smol.", "Think step by step."), IM[:2]),
        (thinking("", ""), IM),
    ],
    ids=["chatml", "llama3", "harmony", "a message that says think", "no block"],
)
def test_templates_without_a_block_are_left_alone(template: str, added: list[str]) -> None:
    ours = Prompter.build(chat_tokenizer(template, added), "chat", Template())
    modes = [ours, replace(ours, thinking="template")]
    assert not modes[0].has_block
    assert modes[0].example(Row(0, "Where?", "Here.")) == modes[1].example(Row(0, "Where?", "Here."))
    assert modes[0].describe() == modes[1].describe()


def test_the_choice_is_part_of_what_a_manifest_and_a_report_say() -> None:
    ours, theirs = build("qwen3"), build("qwen3", "template")
    assert ours.describe() == theirs.describe() | {"thinking": "answer"}
    assert (ours.settings(), theirs.settings()) == ({"kind": "chat"}, {"kind": "chat", "thinking": "template"})
    assert {form.thinking for form in prompt_forms(theirs).values() if form.use_chat} == {"template"}


@pytest.mark.parametrize("published", [False, True])
def test_the_recipes_choice_reaches_the_prompter(published: bool) -> None:
    tokenizer = build("qwen3").tokenizer
    for mode in ("answer", "template"):
        settings = PromptSettings(thinking=mode)  # type: ignore[arg-type]
        prompter = make_prompter(tokenizer, settings, published)
        assert (prompter.thinking, prompter.published) == (mode, published)
    assert make_prompter(tokenizer, PromptSettings()).thinking == "answer"


def test_tokenizers_that_join_blanks_do_not_shift_the_answer() -> None:
    """The block's end alone is one token, but two before a word, as GPT-2's tokenizer divides blanks."""
    tokenizer = chat_tokenizer(thinking(), IM, "<|im_end|>")
    tokenizer.backend_tokenizer.train_from_iterator(["\n\n\n\n" * 50], _blanks())
    assert [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("a\n\n", "a\n\nb")] == [2, 4]
    assert learnt(Prompter.build(tokenizer, "chat", Template()), ROW) == "It is over there.<|im_end|>"


def _blanks() -> Any:
    from tokenizers import pre_tokenizers, trainers

    specials = ["<s>", "</s>", "<pad>", *IM]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)


def test_thoughts_of_an_answers_own_are_learnt_with_it_and_said(caplog: pytest.LogCaptureFixture) -> None:
    row = replace(ROW, answer="<think>\nHm.\n</think>\n\nIt is there.")
    with caplog.at_level(logging.WARNING, logger="msa_lite"):
        assert learnt(build("qwen3"), row) == f"{row.answer}<|im_end|>"
    assert "1 of 1 rows: the answer holds thoughts" in caplog.text
    caplog.clear()
    encode_qa([ROW], build("qwen3"))
    assert caplog.text == ""
