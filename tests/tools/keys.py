"""List the keys of recipes with their closed sets of values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from msa_lite.io.files.schema import schema_fields
from msa_lite.recipe.load import type_members


def recipe_keys(kind: type[BaseModel], above: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the dotted keys of a kind of recipe, each with the values that it takes; none where any text may do.

    A key of lists, or of names that the user makes, ends there.
    """
    for name, annotation in schema_fields(kind).items():
        key = f"{above}{name}"
        members = [member for _, member in type_members(annotation)]
        models = [member for member in members if schema_fields(member)]
        for model in models:
            yield from recipe_keys(model, f"{key}.")
        if len(models) < len([member for member in members if member is not type(None)]):
            yield key, list(dict.fromkeys(word for member in members for word in _words(member)))


def _words(member: Any) -> list[str]:
    """Return the values of a type as YAML has them, if it is a closed set."""
    if member is bool:
        return ["true", "false"]
    if get_origin(member) is Literal:
        return [{True: "true", False: "false"}.get(value, str(value)) for value in get_args(member)]
    return []
