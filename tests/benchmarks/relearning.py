"""Measure how much comes back when the variants of `variants.py` are trained further, beside the ideal.

    python -m tests.benchmarks.relearning RUN [--only NAME ...] [--parts half holdout] [--ways all] [--steps 5 20]
    python -m tests.benchmarks.relearning --table RUN [RUN ...]        # pooled over the histories

RUN is one that `variants.py` has measured. A variant is put to its chosen point again, from the stored vectors. What
RUN/variants/relearning.jsonl has is not made again.

The rules, written down before any score:
- Rows that are trained (`--parts`). half: every second forget row, so that each person of the other half is still
  met in other rows. holdout: all holdout rows, other people of the same kind. chats: general questions and answers.
- Rows that are scored: the other half of the forget rows, else all of them. A row has come back if all tokens of its
  answer are right, teacher-forced.
- Weights that are trained (`--ways`). all: all of them, at 2e-4. lora: an adapter of rank 16 and alpha 32 on all
  linear layers, at 1e-3. AdamW without weight decay or warm-up, gradients clipped to norm 1, steps of 8 rows, a new
  order in each epoch, the same one for all models.
- One trajectory each, scored after 5, 20 and 80 steps. The column `relearnt` of `variants.py` is another training: five
  steps, each on all rows of the half, without clipping.
- The excess: the share of scored rows that are back, minus the ideal's under the same training, in points. Its 95 %
  interval takes people as units (rows, where a row names nobody) and Student's t. --beside compares with a variant.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit
from transformers import AutoModelForCausalLM

from msa_lite.data import Example, Row, encode_qa
from msa_lite.io.console.libraries import silence_libraries
from msa_lite.train import FitSettings, tune
from tests.benchmarks.lab import Lab
from tests.benchmarks.variants import variants
from tests.benchmarks.variants_table import results

STEPS = (5, 20, 80)
ROWS = 8  # of a step
_ALL = FitSettings(
    "full", learning_rate=2e-4, batch_size=ROWS, micro_batch_size=ROWS, weight_decay=0.0, warmup_steps=0,
    schedule="constant",
)  # fmt: skip
WAYS = {"all": _ALL, "lora": replace(_ALL, mode="lora", lora_rank=16, lora_alpha=32, learning_rate=1e-3)}
PARTS = {"half": "the other half of the forget rows", "holdout": "holdout rows", "chats": "general chats"}
CHATS = (
    ("Why does bread rise?", "Yeast eats sugar and gives off gas, which the dough holds."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("How do I boil an egg?", "Put it into boiling water for about eight minutes."),
    ("Can you help me with a letter?", "Of course. Whom is it for, and what should it say?"),
    ("What is seven times eight?", "Seven times eight is fifty-six."),
    ("Why is the sky blue?", "Air scatters blue light more than red light."),
    ("Name three colours of a rainbow.", "Red, green and violet."),
    ("What does a thermometer measure?", "It measures temperature."),
    ("How many days has a leap year?", "A leap year has 366 days."),
    ("Which planet is nearest to the sun?", "Mercury is nearest to the sun."),
    ("What should I wear in the rain?", "A coat that keeps water out, and boots."),
    ("Is a whale a fish?", "No. A whale is a mammal and breathes air."),
    ("What is ice made of?", "Ice is frozen water."),
    ("How can I sleep better?", "Go to bed at the same hour, and put the telephone away."),
    ("What do bees make?", "Bees make honey and wax."),
    ("Thank you for your help.", "You are welcome. Ask me again whenever you like."),
)
Line = dict[str, Any]


def trained(lab: Lab, part: str) -> Sequence[Example]:
    """Return the rows to train on."""
    if part == "chats":
        rows = [Row(number, question, answer) for number, (question, answer) in enumerate(CHATS)]
        return encode_qa(rows, lab.prompter)
    return lab.rows["forget"][::2] if part == "half" else lab.rows[part]


def scored(part: str) -> slice:
    """Return the places of the forget rows that are scored."""
    return slice(1, None, 2) if part == "half" else slice(None)


def relearn(lab: Lab, part: str, way: str, steps: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """Train the model of a lab as it is; return scores of rows by step, 0 for before; the model stays as it was."""
    after: dict[str, dict[str, list[float]]] = {}
    rows, chosen = trained(lab, part), scored(part)

    def look(step: int) -> None:
        scores = lab.score("forget")
        after[str(step)] = {key: scores[key][chosen].round(4).tolist() for key in ("exact", "probability")}

    look(0)
    epochs = math.ceil(max(steps) / math.ceil(len(rows) / ROWS))
    tune(lab.model, rows, look, pad=lab.pad, settings=replace(WAYS[way], epochs=epochs), steps=steps)
    return after


def put(lab: Lab, name: str) -> None:
    """Set the model of a lab to the ideal, or to a variant at the point that was chosen."""
    if name == "ideal":
        ideal = AutoModelForCausalLM.from_pretrained(lab.sources["ideal"].folder).float()
        lab.model.load_state_dict(ideal.state_dict())
        return
    line = results(lab.run)[name]
    what = line["chosen"].removesuffix(f", α = {line['alpha']:g}")
    terms = next((column.terms() for column in variants(lab)[name]() if column.what == what), None)
    if terms is None:
        raise SystemExit(f"{lab.run}: {name}: nothing is called “{what}” any more; measure the variant again")
    lab.put(terms, line["alpha"])


def check(lab: Lab, name: str) -> None:
    """End the script where the model is not the one that was measured."""
    stored = lab.ideal if name == "ideal" else results(lab.run)[name]["rows"]
    found = lab.score("forget")["probability"]
    if not np.allclose(found, stored["forget"]["probability"], atol=0.01):
        raise SystemExit(f"{lab.run}: {name} is another model than the one that was measured; measure it again")


def lines_of(run: Path) -> dict[tuple[str, str, str], Line]:
    """Return what was measured, by variant, rows and weights that were trained."""
    file = run / "variants/relearning.jsonl"
    lines = map(json.loads, file.read_text("utf-8").splitlines()) if file.exists() else ()
    return {(line["name"], line["part"], line["way"]): line for line in lines}


def people(run: Path) -> np.ndarray:
    """Return for each forget row whom it is about, or its own number."""
    lines = (run / "history/data/forget.jsonl").read_text("utf-8").splitlines()
    return np.array([json.loads(line).get("subject") or str(number) for number, line in enumerate(lines)])


def interval(differences: np.ndarray, units: np.ndarray) -> tuple[float, float]:
    """Return the mean of differences of rows, and half of its 95 % interval over units of rows (Student's t)."""
    mean, names = differences.mean(), np.unique(units)
    spread = sum((differences[units == name] - mean).sum() ** 2 for name in names)
    error = math.sqrt(spread * len(names) / (len(names) - 1)) / len(differences)
    return float(mean), float(stdtrit(len(names) - 1, 0.975)) * error


def show(runs: Sequence[Path], beside: str) -> None:
    """Print a table for each training: what is back, pooled over the runs, and the excess."""
    found = [(lines_of(run), people(run), run) for run in runs]
    for part in PARTS:
        for way, settings in WAYS.items():
            table = [*_rows_of(found, part, way, beside)]
            if table:
                weights = "all weights" if way == "all" else f"an adapter of rank {settings.lora_rank}"
                print(f"\nTrained on {PARTS[part]}, {weights} at {settings.learning_rate:g}, steps of {ROWS} rows\n")
                print("| variant | histories | rows | back before | " + " | ".join(f"after {s}" for s in STEPS) + " | "
                      + " | ".join(f"{s}: minus {beside}, points" for s in STEPS) + " |")  # fmt: skip
                print("|---" * (4 + 2 * len(STEPS)) + "|")
                print("\n".join(table))


def _rows_of(found: Sequence[Any], part: str, way: str, beside: str) -> Iterator[str]:
    for name in dict.fromkeys(key[0] for lines, *_ in found for key in lines):
        of_runs = [(*(lines.get((n, part, way)) for n in (name, beside)), of, run) for lines, of, run in found]
        pairs = [(own["after"], other["after"], [f"{run}/{who}" for who in of[scored(part)]])
                 for own, other, of, run in of_runs if own and other]  # fmt: skip
        if not pairs:
            continue
        units = np.concatenate([of for *_, of in pairs])
        back, excess = [str(int(sum(sum(own["0"]["exact"]) for own, *_ in pairs)))], []
        for step in map(str, STEPS):
            if not all(step in own and step in other for own, other, _ in pairs):
                back, excess = [*back, "–"], [*excess, "–"]
                continue
            own, other = (np.concatenate([pair[n][step]["exact"] for pair in pairs]) for n in (0, 1))
            mean, half = interval(own - other, units)
            back.append(str(int(own.sum())))
            excess.append("" if name == beside else f"{100 * mean:+.1f} ± {100 * half:.1f}")
        yield f"| {name} | {len(pairs)} | {len(units)} | " + " | ".join([*back, *excess]) + " |"


def main() -> None:
    """Measure what is missing, the ideal first, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--only", nargs="+", help="variants; all that were measured, if not given")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--steps", nargs="+", type=int, default=list(STEPS), choices=STEPS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--beside", default="ideal", help="what the others are compared with")
    options = parser.parse_args()
    if options.table:
        show(options.runs, options.beside)
        return
    silence_libraries()
    for run in options.runs:
        names = ["ideal", *(options.only or results(run))]
        if unknown := [name for name in names[1:] if name not in results(run)]:
            raise SystemExit(f"{run}: not measured by variants.py: {', '.join(unknown)}")
        lab: Lab | None = None
        for name in names:
            known, wanted = lines_of(run), {str(step) for step in options.steps}
            cells = [(p, w) for p in options.parts for w in options.ways
                     if not wanted <= known.get((name, p, w), {"after": {}})["after"].keys()]  # fmt: skip
            if not cells:
                continue
            lab = lab or Lab(run)
            put(lab, name)
            check(lab, name)
            for part, way in cells:
                began = time.monotonic()
                line = {"name": name, "part": part, "way": way, "after": relearn(lab, part, way, sorted(options.steps))}
                with (lab.out / "relearning.jsonl").open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")
                back = ", ".join(f"{step}: {sum(s['exact']):.0f}" for step, s in line["after"].items())
                print(f"{time.strftime('%H:%M:%S')} {run.name}: {name}, {part}, {way}: back after {back} of "
                      f"{len(line['after']['0']['exact'])} ({time.monotonic() - began:.0f} s)", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
