"""Load the data of a recipe and turn it into the questions to choose by and to score; say what they cannot show.

Rows are kept apart by their use: forget, retain and holdout rows, and learnt rows from scored ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msa_lite.catalogue import OWN, paper_scores
from msa_lite.choose.rules import LeastExtraction, PaperScore, Rule, check_rule, make_rule
from msa_lite.choose.validation import FEWEST, MOST_PASSAGES, PASSAGE, Parts, divide_rows
from msa_lite.data import DataSource, Prompter, Row, load_rows, pin_source, sample_rows
from msa_lite.errors import Faults, UsageError, join_faults
from msa_lite.evals.benchmarks.aggregates import resolve_compat
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, find_benchmark
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.scores.suite import load_benchmark
from msa_lite.evals.verdict.bounds import difference_of_shares
from msa_lite.pipeline.prepare.division import count_repeated, divide_retain, each_once
from msa_lite.recipe import SETS, Data, Recipe
from msa_lite.report.run.choice import WHOLE
from msa_lite.settings import Columns

logger = logging.getLogger(__name__)


WhenToChoose = bool | Literal["if possible"]


@dataclass(frozen=True)
class Questions:
    """The questions of a recipe, with the rule of its choice."""

    rule: Rule
    """The rule that ranks candidates."""
    validation: Benchmark | None = None
    """The rows to choose by; None where there is no choice to make."""
    test: Benchmark | None = None
    """The rows that models are scored on; None where nothing is scored."""
    judged: bool = False
    """True if a judge is asked about the validation rows."""
    undivided: Benchmark | None = None
    """The benchmark with all of its questions, where `test` leaves out those of the user's that a choice is made by."""

    @property
    def published(self) -> list[Benchmark]:
        """Return the parts that together hold all questions of a published benchmark; none without one."""
        return [benchmark for benchmark in self.everything if benchmark.name != OWN]

    @property
    def everything(self) -> list[Benchmark]:
        """Return the parts that together hold all questions to score. One may be in both, as rows of a small set."""
        benchmarks = [self.undivided] if self.undivided else [self.test, self.validation]
        return [benchmark for benchmark in benchmarks if benchmark is not None]


def load_questions(
    recipe: Recipe, rows: Mapping[str, list[Row]], choice: WhenToChoose, prompter: Prompter
) -> Questions:
    """Return the questions of a recipe, in two parts where there is a choice to make.

    rows: by their places in the recipe. If a benchmark's own metrics decide the choice, its questions are divided. By
    extraction, the user's questions about the forget and retain set decide, and the benchmark's scores leave these out.
    The user's holdout rows are in both parts, whole. Raise UsageError where a rule lacks a metric, or there are no rows
    to choose by.
    """
    settings = recipe.evaluate
    if settings is None:
        return Questions(find_rule(recipe, {}))
    rows = scored_rows(recipe, rows)
    rule = find_rule(recipe, rows)
    if choice is not False and rule.needs_ideal and not settings.ideal:
        raise UsageError(f"select: '{rule.name}' compares with the ideal model; give evaluate.ideal")
    if settings.benchmark == OWN:
        return _users_parts(recipe, rule, rows, choice, prompter)
    compat = resolve_compat(settings.compat, settings.benchmark)
    whole = BenchmarkSettings(settings.data, settings.split, settings.limit, recipe.seed, compat)
    benchmark = load_benchmark(settings.benchmark, prompter, whole)
    if isinstance(rule, LeastExtraction):
        users = _users_parts(recipe, rule, rows, choice, prompter)
        seen = questions_of(filter(None, [users.validation])) - questions_of(filter(None, [users.test]))
        test = benchmark.without(seen) if seen else benchmark
        return Questions(rule, users.validation, test, undivided=benchmark)
    if choice is False:
        return Questions(rule, None, benchmark)
    check_rule(rule, benchmark.metric_names(), f"benchmark {benchmark.name}")
    validation, test = benchmark.divide(recipe.validation, recipe.seed)
    if coarse := validation.resolution(rule.needs):
        logger.warning("%s; with so few rows, the choice may be by chance (select.validation)", coarse)
    judged = settings.judge.kind == "openai" and rule.judged  # a local judge would be loaded beside the target
    return Questions(rule, validation, test, judged)


