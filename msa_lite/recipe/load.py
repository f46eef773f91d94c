"""Recipes read, overridden, checked and written: every fault in one error, with the path of its key."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from msa_lite.errors import RecipeError, UsageError, join_faults, nearest
from msa_lite.recipe.files import find_recipe
from msa_lite.recipe.schema import Recipe

OUTPUT_VARIABLE = "$output"


def load_recipe(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a YAML file, the name of a shipped recipe, or a mapping; then apply `key.sub=value`.

    `$output` at the start of a path stands for the run's folder. Raises RecipeError with one line for every fault,
    UsageError when there is no such file.
    """
    name = "recipe"
    if isinstance(source, Mapping):
        values: Any = dict(source)
    else:
        path = find_recipe(str(source))
        name = str(path)
        try:
            values = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: not YAML ({error})") from error
        if not isinstance(values, dict):
            raise RecipeError(f"{path}: a recipe is a mapping of keys to values, this is {type(values).__name__}")
    for override in overrides:
        values = _override(values, override)
    values = _fill_output(values, values.get("output"))
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        faults = _explain(error)
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise RecipeError(join_faults(f"{name}: {count}:", faults, limit=50)) from error


def _override(values: dict[str, Any], override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise UsageError(f"'{override}': an override is key.sub=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"'{override}': the value is not YAML ({error})") from error
    *parents, last = key.split(".")
    result = dict(values)
    place = result
    for parent in parents:
        below = place.get(parent)
        if below is not None and not isinstance(below, dict):
            raise UsageError(f"'{override}': {parent} holds {below!r}, which has no keys below it")
        place[parent] = dict(below or {})
        place = place[parent]
    place[last] = value
    return result


def _fill_output(value: Any, output: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fill_output(item, output) for key, item in value.items()}
    if isinstance(value, str) and isinstance(output, str) and value.startswith(OUTPUT_VARIABLE + "/"):
        return output.rstrip("/") + value.removeprefix(OUTPUT_VARIABLE)
    return value


def _explain(error: ValidationError) -> list[str]:
    lines: dict[str, list[str]] = {}
    for item in error.errors():
        path, model = _walk(item["loc"])
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            text = f"unknown key{nearest(str(item['loc'][-1]), model.model_fields if model else ())}"
        elif item["type"] == "missing":
            text = text.replace("Field required", "is missing")
        elif not isinstance(item["input"], dict):
            text = f"{text[0].lower()}{text[1:]}, got {item['input']!r}"
        lines.setdefault(path or "recipe", []).append(text)
    # A union reports each of its members; they belong in one line.
    return [f"{path}: {'; or '.join(dict.fromkeys(texts))}" for path, texts in lines.items()]


def _walk(location: Sequence[int | str]) -> tuple[str, type[BaseModel] | None]:
    """The dotted path of a fault without the names of union members, and the model its last key belongs to."""
    kind: Any = Recipe
    model: type[BaseModel] | None = None
    keys: list[str] = []
    for part in location:
        model = _model_in(kind)
        if model is not None:
            field = model.model_fields.get(str(part))
            kind = field.annotation if field else None
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        elif typing.get_origin(kind) is list:
            kind = typing.get_args(kind)[0]
        elif isinstance(part, str):
            continue
        keys.append(str(part))
    return ".".join(keys), model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    members = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType)
        else (annotation,)
    )
    return next((m for m in members if isinstance(m, type) and issubclass(m, BaseModel)), None)


def dump_recipe(recipe: Recipe) -> str:
    """YAML with every default filled in; `load_recipe` reads it back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
