"""Relative paths in a recipe file: seen from the recipe's folder where they exist there, else from the working folder.

A recipe and what lies beside it can so be moved, and run from anywhere. Only files have a folder; a mapping of Python
and `key=value` on the command line are seen from the working folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from msa_lite.io.progress import notices

# Keys whose texts may name a folder or file on this machine. `output` is none: results go to the working folder.
_KEYS = {"target", "prior", "ideal", "tokenizer", "checkpoint", "model", "path", "data"}
_LIKE_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# What makes a folder of the name of a Hub repository a model or data set of one's own, not a folder that merely has
# that name.
_MODEL_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")
_DATA = {"path", "data"}


def resolve_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recipe's values with full paths for what lies beside the recipe, in `folder`.

    What was found there and not where the name alone would lead to is logged, in one line.
    """
    found: list[str] = []

    def resolve(where: str, key: str, text: str) -> str:
        place = folder / text
        if Path(text).expanduser().is_absolute() or not _is_there(place, key, text):
            return text
        found.append(f"{text} ({where})")
        return os.path.abspath(place)

    if os.path.realpath(folder) == os.path.realpath(Path.cwd()):
        return dict(values)
    resolved: dict[str, Any] = _walk(values, resolve)
    if found:
        notices.info("taken from the recipe's folder %s: %s", os.path.abspath(folder), ", ".join(found))
    return resolved


def absolute_paths(values: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Return a recipe's values with full paths for what lies on this machine, but not in the run's own folder."""

    def resolve(where: str, key: str, text: str) -> str:
        place = Path(os.path.abspath(Path(text).expanduser()))
        own = Path(os.path.abspath(output.expanduser()))
        return text if not place.exists() or own in (place, *place.parents) else str(place)

    resolved: dict[str, Any] = _walk(values, resolve)
    return resolved


def path_texts(values: Any) -> list[tuple[str, str]]:
    """Return the texts of a recipe that may be paths, each with its dotted key."""
    found: list[tuple[str, str]] = []

    def note(where: str, key: str, text: str) -> str:
        found.append((where, text))
        return text

    _walk(values, note, also={"output"})
    return found


def _walk(
    value: Any,
    change: Callable[[str, str, str], str],
    where: str = "",
    key: str = "",
    also: Collection[str] = (),
) -> Any:
    """Return `value` with every text that may be a path changed; where: its dotted path, key: the last of its keys.

    also: keys that count as those of paths beside the usual ones.
    """
    if isinstance(value, Mapping):
        return {k: _walk(v, change, f"{where}.{k}" if where else str(k), str(k), also) for k, v in value.items()}
    if isinstance(value, list):
        return [_walk(item, change, f"{where}.{number}", key, also) for number, item in enumerate(value)]
    names = isinstance(value, str) and value and (key in _KEYS or key in also)
    return change(where, key, value) if names else value


def _is_there(place: Path, key: str, text: str) -> bool:
    """Check whether a name stands for what lies at `place`; one that could be the Hub's needs more than the name."""
    if not place.exists():
        return False
    if place.is_file() or not _LIKE_HUB.fullmatch(text):
        return True
    return any(place.iterdir()) if key in _DATA else any((place / name).is_file() for name in _MODEL_FILES)
