"""Check whether a stage's folder is finished, and say why it is not. Nothing is written."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msa_lite.io.files import canonical_json
from msa_lite.io.seal import CARD_FILE, entries, load_manifest

_HASH = re.compile(r"(?:\w+:)?[0-9a-f]{40,64}")
_LONGEST = 60  # characters of a value in a reason


def why_unfinished(folder: Path, inputs: Mapping[str, Any]) -> list[str]:
    """Return why a folder was not made from exactly these inputs, or is not whole; nothing if it is finished.

    Every file has to have its recorded size. The card does not count: people edit cards, and a model need not be merged
    again for that.
    """
    manifest = load_manifest(folder)
    if manifest is None:
        return ["it is not there yet"]
    now = json.loads(canonical_json(inputs))
    if manifest["inputs"] != now:
        return list(differences(manifest["inputs"], now))
    try:
        files = entries(folder)
    except OSError:
        return ["its files cannot be listed"]
    sizes = {name: item["bytes"] for name, item in manifest["files"].items() if name != CARD_FILE}
    changed = [name for name, size in sizes.items() if name not in files or not _has_size(files[name], size)]
    return [f"{name}: missing, or not as written" for name in changed]


def differences(before: Any, now: Any) -> Iterator[str]:
    """Yield `settings.epochs: 5 → 7` for each value that differs; of a hash, and of anything long, only its key."""
    old, new = dict(leaves(before)), dict(leaves(now))
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) == new.get(key):
            continue
        values = [_shown(side[key]) if key in side else "none" for side in (old, new)]
        yield f"{key}: {' → '.join(values)}" if None not in values else f"{key} changed"  # type: ignore[arg-type]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, each with its dotted key."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from leaves(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _shown(value: Any) -> str | None:
    """Return a value as a reason shows it; None for one that tells a reader nothing."""
    text = "none" if value is None else str(value)
    return None if _HASH.fullmatch(text) or len(text) > _LONGEST else text


def _has_size(path: Path, size: int) -> bool:
    """Check whether a path is a regular file of so many bytes."""
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size
