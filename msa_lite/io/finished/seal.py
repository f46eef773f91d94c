"""The seal of a finished folder: manifest and files, is it complete, is it as written, is it locked.

And files that change while they are read: a result of half the old and half the new content looks like any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msa_lite.errors import BusyError, FormatError, OutputError, StageError, discarded, join_faults
from msa_lite.io.files.reading import parse_json, printable, read_bytes, read_object
from msa_lite.io.files.writing import canonical_json, hash_file, indented_json, reachable, write_text

MANIFEST = "manifest.json"
CARD_FILE = "README.md"  # of a model or adapter: its card, which people may edit
MERGEKIT_FILE = "mergekit_config.yml"  # beside a merged model: the same merge as a recipe for mergekit
PUBLISHED = "published"  # true in the manifest that goes to the Hub with a model
JOURNAL = ".journal.jsonl"
MARKER = ".msa-lite-partial.json"
LOST_MARKER = f"{MARKER}.tmp"  # half-written, or of a folder that is being emptied
LOCK = ".lock"
PURGING = ".purge.lock"  # of a run's folder, while its data is removed
REPLACES = ".replaces.json"  # names the folder that a new one takes the place of
# Files that a stage needs while it works; they are no part of its result. The marker is removed last.
WORKING = (LOCK, JOURNAL, REPLACES, f"{REPLACES}.tmp", LOST_MARKER, MARKER)
_OF_HUB = (".gitattributes", ".cache/")  # comes with a download
NOT_OURS = "not as msa-lite wrote it, or of another program"
STRANGE = "not in the manifest"
_BUSY = "another msa-lite is working in it; wait until it is done"
MANIFEST_SEAL = "manifest_sha256"  # of a manifest: the hash of itself
_FORMAT = "format"


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a folder's manifest, whole or not at all, with a seal."""
    write_text(folder / MANIFEST, manifest_text(manifest))


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest's file, with a seal."""
    values = {key: value for key, value in manifest.items() if key not in (_FORMAT, MANIFEST_SEAL)}
    return sealed_json({**values, _FORMAT: 2}, MANIFEST_SEAL)


def sealed_json(values: Mapping[str, Any], key: str) -> str:
    """Write an object as JSON with a seal under `key`, at its end."""
    text = indented_json({**values, key: ""})
    seal = hashlib.sha256(text.encode()).hexdigest()
    return text.removesuffix('"\n}\n') + f'{seal}"\n}}\n'


def is_whole(raw: bytes, key: str) -> bool:
    """Check the text of an object against the seal under `key`."""
    pattern = re.compile(rb'(?<="%s": ")[0-9a-f]{64}(?="\n}\n\Z)' % key.encode())
    seal = pattern.search(raw)
    return seal is not None and hashlib.sha256(pattern.sub(b"", raw)).hexdigest().encode() == seal[0]


def load_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a finished folder; None where there is none, or it is not as it was written."""
    try:
        raw = read_bytes(folder / MANIFEST)
        value = parse_json(raw, MANIFEST)
    except FormatError:
        return None
    return value if is_whole(raw, MANIFEST_SEAL) and _has_form(value) else None


def _has_form(value: Any) -> bool:
    """Check that a manifest names its maker, kind and inputs, and the size and hash of each file."""
    return (
        isinstance(value, dict)
        and value.get("made_by") == "msa-lite"
        and isinstance(value.get("kind"), str)
        and isinstance(value.get("inputs"), dict)
        and isinstance(value.get("files"), dict)
        and all(
            isinstance(item, dict) and isinstance(item.get("sha256"), str) and type(item.get("bytes")) is int
            for item in value["files"].values()
        )
    )


def add_files(folder: Path, names: Sequence[str], facts: Mapping[str, Any]) -> None:
    """Enter files that were put into a finished folder, and further facts, into its manifest."""
    manifest = load_manifest(folder)
    assert manifest is not None, "the folder is finished"
    manifest["files"] |= {name: describe_file(folder / name) for name in names}
    write_manifest(folder, {**manifest, **facts})


def drop_files(folder: Path, names: Collection[str]) -> None:
    """Remove files of a finished folder, then their entries in its manifest. The same call ends one that was killed.

    Only files that lie in the folder are removed, whatever the names say, and no link is followed.
    """
    manifest = load_manifest(folder)
    assert manifest is not None, "the folder is finished"
    remove_leftovers(folder)  # which a new manifest would turn into strange files
    for name, path in entries(folder).items():
        if name in names and name != MANIFEST:
            path.unlink()
    files = {name: item for name, item in manifest["files"].items() if name not in names}
    write_manifest(folder, {**manifest, "files": files})


def remove_ours(folder: Path) -> bool:
    """Remove what a folder's manifest names, the manifest last, and empty folders; return whether that was all."""
    if manifest := load_manifest(folder):
        strange = strange_files(folder, manifest)
        for name, path in entries(folder).items():
            if name != MANIFEST and name not in strange:
                path.unlink()
        (folder / MANIFEST).unlink()
    for place in [*sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True), folder]:
        with suppress(OSError):  # not empty, or a link
            place.rmdir()
    return not os.path.lexists(folder)


