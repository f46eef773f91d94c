"""Subtract a forget vector from a finished model, and add a retain vector. Needs neither torch nor a GPU.

    python examples/merge.py --target ./my-finetuned-model --forget ./vectors/forget --retain ./vectors/retain \\
        --alpha 1.0 --beta 0.5 --out merged

The vectors are LoRA adapters, trained on the target's prior: one on the rows to forget, one on rows that must stay.
"""

import argparse

import msa_lite

parser = argparse.ArgumentParser(description="Merge adapters into a finished model.")
parser.add_argument("--target", required=True, help="the finished model: a folder, or repo[@revision]")
parser.add_argument("--forget", required=True, help="the adapter that learnt the rows to forget")
parser.add_argument("--retain", help="the adapter that learnt rows that must stay")
parser.add_argument("--alpha", type=float, default=1.0, help="the strength of the forget vector (default: 1)")
parser.add_argument("--beta", type=float, help="the strength of the retain vector; needed with --retain")
parser.add_argument("--out", required=True, help="the folder of the result")
arguments = parser.parse_args()

# θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0). Names, shapes and dtypes are compared before the first byte is written.
with msa_lite.show_progress() as progress:
    merged = msa_lite.merge(
        arguments.target,
        arguments.out,
        forget=arguments.forget,
        alpha=arguments.alpha,
        retain=arguments.retain,
        beta=arguments.beta,
        progress=progress,
    )

print(merged.describe())
for note in merged.notes:
    print(f"note: {note}")
print(f"model: {merged.folder} (the target's files and names, and a manifest.json that says what made it)")
