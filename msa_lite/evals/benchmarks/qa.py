"""Define the `qa` benchmark: the user's own questions or texts, in forget, retain and holdout sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from msa_lite.catalogue import OWN
from msa_lite.data import Example, Prompter, Row, best_score, encode_qa
from msa_lite.data.messages import ToolUse
from msa_lite.evals.benchmarks.aggregates import mean_metric
from msa_lite.evals.benchmarks.benchmark import (
    Benchmark,
    Item,
    ItemSet,
    Record,
    Records,
    column,
    flat_scores,
    text_item,
)
from msa_lite.evals.engine import answers
from msa_lite.evals.engine.generate import Decoding
from msa_lite.evals.verdict.outcome import weigh_rows
from msa_lite.report import Metric
from msa_lite.report.tables.metrics import METRICS

_TEXT_SCORES = ("probability", "extraction_strength", "exact_memorization")
_SCORES = ("accuracy", "probability", "rouge_l", "extraction_strength", "exact_memorization")


def _score(benchmark: Benchmark, set_name: str, record: Record) -> Record:
    if "text" in record:
        return record | flat_scores(record, "text")
    record |= flat_scores(record)
    answer, generated = record["answer"], record["generated"]
    for name, rule in {"rouge_l": answers.rouge_l_recall, "accuracy": answers.accuracy}.items():
        record[name] = None if generated is None else best_score(rule, benchmark.tokenizer, answer, generated)
    return record


def _metrics(records: Records, ideal: Records | None) -> dict[str, Metric]:
    """Return the means of each set: probability, extraction_strength and exact_memorization.

    Sets that hold questions also have accuracy and rouge_l, which go over the questions alone.
    """
    metrics = {}
    for name, items in records.items():
        questions = [item for item in items if "text" not in item]
        for score in _TEXT_SCORES if items and not questions else _SCORES:
            metric = _metric_name(score, name)
            metrics[metric] = mean_metric(metric, column(items if score in _TEXT_SCORES else questions, score))
    return metrics


def row_of(index: int, fields: Mapping[str, Any], about: str = "") -> Row:
    """Return the row that an item or record of a question was made of, by its fields."""
    earlier, tools = tuple(map(tuple, fields.get("earlier", ()))), ToolUse(**fields.get("tools", {}))
    return Row(index, fields["question"], fields["answer"], "", earlier, fields.get("system", ""), about, tools)


QA = Benchmark(OWN, _score, _metrics, weigh=weigh_rows)
"""Questions with answers, or texts, in sets named forget, retain and holdout; `load_qa` gives it items."""


def _metric_name(score: str, set_name: str) -> str:
    """Return the score's name with the set's initial (`_f`, `_r`, `_h`), or without if METRICS lacks that name."""
    name = f"{score}_{set_name[0]}"
    return name if name in METRICS else score


def load_qa(
    sets: Mapping[str, Sequence[Row]], prompter: Prompter, max_new_tokens: int = 200, split: str = "all"
) -> Benchmark:
    """Return the benchmark over rows by set name, questions or texts.

    No question is cut: prompts and answers are scored whole. Texts are scored over their first `MAX_TOKENS` tokens
    after the ids that every text begins with, or as many as the window has, and nothing is generated from them. In a
    set with questions, memorization scores leave out the last token of each row, the answer's end token. In a set of
    texts alone every token counts.
    """
    loaded = {}
    for name, rows in sets.items():
        examples = iter(encode_qa([row for row in rows if not row.text], prompter))
        items = [
            text_item(prompter.tokenizer, row.index, row.text, row.about or None, prompter.window)
            if row.text
            else _question(prompter, row, next(examples))
            for row in rows
        ]
        answered = not items or any(item.prompt is not None for item in items)
        loaded[name] = ItemSet(items, Decoding(max_new_tokens) if answered else None, ends=answered)
    # Texts alone have no answers.
    about = {"max_new_tokens": max_new_tokens, "answer_rule": answers.RULE}
    answered = any(part.decoding for part in loaded.values())
    return replace(QA.over(split, loaded, prompter), about=about if answered else {"max_new_tokens": None})


def _question(prompter: Prompter, row: Row, example: Example) -> Item:
    around = {
        "earlier": [list(turn) for turn in row.earlier],
        "system": row.system,
        "tools": asdict(row.tools) if row.tools else {},
    }
    fields = {"question": row.question, "answer": row.answer} | {key: value for key, value in around.items() if value}
    return Item(row.index, fields, {"answer": (example,)}, prompter.prompt(row), group=row.about or None)
