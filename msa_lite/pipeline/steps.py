"""The steps of a job, announced at its start so that a user sees which of how many it is at.

Steps of one kind take about as long for each unit of their amount: rows that are tuned on, questions that are scored.
"""

from __future__ import annotations

from collections.abc import Iterable

from msa_lite.evals.benchmark import Benchmark
from msa_lite.io.progress import Step
from msa_lite.job import Job

_SEARCHED = 10  # points that are scored where the recipe lists none


def run_steps(job: Job) -> list[Step]:
    """The steps of a run of MSA."""
    return [*fit_steps(job, job.vector_names), *sweep_steps(job), *score_steps(job)]


def fit_steps(job: Job, names: Iterable[str]) -> list[Step]:
    """The fits of vectors."""
    return [Step(f"{name} vector", "fit", len(job.examples[name])) for name in names]


def sweep_steps(job: Job, what: str = "alpha and beta", candidates: int | None = None) -> list[Step]:
    """The choice, if there is one to make, and the merge; candidates: how many there are to choose from."""
    merge = Step("merge", "merge")
    if job.validation is None:
        return [merge]
    items = _items(job.validation)
    count = candidates or len(job.recipe.points) or _SEARCHED
    ideal = [Step("validation: ideal", "score", items)] if "ideal" in job.sources else []
    choice = Step(f"choosing {what}", "choose", count + 1)
    return [*ideal, choice, merge, Step("validation: unlearned", "score", items)]


def score_steps(job: Job) -> list[Step]:
    """The final scores."""
    if job.test is None:
        return []
    names = [name for name in ("ideal", "target") if name in job.sources] + ["unlearned"]
    return [Step(f"scores: {name}", "score", _items(job.test)) for name in names]


def _items(benchmark: Benchmark) -> int:
    return sum(len(part.items) for part in benchmark.sets.values())
