"""The page of all keys of recipes, made from their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markdown.extensions.toc import slugify
from pydantic import BaseModel

from msa_lite.io.files.schema import json_schema
from msa_lite.recipe import Recipe, TableRecipe, TrainingRecipe
from tests.tools.pages.tables import code, table

_HEADER = """# Recipe

Written by `python -m tests.tools.pages` from the schemas in `msa_lite/recipe/`. `msa-lite recipes schema` prints
them as JSON schema for your editor. A key with the default `null` takes null, too. Unknown keys are refused.

Any key can be overridden on the command line, as in `forget.alpha=1.25` or `'retain.beta=[0, 0.5]'`. A path that starts
with `$output/` starts from the run's folder. Other relative paths start from the recipe's folder if they exist there,
else from the working folder.

"""
_BOUNDS = {
    "minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}",
    "maxLength": "of at most {} characters", "multipleOf": "a multiple of {}",
}  # fmt: skip
_TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "null"}
Schema = Mapping[str, Any]
Row = tuple[str, str, str, str]


def recipe_page() -> str:
    """Return the page: the keys of the recipes of runs, trainings and tables, section by section."""
    titles: dict[str, str] = {}
    shown: dict[str, list[Row]] = {}
    run = _sections(Recipe, "The recipe of a run", titles, shown)
    training = _sections(TrainingRecipe, "The recipe of a training", titles, shown)
    return _HEADER + run + "\n" + training + "\n" + _sections(TableRecipe, "The recipe of a table", titles, shown)


def _sections(model: type[BaseModel], heading: str, titles: dict[str, str], shown: dict[str, list[Row]]) -> str:
    """Return the sections of a schema, and note titles and rows. Those that have a title already stand on the page."""
    schema = json_schema(model)
    places = _places(schema, schema.get("$defs", {}))
    new = {name: title for name, title in _titles(places).items() if name not in titles}
    titles |= new
    texts = [_section(f"## {heading}", schema, [], titles, {})]
    texts += [
        _section(f"### {title}", schema["$defs"][name], places[name], titles, shown) for name, title in new.items()
    ]
    return "\n".join(texts)


def _titles(places: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return a title for each section: its shortest key, and the name of the schema as well where a key has two."""
    keys = {name: min(keys, key=lambda key: key.count(".")) for name, keys in places.items()}
    twice = {key for key in keys.values() if list(keys.values()).count(key) > 1}
    return {name: f"{key}, {name}" if key in twice else key for name, key in keys.items()}


def _places(schema: Schema, parts: Mapping[str, Schema]) -> dict[str, list[str]]:
    """Return the sections below a schema in the order of their first key, with the keys that hold each."""
    places: dict[str, list[str]] = {}

    def visit(part: Schema, prefix: str) -> None:
        for key, field in part.get("properties", {}).items():
            for name in _references(field):
                places.setdefault(name, []).append(prefix + key)
                visit(parts[name], f"{prefix}{key}.")

    visit(schema, "")
    return places


def _references(field: Schema) -> list[str]:
    """Return the names of the sections that a field may hold."""
    names = [field["$ref"].rpartition("/")[2]] if "$ref" in field else []
    for inner in (*field.get("anyOf", ()), *field.get("oneOf", ())):
        names += _references(inner)
    return names + (_references(field["items"]) if isinstance(field.get("items"), dict) else [])


def _section(
    heading: str, schema: Schema, keys: list[str], titles: Mapping[str, str], shown: dict[str, list[Row]]
) -> str:
    """Return a section: its purpose, the keys that hold it, and the table of the keys that no section before it has."""
    required = schema.get("required", ())
    rows: list[Row] = []
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else _default(field)
        kind = _type(field, titles).removesuffix(" or null") if default == "`null`" else _type(field, titles)
        rows.append((code(name), kind, default, field.get("description", "")))
    others = [key for key in dict.fromkeys(keys) if not heading.endswith(f" {key}")]
    where = f"The same keys stand in {', '.join(map(code, others))}.\n\n" if others else ""
    text = f"{' '.join(schema.get('description', '').split())}\n\n"
    for title, before in shown.items():
        if len(before) > 2 and set(before) < set(rows):
            where += f"It has all keys of [{title}](#{slugify(title, '-')}), and:\n\n"
            rows = [row for row in rows if row not in before]
            break
    else:
        shown[heading.lstrip("# ")] = rows
    return f"{heading}\n\n{text}{where}" + table(("key", "value", "default", "meaning"), rows)


def _default(field: Schema) -> str:
    value = field.get("default")
    if isinstance(value, dict) and value:
        return "below"
    if isinstance(value, str):
        quoted = value.replace("\n", "\\n")
        return code(quoted if value.strip() == value else f'"{quoted}"')
    return code(f"{value:g}" if isinstance(value, float) else json.dumps(value))


def _type(field: Schema, titles: Mapping[str, str]) -> str:
    """Return the kinds of values that a field takes, in words."""
    if "$ref" in field:
        title = titles[field["$ref"].rpartition("/")[2]]
        return f"[{title}](#{slugify(title, '-')})"
    if members := [*field.get("anyOf", ()), *field.get("oneOf", ())]:
        return " or ".join(dict.fromkeys(_type(member, titles) for member in members))
    if "const" in field:
        return code(str(field["const"]))
    if "enum" in field:
        return ", ".join(code(str(value)) for value in field["enum"])
    kind = field.get("type", "any value")
    if kind == "array":
        inner = " and ".join(_type(item, titles) for item in field.get("prefixItems") or [field.get("items", {})])
        return f"list of {f'({inner})' if ' or ' in inner else inner}"
    if kind == "object":
        values = field.get("additionalProperties")
        return f"mapping of names to ({_type(values, titles)})" if isinstance(values, dict) else "mapping"
    return " ".join([_TYPES.get(kind, kind), *_bounds(field)])


def _bounds(field: Schema) -> list[str]:
    if "minimum" in field and "maximum" in field:
        return [f"from {_number(field['minimum'])} to {_number(field['maximum'])}"]
    texts = [text.format(_number(field[name])) for name, text in _BOUNDS.items() if name in field]
    return [" and ".join(texts)] if texts else []


def _number(value: float) -> str:
    return f"{value:,}".replace(",", " ") if isinstance(value, int) and value < 10**12 else f"{value:g}"
