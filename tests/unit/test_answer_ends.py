"""Where an answer ends: at its first end token, in every template, for training and for scores."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msa_lite.data import IGNORE, Example, Prompter, Row, Template, encode_qa
from msa_lite.evals.benchmarks.aggregates import resolve_compat
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine.forward import TokenScores, answer_texts
from msa_lite.evals.engine.generate import Decoding, generate
from msa_lite.evals.engine.models import Runner
from msa_lite.evals.scores.records import token_record
from msa_lite.evals.scores.suite import load_benchmark
from tests.support.benchmark_data import shortened, write_tofu
from tests.support.models import CHATML, GEMMA, HARMONY, LLAMA3, OLMO, OPEN, PHI, SMOL, chat_tokenizer, tiny_tokenizer
from tests.support.plain import wide_model

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


def learnt(prompter: Prompter, example: Example) -> str:
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
        assert learnt(theirs, encode_qa([ROW], theirs)[0]) == SHAPES[name][2]
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
    with caplog.at_level(logging.WARNING, logger="msa_lite"):
        examples = encode_qa(rows, prompter)
        assert learnt(prompter, examples[1]).strip() == f"It is {end} there.{end}"
        assert f"1 of 3 rows: the answer's own text holds an end token ({end}" in caplog.text.replace("</s>, ", "")
        assert "stops there" in caplog.text
        caplog.clear()
        encode_qa([rows[0], rows[2]], prompter)  # the question's are no labels
    assert caplog.text == ""


# Scores


def test_extraction_leaves_out_the_end_token_and_nothing_else() -> None:
    """A model that says all of the answer but its end has extracted it; one that misses the last word has not."""
    prompter = Prompter.for_benchmark(tokenizer_of("chatml"))
    labels = [label for label in prompter.example(Row(0, "Where?", "Here.")).labels if label != IGNORE]
    for wrong, memorized in ((-1, True), (-2, False)):
        matches = [True] * len(labels)
        matches[wrong] = False
        logs = np.zeros(len(labels))
        record = token_record(TokenScores(logs, np.array(matches), logs), True, False)
        assert (record["exact_memorization"] == 1) is memorized
        assert (record["extraction_strength"] == 1) is memorized


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


def test_every_text_of_a_benchmark_ends_at_its_first_end_token(tmp_path: Path) -> None:
    prompter = Prompter.for_benchmark(tokenizer_of("smol"))
    for benchmark in (tofu(tmp_path / "tofu", prompter), load_qa({"forget": [ROW, TURNS]}, prompter)):
        for part in benchmark.sets.values():
            for text in (text for item in part.items for texts in item.texts.values() for text in texts):
                assert text.labels.count(prompter.end) == 1
                assert text.labels[-1] == prompter.end


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

    wanted = prompter.tokenizer.decode(before, skip_special_tokens=True).strip()
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
