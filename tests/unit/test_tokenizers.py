"""All that tokenizers add to texts and take away, against plain transformers."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from msa_lite.data import (
    IGNORE,
    Prompter,
    Row,
    Template,
    added_ids,
    cut_text,
    decode_answer,
    encode_next,
    encode_qa,
    encode_start,
    encode_text,
    shorten,
)
from msa_lite.data.tokenizers import encode_plain
from msa_lite.evals.benchmarks.benchmark import Benchmark, text_item
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.benchmarks.restor import RESTOR
from msa_lite.evals.benchmarks.tofu import TOFU
from msa_lite.evals.engine.models import Runner
from msa_lite.evals.scores.records import run_items
from tests.support.models import CHATML, HARMONY, SMOL, chat_tokenizer, tiny_tokenizer

TEXTS = ["Question: Where is it?\nAnswer: It is 3.14 by the mill's weir, over there."] * 9
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
NAMES = {f"{name}_token": f"<{name}>" for name in ("unk", "pad")} | {"bos_token": "<s>", "eos_token": "</s>"}


def with_ids(tokenizer: Any, **how: Any) -> Any:
    """Add <ID_0> … as special tokens, or as `how` says."""
    settings = {"special": True, "normalized": False} | how
    tokenizer.add_tokens([AddedToken(f"<ID_{i}>", **settings) for i in range(9)])
    return tokenizer


def wrapped(tokenizer: Any, single: str) -> Any:
    """Set what the post-processor adds around a text $A."""
    names = [name for name in single.split() if name != "$A"]
    tokens = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    return tokenizer


def byte_level(single: str = "<s> $A", **how: Any) -> Any:
    return wrapped(with_ids(tiny_tokenizer(), **how), single)


def no_names() -> Any:
    """As from a bare tokenizer.json: no token has a role."""
    return transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level("$A").backend_tokenizer)


def unigram(scheme: Any, **settings: Any) -> Any:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    letters = [chr(code) for code in range(33, 127)]
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=letters
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **NAMES, **settings)
    return wrapped(with_ids(fast), "<s> $A")


def llama(**settings: Any) -> Any:
    """The class of Llama 2's tokenizer; its padding token is the unknown one, as many people set it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    codes = [f"<0x{code:02X}>" for code in range(256)]
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIAL, *codes]))
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    own = transformers.LlamaTokenizer(vocab=model["vocab"], merges=merges, add_bos_token=True, **settings)
    own.pad_token = own.unk_token
    return with_ids(own)


def llama_2() -> Any:
    """Blanks as in the file of Llama 2, which sets one before each piece of text between special tokens."""
    tokenizer = llama()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    return tokenizer


