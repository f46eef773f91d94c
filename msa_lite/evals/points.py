"""Scores of many points (α, β) on one loaded target: both adapters stay in memory and are rescaled.

Nothing is merged and no model is written, so a point costs one evaluation. The scores are of the unrounded model; the
pipeline scores the chosen point again after the merge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.evals import selection
from msa_lite.evals.benchmark import Benchmark
from msa_lite.evals.models import Runner, load_model
from msa_lite.evals.records import run_items, write_records
from msa_lite.io.hub import Source
from msa_lite.io.manifest import is_finished, load_manifest, stage_folder, write_json, write_text
from msa_lite.io.progress import Progress, silent
from msa_lite.report import Report, load_report, write_report

CHOICE_FILE = "choice.json"


@dataclass(frozen=True)
class Choice:
    """The chosen point, its selection score, the score of every point in the order tried, and reasons for doubt."""

    alpha: float
    beta: float
    score: float
    scores: list[dict[str, float]]
    doubts: list[str]


def choose_point(
    target: Source,
    adapters: Mapping[str, Path],
    points: Sequence[tuple[float, float]],
    benchmark: Benchmark,
    out: Path,
    keep: float = 0.95,
    progress: Progress = silent,
) -> Choice:
    """Score every (α, β) on validation rows and choose the best (`selection.selection_score`; ties: the first).

    benchmark: validation rows of "forget" and "retain"; "holdout" rows, if any, say what unseen data scores.
    adapters: PEFT folders by name, "forget" and, where some β > 0, "retain". keep: see `selection_score`. Writes
    records and a report per point, the table and choice.json into `out`; points that were scored before a stop are
    not scored again.
    """
    inputs: dict[str, Any] = {
        "target": target.identity(),
        "adapters": {name: (load_manifest(path) or {}).get("files") for name, path in adapters.items()},
        "points": [list(point) for point in points],
        "questions": benchmark.describe(),
        "keep": keep,
    }
    if not is_finished(out, inputs):
        with stage_folder(out, "sweep", inputs, resumable=True) as partial:
            _score_points(target, adapters, points, benchmark, partial, keep, progress)
    return load_choice(out)


def _point_name(alpha: float, beta: float) -> str:
    return f"alpha-{alpha:g}_beta-{beta:g}"


def _score_points(
    target: Source,
    adapters: Mapping[str, Path],
    points: Sequence[tuple[float, float]],
    benchmark: Benchmark,
    partial: Path,
    keep: float,
    progress: Progress,
) -> None:
    model: Any = None
    reports: dict[tuple[float, float], Report] = {}
    asked = [(0.0, 0.0), *(point for point in points if point != (0.0, 0.0))]  # the target itself is the yardstick
    for number, (alpha, beta) in enumerate(asked):
        folder = partial / _point_name(alpha, beta)
        if (folder / "report.json").is_file():
            reports[alpha, beta] = load_report(folder)
            continue
        model = model if model is not None else load_with_adapters(target.folder, adapters)
        set_strengths(model, {"forget": -alpha, "retain": beta})
        runner = Runner(model)
        records = {
            name: run_items(runner, benchmark, name)
            for name in benchmark.sets
            if name != "holdout" or number == 0  # what unseen rows score is asked of the target alone
        }
        reports[alpha, beta] = Report(benchmark.name, benchmark.split, benchmark.metrics(records, None))
        folder.mkdir(exist_ok=True)
        for name, items in records.items():
            write_records(folder / f"{name}.jsonl", items)
        write_report(reports[alpha, beta], folder)
        progress("choosing alpha and beta", number + 1, len(asked))
    reference = reports[0.0, 0.0].values()
    scores = {p: selection.selection_score(reports[p].values(), reference, keep) for p in points}
    best = max(points, key=lambda p: scores[p])  # max keeps the first of equals
    table = [{"alpha": a, "beta": b, "score": scores[a, b]} for a, b in points]
    doubts = _doubts(reference, scores[best], keep)
    choice = {"alpha": best[0], "beta": best[1], "score": scores[best], "scores": table, "doubts": doubts}
    write_json(partial / CHOICE_FILE, choice)
    write_text(partial / "table.md", _table(reports, scores, points))


def _doubts(reference: Mapping[str, float | None], score: float, keep: float) -> list[str]:
    """Why a choice may mean little; empty when there is no reason."""
    doubts = []
    if score < 0:
        doubts.append(
            f"no point left {keep:.0%} of the target's retain scores, so the one that left most ({1 + score:.0%}) was "
            "taken; try smaller alphas"
        )
    if "rouge_l_r" not in reference:
        doubts.append("without questions about a retain set, nothing speaks against the largest alpha")
    if selection.exposure(reference, reference) == 0:
        doubts.append(
            "the target knows no more of the forget set than of rows it never saw, so there is nothing to choose by"
        )
    return doubts


def _table(
    reports: Mapping[tuple[float, float], Report],
    scores: Mapping[tuple[float, float], float],
    points: Sequence[tuple[float, float]],
) -> str:
    names = [
        n
        for n in ("accuracy_f", "rouge_l_f", "extraction_strength", "accuracy_r", "rouge_l_r")
        if n in reports[points[0]].metrics
    ]
    lines = [f"| alpha | beta | {' | '.join(names)} | score |", "|" + "---:|" * (len(names) + 3)]
    for alpha, beta in points:
        values = reports[alpha, beta].values()
        cells = ["–" if values[n] is None else f"{values[n]:.3f}" for n in names]
        lines.append(f"| {alpha:g} | {beta:g} | {' | '.join(cells)} | {scores[alpha, beta]:.3f} |")
    return "\n".join(lines) + "\n"


def load_choice(out: Path) -> Choice:
    """The choice that `choose_point` wrote into its folder."""
    return Choice(**json.loads((out / CHOICE_FILE).read_text()))


def load_with_adapters(target: Path, adapters: Mapping[str, Path]) -> Any:
    """The target with PEFT adapters by name, all active at once."""
    from peft import PeftModel

    model: Any = load_model(target)
    for name, path in adapters.items():
        if isinstance(model, PeftModel):
            model.load_adapter(str(path), adapter_name=name)
        else:
            model = PeftModel.from_pretrained(model, str(path), adapter_name=name)
    model.base_model.set_adapter(list(adapters))
    return model.eval()


def set_strengths(model: Any, strengths: Mapping[str, float]) -> None:
    """Set what each adapter's delta is multiplied by, in every layer; negative and 0 are fine."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            for name, strength in strengths.items():
                if name in module.scaling:
                    module.set_scale(name, strength)
