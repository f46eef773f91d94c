"""TOFU (Maini et al., 2024): questions about invented authors, of whom some are to be forgotten.

There are four sets: forget authors, retain authors, real authors and world facts. Each question has its right answer
and wrong ones. Where the data set has a holdout set of authors that nobody learnt, it serves membership inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msa_lite.data import Prompter, Row, best_score
from msa_lite.errors import UsageError, nearest
from msa_lite.evals.benchmarks.aggregates import (
    NO_IDEAL,
    harmonic_metric,
    judged_metric,
    make_metric,
    mean_metric,
    membership_metrics,
    missing_metric,
)
from msa_lite.evals.benchmarks.benchmark import (
    Benchmark,
    BenchmarkSettings,
    Item,
    ItemSet,
    JudgeCall,
    Record,
    Records,
    column,
    flat_scores,
    losses,
)
from msa_lite.evals.benchmarks.dataset import Part, load_parts, sampled
from msa_lite.evals.engine import answers, scoring
from msa_lite.evals.engine.forward import answer_texts
from msa_lite.evals.engine.generate import Decoding
from msa_lite.evals.judge.base import wording_of
from msa_lite.evals.judge.prompts import JudgeWording, acc_forget, acc_recover, acc_retain, tofu_ask
from msa_lite.evals.verdict.outcome import weigh_rows
from msa_lite.report import Metric
from msa_lite.settings import JudgeSettings

_HOME = "locuslab/TOFU"
SPLITS = ("forget01", "forget05", "forget10")
MAX_NEW_TOKENS = 200
QUESTIONS_PER_AUTHOR = 20  # one after the other in every set of invented authors (Maini et al., 2024)

_PARAPHRASE = "paraphrased_question"
_QUESTION = ("question", "answer")
_WRONG = (*_QUESTION, "perturbed_answer")
_PARAPHRASED = (*_WRONG, "paraphrased_answer")
_LISTS = ("perturbed_answer",)
_UTILITY = {"r": "retain", "ra": "real_authors", "wf": "world_facts"}  # ending of a metric's name → set
_JUDGED = {
    "forget": {"acc_forget": acc_forget, "acc_recover": acc_recover},
    "retain": {"acc_retain": acc_retain},
}
_PARTS = ("probability", "rouge_l", "truth_ratio")  # of model utility, on each of these sets


def _load(prompter: Prompter, settings: BenchmarkSettings) -> Benchmark:
    """Load the questions about a forget set: forget01, forget05 or, by default, forget10.

    Raise UsageError for an unknown split, DataError that names every configuration and column that the data set
    lacks. Empty questions are not asked and empty answers not scored. Empty wrong answers are left out, so a
    question's list may be of any length.
    """
    split = SPLITS[-1] if settings.split is None else settings.split
    if split not in SPLITS:
        raise UsageError(f"tofu has no split '{split}'{nearest(split, SPLITS)}; choose from {', '.join(SPLITS)}")
    tables = load_parts(
        settings.data or _HOME,
        {
            "forget": Part(f"{split}_perturbed", _PARAPHRASED, lists=_LISTS, extra=(_PARAPHRASE,)),
            "retain": Part("retain_perturbed", _PARAPHRASED, lists=_LISTS),
            "real_authors": Part("real_authors_perturbed", _WRONG, lists=_LISTS),
            "world_facts": Part("world_facts_perturbed", _WRONG, lists=_LISTS),
            "holdout": Part(split.replace("forget", "holdout"), _QUESTION, optional=True),
        },
    )
    decoding = Decoding(MAX_NEW_TOKENS)
    sets = {}
    for name, table in tables.items():
        items = [_item(prompter, i, row, name) for i, row in sampled(table, settings)]
        if name in ("forget", "retain", "holdout"):
            items = [replace(item, group=item.index // QUESTIONS_PER_AUTHOR) for item in items]
        with_z = "holdout" in tables and name in ("forget", "holdout")
        sets[name] = ItemSet(items, None if name == "holdout" else decoding, with_z)
    return TOFU.over(split, sets, prompter, settings.compat)


def _wordings(settings: BenchmarkSettings, questions: Sequence[str]) -> dict[str, list[str]]:
    """Return the paraphrases of questions; none for a copy of the data without them."""
    part = Part(f"{settings.split or SPLITS[-1]}_perturbed", ("question",), optional=True, extra=(_PARAPHRASE,))
    table = load_parts(settings.data or _HOME, {"forget": part}).get("forget", [])
    known = {row["question"]: row[_PARAPHRASE] for row in table}
    paraphrases = [known.get(question, "") for question in questions]
    return {"paraphrased": paraphrases} if all(paraphrases) else {}


def _score(benchmark: Benchmark, set_name: str, record: Record) -> Record:
    record |= flat_scores(record)
    if set_name == "holdout":
        return record
    # Real authors and world facts have no paraphrases; an empty one elsewhere leaves the ratio undefined.
    name = "paraphrased" if "paraphrased" in record.get("scores", {}) else "answer"
    right = losses(record, name) or [None]
    wrong = losses(record, "perturbed")
    arithmetic = "arithmetic_truth_ratio" in benchmark.compat
    record["truth_ratio"] = scoring.truth_ratio(right[0], wrong, arithmetic)
    wrong_texts = record.get("scores", {}).get("perturbed", [])
    record["choice_probability"] = scoring.choice_probability(
        record["probability"], [text["probability"] for text in wrong_texts]
    )
    generated = record.get("generated")
    answered = generated is not None and answers.has_word(record["answer"])
    for name, rule in {"rouge_l": answers.rouge_l_recall, "accuracy": answers.accuracy}.items():
        score = partial(best_score, rule, benchmark.tokenizer, record["answer"])
        record[name] = score(str(generated)) if answered else None
    return record


def _metrics(records: Records, ideal: Records | None) -> dict[str, Metric]:
    forget = records["forget"]
    ratios = column(forget, "truth_ratio")
    parts = {end: dict(zip(_PARTS, _utility_scores(records, end), strict=True)) for end in _UTILITY}
    scores = {
        "probability_f": column(forget, "probability"),
        "rouge_l_f": column(forget, "rouge_l"),
        "truth_ratio_f": [None if r is None else scoring.truth_ratio_forget(r) for r in ratios],
        "extraction_strength": column(forget, "extraction_strength"),
        "exact_memorization": column(forget, "exact_memorization"),
    }
    utilities = {"model_utility": parts, "model_utility_ra_wf": {end: parts[end] for end in ("ra", "wf")}}
    part_scores = {f"{name}_{end}": values for end, part in parts.items() for name, values in part.items()}
    metrics = {name: mean_metric(name, values) for name, values in scores.items()}
    metrics["forget_quality"] = _forget_quality(ratios, column(ideal["forget"], "truth_ratio") if ideal else None)
    metrics |= {name: harmonic_metric(name, sets) for name, sets in utilities.items()}
    metrics |= {name: mean_metric(name, values) for name, values in part_scores.items()}
    if "holdout" in records:
        sides = forget, records["holdout"]
        metrics |= membership_metrics(sides, (ideal["forget"], ideal["holdout"]) if ideal else None)
    for name, keys in _JUDGED.items():
        for key in keys:
            metrics[key] = judged_metric(key, records[name]) if ideal else missing_metric(key, NO_IDEAL)
    return metrics


def _judge_calls(records: Records, ideal: Records | None, judge: JudgeSettings) -> list[JudgeCall]:
    if ideal is None:
        return []
    calls, wording = [], wording_of(judge)
    for name in ("forget", "retain"):
        for record, other in zip(records[name], ideal[name], strict=True):
            if record.get("generated") is not None and other.get("generated") is not None:
                calls.append(_judge_call(name, record, other["generated"], wording))
    return calls


def _item(prompter: Prompter, index: int, row: dict[str, Any], set_name: str) -> Item:
    question, answer = row["question"], row["answer"]
    fields: dict[str, Any] = {"question": question, "answer": answer}
    if set_name != "holdout":
        fields["perturbed_answer"] = row["perturbed_answer"]
    if not question.strip():
        return Item(index, fields)
    texts = {"answer": answer_texts(prompter, index, question, [answer])}
    if set_name == "holdout":
        return Item(index, fields, texts)
    if "paraphrased_answer" in row:
        texts["paraphrased"] = answer_texts(prompter, index, question, [row["paraphrased_answer"]])
    texts["perturbed"] = answer_texts(prompter, index, question, fields["perturbed_answer"])
    return Item(index, fields, texts, prompter.prompt(Row(index, question)))


def _utility_scores(records: Records, end: str) -> tuple[Sequence[float | None], ...]:
    """Return the per-item scores of the three parts of model utility on one of its sets."""
    items = records[_UTILITY[end]]
    ratios = [None if r is None else scoring.truth_ratio_utility(r) for r in column(items, "truth_ratio")]
    return column(items, "probability" if end == "r" else "choice_probability"), column(items, "rouge_l"), ratios


def _forget_quality(ratios: Sequence[float | None], ideal: Sequence[float | None] | None) -> Metric:
    if ideal is None:
        return missing_metric("forget_quality", NO_IDEAL)
    value = scoring.forget_quality(ratios, ideal)
    n = sum(r is not None for r in ratios)
    if value is None:
        reason = f"no item of {'the ideal' if n else 'the model'} has this score"
        return missing_metric("forget_quality", reason, len(ratios))
    return make_metric("forget_quality", value, n, skipped=len(ratios) - n)


def _judge_call(set_name: str, record: Record, ideal_answer: str, wording: JudgeWording) -> JudgeCall:
    """Return the call for all scores of a record."""
    ask, tags = tofu_ask(record, ideal_answer, wording)
    merged = any({"truth", "ideal"} <= tag for tag in tags)
    scores = {
        letter: {name: score(winner) for name, score in _JUDGED[set_name].items()} | {"merged": merged}
        for letter, winner in {**dict(zip(ask.letters, tags, strict=True)), "Z": None}.items()
    }
    return JudgeCall(set_name, record["index"], ask, scores)


TOFU = Benchmark(
    "tofu",
    _score,
    _metrics,
    _load,
    home=_HOME,
    sides=("forget", "holdout"),
    vital=("model_utility",),
    switches={
        "arithmetic_truth_ratio": "truth ratios take the arithmetic mean of the wrong answers' probabilities, not "
        "the geometric one"
    },
    reads=("mask_eq_pad", "second_end", "trailing_blank", "es_floor"),
    preset=("arithmetic_truth_ratio",),
    weigh=weigh_rows,
    judge_calls=_judge_calls,
    wordings=_wordings,
)
