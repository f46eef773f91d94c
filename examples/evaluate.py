"""Score models on your own questions, and put them side by side.

    python examples/evaluate.py --forget delete.jsonl --retain keep.jsonl --out scores \\
        before=./my-finetuned-model after=runs/my-request/model

Rows have the columns `question` and `answer`; other forms of chat data are recognised too. Any model goes: merged or
not, from the Hub, or a LoRA adapter.
"""

import argparse
from pathlib import Path

import msa_lite

parser = argparse.ArgumentParser(description="Score models on your own questions.")
parser.add_argument("models", nargs="+", metavar="NAME=MODEL", help="a model with a name for the table")
parser.add_argument("--forget", required=True, help="rows that a model should not know any more")
parser.add_argument("--retain", required=True, help="rows that it should still know")
parser.add_argument("--limit", type=int, help="score at most this many rows of each set")
parser.add_argument("--out", type=Path, required=True, help="the folder of the scores")
arguments = parser.parse_args()

models = dict(pair.split("=", 1) for pair in arguments.models)
questions = msa_lite.OwnQuestions(
    forget=msa_lite.DataSource(arguments.forget), retain=msa_lite.DataSource(arguments.retain)
)
reports = {}
with msa_lite.show_progress() as progress:
    for name, model in models.items():
        scored = msa_lite.evaluate(
            model,
            arguments.out / name,
            questions,
            limit=arguments.limit,
            progress=progress,
        )
        reports[name] = scored["model"]

# Names end in _f for the forget set and _r for the retain set. docs/reference/metrics.md explains each.
print(" ".join([f"{'metric':<24}", *(f"{name:>18}" for name in reports)]))
for metric in next(iter(reports.values())).metrics:
    cells = [report.metrics[metric] for report in reports.values()]
    texts = ["–" if cell.value is None else f"{cell.value:.3f} ± {cell.stderr or 0:.3f}" for cell in cells]
    print(" ".join([f"{metric:<24}", *(f"{text:>18}" for text in texts)]))
print(f"answers and scores, row by row: {arguments.out}")
