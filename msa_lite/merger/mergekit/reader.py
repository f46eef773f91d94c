"""Read mergekit recipes that are MSA: task_arithmetic or linear over whole models with plain weights.

A recipe is expanded to a linear combination of checkpoints and adapter deltas, then its models are named. msa-lite
always computes in fp32 or better and rounds once, so `dtype` only says how the result is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, PlainValidator, ValidationError

from msa_lite.errors import UsageError, join_faults, nearest
from msa_lite.io.console.libraries import has, requirement
from msa_lite.io.files.reading import read_yaml
from msa_lite.merger.formula import Term, number_terms
from msa_lite.merger.mergekit.recipes import ListedModel, MergeRequest, Reference

_MOST = 64  # models that are listed; one request has four, others two more each, and some may be listed at weight 0
_HINTED = 16  # faults for which the nearest key is looked up: the search takes time, and no more are shown
_TOLERANCE = 1e-9  # of coefficients: sums of weights that cancel on paper
_Sum = dict[ListedModel, float]


def _parse_reference(value: Any) -> Reference:
    """Return `path`, `path@revision` or {path: …, revision: …} as a reference."""
    if isinstance(value, str):
        path, *revisions = value.split("@")
        if path and len(revisions) <= 1 and all(revisions):
            return Reference(path, *revisions)
    elif isinstance(value, dict) and value.keys() <= {"path", "revision"}:
        name, version = value.get("path"), value.get("revision")
        if isinstance(name, str) and name and (version is None or (isinstance(version, str) and version)):
            return Reference(name, version)
    raise ValueError("not `path`, `path@revision` or {path: …, revision: …}")


def _parse_model(value: Any) -> ListedModel:
    """Return `model`, `model+lora` or {model: …, lora: …} as a model."""
    if isinstance(value, dict):
        if unknown := [str(key) for key in value if key not in ("model", "lora")]:
            raise ValueError(f"not handled: {', '.join(unknown)}")
        first, adapters = value.get("model"), [value["lora"]] if value.get("lora") is not None else []
    else:
        first, *adapters = value.split("+") if isinstance(value, str) else [value]
    if len(adapters) > 1:
        raise ValueError("more than one +; write a name that holds it as a mapping")
    return ListedModel(_parse_reference(first), *map(_parse_reference, adapters))


# pydantic reads numbers in texts, too, as which YAML 1.1 gives 1e-5; but true is no number.
_Number = Annotated[FiniteFloat, BeforeValidator(lambda value: str(value) if isinstance(value, bool) else value)]
_Dtype = Literal["bfloat16", "float16", "float32"]
_Model = Annotated[ListedModel, PlainValidator(_parse_model)]
_Filled = BeforeValidator(lambda value: {} if value is None else value)


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Weight(_Closed):
    """The parameters of a model."""

    weight: _Number | None = None


class _Scale(_Closed):
    """The parameters of a recipe."""

    normalize: Annotated[bool | None, Field(strict=True)] = None
    factor: _Number = Field(1.0, alias="lambda")
    int8_mask: bool = False  # of the signs of a consensus, which MSA has none of


class _Entry(_Closed):
    """A model with its weight."""

    model: _Model
    parameters: Annotated[_Weight, _Filled] = _Weight()


class _MergekitRecipe(_Closed):
    """The keys that msa-lite handles; mergekit itself passes over unknown ones."""

    merge_method: Literal["task_arithmetic", "linear"]
    base_model: _Model | None = None
    dtype: _Dtype | None = None
    out_dtype: _Dtype | None = None
    models: list[_Entry] = Field(min_length=1, max_length=_MOST)
    parameters: Annotated[_Scale, _Filled] = _Scale.model_validate({})
    tokenizer_source: _Model | None = None
    name: Any = None
    msa: Any = None

    @property
    def moves_base(self) -> bool:
        """Check whether the method is task_arithmetic, which moves its base."""
        return self.merge_method == "task_arithmetic"

    @property
    def keeper(self) -> Reference | None:
        """Return the model that gives the tokenizer, if the recipe names one."""
        is_base = self.tokenizer_source == ListedModel(Reference("base"))
        source = self.base_model if is_base else self.tokenizer_source
        return source.checkpoint if source else None

    @property
    def weights(self) -> _Sum:
        """Return the weights as they are listed; that of task_arithmetic's base means nothing, and may be left out."""
        return {entry.model: entry.parameters.weight or 0.0 for entry in self.models}

    @property
    def scaled(self) -> _Sum:
        """Return the weights times lambda; those of `linear`, unless normalize is false, over their sum."""
        divides = not self.moves_base and self.parameters.normalize is not False
        scale = self.parameters.factor / (sum(self.weights.values()) if divides else 1.0)
        return {model: scale * weight for model, weight in self.weights.items()}

    def faults(self) -> Iterator[str]:
        """Yield the faults of keys that do not fit each other."""
        base, normalize = self.base_model, self.parameters.normalize
        if self.moves_base and base is None:
            yield "base_model: missing, and task_arithmetic needs it"
        if base and (base.adapter or not (self.moves_base or base in self.weights)):
            yield "base_model: must have no adapter, and for linear be listed under models with a weight"
        for number, entry in enumerate(self.models):
            if entry.model in [entry.model for entry in self.models[:number]]:
                yield f"models.{number}.model: {entry.model} is listed twice, which mergekit refuses"
            if entry.parameters.weight is None and not (self.moves_base and entry.model == base):
                yield f"models.{number}.parameters.weight: missing"
        if self.moves_base and normalize:
            flips = "it divides by the sum of the weights, and so turns the sign of a forget vector round"
            yield f"parameters.normalize: must be false: {flips}"
        if not self.moves_base and "factor" in self.parameters.model_fields_set:
            yield "parameters.lambda: not handled"
        if not self.moves_base and normalize is not False and abs(sum(self.weights.values())) <= _TOLERANCE:
            yield "parameters.normalize: the weights add up to 0 and cannot be divided by that"


