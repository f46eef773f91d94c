"""Translate a merge into a recipe that mergekit runs: to print, and to put beside the merged weights."""

from __future__ import annotations

from collections.abc import Mapping

from msa_lite.errors import UsageError
from msa_lite.io.hub import Source, commit_of, is_remote, split_name
from msa_lite.io.reading import local_path
from msa_lite.merger.formula import OneOrSeveral, Term, number_terms
from msa_lite.merger.inputs import named_parts, peek
from msa_lite.merger.mergekit import MergeRequest, Reference, write_recipe
from msa_lite.merger.plan import MergePlan, msa_terms


def mergekit_recipe(
    target: str,
    *,
    forget: OneOrSeveral[str] | None = None,
    alpha: OneOrSeveral[float] = 1.0,
    retain: OneOrSeveral[str] | None = None,
    beta: OneOrSeveral[float] | None = None,
    prior: str | None = None,
    dtype: str = "same",
) -> str:
    """Return YAML with which mergekit does the merge of these arguments (as for `merge`), its command in comments.

    Headers and adapters are read to find the right form. Raise UsageError where mergekit has no form for the merge, and
    as `merge` does for inputs that do not fit.
    """
    requested: list[Term[str]] = msa_terms(forget, alpha, retain, beta, dtype)
    terms = number_terms([term for term in requested if term.weight])
    prior = prior if terms else None
    plan = peek(target, terms, prior)
    if plan is None:
        raise UsageError("the Hub gives no headers of these models; fetch them and name their folders")
    references = {name: _reference(str(value)) for name, value in named_parts(target, terms, prior).items()}
    return _recipe_text(plan, references, dtype)


def recipe_beside(plan: MergePlan, sources: Mapping[str, Source]) -> str:
    """Return the recipe for a merged model's folder; where mergekit has no form for the merge, a comment says why."""
    references = {
        name: Reference(str(source.folder.resolve()))
        if source.is_folder
        else Reference(source.name.partition("@")[0], source.revision)
        for name, source in sources.items()
    }
    try:
        return _recipe_text(plan, references, plan.precision.dtype_name)
    except UsageError as error:
        return "".join(f"# {line}\n" for line in f"mergekit cannot do this merge: {error}".splitlines())


def _reference(name: str) -> Reference:
    """Return a folder by its full path, a repository with the commit that its revision is now."""
    if not is_remote(name):
        return Reference(str(local_path(name).resolve()))
    repo, revision = split_name(name)
    return Reference(repo, commit_of(name) or revision)


def _recipe_text(plan: MergePlan, references: Mapping[str, Reference], dtype: str) -> str:
    if any(vector.is_cut for vector in plan.vectors):
        raise UsageError("target and vectors have embeddings of different numbers of tokens, which mergekit refuses")
    terms = tuple(term.with_vector(references[term.name]) for term in plan.terms)
    notes = []
    if dtype == "same" and len({entry.dtype for entry in plan.target.tensors.values() if entry.is_float}) > 1:
        notes.append(f"The target has weights in several dtypes; mergekit writes all in {plan.target.dtype_name}.")
    if plan.precision.stochastic:
        notes.append(f"Rounded stochastically, seed {plan.precision.seed}; mergekit rounds to nearest.")
    return "".join(f"# {note}\n" for note in notes) + write_recipe(
        MergeRequest(references["target"], terms, references.get("prior"), dtype),
        stored=plan.target.dtype_name,
        adapters={term.name for term in plan.terms if term.vector.is_adapter},
        needs_prior=any(vector.is_adapter and vector.needs_prior for vector in plan.vectors),
    )