def why_unjudged(recipe: Recipe) -> str:
    """Return why a choice has no judged terms, and what to set; empty if it has them."""
    if recipe.evaluate is None:
        return ""
    kind, reasons = recipe.evaluate.judge.kind, []
    if kind == "none":
        reasons.append("no judge is set. Set evaluate.judge, of kind openai")
    elif kind == "local":
        reasons.append(
            "a local judge is never asked during the choice, because it would need memory beside the target. Set "
            "evaluate.judge.kind openai; a server of your own will do (evaluate.judge.base_url)"
        )
    if not recipe.evaluate.ideal:
        reasons.append("there is no ideal, whose answers the judge compares with. Give evaluate.ideal")
    return "; and ".join(reasons)


def terms_left_out(recipe: Recipe) -> list[str]:
    """Say which terms of the paper's score a choice leaves out for want of a judge, and why; nothing if it has all."""
    score, why = recipe.select.score, why_unjudged(recipe)
    if score not in paper_scores() or not why:
        return []
    rule = PaperScore(score)
    return [rule.left_out(rule.judged_terms, why)] if rule.judged_terms else []


def find_rule(recipe: Recipe, rows: Mapping[str, list[Row]]) -> Rule:
    """Return the rule that ranks candidates. Without questions about the forget set, the benchmark may have a score."""
    settings, select = recipe.evaluate, recipe.select
    score = select.score
    if score is None and settings and "forget" not in rows:
        score = find_benchmark(settings.benchmark).default_score
    return make_rule(score, select.keep, recipe.margins)


