"""Where an answer begins and ends: behind an empty block of thoughts, and at its first end token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from msa_lite.data import IGNORE, Example, Prompter, PromptSettings, Row, Template, encode_qa, make_prompter
from msa_lite.evals.benchmarks.aggregates import resolve_compat
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine.forward import answer_texts
from msa_lite.evals.engine.generate import Decoding, generate
from msa_lite.evals.engine.models import Runner
from msa_lite.evals.engine.prompt_search import prompt_forms
from msa_lite.evals.scores.records import run_items
from msa_lite.evals.scores.suite import load_benchmark
from tests.support.benchmark_data import shortened, write_tofu
from tests.support.models import CHATML, GEMMA, HARMONY, LLAMA3, OLMO, OPEN, PHI, SMOL, chat_tokenizer, tiny_tokenizer
from tests.support.plain import plain_text, wide_model

ROW = Row(0, "Where?", "Here.")
TURNS = Row(1, "Where?", "Here.", earlier=(("Who are you?", "Nobody."), ("Why?", "It is so.")))
IM = ("<|im_start|>", "<|im_end|>")
PHI_TOKENS = ("<|end|>", "<|endoftext|>")
# template, added tokens, end token of the tokenizer → the labels of an answer, and those that open-unlearning has
SHAPES: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "chatml": ((CHATML, IM, "<|im_end|>"), "Here.<|im_end|>", "Here.<|im_end|>\n<|im_end|>"),
    "chatml, another end token": ((CHATML, IM), "Here.<|im_end|>", "Here.<|im_end|>\n</s>"),
    "chatml, plain words": ((CHATML, IM, None, False), "Here.<|im_end|>", "Here.<|im_end|>\n</s>"),
    "chatml, not in the vocabulary": ((CHATML,), "Here.<|im_end|>", "Here.<|im_end|>\n</s>"),
    "smol": ((SMOL,), "Here.</s>", "Here.</s>\n</s>"),
    "llama 3": ((LLAMA3, ["<|eot_id|>"], "<|eot_id|>"), "Here.<|eot_id|>", "Here.<|eot_id|>"),
    "llama 3 from its base": ((LLAMA3, ["<|eot_id|>"]), "Here.<|eot_id|>", "Here.<|eot_id|></s>"),
    "gemma": ((GEMMA, ["<end>"]), "Here.<end>", "Here.<end>\n</s>"),
    "phi": ((PHI, PHI_TOKENS, "<|endoftext|>"), "Here.<|end|>", "Here.<|end|>\n<|endoftext|>"),
    "olmo": ((OLMO, ["<|endoftext|>"], "<|endoftext|>"), "Here.<|endoftext|>", "Here.<|endoftext|>"),
    "harmony": (
        (HARMONY, ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"], "<|return|>"),
        "<|channel|>final<|message|>Here.<|return|>",
        "<|channel|>final<|message|>Here.<|return|>",
    ),
    "none": ((OPEN,), "Here.\n</s>", "Here.\n</s>"),
}
shapes = pytest.mark.parametrize("name", SHAPES)


def tokenizer_of(name: str) -> Any:
    return chat_tokenizer(*SHAPES[name][0])


def prompters(tokenizer: Any) -> list[Prompter]:
    """The prompt of one's own rows, with and without a message, and that of published benchmarks."""
    own = Prompter.build(tokenizer, "default", Template())
    return [own, *([replace(own, system="Be brief.")] if own.takes_system else []), Prompter.for_benchmark(tokenizer)]


def learnt(prompter: Prompter, row: Row | Example) -> str:
    """What is learnt of a row, or of one that is encoded, as text."""
    example = encode_qa([row], prompter)[0] if isinstance(row, Row) else row
    return str(prompter.tokenizer.decode([label for label in example.labels if label != IGNORE]))


@shapes
def test_labels_end_at_the_first_end_token(name: str) -> None:
    for prompter in prompters(tokenizer_of(name)):
        for row in (ROW, TURNS):
            [example] = encode_qa([row], prompter)
            assert learnt(prompter, example) == SHAPES[name][1]
            assert prompter.prompt(row) == example.prompt_ids
            if prompter.end_token in prompter.tokenizer.get_vocab():
                assert example.labels.count(prompter.end) == 1
                assert example.labels[-1] == prompter.end == example.ids[-1]


