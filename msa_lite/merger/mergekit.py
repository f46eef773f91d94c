"""Write merges in mergekit's format, so that mergekit-yaml runs them. `mergekit_reader` reads them back.

The facts about mergekit are those of version 0.1.5. A written recipe is one of:

- plain LoRA adapters, applied to the target: T + Σ w ((T + adapter) − T); no prior is opened;
- all else, with the prior: T + Σ w (M − T) over the tuned models (each with the weight of its term) and the prior
  (minus their sum). That is the formula, since the weights besides the target's add up to 0. mergekit takes
  configuration and tokenizer from `base_model`, so that is the target. With the prior in its place the sum is the same,
  but the prior's configuration and tokenizer come with it, and `tokenizer_source` would cut embeddings down to the
  tokenizer's size.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from msa_lite.errors import UsageError
from msa_lite.merger.formula import Term, named_strengths

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


def command_line(config: str, out: str, *, adapters: bool) -> str:
    """Return the mergekit-yaml command, quoted for a shell, that runs the recipe `config` into `out`.

    adapters: the recipe names adapters. mergekit merges these in fp32 and keeps them as whole models beside `out`.
    """
    words = ["mergekit-yaml", config, out]
    if adapters:
        words += ["--lora-merge-cache", f"{out.rstrip('/')}.lora-cache", "--lora-merge-dtype", "float32"]
    return shlex.join(words)


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


def _comments(terms: Sequence[Term[Reference]], adapters: bool, on_prior: bool) -> list[str]:
    named = named_strengths(terms)
    strengths = named.get("strengths", named)
    update = "".join(f" {'+' if t.weight > 0 else '-'} {abs(t.weight)} ({t.name}-tuned - prior)" for t in terms)
    lines = [
        f"{'A merge' if 'scale' in named else 'Model State Arithmetic'} as a mergekit recipe, written by msa-lite:",
        f"unlearned = target{update}; {', '.join(f'{name} {value}' for name, value in strengths.items())}",
        "Run with mergekit >= 0.1.5; CONFIG is this file, OUT a folder that is not there yet:",
        f"  {command_line('CONFIG', 'OUT', adapters=adapters)}",
    ]
    if adapters:
        lines += ["The cache gets a whole model for each adapter and goes by name: remove it when an adapter changed."]
    if on_prior:
        lines += ["The weights besides the target's add up to 0."]
    return [
        *lines,
        "Configuration and tokenizer come from base_model, so it is the target. mergekit writes config.json in its own",
        "version's form; copy the target's over it if older programs will read it.",
    ]
