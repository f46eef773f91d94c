"""Check by membership inference whether a model has seen the forget set, beside rows that it cannot have seen.

MSA fails if the prior has seen the forget set. Two scores of each row, its loss and Min-K%++ (Zhang et al., 2024), are
compared by an AUC: the chance that a forget row looks better known than a comparison row. A model that has seen neither
set scores ½; one that has learnt the forget set by heart scores 1.

Two controls show whether the comparison works: the target, which has seen the forget set, and the ideal, if there is
one, which has not. Tests of this kind detect what was learnt, not what was read: they detect next to nothing of a text
that stood once in a large corpus (Duan et al., 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from msa_lite.data import Example, Prompter, Row, encode_qa, encode_text, sample_rows
from msa_lite.evals.benchmarks.benchmark import Benchmark, Item, ItemSet, Record, Records, column
from msa_lite.evals.engine import scoring
from msa_lite.evals.engine.models import model_identity
from msa_lite.evals.scores.records import collect_records, open_answers, write_records
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.weights.hub import Source
from msa_lite.report import Metric, Report, load_report, write_report
from msa_lite.report.run.probing import LEAST_ROWS

PROBE_KIND = "probe"
PROBE_ROWS = 1000  # on a side; they bring the standard error at chance down to 0.013
ROUNDS = 2000  # of resampling

_SCORES = {"loss_auc": "loss", "min_k_pp_auc": "min_k_pp"}


def _score(benchmark: Benchmark, set_name: str, record: Record) -> Record:
    scores = record.pop("scores", {}).get("text") or [{}]
    figures = {key: scores[0][key] for key in ("n_tokens", "loss", "min_k_pp") if key in scores[0]}
    return record | {"loss": None} | figures


def _metrics(records: Records, ideal: Records | None) -> dict[str, Metric]:
    return {name: auc.metric() for name, auc in _aucs(records).items()}


PROBE = Benchmark("probe", _score, _metrics)
"""Forget rows, and holdout rows to compare them with. The text of an item is called "text"."""


def suffices(probe: Benchmark) -> bool:
    """Check whether both sides of a probe have enough rows for a sound interval."""
    return all(len(part.items) >= LEAST_ROWS for part in probe.sets.values())


def sample_probe(probe: Benchmark, most: int, seed: int, with_z: bool = True) -> Benchmark:
    """Return a seeded sample of each set. most: rows of a set. with_z: measure Min-K%++ too."""
    sets = {
        name: replace(part, items=sample_rows(part.items, most, seed), with_z=with_z)
        for name, part in probe.sets.items()
    }
    return replace(probe, sets=sets)


def against_rows(forget: Sequence[Row], holdout: Sequence[Row], prompter: Prompter, max_length: int) -> Benchmark:
    """Compare forget rows with other rows of the same format.

    Answers to questions are scored whole. Texts are cut into chunks of at most max_length tokens, each a row of its
    own.
    """

    def side(rows: Sequence[Row]) -> ItemSet:
        if rows[0].text:
            return _items([(c,) for row in rows for c in encode_text([row], prompter, max_length)], False)
        return _items([(example,) for example in encode_qa(rows, prompter)], True)

    return PROBE.over("all", {"forget": side(forget), "holdout": side(holdout)}, prompter)


def against_own(benchmark: Benchmark) -> Benchmark | None:
    """Return the comparison with a benchmark's own holdout rows; None where it has none.

    Paraphrases of the forget rows would differ in style, which a model may know or not: a model that had seen neither
    scored 0.61 on TOFU's, and 1.0 on sentences of a form that it had never met.
    """
    sets = benchmark.sets
    if not benchmark.sides or not set(benchmark.sides) <= sets.keys():
        return None
    forget, holdout = (sets[name] for name in benchmark.sides)
    text = "answer" if any("answer" in item.texts for item in forget.items) else "text"
    sides = {
        name: _items([item.texts.get(text, ()) for item in part.items], part.ends)
        for name, part in (("forget", forget), ("holdout", holdout))
    }
    return PROBE.over(benchmark.split, sides, benchmark.prompter)


def _items(texts: Sequence[tuple[Example, ...]], ends: bool) -> ItemSet:
    """Return the items of a set, whose records hold only a hash of their token ids and nothing of the text."""
    items = [Item(i, {"sha256": digest([t.ids for t in text])}, {"text": text}) for i, text in enumerate(texts)]
    return ItemSet(items, with_z=True, ends=ends)


def probe_model(
    source: Source, sides: Benchmark, out: Path, home: Path, label: str = "probe", progress: Progress = silent
) -> Report:
    """Score a model on the rows of a probe; write records (`SET.jsonl`), report.json and a manifest into `out`.

    A record has index, hash, loss and min_k_pp. The report has loss_auc and min_k_pp_auc; its settings have their 95 %
    `intervals` and the `rows` of each set. A folder made from the same inputs is loaded instead.
    home: the folder that keeps the model's answers (`open_answers`).
    """
    inputs = probe_inputs(source, sides)
    if is_finished(out, inputs):
        return load_report(out)
    with stage_folder(out, PROBE_KIND, inputs, {"sources": {"model": source.pinned()}}) as partial:
        records = collect_records(source, sides, open_answers(home), label=label, progress=progress)
        for name, part in records.items():
            write_records(partial / f"{name}.jsonl", part)
        aucs = _aucs(records)
        measured = {
            "intervals": {name: [auc.low, auc.high] for name, auc in aucs.items()},
            "rows": dict(zip(sides.sets, aucs["loss_auc"].rows, strict=True)),
        }
        metrics = _metrics(records, None)
        report = Report(sides.name, sides.split, metrics, inputs["questions"] | {"model": inputs["model"]} | measured)
        write_report(report, partial)
    return report


def probe_inputs(source: Source, sides: Benchmark) -> dict[str, Any]:
    """Return all that decides the probe of a model, as its manifest records it."""
    return {"model": model_identity(source), "questions": sides.describe()}


class Auc(NamedTuple):
    """P(a forget row looks better known than a comparison row) with its 95 % interval."""

    value: float | None
    """None if a side has no rows."""
    low: float
    high: float
    stderr: float | None
    rows: tuple[int, int]
    """Rows of each side that have the score."""
    skipped: int
    """Rows that have no score."""

    def metric(self) -> Metric:
        """Return the AUC for a report. Neither direction is better: ½ is right for a prior, 1 for the target."""
        note = "one of the two sides has no rows" if self.value is None else None
        return Metric(self.value, sum(self.rows), self.stderr, None, self.skipped, note)


def compute_auc(forget: Sequence[float | None], holdout: Sequence[float | None]) -> Auc:
    """Return the AUC of two sides' scores, with a seeded percentile bootstrap over rows; a low score means well known.

    With fewer than two rows on a side the interval is [0, 1].
    """
    sides = [np.array([value for value in side if value is not None], np.float64) for side in (forget, holdout)]
    rows = len(sides[0]), len(sides[1])
    skipped = len(forget) + len(holdout) - sum(rows)
    value = scoring.membership_auc(*sides)
    if min(rows) < 2:
        return Auc(value, 0.0, 1.0, None, rows, skipped)
    values = scoring.bootstrap(scoring.membership_auc, sides, rounds=ROUNDS)
    low, high = np.quantile(values, [0.025, 0.975])
    return Auc(value, float(low), float(high), scoring.spread(values), rows, skipped)


def _aucs(records: Records) -> dict[str, Auc]:
    forget, holdout = records["forget"], records["holdout"]
    return {
        name: compute_auc(column(forget, key), column(holdout, key))
        for name, key in _SCORES.items()
        if key == "loss" or any(key in record for record in (*forget, *holdout))
    }
