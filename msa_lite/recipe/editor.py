"""Let an editor complete and check a recipe: the JSON schema beside it, and the comment that leads there."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel

from msa_lite.io.files.writing import indented_json, reachable, write_text
from msa_lite.recipe.schema import Recipe
from msa_lite.recipe.table import TableRecipe
from msa_lite.recipe.training import TrainingRecipe

RecipeKind = Literal["run", "training", "table"]
_KINDS: dict[str, type[BaseModel]] = {"run": Recipe, "training": TrainingRecipe, "table": TableRecipe}


def recipe_schema(kind: RecipeKind) -> str:
    """Return the JSON schema of a kind of recipe."""
    return indented_json(_KINDS[kind].model_json_schema())


def write_with_schema(path: Path, text: str, recipe: BaseModel) -> Path:
    """Write a recipe that leads editors to its schema, and the schema beside it; return the schema's file.

    The schema is a file of its own with a name of ours, so that the line holds without a network and after a move of
    both. An older one is replaced. Without it, an editor says that it is missing, and a run does not care.
    """
    kind = next(kind for kind in get_args(RecipeKind) if isinstance(recipe, _KINDS[kind]))
    schema = path.with_name(f"msa-lite-{kind}.schema.json")
    with reachable(path):
        write_text(schema, recipe_schema(kind))
        write_text(path, _with_line(text, f"# yaml-language-server: $schema={schema.name}"))
    return schema


def _with_line(text: str, line: str) -> str:
    """Put a comment at the end of a recipe's first comments, whose first line is its title."""
    lines = text.splitlines(keepends=True)
    place = next((number for number, old in enumerate(lines) if not old.startswith("#")), len(lines))
    return "".join([*lines[:place], f"{line}\n", *lines[place:]])
