"""Send a model or adapter to the Hub in one commit, so that its main branch is never half."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msa_lite.errors import FormatError, StageError, join_faults
from msa_lite.io.console.progress import Progress, readable, silent, tell
from msa_lite.io.finished.seal import MANIFEST, MERGEKIT_FILE
from msa_lite.io.weights.companions import TEMPLATES
from msa_lite.publish.contents import PublishOptions, make_contents
from msa_lite.publish.destination import (
    TITLE,
    Destination,
    check_privacy,
    check_repository,
    find_destination,
    patiently,
)

if TYPE_CHECKING:
    from msa_lite.publish.contents import Contents, SentFile


LABEL = "upload (MB)"
_MAIN = "main"
_MB = 1_000_000
# Files that an earlier upload may have left and that loaders would read. Anything else there is left alone.
_LOADED = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
    MERGEKIT_FILE, MANIFEST, TEMPLATES,
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """The outcome of an upload."""

    kind: str
    """"model" or "adapter"."""
    repo: str
    """The repository's full name."""
    url: str
    """Its page."""
    commit: str
    """The commit of main that has the files."""
    private: bool
    """True if only its owner may see it."""
    sent: Mapping[str, int]
    """The files that were not there before, with their bytes."""
    deleted: tuple[str, ...]
    """The stale files that were deleted."""
    json_keys: ClassVar = ("kind", "repo", "url", "commit", "private", "sent", "sent_bytes", "deleted", "new_version")

    @property
    def sent_bytes(self) -> int:
        """Return the size of the files that were not there before."""
        return sum(self.sent.values())

    @property
    def new_version(self) -> str | None:
        """Return the value of that key for the target's card, which points its readers here; None for an adapter."""
        return self.repo if self.kind == "model" else None


def push(contents: Contents, to: Destination, *, progress: Progress = silent) -> Published:
    """Send the files to a repository, whole or not at all as far as its main branch goes.

    Raise FormatError for a card that the Hub does not take, OutputError when the repository has changed and is no place
    to send to any more, and StageError when the upload fails. Then main is as it was, and the same call sends only what
    is missing.
    """
    upload = _Upload(contents, to, progress)
    return patiently(upload.run, to.repo, lambda: upload.has_begun)


def stale_files(contents: Contents, names: Iterable[str]) -> list[str]:
    """Return the files of a repository that an upload of `contents` deletes."""
    sent = {item.name for item in contents.files}
    loaded = (n for n in names if any(fnmatch(n, p) and n.count("/") == p.count("/") for p in _LOADED))
    return sorted(name for name in loaded if name not in sent)


