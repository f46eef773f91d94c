"""What models are asked: validation rows, by which a choice is made, and test rows, which nobody sees before it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from msa_lite.benchmarks import OWN
from msa_lite.choose.division import Parts, divide_rows
from msa_lite.choose.rules import LeastExtraction, Rule, check_rule, make_rule
from msa_lite.data import DataSource, Prompter, Row, load_rows, sample_rows
from msa_lite.errors import UsageError, join_faults
from msa_lite.evals.benchmark import Benchmark, benchmark_class
from msa_lite.evals.compat import resolve_compat
from msa_lite.evals.qa import load_qa
from msa_lite.evals.suite import load_benchmark
from msa_lite.recipe import Recipe
from msa_lite.report.metrics import metric_kind

logger = logging.getLogger(__name__)

SETS = ("forget", "retain", "holdout")
WhenToChoose = bool | Literal["if possible"]


@dataclass(frozen=True)
class Questions:
    """validation: what a choice is made by, with its rule; None where there is none to make. test: what models are
    scored on, None where nothing is. judged: whether the rule wants what a judge says of the validation rows.
    """

    rule: Rule
    validation: Benchmark | None = None
    test: Benchmark | None = None
    judged: bool = False


def load_questions(
    recipe: Recipe,
    data: Mapping[str, DataSource],
    choice: WhenToChoose,
    prompter: Prompter,
    loaded: Mapping[str, list[Row]] | None = None,
) -> Questions:
    """The questions of a recipe, in two parts where there is a choice to make.

    The parts are those of the benchmark where it is chosen by the benchmark's own metrics. By extraction it is chosen
    on questions of the forget and retain set; the benchmark's scores then leave these out. Holdout rows of one's own
    are in both parts, whole. Raises UsageError where a rule lacks what it needs, or there are no rows to choose by.
    """
    asked = recipe.evaluate
    if asked is None:
        return Questions(_rule(recipe, {}))
    rows = _rows(recipe, data, loaded or {})
    rule = _rule(recipe, rows)
    if choice is not False and rule.needs_ideal and not asked.ideal:
        raise UsageError(f"select: '{rule.name}' is held against the ideal model; give evaluate.ideal")
    if asked.benchmark == OWN:
        return _of_ones_own(recipe, rule, rows, choice, prompter)
    benchmark = load_benchmark(
        asked.benchmark,
        prompter,
        split=asked.split,
        data=asked.data,
        limit=asked.limit,
        seed=recipe.seed,
        compat=resolve_compat(asked.compat, asked.benchmark),
    )
    if isinstance(rule, LeastExtraction):
        own = _of_ones_own(recipe, rule, rows, choice, prompter)
        seen = _questions(own.validation) - _questions(own.test) if own.validation else set()
        return Questions(rule, own.validation, benchmark.without(seen) if seen else benchmark)
    if choice is False:
        return Questions(rule, None, benchmark)
    judge = asked.judge.kind == "openai" and recipe.select.judge  # a local one would be loaded beside the target
    _check(rule, benchmark, judge)
    chosen_by, rest = benchmark.divide(recipe.validation, recipe.seed, recipe.select.by)
    if coarse := chosen_by.resolution(rule.needs()):
        logger.warning("%s; of so few rows, a choice may be by chance (select.validation)", coarse)
    return Questions(rule, chosen_by, rest, judge and rule.judged)


def _rule(recipe: Recipe, rows: Mapping[str, list[Row]]) -> Rule:
    """What is chosen by; of benchmarks whose data are no questions about the sets, their own score, by default."""
    asked, select = recipe.evaluate, recipe.select
    score = select.score
    if score is None and asked and "forget" not in rows:
        score = benchmark_class(asked.benchmark).default_score
    return make_rule(score, select.keep, select.maximise, select.minimise, select.subject_to)


def _check(rule: Rule, benchmark: Benchmark, judged: bool) -> None:
    """Raise UsageError where a rule needs what the benchmark, or nobody but a judge, gives."""
    check_rule(rule, benchmark.metric_names(), f"benchmark {benchmark.name}")
    wanting = [name for name in rule.needs() if metric_kind(name).judge == "required"]
    if wanting and not judged:
        raise UsageError(
            f"select: {', '.join(wanting)} is a judge's; give evaluate.judge of kind openai, and select.judge true"
        )


def _rows(recipe: Recipe, data: Mapping[str, DataSource], loaded: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Rows to score by set: those that `evaluate` names, else the training sets.

    Texts are asked of in the qa benchmark alone: the published ones have texts of their own.
    """
    assert recipe.evaluate is not None
    found = {}
    for name in SETS:
        given = data.get(f"evaluate.{name}")
        place = f"evaluate.{name}" if given else name
        source = data.get(place)
        if source is None or (source.format != "qa" and recipe.evaluate.benchmark != OWN):
            if given:
                raise UsageError(
                    f"evaluate.{name}.format is '{given.format}'; beside {recipe.evaluate.benchmark}, questions are "
                    "wanted (format qa)"
                )
            continue
        rows = loaded[place] if place in loaded else load_rows(source)
        found[name] = sample_rows(rows, recipe.evaluate.limit or len(rows), recipe.seed)
    return found


def _of_ones_own(
    recipe: Recipe, rule: Rule, rows: Mapping[str, list[Row]], choice: WhenToChoose, prompter: Prompter
) -> Questions:
    """Both parts of questions, or texts, of one's own."""
    assert recipe.evaluate is not None
    if choice == "if possible":
        least = 1 if recipe.select.validation == "auto" else 2
        choice = "forget" in rows and all(len(rows[name]) >= least for name in ("forget", "retain") if name in rows)
    limit = recipe.evaluate.max_new_tokens
    if not choice:
        if not rows and recipe.evaluate.benchmark == OWN:
            logger.warning("nothing can be scored: there are no rows. Give evaluate.forget, or set evaluate: null")
        return Questions(rule, None, load_qa(rows, prompter, limit) if rows else None)
    if recipe.select.by == "author":
        raise UsageError("select.by author: rows of one's own have no authors; leave it at question")
    parts = _divide(recipe, rows)
    chosen_by = load_qa(parts.validation, prompter, limit, parts.names[0])
    _check(rule, chosen_by, judged=False)
    return Questions(rule, chosen_by, load_qa(parts.test, prompter, limit, parts.names[1]))


def _questions(benchmark: Benchmark | None) -> set[str]:
    """All that a benchmark of one's own asks."""
    sets = benchmark.sets.values() if benchmark else ()
    return {item.fields["question"] for part in sets for item in part.items if "question" in item.fields}


def _divide(recipe: Recipe, rows: Mapping[str, list[Row]]) -> Parts:
    """Rows to choose by and rows to score, by set. Raises UsageError where there are not enough."""
    assert recipe.evaluate is not None
    if "forget" not in rows:
        own = recipe.evaluate.benchmark
        short = [f"forget: no questions; give evaluate.forget{f', or select.score: {own}' if own != OWN else ''}"]
    else:
        share, limit = recipe.select.validation, recipe.evaluate.limit
        parts = divide_rows(rows, None if share == "auto" else share, recipe.seed, limit)
        short = [f"{name}: {len(rows[name])} rows" for name, left in parts.test.items() if not left]
        if not short:
            return parts
        short.append("select.validation auto divides no set of few rows")
    raise UsageError(
        join_faults("a choice (of alpha, beta, epochs, …) needs rows to choose by and others to score:", short)
    )
