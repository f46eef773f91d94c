"""A small Llama that answers TOFU's or MUSE's questions, for bench_evaluate.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from msa_lite.cli.output import progress_bars
from msa_lite.data import SYSTEM_PROMPT, DataSource, Prompter, Template, encode_qa, load_rows
from msa_lite.evals.benchmarks.benchmark import BenchmarkSettings
from msa_lite.evals.benchmarks.muse import MUSE

TOKENS = 4096
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{% if m['role'] == 'system' %}Cutting Knowledge Date: December 2023\nToday Date: {{ date_string }}\n\n{% endif %}"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def make_model(options: argparse.Namespace) -> Path:
    """The folder of a small Llama that has learnt TOFU rows, made unless it is there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from msa_lite.train import FitSettings, fit_vector

    work, template = options.work, options.template
    if options.suite == "tofu":
        rows = load_rows(DataSource(options.data, name="forget10"))
        rows += load_rows(DataSource(options.data, name="retain90"))[: len(rows)]
    else:
        sides = ("forget_qa", "retain_qa")
        rows = [row for side in sides for row in load_rows(DataSource(options.data, name="knowmem", split=side))]
    start = work / f"start-{options.suite}-{template}"
    if not start.exists():
        # Of the words that all prompts hold each is one token, as in a large tokenizer.
        same = (
            "system user assistant Cutting Knowledge Date: December 2023\nToday Date: 10 Apr 2025\n\n" + SYSTEM_PROMPT
        )
        texts = [text for row in rows for text in (f" {row.question}", f" {row.answer}", same)]
        if options.suite == "muse":
            raw = (load_rows(DataSource(options.data, "text", name="raw", split=s)) for s in ("forget", "holdout"))
            texts += [row.text for part in raw for row in part]
        write_start(start, template, texts)
    tokenizer = AutoTokenizer.from_pretrained(start)
    prompter = Prompter.build(tokenizer, "default", Template())
    examples = encode_qa(rows, prompter)
    if options.suite == "muse":
        passages = MUSE.load(prompter, BenchmarkSettings(options.data)).sets["verbmem"].items
        examples += [text for item in passages for text in item.texts["text"]]
    settings = FitSettings("full", epochs=options.epochs, learning_rate=2e-3, weight_decay=0, batch_size=16)
    trained = work / f"trained-{options.suite}-{template}-{options.epochs}"
    with progress_bars() as progress:
        fit_vector(str(start), examples, trained, tokenizer=tokenizer, settings=settings, progress=progress)
    folder = work / f"model-{options.suite}-{template}-{options.epochs}-{options.vocabulary}"
    if not folder.exists():
        model = AutoModelForCausalLM.from_pretrained(trained)
        model.resize_token_embeddings(options.vocabulary)  # rows that are the mean of all others: never the likeliest
        model.config.use_cache = True
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def write_start(folder: Path, template: str, texts: Sequence[str]) -> None:
    """Random weights, and a tokenizer made from the texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(texts, trainer)
    if template == "plain":
        inner.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=special[0], eos_token=special[1])
    tokenizer.chat_template = CHAT if template == "chat" else None
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
