"""A benchmark in one file: questions whose answers are compared letter by letter.

With its entry in `msa_lite.benchmarks.BENCHMARKS` it takes part in every command.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from msa_lite.benchmarks import BenchmarkEntry
from msa_lite.data import Prompter, sample_rows
from msa_lite.errors import UsageError
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Item, ItemSet, Record, Records, column
from msa_lite.evals.engine import scoring
from msa_lite.evals.engine.generate import Decoding
from msa_lite.report import Metric

ENTRY = BenchmarkEntry(
    "tests.support.toy.TOY",
    "questions whose answers are compared letter by letter",
    columns=("likeness_r", "likeness_f"),
    sweep_columns=(("likeness_f", "likeness_r"),),
    scores={"toy": {"likeness_f": -1, "likeness_r": 1}},
    validation=0.5,
)


def load(prompter: Prompter, settings: BenchmarkSettings) -> Benchmark:
    """Read forget.jsonl and retain.jsonl of a folder."""
    if settings.data is None:
        raise UsageError("toy: give a folder as the data")
    sets = {}
    for name in ("forget", "retain"):
        rows = [json.loads(line) for line in (Path(settings.data) / f"{name}.jsonl").read_text().splitlines()]
        items = [
            Item(i, {key: row[key] for key in ("question", "answer")}, prompt=prompter.prompt(row["question"]))
            for i, row in enumerate(rows)
        ]
        sets[name] = ItemSet(sample_rows(items, settings.limit or len(items), settings.seed), Decoding(8))
    return TOY.over(settings.split or "whole", sets, prompter, settings.compat)


def score(benchmark: Benchmark, set_name: str, record: Record) -> Record:
    return record | {"likeness": SequenceMatcher(None, record["answer"], record["generated"]).ratio()}


def metrics(records: Records, ideal: Records | None) -> dict[str, Metric]:
    directions: Mapping[str, bool] = {"forget": False, "retain": True}
    return {
        f"likeness_{name[0]}": Metric(*_mean(records[name]), higher_is_better=direction)
        for name, direction in directions.items()
    }


def _mean(records: Sequence[Record]) -> tuple[float | None, int, float | None]:
    return scoring.mean_and_error(column(records, "likeness"))


TOY = Benchmark("toy", score, metrics, load, vital=("likeness_r",), default_score="toy")
