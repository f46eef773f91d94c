"""Names of checkpoints and adapters → local folders: a folder is taken as it is, `repo[@revision]` is fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from msa_lite.errors import UsageError
from msa_lite.io.checkpoint import COMPANION_PATTERNS, INDEX_FILE, companion_files
from msa_lite.io.manifest import digest, hash_file

_REPO = re.compile(r"^[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w./=+-]+)?$")


@dataclass(frozen=True)
class Source:
    """A checkpoint or adapter at hand: the name it was asked for by, its folder, and what pins its content.

    `revision` is the commit of a Hub repository, or `sha256:…` over the files of a local folder.
    """

    name: str
    folder: Path
    revision: str

    def pinned(self) -> str:
        """The name with its commit for a Hub repository, the name alone for a folder."""
        repo = self.name.partition("@")[0]
        return self.name if self.revision.startswith("sha256:") else f"{repo}@{self.revision}"

    def identity(self) -> dict[str, str]:
        """What a manifest records. Local folders count by content alone, so that a run may be moved."""
        return {"revision": self.revision}


def fetch(name: str) -> Source:
    """Find a folder, or fetch `repo[@revision]` from the Hub (or its cache, when offline).

    Raises UsageError when it is neither, with what the Hub said.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return Source(name, folder, f"sha256:{hash_content(folder)}")
    if folder.exists():
        raise UsageError(f"{name}: is a file; a checkpoint or adapter is a folder or a Hub repository")
    if not _REPO.match(name) or name.startswith("."):
        raise UsageError(f"{name}: no such folder")
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    wanted = ["*.safetensors", *COMPANION_PATTERNS]
    try:  # patterns reach into folders, where repositories keep copies in other formats and intermediate checkpoints
        path = Path(snapshot_download(repo, revision=revision or None, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except Exception as error:  # the errors of the HTTP client underneath have no base that is the Hub library's own
        raise UsageError(f"{name}: no such folder, and not to be had from the Hub ({explain(error)})") from error
    return Source(name, path, path.name)  # the cache names a snapshot's folder by its commit


def explain(error: Exception) -> str:
    """What the Hub's client says, in one line, and what to try where the Hub refuses."""
    from huggingface_hub.errors import RepositoryNotFoundError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) or type(error).__name__  # the first line alone may be no more than "404 Client Error."
    if isinstance(error, RepositoryNotFoundError):  # also when it is private or gated: the Hub does not tell
        said += " Check the name; for a private or gated repository, `hf auth login` with an account that may read it"
    return said


def hash_content(folder: Path) -> str:
    """SHA-256 (hex) over names and contents of the weights and their companion files in a local folder."""
    files = [*sorted(folder.glob("*.safetensors")), *companion_files(folder)]
    files += [folder / INDEX_FILE] if (folder / INDEX_FILE).is_file() else []
    return digest({path.name: hash_file(path) for path in files})
