"""Merges in mergekit's format: written so that mergekit-yaml runs them, and the part of it that is MSA read back.

The facts about mergekit are those of version 0.1.5. A written recipe is one of:

- plain LoRA adapters, applied to the target: T + Σ w ((T + adapter) − T); no prior is opened;
- all else, with the prior: T + Σ w (M − T) over the forget-tuned (−α) and retain-tuned model (β) and the prior
  (α − β). That is the formula, since the weights besides the target's add up to 0. mergekit takes configuration and
  tokenizer from `base_model`, hence the target is it: with the prior in its place the sum is the same but the prior's
  configuration and tokenizer come with it, and `tokenizer_source` would cut embeddings down to the tokenizer's size.

Reading expands any recipe to a linear combination of checkpoints and adapter deltas, and names its parts. msa-lite
always computes in fp32 or better and rounds once, so `dtype` only says how the result is stored.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from msa_lite.errors import UsageError, join_faults, nearest
from msa_lite.io.reading import read_yaml

_DTYPES = ("bfloat16", "float16", "float32")
_METHODS = ("task_arithmetic", "linear")
_KEYS = ("merge_method", "base_model", "models", "parameters", "dtype", "out_dtype", "tokenizer_source", "msa")
_NEUTRAL = {"density": 1, "rescale": False, "int8_mask": False}  # parameters that change nothing at these values
_MOST = 16  # models that are listed; MSA has four, and some may be listed at weight 0
_TOLERANCE = 1e-9  # of coefficients: sums of weights that cancel on paper


@dataclass(frozen=True)
class Reference:
    """A checkpoint or adapter as mergekit names it: a folder or Hub repository, and a revision of the latter."""

    path: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.path}@{self.revision}" if self.revision else self.path


@dataclass(frozen=True)
class MergeRequest:
    """A merge: target − alpha (forget − prior) + beta (retain − prior). A vector that is None has strength 0.

    dtype: of the output, "same" (as the target is stored), "bfloat16", "float16" or "float32".
    """

    target: Reference
    forget: Reference | None
    alpha: float
    retain: Reference | None
    beta: float
    prior: Reference | None
    dtype: str = "same"


@dataclass(frozen=True)
class _Model:
    """A model of a recipe: a checkpoint, perhaps with an adapter. In a sum, one with an adapter is its delta alone."""

    checkpoint: Reference
    adapter: Reference | None = None

    def __str__(self) -> str:
        return f"{self.checkpoint}+{self.adapter}" if self.adapter else str(self.checkpoint)

    def as_yaml(self) -> str | dict[str, dict[str, str]]:
        """The short form, unless mergekit would split a name at an @ or + of its own."""
        parts = {"model": self.checkpoint} | ({"lora": self.adapter} if self.adapter else {})
        if not any(mark in f"{r.path}{r.revision}" for r in parts.values() for mark in "@+"):
            return str(self)
        return {name: {"path": r.path} | ({"revision": r.revision} if r.revision else {}) for name, r in parts.items()}


_Sum = dict[_Model, float]


def command_line(config: str, out: str, *, adapters: bool) -> str:
    """The mergekit-yaml command, quoted for a shell, that runs the recipe `config` (of this module) into `out`.

    adapters: the recipe names some. They are then merged in fp32 and kept as whole models beside `out`.
    """
    words = ["mergekit-yaml", config, out]
    if adapters:
        words += ["--lora-merge-cache", f"{out.rstrip('/')}.lora-cache", "--lora-merge-dtype", "float32"]
    return shlex.join(words)


def write_recipe(
    request: MergeRequest, *, stored: str, forget_is_adapter: bool, retain_is_adapter: bool, needs_prior: bool
) -> str:
    """A merge as YAML for mergekit >= 0.1.5, with the command that runs it in comments.

    stored: dtype of the target's weights, which "same" stands for. needs_prior: an adapter holds more than plain LoRA
    factors (whole modules, embeddings, biases, DoRA), so that its delta is only right on the prior. A vector of
    strength 0 is left out.

    Raises UsageError for strengths or dtypes that make no sense, a missing vector or prior, and for a model in two
    roles, which mergekit refuses.
    """
    dtype = stored if request.dtype == "same" else request.dtype
    if dtype not in _DTYPES:
        raise UsageError(f"a mergekit recipe stores {', '.join(_DTYPES)}; got {dtype}")
    tuned: dict[str, tuple[Reference, float, bool]] = {}
    for role, vector, strength, sign, is_adapter in (
        ("forget", request.forget, request.alpha, -1.0, forget_is_adapter),
        ("retain", request.retain, request.beta, 1.0, retain_is_adapter),
    ):
        if not 0 <= strength < math.inf:
            raise UsageError(f"{role}: alpha and beta are numbers that are not negative; got {strength}")
        if strength > 0 and vector is None:
            raise UsageError(f"{role}: no vector is given, but a strength of {strength}")
        if strength > 0 and vector is not None:
            tuned[role] = (vector, sign * strength, is_adapter)
    on_prior = bool(tuned) and (needs_prior or not all(is_adapter for *_, is_adapter in tuned.values()))
    if on_prior and request.prior is None:
        raise UsageError("prior: missing; full checkpoints, and adapters that are more than plain LoRA, need it")

    place = request.prior if on_prior and request.prior else request.target  # where adapters go
    models = {"target": (_Model(request.target), 1.0)} if on_prior or not tuned else {}
    for role, (vector, weight, is_adapter) in tuned.items():
        models[role] = (_Model(place, vector) if is_adapter else _Model(vector), weight)
    if place != request.target:  # stays at weight 0: mergekit does not need it then, but it says what the prior is
        models["prior"] = (_Model(place), 0.0 - sum(weight for _, weight, _ in tuned.values()))
    if len({model for model, _ in models.values()}) < len(models):  # mergekit: "Duplicate merge inputs"
        listing = ", ".join(f"{role} {model}" for role, (model, _) in models.items())
        raise UsageError(
            f"mergekit refuses a recipe that names a model twice: {listing}; leave one out (of forget and retain, keep "
            "one at the difference of alpha and beta)"
        )
    document: dict[str, Any] = {
        "merge_method": "task_arithmetic" if tuned else "linear",
        "base_model": _Model(request.target).as_yaml(),
        "models": [{"model": m.as_yaml(), "parameters": {"weight": float(w)}} for m, w in models.values()],
        "parameters": {"normalize": False} | ({"lambda": 1.0} if tuned else {}),
        "dtype": "float32",
        "out_dtype": dtype,
    }
    alpha, beta = (abs(tuned[role][1]) if role in tuned else 0.0 for role in ("forget", "retain"))
    comments = _comments(alpha, beta, any(model.adapter for model, _ in models.values()), on_prior)
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, allow_unicode=True, width=math.inf)
    return "".join(f"# {line}\n" for line in comments) + text


def _comments(alpha: float, beta: float, adapters: bool, on_prior: bool) -> list[str]:
    terms = [f" - {alpha} (forget-tuned - prior)" if alpha else "", f" + {beta} (retain-tuned - prior)" if beta else ""]
    lines = [
        "Model State Arithmetic as a mergekit recipe, written by msa-lite:",
        f"unlearned = target{''.join(terms)}; alpha {alpha}, beta {beta}",
        "Run with mergekit >= 0.1.5; CONFIG is this file, OUT a folder that is not there yet:",
        f"  {command_line('CONFIG', 'OUT', adapters=adapters)}",
    ]
    if adapters:
        lines += ["The cache gets a whole model for each adapter and goes by name: remove it when an adapter changed."]
    if on_prior:
        lines += ["The weights besides the target's add up to 0; the prior's is alpha - beta."]
    return [
        *lines,
        "Configuration and tokenizer come from base_model, so it is the target. mergekit writes config.json in its own",
        "version's form; copy the target's over it if older programs will read it.",
    ]


def read_recipe(path: Path) -> MergeRequest:
    """A merge from a mergekit recipe that is MSA: task_arithmetic or linear over whole models with plain weights.

    Where several namings of the parts compute the same, a base that is not the target is the prior, otherwise the last
    model listed that fits. An `msa` block is ignored. Raises UsageError with every fault, each with its key: what only
    mergekit-yaml can do, and also unknown keys, which mergekit passes over.
    """
    document = read_yaml(path, UsageError)
    if not isinstance(document, dict):
        raise UsageError(f"{path}: a mergekit recipe is a mapping of keys; got {type(document).__name__}")
    reader = _Reader()
    request = reader.read(document)
    if request is None or reader.faults:
        headline = f"{path}: not a merge that msa-lite can do; mend it, or run it with mergekit-yaml:"
        raise UsageError(join_faults(headline, reader.faults))
    return request


@dataclass
class _Reader:
    """Parses a recipe's parts, and collects what is wrong with them as `dotted.key: what`."""

    faults: list[str] = field(default_factory=list)

    def read(self, document: dict[Any, Any]) -> MergeRequest | None:
        """The merge, or None where there are faults."""
        self._check_keys("", document, _KEYS)
        moves_base = self._choice(document, "merge_method", _METHODS) == "task_arithmetic"
        base = self._model("base_model", document.get("base_model"))
        dtype = self._choice(document, "dtype", (*_DTYPES, None))
        dtype = self._choice(document, "out_dtype", (*_DTYPES, None)) or dtype or "same"
        tokenizer = document.get("tokenizer_source")
        keeper = base if tokenizer == "base" and base else self._model("tokenizer_source", tokenizer)
        models = self._models(document.get("models"), base if moves_base else None)
        scale = self._scale(document.get("parameters"), moves_base, models)
        if moves_base and document.get("base_model") is None:
            self.faults.append("base_model: missing, and task_arithmetic needs it")
        if base is not None and (base.adapter or not (moves_base or base in models)):
            self.faults.append("base_model: must have no adapter, and for linear be listed under models with a weight")
        if self.faults:
            return None

        total = _expand(base if moves_base else None, {model: scale * weight for model, weight in models.items()})
        if not math.isfinite(sum(map(abs, total.values()))):
            self.faults.append("models: weights that are too large to be added up")
            return None
        request = _name_parts(total, models, base, moves_base, keeper)
        if request is not None:
            return replace(request, dtype=dtype)
        if keeper is not None and _name_parts(total, models, base, moves_base, None):
            self.faults.append(f"tokenizer_source: the result gets the target's tokenizer; {keeper} is not the target")
        else:
            terms = " + ".join(f"{c:g} × {model}" for model, c in total.items() if abs(c) > _TOLERANCE)
            what = "1 × target, at most one thing subtracted and one added, and full checkpoints that add up to 1"
            self.faults.append(f"models: computes {terms.replace('+ -', '− ') or 'nothing'}; MSA is {what}")
        return None

    def _check_keys(self, where: str, mapping: Mapping[Any, Any], known: tuple[str, ...]) -> None:
        for key in mapping:
            if key not in known:
                hint = nearest(str(key), known) if len(self.faults) < _MOST else ""  # takes time, and no more are shown
                self.faults.append(f"{where}{key}: not handled{hint}")

    def _choice(self, document: Mapping[Any, Any], key: str, choices: tuple[str | None, ...]) -> str | None:
        value = document.get(key)
        if value in choices:
            return value
        names = [choice for choice in choices if choice]
        self.faults.append(f"{key}: must be one of {', '.join(names)}; got {value}{nearest(str(value), names)}")
        return None

    def _model(self, where: str, value: Any) -> _Model | None:
        """A model reference: `path[@revision][+path[@revision]]` or the same in mappings; None for none or a fault."""
        if value is None:
            return None
        if isinstance(value, str):
            first, *more = value.split("+")
            if len(more) > 1:
                self.faults.append(f"{where}: more than one + in {value}; write a name that holds it as a mapping")
                return None
            checkpoint = self._reference(where, first)
            adapter = self._reference(where, more[0]) if more else None
        elif isinstance(value, dict):
            self._check_keys(f"{where}.", value, ("model", "lora"))
            checkpoint = self._reference(f"{where}.model", value.get("model"))
            adapter = self._reference(f"{where}.lora", value["lora"]) if value.get("lora") is not None else None
        else:
            checkpoint = adapter = self._reference(where, value)
        return _Model(checkpoint, adapter) if checkpoint else None

    def _reference(self, where: str, value: Any) -> Reference | None:
        if isinstance(value, str):
            path, *revisions = value.split("@")
            if path and len(revisions) <= 1 and all(revisions):
                return Reference(path, *revisions)
        elif isinstance(value, dict):
            self._check_keys(f"{where}.", value, ("path", "revision"))
            named, revision = value.get("path"), value.get("revision")
            if isinstance(named, str) and named and (revision is None or (isinstance(revision, str) and revision)):
                return Reference(named, revision)
        self.faults.append(f"{where}: not `path`, `path@revision` or {{path: …, revision: …}}; got {value!r}")
        return None

    def _models(self, entries: Any, base: _Model | None) -> _Sum:
        """Weight by model. base: the base of task_arithmetic, whose own weight means nothing."""
        if not isinstance(entries, list) or not entries:
            self.faults.append("models: missing, or not a list of models")
            return {}
        if len(entries) > _MOST:
            self.faults.append(f"models: {len(entries)} of them; an MSA merge has four at most")
            return {}
        models: _Sum = {}
        for number, entry in enumerate(entries):
            where = f"models.{number}"
            if not isinstance(entry, dict) or entry.get("model") is None:
                self.faults.append(f"{where}.model: missing")
                continue
            self._check_keys(f"{where}.", entry, ("model", "parameters"))
            model = self._model(f"{where}.model", entry["model"])
            parameters = self._parameters(f"{where}.parameters", entry.get("parameters"), ("weight",))
            default = 0.0 if model is not None and model == base else None
            weight = self._number(f"{where}.parameters.weight", parameters.get("weight", default))
            if model in models:
                self.faults.append(f"{where}.model: {model} is listed twice, which mergekit refuses")
            elif model is not None:
                models[model] = weight
        return models

    def _scale(self, parameters: Any, moves_base: bool, models: _Sum) -> float:
        """What every weight is multiplied by: lambda for task_arithmetic; for `linear` 1 / their sum, or 1."""
        values = self._parameters("parameters", parameters, ("normalize", "lambda") if moves_base else ("normalize",))
        normalize = values.get("normalize", not moves_base)
        if not isinstance(normalize, bool):
            self.faults.append(f"parameters.normalize: must be true or false; got {normalize!r}")
        elif normalize and moves_base:
            flips = "it divides by the sum of the weights, and so turns the sign of a forget vector round"
            self.faults.append(f"parameters.normalize: must be false: {flips}")
        elif normalize and not self.faults:
            total = sum(models.values())
            if abs(total) > _TOLERANCE:
                return 1 / total
            self.faults.append("parameters.normalize: the weights add up to 0 and cannot be divided by that")
        return self._number("parameters.lambda", values.get("lambda", 1.0))

    def _parameters(self, where: str, values: Any, known: tuple[str, ...]) -> dict[Any, Any]:
        if not isinstance(values, dict):
            if values is not None:
                self.faults.append(f"{where}: must be a mapping; got {values!r}")
            return {}
        self._check_keys(f"{where}.", values, (*known, *_NEUTRAL))
        for key, neutral in _NEUTRAL.items():
            if key in values and values[key] != neutral:
                self.faults.append(f"{where}.{key}: not handled, other than {str(neutral).lower()}")
        return values

    def _number(self, where: str, value: Any) -> float:
        """A finite number; also one in a string, as YAML 1.1 reads 1e-5."""
        try:
            if isinstance(value, (int, float, str)) and not isinstance(value, bool) and math.isfinite(float(value)):
                return float(value)
        except (ValueError, OverflowError):
            pass
        what = "missing" if value is None else f"must be one number (no gradient or filter); got {value!r}"
        self.faults.append(f"{where}: {what}")
        return 0.0


