"""Models by name: folders, and repositories of the Hub with their revisions and tokenizers."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msa_lite.errors import FormatError, UsageError
from msa_lite.io.files.addresses import model_name
from msa_lite.io.files.reading import local_path, read_object
from msa_lite.io.files.spellings import without_login
from msa_lite.io.files.writing import check_space, digest, hash_file
from msa_lite.io.finished.seal import CARD_FILE, Marks, check_unchanged, check_written, take_marks
from msa_lite.io.weights.checkpoint import CONFIG_LIMIT, INDEX_FILE, Checkpoint, TensorEntry, check_config
from msa_lite.io.weights.companions import (
    CODE,
    PATTERNS,
    TEMPLATES,
    TOKENIZER,
    companion_files,
    copy_into,
    find_files,
    is_text,
    name_in,
    needs_code,
)
from msa_lite.io.weights.counts import named_progress, parse_count
from msa_lite.io.weights.offline import offline_reason
from msa_lite.io.weights.vocabulary import AddedRows

logger = logging.getLogger(__name__)


_UNITS = {"tokens": "tokens", "step": "steps"}
_SHOWN = 8  # branches that an error names


def is_number(revision: str) -> bool:
    """Check whether a revision is a number of tokens or steps."""
    return revision.startswith(tuple(f"{unit}=" for unit in _UNITS))


def find_branch(branches: Iterable[str], revision: str) -> str:
    """Return the one branch whose name has the number of `revision` (`tokens=3859B`, `step=928646`).

    Later stages of a training count from their own start (OLMo 2), so their branches do not match. Raise ValueError
    with the branches that have the number, or the nearest below and above.
    """
    unit, _, text = revision.partition("=")
    count = parse_count(text)
    places = {branch: named_progress(branch) for branch in branches}
    numbers = {branch: number for branch, at in places.items() if (number := getattr(at, unit)) is not None}
    matches = sorted(branch for branch, number in numbers.items() if number == count)
    from_start = [branch for branch in matches if places[branch].stage == 1]
    if len(from_start) == 1:
        return from_start[0]
    if len(matches) > 1:
        more = f", … ({len(matches)} in all)" if len(matches) > _SHOWN else ""
        names = ", ".join(matches[:_SHOWN])
        raise ValueError(f"several branches have this number; name the one you mean: {names}{more}")
    if matches:
        raise ValueError(f"only {matches[0]} has this number, from the start of its stage; if you mean it, name it")
    numbered = sorted((number, branch) for branch, number in numbers.items() if places[branch].stage == 1)
    if not numbered:
        raise ValueError(f"no branch has a number of {_UNITS[unit]} in its name")
    below = [branch for number, branch in numbered if number < count][-1:]
    above = [branch for number, branch in numbered if number > count][:1]
    verb = "are" if below and above else "is"
    raise ValueError(f"no branch has this number; the nearest {verb} {' and '.join([*below, *above])}")


_BIG = 256 << 20  # bytes; adapters are hashed, checkpoints are not
_REPO_AT_REVISION = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w./=+-]+)?")


@dataclass(frozen=True)
class Source:
    """A checkpoint or adapter in a local folder."""

    name: str
    """The name that the user gave."""
    folder: Path
    revision: str
    """The commit of a Hub repository; `sha256:…` or `files:…` over the files of a local folder."""
    tokenizer: Source | None = None
    """The tokenizer to use, where it is not the folder's own."""
    added: AddedRows | None = None
    """Rows to extend its embedding and head by when it is loaded to be tuned or scored."""
    seen: Marks = field(default_factory=dict, compare=False, repr=False)
    """Its files as they were when it was found."""

    @property
    def is_folder(self) -> bool:
        """Check whether it is a local folder, no repository of the Hub."""
        return self.revision.startswith(("sha256:", "files:"))

    def pinned(self) -> str:
        """Return the name with its commit for a Hub repository, the name alone for a folder."""
        repo = self.name.partition("@")[0]
        return self.name if self.is_folder else f"{repo}@{self.revision}"

    @property
    def tokenizer_folder(self) -> Path:
        """Return the folder of its tokenizer."""
        return self.tokenizer.folder if self.tokenizer else self.folder

    @property
    def marks(self) -> Marks:
        """Return its files, and those of its tokenizer, as they were when it was found."""
        return {**self.seen, **(self.tokenizer.seen if self.tokenizer else {})}

    def check_unchanged(self) -> None:
        """Raise StageError when its files are not what they were when it was found."""
        check_unchanged(self.marks)

    def identity(self) -> dict[str, Any]:
        """Return what a manifest records. Local folders count by content alone, so that a run may be moved."""
        identity: dict[str, Any] = {"revision": self.revision}
        if self.tokenizer:
            identity["tokenizer"] = self.tokenizer.revision
        if self.added:
            identity["added_rows"] = self.added.describe()
        return identity


