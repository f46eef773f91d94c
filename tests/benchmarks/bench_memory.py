"""The GPU memory of a fit's step part by part, on fake tensors: the Trainer with PEFT, ours, and what `plan` predicts.

    python -m tests.benchmarks.bench_memory [--shapes 1B 8B 70B] [--modes lora qlora full] [--rows 4] [--tokens 512]
        [--rank 32] [--kinds peer fast lean least streamed head]

Random Llamas of the sizes of Llama 3.2 1B, Llama 3.1 8B and 70B in bf16; all tokens have labels. Needs no GPU: see
`tests/tools/memory_model.py` for what is counted and how that differs from CUDA. Numbers are GB (10^9 bytes); `total`
includes 0.45 GB of CUDA's own.

    peer   transformers' Trainer with PEFT as its documentation shows, activation checkpointing on; for qlora
           `prepare_model_for_kbit_training`. It is what msa-lite did before.
    fast   a fit of ours without activation checkpointing, as it begins where memory is plenty
    lean   a fit of ours with checkpointing; for qlora with the embedding in the host's memory, too
    least  lean, and the states between layers are in the host's memory
    streamed  least, and frozen layers wait in the host's memory, two of them on the GPU at a time
    head   streamed, and the head's rows pass through as well

`plan` is the total that `msa_lite.budget` predicts for the same, and its error.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from typing import Any

from msa_lite.budget.needs import FitCase, fit_need
from msa_lite.budget.shape import shape_of_config
from msa_lite.train.memory.rungs import Rung
from tests.tools.memory_model import CONTEXT, GB, LLAMA, SHAPES, Memory, make_rows, peak

PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "temporaries")
KINDS = ("peer", "fast", "lean", "least", "streamed", "head")


def rung_of(kind: str, shape: str, mode: str, rows: int) -> Rung:
    """Return the rung of a kind of fit."""
    place, is_untied = KINDS.index(kind), not SHAPES[shape].get("tie_word_embeddings")
    leaves = is_untied and (place >= KINDS.index("streamed") or (place >= KINDS.index("lean") and mode == "qlora"))
    return Rung(
        rows,
        kind != "fast",
        embedding_on_cpu=leaves,
        states_on_cpu=place >= KINDS.index("least"),
        layers_streamed=place >= KINDS.index("streamed"),
        head_streamed=kind == "head" and is_untied,
    )


def predict(shape: str, mode: Any, rung: Rung, tokens: int, rank: int) -> int:
    """Return the bytes that the plan predicts, CUDA's own included."""
    config = {"model_type": "llama", **LLAMA, **SHAPES[shape]}
    case = FitCase(mode, tokens, rank, eight_bit=mode == "qlora")
    return fit_need(shape_of_config(config, shape), case, rung, accumulates=False).nbytes


def line(name: str, memory: Memory, predicted: int | None, seconds: float) -> str:
    """Return a line of the table."""
    total = memory.total + CONTEXT
    numbers = "".join(f"{memory.parts.get(part, 0) / GB:12.2f}" for part in PARTS)
    plan = f"{predicted / GB:8.2f} {100 * (predicted / total - 1):+5.1f} %" if predicted else " " * 16
    return f"{name:<18}{total / GB:8.2f}{numbers}{plan}  {memory.phase}, {seconds:.0f} s"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1B", "8B", "70B"])
    parser.add_argument("--modes", nargs="+", default=["lora", "qlora", "full"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["peer", "fast", "lean"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(f"{options.rows} rows of {options.tokens} tokens at a time, rank {options.rank}; GB")
    print(f"{'':<18}{'total':>8}" + "".join(f"{part:>12}" for part in PARTS) + f"{'plan':>8}")
    errors = []
    for shape in options.shapes:
        for mode in options.modes:
            for kind in options.kinds:
                if mode == "full" and kind in ("streamed", "head"):
                    continue  # trained weights stay
                start, rung = time.perf_counter(), rung_of(kind, shape, mode, options.rows)
                rows = make_rows([options.tokens] * options.rows)
                memory = peak(shape, mode, rows, rung, rank=options.rank, peer=kind == "peer")
                predicted = None
                if kind != "peer":
                    predicted = predict(shape, mode, rung, options.tokens, options.rank)
                    errors.append(abs(predicted / (memory.total + CONTEXT) - 1))
                print(line(f"{shape} {mode} {kind}", memory, predicted, time.perf_counter() - start), flush=True)
    if errors:
        print(f"plan: mean error {100 * sum(errors) / len(errors):.1f} % of {len(errors)}")


if __name__ == "__main__":
    main()