@shapes
def test_open_unlearnings_labels_go_on_on_request(name: str) -> None:
    for prompter in prompters(tokenizer_of(name)):
        theirs = replace(prompter, second_end=True)
        assert learnt(theirs, ROW) == SHAPES[name][2]
        assert theirs.end_token == theirs.tokenizer.eos_token
        assert theirs.prompt(TURNS) == prompter.prompt(TURNS)


@shapes
def test_a_templates_own_end_of_turn_is_part_of_what_a_report_says(name: str) -> None:
    """The tokenizer's is not: reports and vectors from before stay valid where nothing has changed."""
    tokenizer = tokenizer_of(name)
    for prompter in prompters(tokenizer):
        described = prompter.describe()
        assert described.keys() - {"end"} == {"kind", "date_string", "system", "chat_template"}
        assert described.get("end", tokenizer.eos_token) == (prompter.end_token or tokenizer.eos_token)
    kept = name in ("llama 3", "olmo", "harmony", "none", "smol", "chatml")
    assert ("end" in described) != (kept or name == "chatml, not in the vocabulary")


@pytest.mark.parametrize("name", ["chatml", "llama 3 from its base", "plain"])
def test_an_end_token_in_the_answers_own_text_does_not_cut_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    if name == "plain":
        prompter = Prompter.build(tiny_tokenizer(), "plain", Template())
    else:
        prompter = Prompter.build(tokenizer_of(name), "chat", Template())
    end = prompter.end_token
    rows = [ROW, Row(1, "What ends a turn?", f"It is {end} there."), Row(2, f"Is it {end}?", "It is.")]
    examples = encode_qa(rows, prompter)
    assert learnt(prompter, examples[1]).strip() == f"It is {end} there.{end}"
    assert f"1 of 3 rows: the answer's own text holds an end token ({end}" in caplog.text.replace("</s>, ", "")
    assert "stops there" in caplog.text
    caplog.clear()
    encode_qa([rows[0], rows[2]], prompter)  # the question's are no labels
    assert caplog.text == ""


# Scores


def tofu(folder: Path, prompter: Prompter, *compat: str) -> Benchmark:
    switches = resolve_compat(compat, "tofu")
    settings = BenchmarkSettings(write_tofu(folder), "forget01", compat=switches)
    benchmark = load_benchmark("tofu", prompter, settings)
    assert isinstance(benchmark, Benchmark)
    return shortened(benchmark)


def test_the_switch_is_in_what_is_asked_only_where_it_changes_something(tmp_path: Path) -> None:
    for name, changes in (("olmo", False), ("phi", True)):
        prompter = Prompter.for_benchmark(tokenizer_of(name))
        ours, theirs = tofu(tmp_path / "tofu", prompter), tofu(tmp_path / "tofu", prompter, "second_end")
        assert ("second_end" in theirs.describe()["compat"]) is changes
        assert (ours.describe() != theirs.describe()) is changes
        assert (ours.sets["forget"].digest() != theirs.sets["forget"].digest()) is changes
        text = theirs.sets["forget"].items[0].texts["answer"][0]
        assert learnt(prompter, text).startswith("Author 0 is over there.")
        assert len(text.ids) == len(ours.sets["forget"].items[0].texts["answer"][0].ids) + 2 * changes


def test_answers_end_at_another_token_though_the_model_does_not_name_it() -> None:
    """A base model tuned with an instruct template: its generation config knows the end of texts alone."""
    prompter = Prompter.build(tokenizer_of("llama 3 from its base"), "chat", Template())
    model = wide_model("llama")
    prompt = prompter.prompt(Row(0, "Where?"))
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=2)[0, len(prompt) :]
    last = int(ids[3])
    before = ids[: ids.tolist().index(last)]

    def answers(decoding: Decoding, stop: int | None) -> list[str]:
        [[(_, texts)]] = list(generate(Runner(model), prompter.tokenizer, [prompt], decoding, end=stop))
        return list(texts)

    wanted = plain_text(prompter.tokenizer, before.tolist())
    assert answers(Decoding(6), last) == [wanted] != answers(Decoding(6), prompter.end)
    with torch.no_grad():
        chances = model(torch.tensor([prompt])).logits[0, -1]
    letters = prompter.tokenizer.convert_tokens_to_ids([*"BCDEFGHJKLMNOPRSTUVXYZ"])
    likely = max(letters, key=lambda token: float(chances[token]))
    for end, drawn in ((None, True), (likely, False)):
        assert (prompter.tokenizer.decode(likely) in answers(Decoding(1, samples=500), end)) is drawn


