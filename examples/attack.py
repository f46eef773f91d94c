"""Relearn: does the rest come back when the unlearned model is tuned on half of the rows that it forgot?

    python examples/attack.py runs/my-request/model --control ./prior --rows delete.jsonl --out relearnt
    python examples/attack.py runs/quickstart/model --control runs/quickstart/history/ideal \\
        --rows runs/quickstart/history/data/forget.jsonl --learning-rate 5e-4 --out relearnt-quickstart

The control is tuned in the same way: the ideal, which never saw the rows, or else the prior. It shows how much of the
other half can be guessed. What the unlearned model scores above the ideal was hidden, not removed; above the prior, it
may also be what the target learnt from other rows. The rows are a JSONL file.
"""

import argparse
from pathlib import Path

import msa_lite

METRICS = ("accuracy_f", "rouge_l_f", "extraction_strength")

parser = argparse.ArgumentParser(description="Tune on half of the forget rows, and score the other half.")
parser.add_argument("unlearned", help="the unlearned model")
parser.add_argument("--control", required=True, help="a model that never saw the rows: the ideal, or the prior")
parser.add_argument("--rows", type=Path, required=True, help="the rows that were to be forgotten")
parser.add_argument("--epochs", type=int, default=3, help="passes over the half (default: 3)")
parser.add_argument("--learning-rate", type=float, default=2e-5, help="that of your fine-tune (default: 2e-5)")
parser.add_argument("--out", type=Path, required=True, help="the folder of the tuned models and scores")
arguments = parser.parse_args()

# Two halves of the file, not every other row: rows about one subject, which often stand together, teach one another.
arguments.out.mkdir(parents=True, exist_ok=True)
rows = [line for line in arguments.rows.read_text("utf-8").splitlines() if line.strip()]
half = len(rows) // 2
tuned, scored = arguments.out / "tuned.jsonl", arguments.out / "scored.jsonl"
tuned.write_text("\n".join(rows[:half]) + "\n", "utf-8")
scored.write_text("\n".join(rows[half:]) + "\n", "utf-8")

values = {}
with msa_lite.show_progress() as progress:
    for name, model in {"unlearned": arguments.unlearned, "control": arguments.control}.items():
        folder = arguments.out / name
        training = {"epochs": arguments.epochs, "learning_rate": arguments.learning_rate, "warmup_epochs": 0}
        stages = [{"name": "half", "data": {"path": str(tuned)}, "batch_size": 8}]
        recipe = {"model": model, "stages": stages, "training": training, "output": str(folder / "training")}
        relearnt = msa_lite.train_stages(recipe, progress=progress).model
        for state, place in {"before": model, "after": str(relearnt)}.items():
            other_half = msa_lite.DataSource(str(scored))
            reports = msa_lite.evaluate(place, folder / state, forget=other_half, progress=progress)
            values[name, state] = reports["model"].values()

print(f"{len(rows) - half} rows, before and after tuning on {half} others")
for metric in METRICS:
    print(metric)
    for name in ("unlearned", "control"):
        print(f"  {name:<10} {values[name, 'before'][metric]:.3f} → {values[name, 'after'][metric]:.3f}")
    above = values["unlearned", "after"][metric] - values["control", "after"][metric]
    print(f"  above the control: {above:+.3f}")