@dataclass
class _Upload:
    """An upload on its way. `run` may be called again, and goes on where it was.

    huggingface_hub stores the large files, each once, and makes the commit. Kept by hand: new files and deletions are
    one commit on top of the main that was looked at, so that main is never half; what arrives is what was checked; and
    a commit that failed is tried again, which the library does not do.
    """

    contents: Contents
    to: Destination
    progress: Progress
    has_begun: bool = False
    """True once something was written on the server."""
    sent: dict[str, int] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        from huggingface_hub import HfApi

        self.api = HfApi()
        self.total = sum(item.nbytes for item in self.contents.files)

    def run(self) -> Published:
        """Bring main to the contents, from whatever an earlier call left."""
        main = self._open()
        missing, stale = self._missing(main), stale_files(self.contents, _files(main))
        if missing or stale:
            main = self._commit(main, missing, stale)
        if differing := self._missing(main):
            names = [item.name for item in differing]
            raise StageError(join_faults(f"{self.to.repo}: the Hub does not have what was sent; run again:", names))
        self._tell(0, f"all {readable(self.total)} are there")
        to = self.to
        return Published(self.contents.kind, to.repo, to.url, main.sha, to.private, dict(self.sent), self.deleted)

    def _open(self) -> Any:
        """Return the repository as it is; make it if need be."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            info = self._info(_MAIN)
        except RepositoryNotFoundError:
            self._check_card()
            self.api.create_repo(self.to.repo, private=self.to.private, exist_ok=True)
            self.has_begun = True
            info = self._info(_MAIN)
        check_repository(self.api, info, self.to.private)
        return info

    def _check_card(self) -> None:
        """Raise FormatError for a card that the Hub does not take; it would say so only after the weights."""
        from huggingface_hub import ModelCard

        try:
            ModelCard(self.contents.card).validate()
        except ValueError as error:
            raise FormatError(f"{self.to.repo}: the Hub does not take the card: {error}") from None

    def _commit(self, main: Any, missing: list[SentFile], stale: list[str]) -> Any:
        """Send files and delete stale ones in one commit on top of main. Return main as it then is."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        self._check_card()
        additions = [CommitOperationAdd(item.name, _source(item)) for item in missing]
        left = sum(item.nbytes for item in missing)
        for item, addition in zip(missing, additions, strict=True):
            if item.is_weights:
                self._tell(left, f"{item.name}, {readable(self.total - left)} of {readable(self.total)} are there")
                self.api.preupload_lfs_files(self.to.repo, [addition], free_memory=False)
                self.has_begun = True
                _check_unchanged(item, addition.upload_info.sha256.hex())  # the library has read and hashed it by now
                left -= item.nbytes
        check_privacy(self._info(_MAIN), self.to.private)  # the upload may have taken hours
        commit = self.api.create_commit(
            self.to.repo,
            [*additions, *(CommitOperationDelete(name, is_folder=False) for name in stale)],
            commit_message=f"{TITLE}: {self.contents.kind}",
            parent_commit=main.sha,  # so that nothing that came meanwhile is lost
        )
        self.has_begun = True
        self.sent |= {item.name: item.nbytes for item in missing}
        self.deleted = tuple(stale)
        return self._info(commit.oid)

    def _tell(self, left: int, note: str) -> None:
        """Report the progress in megabytes; left: the bytes that are yet to be sent, rounded up."""
        total = -(-self.total // _MB)
        tell(self.progress, LABEL, total + -left // _MB, total, note)

    def _info(self, revision: str) -> Any:
        return self.api.model_info(self.to.repo, revision=revision, files_metadata=True)

    def _missing(self, info: Any) -> list[SentFile]:
        """Return what a revision does not have, or has otherwise."""
        there = _files(info)
        return [item for item in self.contents.files if not _is_there(item, there.get(item.name))]


def _files(info: Any) -> dict[str, Any]:
    """Return the files of a revision by name."""
    return {file.rfilename: file for file in info.siblings or ()}


def _is_there(item: SentFile, file: Any) -> bool:
    """Compare a file with the Hub's: by SHA-256 where it is a large one there, else by the hash that git gives it."""
    if file is None or file.size != item.nbytes:
        return False
    if file.lfs:
        return bool(file.lfs.sha256 == item.sha256)
    data = item.read()
    return bool(file.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())


def _source(item: SentFile) -> Path | bytes:
    """Return the file of weights to send, else the content. Raise StageError where that is not what was checked."""
    if item.is_weights and item.path:
        return item.path
    data = item.read()
    _check_unchanged(item, hashlib.sha256(data).hexdigest())
    return data


def _check_unchanged(item: SentFile, sha256: str) -> None:
    if sha256 != item.sha256:
        raise StageError(f"{item.path or item.name}: changed since it was checked; main is as it was. Run again")


_PLAIN = PublishOptions()


def push_folder(
    folder: str | Path, repo: str, options: PublishOptions = _PLAIN, progress: Progress = silent
) -> Published:
    """Send a model or adapter, or that of a run, to a repository of the Hub. Nobody is asked.

    repo: ACCOUNT/NAME, or NAME for the account of the token. It is private unless `options.public`. Raise as
    `find_destination`, `make_contents` and `push`, which this calls in turn.
    """
    from huggingface_hub.utils import disable_progress_bars

    to = find_destination(repo, private=not options.public)  # first: the files of a large model take minutes to check
    contents = make_contents(Path(folder), replace(options, repo=to.repo))
    with disable_progress_bars():
        return push(contents, to, progress=progress)
