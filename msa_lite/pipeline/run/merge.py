"""The merge of a run: the vectors of this request and of earlier ones, at the strengths that were given or chosen."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.evals.engine.models import load_model
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.merger import Merged, MergedAdapter, Precision, Term, hash_vector, merge_terms, merge_terms_to_adapter
from msa_lite.merger.checks.inputs import find_inputs
from msa_lite.pipeline.prepare.earlier import EarlierRun, earlier_terms
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.stages.costs import merge_costs
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.recipe import Recipe
from msa_lite.report.run.stages import Holds
from msa_lite.strengths import Strengths

_RESULTS = {
    "model": "the unlearned model",
    "adapter": "the result of the run. It is a switch: the target without it knows the data",
}
Terms = Sequence[Term[Path]]
"""The folders of vectors, with their weights."""


def merge_stage(context: Context, terms: Callable[[], Terms], needs: Sequence[str]) -> Stage:
    """Return the stage that writes the unlearned model. terms: returns the vectors with their weights, once chosen."""
    return Stage(
        "merge",
        "merge",
        context.scope.folder / context.recipe.merge.form,
        lambda progress: merge_vectors(context.run, terms(), progress),
        needs=needs,
        inputs=lambda: merge_inputs(context.run, terms()),
        cost=partial(merge_costs, context.recipe),
        says="the vectors are folded into the target, which gives the unlearned model",
        holds=Holds("nothing", _RESULTS[context.recipe.merge.form]),
    )


def run_terms(run: Run, strengths: Strengths) -> list[Term[Path]]:
    """Return the vectors of the run, and of the earlier ones, with their weights."""
    return point_terms(run.folder, run.recipe, run.earlier, strengths)


def point_terms(folder: Path, recipe: Recipe, earlier: Sequence[EarlierRun], strengths: Strengths) -> list[Term[Path]]:
    """Return the vectors in a run's folder, and those of earlier runs, with their weights at a point."""
    weights = recipe.weights(strengths)
    vectors = [Term(name, strengths.vector_folder(folder, name), weights[name]) for name in recipe.vector_names]
    return [*vectors, *earlier_terms(earlier)]


def merge_vectors(run: Run, terms: Terms, progress: Progress) -> Merged | MergedAdapter:
    """Write the unlearned model, or one adapter on the target where the recipe asks for that."""
    if run.recipe.merge.form == "adapter":
        target, folder = run.sources["target"], run.folder / "adapter"
        return merge_terms_to_adapter(
            target,
            folder,
            _open_terms(terms),
            run.sources["prior"],
            replace=True,
            compare=_own_folders(run, terms),
            progress=progress,
        )
    return _merge_model(run, run.folder / "model", terms, progress)


def merge_candidate(run: Run, terms: Terms) -> Any:
    """Return the merged model, loaded from a folder that is removed again.

    Processes that share the run's folder take turns.
    """
    from filelock import FileLock

    folder = run.folder / "candidate"
    with FileLock(run.folder / ".candidate.lock"):
        shutil.rmtree(folder, ignore_errors=True)  # what a kill may have left
        _merge_model(run, folder, terms, silent, compare=False)
        try:
            return load_model(folder)
        finally:
            shutil.rmtree(folder)


def merge_inputs(run: Run, terms: Terms) -> dict[str, Any]:
    """Return all that decides the unlearned model, as its manifest records it."""
    form = run.recipe.merge.form
    options = {"max_rank": None} if form == "adapter" else merge_precision(run).record
    sources, opened = run.sources, _open_terms(terms)
    return find_inputs(run.folder / form, form, sources["target"], opened, sources["prior"], options, True).record


def merge_identity(run: Run) -> dict[str, Any]:
    """Return all that decides a merge besides its vectors and their weights, for a manifest."""
    models = {name: run.sources[name].identity() for name in ("target", "prior")}
    settings = run.recipe.merge.model_dump(exclude={"form", "filter"})  # the form decides no weight
    identity = models | {"merge": settings, "seed": run.recipe.seed}
    earlier = sorted([hash_vector(term.vector), term.weight] for term in earlier_terms(run.earlier))
    return identity | ({"earlier": earlier} if earlier else {})


def merge_precision(run: Run) -> Precision:
    """Return the dtype and rounding of a run."""
    return recipe_precision(run.recipe)


def recipe_precision(recipe: Recipe) -> Precision:
    """Return the dtype and rounding that a recipe asks for."""
    return Precision(recipe.merge.dtype, recipe.merge.rounding, recipe.seed)


def _merge_model(run: Run, folder: Path, terms: Terms, progress: Progress, compare: bool = True) -> Merged:
    return merge_terms(
        run.sources["target"],
        folder,
        _open_terms(terms),
        run.sources["prior"],
        merge_precision(run),
        replace=True,
        compare=_own_folders(run, terms) if compare else False,
        progress=progress,
    )


def _own_folders(run: Run, terms: Terms) -> list[Path]:
    """Return the folders of the run's own vectors: what earlier requests have in common was told by their runs."""
    theirs = {term.vector for term in earlier_terms(run.earlier)}
    return [term.vector for term in terms if term.vector not in theirs]


def _open_terms(terms: Terms) -> list[Term[Source]]:
    """Return the terms with their vectors as sources; those of weight 0, which need not exist, are left out."""
    return [term.with_vector(fetch(str(term.vector))) for term in terms if term.weight]