def _without_dots() -> Any:
    from tokenizers import normalizers

    return normalizers.Replace(".", "")


def test_an_answer_without_a_token_of_its_own_is_not_scored() -> None:
    for name in ("chatml", "llama 3 from its base", "phi"):
        prompter = Prompter.build(tokenizer_of(name), "chat", Template())
        assert len(answer_texts(prompter, 0, "Where?", ["Here.", " ", None])) == 1
        tokenizer = prompter.tokenizer
        tokenizer.backend_tokenizer.normalizer = _without_dots()
        assert answer_texts(prompter, 0, "Where?", ["."]) == ()
        assert len(answer_texts(prompter, 0, "Where?", [".a"])) == 1


THINK_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
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
ASKED = Row(0, "Where is it?", "It is over there.")
TALK = replace(ASKED, earlier=(("Who?", "I."),), system="Be brief.")


def build(name: str, mode: Any = "answer") -> Prompter:
    return Prompter.build(
        chat_tokenizer(thinking(*TEMPLATES[name]), THINK_TOKENS, "<|im_end|>"), "chat", Template(), None, mode
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("row", [ASKED, TALK])
def test_the_answer_begins_behind_the_block_and_the_block_belongs_to_the_prompt(name: str, row: Row) -> None:
    prompter, block = build(name), TEMPLATES[name][0]
    assert learnt(prompter, row) == "It is over there.<|im_end|>"
    prompt = prompter.tokenizer.decode(prompter.prompt(row))
    assert prompt.endswith(f"Where is it?<|im_end|>\n<|im_start|>assistant\n{block}")
    assert prompter.tokenizer.decode(encode_qa([row], prompter)[0].prompt_ids) == prompt


def test_the_templates_own_prompt_is_used_on_request() -> None:
    prompter = build("qwen3", "template")
    assert learnt(prompter, ASKED) == f"{EMPTY}It is over there.<|im_end|>"
    talk = [{"role": "user", "content": ASKED.question}]
    own = prompter.tokenizer.apply_chat_template(talk, add_generation_prompt=True)
    assert prompter.prompt(ASKED) == list(own["input_ids"])


@pytest.mark.parametrize("mode", ["answer", "template"])
def test_the_probability_is_that_of_the_answer_alone_or_with_the_block(mode: Any) -> None:
    prompter, model = build("qwen3", mode), wide_model("llama")
    [record] = run_items(Runner(model), load_qa({"forget": [ASKED]}, prompter, 2), "forget")
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
        (CHATML, THINK_TOKENS[:2]),
        (LLAMA3, ["<|eot_id|>"]),
        (HARMONY, ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]),
        (CHATML.replace("You are Smol.", "Think step by step."), THINK_TOKENS[:2]),
        (thinking("", ""), THINK_TOKENS),
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
    tokenizer = chat_tokenizer(thinking(), THINK_TOKENS, "<|im_end|>")
    tokenizer.backend_tokenizer.train_from_iterator(["\n\n\n\n" * 50], _blanks())
    assert [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("a\n\n", "a\n\nb")] == [2, 4]
    assert learnt(Prompter.build(tokenizer, "chat", Template()), ASKED) == "It is over there.<|im_end|>"


def _blanks() -> Any:
    from tokenizers import pre_tokenizers, trainers

    specials = ["<s>", "</s>", "<pad>", *THINK_TOKENS]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)


def test_thoughts_of_an_answers_own_are_learnt_with_it_and_said(caplog: pytest.LogCaptureFixture) -> None:
    row = replace(ASKED, answer="<think>\nHm.\n</think>\n\nIt is there.")
    assert learnt(build("qwen3"), row) == f"{row.answer}<|im_end|>"
    assert "1 of 1 rows: the answer holds thoughts" in caplog.text
    caplog.clear()
    encode_qa([ASKED], build("qwen3"))
    assert caplog.text == ""
