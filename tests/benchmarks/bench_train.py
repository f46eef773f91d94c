"""Tokens per second and peak memory of a LoRA fit: ours against the Trainer with PEFT.

    python -m tests.benchmarks.bench_train [PRIOR] [--rows rows.jsonl] [--layers 8 --width 512 --vocabulary 49152]
        [--common 24] [--micro 8] [--batch 32] [--steps 4] [--rounds 3]

Both train the same rows in the same order from the same adapter, with AdamW in fp32 and bf16 autocast on a GPU that has
it. The other side has the Trainer's defaults: rows in micro-batches as they come, padded to the longest of each, all
logits. Ours gets the same micro-batch, which is a budget: as many tokens as that number of the longest rows. Tokens are
those of rows, without padding. On a CPU, seconds are those that the process computes, whatever runs beside it.

PRIOR: a model folder; without one, a random Llama. Rows: "question" and "answer"; without them, random ones of 30 to
160 tokens, the second half of them labels. --common: the tokens that all random rows begin with, 0 for none.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from msa_lite.data import (
    IGNORE,
    DataSource,
    Example,
    Prompter,
    Template,
    encode_qa,
    load_rows,
    pad_id,
    to_batch,
)
from msa_lite.io.models.heads import has_bf16
from msa_lite.train import FitSettings, fit_vector
from tests.benchmarks.paired import Meter, machine, print_table, take_turns
from tests.support.models import save_checkpoint

SEED = 0


def random_rows(count: int, vocabulary: int, shared: int) -> list[Example]:
    """Rows of 30 to 160 tokens, the first ones in common, the second half labelled."""
    draw = random.Random(SEED)
    common, rows = [draw.randrange(3, vocabulary) for _ in range(shared)], []
    for index in range(count):
        length = draw.randint(30, 160)
        ids = common + [draw.randrange(3, vocabulary) for _ in range(length - shared)]
        start = max(shared + 1, length // 2)
        rows.append(Example(index, ids, [IGNORE] * start + ids[start:]))
    return rows


def random_llama(folder: Path, options: argparse.Namespace) -> Path:
    """Write a Llama of random weights with a tokenizer that nothing here uses."""
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.width * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        num_key_value_heads=max(1, options.width // 192),
        tie_word_embeddings=True,
    )
    torch.manual_seed(SEED)
    return save_checkpoint(folder, transformers.AutoModelForCausalLM.from_config(config))


def fit_theirs(prior: Path, rows: list[Example], folder: Path, options: argparse.Namespace) -> None:
    """Train with Trainer and PEFT as their documentation does."""
    transformers.set_seed(SEED)
    dtype = "auto" if has_bf16() else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(prior, dtype=dtype)
    config = LoraConfig(task_type="CAUSAL_LM", r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "saves"),
        per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=options.batch // options.micro,
        num_train_epochs=1,
        learning_rate=2e-4,
        weight_decay=0.01,
        warmup_steps=2,
        seed=SEED,
        bf16=has_bf16(),
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    pad = pad_id(transformers.AutoTokenizer.from_pretrained(prior))
    trainer = transformers.Trainer(
        model=get_peft_model(model, config),
        args=arguments,
        train_dataset=rows,
        data_collator=lambda batch: to_batch(batch, pad),
    )
    trainer.train()


def fit_ours(prior: Path, rows: list[Example], folder: Path, options: argparse.Namespace) -> None:
    """Fit a vector with the same settings."""
    settings = FitSettings(
        lora_rank=options.rank,
        lora_alpha=2 * options.rank,
        epochs=1,
        warmup_steps=2,
        batch_size=options.batch,
        micro_batch_size=options.micro,
        seed=SEED,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(prior)
    fit_vector(str(prior), rows, folder / "vector", tokenizer=tokenizer, settings=settings)


SIDES = {"theirs": fit_theirs, "ours": fit_ours}


def run_side(options: argparse.Namespace) -> dict[str, Any]:
    """Run one side in this process; return its seconds in the training loop, tokens per second, and peak in MB."""
    seconds: list[float] = []
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    train = transformers.Trainer.train

    def timed(self: Any, *args: Any, **keywords: Any) -> Any:
        start = clock()
        result = train(self, *args, **keywords)
        seconds.append(clock() - start)
        return result

    transformers.Trainer.train = timed
    transformers.utils.logging.set_verbosity_error()
    tokenizer, count = transformers.AutoTokenizer.from_pretrained(options.prior), options.batch * options.steps
    if options.rows:
        rows = encode_qa(
            load_rows(DataSource(str(options.rows)))[:count], Prompter.build(tokenizer, "default", Template())
        )
    else:
        vocabulary = transformers.AutoConfig.from_pretrained(options.prior).vocab_size
        rows = random_rows(count, vocabulary, options.common)
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        SIDES[options.side](options.prior, rows, Path(folder), options)
    peak = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else meter.read()["peak"]
    return {"seconds": seconds[0], "tokens/s": sum(len(row.ids) for row in rows) / seconds[0], "peak": peak}


def main() -> None:
    """Compare, or run one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prior", type=Path, nargs="?")
    parser.add_argument("--rows", type=Path)
    sizes = {"layers": 8, "width": 512, "vocabulary": 49152, "rank": 32, "batch": 32, "common": 24, "micro": 8}
    for name, value in (sizes | {"steps": 4, "rounds": 3}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_side(options)))
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        words = [] if options.prior else [random_llama(Path(folder) / "llama", options)]
        runs = take_turns([*SIDES], options.rounds, words)
    print_table(runs, "theirs", "seconds", ("seconds", "tokens/s", "peak"))


if __name__ == "__main__":
    main()
