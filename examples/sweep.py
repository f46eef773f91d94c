"""Try several strengths of the vectors, and see why one of them was chosen.

    python examples/sweep.py my-request.yaml 'forget.alpha=[0.5, 1.0, 1.5]' 'retain.beta=[0, 0.5]'

Each point is scored on all forget rows and on a part of the rows to keep, without a model on disk. Only the best point
is merged. A run on the same recipe goes on with the other rows to keep.
"""

import argparse

import msa_lite

parser = argparse.ArgumentParser(description="Choose alpha and beta of a recipe.")
parser.add_argument("recipe", help="a recipe with a target, a prior and a forget set")
parser.add_argument("override", nargs="*", help="keys of the recipe to change, such as select.keep=0.95")
arguments = parser.parse_intermixed_args()

with msa_lite.show_progress() as progress:
    result = msa_lite.sweep(arguments.recipe, arguments.override, progress=progress)

print(f"rule: {result.choice.rule}")
for point in result.choice.scores:
    score = "broken" if point["score"] is None else f"{point['score']:.3f}" if point["met"] else "misses a condition"
    print(f"α = {point['alpha']:<6g} β = {point['beta']:<6g} {score:<20} {point.get('note', '')}".rstrip())
print(f"chosen: {result.strengths}")
for doubt in result.choice.doubts:
    print(f"doubt: {doubt}")

# The merged model is scored on the same rows: merging must not have changed what was measured in memory.
after = result.after.values()
for name, before in result.before.values().items():
    if before is not None:
        print(f"{name}: {before:.3f} in memory, {after[name]:.3f} merged")
print(f"tables and pictures: {result.folder / 'sweep'}")
