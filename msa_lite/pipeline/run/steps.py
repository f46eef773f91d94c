"""List the steps of a run. They are announced at its start, so that a user sees "step 3 of 8".

Steps of one kind take about the same time for each unit of their amount: a row to tune on, a question to score.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from msa_lite.evals.benchmark import Benchmark
from msa_lite.evals.qa import Qa
from msa_lite.evals.records import row_key
from msa_lite.io.console.progress import Step
from msa_lite.pipeline.prepare.run import Run
from msa_lite.pipeline.run.knowledge import check_parts
from msa_lite.pipeline.run.scores import chooses_by_rows
from msa_lite.pipeline.run.vectors import TOGETHER, are_fitted_together

_SEARCHED = 10  # points to score if the recipe lists none


def run_steps(run: Run) -> list[Step]:
    """Return the steps of a run of MSA."""
    return _with_rows_left(run, [*_up_to_merge(run), *score_steps(run), *prior_steps(run)])


def merged_steps(run: Run) -> list[Step]:
    """Return the steps up to a merged model: checks, fits, choice, merge. A model scored by two of them counts once."""
    return _with_rows_left(run, _up_to_merge(run))


def _up_to_merge(run: Run) -> list[Step]:
    steps = [*check_steps(run), *fit_steps(run, run.vector_names), *sweep_steps(run)]
    return list({step.label: step for step in steps}.values())


def _with_rows_left(run: Run, steps: Iterable[Step]) -> list[Step]:
    """Return the steps without rows that an earlier step asks the same model; a step without any others is left out."""
    checks = {part.label: part for part in check_parts(run)} if run.plan.start == "prior" else {}
    asked: dict[str, set[str]] = {}
    left = []
    for step in steps:
        part, _, name = step.label.partition(": ")
        benchmark = {"validation": run.validation, "scores": run.test, "test": run.test}.get(part)
        if step.label in checks:
            name, benchmark = checks[step.label].model, checks[step.label].questions
        if benchmark is None or not benchmark.by_row:
            left.append(step)
            continue
        rows = {
            f"{set_name} {row_key(benchmark, item.fields)}"
            for set_name, items in benchmark.sets.items()
            for item in items.items
            if name != "prior" or set_name == "forget"
        }
        if new := rows - asked.setdefault(name, set()):
            left.append(replace(step, amount=len(new)))
        asked[name] |= rows
    return left


def check_steps(run: Run) -> list[Step]:
    """Return the steps that score target and prior before anything is fitted: the check, and the validation rows."""
    if run.plan.start != "prior":
        return []
    steps = [Step(part.label, "score", part.count) for part in check_parts(run)]
    if chooses_by_rows(run):
        names = [name for name in ("ideal", "prior", "target") if name in run.sources]
        steps += [Step(f"validation: {name}", "score", _items(run.validation, name)) for name in names]
    return steps


def prior_steps(run: Run) -> list[Step]:
    """Return the step that scores the prior for the verdict; none with an ideal, which never saw the rows either."""
    if not (isinstance(run.test, Qa) and "forget" in run.test.sets and run.plan.start == "prior"):
        return []
    return [] if "ideal" in run.sources else [Step("test: prior", "score", _items(run.test, "prior"))]


def fit_steps(run: Run, names: Iterable[str]) -> list[Step]:
    """Return the fits of vectors; two that are fitted side by side are one step."""
    names = list(names)
    if are_fitted_together(run, names):
        return [Step(TOGETHER, "fit", max(len(run.examples[name]) for name in names))]
    return [Step(f"{name} vector", "fit", len(run.examples[name])) for name in names]


def sweep_steps(run: Run, what: str = "alpha and beta", candidates: int | None = None) -> list[Step]:
    """Return the choice, if there is one to make, and the merge; candidates: their number, if it is known."""
    merge = Step("merge", "merge")
    if run.validation is None:
        return [merge]
    items = _items(run.validation, "ideal")
    count = candidates or len(run.recipe.points) or _SEARCHED
    ideal = [Step("validation: ideal", "score", items)] if "ideal" in run.sources else []
    choice = Step(f"choosing {what}", "choose", count + 1)
    return [*ideal, choice, merge, Step("validation: unlearned", "score", items)]


def score_steps(run: Run) -> list[Step]:
    """Return the final scores."""
    if run.test is None:
        return []
    names = [name for name in ("ideal", "target") if name in run.sources] + ["unlearned"]
    return [Step(f"scores: {name}", "score", _items(run.test, name)) for name in names]


def _items(benchmark: Benchmark | None, model: str) -> int:
    """Return the number of questions that a model is scored on; for the prior, of the forget rows alone."""
    sets = benchmark.sets if benchmark else {}
    return sum(len(part.items) for name, part in sets.items() if model != "prior" or name == "forget")
