"""The table of `variants.py`: its stored results, their measures, and how much nearer one variant is than another."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.lab import SCORES


def results(run: Path) -> dict[str, Any]:
    """Return the results so far, by variant."""
    file = run / "variants/results.jsonl"
    lines = map(json.loads, file.read_text("utf-8").splitlines()) if file.exists() else ()
    return {line["name"]: line for line in lines}


def summary(line: Mapping[str, Any], known: Mapping[str, Any], draw: Any = None) -> dict[str, float]:
    """Return the measures of a variant. draw: indices of rows by set, for a bootstrap sample."""

    def rows(side: Mapping[str, Any], part: str, score: str) -> np.ndarray:
        values = np.array(side[part][score])
        return values if draw is None or part not in draw else values[draw[part]]

    own, ideal, target = line["rows"], known["ideal"]["rows"], known["target"]["rows"]
    gaps = {p: np.mean([abs(rows(own, p, s).mean() - rows(ideal, p, s).mean()) for s in SCORES])
            for p in ("forget", "test")}  # fmt: skip
    floor = {s: np.mean(target["holdout"][s]) for s in SCORES}
    kept = np.mean([(rows(own, "test", s).mean() - floor[s]) / (rows(target, "test", s).mean() - floor[s])
                    for s in SCORES])  # fmt: skip
    losses = np.subtract.outer(np.array(own["holdout"]["loss"]), rows(own, "forget", "loss"))
    return {
        "distance": float(gaps["forget"] + gaps["test"]) / 2,
        "forget": float(gaps["forget"]),
        "retain": float(gaps["test"]),
        "kept": float(kept),
        "recited": float(rows(own, "forget", "exact").sum()),
        "exact": float(np.sum(own["test"]["exact"]) + np.sum(own["choose"]["exact"])),
        "AUC": float((losses > 0).mean()),
        "relearnt": float(line.get("relearnt", math.nan)),
        "text": float(np.mean(own["text"]["loss"])),
        "growth": float(line.get("growth", math.nan)),
    }


def show(runs: Sequence[Path], beside: str) -> None:
    """Print the variants of several seeds: means, and how much farther each is than the one named `beside`."""
    seeds = [(results(run), json.loads((run / "variants/known.json").read_text("utf-8"))) for run in runs]
    names = list(dict.fromkeys(name for lines, _ in seeds for name in lines))
    keys = list(summary(next(iter(seeds[0][0].values())), seeds[0][1]))
    print("| variant | " + " | ".join(keys) + f" | distance, minus that of “{beside}” (95 %) |")
    print("|---" * (len(keys) + 2) + "|")
    for name in ("target", "ideal", *names):
        lines_of = [known.get(name) or lines.get(name) for lines, known in seeds]
        values = [line and summary(line, known) for line, (_, known) in zip(lines_of, seeds, strict=True)]
        cells = [", ".join(_cell(value, key) for value in values) for key in keys]
        print(f"| {name} | " + " | ".join(cells) + f" | {_differences(name, beside, seeds)} |")


def _cell(value: Mapping[str, float] | None, key: str) -> str:
    return "–" if value is None or math.isnan(value[key]) else f"{value[key]:.3g}"


def _differences(name: str, beside: str, seeds: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """Return the difference in each seed, with its bootstrap interval over rows."""
    texts = []
    for lines, known in seeds:
        if name not in lines or name == beside or beside not in lines:
            texts.append("–")
            continue
        generator, pair = np.random.default_rng(0), (lines[name], lines[beside])
        counts = {part: len(pair[0]["rows"][part]["exact"]) for part in ("forget", "test")}
        drawn = []
        for _ in range(1000):
            draw = {part: generator.integers(count, size=count) for part, count in counts.items()}
            drawn.append(np.subtract(*(summary(line, known, draw)["distance"] for line in pair)))
        centre = np.subtract(*(summary(line, known)["distance"] for line in pair))
        half = 1.96 * float(np.std(drawn))
        texts.append(f"{centre:+.3f} ± {half:.3f}")
    return ", ".join(texts)
