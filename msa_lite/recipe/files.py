"""Files of recipes: the user's own, those that come with the package, and the schema beside one for editors."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel

from msa_lite.errors import OutputError, UsageError
from msa_lite.io.files.reading import local_path, read_text
from msa_lite.io.files.schema import json_schema
from msa_lite.io.files.writing import check_writable, indented_json, reachable, write_text
from msa_lite.recipe.schema import Recipe
from msa_lite.recipe.table import TableRecipe
from msa_lite.recipe.training import TrainingRecipe

TABLES = "table/"  # before the names of shipped tables
RECIPE_ENDINGS = (".yaml", ".yml")
_MOST = 3  # names that a message offers
RecipeKind = Literal["run", "training", "table"]
_KINDS: dict[str, type[BaseModel]] = {"run": Recipe, "training": TrainingRecipe, "table": TableRecipe}


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name (`quickstart`, `tofu/forget10`, …)."""
    package = Path(__file__).parents[1]
    folder = next((f for f in (package / "shipped_recipes", package.parent / "recipes") if f.is_dir()), None)
    if folder is None:
        return {}
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe: the user's own, or a shipped one by name. Raise UsageError for neither."""
    path = local_path(name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    key = name.removeprefix("recipes/").removesuffix(".yaml")
    if key in shipped:
        return shipped[key]
    raise missing_recipe(name, key, shipped, "recipe")


def missing_recipe(name: str, key: str, shipped: Iterable[str], kind: str) -> UsageError:
    """Return the error for a recipe that is neither a file nor shipped, with the nearest names.

    key: its name as the shipped ones are called. kind: "recipe" or "table".
    """
    path = local_path(name)
    if path.is_dir():
        inside = path / "recipe.yaml"
        hint = f"name its recipe: {inside}" if inside.is_file() else "name a recipe's file"
        return UsageError(f"{name}: is a folder; {hint}")
    if os.path.lexists(path):
        return UsageError(f"{name}: is no file but a pipe, a device, or a link to nothing")
    near = _near(key, shipped)
    if not name.endswith(RECIPE_ENDINGS) and not name.startswith((".", "~", "/")):
        hint = f" (did you mean {near}?)" if near else ""
        return UsageError(f"{name}: neither a file nor a shipped {kind}{hint}; `msa-lite recipes list` prints those")
    place = Path(os.path.abspath(path.parent))
    if not place.is_dir():
        return UsageError(f"no such file: {name} (there is no folder {place})")
    beside = sorted(file.name for file in place.iterdir() if file.name.endswith(RECIPE_ENDINGS))
    hint = f"did you mean {near}?" if (near := _near(path.name, beside) or near) else "no recipe there has such a name"
    return UsageError(f"no such file: {name} (looked in the folder {place}); {hint}")


def _near(name: str, choices: Iterable[str]) -> str:
    """Return the choices that are most like a name, or begin with it, as a list for a message."""
    choices = [*choices]
    near = difflib.get_close_matches(name, choices, n=_MOST) or [
        choice for choice in choices if choice.startswith(name)
    ]
    return " or ".join(f"'{choice}'" for choice in near[:_MOST])


def shipped_tables() -> list[str]:
    """Return the names of the tables that come with the package."""
    return [name.removeprefix(TABLES) for name in shipped_recipes() if name.startswith(TABLES)]


def title_of(path: Path) -> str:
    """Return the first comment line of a recipe file, which says what it is for."""
    first = read_text(path).partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def check_new_file(path: Path) -> None:
    """Raise UsageError or OutputError unless a recipe can be written to this new file."""
    if path.suffix not in RECIPE_ENDINGS:
        raise UsageError(f"{path}: a recipe's file ends in .yaml, as {path.name or 'my-request'}.yaml")
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; name the file to write")
    if path.exists():
        raise OutputError(f"{path} already exists; name another file, or remove it")
    if not path.parent.exists():
        raise UsageError(f"{path}: there is no folder {path.parent}; make it, or name another place")
    check_writable(path)


def recipe_schema(kind: RecipeKind) -> str:
    """Return the JSON schema of a kind of recipe."""
    return indented_json(json_schema(_KINDS[kind]))


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