def fetch(name: str, by_content: bool = True) -> Source:
    """Find a folder, or fetch `repo[@revision]` from the Hub (or its cache, when offline).

    by_content: hash big files of a folder; else only their size and time of change count, for hashing a checkpoint
    takes as long as merging it. Raise UsageError when it is neither, with the Hub's answer; FormatError for a folder
    that msa-lite wrote and that is not as it was written. Of such a one, every file is hashed.
    """
    source = fetch_files(name, ("*.safetensors", *PATTERNS), lambda folder: hash_content(folder, by_content))
    if source.is_folder:
        check_written(source.folder, content_files(source.folder))
    return source


def fetch_files(name: str, patterns: Iterable[str], pin: Callable[[Path], str]) -> Source:
    """Find a folder, or fetch the files of these patterns. pin: makes the revision of a folder. Raise as `fetch`."""
    if not is_text(name):
        raise UsageError(f"{name!a}: the name is no UTF-8; rename the folder")
    name = model_name(name)
    folder, patterns = local_path(name), list(patterns)
    if os.path.isdir(folder):
        seen = take_marks(folder, patterns)
        return Source(name, folder, pin(folder), seen=seen)
    if os.path.exists(folder):
        own = f" (its own is {folder.parent})" if folder.suffix == ".safetensors" else ""
        raise UsageError(f"{name}: is a file; a checkpoint or adapter is a folder{own} or a Hub repository")
    if not is_remote(name):
        raise UsageError(f"{name}: no such folder")
    from huggingface_hub import snapshot_download

    repo, revision = split_name(name)
    try:  # patterns reach into folders, where repositories keep copies in other formats and intermediate checkpoints
        files = [pattern for pattern in patterns if pattern != CODE]
        files.append(CARD_FILE)  # a card is no part of a model's identity, but names its licence
        path = Path(snapshot_download(repo, revision=revision, allow_patterns=files, ignore_patterns=["*/*"]))
        if TEMPLATES in patterns:
            more = [TEMPLATES, *([CODE] if CODE in patterns and needs_code(path) else [])]
            snapshot_download(repo, revision=path.name, allow_patterns=more, ignore_patterns=["*/*.py", "*/*/*"])
    except Exception as error:  # the errors of the HTTP client underneath have no base that is the Hub library's own
        reason = explain(error)
        raise UsageError(f"{name}: no such folder, and it could not be fetched from the Hub ({reason})") from error
    return Source(name, path, path.name, seen=take_marks(path, patterns))  # a snapshot's folder is named by its commit


def split_name(name: str) -> tuple[str, str | None]:
    """Split `repo[@revision]`, or the address of its page, into (repository, revision).

    A revision by number becomes the branch that has it. Raise UsageError when no branch has the number, or several
    have, or the branches cannot be listed.
    """
    repo, _, revision = model_name(name).partition("@")
    return repo, _branch_by_number(repo, revision) if is_number(revision) else revision or None


@functools.cache  # one merge asks several times, and the list of branches may be long
def _branch_by_number(repo: str, revision: str) -> str:
    """Return the branch of a repository that a number of tokens or steps names. Raise as `split_name`."""
    from huggingface_hub import HfApi

    caveat = ""
    try:
        branches = [branch.name for branch in HfApi().list_repo_refs(repo).branches]
    except Exception as error:  # as in `fetch`
        branches, reason = _cached_branches(repo), explain(error)
        if not branches:
            raise UsageError(
                f"{repo}@{revision}: its branches could not be fetched from the Hub, and the cache has none ({reason})"
            ) from error
        caveat = f"; only the cache was searched, as the Hub does not list the branches ({reason})"
    try:
        return find_branch(branches, revision)
    except ValueError as error:
        raise UsageError(f"{repo}@{revision}: {error}{caveat}") from error


