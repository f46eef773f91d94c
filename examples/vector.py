"""Fit the forget and the retain vector alone, from a recipe that is written in Python, and look at how the fits went.

    python examples/vector.py --target ./my-finetuned-model --prior ./prior --forget delete.jsonl --retain keep.jsonl \\
        --out runs/vectors vector.lora.rank=16

The prior is the model that you fine-tuned. It learns the rows until it knows them as well as the target does.
"""

import argparse
import json

import msa_lite

parser = argparse.ArgumentParser(description="Fit vectors for a merge.")
parser.add_argument("--target", required=True, help="the finished model")
parser.add_argument("--prior", required=True, help="the model from before it saw the rows")
parser.add_argument("--forget", required=True, help="the rows to forget, with columns question and answer")
parser.add_argument("--retain", help="rows that must stay; as many as there are forget rows are learnt")
parser.add_argument("--out", required=True, help="the run's folder")
parser.add_argument("override", nargs="*", help="other keys of the recipe, such as vector.mode=qlora")
arguments = parser.parse_intermixed_args()

# A recipe is a YAML file or a mapping with the same keys. What is left out has its default.
recipe = {
    "target": arguments.target,
    "prior": arguments.prior,
    "forget": {"data": {"path": arguments.forget}},
    "merge": {"filter": "off"},  # as in the paper: the retain vector mends what the forget vector does to other rows
    "output": arguments.out,
}
if arguments.retain:
    recipe["retain"] = {"data": {"path": arguments.retain, "sample": "match_forget"}}

with msa_lite.show_progress() as progress:
    vectors = msa_lite.run_vectors(recipe, overrides=arguments.override, progress=progress)

# A vector is a PEFT adapter. Beside it: the loss of each step, and a manifest that says what made it.
for vector in vectors:
    steps = [json.loads(line) for line in (vector / "train_log.jsonl").read_text("utf-8").splitlines()]
    manifest = json.loads((vector / "manifest.json").read_text("utf-8"))
    print(f"{vector.name} vector: {vector}")
    print(f"  {manifest['rows']} rows, {len(steps)} steps, loss {steps[0]['loss']:.3f} → {steps[-1]['loss']:.3f}")

options = " ".join(f"--{vector.name} {vector}" for vector in vectors)
print(f"merge: python examples/merge.py --target {arguments.target} {options} --alpha 1.0 --beta 0.5 --out merged")