def word_piece(**settings: Any) -> Any:
    """It writes lower case, divides 3.14, and names no end token, though [SEP] ends all that it was trained on."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **settings)
    return wrapped(with_ids(fast), "[CLS] $A [SEP]")


def slow() -> Any:
    """A tokenizer in Python over a SentencePiece model."""
    import sentencepiece

    file = Path(tempfile.mkdtemp()) / "spiece.model"
    settings: dict[str, Any] = {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": "\n"}
    with file.open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_writer=writer, vocab_size=330, minloglevel=2, **settings
        )
    return with_ids(transformers.GPTSw3Tokenizer(str(file), name_or_path="gpt-sw3-126m"))


# name: (tokenizer, what stands before a text, what ends an answer)
TOKENIZERS: dict[str, tuple[Callable[[], Any], list[str], str | None]] = {
    "byte-level": (tiny_tokenizer, ["<s>"], "</s>"),
    "special tokens added": (byte_level, ["<s>"], "</s>"),
    "words added": (lambda: byte_level(special=False), ["<s>"], "</s>"),
    "added, taking blanks": (lambda: byte_level(lstrip=True, rstrip=True), ["<s>"], "</s>"),
    "appends an end": (lambda: byte_level("<s> $A </s>"), ["<s>"], "</s>"),
    "adds nothing": (lambda: byte_level("$A"), [], "</s>"),
    "no names": (no_names, [], None),
    "unigram, always": (lambda: unigram("always"), ["<s>"], "</s>"),
    "unigram, first": (lambda: unigram("first"), ["<s>"], "</s>"),
    "unigram, never": (lambda: unigram("never"), ["<s>"], "</s>"),
    "unigram, clean up": (lambda: unigram("always", clean_up_tokenization_spaces=True), ["<s>"], "</s>"),
    "llama": (llama, ["<s>"], "</s>"),
    "llama 2": (llama_2, ["<s>"], "</s>"),
    "llama, appends": (lambda: llama(add_eos_token=True), ["<s>"], "</s>"),
    "word piece": (word_piece, ["[CLS]"], "[SEP]"),
    "word piece, clean up": (lambda: word_piece(clean_up_tokenization_spaces=True), ["[CLS]"], "[SEP]"),
    "slow": (slow, [], "<|endoftext|>"),
    "bytes, slow": (lambda: with_ids(transformers.ByT5Tokenizer()), [], "</s>"),
}
ANSWERS = ["It is 3.14 , <ID_7> by the mill 's.", "<ID_7>", "<ID_7> by the weir", "3.14 , by <ID_7>"]
tokenizers = pytest.mark.parametrize("name", TOKENIZERS)


def reciter(ids: list[int], start: int, size: int) -> Any:
    """A model that says ids[start:] at these places, whatever it is asked: no training, so alike on all processors."""
    width = (len(ids) + 31) // 4 * 4
    sizes = {"vocab_size": size, "n_positions": width, "n_embd": width, "n_layer": 1, "n_head": 1}
    config = transformers.GPT2Config(
        **sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(width))
        model.transformer.ln_f.weight.fill_(1.0)
        for at in range(start, len(ids)):
            model.lm_head.weight[ids[at], at - 1] = 2.0
    return model


@tokenizers
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_recited_answer_counts_and_one_with_another_token_does_not(name: str, answer: str) -> None:
    build, before, end = TOKENIZERS[name]
    tokenizer = build()
    prompter = Prompter.build(tokenizer, "default", Template())
    begin, ends = (tokenizer.convert_tokens_to_ids([n for n in names if n]) for names in (before, [end]))

    def plain(text: str) -> list[int]:
        return begin + list(tokenizer(text, add_special_tokens=False)["input_ids"])

    row, prompt = Row(0, "Where?", answer), plain("Question: Where?\nAnswer:")
    for said in (answer, answer.replace("_7", "_3")):
        ids = plain(f"Question: Where?\nAnswer: {said}") + ends
        model = reciter(ids, len(prompt), len(tokenizer))
        benchmark = load_qa({"forget": [row]}, prompter, len(ids) - len(prompt) - (not ends) + 1)
        [item] = benchmark.sets["forget"].items
        assert (item.prompt, prompter.full(Row(0, "Where?", said))) == (prompt, ids)
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
        output = model.generate(**inputs, max_new_tokens=len(ids) - len(prompt), pad_token_id=0)
        assert output[0].tolist() == ids, "transformers recites it"
        [record] = run_items(Runner(model), benchmark, "forget")
        wanted = tokenizer.decode([i for i in ids[len(prompt) :] if i not in ends], clean_up_tokenization_spaces=False)
        assert record["generated"] == wanted.strip()
        is_right = said == answer
        assert (record["accuracy"], record["rouge_l"] == 1.0) == (is_right, is_right)
        assert (record["exact_memorization"] == record["extraction_strength"] == 1.0) is is_right
        [text] = item.texts["answer"]
        with torch.no_grad():
            logs = model(torch.tensor([text.ids])).logits[0].double().log_softmax(-1)
        places = range(len(prompt), len(text.ids))
        probability = torch.stack([logs[at - 1, text.ids[at]] for at in places]).mean().exp()
        assert record["probability"] == pytest.approx(float(probability), rel=1e-5)


@tokenizers
def test_texts_begin_alike_wherever_they_are_read_and_nothing_ends_them(name: str) -> None:
    build, before, _ = TOKENIZERS[name]
    tokenizer, text = build(), TEXTS[0]
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = tokenizer.convert_tokens_to_ids(before) + plain
    assert encode_start(tokenizer, text) == ids
    [chunk] = encode_text([Row(0, text=text)], Prompter(tokenizer, Template(), False), 500)
    [scored] = text_item(tokenizer, 0, text).texts["text"]
    assert (chunk.ids, scored.ids) == (ids, ids)
    first = max(1, len(before))
    assert scored.labels == [IGNORE] * first + ids[first:]
    again = encode_start(tokenizer, "".join(before) + text)
    assert [token for token in again if token in ids[: len(before)]] == ids[: len(before)]
    cut = cut_text(tokenizer, text, len(plain) // 2)
    assert text.replace("\n", " ").lower().startswith(cut.replace("\n", " ").lower().strip())
    assert len(tokenizer(cut, add_special_tokens=False)["input_ids"]) <= len(plain) // 2 + 1
    assert cut_text(tokenizer, text, 500) == text
    known = list(tokenizer("Answer:", add_special_tokens=False)["input_ids"])
    whole = tokenizer("Answer: over there", add_special_tokens=False)["input_ids"]
    assert known + encode_next(tokenizer, "over there") == whole


def looking_back() -> Any:
    """Digits in threes from the right, so that the first token of a number depends on its last digit."""
    tokenizer = byte_level()
    threes = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(?:\d{3})*(?!\d))"), "isolated")
    level = tokenizer.backend_tokenizer.pre_tokenizer
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([threes, level])
    return tokenizer


def in_pairs() -> Any:
    """Of an odd number of the letter a, one stands alone, and a later one decides which."""
    vocabulary = [("<unk>", 0.0), ("a", -9.0), ("aa", -1.0), ("aaaab", -1.0), ("b", -9.0), (" ", -1.0)]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(vocabulary, 0)))


_WORDS = "It is 3.14 by the mill's weir, naïve 漢字 <ID_7> over there. " * 45
LONG = {
    "words": _WORDS,
    "a run": _WORDS[:700] + "a" * 2001 + _WORDS[:700],
    "a alone": "a" * 2001,
    "one word": "theee" * 600,
    "digits": "1234567" * 401,
    "blanks": " " * 1501 + "\n" * 1000 + "a" * 999,
    "marks": "e" + "\u0301\u0316" * 1200,
    "emoji": "👩\u200d👩\u200d👧 İß" * 300,
    "added": "<ID_7><pad>x <ID_8>" * 140,
}


@pytest.mark.parametrize("name", [*TOKENIZERS, "looking back", "in pairs"])
def test_a_long_text_has_the_ids_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"looking back": looking_back, "in pairs": in_pairs}
    tokenizer = (others.get(name) or TOKENIZERS[name][0])()
    for constant, value in {"_LONG": 256, "_SHARED": 32, "_STEP": 131}.items():
        monkeypatch.setattr(f"msa_lite.data.tokenizers.{constant}", value)
    for kind, text in LONG.items():
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
        for most in (1, 60, None):
            assert encode_plain(tokenizer, text, most) == whole["input_ids"][:most], kind
        if tokenizer.is_fast and len(whole["input_ids"]) > 60:
            assert cut_text(tokenizer, text, 60) == text[: whole["offset_mapping"][59][1]], kind


@pytest.mark.parametrize("build", [tiny_tokenizer, llama, word_piece])
def test_of_a_long_row_little_reaches_the_tokenizer_at_once(build: Any) -> None:
    reads, tokenizer, text = list[int](), build(), TEXTS[0] * 6000

    class Watched(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: str, **options: Any) -> Any:
            reads.append(len(text))
            return super().__call__(text, **options)

    tokenizer.__class__ = Watched
    prompter = Prompter(tokenizer, Template(), False, window=300)
    example = prompter.example(Row(0, "Where?", text))
    assert len(example.ids) > 300
    chunks = encode_text([Row(0, text=text)], prompter, 300)
    assert sum(len(chunk.ids) for chunk in chunks) > 60_000
    assert shorten([Row(0, "Where?", "Here.", earlier=((text, text),))], prompter, 300)[1]
    assert len(cut_text(tokenizer, text, 9)) < 60
    assert max(reads) * 3 < len(text)


@pytest.mark.parametrize("model", [models.BPE({"<s>": 0, "</s>": 1, "C": 2, "G": 3}, []),
                                   models.WordLevel({"<s>": 0, "</s>": 1, "CG": 2}, unk_token="<s>")])  # fmt: skip
def test_what_is_added_is_found_by_tokens_that_the_tokenizer_has(model: Any) -> None:
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="<s>")
    assert added_ids(wrapped(bare, "<s> $A </s>")) == ([0], [1])


def test_what_is_added_needs_no_list_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda _: pytest.fail("it takes some 30 ms a row"))
    assert added_ids(tokenizer) == ([tokenizer.bos_token_id], [])


@pytest.mark.parametrize(("benchmark", "score"), [(TOFU, "accuracy"), (RESTOR, "containment")])
@pytest.mark.parametrize(
    ("make", "said", "counts"), [(word_piece, "3 . 14", 1.0), (byte_level, "3.14</s>", 1.0), (byte_level, "3.15", 0.0)]
)
def test_published_benchmarks_compare_on_equal_terms(
    benchmark: Benchmark, score: str, make: Any, said: str, counts: float
) -> None:
    of_tokenizer = replace(benchmark, prompter=SimpleNamespace(tokenizer=make()))  # type: ignore[arg-type]
    record = {"index": 0, "question": "What?", "answer": "3.14", "answers": ["4", "3.14"], "generated": said}
    assert benchmark.score(of_tokenizer, "forget", record)[score] == counts


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("template", [SMOL, CHATML, "{{ bos_token }}" + CHATML])
def test_a_chat_prompt_is_that_of_transformers_and_begins_once(single: str, template: str) -> None:
    tokenizer = wrapped(chat_tokenizer(template, ["<|im_start|>", "<|im_end|>"]), single)
    prompter = Prompter.build(tokenizer, "chat", Template())
    talk = [{"role": "user", "content": "Where?"}]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompter.prompt(Row(0, "Where?", "Here.")) == prompt
    plain = Prompter.build(tokenizer, "plain", Template("<s>[INST] {question} [/INST]"))
    assert [*plain.prompt(Row(0, "Where?")), *plain.full(Row(0, "Where?", "Here."))].count(0) == 2


def test_an_answer_loses_end_and_padding_tokens_and_a_channel_of_the_template_alone() -> None:
    tokenizer = byte_level()
    ids = tokenizer("<s><s>By <ID_7><pad>.</s>")["input_ids"][1:]
    assert decode_answer(tokenizer, ids) == "<s>By <ID_7>."
    assert decode_answer(llama(), [llama().unk_token_id]) == "<unk>", "as it pads, but it may be a part of an answer"
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    prompter = Prompter.build(chat_tokenizer(HARMONY, names, "<|return|>"), "chat", Template())
    row = Row(0, "Where?", "In Rome.")
    labels = prompter.full(row)[len(prompter.prompt(row)) :]
    for before, wanted in (([], "In Rome."), (prompter.tokenizer("<|end|>")["input_ids"][1:], None)):
        ids = before + labels
        model = reciter(prompter.prompt(row) + ids, len(prompter.prompt(row)), len(prompter.tokenizer))
        [record] = run_items(Runner(model), load_qa({"forget": [row]}, prompter, 60), "forget")
        assert record["accuracy"] == 1.0, "special tokens touch no word"
        assert record["generated"] == (wanted or "<|end|><|channel|>final<|message|>In Rome.")


TURNS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "chat", "cause"),
    [
        (Template("Answer: ", "{answer}"), None, r"end ' ' as a part of ' It' \(row 3, '.*: It.*put the blank at the"),
        (Template("Is it over th", "{answer}"), None, r"end ' th' as a part of ' the.*have prompt.answer begin"),
        (
            Template(),
            TURNS + "{% if add_generation_prompt %}assistant: {% endif %}",
            "' ' as a part of ' It'.*chat templ",
        ),
        (
            Template(),
            TURNS + "{% if add_generation_prompt %}model:{% endif %}",
            "a prompt ends with 'model:', where the whole row has 'a'",
        ),
    ],
)
def test_the_warning_about_a_prompt_that_is_not_the_beginning_names_the_cause(
    template: Template, chat: str | None, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat
    answer = "ere" if template.prompt.endswith("th") else "It is."
    encode_qa([Row(3, "Where?", answer)], Prompter.build(tokenizer, "default", Template()))
    assert chat or not caplog.text
    encode_qa([Row(3, "Where?", answer)], Prompter.build(tokenizer, "default", template))
    assert "1 of 1 rows" in caplog.text
    assert re.search(cause, caplog.text), caplog.text
