"""The recipes of mergekit, of any method, as mergekit reads them: their models in roles, and pinned to folders."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import UsageError, join_faults
from msa_lite.io.console.libraries import require, without_bars
from msa_lite.io.files.reading import printable
from msa_lite.io.weights.hub import Source
from msa_lite.merger.formula import Term, number_terms
from msa_lite.merger.mergekit_reader import read_recipe

logger = logging.getLogger(__name__)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings, logs and bars of mergekit and of the libraries underneath from the terminal."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), without_bars():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)


@dataclass(frozen=True)
class Roles:
    """The models of a recipe, by name, in the roles that a manifest knows."""

    target: str
    """The base, or the first model: the one whose configuration and tokenizer the result gets."""
    terms: list[Term[str]]
    """The other models, or the adapters on them."""
    prior: str | None
    """The model under the adapters, where it is not the target; the prior of a merge that is ours."""
    is_ours: bool
    """True where msa-lite could do the same merge."""


def mergekit_text(recipe: Path) -> str:
    """Return a recipe's text. Raise UsageError where mergekit is not installed, or the file cannot be read."""
    require("mergekit")
    try:
        return recipe.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{printable(recipe)}: cannot be read ({error})") from error


def parse_text(recipe: Path, text: str) -> Any:
    """Return mergekit's form of a recipe. Raise UsageError with its words where it refuses it."""
    import yaml

    with quiet():  # what mergekit loads has something to say
        from mergekit.config import MergeConfiguration

    try:
        document = yaml.safe_load(text)
        config = MergeConfiguration.model_validate(document)
    except Exception as error:  # pydantic's, YAML's, and its own
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and "errors.pydantic" not in line]
        raise UsageError(join_faults(f"{recipe}: mergekit refuses this recipe:", lines)) from error
    if not config.referenced_models():
        raise UsageError(f"{recipe}: names no models")
    if unknown := sorted({*map(str, document)} - {*MergeConfiguration.model_fields, "name", "msa"}):
        logger.warning("%s: mergekit does not know %s, and passes over it", recipe, ", ".join(unknown))
    return config


def model_paths(value: Any) -> Iterator[Any]:
    """Yield the models and adapters that a recipe names, wherever it does, as mergekit's ModelPath."""
    from mergekit.common import ModelPath
    from pydantic import BaseModel

    if isinstance(value, ModelPath):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from model_paths(getattr(value, name))
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from model_paths(item)


def pinned(value: Any, sources: Mapping[str, Source]) -> Any:
    """Return a recipe that names the folders of its models, in the place of repositories."""
    from mergekit.common import ModelPath
    from pydantic import BaseModel

    if isinstance(value, ModelPath):
        return ModelPath.model_validate({"path": str(sources[str(value)].folder.absolute())})
    if isinstance(value, BaseModel):
        return value.model_copy(update={n: pinned(getattr(value, n), sources) for n in type(value).model_fields})
    if isinstance(value, Mapping):
        return {key: pinned(item, sources) for key, item in value.items()}
    return type(value)(pinned(item, sources) for item in value) if isinstance(value, list | tuple) else value


def _listed(config: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the models that a recipe lists, each with the parameters that hold for it, of whatever level."""
    for part in (config, *(config.modules or {}).values()):
        of_part = {**(config.parameters or {}), **(part.parameters or {})}
        for item in part.models or ():
            yield item, {**of_part, **(item.parameters or {})}
        for piece in part.slices or ():
            for item in piece.sources:
                yield item, {**of_part, **(piece.parameters or {}), **(item.parameters or {})}


def find_roles(recipe: Path, config: Any) -> Roles:
    """Return the roles of a recipe's models. Raise UsageError for models that have none."""
    listed = [*_listed(config)]
    base = config.base_model or listed[0][0].model
    faults = [f"base_model {base}: has an adapter; merge that first (msa-lite merge)"] if base.lora else []
    target, under = str(base.model), {str(item.model.model) for item, _ in listed if item.model.lora}
    try:
        request = read_recipe(recipe)
    except UsageError:
        weights: dict[str, float] = {}
        for item, settings in listed:
            if item.model != base:
                weights.setdefault(str(item.model.lora or item.model.model), _weight(settings.get("weight", 1.0)))
        faults += [f"{name}: has weight 0; leave it out" for name, weight in weights.items() if not weight]
        terms = number_terms([Term("forget" if w < 0 else "retain", name, w) for name, w in weights.items() if w])
        roles = Roles(target, terms, next(iter(sorted(under - {target})), None), False)
        faults += [] if terms else ["names no model besides its base, so that nothing would change"]
    else:
        vectors = [term.with_vector(str(term.vector)) for term in request.terms]
        roles = Roles(str(request.target), vectors, str(request.prior) if request.prior else None, True)
    known = {roles.target, roles.prior, *(term.vector for term in roles.terms)}
    if strange := [name for name in dict.fromkeys(map(str, model_paths(config))) if name not in known and not faults]:
        faults.append(
            f"{', '.join(strange)}: neither the base, nor merged, nor the one model under the adapters; leave it out, "
            "or run the recipe with mergekit-yaml"
        )
    if faults:
        raise UsageError(join_faults(f"{recipe}: no merge for --with mergekit:", faults))
    return roles


def _weight(value: Any) -> float:
    """Return the weight that a manifest records: a number as it is; of gradients and filters, the mean of theirs."""
    if isinstance(value, list):
        return math.fsum(map(_weight, value)) / max(1, len(value))
    try:
        return float(getattr(value, "value", value))
    except (TypeError, ValueError):
        return _weight(value.value) if hasattr(value, "value") else 1.0