def _expand(base: _Model | None, models: _Sum) -> _Sum:
    """A recipe as coefficients of checkpoints and adapter deltas, zeros kept: base + Σ w (M − base), or Σ w M."""
    total: _Sum = {}
    moves = dict(models) if base is None else {**models, base: 1.0 - sum(w for m, w in models.items() if m != base)}
    for model, weight in moves.items():
        for part in dict.fromkeys((_Model(model.checkpoint), model)):
            total[part] = total.get(part, 0.0) + weight
    return total


def _name_parts(
    total: _Sum, models: _Sum, base: _Model | None, moves_base: bool, keeper: _Model | None
) -> MergeRequest | None:
    """Find target, prior and vectors in a sum; None where it is not MSA.

    The target is a base listed at weight 1 (as in written recipes, and in `linear` recipes that take configuration and
    tokenizer from it), otherwise a listed model that counts once, or the base. Any other base is the prior. moves_base:
    the method is task_arithmetic, whose base may be target and prior in one. keeper: the only model to try as target.
    """
    checkpoints = [model.checkpoint for model in total if not model.adapter]
    listed = [model.checkpoint for model in models if not model.adapter]
    targets = [m.checkpoint for m in models if m != base and not m.adapter and abs(total[m] - 1.0) <= _TOLERANCE]
    targets = targets or checkpoints
    if base is not None and models.get(base) == 1.0:
        targets = [base.checkpoint, *targets]
    for target in [keeper.checkpoint] if keeper else targets:
        if base is not None and base.checkpoint != target:
            priors = [base.checkpoint]
        else:
            priors = [c for c in reversed(dict.fromkeys([*listed, *checkpoints])) if c != target]
            priors += [target] if moves_base or not priors else []
        for prior in priors:
            request = _assign(total, target, prior)
            if request is not None:
                return request
    return None


