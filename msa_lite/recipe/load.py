"""Find, read, override, check and write recipes. One error names every fault with the path of its key."""

from __future__ import annotations

import math
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, Tag, ValidationError

from msa_lite.errors import RecipeError, UsageError, join_faults, nearest
from msa_lite.io.console.progress import notices
from msa_lite.io.files.addresses import check_secrets
from msa_lite.io.files.reading import PlainDumper, local_path, parse_yaml, read_text, read_yaml
from msa_lite.io.files.schema import schema_fields
from msa_lite.recipe.files import (
    TABLES,
    check_new_file,
    find_recipe,
    missing_recipe,
    shipped_recipes,
    shipped_tables,
    write_with_schema,
)
from msa_lite.recipe.schema import Recipe
from msa_lite.recipe.table import TableRecipe
from msa_lite.recipe.training import TrainingRecipe
from msa_lite.recipe.words import key_hint

PathValue = TypeVar("PathValue")


# Keys whose texts may name a folder or file on this machine. `output` is none: results go to the working folder.
_KEYS = {
    "recipe", "target", "prior", "ideal", "tokenizer", "checkpoint", "model", "path", "data", "earlier", "prompts",
}  # fmt: skip
_NO_PATH = "demo.model"  # a word, whatever folder has its name
_LIKE_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# What makes a folder of the name of a Hub repository a model or data set of one's own, not a folder that merely has
# that name.
_MODEL_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")
_DATA = {"path", "data", "earlier"}  # any folder that is not empty


def resolve_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recipe's values with paths from the working folder for files beside the recipe, in `folder`.

    The paths stay relative, since a report shows them, and goes by mail. One log line names those that lead there.
    """
    resolved_here: list[str] = []

    def resolve(where: str, key: str, text: str) -> str:
        place = folder / text
        if Path(text).expanduser().is_absolute() or not _is_there(place, key, text):
            return text
        resolved_here.append(f"{text} ({where})")
        return os.path.relpath(place)

    if _is_working_folder(folder):
        return dict(values)
    resolved = _walk(dict(values), resolve)
    if resolved_here:
        notices.info("taken from the recipe's folder %s: %s", os.path.abspath(folder), ", ".join(resolved_here))
    return resolved


def _is_working_folder(folder: Path) -> bool:
    return os.path.realpath(folder) == os.path.realpath(Path.cwd())


def absolute_paths(values: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Return a recipe's values with full paths for files on this machine, except in the run's own folder."""

    def resolve(where: str, key: str, text: str) -> str:
        place = Path(os.path.abspath(Path(text).expanduser()))
        run = Path(os.path.abspath(output.expanduser()))
        return text if not place.exists() or run in (place, *place.parents) else str(place)

    return _walk(dict(values), resolve)


def given_paths(values: Mapping[str, Any], output: Path) -> dict[str, str]:
    """Return the texts of a recipe's paths by the full paths that `absolute_paths` makes of them."""
    full = path_texts(absolute_paths(values, output))
    return {path: text for (_, path), (_, text) in zip(full, path_texts(values), strict=True) if path != text}


def relative_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recipe's values with relative paths of the working folder's files as they lead from `folder`."""

    def resolve(where: str, key: str, text: str) -> str:
        stays = Path(text).expanduser().is_absolute() or not os.path.exists(text)
        return text if stays else os.path.relpath(text, folder)

    return dict(values) if _is_working_folder(folder) else _walk(dict(values), resolve)


def moved_paths(values: Mapping[str, Any], before: str, after: Path) -> dict[str, Any]:
    """Return a recipe's values with the paths below the folder `before` as they are now that it is `after`."""

    def resolve(where: str, key: str, text: str) -> str:
        return str(after / text[len(before) + 1 :]) if text.startswith(f"{before}/") else text

    return _walk(dict(values), resolve) | {"output": str(after)}


def path_texts(values: Any) -> list[tuple[str, str]]:
    """Return the texts of a recipe that may be paths, each with its dotted key."""
    texts: list[tuple[str, str]] = []

    def note(where: str, key: str, text: str) -> str:
        texts.append((where, text))
        return text

    _walk(values, note, also={"output"})
    return texts


def _walk(
    value: PathValue, change: Callable[[str, str, str], str], where: str = "", key: str = "", also: Collection[str] = ()
) -> PathValue:
    """Return `value` with every text that may be a path changed by `change`, which gets dotted key, last key and text.

    also: keys of paths beside the usual ones.
    """
    changed: Any = value
    if isinstance(value, Mapping):
        changed = {k: _walk(v, change, f"{where}.{k}" if where else str(k), str(k), also) for k, v in value.items()}
    elif isinstance(value, list):
        changed = [_walk(item, change, f"{where}.{number}", key, also) for number, item in enumerate(value)]
    elif isinstance(value, str) and value and (key in _KEYS or key in also) and where != _NO_PATH:
        changed = change(where, key, value)
    return changed


