"""Stage folders that are complete when they exist, and the manifest that says what made them.

A stage writes into `NAME.partial`, puts `manifest.json` there last, has it all written to disk and renames the
folder. A killed stage leaves at most a `.partial` folder, which the next run takes up or throws away; it never leaves a
half-written `NAME`. The lock in the partial folder, which goes where the folder goes, keeps a second process out.

A folder that is there already stays until the new one is whole. Then it is `NAME.previous`, until the new one has been
read back and agrees with its manifest. A kill in between leaves both, or the former alone under that name; the next run
checks the new one and removes the former, or puts it back.

Files of other people are never replaced or removed. A folder gets its name by one rename, which the system refuses
where something has come there meanwhile. A folder is only moved away if it is the one that was there when the work
began. Of that folder, only the files that its manifest names are removed.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError, MsaError, OutputError, StageError, at_most, join_faults
from msa_lite.io.console.progress import readable
from msa_lite.io.files.reading import read_bytes, read_object
from msa_lite.io.files.writing import digest, disk_fault, hash_file, nearest_place, reachable, sync, write_json
from msa_lite.io.finished.seal import (
    LOCK,
    LOST_MARKER,
    MANIFEST,
    MARKER,
    REPLACES,
    WORKING,
    describe_file,
    entries,
    load_manifest,
    locked,
    remove_leftovers,
    remove_ours,
    verify_folder,
    why_damaged,
    why_unfinished,
    write_manifest,
)

logger = logging.getLogger(__name__)

_MOST = 5  # damaged files that are named
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)  # a rename's answers where something is there


def software_versions() -> dict[str, str]:
    """Return the versions of msa-lite and of the packages that decide the numbers, as far as they are installed."""
    names = ("msa-lite", "torch", "transformers", "peft", "safetensors", "numpy", "ml-dtypes", "datasets")
    return {name: version for name in names if (version := _version(name))}


@cache  # every stage asks, and a look through all packages takes milliseconds
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_finished(folder: Path, inputs: dict[str, Any]) -> bool:
    """Check whether `folder` was made from exactly these inputs and every file is as it was written.

    The card does not count: people edit cards, and a model need not be merged again for that.
    """
    if why_unfinished(folder, inputs):
        return False
    if _is_former(previous_folder(folder), folder):  # a kill came before the new one was checked
        if verify_folder(folder):
            return False
        with suppress(OSError):  # as in `_sweep`
            _remove_previous(folder)
    _sweep(folder)
    return True


def check_place(folder: Path, kind: str) -> None:
    """Raise OutputError where the system takes no folder of this name, or of the working names beside it."""
    if os.path.ismount(folder):  # nothing can be renamed to it
        raise OutputError(f"{folder}: is where a disk is mounted; choose a folder inside it, as {folder / kind}")
    with reachable(folder):
        for place in (folder, partial_folder(folder), previous_folder(folder)):
            with suppress(FileNotFoundError):
                os.stat(place)


def check_free(folder: Path, kind: str) -> None:
    """Raise OutputError unless `folder` is absent, empty, or was made by msa-lite as the same kind of folder.

    Only the last may be replaced: an evaluation never takes the place of a model.
    """
    check_place(folder, kind)
    with reachable(folder), suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise OutputError(f"{folder}: a file is in the way; choose another output folder")
        if any(folder.iterdir()):
            manifest = load_manifest(folder) or {}
            kind_there = manifest.get("kind", f"something that msa-lite did not make, or whose {MANIFEST} is damaged")
            if kind_there != kind:
                remedy = "move it elsewhere, or choose another output folder"
                raise OutputError(f"{folder}: holds {kind_there}, where {kind} should go; {remedy}")


def partial_folder(folder: Path) -> Path:
    """Return the place where `stage_folder` builds a folder: beside it, or beside what a link points to."""
    folder = Path(os.path.realpath(folder))  # which also gives a folder such as "." a name
    return folder.with_name(folder.name + ".partial")


def previous_folder(folder: Path) -> Path:
    """Return the place of a folder's former content while a new one takes its name."""
    folder = Path(os.path.realpath(folder))
    return folder.with_name(folder.name + ".previous")


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
    private: bool = False,
) -> Iterator[Path]:
    """Build `folder` as `folder.partial`; on leaving the block, write the manifest and rename.

    kind: what the folder is ("vector", "model", …). inputs: what it was made from; `is_finished` compares them.
    facts: further things to record. hashes: SHA-256 of files by name, where writing them gave it. The block may fill
    both. check: called once the lock is held, to raise what forbids the work now.

    When the block raises, the partial folder is removed. That of a resumable stage is kept, unless the error was marked
    by `discarded`; the same inputs get it again with its content. resume_key: what has to be equal for that, where not
    all inputs decide the costly work. private: True for files that only their owner may read. Raise OutputError when
    another process is building the same folder, StageError in the place of a library's error of a full disk.
    """
    check_free(folder, kind)
    folder, partial = Path(os.path.realpath(folder)), partial_folder(folder)
    fingerprint = {"kind": kind, "inputs": digest(inputs if resume_key is None else resume_key)}
    _check_partial(partial)
    with locked(partial):
        try:
            _settle_previous(folder)
            if check:
                check()
        except BaseException:
            if [path.name for path in partial.iterdir()] == [LOCK]:  # made just now
                shutil.rmtree(partial)
            raise
        seen = _own_manifest(folder)
        if faults := at_most(why_damaged(folder, inputs), _MOST):
            logger.warning("%s: made anew, because it is not as it was written: %s", folder, "; ".join(faults))
        _claim(partial, fingerprint, resumable)
        if private:
            _set_mode(partial, 0o700)
        try:
            yield partial
        except BaseException as error:
            free = shutil.disk_usage(nearest_place(partial)).free
            begun = {path.name for path in partial.iterdir()} - {LOCK, MARKER}
            if not (begun and resumable and getattr(error, "keeps_partial", True)):
                with suppress(OSError):
                    remove_partial(partial)
            # The system's own errors say enough, and whoever writes may add to them; a library's are told in our words.
            if isinstance(error, Exception) and not isinstance(error, MsaError | OSError) and disk_fault(error):
                raise StageError(
                    f"{folder}: the disk is full ({readable(free)} free); make room and run the same command again; "
                    "finished stages stay"
                ) from error
            raise
        _describe(partial, {"made_by": "msa-lite", "kind": kind, "inputs": inputs, **(facts or {})}, hashes or {})
        write_json(partial / MARKER, {**fingerprint, "done": hash_file(partial / MANIFEST)})
        _set_modes(partial, private)
        _put_in_place(partial, folder, seen)


