"""Stage folders that are complete when they exist, and the manifest that says what made them.

A stage writes into `NAME.partial`, puts `manifest.json` there last and renames the folder. A killed stage leaves at
most a `.partial` folder, which the next run takes up or throws away; it never leaves a half-written `NAME`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from msa_lite.errors import MsaError, OutputError

MANIFEST = "manifest.json"
_MARKER = ".msa-lite-partial.json"


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no blanks: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """SHA-256 (hex) of a JSON-able value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _hash(stream)


def _hash(stream: Any) -> str:  # Python 3.10 has no hashlib.file_digest
    state = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        state.update(chunk)
    return state.hexdigest()


def list_files(folder: Path) -> list[Path]:
    """All files below a folder, sorted, without the manifest and the marker of a partial folder."""
    skip = {MANIFEST, _MARKER}
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in skip)


def software_versions() -> dict[str, str]:
    """Versions of msa-lite and of the packages that decide the numbers."""
    names = ("msa-lite", "torch", "transformers", "peft", "safetensors", "numpy", "datasets")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file by way of a temporary one, so that it is there whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def load_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage folder, or None where there is none that can be read."""
    try:
        value = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and value.get("made_by") == "msa-lite" else None


def is_finished(folder: Path, inputs: dict[str, Any]) -> bool:
    """True when `folder` was made from exactly these inputs and every file still has its recorded size."""
    manifest = load_manifest(folder)
    if manifest is None or manifest["inputs"] != json.loads(canonical_json(inputs)):
        return False
    sizes = {name: item["bytes"] for name, item in manifest["files"].items()}
    return all((folder / n).is_file() and (folder / n).stat().st_size == size for n, size in sizes.items())


def check_free(folder: Path, kind: str) -> None:
    """Raise OutputError unless `folder` is absent, empty, or was made by msa-lite as the same kind of folder.

    Only the last may be replaced: an evaluation never takes the place of a model.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: a file is in the way; choose another output folder")
    if folder.is_dir() and any(folder.iterdir()):
        found = (load_manifest(folder) or {}).get("kind", "something that msa-lite did not make")
        if found != kind:
            raise OutputError(f"{folder}: holds {found}, where {kind} should go; choose another output folder")


def check_space(folder: Path, needed: int) -> None:
    """Raise OutputError when `folder` cannot be made, or its disk has fewer than `needed` bytes free."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise OutputError(f"{folder}: {place} is no folder that can be written to; choose another output folder")
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OutputError(
            f"{folder}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free on that disk; "
            "make room or choose another output folder"
        )


def discarded(error: MsaError) -> MsaError:
    """Mark an error after which a stage's partial folder is worth nothing and is removed."""
    error.keeps_partial = False
    return error


@contextmanager
def stage_folder(
    folder: Path, kind: str, inputs: dict[str, Any], facts: dict[str, Any] | None = None, resumable: bool = False
) -> Iterator[Path]:
    """Build `folder` as `folder.partial`; on leaving the block, write the manifest and rename.

    kind: what the folder is ("vector", "model", …); inputs: what it was made from, compared by `is_finished`;
    facts: further things to record, which the block may fill. When the block raises, the partial folder is removed,
    or, for a resumable stage, kept (unless the error was marked by `discarded`) and handed out again with its content
    when the same inputs come back.
    """
    folder = Path(os.path.abspath(folder))  # a folder such as "." has a name only then
    check_free(folder, kind)
    partial = folder.with_name(folder.name + ".partial")
    marker = partial / _MARKER
    fingerprint = {"kind": kind, "inputs": digest(inputs)}
    if partial.exists():
        if any(partial.iterdir()) and not marker.is_file():
            raise OutputError(f"{partial}: is in the way and was not made by msa-lite; move it elsewhere")
        if not marker.is_file() or json.loads(marker.read_text() or "null") != fingerprint:
            shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    write_json(marker, fingerprint)
    try:
        yield partial
    except BaseException as error:
        if not (resumable and getattr(error, "keeps_partial", True)):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    files = {
        str(p.relative_to(partial)): {"sha256": hash_file(p), "bytes": p.stat().st_size} for p in list_files(partial)
    }
    write_json(
        partial / MANIFEST,
        {
            "made_by": "msa-lite",
            "kind": kind,
            "inputs": inputs,
            **(facts or {}),
            "files": files,
            "versions": software_versions(),
        },
    )
    _apply_umask(partial)
    # The marker goes last: a kill at any moment leaves what the next run knows as its own. The old folder is moved
    # aside first, since removing it may take seconds.
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(partial, folder)
    (folder / _MARKER).unlink()
    shutil.rmtree(replaced, ignore_errors=True)


def _apply_umask(folder: Path) -> None:
    """Give files the usual permissions; the safetensors library makes them readable by their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def verify_folder(folder: Path) -> list[str]:
    """Re-hash a folder against its manifest; a list of faults, empty when all is as it was written.

    Raises OutputError when the folder has no manifest of msa-lite.
    """
    manifest = load_manifest(folder)
    if manifest is None:
        raise OutputError(f"{folder}: no {MANIFEST} of msa-lite in there")
    faults = []
    for name, item in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{name}: missing")
        elif path.stat().st_size != item["bytes"]:
            faults.append(f"{name}: {path.stat().st_size} bytes, recorded were {item['bytes']}")
        elif hash_file(path) != item["sha256"]:
            faults.append(f"{name}: content changed")
    known = set(manifest["files"])
    faults += [
        f"{n}: not in the manifest" for p in list_files(folder) if (n := str(p.relative_to(folder))) not in known
    ]
    return faults
