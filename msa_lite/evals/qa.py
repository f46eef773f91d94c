"""The `qa` benchmark: how well a model knows the answers of the forget, retain and holdout sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msa_lite.data import Prompter, Row, encode_qa
from msa_lite.evals import scoring
from msa_lite.evals.aggregates import mean_metric
from msa_lite.evals.benchmark import Benchmark, Item, ItemSet, Record, Records, column, flat_scores
from msa_lite.evals.generate import Decoding
from msa_lite.report import Metric

# Score → its ending for each set; the bare names are those that the published benchmarks use for the forget set.
_SCORES = ("accuracy", "probability", "rouge_l", "extraction_strength", "exact_memorization")
_BARE = ("extraction_strength", "exact_memorization")
_HIGHER_IS_BETTER = {"forget": False, "retain": True, "holdout": None}


@dataclass(frozen=True)
class Qa(Benchmark):
    """Questions with answers in sets named forget, retain and holdout; made by `load_qa`."""

    name = "qa"

    def describe(self) -> dict[str, Any]:
        lengths = {part.decoding.max_new_tokens for part in self.sets.values() if part.decoding}
        return super().describe() | {"max_new_tokens": max(lengths, default=None)}

    def complete(self, set_name: str, record: Record) -> Record:
        record |= flat_scores(record)
        answer, generated = record["answer"], record["generated"]
        record["rouge_l"] = None if generated is None else scoring.rouge_l_recall(answer, generated)
        record["accuracy"] = None if generated is None else scoring.accuracy(answer, generated)
        return record

    @staticmethod
    def metrics(records: Records, ideal: Records | None) -> dict[str, Metric]:
        return {
            _metric_name(score, name): mean_metric(column(items, score), _HIGHER_IS_BETTER[name])
            for name, items in records.items()
            for score in _SCORES
        }


def _metric_name(score: str, set_name: str) -> str:
    return score if set_name == "forget" and score in _BARE else f"{score}_{set_name[0]}"


def load_qa(sets: Mapping[str, Sequence[Row]], prompter: Prompter, max_new_tokens: int = 200, split: str = "all") -> Qa:
    """The benchmark over rows by set name. No row is cut: prompts and answers are scored whole."""
    decoding = Decoding(max_new_tokens)
    return Qa(split, {name: ItemSet(_items(prompter, rows), decoding) for name, rows in sets.items()}, prompter)


def _items(prompter: Prompter, rows: Sequence[Row]) -> list[Item]:
    return [
        Item(
            row.index,
            {"question": row.question, "answer": row.answer},
            {"answer": (example,)},
            prompter.prompt(row.question),
        )
        for row, example in zip(rows, encode_qa(rows, prompter), strict=True)
    ]
