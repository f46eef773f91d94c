"""Fit the forget and retain vectors: by this process, or each by all processes of a launcher."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msa_lite.data import Row, pad_id
from msa_lite.errors import UsageError
from msa_lite.io.console.progress import Progress
from msa_lite.io.finished.manifest import is_finished
from msa_lite.io.launch.crew import Crew
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.merger import Precision, Term, merge_terms
from msa_lite.merger.checks.inputs import find_inputs
from msa_lite.pipeline.prepare.fits import fit_settings, fit_until
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.folder import TRACKING
from msa_lite.pipeline.stages.costs import start_costs, vector_costs
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.report.run.stages import CHANGE
from msa_lite.train import FitSettings, Tracking, VectorFit, run_fit
from msa_lite.train.held import HeldLoss

RETAIN_VECTOR = "retain vector"
START = "start of the forget vector"
FIT = "fit sharded"  # the order to fit a vector with all others
_SAYS = {
    "forget": "a copy of the prior is tuned on the rows to forget; the change of its weights is the vector",
    "retain": "a copy of the prior is tuned on rows to keep; the change of its weights is the vector",
}


def tracking_of(run: Run) -> Tracking:
    """Return the run's trackers."""
    return Tracking(run.recipe.trackers, run.folder / TRACKING, run.folder.resolve().name)


def row_hashes(rows: Sequence[Row]) -> dict[str, str]:
    """Return a file with the hashes of the rows that were learnt. The rows themselves are not written down again."""
    return {"rows.jsonl": "".join(json.dumps({"index": r.index, "sha256": r.sha256}) + "\n" for r in rows)}


def fit_stages(context: Context) -> list[Stage]:
    """Return the fits of a recipe's vectors in their order, and what they start from."""
    recipe, folder, stages = context.recipe, context.scope.folder / "vectors", list[Stage]()
    for name in recipe.vector_names:
        needs = []
        if name == "forget" and recipe.starts_at_retain:
            start = [] if recipe.vector.mode == "full" else [_start_stage(context)]  # there θ_2 is a vector itself
            stages, needs = [*stages, *start], [start[0].name if start else RETAIN_VECTOR]
        stages.append(
            Stage(
                f"{name} vector",
                "fit",
                folder / name,
                lambda progress, name=name: fit_one(context.run, name, progress),  # type: ignore[misc]
                needs=needs,
                inputs=lambda name=name: vector_inputs(context.run, name),  # type: ignore[misc]
                cost=partial(vector_costs, recipe, name),
                says=_SAYS[name],
                holds=CHANGE,
            )
        )
    return stages


def _start_stage(context: Context) -> Stage:
    """Return the stage that merges the retain vector into the prior."""
    folder = context.scope.folder / "vectors/start"

    def terms() -> list[Term[Source]]:
        return [Term("retain", fetch(str(context.run.vector_folder("retain"))), 1.0)]

    def make(progress: Progress) -> None:
        prior = context.run.sources["prior"]
        merge_terms(prior, folder, terms(), prior, Precision(), replace=True, compare=False, progress=progress)

    def inputs() -> dict[str, Any]:
        prior = context.run.sources["prior"]
        return find_inputs(folder, "model", prior, terms(), prior, Precision().record, True).record

    says = "the retain vector is merged into the prior, which is tuned next"
    return Stage(START, "make", folder, make, [RETAIN_VECTOR], inputs, start_costs, says=says, holds=CHANGE)


def fit_one(run: Run, name: str, progress: Progress) -> None:
    """Fit a vector ("forget", "retain") into the run's folder, unless it is there already.

    All processes of a crew fit a vector of all weights together; the first one fits an adapter.
    """
    if run.crew.is_alone or run.recipe.vector.mode != "full":
        run_fit(vector_fit(run, name), run.vector_folder(name), progress)
    elif not is_finished(run.vector_folder(name), vector_inputs(run, name)):
        with run.crew.helped(FIT, {"name": name}):
            fit_with_all(run, name, progress)


def check_processes(run: Run) -> None:
    """Raise UsageError, before any work, if the processes of the crew cannot fit a vector of all weights together."""
    if run.recipe.vector.mode == "full":
        for name in run.recipe.vector_names:
            check_shares(run.crew, fit_settings(run, name))


def check_shares(crew: Crew, settings: FitSettings) -> None:
    """Raise UsageError if the processes of a crew share a GPU, or cannot make a fit with these settings together."""
    from msa_lite.train.sharded import check_sharded

    if crew.is_alone:
        return
    if not crew.own_gpus:
        raise UsageError(f"{crew.ranks.count} processes are more than there are GPUs; start one for each GPU")
    check_sharded(settings, crew.ranks.count)


def fit_with_all(run: Run, name: str, progress: Progress) -> None:
    """Fit a vector of all weights by all processes of the crew; each of them has to call it."""
    from msa_lite.train.sharded import fit_sharded

    with run.crew.group():
        fit_sharded(vector_fit(run, name), run.vector_folder(name), progress)


def vector_fit(run: Run, name: str) -> VectorFit:
    """Return the fit of a vector."""
    return VectorFit(
        vector_start(run, name),
        run.examples[name],
        run.prompter.tokenizer,
        fit_settings(run, name),
        objective=_hold(run) if name == "forget" else None,
        until=fit_until(run, name),
        label=f"{name} vector",
        extra_files=row_hashes(run.rows[name]),
        tracking=tracking_of(run),
    )


def vector_start(run: Run, name: str) -> Source:
    """Return the model that a vector is fitted from, and differs from."""
    prior = run.sources["prior"]
    if name != "forget" or not run.recipe.starts_at_retain:
        return prior
    start = "retain" if run.recipe.vector.mode == "full" else "start"
    return replace(fetch(str(run.vector_folder(start))), added=prior.added)


def _hold(run: Run) -> HeldLoss | None:
    """Return what the forget vector's fit minimises, where the recipe holds it."""
    recipe = run.recipe
    if not recipe.hold:
        return None
    return HeldLoss(
        run.examples["forget"],
        run.examples["retain"],
        recipe.hold,
        pad=pad_id(run.prompter.tokenizer),
        seed=recipe.seed,
        full=recipe.vector.mode == "full",
    )


def vector_inputs(run: Run, name: str) -> dict[str, Any]:
    """Return all that decides a vector, as its manifest records it."""
    return vector_fit(run, name).inputs()
