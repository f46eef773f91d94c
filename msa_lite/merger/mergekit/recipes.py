"""Write merges in mergekit's format, so that mergekit-yaml runs them. reader.py reads them back."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from msa_lite.errors import UsageError
from msa_lite.io.files.reading import local_path
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.hub import Source, commit_of, is_remote, split_name
from msa_lite.io.weights.tied_head import ties_head, token_names
from msa_lite.merger.checks.checked import CheckedMerge, Precision, msa_terms
from msa_lite.merger.checks.inputs import by_name, peek
from msa_lite.merger.formula import OneOrSeveral, Term, named_strengths, number_terms

STORED = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Reference:
    """A checkpoint or adapter as mergekit names it."""

    path: str
    """A folder or Hub repository."""
    revision: str | None = None
    """A revision of the repository."""

    def __str__(self) -> str:
        return f"{self.path}@{self.revision}" if self.revision else self.path


@dataclass(frozen=True)
class MergeRequest:
    """A merge by names: target + Σ weight (tuned − prior)."""

    target: Reference
    """The target, which also gives configuration and tokenizer."""
    terms: Sequence[Term[Reference]]
    """The tuned models or adapters."""
    prior: Reference | None
    """The prior; None where plain adapters need none."""
    dtype: str = "same"
    """The dtype of the output: "same" (as the target is stored), "bfloat16", "float16" or "float32"."""


@dataclass(frozen=True)
class ListedModel:
    """A model of a recipe."""

    checkpoint: Reference
    """The checkpoint."""
    adapter: Reference | None = None
    """An adapter on it. In a sum, a model with an adapter stands for the adapter's delta alone."""

    def __str__(self) -> str:
        return f"{self.checkpoint}+{self.adapter}" if self.adapter else str(self.checkpoint)

    def as_yaml(self) -> str | dict[str, dict[str, str]]:
        """Return the short form, unless mergekit would split a name at an @ or + of its own."""
        parts = {"model": self.checkpoint} | ({"lora": self.adapter} if self.adapter else {})
        if not any(mark in f"{r.path}{r.revision}" for r in parts.values() for mark in "@+"):
            return str(self)
        return {name: {"path": r.path} | ({"revision": r.revision} if r.revision else {}) for name, r in parts.items()}


def write_recipe(request: MergeRequest, *, stored: str, adapters: Collection[str], needs_prior: bool) -> str:
    """Return a merge as YAML for mergekit >= 0.1.5, with the command that runs it in comments.

    stored: the dtype of the target's weights, for "same". adapters: the names of the terms whose vectors are adapters.
    needs_prior: an adapter holds more than plain LoRA factors (whole modules, embeddings, biases, DoRA), so its delta
    is only right on the prior. Terms of weight 0 are left out.

    Raise UsageError for a dtype that mergekit cannot store, a missing prior, and a model in two roles, which mergekit
    refuses.
    """
    dtype = stored if request.dtype == "same" else request.dtype
    if dtype not in STORED:
        raise UsageError(f"a mergekit recipe stores {', '.join(STORED)}; got {dtype}")
    terms = [term for term in request.terms if term.weight]
    on_prior = bool(terms) and (needs_prior or not all(term.name in adapters for term in terms))
    if on_prior and request.prior is None:
        raise UsageError("prior: missing; full checkpoints, and adapters that are more than plain LoRA, need it")

    place = request.prior if on_prior and request.prior else request.target  # where adapters go
    models = {"target": (ListedModel(request.target), 1.0)} if on_prior or not terms else {}
    for term in terms:
        model = ListedModel(place, term.vector) if term.name in adapters else ListedModel(term.vector)
        models[term.name] = (model, term.weight)
    if place != request.target:  # stays at weight 0: mergekit does not need it then, but it says what the prior is
        models["prior"] = (ListedModel(place), 0.0 - sum(term.weight for term in terms))
    if len({model for model, _ in models.values()}) < len(models):  # mergekit: "Duplicate merge inputs"
        listing = ", ".join(f"{role} {model}" for role, (model, _) in models.items())
        raise UsageError(
            f"mergekit refuses a recipe that names a model twice: {listing}; leave one out (of forget and retain, keep "
            "one at the difference of alpha and beta)"
        )
    document: dict[str, Any] = {
        "merge_method": "task_arithmetic" if terms else "linear",
        "base_model": ListedModel(request.target).as_yaml(),
        "models": [{"model": m.as_yaml(), "parameters": {"weight": float(w)}} for m, w in models.values()],
        "parameters": {"normalize": False} | ({"lambda": 1.0} if terms else {}),
        "dtype": "float32",
        "out_dtype": dtype,
    }
    comments = _comments(terms, any(model.adapter for model, _ in models.values()), on_prior)
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, allow_unicode=True, width=math.inf)
    return "".join(f"# {line}\n" for line in comments) + text


def _filtered(term: Term[Reference]) -> str:
    """Return what to add to a term's formula where its vector was filtered, as the manifest beside it tells."""
    made_by = (load_manifest(Path(str(term.vector))) or {}).get("filter")
    return f" F, filtered by lambda {made_by['strength']:g}" if made_by else ""