def _assign(total: _Sum, target: Reference, prior: Reference) -> MergeRequest | None:
    """The merge that a sum is with a given target and prior, or None."""
    tolerance = max(_TOLERANCE, 1e-12 * max(map(abs, total.values())))  # large weights cancel less exactly
    rest = {**total, _Model(target): total.get(_Model(target), 0.0) - 1.0}
    deltas = {model: c for model, c in rest.items() if model.adapter and abs(c) > tolerance}
    moved = {m: c for m, c in rest.items() if not m.adapter and m.checkpoint != prior and abs(c) > tolerance}
    if abs(sum(c for m, c in rest.items() if not m.adapter)) > tolerance or _Model(target) in moved:
        return None
    places = {model.checkpoint for model in deltas}
    if not moved and places <= {target}:
        needed = None
    elif places <= {prior}:
        needed = prior
    else:
        return None
    vectors = [(model.adapter or model.checkpoint, c) for model, c in (moved | deltas).items()]
    forget, retain = [v for v in vectors if v[1] < 0], [v for v in vectors if v[1] > 0]
    if len(forget) > 1 or len(retain) > 1:
        return None
    (subtracted, weight), (added, beta) = [*forget, (None, 0.0)][0], [*retain, (None, 0.0)][0]
    return MergeRequest(target, subtracted, abs(weight), added, beta, needed)
