"""A Hugging Face Hub on loopback: repositories, accounts, and faults at chosen requests.

It speaks what huggingface_hub and datasets ask for downloads, and what huggingface_hub sends without Xet for uploads.
It refuses what the real one refuses: a token that may not write, large files that do not have the hash they are sent
under, commits of objects that never arrived, commits on a parent that is not the branch's head any more, names that
are taken. It may be named as the proxy too: a request for any other host then ends here, with 404, and none leaves the
machine. `tests.support.hub_handler` has the requests.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.support.hub_handler import Files, HubHandler
from tests.support.loopback import Loopback

WRITER, READER, STRANGER = "hf_WriteTokenOfAlice42", "hf_ReadTokenOfAlice77", "hf_TokenOfMallory13"


@dataclass
class Fault:
    """A failure at requests whose "METHOD /path" a pattern finds."""

    where: str
    """The pattern."""
    status: int | None = None
    """The status to answer with; None: the connection is dropped."""
    times: int = 1
    """The number of requests that fail."""
    words: str = ""
    """What the server says."""
    act: Callable[[], None] | None = None
    """Called before; without a status the request is then carried out."""


class HubServer(Loopback):
    """Serves repositories from memory between `__enter__` and `__exit__`.

    alice's repositories are hers; team is an organisation of hers. Repositories are named "models/ORG/NAME" or
    "datasets/ORG/NAME" here, and ORG/NAME where only models are meant.
    """

    def __init__(self, port: int = 0) -> None:
        self.requests: list[tuple[str, str]] = []  # (method, path) as asked
        self.sent: Counter[str] = Counter()  # bytes of each file that went out, by name
        self.received: Counter[str] = Counter()  # bytes of file contents by repository, broken transfers included
        self.accounts = {WRITER: ("alice", "write"), READER: ("alice", "read"), STRANGER: ("mallory", "write")}
        self.private: dict[str, bool] = {}
        self.renamed: dict[str, str] = {}
        self.titles: dict[str, list[str]] = {}  # repository → titles of main's commits, the newest first
        self.objects: dict[str, Files] = {}  # repository → hash → large file
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self._commits: dict[str, dict[str, Files]] = {}  # repository → commit → files
        self._branches: dict[str, dict[str, str]] = {}  # repository → branch → commit
        super().__init__(HubHandler, port)

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return self.address

    def commit(self, repo: str, files: Mapping[str, bytes | str], branch: str = "main") -> str:
        """Make `files` the state of a branch in a repository; its commit."""
        content = {name: data.encode() if isinstance(data, str) else data for name, data in files.items()}
        commits = self._commits.setdefault(repo, {})
        sha = hashlib.sha1(repr((len(commits), sorted(content.items()))).encode()).hexdigest()
        commits[sha] = content
        self._branches.setdefault(repo, {})[branch] = sha
        return sha

    def make(self, repo: str, files: Mapping[str, bytes | str] | None = None, private: bool = True) -> None:
        """Make a model repository, as in the browser; with files of somebody else's on main."""
        self.private[repo] = private
        self.titles[repo] = ["initial commit"]
        self.objects.setdefault(repo, {})
        self.commit(f"models/{repo}", {".gitattributes": "*.safetensors filter=lfs\n", **(files or {})})
        for data in (files or {}).values():
            raw = data.encode() if isinstance(data, str) else data
            self.objects[repo][hashlib.sha256(raw).hexdigest()] = raw

    def hide(self, repo: str) -> None:
        """Answer as for a repository that is private to somebody else."""
        del self._branches[repo]

    def branches(self, repo: str) -> dict[str, str]:
        """Commits by branch, which can be changed. Raises LookupError with the Hub's error code."""
        if repo not in self._branches:
            raise LookupError("RepoNotFound")
        return self._branches[repo]

    def find(self, repo: str, revision: str) -> tuple[str, Files]:
        """(commit, files) of a revision. Raises LookupError with the Hub's error code."""
        sha = self.branches(repo).get(revision, revision)
        commits = self._commits[repo]
        if sha not in commits:
            raise LookupError("RevisionNotFound")
        return sha, commits[sha]

    def on(self, repo: str, branch: str = "main") -> Files:
        """Return the files of a model's branch, without .gitattributes."""
        with self.lock:
            return {name: data for name, data in self.find(f"models/{repo}", branch)[1].items() if name[0] != "."}

    def branch_names(self, repo: str) -> list[str]:
        """Return the names of a model's branches; none where it does not exist."""
        return sorted(self._branches.get(f"models/{repo}", {}))