def describe_file(path: Path, sha256: str | None = None) -> dict[str, Any]:
    """Return a manifest's entry for a file. sha256: its hash, where it is known."""
    return {"sha256": sha256 or hash_file(path), "bytes": path.stat().st_size}


def entries(folder: Path) -> dict[str, Path]:
    """Return all that is below a folder, except folders, by the name in a manifest: files, links, pipes, …

    Links are not followed. Raise OSError where a folder cannot be read.
    """
    paths, places = {}, [folder]
    while places:
        with os.scandir(places.pop()) as items:
            for item in items:
                if item.is_dir(follow_symlinks=False):
                    places.append(Path(item.path))
                else:
                    paths[printable(Path(item.path).relative_to(folder))] = Path(item.path)
    return dict(sorted(paths.items()))


def holds_leftovers(folder: Path) -> bool:
    """Check whether a finished folder still holds its working files, because a kill came before they were removed."""
    try:
        return read_object(folder / MARKER).get("done") == hash_file(folder / MANIFEST)
    except FormatError:
        return False


def remove_leftovers(folder: Path) -> None:
    """Remove the working files that a kill left in a finished folder."""
    if holds_leftovers(folder):
        for name in WORKING:
            (folder / name).unlink(missing_ok=True)


def strange_files(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Path]:
    """Return files that the manifest does not name, without working files that a kill left. Raise OSError."""
    known = {MANIFEST, *manifest["files"]} | (set(WORKING) if holds_leftovers(folder) else set())
    harmless = _OF_HUB if manifest.get(PUBLISHED) else ()
    return {name: path for name, path in entries(folder).items() if name not in known and not name.startswith(harmless)}


def verify_folder(folder: Path) -> list[str]:
    """Check a folder against its manifest; return the faults, none when all is as it was written.

    Every file is hashed. Anything else in the folder is a fault, links and pipes too. Empty folders are no fault:
    copies often leave them out. Raise OutputError when the folder has no manifest.
    """
    return _lines(folder_faults(folder))


def folder_faults(folder: Path) -> dict[str, str]:
    """Return the faults of a folder by the name of the file; `STRANGE` for one that is not in the manifest.

    Raise as `verify_folder`.
    """
    if not os.path.lexists(folder / MANIFEST):
        raise OutputError(f"{printable(folder)}: no {MANIFEST} of msa-lite in there")
    manifest = load_manifest(folder)
    if manifest is None:
        return {MANIFEST: NOT_OURS}
    try:
        strange = strange_files(folder, manifest)
    except OSError as error:
        return {printable(error.filename): f"cannot be read ({error.strerror})"}
    return _faults(folder, manifest, [*manifest["files"], *strange])


def _lines(faults: Mapping[str, str]) -> list[str]:
    return [f"{name}: {fault}" for name, fault in faults.items()]


