"""Which learning rate an open-ended fit wants: a sweep over modes, ranks and rates, for `msa_lite.train.settings`.

    python tests/benchmarks/bench_rates.py PRIOR TARGET delete.jsonl [--keep keep.jsonl] [--modes lora full]
        [--ranks 32] [--rates 3e-4 1e-3 3e-3] [--epochs 60]

Fits the forget vector at each rate as `vector.epochs: auto` does, but tries no other rate, and prints a line each:
steps and seconds, the part of the gap to the target's loss that was closed, the vector's norm. With --keep also the
share of rows of either set that the unlearned model still recites at a few α: every token of the answer is likeliest.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import msa_lite
from msa_lite.data import IGNORE, Example
from msa_lite.errors import NotFiniteError
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import fetch
from msa_lite.train import FitSettings, Until, fit_vector
from msa_lite.train.settings import WARMUP_STEPS, auto_batch, auto_rate, most_epochs

ALPHAS = (0.25, 0.5, 0.75, 1.0, 1.5)


def read_rows(path: Path, tokenizer: Any, most: int = 64) -> list[Example]:
    """The first rows of a file as examples: in the chat template as it is, with no system message, or plainly."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line][:most]
    return [_encode(i, row["question"], row["answer"], tokenizer) for i, row in enumerate(rows)]


def _encode(index: int, question: str, answer: str, tokenizer: Any) -> Example:
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


def recited(folder: Path, examples: Sequence[Example]) -> float:
    """Share of the examples whose labels are all the likeliest tokens under a model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    whole = 0
    with torch.inference_mode():
        for example in examples:
            likeliest = model(torch.tensor([example.ids])).logits[0, :-1].argmax(-1)
            labels = torch.tensor(example.labels[1:])
            whole += bool(((likeliest == labels) | (labels == IGNORE)).all())
    return whole / len(examples)


def norm_of(vector: Path, prior: Path) -> float:
    """‖θ_1 − θ_0‖ over all weights."""
    if (vector / "adapter_config.json").is_file():
        from safetensors.torch import load_file

        config, tensors = json.loads((vector / "adapter_config.json").read_text()), {}
        for name, value in load_file(vector / "adapter_model.safetensors").items():
            module, _, factor = name.removesuffix(".weight").rpartition(".")
            tensors.setdefault(module, {})[factor] = value
        deltas = (pair["lora_B"] @ pair["lora_A"] for pair in tensors.values())
        return config["lora_alpha"] / config["r"] * math.sqrt(sum(float((d**2).sum()) for d in deltas))
    one, two = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).state_dict() for f in (vector, prior))
    return math.sqrt(sum(float(((one[name] - two[name]) ** 2).sum()) for name in one))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("prior", "target", "rows"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--modes", nargs="+", default=["lora"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[32])
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--epochs", type=int, help="at most; as many as vector.epochs: auto allows unless given")
    parser.add_argument("--closed", type=float, default=0.95, help="part of the gap at which a fit ends")
    parser.add_argument("--alphas", nargs="+", type=float, default=ALPHAS)
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    forget = read_rows(options.rows, tokenizer)
    keep = read_rows(options.keep, tokenizer) if options.keep else []
    weights = sum(math.prod(entry.shape) for entry in load_checkpoint(options.prior).tensors.values())
    batch = options.batch or auto_batch(len(forget))
    print(f"{weights / 1e6:.1f}M weights, {len(forget)} rows to forget, batch {batch}")
    print("mode rank  rate     steps  sec  closed loss prior/target/tuned  norm | recited at α: forget kept")
    for mode, rank in product(options.modes, options.ranks):
        if mode == "full" and rank != options.ranks[0]:
            continue
        for rate in options.rates or [auto_rate(mode, weights, 2 * rank)]:
            settings = FitSettings(
                mode,
                lora_rank=rank,
                lora_alpha=2 * rank,
                epochs=options.epochs or most_epochs(len(forget), batch),
                learning_rate=rate,
                batch_size=batch,
                warmup_steps=WARMUP_STEPS,
                schedule="constant",
            )
            with tempfile.TemporaryDirectory() as folder:
                print(f"{mode:<5}{rank if mode != 'full' else '':<5} {rate:<8.1e}", end=" ", flush=True)
                print(_line(options, settings, forget, keep, tokenizer, Path(folder)), flush=True)


def _line(
    options: Any, settings: FitSettings, forget: list[Example], keep: list[Example], tokenizer: Any, folder: Path
) -> str:
    until = Until(
        fetch(str(options.target)),
        load=lambda: AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32),
        closed=options.closed,
    )
    start = time.perf_counter()
    try:
        vector = fit_vector(
            str(options.prior), forget, folder / "vector", tokenizer=tokenizer, settings=settings, until=until
        )
    except NotFiniteError as error:
        return str(error)
    fit = (load_manifest(vector) or {})["fit"]
    loss = fit["loss"]
    closed = (loss["prior"] - loss["tuned"]) / (loss["prior"] - loss["target"])
    text = f"{fit['steps']:5d} {time.perf_counter() - start:5.0f}  {closed:5.2f}  {loss['prior']:.3f}/"
    text += f"{loss['target']:.3f}/{loss['tuned']:.3f}  {norm_of(vector, options.prior):6.2f} |"
    for alpha in options.alphas if keep else ():
        merged = msa_lite.merge(
            str(options.target), folder / f"{alpha}", forget=str(vector), alpha=alpha, prior=str(options.prior)
        )
        text += f" {alpha:g}: {recited(merged.folder, forget):.2f} {recited(merged.folder, keep):.2f};"
    return text


if __name__ == "__main__":
    main()
