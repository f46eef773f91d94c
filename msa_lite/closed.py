"""The base of closed schemas: a recipe and a removal record refuse unknown keys, and document every field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Closed(BaseModel):
    """A part of a schema, which refuses unknown keys. The text below a field is its description in the JSON schema.

    Commands read recipes before anything else, so a class costs little until it is used: its validator is built with
    that of the whole, and its texts are read for the JSON schema alone (`use_attribute_docstrings` reads them always).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema with a description of each field."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        texts = {name: text for above in reversed(cls.__mro__) for name, text in _field_texts(above).items()}
        for name, field in cls.model_fields.items():
            key = field.alias or name
            if name in texts and key in properties:
                properties[key].setdefault("description", texts[name])
        return schema


def _field_texts(schema: type) -> dict[str, str]:
    """Return the texts below the fields that a class itself declares."""
    if not issubclass(schema, Closed) or schema is Closed:
        return {}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