def file_fault(path: Path | None, item: Mapping[str, Any], hashed: bool = True) -> str | None:
    """Return what is wrong with a file that a manifest names, or None. hashed: False to look at its size alone."""
    if path is None:
        return "missing"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "no file any more"
        if status.st_size != item["bytes"]:
            return f"{status.st_size} bytes, recorded were {item['bytes']}"
        return "content changed" if hashed and hash_file(path) != item["sha256"] else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except FormatError as error:
        return f"cannot be read ({error})"


_HASH = re.compile(r"(?:\w+:)?[0-9a-f]{40,64}")
_LONGEST = 60  # characters of a value in a reason


def why_unfinished(folder: Path, inputs: Mapping[str, Any]) -> list[str]:
    """Return why a folder was not made from exactly these inputs, or is not as it was written; nothing if it is
    finished.

    Every file is hashed, for what comes next uses them. The card does not count: people edit cards, and a model need
    not be merged again for that.
    """
    manifest = load_manifest(folder)
    if manifest is None:
        return ["it is not there yet"]
    now = json.loads(canonical_json(inputs))
    if manifest["inputs"] != now:
        return list(differences(manifest["inputs"], now))
    return _lines(_faults(folder, manifest, [name for name in manifest["files"] if name != CARD_FILE]))


def why_damaged(folder: Path, inputs: Mapping[str, Any]) -> list[str]:
    """Return which files of a folder that was made from these inputs are not as they were written."""
    manifest = load_manifest(folder)
    is_same = manifest is not None and manifest["inputs"] == json.loads(canonical_json(inputs))
    return why_unfinished(folder, inputs) if is_same else []


def check_written(folder: Path, names: Iterable[str]) -> None:
    """Raise FormatError unless a folder of msa-lite holds these files as it wrote them, and knows of each.

    A folder without a manifest of ours passes: there is nothing to hold its files against.
    """
    manifest = load_manifest(folder)
    if manifest is None:
        if not _was_ours(folder):
            return
        faults = {MANIFEST: NOT_OURS}
    else:
        faults = _faults(folder, manifest, names)
    if faults:
        remedy = "make it anew, or put a copy back; if the change is meant, remove its manifest.json"
        raise FormatError(join_faults(f"{printable(folder)}: is not as it was written ({remedy}):", _lines(faults)))


def check_read(path: Path) -> None:
    """Raise FormatError for a file that is about to be read and is not as the manifest in its folder, or above, says.

    A folder above may hold files of others.
    """
    above = path.parent.parent
    if os.path.lexists(path.with_name(MANIFEST)):
        check_written(path.parent, [path.name])
    elif (name := printable(path.relative_to(above))) in (load_manifest(above) or {"files": {}})["files"]:
        check_written(above, [name])


def _was_ours(folder: Path) -> bool:
    """Check whether a manifest that cannot be read is one of msa-lite, by what is left of it."""
    try:
        raw = read_bytes(folder / MANIFEST)
    except FormatError:
        return False
    return any(sign in raw for sign in (b'"made_by": "msa-lite"', f'"{MANIFEST_SEAL}": "'.encode()))