def _is_there(place: Path, key: str, text: str) -> bool:
    """Check whether a name means the file or folder at `place`. For a name like a Hub id, look into the folder too."""
    if not place.exists():
        return False
    if place.is_file() or not _LIKE_HUB.fullmatch(text):
        return True
    return any(place.iterdir()) if key in _DATA else any((place / name).is_file() for name in _MODEL_FILES)


OUTPUT_VARIABLE = "$output"
_SHOWN = 200  # characters of a value in a message

RecipeSource = Recipe | TrainingRecipe | str | Path | Mapping[str, Any]
"""A recipe, a file, the name of a shipped recipe, or a mapping."""
TableSource = TableRecipe | str | Path | Mapping[str, Any]
"""A table, a file, the name of a shipped table, or a mapping."""
M = TypeVar("M", bound=BaseModel)


def load_recipe(source: RecipeSource, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a YAML file, the name of a shipped recipe, a mapping or a recipe; then apply `key.sub=value`.

    `$output` at the start of a path stands for the run's folder. Relative paths in a file start from its folder if they
    exist there, else from the working folder. Those in a mapping and in overrides start from the working folder. Raise
    RecipeError with one line for each fault, and UsageError for a missing file or a recipe of the other kind.
    """
    return _load(Recipe, source, overrides)


def load_training(source: RecipeSource, overrides: Iterable[str] = ()) -> TrainingRecipe:
    """Read a recipe of a training in stages, as `load_recipe` reads that of a run."""
    return _load(TrainingRecipe, source, overrides)


def load_table_recipe(source: TableSource, overrides: Iterable[str] = ()) -> TableRecipe:
    """Read a table from a YAML file, the name of a shipped table, a mapping or a table, as `load_recipe` does.

    Raise UsageError for an unknown name, with the nearest and the list.
    """
    if isinstance(source, str | Path) and not local_path(str(source)).is_file():
        key, names = str(source).removeprefix(TABLES), shipped_tables()
        if key not in names:
            raise missing_recipe(str(source), key, names, "table")
        source = f"{TABLES}{key}"
    return _load(TableRecipe, source, overrides)


def load_any(source: RecipeSource, overrides: Iterable[str] = ()) -> Recipe | TrainingRecipe | TableRecipe:
    """Read a recipe of any kind."""
    name, values = _read(source, overrides)
    return _validate(_kind(name, values) or Recipe, name, values)


def copy_recipe(name: str, file: str) -> tuple[Path, Path]:
    """Copy a shipped recipe, with its comments, to a new file; return the file, and that of its schema for editors.

    The copy means the same as the original: the relative paths of both start from the working folder. Raise as
    `check_new_file`, and UsageError for a recipe that is not shipped.
    """
    shipped, path = find_recipe(name), local_path(file)
    if shipped not in shipped_recipes().values():
        raise UsageError(f"{name}: is a file of your own, not a shipped recipe; `cp` copies it")
    check_new_file(path)
    return path, write_with_schema(path, read_text(shipped), load_any(name))


def _read(source: RecipeSource | TableRecipe, overrides: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """Return the name of a recipe for messages, and its keys and values."""
    name, overrides = "recipe", list(overrides)
    check_secrets(overrides)
    if isinstance(source, Recipe | TrainingRecipe | TableRecipe):
        source = source.model_dump(mode="json")
    if isinstance(source, Mapping):
        values: Any = dict(source)
        check_secrets(values, RecipeError, name)
    else:
        path = find_recipe(str(source))
        name = str(path)
        values = read_yaml(path, RecipeError)
        if not isinstance(values, dict):
            kind = "is empty" if values is None else f"is a {type(values).__name__}"
            raise RecipeError(f"{path}: a recipe is a mapping of keys to values; this file {kind}")
        _check_paths(values, name)
        if local_path(str(source)).is_file():  # what a shipped one names does not lie beside it
            values = resolve_paths(values, path.parent)
    for override in overrides:
        values = set_key(values, override)
    _check_paths({"output": values.get("output")}, name)  # alone: other paths may begin with it
    filled = _fill_output(values, values.get("output"))
    _check_paths(filled, name)
    return name, filled


def _check_paths(values: Any, name: str) -> None:
    """Raise RecipeError for texts that stand for paths and cannot be paths; later uses are then safe."""
    faults = []
    for where, text in path_texts(values):
        try:
            local_path(text)
        except UsageError as error:
            faults.append(f"{where}: {error}")
    if faults:
        raise RecipeError(join_faults(f"{name}: these cannot be paths:", faults))


def _kind(name: str, values: Mapping[str, Any]) -> type[Recipe] | type[TrainingRecipe] | type[TableRecipe] | None:
    """Return the kind of a recipe by its keys; None if they do not tell. Raise UsageError for another tool's file."""
    if values.keys() & {"msa", "methods", "recipe"}:
        return TableRecipe
    if values.keys() & {"target", "prior", "forget"}:
        return Recipe
    if values.keys() & {"base_model", "model_name_or_path"}:
        raise UsageError(f"{name}: is a training's configuration; `msa-lite init --from` makes a recipe from it")
    return TrainingRecipe if values.keys() & {"model", "stages"} else None


def _load(kind: type[M], source: RecipeSource | TableSource, overrides: Iterable[str]) -> M:
    """Read a recipe of one kind. Raise UsageError for one of another kind."""
    name, values = _read(source, overrides)
    actual = _kind(name, values)
    if actual in (None, kind):
        return _validate(kind, name, values)
    kinds = {Recipe: ("an unlearning run", "run"), TableRecipe: ("a table", "table")}
    what, command = kinds.get(actual, ("a training in stages", "train"))
    raise UsageError(f"{name}: is the recipe of {what}; `msa-lite {command}` takes it")


def _validate(kind: type[M], name: str, values: Mapping[str, Any]) -> M:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = _explain(error, kind)
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise RecipeError(join_faults(f"{name}: {count}:", faults, limit=50)) from error


_DEEPEST = 20  # dots in a key


def set_key(values: dict[str, Any], override: str) -> dict[str, Any]:
    """Return the values of a recipe with one key changed, as `key.sub=value`. Raise UsageError for another form."""
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise UsageError(f"'{override}': an override is key.sub=value")
    if key.count(".") > _DEEPEST:
        raise UsageError(f"'{override[:80]}…': {key.count('.') + 1} parts; no key of a recipe is so deep")
    value = parse_yaml(text, f"'{override}'", UsageError)
    return typing.cast("dict[str, Any]", _put(values, key.split("."), value, override))


def _put(place: Any, keys: Sequence[str], value: Any, override: str) -> Any:
    """Return a copy of `place` (a mapping, a list, or None) with `value` at the end of the keys."""
    if not keys:
        return value
    key, *rest = keys
    if isinstance(place, list):
        if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) >= len(place):
            raise UsageError(f"'{override}': no {key} in a list of {len(place)}, which counts from 0")
        return [_put(item, rest, value, override) if i == int(key) else item for i, item in enumerate(place)]
    if place is not None and not isinstance(place, dict):
        raise UsageError(f"'{override}': {place!r} stands there, which has no key {key}")
    return {**(place or {}), key: _put((place or {}).get(key), rest, value, override)}