def _comments(terms: Sequence[Term[Reference]], adapters: bool, on_prior: bool) -> list[str]:
    named = named_strengths(terms)
    strengths = named.get("strengths", named)
    update = "".join(
        f" {'+' if t.weight > 0 else '-'} {abs(t.weight)} ({t.name}-tuned - prior){_filtered(t)}" for t in terms
    )
    lines = [
        "A merge as a mergekit recipe, written by msa-lite:",
        f"unlearned = target{update}; {', '.join(f'{name} {value}' for name, value in strengths.items())}",
        "Run with mergekit >= 0.1.5; CONFIG is this file, OUT a folder that is not there yet:",
        "  mergekit-yaml CONFIG OUT" + " --lora-merge-cache OUT.lora-cache --lora-merge-dtype float32" * adapters,
    ]
    if adapters:
        # mergekit merges adapters in fp32 and keeps them as whole models beside OUT.
        lines += ["The cache gets a whole model for each adapter and goes by name: remove it when an adapter changed."]
    if on_prior:
        lines += ["The weights besides the target's add up to 0."]
    return [
        *lines,
        "Configuration and tokenizer come from base_model, so it is the target. mergekit writes config.json in its own",
        "version's form; copy the target's over it if older programs will read it.",
    ]


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
    """Return the mergekit recipe of a merge, with its command in comments; arguments as for `merge`.

    Headers and adapters are read to find the right form. Raise UsageError where mergekit has no form for the merge, and
    as `merge` does for inputs that do not fit.
    """
    requested: list[Term[str]] = msa_terms(forget, alpha, retain, beta, Precision(dtype))
    terms = number_terms([term for term in requested if term.weight])
    prior = prior if terms else None
    checked = peek(target, terms, prior, Precision(dtype))
    if checked is None:
        raise UsageError("the Hub gives no headers of these models; fetch them and name their folders")
    references = {name: _reference(str(value)) for name, value in by_name(target, terms, prior).items()}
    return _recipe_text(checked, references, dtype)


def recipe_beside(checked: CheckedMerge, sources: Mapping[str, Source]) -> str:
    """Return the recipe for a merged model's folder; where mergekit has no form for the merge, a comment says why."""
    references = {
        name: Reference(str(source.folder.resolve()))
        if source.is_folder
        else Reference(source.name.partition("@")[0], source.revision)
        for name, source in sources.items()
    }
    try:
        return _recipe_text(checked, references, checked.precision.dtype)
    except UsageError as error:
        return "".join(f"# {line}\n" for line in f"mergekit cannot do this merge: {error}".splitlines())


def _reference(name: str) -> Reference:
    """Return a folder by its full path, a repository with the commit that its revision is now."""
    if not is_remote(name):
        return Reference(str(local_path(name).resolve()))
    repo, revision = split_name(name)
    return Reference(repo, commit_of(name) or revision)


def _recipe_text(checked: CheckedMerge, references: Mapping[str, Reference], dtype: str) -> str:
    if checked.forms:
        name, form = next(iter(checked.forms.items()))
        raise UsageError(f"the {name} is stored in {form}, whose codes mergekit would take for weights")
    if checked.is_untied:
        raise UsageError("the head of the result is a matrix of its own, the target's is not")
    if not all(vector.stores_alike for vector in checked.vectors):
        raise UsageError(
            "of embedding and head, its models store one or both, and mergekit may leave one out; save all models alike"
        )
    names = token_names(checked.target) if ties_head(checked.target) else None
    if names and any(vector.is_adapter and names[0] in vector.deltas for vector in checked.vectors):
        raise UsageError(
            "an adapter changes the matrix of embedding and head, and PEFT, by which mergekit merges it, "
            "would add that change twice, or to one of the two"
        )
    if any(vector.is_cut for vector in checked.vectors):
        raise UsageError("target and vectors have embeddings of different numbers of tokens, which mergekit refuses")
    terms = tuple(term.with_vector(references[term.name]) for term in checked.terms)
    notes = []
    if checked.is_apart:
        notes.append("Set tie_word_embeddings to false in the result's config.json: its head is a matrix of its own.")
    if dtype == "same" and len({entry.dtype for entry in checked.target.tensors.values() if entry.is_float}) > 1:
        notes.append(f"The target has weights in several dtypes; mergekit writes all in {checked.target.dtype_name}.")
    if checked.precision.is_stochastic:
        notes.append(f"Rounded stochastically, seed {checked.precision.seed}; mergekit rounds to nearest.")
    return "".join(f"# {note}\n" for note in notes) + write_recipe(
        MergeRequest(references["target"], terms, references.get("prior"), dtype),
        stored=checked.target.dtype_name,
        adapters={term.name for term in checked.terms if term.vector.is_adapter},
        needs_prior=any(vector.is_adapter and vector.needs_prior for vector in checked.vectors),
    )
