"""Resolve relative paths in a recipe file: from the recipe's folder if they exist there, else from the working folder.

So a recipe can be moved together with the files beside it, and run from anywhere. Paths in a Python mapping, and in
`key=value` on the command line, start from the working folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from msa_lite.io.progress import notices

# Keys whose texts may name a folder or file on this machine. `output` is none: results go to the working folder.
_KEYS = {"target", "prior", "ideal", "tokenizer", "checkpoint", "model", "path", "data", "earlier"}
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

    if os.path.realpath(folder) == os.path.realpath(Path.cwd()):
        return dict(values)
    resolved: dict[str, Any] = _walk(values, resolve)
    if resolved_here:
        notices.info("taken from the recipe's folder %s: %s", os.path.abspath(folder), ", ".join(resolved_here))
    return resolved


def absolute_paths(values: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Return a recipe's values with full paths for files on this machine, except in the run's own folder."""

    def resolve(where: str, key: str, text: str) -> str:
        place = Path(os.path.abspath(Path(text).expanduser()))
        own = Path(os.path.abspath(output.expanduser()))
        return text if not place.exists() or own in (place, *place.parents) else str(place)

    resolved: dict[str, Any] = _walk(values, resolve)
    return resolved


def given_paths(values: Mapping[str, Any], output: Path) -> dict[str, str]:
    """Return the texts of a recipe's paths by the full paths that `absolute_paths` makes of them."""
    full = path_texts(absolute_paths(values, output))
    return {path: text for (_, path), (_, text) in zip(full, path_texts(values), strict=True) if path != text}


def relative_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recipe's values with relative paths of the working folder's files as they lead from `folder`."""

    def resolve(where: str, key: str, text: str) -> str:
        stays = Path(text).expanduser().is_absolute() or not os.path.exists(text)
        return text if stays else os.path.relpath(text, folder)

    if os.path.realpath(folder) == os.path.realpath(Path.cwd()):
        return dict(values)
    resolved: dict[str, Any] = _walk(values, resolve)
    return resolved


def moved_paths(values: Mapping[str, Any], before: str, after: Path) -> dict[str, Any]:
    """Return a recipe's values with the paths below the folder `before` as they are now that it is `after`."""

    def resolve(where: str, key: str, text: str) -> str:
        return str(after / text[len(before) + 1 :]) if text.startswith(f"{before}/") else text

    moved: dict[str, Any] = _walk(values, resolve)
    return moved | {"output": str(after)}


def path_texts(values: Any) -> list[tuple[str, str]]:
    """Return the texts of a recipe that may be paths, each with its dotted key."""
    texts: list[tuple[str, str]] = []

    def note(where: str, key: str, text: str) -> str:
        texts.append((where, text))
        return text

    _walk(values, note, also={"output"})
    return texts


def _walk(
    value: Any,
    change: Callable[[str, str, str], str],
    where: str = "",
    key: str = "",
    also: Collection[str] = (),
) -> Any:
    """Return `value` with every text that may be a path changed by `change`, which gets dotted key, last key and text.

    also: keys of paths beside the usual ones.
    """
    if isinstance(value, Mapping):
        return {k: _walk(v, change, f"{where}.{k}" if where else str(k), str(k), also) for k, v in value.items()}
    if isinstance(value, list):
        return [_walk(item, change, f"{where}.{number}", key, also) for number, item in enumerate(value)]
    names = isinstance(value, str) and value and (key in _KEYS or key in also)
    return change(where, key, value) if names else value


def _is_there(place: Path, key: str, text: str) -> bool:
    """Check whether a name means the file or folder at `place`. For a name like a Hub id, look into the folder too."""
    if not place.exists():
        return False
    if place.is_file() or not _LIKE_HUB.fullmatch(text):
        return True
    return any(place.iterdir()) if key in _DATA else any((place / name).is_file() for name in _MODEL_FILES)