def scored_rows(recipe: Recipe, rows: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Return the rows to score by set, a sample where the recipe limits them. A repeated row would count twice.

    Only the qa benchmark takes texts; the published ones have their own.
    """
    assert recipe.evaluate is not None
    sets, limit = {}, recipe.evaluate.limit
    for name, scored in scored_sets(rows).items():
        if recipe.evaluate.benchmark == OWN or not scored[0].text:
            distinct = each_once(scored)
            sets[name] = sample_rows(distinct, limit or len(distinct), recipe.seed)
    return sets


def _users_parts(
    recipe: Recipe, rule: Rule, rows: Mapping[str, list[Row]], choice: WhenToChoose, prompter: Prompter
) -> Questions:
    """Return both parts of the user's own questions or texts."""
    assert recipe.evaluate is not None
    limit = recipe.evaluate.max_new_tokens
    if choice == "if possible":
        least = 1 if recipe.select.validation == "auto" else 2
        choice = "forget" in rows and all(len(rows[name]) >= least for name in ("forget", "retain") if name in rows)
    if not choice:
        if not rows and recipe.evaluate.benchmark == OWN:
            logger.warning("nothing can be scored: there are no rows. Give evaluate.forget, or set evaluate: null")
        return Questions(rule, None, load_qa(rows, prompter, limit) if rows else None)
    parts = _parts(recipe, rows)
    if parts.names[1] == WHOLE and (count := len({row.thread for row in parts.test.get("retain", ())})):
        logger.warning("%d retain rows are too few to divide: choice and final scores are on the same rows", count)
    validation = load_qa(parts.validation, prompter, limit, parts.names[0])
    check_rule(rule, validation.metric_names(), f"benchmark {validation.name}")
    return Questions(rule, validation, load_qa(parts.test, prompter, limit, parts.names[1]))


def questions_of(benchmarks: Iterable[Benchmark]) -> set[str]:
    """Return the questions of benchmarks."""
    items = (item for benchmark in benchmarks for item_set in benchmark.sets.values() for item in item_set.items)
    return {item.fields["question"] for item in items if "question" in item.fields}


def _parts(recipe: Recipe, rows: Mapping[str, list[Row]]) -> Parts:
    """Return the rows to choose by and the rows to score, by set. Raise UsageError where there are not enough."""
    assert recipe.evaluate is not None
    if "forget" not in rows:
        name = recipe.evaluate.benchmark
        short = [f"forget: no questions; give evaluate.forget{f', or select.score: {name}' if name != OWN else ''}"]
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


def load_set(data: Data, columns: Columns) -> tuple[DataSource, list[Row]]:
    """Return a data set of a recipe, pinned, and its rows."""
    source = pin_source(data.source(columns))
    return source, load_rows(source)


def data_place(place: str) -> str:
    """Return the key of a recipe's data set by its place, for messages."""
    return place if "." in place else f"{place}.data"


def load_data(recipe: Recipe) -> tuple[dict[str, DataSource], dict[str, list[Row]]]:
    """Return every data set of a run's recipe, pinned, and its rows, by its place in the recipe ("evaluate.holdout").

    Raise all faults of all data sets in one error.
    """
    sets = recipe.data_sets
    faults, sources, rows = Faults(), {}, {}
    for place, data in sets.items():
        with faults.gathered(f"{data_place(place)}: "):
            sources[place], rows[place] = load_set(data, recipe.columns)
    faults.check()
    return sources, rows


_FEW = 12  # forget rows; with fewer, each of them is 8 points and more
_MOST = 10_000  # rows that anybody would be told to give


def limits_of_evidence(recipe: Recipe, rows: Mapping[str, list[Row]], fits_retain: bool = True) -> list[str]:
    """Return a sentence for each thing that the scores of a run cannot show, with what to give.

    rows: by their places in the recipe, after `separate_sets`. fits_retain: False if no retain vector is fitted.
    Published benchmarks have questions of their own; of a recipe with one, only repeated rows are told.
    """
    if recipe.evaluate is None:
        return []
    sets = scored_sets(rows)
    notes = count_repeated(sets)
    if recipe.evaluate.benchmark != OWN or "forget" not in sets:
        return notes
    if recipe.retain and fits_retain:
        learnt = divide_retain(recipe, rows)
        sets["retain"] = rows.get("evaluate.retain") or learnt.scored
        if recipe.betas is None or any([*recipe.betas, *recipe.filters, recipe.hold]):
            notes += _learnt_notes(learnt.sample, sets["retain"])
    sizes = {name: _count(recipe, scored) for name, scored in sets.items()}
    forget = sizes["forget"]
    control, size = "the ideal", forget
    if not recipe.evaluate.ideal:
        control, size = ("holdout", sizes["holdout"]) if "holdout" in sizes else ("the prior", forget)
    if forget < _FEW:
        notes.append(
            f"few forget rows ({forget}): each is {100 / forget:.0f} points of every share, so they can show "
            f"hardly anything; give {_FEW} or more"
        )
    if control == "the prior":
        notes.append(
            "no holdout rows and no ideal, so the prior on the forget rows is the control. It is weaker, because the "
            "prior may lack the form of the answers; give evaluate.holdout, similar rows that no model has learnt"
        )
    margin = recipe.margins.recited
    if (bound := least_bound(forget, size)) > margin:
        numbers = (n for n in range(1, _MOST) if least_bound(max(n, forget), max(n, size)) <= margin)
        enough = next(numbers, _MOST)
        notes.append(
            f"PASS cannot be reached with {forget} forget rows and {size} of the control ({control}): even if none is "
            f"recited, {100 * bound:.1f} points of difference are possible, and {100 * margin:g} are allowed; give "
            f"{enough} or more of each"
        )
    return notes


def scored_sets(rows: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Return the rows to score by set: those that `evaluate` names, else the training sets."""
    places = {name: f"evaluate.{name}" if f"evaluate.{name}" in rows else name for name in SETS}
    return {name: rows[place] for name, place in places.items() if place in rows}


def least_bound(forget: int, control: int) -> float:
    """Return the upper 95 % bound (Agresti and Caffo, 2000) of the difference of two shares that are both 0."""
    return difference_of_shares((0.0, forget), (0.0, control)).high


def _learnt_notes(learnt: Sequence[Row], scored: Sequence[Row]) -> list[str]:
    """Return a sentence if a fit or a filter used all or most of the retain rows that are scored."""
    threads = {row.thread for row in learnt}
    unlearnt = sum(row.thread not in threads for row in scored)
    advice = "give evaluate.retain, or more retain rows with retain.data.sample: match_forget"
    if not unlearnt:
        return [f"kept cannot be shown: a fit or a filter used every retain row that is scored; {advice}"]
    if unlearnt < len(scored) / 2:
        return [
            f"kept will look better than it is: a fit or a filter used {len(scored) - unlearnt} of the {len(scored)} "
            f"retain rows that are scored; {advice}"
        ]
    return []


def _count(recipe: Recipe, rows: Sequence[Row]) -> int:
    """Return the number of rows that are scored; of a few texts that a choice divides, the passages."""
    assert recipe.evaluate is not None, "the rows are scored"
    rows, limit = each_once(rows), recipe.evaluate.limit
    are_cut = recipe.has_choice and recipe.select.validation == "auto" and len(rows) < FEWEST
    if are_cut and all(row.text for row in rows):
        passages = sum(max(1, round(len(row.text.split()) / PASSAGE)) for row in rows)
        return min(passages, limit or MOST_PASSAGES)
    return min(len(rows), limit or len(rows))