_KNOWN_KEYS = [
    field.alias or name
    for schema in (_MergekitRecipe, _Entry, _Weight, _Scale)
    for name, field in schema.model_fields.items()
]


def read_recipe(path: Path) -> MergeRequest:
    """Return the merge in a mergekit recipe.

    Several choices of the prior may compute the same. Then a base that is not the target is the prior, otherwise the
    last model listed that fits. An `msa` block is ignored. Raise UsageError with the faults, each with its key: unknown
    keys, and everything that only mergekit-yaml can do.
    """
    document = read_yaml(path, UsageError)
    if not isinstance(document, dict):
        raise UsageError(f"{path}: a mergekit recipe is a mapping of keys; got {type(document).__name__}")
    try:
        return _request(_MergekitRecipe.model_validate(document))
    except ValidationError as error:
        faults = _explain(error)
    except _NotMsaError as error:
        faults = list(error.args)
    missing = "" if has("mergekit") else f", which is not installed: pip install {requirement('mergekit')}"
    headline = f"{path}: not a merge that msa-lite can do. Mend it, or add --with mergekit{missing}:"
    raise UsageError(join_faults(headline, faults))


def _explain(error: ValidationError) -> list[str]:
    """Return the faults of single keys."""
    lines: list[str] = []
    for fault in error.errors():
        text = fault["msg"].removeprefix("Value error, ").replace("Input should", "must")
        text = f"{text}; got {fault['input']!r}"
        if fault["type"] == "missing":
            text = "missing"
        elif fault["type"] == "extra_forbidden":
            text = "not handled" + (nearest(str(fault["loc"][-1]), _KNOWN_KEYS) if len(lines) < _HINTED else "")
        lines.append(f"{'.'.join(map(str, fault['loc']))}: {text}")
    return lines


class _NotMsaError(Exception):
    """The faults of a recipe whose keys do not fit each other, or whose sum is not MSA."""


