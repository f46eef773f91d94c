"""The base of closed schemas: recipes and removal records refuse unknown keys, and document every field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from itertools import pairwise
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema


class Closed(BaseModel):
    """A part of a schema, which refuses unknown keys.

    Commands read recipes before anything else, so a class costs little until it is used: its validator is built with
    that of the whole.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    def model_dump(self, **settings: Any) -> dict[str, Any]:
        """Return the values by the keys that are written, such as `as`."""
        return super().model_dump(**({"by_alias": True} | settings))


@dataclass(frozen=True)
class Before:
    """Turn what is written into a field's value. The JSON schema has the type that may be written, `written`."""

    turn: Callable[[Any], Any]
    written: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        turned = core_schema.no_info_before_validator_function(self.turn, handler(source))
        return core_schema.json_or_python_schema(handler.generate_schema(self.written), turned)


def schema_fields(kind: Any) -> dict[str, Any]:
    """Return the types of a schema's fields by key; nothing for a type that is no schema."""
    if not isinstance(kind, type):
        return {}
    if issubclass(kind, BaseModel):
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    return get_type_hints(kind, include_extras=True) if is_dataclass(kind) else {}


def json_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model. The text below a field is its description."""
    return kind.model_json_schema(schema_generator=_WithTexts)


class _WithTexts(GenerateJsonSchema):
    def model_schema(self, schema: Any) -> dict[str, Any]:
        return _describe(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        return _describe(super().dataclass_schema(schema), schema["cls"])


def _describe(schema: dict[str, Any], kind: type) -> dict[str, Any]:
    """Add the texts below a class's fields to its JSON schema. Pydantic would read them whenever a recipe is read."""
    properties = schema.get("properties", {})
    documented = [above for above in reversed(kind.__mro__) if above not in (BaseModel, object)]
    texts = {name: text for above in documented for name, text in _field_texts(above).items()}
    for name, text in texts.items():
        field = getattr(kind, "model_fields", {}).get(name)
        properties[field.alias if field and field.alias else name].setdefault("description", text)
    return schema


def _field_texts(schema: type) -> dict[str, str]:
    """Return the texts below the fields that a class itself declares."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