def _describe(partial: Path, facts: dict[str, Any], hashes: dict[str, str]) -> None:
    """Write the manifest of a folder: facts, and all its files. hashes: SHA-256 of those whose writing gave it."""
    paths = {name: path for name, path in entries(partial).items() if name not in (MANIFEST, *WORKING)}
    files = {name: describe_file(path, hashes.get(name)) for name, path in paths.items()}
    write_manifest(partial, {**facts, "files": files, "versions": software_versions()})


def _check_partial(partial: Path) -> None:
    """Raise OutputError where something that msa-lite did not make has a partial folder's name."""
    if not os.path.lexists(partial):
        return
    if partial.is_symlink() or not partial.is_dir():
        raise OutputError(f"{partial}: a file is in the way; move it elsewhere")
    with reachable(partial):
        names = {path.name for path in partial.iterdir()}
    if not names & {MARKER, LOST_MARKER} and not names <= {*WORKING}:
        raise OutputError(f"{partial}: is in the way and was not made by msa-lite; move it elsewhere")


def _claim(partial: Path, fingerprint: dict[str, str], resumable: bool) -> None:
    """Mark a partial folder. Keep its files if they were made from these inputs; otherwise empty it.

    Links and half-written files are removed in any case. A kill meanwhile leaves a folder that is known as ours.
    """
    marker = partial / MARKER
    try:
        same = resumable and read_object(marker).items() >= fingerprint.items()
    except FormatError:
        same = False
    if resumable and not same and any(path.name not in WORKING for path in partial.iterdir()):
        logger.warning("%s: was begun from other inputs or settings, so it is made anew", partial)
    if not same:
        _empty(partial)
    for name in WORKING:
        if (partial / name).is_dir() and not (partial / name).is_symlink():
            shutil.rmtree(partial / name)
    for name, path in entries(partial).items():
        if name == MANIFEST or name.endswith(".tmp") or not stat.S_ISREG(path.lstat().st_mode):
            path.unlink()
    write_json(marker, fingerprint)


def _own_manifest(folder: Path) -> bytes | None:
    """Return the manifest of a folder of ours as it is now; None for one that is not there, or empty."""
    return read_bytes(folder / MANIFEST) if load_manifest(folder) else None


def _put_in_place(partial: Path, folder: Path, seen: bytes | None) -> None:
    """Write everything through to the disk, then rename; check what takes the place of something before that goes.

    seen: the manifest that the folder had when the work began. The marker goes with the folder, so that the next run
    knows as its own whatever a kill leaves. Raise OutputError where somebody else has written the folder meanwhile.
    """
    for path in [*entries(partial).values(), *(path for path in partial.rglob("*") if path.is_dir()), partial]:
        if not path.is_symlink():
            sync(path)
    if seen is not None:
        _move_away(folder, partial, seen)
    try:
        os.rename(partial, folder)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        raise OutputError(
            f"{folder}: somebody has put something there meanwhile; move it elsewhere, then run the same command "
            f"again. What was made lies in {partial}"
        ) from error
    sync(folder.parent)
    # Where nothing was replaced, what has the former one's name is a user's own.
    if seen is not None and (faults := _settle_previous(folder)):
        what = f"{folder}: what was read back is not what was written; the former folder stays; check the disk:"
        raise StageError(join_faults(what, faults))
    _sweep(folder)