def _cached_branches(repo: str) -> list[str]:
    """Return the branches and tags of which the cache has something."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    refs = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type="model"), "refs")
    return [path.relative_to(refs).as_posix() for path in sorted(refs.rglob("*")) if path.is_file()]


def is_remote(name: str) -> bool:
    """Check whether a name is no path on this machine but could be a Hub repository.

    Raise UsageError for an address of something else.
    """
    name = model_name(name)
    return not local_path(name).exists() and bool(_REPO_AT_REVISION.fullmatch(name)) and not name.startswith(".")


def is_remote_adapter(name: str) -> bool:
    """Check whether a Hub repository is a PEFT adapter; False where the Hub cannot be asked."""
    from huggingface_hub import file_exists

    try:
        repo, revision = split_name(name)
        return is_remote(name) and file_exists(repo, "adapter_config.json", revision=revision)
    except Exception:  # offline, refused, not there: fetching it will say so
        return False


def commit_of(name: str) -> str | None:
    """Return the commit that `repo[@revision]` is now; None where the Hub cannot be asked."""
    from huggingface_hub import HfApi

    repo, revision = split_name(name)
    try:
        return str(HfApi().model_info(repo, revision=revision).sha)
    except Exception as error:
        logger.debug("no commit of %s: %s", name, error)
        return None


def fetch_headers(name: str) -> Checkpoint | None:
    """Fetch config, names, shapes and dtypes of a checkpoint on the Hub, some kilobytes; None where the Hub gives none.

    Raise FormatError for a repository without safetensors.
    """
    from huggingface_hub import get_safetensors_metadata, hf_hub_download
    from huggingface_hub.errors import NotASafetensorsRepoError

    name = model_name(name)
    repo, revision = split_name(name)
    try:
        headers = get_safetensors_metadata(repo, revision=revision)
        config = read_object(Path(hf_hub_download(repo, "config.json", revision=revision)), CONFIG_LIMIT)
        check_config(config, name)
    except NotASafetensorsRepoError as error:
        if commit_of(name) is None:  # the error also comes for repositories and revisions that are not there
            return None
        raise FormatError(
            f"{name}: no safetensors there; load it with transformers and save_pretrained() it as safetensors"
        ) from error
    except Exception as error:
        logger.debug("no headers of %s: %s", name, error)
        return None
    tensors = {}
    for file, metadata in headers.files_metadata.items():
        for tensor, info in metadata.tensors.items():
            start, stop = info.data_offsets
            tensors[tensor] = TensorEntry(tensor, Path(file), info.dtype, tuple(info.shape), start, stop - start)
    return Checkpoint(Path(name), config, (), tensors)


def check_download_space(checkpoints: Iterable[Checkpoint]) -> None:
    """Raise OutputError when the Hub's cache has no room for the weights of these that are not in it yet."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing = 0
    for checkpoint in checkpoints:
        repo, revision = split_name(str(checkpoint.folder))
        for entry in checkpoint.tensors.values():
            if not isinstance(try_to_load_from_cache(repo, str(entry.file), revision=revision), str):
                missing += entry.nbytes
    check_space(Path(constants.HF_HUB_CACHE), missing)


def explain(error: Exception) -> str:
    """Return an error of the Hub's client in one line, with what to try where the Hub refuses."""
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, LocalEntryNotFoundError) and (reason := offline_reason()):
        variable, is_set, _ = reason.partition(" is set")
        remedy = f"; {variable}=0 asks the Hub" if is_set else ""
        return f"offline: {reason}, and it is not in the cache of this machine{remedy}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = without_login(" ".join(lines[:2])) or type(error).__name__  # the first may be but "404 Client Error."
    if isinstance(error, RepositoryNotFoundError):  # also when it is private or gated: the Hub does not tell
        text += " Check the name; for a private or gated repository, `hf auth login` with an account that may read it"
    return text


def hash_content(folder: Path, by_content: bool = True) -> str:
    """Hash names and contents of the weights and their companion files in a local folder, as `sha256:…`.

    Without `by_content`, as `files:…`: of files above `_BIG` bytes only size and time of change count.
    """
    marks = {}
    for name, path in content_files(folder).items():
        try:
            stat = path.stat()
            quick = not by_content and stat.st_size > _BIG
            marks[name] = f"{stat.st_size} bytes at {stat.st_mtime_ns}" if quick else hash_file(path)
        except OSError as error:
            raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from error
    return revision_of(marks) if by_content else f"files:{digest(marks)}"


def revision_of(hashes: Mapping[str, str | None]) -> str:
    """Return the revision of a local folder by the SHA-256 of each of its `content_files`."""
    return f"sha256:{digest(hashes)}"


def content_files(folder: Path) -> dict[str, Path]:
    """Return by name the files of a folder that its revision is a hash of: weights, their companions, the index."""
    index = folder / INDEX_FILE
    files = [
        *find_files(folder, ("*.safetensors",)),
        *companion_files(folder),
        *([index] if os.path.isfile(index) else []),
    ]
    return {name_in(folder, path): path for path in files}


_TEMPLATES = "chat_template"
_MAIN = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def has_tokenizer(folder: Path) -> bool:
    """Check whether a folder holds a tokenizer of its own."""
    return any((folder / name).is_file() for name in _MAIN)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder that belong to its tokenizer, the chat template included, sorted."""
    return find_files(folder, TOKENIZER)


def fetch_tokenizer(name: str) -> Source:
    """Find a folder's tokenizer, or fetch that of `repo[@revision]`; no weights are fetched or hashed.

    Raise UsageError when there is none.
    """
    source = fetch_files(name, (*TOKENIZER, "config.json"), hash_tokenizer)
    if not has_tokenizer(source.folder):
        raise UsageError(f"{name}: holds no tokenizer (tokenizer.json or tokenizer_config.json)")
    return source


def hash_tokenizer(folder: Path) -> str:
    """Return `sha256:…` over names and contents of a tokenizer's files."""
    return revision_of({name_in(folder, path): hash_file(path) for path in tokenizer_files(folder)})


def copy_tokenizer(source: Path, out: Path) -> None:
    """Replace the tokenizer of a folder by another's, or only the chat template, if the other has no more than that."""
    whole = has_tokenizer(source)
    for path in tokenizer_files(out):
        if whole or path.suffix == ".jinja" or path.name.startswith(_TEMPLATES):
            path.unlink()
    for path in tokenizer_files(source):
        copy_into(out, source, path)
