"""Stage folders that are complete when they exist, and the manifest that says what made them.

A stage writes into `NAME.partial`, puts `manifest.json` there last, has it all written to disk and renames the
folder. A killed stage leaves at most a `.partial` folder, which the next run takes up or throws away; it never leaves a
half-written `NAME`. A lock in the partial folder keeps a second process from working on it.

A folder that is there already stays until the new one is whole. Then it is `NAME.previous`, until the new one has been
read back and agrees with its manifest. A kill in between leaves both, or the former alone under that name; the next run
checks the new one and removes the former, or puts it back.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from msa_lite.errors import MsaError, OutputError, StageError, join_faults
from msa_lite.io.disk import is_disk_full
from msa_lite.io.progress import readable

MANIFEST = "manifest.json"
JOURNAL = ".journal.jsonl"
_MARKER = ".msa-lite-partial.json"
_LOCK = ".lock"
_REPLACED = ".replaced"  # tells a folder that a new one takes the place of from a copy that a user has made
# What a stage needs while it works, and no part of what it makes.
_WORKING = frozenset({JOURNAL, _MARKER, f"{_MARKER}.tmp", _LOCK, _REPLACED})


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
    """All files below a folder, sorted, without its manifest and what a stage needs only while it works."""
    skip = {MANIFEST, *_WORKING}
    return sorted(p for p in folder.rglob("*") if p.is_file() and skip.isdisjoint(p.relative_to(folder).parts))


def software_versions() -> dict[str, str]:
    """Versions of msa-lite and of the packages that decide the numbers."""
    names = ("msa-lite", "torch", "transformers", "peft", "safetensors", "numpy", "ml-dtypes", "datasets")
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
    if not all((folder / n).is_file() and (folder / n).stat().st_size == size for n, size in sizes.items()):
        return False
    if (previous_folder(folder) / _REPLACED).exists():  # a kill came before the new one was checked
        if verify_folder(folder):
            return False
        with suppress(OSError):  # as in `_sweep`
            _remove_previous(folder)
    _sweep(folder)
    return True


def check_free(folder: Path, kind: str) -> None:
    """Raise OutputError unless `folder` is absent, empty, or was made by msa-lite as the same kind of folder.

    Only the last may be replaced: an evaluation never takes the place of a model.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: a file is in the way; choose another output folder")
    if os.path.ismount(folder):  # nothing can be renamed to it
        raise OutputError(f"{folder}: is where a disk is mounted; choose a folder inside it, as {folder / kind}")
    if folder.is_dir() and any(folder.iterdir()):
        found = (load_manifest(folder) or {}).get("kind", "something that msa-lite did not make")
        if found != kind:
            raise OutputError(f"{folder}: holds {found}, where {kind} should go; choose another output folder")


def check_space(folder: Path, needed: int) -> None:
    """Raise OutputError when `folder` cannot be made, or its disk has fewer than `needed` bytes free."""
    place = Path(os.path.realpath(folder)).parent
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise OutputError(f"{folder}: {place} is no folder that can be written to; choose another output folder")
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OutputError(
            f"{folder}: {readable(needed)} are needed, {readable(free)} are free on that disk; make room or choose "
            "another output folder"
        )


def partial_folder(folder: Path) -> Path:
    """Where `stage_folder` builds a folder: beside it; beside what it points to where it is a link."""
    folder = Path(os.path.realpath(folder))  # which also gives a folder such as "." a name
    return folder.with_name(folder.name + ".partial")


def previous_folder(folder: Path) -> Path:
    """Return the place of a folder's former content while a new one takes its name."""
    folder = Path(os.path.realpath(folder))
    return folder.with_name(folder.name + ".previous")


@contextmanager
def disk_faults(folder: Path, needed: int) -> Iterator[None]:
    """Turn what the disk reports while `folder` is made, out of `needed` bytes, into a StageError with what to do."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(partial_folder(folder).parent).free
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = f"{error.filename} was read" if error.filename else "it was written"
        raise StageError(
            f"{folder}: {error.strerror or error} while {what}; its weights need {needed} bytes, {free} are free. "
            f"{'Make room and run' if full else 'Run'} the same command again; finished shards stay"
        ) from error


def discarded(error: MsaError) -> MsaError:
    """Mark an error after which a stage's partial folder is worth nothing and is removed."""
    error.keeps_partial = False
    return error


