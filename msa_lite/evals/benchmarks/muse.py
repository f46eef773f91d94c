"""MUSE (Shi et al., 2024): books of which one series is to be forgotten, or news articles; and texts to keep.

Three questions are asked of a model. Does it repeat the books word for word (verbmem)? Does it know what stands in them
and in the texts to keep (knowmem)? Do its probabilities show that it has read them (privleak)? The metrics are
those of open-unlearning's re-implementation, from which the MSA paper's numbers come. All of them are in 0…1 where
MUSE's own code, muse_bench, prints percent; only PrivLeak is in percent in both.

MUSE-Books and MUSE-News have one layout. News has two more configurations: `scal`, forget sets that grow, and `sust`,
disjoint ones for one request after another. They change what a model forgets, not what it is asked. MUSE looks at the
trend of a metric over them (§3.1, C5 and C6); a comparison of runs shows that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from msa_lite.data import Prompter, Row, Shots, best_score, decode_answer, encode_start
from msa_lite.errors import UsageError, nearest
from msa_lite.evals.benchmarks.aggregates import Sides, mean_metric, membership_metrics, privleak_metric
from msa_lite.evals.benchmarks.benchmark import (
    Benchmark,
    BenchmarkSettings,
    Item,
    ItemSet,
    Record,
    Records,
    column,
    flat_scores,
    text_item,
)
from msa_lite.evals.benchmarks.dataset import Part, Table, load_parts, sampled, split_revision
from msa_lite.evals.engine import answers
from msa_lite.evals.engine.forward import completion
from msa_lite.evals.engine.generate import Decoding
from msa_lite.evals.verdict.outcome import RECITED, Yardstick, weigh_recited
from msa_lite.report import Metric

_VERBMEM = Decoding(128)
_KNOWMEM = Decoding(32, stop=("\n\n", "\nQuestion", "Question:"))
_PRIVLEAK = ("privleak_forget", "privleak_holdout")
_REFERENCE = {"verbmem": "gt", "knowmem_forget": "answer", "knowmem_retain": "answer"}  # field that answers are held to
_HOMES = {"books": "muse-bench/MUSE-Books", "news": "muse-bench/MUSE-News"}
_PARTS = {
    "verbmem": Part("verbmem", ("prompt", "gt"), "forget"),
    "knowmem_forget": Part("knowmem", ("question", "answer"), "forget_qa"),
    "knowmem_retain": Part("knowmem", ("question", "answer"), "retain_qa"),
    "shots_forget": Part("knowmem", ("question", "answer"), "forget_qa_icl"),
    "shots_retain": Part("knowmem", ("question", "answer"), "retain_qa_icl"),
    "privleak_forget": Part("privleak", ("text",), "forget"),
    "privleak_holdout": Part("privleak", ("text",), "holdout"),
}


def _is_recited(record: Record) -> bool:
    return (record.get("rouge_l_f1") or 0.0) >= RECITED


_YARDSTICK = Yardstick(
    unit="passages",
    forget_set="verbmem",
    left_scores=(
        ("verbmem", "extraction_strength"),
        ("verbmem", "probability"),
        ("knowmem_forget", "rouge_l_f1"),
    ),
    near_scores=(("verbmem", "rouge_l_f1"), ("verbmem", "extraction_strength"), ("knowmem_forget", "rouge_l_f1")),
    retain_set="knowmem_retain",
    retain_scores=("rouge_l_f1",),
    is_recited=_is_recited,
    is_kept=None,
    unseen_set="knowmem_forget",
)


def _load(prompter: Prompter, settings: BenchmarkSettings) -> Benchmark:
    """Load MUSE-Books, MUSE-News (split news), or a data set of the same layout.

    Without a split, it is news for data of MUSE-News' name, otherwise books.

    Questions follow all of the data set's own examples (ten), and no prompt is cut. Open-unlearning cuts plain ones
    to 512 tokens, so that a long one loses its question. Passages and texts are scored over their first
    `MAX_TOKENS` tokens. Not scored and counted as skipped: empty passages and texts, those without a token to
    predict, answers whose reference has no word, and items that are longer than the model's window. Raises
    UsageError for an unknown split, DataError that names every configuration, split and column that the data set
    lacks.
    """
    split = _split_of(settings.data) if settings.split is None else settings.split
    if split not in _HOMES:
        raise UsageError(f"muse has no split '{split}'{nearest(split, _HOMES)}; choose from {', '.join(_HOMES)}")
    tables = load_parts(settings.data or _HOMES[split], _PARTS)
    rows = {name: sampled(table, settings) for name, table in tables.items() if not name.startswith("shots")}
    tokenizer = prompter.tokenizer
    sets = {"verbmem": ItemSet([_passage(tokenizer, i, row) for i, row in rows["verbmem"]], _VERBMEM, ends=False)}
    for side in ("forget", "retain"):
        shots = _shots(tables[f"shots_{side}"])
        items = [_question(prompter, i, row, shots) for i, row in rows[f"knowmem_{side}"]]
        sets[f"knowmem_{side}"] = ItemSet(items, _KNOWMEM)
    for name in _PRIVLEAK:
        sets[name] = ItemSet([text_item(tokenizer, i, row["text"]) for i, row in rows[name]], with_z=True, ends=False)
    return MUSE.over(split, sets, prompter, settings.compat)


def _score(benchmark: Benchmark, set_name: str, record: Record) -> Record:
    if set_name in _REFERENCE:
        reference = _reference(benchmark, set_name, record[_REFERENCE[set_name]])
        generated = record.get("generated")
        scored = generated is not None and answers.has_word(reference)
        rule = partial(answers.rouge_l_f1, stem="no_stemmer" not in benchmark.compat)
        score = partial(best_score, rule, benchmark.tokenizer, reference)
        record["rouge_l_f1"] = score(str(generated)) if scored else None
    return record if set_name.startswith("knowmem") else record | flat_scores(record, "text")


def _metrics(records: Records, ideal: Records | None) -> dict[str, Metric]:
    """Return the metrics of passages, answers and membership inference.

    Passages to be forgotten have extraction_strength, exact_memorization and verbmem_f (ROUGE-L F1). Answers about
    what is to be forgotten and kept have knowmem_f and knowmem_r (ROUGE-L F1). min_k and min_k_pp are AUCs of
    telling forget from holdout texts; they come with their distances to the ideal's, and with privleak (percent,
    best at 0).
    """
    sides, ideal_sides = _sides(records), _sides(ideal) if ideal else None
    passages = records["verbmem"]
    scores = {
        "extraction_strength": column(passages, "extraction_strength"),
        "exact_memorization": column(passages, "exact_memorization"),
        "verbmem_f": column(passages, "rouge_l_f1"),
        "knowmem_f": column(records["knowmem_forget"], "rouge_l_f1"),
        "knowmem_r": column(records["knowmem_retain"], "rouge_l_f1"),
    }
    return {
        **{name: mean_metric(name, values) for name, values in scores.items()},
        **membership_metrics(sides, ideal_sides),
        "privleak": privleak_metric(sides, ideal_sides),
    }


def _fails(record: Record) -> bool | None:
    return None if record.get("rouge_l_f1") is None else _YARDSTICK.is_recited(record)


def _reference(benchmark: Benchmark, set_name: str, text: str) -> str:
    """Return the text that an answer is compared with; with `short_reference`, only the beginning of a passage."""
    if set_name != "verbmem" or "short_reference" not in benchmark.compat:
        return text
    return decode_answer(benchmark.tokenizer, encode_start(benchmark.tokenizer, text, _VERBMEM.max_new_tokens))


def _split_of(data: str | None) -> str:
    name = PurePath(split_revision(data)[0]).name if data else ""
    return next((split for split, home in _HOMES.items() if PurePath(home).name == name), "books")


def _passage(tokenizer: Any, index: int, row: Mapping[str, Any]) -> Item:
    fields = {key: row[key] for key in ("prompt", "gt")}
    ids = encode_start(tokenizer, fields["prompt"])
    text = completion(tokenizer, index, fields["prompt"], f" {fields['gt']}")
    return Item(index, fields, {"text": text}, ids or None)


def _question(prompter: Prompter, index: int, row: Mapping[str, Any], shots: Shots) -> Item:
    fields = {key: row[key] for key in ("question", "answer")}
    return Item(index, fields, prompt=prompter.prompt(Row(index, fields["question"], earlier=shots)))


def _shots(table: Table) -> Shots:
    return tuple((row["question"], row["answer"]) for row in table)


def _sides(records: Records) -> Sides:
    forget, holdout = (records[name] for name in _PRIVLEAK)
    return forget, holdout


def _places(records: Records, side: str) -> list[tuple[str, int]]:
    return [(f"knowmem_{side}", at) for at in range(len(records.get(f"knowmem_{side}", ())))]


MUSE = Benchmark(
    "muse",
    _score,
    _metrics,
    _load,
    home=_HOMES["books"],
    homes=_HOMES,
    forget_set=_YARDSTICK.forget_set,
    sides=_PRIVLEAK,
    vital=("knowmem_r",),
    default_score="muse",
    switches={
        "no_stemmer": "ROUGE-L without stemming",
        "short_reference": "VerbMem's references are cut to their first 128 tokens, as many as are generated, the "
        "beginning-of-sequence token counted",
    },
    reads=("mask_eq_pad", "trailing_blank", "es_floor", "drop_last_token"),
    preset=("no_stemmer", "short_reference", "trailing_blank"),
    weigh=partial(weigh_recited, yardstick=_YARDSTICK),
    fails=_fails,
    places=_places,
)
