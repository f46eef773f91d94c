"""The `qa` benchmark: how well a model knows the answers of the forget, retain and holdout sets.

Per-item records are written as they are made, one .jsonl a set; a stopped run goes on with the sets that are missing.
All aggregates can be computed again from the records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.data import Prompter, Row, encode_qa, rows_identity
from msa_lite.evals import scoring
from msa_lite.evals.generate import TokenScores, generate_answers, load_model, score_tokens
from msa_lite.io.hub import Source
from msa_lite.io.manifest import is_finished, stage_folder, write_text
from msa_lite.io.progress import Progress, part_of, silent
from msa_lite.report import Metric, Report, load_report, write_report

# Record field → (metric name for each set, does a higher value mean a better outcome on the forget set?). The bare
# names are the ones that the published benchmarks use for the forget set.
_FIELDS = {
    "accuracy": {"forget": "accuracy_f", "retain": "accuracy_r", "holdout": "accuracy_h"},
    "probability": {"forget": "probability_f", "retain": "probability_r", "holdout": "probability_h"},
    "rouge_l": {"forget": "rouge_l_f", "retain": "rouge_l_r", "holdout": "rouge_l_h"},
    "extraction_strength": {
        "forget": "extraction_strength",
        "retain": "extraction_strength_r",
        "holdout": "extraction_strength_h",
    },
    "exact_memorization": {
        "forget": "exact_memorization",
        "retain": "exact_memorization_r",
        "holdout": "exact_memorization_h",
    },
}
_HIGHER_IS_BETTER = {"forget": False, "retain": True, "holdout": None}


@dataclass(frozen=True)
class QaSettings:
    """max_new_tokens: length limit of generated answers (TOFU's 200). split: the name of the rows in the report."""

    max_new_tokens: int = 200
    split: str = "all"


def score_rows(
    model: Any,
    prompter: Prompter,
    rows: Sequence[Row],
    settings: QaSettings,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """One record a row: the answer generated and every score. No row is cut: prompts and answers are scored whole.

    progress counts each row twice: once for the teacher-forced scores, once for its answer.
    """
    examples = encode_qa(rows, prompter)
    total = 2 * len(rows)
    scores = score_tokens(model, examples, part_of(progress, "score", 0, total))
    generated = generate_answers(
        model,
        prompter.tokenizer,
        [prompter.prompt(row.question) for row in rows],
        max_new_tokens=settings.max_new_tokens,
        progress=part_of(progress, "score", len(rows), total),
    )
    return [_record(row, s, text) for row, s, text in zip(rows, scores, generated, strict=True)]


def _record(row: Row, scores: TokenScores, generated: str) -> dict[str, Any]:
    matches = scores.matches[:-1]  # without the end token
    return {
        "index": row.index,
        "question": row.question,
        "answer": row.answer,
        "generated": generated,
        "n_tokens": len(scores.log_probs),
        "probability": scoring.probability(scores.log_probs),
        "rouge_l": scoring.rouge_l_recall(row.answer, generated),
        "extraction_strength": scoring.extraction_strength(matches),
        "exact_memorization": scoring.exact_memorization(matches),
        "accuracy": scoring.accuracy(row.answer, generated),
    }


def aggregate(records: Mapping[str, Sequence[Mapping[str, Any]]], split: str = "all") -> Report:
    """Metrics from records by set name ("forget", "retain", "holdout")."""
    metrics = {}
    for set_name, items in records.items():
        for key, names in _FIELDS.items():
            value, n, stderr = scoring.mean_and_error([item[key] for item in items])
            note = None if n else "no item has an answer of that kind"
            metrics[names[set_name]] = Metric(value, n, stderr, _HIGHER_IS_BETTER[set_name], len(items) - n, note)
    return Report("qa", split, metrics)


def question_inputs(prompter: Prompter, sets: Mapping[str, Sequence[Row]], settings: QaSettings) -> dict[str, Any]:
    """What was asked and how: two evaluations are comparable when this is equal."""
    return {
        "prompt": prompter.describe(),
        "sets": {name: rows_identity(rows) for name, rows in sets.items()},
        "max_new_tokens": settings.max_new_tokens,
        "split": settings.split,
    }


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Per-item records, one JSON object a line."""
    write_text(path, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in records))


def evaluate_qa(
    source: Source,
    prompter: Prompter,
    sets: Mapping[str, Sequence[Row]],
    out: Path,
    settings: QaSettings = QaSettings(),
    *,
    label: str = "scores",
    progress: Progress = silent,
) -> Report:
    """Score a model on each set of rows; writes `SET.jsonl` records, report.json and a manifest into `out`.

    A folder made from the same inputs is read instead; after a stop, sets that were finished are not scored again.
    """
    inputs = {"model": source.identity(), **question_inputs(prompter, sets, settings)}
    if is_finished(out, inputs):
        return load_report(out)
    with stage_folder(out, "evaluation", inputs, {"sources": {"model": source.pinned()}}, resumable=True) as partial:
        model = None
        records: dict[str, list[dict[str, Any]]] = {}
        total = 2 * sum(map(len, sets.values()))
        for name, rows in sets.items():
            path = partial / f"{name}.jsonl"
            if not path.is_file():
                model = model if model is not None else load_model(source.folder)
                before = 2 * sum(map(len, records.values()))
                found = score_rows(model, prompter, rows, settings, part_of(progress, label, before, total))
                write_records(path, found)
            records[name] = [json.loads(line) for line in path.read_text().splitlines()]
        report = aggregate(records, settings.split)
        write_report(report, partial)
    return report