def _request(recipe: _MergekitRecipe) -> MergeRequest:
    if faults := [*recipe.faults()]:
        raise _NotMsaError(*faults)
    total = _expand(recipe.base_model if recipe.moves_base else None, recipe.scaled)
    if not math.isfinite(sum(map(abs, total.values()))):
        raise _NotMsaError("models: weights that are too large to be added up")
    request = _name_models(total, recipe)
    if request is None:
        terms = " + ".join(f"{c:g} × {model}" for model, c in total.items() if abs(c) > _TOLERANCE)
        form = "1 × target, vectors subtracted and added, and full checkpoints that add up to 1"
        raise _NotMsaError(f"models: computes {terms.replace('+ -', '− ') or 'nothing'}; MSA is {form}")
    if recipe.keeper not in (None, request.target):
        fault = f"the result gets the tokenizer of the target {request.target}; leave it out"
        raise _NotMsaError(f"tokenizer_source: {fault}")
    return replace(request, dtype=recipe.out_dtype or recipe.dtype or "same")


def _expand(base: ListedModel | None, models: _Sum) -> _Sum:
    """Return coefficients of checkpoints and adapter deltas, zeros kept: base + Σ w (M − base), or Σ w M."""
    total: _Sum = {}
    moves = dict(models) if base is None else {**models, base: 1.0 - sum(w for m, w in models.items() if m != base)}
    for model, weight in moves.items():
        for summand in dict.fromkeys((ListedModel(model.checkpoint), model)):
            total[summand] = total.get(summand, 0.0) + weight
    return total


def _name_models(total: _Sum, recipe: _MergekitRecipe) -> MergeRequest | None:
    """Find target, prior and vectors in a sum; None where it is not MSA.

    The target is a base listed at weight 1 (as in written recipes, and in `linear` recipes that take configuration and
    tokenizer from it), otherwise a listed model that counts once, or the base. Any other base is the prior; that of
    task_arithmetic may be target and prior in one. Of several, the one that gives the tokenizer comes first.
    """
    base, models = recipe.base_model, recipe.weights
    checkpoints = [model.checkpoint for model in total if not model.adapter]
    listed = [model.checkpoint for model in models if not model.adapter]
    targets = [m.checkpoint for m in models if m != base and not m.adapter and abs(total[m] - 1.0) <= _TOLERANCE]
    targets = targets or checkpoints
    if base is not None and models.get(base) == 1.0:
        targets = [base.checkpoint, *targets]
    for target in [*(c for c in checkpoints if c == recipe.keeper), *targets]:
        if base is not None and base.checkpoint != target:
            priors = [base.checkpoint]
        else:
            priors = [c for c in reversed(dict.fromkeys([*listed, *checkpoints])) if c != target]
            priors += [target] if recipe.moves_base or not priors else []
        for prior in priors:
            if request := _assign(total, target, prior):
                return request
    return None


def _assign(total: _Sum, target: Reference, prior: Reference) -> MergeRequest | None:
    """Return the merge that a sum is with this target and prior, or None."""
    tolerance = max(_TOLERANCE, 1e-12 * max(map(abs, total.values())))  # large weights cancel less exactly
    rest = {**total, ListedModel(target): total.get(ListedModel(target), 0.0) - 1.0}
    deltas = {model: c for model, c in rest.items() if model.adapter and abs(c) > tolerance}
    moved = {m: c for m, c in rest.items() if not m.adapter and m.checkpoint != prior and abs(c) > tolerance}
    if abs(sum(c for m, c in rest.items() if not m.adapter)) > tolerance or ListedModel(target) in moved:
        return None
    places = {model.checkpoint for model in deltas}
    on_target = not moved and places <= {target}
    vectors = sorted((moved | deltas).items(), key=lambda vector: vector[1])  # those that are subtracted first
    terms = number_terms([Term("forget" if c < 0 else "retain", m.adapter or m.checkpoint, c) for m, c in vectors])
    fits = on_target or places <= {prior}
    return MergeRequest(target, tuple(terms), None if on_target else prior) if fits else None
