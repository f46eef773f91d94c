"""The choice among candidates (strengths of vectors, epochs of a baseline) by their scores on validation rows."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.errors import NotFiniteError
from msa_lite.evals import selection
from msa_lite.evals.benchmark import Benchmark
from msa_lite.evals.models import Runner
from msa_lite.evals.records import run_items, write_records
from msa_lite.io.manifest import MANIFEST, is_finished, stage_folder, write_json, write_text
from msa_lite.io.progress import Progress, silent
from msa_lite.report import Report, load_report, write_report
from msa_lite.report.metrics import REPORT_FILE

logger = logging.getLogger(__name__)

CHOICE_FILE = "choice.json"
TARGET = "target"  # what the candidates are held against; scored beside them

Values = Mapping[str, float | int | str]
"""What tells a candidate from the others: {"alpha": 0.5, "beta": 1.0}."""


@dataclass(frozen=True)
class Choice:
    """The chosen candidate, its selection score, the score of each in the order tried, and reasons for doubt."""

    values: Values
    score: float
    scores: Sequence[Values]
    doubts: Sequence[str]


@dataclass(frozen=True)
class Candidates:
    """What there is to choose from, and how to get at it.

    values: one a candidate. load: the model of one, or, for None, the target; ready to be scored. made_of: what the
    models are made of, JSON-able. known: folders with the records and reports of candidates (or `TARGET`) by name.
    """

    values: Sequence[Values]
    load: Callable[[Values | None], Any]
    made_of: Any
    known: Mapping[str, Path] = field(default_factory=dict)


def candidate_name(values: Values) -> str:
    """The folder of a candidate: `alpha-0.5_beta-1`; no two candidates share one."""
    return "_".join(f"{key}-{v if isinstance(v, str) else format(v, '.12g')}" for key, v in values.items())


def choose(
    candidates: Candidates, benchmark: Benchmark, out: Path, keep: float, label: str, progress: Progress = silent
) -> Choice:
    """Score every candidate on validation rows and choose the best (`selection.selection_score`; ties: the first).

    benchmark: validation rows of "forget" and "retain"; "holdout" rows, if any, say what unseen data scores, and are
    asked of the target alone. keep: see `selection_score`. Writes records and a report per candidate, the table and
    choice.json into `out`; candidates that were scored before a stop are not scored again. One whose outputs are no
    numbers is left out, with a warning.
    """
    inputs = {
        "candidates": [dict(values) for values in candidates.values],
        "made_of": candidates.made_of,
        "questions": benchmark.describe(),
        "keep": keep,
    }
    if not is_finished(out, inputs):
        with stage_folder(out, "sweep", inputs, resumable=True) as folder:
            _score_all(candidates, benchmark, folder, keep, label, progress)
    return load_choice(out)


def _score_all(
    candidates: Candidates, benchmark: Benchmark, out: Path, keep: float, label: str, progress: Progress
) -> None:
    asked: dict[str, Values | None] = {TARGET: None} | {candidate_name(v): v for v in candidates.values}
    reports = {}
    for number, (name, values) in enumerate(asked.items()):
        folder = out / name
        if name in candidates.known:
            ignored = shutil.ignore_patterns(MANIFEST)
            shutil.copytree(candidates.known[name], folder, ignore=ignored, dirs_exist_ok=True)
        try:
            reports[name] = score_into(folder, partial(candidates.load, values), benchmark, with_holdout=values is None)
        except NotFiniteError as error:
            if values is None or (number == len(asked) - 1 and len(reports) == 1):  # the target, or nothing but it
                raise
            logger.warning("%s: %s; it is left out of the choice", name, error)
        progress(label, number + 1, len(asked))
    reference = reports[TARGET].values()
    scores = {
        name: selection.selection_score(reports[name].values(), reference, keep) for name in reports if name != TARGET
    }
    best = max(scores, key=lambda name: scores[name])  # max keeps the first of equals
    scored = [values for values in candidates.values if candidate_name(values) in scores]
    table = [{**values, "score": scores[candidate_name(values)]} for values in scored]
    choice = Choice(asked[best] or {}, scores[best], table, _doubts(reference, scores[best], keep))
    write_json(out / CHOICE_FILE, {**choice.values, **{k: v for k, v in vars(choice).items() if k != "values"}})
    write_text(out / "table.md", _table(reports, table))


def score_into(folder: Path, load: Callable[[], Any], benchmark: Benchmark, with_holdout: bool = False) -> Report:
    """The report of a model's scores in a folder, which is made unless it is there already."""
    if (folder / REPORT_FILE).is_file():
        return load_report(folder)
    runner = Runner(load())
    sets = [name for name in benchmark.sets if name != "holdout" or with_holdout]
    records = {name: run_items(runner, benchmark, name) for name in sets}
    report = Report(benchmark.name, benchmark.split, benchmark.metrics(records, None))
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in records.items():
        write_records(folder / f"{name}.jsonl", items)
    write_report(report, folder)
    return report


def _doubts(reference: Mapping[str, float | None], score: float, keep: float) -> list[str]:
    """Why a choice may mean little; empty when there is no reason."""
    doubts = []
    if score < 0:
        doubts.append(
            f"no candidate left {keep:.0%} of the target's retain scores, so the one that left most ({1 + score:.0%}) "
            "was taken; try gentler ones: smaller alphas, or for a baseline a lower learning_rate"
        )
    if "rouge_l_r" not in reference:
        doubts.append("without questions about a retain set, nothing speaks against the strongest candidate")
    if selection.exposure(reference, reference) == 0:
        doubts.append(
            "the target knows no more of the forget set than of rows it never saw, so there is nothing to choose by"
        )
    return doubts


def _table(reports: Mapping[str, Report], scores: Sequence[Values]) -> str:
    """One row a candidate: what tells it from the others, its main metrics, its selection score."""
    keys = list(dict.fromkeys(key for values in scores for key in values if key != "score"))
    known = reports[TARGET].metrics
    names = [n for n in ("accuracy_f", "rouge_l_f", "extraction_strength", "accuracy_r", "rouge_l_r") if n in known]
    lines = [f"| {' | '.join([*keys, *names])} | score |", "|" + "---:|" * (len(keys) + len(names) + 1)]
    for values in scores:
        own = {key: values[key] for key in keys}
        metrics = reports[candidate_name(own)].values()
        cells = [value if isinstance(value, str) else f"{value:g}" for value in own.values()]
        cells += ["–" if metrics[n] is None else f"{metrics[n]:.3f}" for n in names]
        lines.append(f"| {' | '.join(cells)} | {values['score']:.3f} |")
    return "\n".join(lines) + "\n"


def load_choice(out: Path) -> Choice:
    """The choice that `choose` wrote into its folder."""
    found = json.loads((out / CHOICE_FILE).read_text())
    others = {key: found.pop(key) for key in ("score", "scores", "doubts")}
    return Choice(found, **others)
