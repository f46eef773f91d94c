"""Time and memory of the hold and of the filter, beside a plain fit of the same forget vector.

    python -m tests.benchmarks.bench_filter [--width 512] [--layers 8] [--rows 40] [--epochs 3] [--rounds 3]

The model is a Llama with random weights, the rows are as long as TOFU's as chats, and there are as many to keep as to
forget.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path

import transformers

from msa_lite.data import IGNORE, Example
from msa_lite.evals.engine.models import load_model
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import fetch
from msa_lite.merger.filtering import filter_vector
from msa_lite.train import FitSettings, VectorFit, run_fit
from msa_lite.train.moments import write_moments
from msa_lite.train.objectives.held import HeldLoss
from tests.benchmarks.paired import Meter, machine, print_table, take_turns
from tests.support.models import save_checkpoint, tiny_tokenizer

PARTS = ("plain fit", "held fit", "moments", "filter, λ = 1")  # in the order of their needs
VOCABULARY = 4096


def draw_rows(count: int, seed: int) -> list[Example]:
    """Return rows of 40 to 60 tokens of a prompt and 20 to 50 labels."""
    draw, rows = random.Random(seed), []
    for index in range(count):
        prompt, answer = draw.randint(40, 60), draw.randint(20, 50)
        ids = [draw.randrange(10, VOCABULARY) for _ in range(prompt + answer)]
        rows.append(Example(index, ids, [IGNORE] * prompt + ids[prompt:]))
    return rows


def make_prior(options: argparse.Namespace, folder: Path) -> None:
    """Save the model."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=options.width, intermediate_size=4 * options.width,
        num_hidden_layers=options.layers, num_attention_heads=options.width // 64, num_key_value_heads=2,
    )  # fmt: skip
    save_checkpoint(folder, transformers.AutoModelForCausalLM.from_config(config))


def run_part(part: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one part; return the meter's figures."""
    folder, source = options.folder, fetch(str(options.folder / "prior"))
    forget, retain = draw_rows(options.rows, 0), draw_rows(options.rows, 1)
    settings = FitSettings(epochs=options.epochs, batch_size=8, micro_batch_size=8)
    held = HeldLoss(forget, retain, 1.0, pad=0, seed=0) if part == "held fit" else None
    shutil.rmtree(folder / part, ignore_errors=True)
    meter = Meter()
    if part.endswith("fit"):
        run_fit(VectorFit(source, forget, tiny_tokenizer(), settings, objective=held), folder / part)
    elif part == "moments":
        names, rows = load_checkpoint(source.folder).tensors, {"forget": forget, "retain": retain}
        inputs = {"target": source.identity()}
        write_moments(folder / part, inputs, lambda: load_model(source.folder), names, rows, pad=0)
    else:
        filter_vector(str(folder / "plain fit"), folder / "moments", 1.0, source, None, folder / part)
    return meter.read()


def main() -> None:
    """Compare, or run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 512), ("layers", 8), ("rows", 40), ("epochs", 3), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--side", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_part(options.side, options)))
        return
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        make_prior(options, Path(folder) / "prior")
        for part in PARTS[:3:2]:  # what the filter needs, whichever part comes first
            run_part(part, argparse.Namespace(**vars(options) | {"folder": Path(folder)}))
        runs = take_turns(PARTS, options.rounds, ["--folder", folder])
    print_table(runs, PARTS[0])


if __name__ == "__main__":
    main()