@contextmanager
def stage_folder(
    folder: Path,
    kind: str,
    inputs: dict[str, Any],
    facts: dict[str, Any] | None = None,
    resumable: bool = False,
    hashes: dict[str, str] | None = None,
    check: Callable[[], None] | None = None,
    resume_key: Any = None,
) -> Iterator[Path]:
    """Build `folder` as `folder.partial`; on leaving the block, write the manifest and rename.

    kind: what the folder is ("vector", "model", …); inputs: what it was made from, compared by `is_finished`;
    facts: further things to record, which the block may fill, as it may `hashes`: SHA-256 of files by name, known
    from writing them. When the block raises, the partial folder is removed, or, for a resumable stage, kept (unless
    the error was marked by `discarded`) and handed out again with its content when the same inputs come back.
    resume_key: what has to be equal for that in the place of all inputs, where only a part of them decides the costly
    work. check: called once nobody else can build the folder any more, to raise what forbids it now. Raises OutputError
    when another process is building the same folder, StageError in the place of a library's error of a full disk.
    """
    folder, partial = Path(os.path.realpath(folder)), partial_folder(folder)
    check_free(folder, kind)
    with _locked(partial):
        try:
            _settle_previous(folder)
            if check:
                check()
        except BaseException:
            if [path.name for path in partial.iterdir()] == [_LOCK]:  # made just now
                shutil.rmtree(partial)
            raise
        _claim(partial, {"kind": kind, "inputs": digest(inputs if resume_key is None else resume_key)})
        try:
            yield partial
        except BaseException as error:
            free = shutil.disk_usage(partial).free
            if not (resumable and getattr(error, "keeps_partial", True)):
                shutil.rmtree(partial, ignore_errors=True)
            # The system's own errors say enough, and whoever writes may add to them; a library's are told in our words.
            if isinstance(error, Exception) and not isinstance(error, MsaError | OSError) and is_disk_full(error):
                raise StageError(
                    f"{folder}: the disk is full ({readable(free)} free); make room and run the same command again; "
                    "finished stages stay"
                ) from error
            raise
        known = hashes or {}
        files = {
            name: {"sha256": known.get(name) or hash_file(path), "bytes": path.stat().st_size}
            for path in list_files(partial)
            for name in [str(path.relative_to(partial))]
        }
        manifest = {"made_by": "msa-lite", "kind": kind, "inputs": inputs, **(facts or {}), "files": files}
        write_json(partial / MANIFEST, {**manifest, "versions": software_versions()})
        _apply_umask(partial)
        _put_in_place(partial, folder)


def add_files(folder: Path, names: Sequence[str], facts: dict[str, Any]) -> None:
    """Enter files that were put into a finished folder, and further facts, into its manifest."""
    manifest = load_manifest(folder)
    assert manifest is not None, "the folder is finished"
    manifest["files"] |= {n: {"sha256": hash_file(folder / n), "bytes": (folder / n).stat().st_size} for n in names}
    write_json(folder / MANIFEST, {**manifest, **facts})


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Make a partial folder and hold its lock, which goes where the folder goes."""
    from filelock import FileLock, Timeout

    if partial.exists() and not partial.is_dir():
        raise OutputError(f"{partial}: a file is in the way; move it elsewhere")
    partial.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in partial.iterdir()}
    if _MARKER not in names and not names <= _WORKING:
        raise OutputError(f"{partial}: is in the way and was not made by msa-lite; move it elsewhere")
    lock = FileLock(partial / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise OutputError(f"{partial}: another msa-lite is writing it; wait until it is done") from error
    try:
        yield
    finally:
        lock.release()


def _claim(partial: Path, fingerprint: dict[str, str]) -> None:
    """Empty a partial folder that was made from other inputs, and mark it with these."""
    marker = partial / _MARKER
    try:
        same = json.loads(marker.read_text()) == fingerprint
    except (OSError, ValueError):
        same = False
    for path in partial.rglob("*.tmp") if same else partial.iterdir():  # the former are of a kill within `write_text`
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (_LOCK, _MARKER):  # a kill while this goes on must leave the folder known as ours
            path.unlink()
    write_json(marker, fingerprint)


def _put_in_place(partial: Path, folder: Path) -> None:
    """Write everything through to the disk, then rename; check what takes the place of something before that goes.

    A kill at any moment leaves what the next run knows as its own: the marker goes with the folder.
    """
    for path in [*partial.rglob("*"), partial]:
        if not path.is_symlink():
            sync(path)
    previous = previous_folder(folder)
    if folder.exists():
        (folder / _REPLACED).touch()
        os.rename(folder, previous)
    os.rename(partial, folder)
    sync(folder.parent)
    if faults := _settle_previous(folder):
        what = f"{folder}: what was read back is not what was written, so the former one stays; check the disk:"
        raise StageError(join_faults(what, faults))
    _sweep(folder)


def _settle_previous(folder: Path) -> list[str]:
    """End a replacement: remove the former folder where the new one is as it was written, else put it back.

    Returns what is wrong with the new one. Raises OutputError where something of the user's has the former's name.
    """
    previous = previous_folder(folder)
    if not previous.exists():
        return []
    if not (previous / _REPLACED).exists():
        if folder.exists():
            raise OutputError(f"{previous}: is in the way, as {folder.name} is to be replaced; move it elsewhere")
        return []
    faults = verify_folder(folder) if load_manifest(folder) else ["it is not there"]
    if not faults:
        _remove_previous(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(previous, folder)
        (folder / _REPLACED).unlink()
    return faults


def _remove_previous(folder: Path) -> None:
    """Remove the former folder; its mark goes last, so that a kill meanwhile leaves it known as ours."""
    previous = previous_folder(folder)
    for path in previous.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _REPLACED:
            path.unlink()
    shutil.rmtree(previous)


def _sweep(folder: Path) -> None:
    """Remove what a stage needed while it worked from its finished folder."""
    for path in [folder / name for name in _WORKING if (folder / name).is_file()]:
        with suppress(OSError):  # of somebody else, or on a disk that cannot be written to: it does no harm there
            path.unlink()


def sync(path: Path) -> None:
    """Have a file or a folder's list of names written through to the disk, as far as the system can."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _apply_umask(folder: Path) -> None:
    """Give files the usual permissions; the safetensors library makes them readable by their owner alone."""
    mask = _umask()
    for path in [*list_files(folder), folder / MANIFEST]:
        path.chmod(0o666 & ~mask)


def _umask() -> int:
    """The process's umask; to ask for it in the usual way means to change it for a moment, for all threads."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)
    except (OSError, StopIteration, ValueError):
        mask = os.umask(0)
        os.umask(mask)
        return mask


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