def _fill_output(value: Any, output: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fill_output(item, output) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill_output(item, output) for item in value]
    if isinstance(value, str) and isinstance(output, str) and value.startswith(OUTPUT_VARIABLE + "/"):
        return output.rstrip("/") + value.removeprefix(OUTPUT_VARIABLE)
    return value


def _explain(error: ValidationError, kind: type[BaseModel]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for item in error.errors():
        path, beside = _locate(item["loc"], kind)
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            hint = key_hint(path, lambda key: _exists(key, kind))
            text = f"unknown key{hint or nearest(str(item['loc'][-1]), beside)}"
        elif item["type"] == "missing":
            text = text.replace("Field required", "is missing")
        elif not isinstance(item["input"], dict):
            text = f"{text[:1].lower()}{text[1 : 3 * _SHOWN]}, got {_shown(item['input'])}"
        lines.setdefault(path or "recipe", []).append(text)
    # A union reports each of its members; they belong in one line.
    return [f"{path}: {'; or '.join(dict.fromkeys(texts))}" for path, texts in lines.items()]


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        text = f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _locate(location: Sequence[int | str], root: type[BaseModel]) -> tuple[str, Mapping[str, Any]]:
    """Return the dotted path of a fault without the names of union members, and the fields beside its last key."""
    kind: Any = root
    beside: Mapping[str, Any] = {}
    keys: list[str] = []
    for step in location:
        members = dict(type_members(kind))
        if isinstance(step, str) and step in members:
            kind = members[step]
            continue
        beside = next(filter(None, map(schema_fields, members.values())), {})
        holds = dict if isinstance(step, str) else list
        container = next((member for member in members.values() if typing.get_origin(member) is holds), None)
        if beside and isinstance(step, str):
            kind = beside.get(step)
        elif container is not None:
            kind = typing.get_args(container)[-1]
        elif isinstance(step, str):
            continue
        keys.append(str(step))
    return ".".join(keys), beside


def _exists(key: str, kind: type[BaseModel]) -> bool:
    """Check whether recipes of a kind have a key."""
    steps = [int(step) if step.isdigit() else step for step in key.split(".")]
    path, beside = _locate(steps, kind)
    return path == key and steps[-1] in beside


def type_members(annotation: Any, tag: object = None) -> Iterator[tuple[object, Any]]:
    """Give the types of a union, each by its tag, or by itself if it has none."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from type_members(member)
    elif typing.get_origin(annotation) is Annotated:
        kind, *notes = typing.get_args(annotation)
        yield from type_members(kind, next((note.tag for note in notes if isinstance(note, Tag)), None))
    else:
        yield tag or str(annotation), annotation


def dump_recipe(recipe: Recipe | TrainingRecipe | TableRecipe) -> str:
    """Return the YAML of a recipe with every default filled in. Reading it gives an equal recipe."""
    values = recipe.model_dump(mode="json")
    return yaml.dump(values, Dumper=PlainDumper, sort_keys=False, allow_unicode=True, width=math.inf)
