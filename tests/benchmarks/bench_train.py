"""Tokens per second and peak memory of a LoRA fit: ours against the Trainer with PEFT.

    python tests/benchmarks/bench_train.py [PRIOR] [--rows rows.jsonl] [--layers 8 --width 512 --vocabulary 49152]
        [--common 24] [--micro 1 8] [--batch 32] [--steps 4] [--rounds 3] [--curves]

Each run is a process of its own; the two sides take turns, and medians are printed. Both train the same rows in the
same order from the same adapter, with AdamW in fp32 and bf16 autocast on a GPU that has it. The other side has the
Trainer's defaults: rows in micro-batches as they come, padded to the longest of each, all logits. Ours gets the same
micro-batch, which is a budget: as many tokens as that number of the longest rows. Tokens are those of rows, without
padding. On a CPU, seconds are those that the process computes, whatever runs beside it.

PRIOR: a model folder; without one, a random Llama. Rows: "question" and "answer"; without them, random ones of 30 to
160 tokens, the second half of them labels. --common: the tokens that all random rows begin with, 0 for none.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from msa_lite.data import IGNORE, Example, pad_id, to_batch
from msa_lite.io.models.heads import has_bf16
from msa_lite.train import FitSettings, fit_vector
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


def read_rows(path: Path, tokenizer: Any, most: int = 64) -> list[Example]:
    """The first rows of a file as examples: in the chat template as it is, with no system message, or plainly."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line][:most]
    return [encode(i, row["question"], row["answer"], tokenizer) for i, row in enumerate(rows)]


def encode(index: int, question: str, answer: str, tokenizer: Any) -> Example:
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
    else:
        prompt = f"Question: {question}\nAnswer:"
        whole = f"{prompt} {answer}{tokenizer.eos_token or ''}"
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = start + tokenizer(whole[len(prompt) :], add_special_tokens=False)["input_ids"]
    return Example(index, ids, [IGNORE] * len(start) + ids[len(start) :])


def random_llama(folder: Path, layers: int, width: int, vocabulary: int) -> Path:
    """Write a Llama of random weights with a tokenizer that nothing here uses."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 192),
        tie_word_embeddings=True,
    )
    torch.manual_seed(SEED)
    return save_checkpoint(folder, transformers.AutoModelForCausalLM.from_config(config))


def fit_theirs(prior: Path, rows: list[Example], folder: Path, options: argparse.Namespace) -> None:
    """Train with Trainer and PEFT as their documentation does, and write the log that ours writes."""
    transformers.set_seed(SEED)
    dtype = "auto" if has_bf16() else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(prior, dtype=dtype)
    config = LoraConfig(task_type="CAUSAL_LM", r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "saves"),
        per_device_train_batch_size=options.one_micro,
        gradient_accumulation_steps=options.batch // options.one_micro,
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
    lines = [line for line in trainer.state.log_history if "loss" in line]
    (folder / "train_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def fit_ours(prior: Path, rows: list[Example], folder: Path, options: argparse.Namespace) -> None:
    """Fit a vector with the same settings."""
    settings = FitSettings(
        lora_rank=options.rank,
        lora_alpha=2 * options.rank,
        epochs=1,
        warmup_steps=2,
        batch_size=options.batch,
        micro_batch_size=options.one_micro,
        seed=SEED,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(prior)
    fit_vector(str(prior), rows, folder / "vector", tokenizer=tokenizer, settings=settings)
    (folder / "vector" / "train_log.jsonl").rename(folder / "train_log.jsonl")


def run_one(options: argparse.Namespace) -> dict[str, Any]:
    """Run one side in this process; return its seconds in the training loop, peak memory in MB, and losses."""
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
    rows = _rows(options)
    with tempfile.TemporaryDirectory() as folder:
        side = {"ours": fit_ours, "theirs": fit_theirs}[options.side]
        side(options.prior, rows, Path(folder), options)
        losses = [json.loads(line)["loss"] for line in (Path(folder) / "train_log.jsonl").read_text().splitlines()]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    tokens = sum(len(row.ids) for row in rows)
    return {"seconds": seconds[0], "tokens": tokens, "peak": peak, "losses": losses}


def _rows(options: argparse.Namespace) -> list[Example]:
    count = options.batch * options.steps
    if options.rows is None:
        return random_rows(count, transformers.AutoConfig.from_pretrained(options.prior).vocab_size, options.common)
    return read_rows(options.rows, transformers.AutoTokenizer.from_pretrained(options.prior), count)


def compare(options: argparse.Namespace, arguments: list[str]) -> None:
    """Run both sides in turn at each micro-batch and print a table."""
    print("micro  side    tokens/s   peak MB   ours/theirs")
    for micro in options.micro:
        results: dict[str, list[dict[str, Any]]] = {"theirs": [], "ours": []}
        for turn in range(options.rounds):
            for side in sorted(results, reverse=turn % 2 == 0):
                command = [sys.executable, __file__, *arguments, "--side", side, "--one-micro", str(micro)]
                lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
                results[side].append(json.loads(lines[-1]))
        ratio = statistics.median(
            theirs["seconds"] / ours["seconds"] for theirs, ours in zip(results["theirs"], results["ours"], strict=True)
        )
        for side, runs in results.items():
            speed = statistics.median(run["tokens"] / run["seconds"] for run in runs)
            peak = statistics.median(run["peak"] for run in runs)
            end = f"   {ratio:.2f}" if side == "ours" else ""
            print(f"{micro:5d}  {side:6s} {speed:9.1f} {peak:9.0f}{end}", flush=True)
        if options.curves:
            print("       step   theirs     ours")
            pairs = zip(results["theirs"][0]["losses"], results["ours"][0]["losses"], strict=True)
            for step, (theirs, ours) in enumerate(pairs, 1):
                print(f"       {step:4d} {theirs:8.5f} {ours:8.5f}")


def main() -> None:
    """Compare, or run one side of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prior", type=Path, nargs="?")
    parser.add_argument("--rows", type=Path)
    for name, value in {"layers": 8, "width": 512, "vocabulary": 49152, "rank": 32, "batch": 32, "common": 24}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--one-micro", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_one(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = sys.argv[1:]
        if options.prior is None:
            options.prior = random_llama(Path(folder) / "llama", options.layers, options.width, options.vocabulary)
            arguments = [str(options.prior), *arguments]
        compare(options, arguments)


if __name__ == "__main__":
    main()
