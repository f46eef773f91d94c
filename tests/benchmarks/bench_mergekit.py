"""Count the weights in which mergekit's result differs from msa-lite's, of the same recipe over random adapters.

python -m tests.benchmarks.bench_mergekit [--shape tiny|135m] [--dtype float32|bfloat16] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import msa_lite
from msa_lite.merger import mergekit_recipe
from msa_lite.merger.mergekit.runner import merge_with_mergekit
from tests.support.models import save_adapter, save_checkpoint, tiny_model

SHAPES = {
    "tiny": {},
    "135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip
RANK, ALPHA, BETA = 16, 1.0, 0.5


def compare(shape: str, dtype: str, folder: Path) -> str:
    """Merge two adapters on all linear layers both ways; return the share of weights that differ, and by how much."""
    from safetensors.torch import load_file

    model = tiny_model("llama", 0, **SHAPES[shape])
    save_checkpoint(folder / "target", model, dtype)
    for seed, name in enumerate(("forget", "retain"), 1):
        save_adapter(
            folder / name, tiny_model("llama", 0, **SHAPES[shape]), seed, r=RANK, lora_alpha=2 * RANK, scale=0.01
        )
    vectors = {name: str(folder / name) for name in ("target", "forget", "retain")}
    (folder / "recipe.yml").write_text(mergekit_recipe(**vectors, alpha=ALPHA, beta=BETA))
    merge_with_mergekit(folder / "recipe.yml", folder / "theirs")
    msa_lite.merge(**vectors, alpha=ALPHA, beta=BETA, out=folder / "ours")
    weights = differing = 0
    largest = 0.0
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("ours", "theirs"))
    for name, value in theirs.items():
        gap = (ours[name].double() - value.double()).abs()
        weights, differing = weights + gap.numel(), differing + int((gap > 0).sum())
        largest = max(largest, float(gap.max()))
    share = f"{differing} of {weights} weights differ ({differing / weights:.2g})"
    return f"{shape} {dtype}: {share}, by at most {largest:.2g}"


def main() -> None:
    """Print a line for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--folder", type=Path, help="where the models go; else a temporary folder")
    options = parser.parse_args()
    for dtype in options.dtype:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            print(compare(options.shape, dtype, Path(place)), flush=True)


if __name__ == "__main__":
    main()