def _move_away(folder: Path, partial: Path, seen: bytes) -> None:
    """Rename a folder of ours to make room for the new one, and note in the new one which it replaces.

    Raise OutputError where something else has that name. Where the folder is another by now, it gets its name back,
    and OutputError is raised too.
    """
    previous = previous_folder(folder)
    try:
        status = folder.stat()
        write_json(partial / REPLACES, {"device": status.st_dev, "inode": status.st_ino})
        os.rename(folder, previous)
    except FileNotFoundError:  # somebody has removed it
        return
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        raise _in_the_way(previous, folder) from error
    try:
        same = read_bytes(previous / MANIFEST) == seen
    except FormatError:
        same = False
    if not same:
        with suppress(OSError):  # by now there may be a third
            os.rename(previous, folder)
        raise OutputError(f"{folder}: somebody else has written it meanwhile; look at it, then run this again")


def _in_the_way(previous: Path, folder: Path) -> OutputError:
    """Return the error that something has the name of the former folder."""
    return OutputError(f"{previous}: is in the way, as {folder.name} is to be replaced; move it elsewhere")


def _is_former(previous: Path, place: Path) -> bool:
    """Check whether a folder is the one that the new one at `place` replaces; a user's copy of it is not."""
    try:
        status = previous.lstat()
        return read_object(place / REPLACES) == {"device": status.st_dev, "inode": status.st_ino}
    except (OSError, FormatError):
        return False


def recover(folder: Path) -> None:
    """Put a former folder back that a kill left aside. Raise OutputError when a process is replacing it now."""
    if not os.path.lexists(folder) and _is_former(previous_folder(folder), partial_folder(folder)):
        with locked(partial_folder(folder)):
            _settle_previous(folder)


def _settle_previous(folder: Path) -> list[str]:
    """End a replacement: remove the former folder where the new one is as it was written, else put it back.

    Return what is wrong with the new one. Raise OutputError where something of the user's is in the way.
    """
    previous = previous_folder(folder)
    if not os.path.lexists(previous):
        return []
    if _is_former(previous, folder):
        faults = verify_folder(folder) if os.path.lexists(folder / MANIFEST) else ["it is not there"]
        if not faults:
            _remove_previous(folder)
            return []
        if not remove_ours(folder):
            raise OutputError(
                f"{folder}: is not as it was written, and holds what msa-lite does not know; the former one is "
                f"{previous}: move one of the two elsewhere"
            )
    elif _is_former(previous, partial_folder(folder)) and not folder.exists():
        faults = ["it is not there"]
    elif folder.exists():
        raise _in_the_way(previous, folder)
    else:
        return []
    os.rename(previous, folder)
    return faults


def _remove_previous(folder: Path) -> None:
    """Remove the former folder, except for files that msa-lite did not write."""
    previous = previous_folder(folder)
    if not remove_ours(previous):
        logger.warning("%s: msa-lite removed its own files; the files that it did not write are still there", previous)


def remove_partial(partial: Path) -> None:
    """Remove a partial folder. A kill leaves one that is known as ours, with no file to go on from. Follow no links."""
    _check_partial(partial)
    _empty(partial)
    shutil.rmtree(partial)


def _empty(partial: Path) -> None:
    """Remove all but the lock and the marker, which is renamed first: a kill leaves a folder that nobody takes up."""
    with suppress(FileNotFoundError):
        os.replace(partial / MARKER, partial / LOST_MARKER)
    for path in partial.iterdir():
        if path.name not in (LOCK, LOST_MARKER):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def is_partial(folder: Path) -> bool:
    """Check whether a folder is a partial one of a stage, by its name and what is in it."""
    if not folder.name.endswith(".partial"):
        return False
    try:
        _check_partial(folder)
    except OutputError:
        return False
    return True


def _sweep(folder: Path) -> None:
    """Remove the working files of a stage from its finished folder."""
    with suppress(OSError):  # no permission, or a disk that cannot be written to: they do no harm there
        remove_leftovers(folder)


def _set_modes(folder: Path, private: bool) -> None:
    """Give files the usual permissions, or make them readable by their owner alone, as the safetensors library does."""
    usual = stat.S_IMODE((folder / MANIFEST).stat().st_mode)  # of a file that was opened just now
    for path in entries(folder).values():
        if path.lstat().st_nlink == 1:  # a file that lies elsewhere, too, is its owner's
            _set_mode(path, 0o600 if private else usual)


def _set_mode(path: Path, mode: int) -> None:
    with suppress(PermissionError):  # a disk that knows no permissions
        path.chmod(mode)