def _faults(folder: Path, manifest: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the faults of files of a folder, by what its manifest says of them."""
    try:
        files = entries(folder)
    except OSError as error:
        return {printable(error.filename): f"cannot be read ({error.strerror})"}
    known = manifest["files"]
    faults = {name: file_fault(files.get(name), known[name]) if name in known else STRANGE for name in names}
    return {name: fault for name, fault in faults.items() if fault}


def differences(recorded: Any, now: Any) -> Iterator[str]:
    """Yield `settings.epochs: 5 → 7` for each value that differs; of a hash, and of anything long, only its key."""
    old, new = dict(leaves(recorded)), dict(leaves(now))
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) == new.get(key):
            continue
        values = [_shown(side[key]) if key in side else "none" for side in (old, new)]
        yield f"{key}: {' → '.join(values)}" if None not in values else f"{key} changed"  # type: ignore[arg-type]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, each with its dotted key."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _shown(value: Any) -> str | None:
    """Return a value as a reason shows it; None for one that tells a reader nothing."""
    text = "none" if value is None else str(value)
    return None if _HASH.fullmatch(text) or len(text) > _LONGEST else text


@contextmanager
def locked(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Make a folder and hold the lock in it. Raise OutputError where another process holds it."""
    from filelock import FileLock, Timeout

    place = folder / name
    with reachable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(place) and not stat.S_ISREG(place.lstat().st_mode):
        raise OutputError(f"{place}: is no file; move it elsewhere")
    lock = FileLock(place)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BusyError(f"{folder}: {_BUSY}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def in_use(folder: Path, alone: bool = False) -> Iterator[None]:
    """Hold a run's folder as one of many that read it. alone: hold it against all of them, under its lock (`locked`).

    Raise BusyError where that cannot be. What is locked is the folder itself: nothing is written, and a process that
    dies lets go. File systems without such locks, and readers on other machines, are not seen.
    """
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # another system; or there is nothing to read
        yield
        return
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            readers = f"a page of this run is open{_readers(handle)}; end `msa-lite web`, or `ask`, first"
            raise BusyError(f"{folder}: {readers if alone else _BUSY}") from error
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def _readers(folder: int) -> str:
    """Return the processes that hold a folder with others, in brackets, where the system lists them (Linux)."""
    numbers = _holders(os.fstat(folder).st_ino, "READ")
    return f" (process {', '.join(numbers)})" if numbers else ""


def is_worked_in(folder: Path) -> bool:
    """Check whether a process holds the lock in a folder, without taking it. False where the system lists no locks."""
    return (folder / LOCK).is_file() and bool(_holders((folder / LOCK).stat().st_ino, "WRITE"))


def _holders(inode: int, kind: str) -> list[str]:
    """Return the processes that hold a file, where the system lists them (Linux)."""
    locks = Path("/proc/locks")
    held = rf"FLOCK +ADVISORY +{kind} +([1-9]\d*) +\S+:{inode} "
    return re.findall(held, locks.read_text()) if locks.is_file() else []


_UNFINISHED = (".partial", ".previous")


def verify_stages(folder: Path, needed: bool = True) -> dict[Path, list[str]]:
    """Re-hash a stage's folder, or all finished stages below a run's; return the faults of each (`verify_folder`).

    needed: raise OutputError where there is no stage.
    """
    alone = os.path.lexists(folder / MANIFEST)
    patterns = (f"**/{MANIFEST}", f"*/{MANIFEST}", f"*/*/{MANIFEST}")  # the first does not follow links to other disks
    places = [folder] if alone else sorted({path.parent for pattern in patterns for path in folder.glob(pattern)})
    stages = [
        place
        for place in places
        if not any(name.endswith(_UNFINISHED) for name in place.relative_to(folder).parts)
        and not any(above in place.parents for above in places)  # a stage's own file that happens to have the name
    ]
    if not stages and needed:
        raise OutputError(
            f"{folder}: no {MANIFEST} of msa-lite in there, nor in a folder below it; "
            "--record FILE compares a model with a removal record"
        )
    return {stage: verify_folder(stage) for stage in stages}


Marks = Mapping[Path, tuple[int, ...]]
"""Device, inode, size and time of change by file: they change when somebody writes the file. Content is not compared:
that would be gigabytes."""


def take_marks(folder: Path, patterns: Iterable[str]) -> Marks:
    """Return the marks of a folder's files of these patterns, as they are now."""
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.name != MANIFEST}
    return {path: mark for path in sorted(files) if (mark := _mark(path))}


def _mark(path: Path) -> tuple[int, ...] | None:
    """Return a file's mark, or None where it is no regular file."""
    try:
        status = path.stat()
    except OSError:
        return None
    mark = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return mark if stat.S_ISREG(status.st_mode) else None


def check_unchanged(marks: Marks) -> None:
    """Raise StageError with all files that have changed. After it, the partial folder is removed."""
    changed = [path for path, mark in marks.items() if _mark(path) != mark]
    if changed:
        raise discarded(
            StageError(
                join_faults(
                    "files changed or vanished while they were read, so the result was removed; run this again when "
                    "nobody writes there any more:",
                    map(printable, changed),
                )
            )
        )
