"""A merge as a recipe that mergekit runs: to print, and to put beside the merged weights."""

from __future__ import annotations

from collections.abc import Mapping

from msa_lite.errors import UsageError
from msa_lite.io.hub import Source, commit_of, is_remote, split_name
from msa_lite.io.reading import local_path
from msa_lite.merger.inputs import peek
from msa_lite.merger.mergekit import MergeRequest, Reference, write_recipe
from msa_lite.merger.plan import DTYPES, MergePlan, check_arguments


def mergekit_recipe(
    target: str,
    *,
    forget: str | None = None,
    alpha: float = 1.0,
    retain: str | None = None,
    beta: float | None = None,
    prior: str | None = None,
    dtype: str = "same",
) -> str:
    """The merge of these arguments (as for `merge`) as YAML for mergekit, its command line in comments.

    Headers and adapters are read to find the right form. Raises UsageError where mergekit has no form for it, and for
    inputs that do not fit what `merge` raises.
    """
    check_arguments({"forget": (forget, alpha), "retain": (retain, beta)}, dtype, "nearest")
    wanted: dict[str, str | Source] = {"target": target}
    wanted |= {n: v for n, v, s in (("forget", forget, alpha), ("retain", retain, beta)) if v is not None and s}
    if prior is not None and len(wanted) > 1:
        wanted["prior"] = prior
    plan = peek(wanted, alpha, beta or 0.0)
    if plan is None:
        raise UsageError("the Hub gives no headers of these models; fetch them and name their folders")
    return _write(plan, {name: _named(str(value)) for name, value in wanted.items()}, dtype)


def recipe_beside(plan: MergePlan, sources: Mapping[str, Source]) -> str:
    """The recipe that a merged model's folder holds; a comment with the reason where mergekit has no form for it."""
    references = {
        name: Reference(str(source.folder.resolve()))
        if source.is_folder
        else Reference(source.name.partition("@")[0], source.revision)
        for name, source in sources.items()
    }
    try:
        return _write(plan, references, next(name for name, kind in DTYPES.items() if kind == plan.precision.dtype))
    except UsageError as error:
        return "".join(f"# {line}\n" for line in f"mergekit cannot do this merge: {error}".splitlines())


def _named(name: str) -> Reference:
    """A folder by its full path, a repository with the commit that its revision is now."""
    if not is_remote(name):
        return Reference(str(local_path(name).resolve()))
    repo, revision = split_name(name)
    return Reference(repo, commit_of(name) or revision)


def _write(plan: MergePlan, references: Mapping[str, Reference], dtype: str) -> str:
    if any(vector.is_cut for vector in (plan.forget, plan.retain) if vector):
        raise UsageError("target and vectors have embeddings of different numbers of tokens, which mergekit refuses")
    request = MergeRequest(
        references["target"],
        references.get("forget"),
        plan.alpha if plan.forget else 0.0,
        references.get("retain"),
        plan.beta if plan.retain else 0.0,
        references.get("prior"),
        dtype,
    )
    vectors = [vector for vector in (plan.forget, plan.retain) if vector]
    notes = []
    if dtype == "same" and len({entry.dtype for entry in plan.target.tensors.values() if entry.is_float}) > 1:
        notes.append(f"The target has weights in several dtypes; mergekit writes all in {plan.target.dtype_name}.")
    if plan.precision.stochastic:
        notes.append(f"Rounded stochastically, seed {plan.precision.seed}; mergekit rounds to nearest.")
    return "".join(f"# {note}\n" for note in notes) + write_recipe(
        request,
        stored=plan.target.dtype_name,
        forget_is_adapter=bool(plan.forget and plan.forget.is_adapter),
        retain_is_adapter=bool(plan.retain and plan.retain.is_adapter),
        needs_prior=any(vector.is_adapter and vector.needs_prior for vector in vectors),
    )
