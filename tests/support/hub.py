"""A Hugging Face Hub on loopback: as much of its HTTP interface as huggingface_hub and datasets need for downloads.

    GET   /api/{models,datasets}/ORG/NAME[/revision/REVISION]     the commit and the files of a repository
    GET   /api/{models,datasets}/ORG/NAME/refs                    its branches
    GET   /api/{models,datasets}/ORG/NAME/tree/REVISION[/FOLDER]  a listing
    POST  /api/{models,datasets}/ORG/NAME/paths-info/REVISION     what some paths are
    HEAD, GET  /[datasets/]ORG/NAME/resolve/REVISION/PATH         a file, or a range of its bytes

It may be named as the proxy too: a request for any other host then ends here, with 404, and none leaves the machine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.loopback import Loopback

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+?)(?:/(refs|revision|tree|paths-info)(?:/([^/]+)(?:/(.+))?)?)?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")

Files = dict[str, bytes]


class HubServer(Loopback):
    """Serves repositories from memory between `__enter__` and `__exit__`; `requests` lists (method, path) as asked.

    sent: bytes of each file that went out, by name.
    """

    def __init__(self, handler: type[HubHandler] | None = None) -> None:
        self.requests: list[tuple[str, str]] = []
        self.sent: Counter[str] = Counter()
        self._commits: dict[str, dict[str, Files]] = {}  # "models/ORG/NAME" → commit → files
        self._branches: dict[str, dict[str, str]] = {}  # "models/ORG/NAME" → branch → commit
        super().__init__(handler or HubHandler)

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return self.address

    def commit(self, repo: str, files: Mapping[str, bytes | str], branch: str = "main") -> str:
        """Make `files` the state of a branch in a repository ("models/ORG/NAME" or "datasets/ORG/NAME"); its commit."""
        content = {name: data.encode() if isinstance(data, str) else data for name, data in files.items()}
        commits = self._commits.setdefault(repo, {})
        sha = hashlib.sha1(repr((len(commits), sorted(content.items()))).encode()).hexdigest()
        commits[sha] = content
        self._branches.setdefault(repo, {})[branch] = sha
        return sha

    def hide(self, repo: str) -> None:
        """Answer as for a repository that is private to somebody else."""
        del self._branches[repo]

    def branches(self, repo: str) -> dict[str, str]:
        """Commits by branch. Raises LookupError with the Hub's error code."""
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


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        hub: HubServer = self.server.owner  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        hub.requests.append((self.command, self.path))
        path = urlsplit(self.path).path if self.path.startswith("/") else ""  # a proxy is asked for http://…
        self._answer_download(hub, path, body)

    def _answer_download(self, hub: HubServer, path: str, body: str) -> None:
        try:
            if match := _API.fullmatch(path):
                self._answer_api(hub, *match.groups(), parse_qs(body or urlsplit(self.path).query))
            elif match := _FILE.fullmatch(path):
                kind, repo, revision, name = match.groups()
                sha, files = hub.find(f"{kind or 'models/'}{repo}", unquote(revision))
                self._answer_file(hub, sha, files, unquote(name))
            else:
                self._answer(404, b"")
        except LookupError as error:
            code = error.args[0]
            # Like the Hub, which does not tell a repository that is not there from a private one.
            status = 401 if code == "RepoNotFound" else 404
            self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    do_HEAD = do_POST = do_CONNECT = do_GET

    def _answer_api(
        self,
        hub: HubServer,
        kind: str,
        repo: str,
        call: str | None,
        revision: str | None,
        folder: str | None,
        query: Any,
    ) -> None:
        if call == "refs":
            self._answer_json({"branches": _refs(hub.branches(f"{kind}/{repo}")), "converts": [], "tags": []})
            return
        sha, files = hub.find(f"{kind}/{repo}", unquote(revision or "main"))
        if call == "tree":
            below = f"{unquote(folder)}/" if folder else ""
            recursive = query.get("recursive", ["false"])[0].lower() == "true"
            value = [entry for entry in _entries(files, below) if recursive or "/" not in entry["path"][len(below) :]]
            if below and not value:
                raise LookupError("EntryNotFound")
        elif call == "paths-info":
            value = [entry for entry in _entries(files, "") if entry["path"] in query.get("paths", [])]
        else:
            siblings = [{"rfilename": name} for name in files]
            value = {"id": repo, "sha": sha, "siblings": siblings, "tags": [], "private": False, "downloads": 0}
        self._answer_json(value)

    def _answer_json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer_file(self, hub: HubServer, sha: str, files: Files, name: str) -> None:
        commit = {"X-Repo-Commit": sha}
        if name not in files:
            self._answer(404, b"", {**commit, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        status, data = 200, files[name]
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            status, data = 206, data[int(wanted[1]) : int(wanted[2]) + 1]
        if self.command != "HEAD":
            hub.sent[name] += len(data)
        self._answer(status, data, {**commit, "ETag": f'"{blob_id(files[name])}"'})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing; requests are recorded in HubServer.requests."""


def _refs(branches: Mapping[str, str]) -> list[dict[str, str]]:
    """What the Hub says of branches."""
    return [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha} for name, sha in branches.items()]


def _entries(files: Files, below: str) -> list[dict[str, Any]]:
    """What the Hub lists below a folder ("" or "NAME/"): folders and files, all levels."""
    names = [name for name in files if name.startswith(below)]
    parents = {name[:i] for name in names for i in range(len(below), len(name)) if name[i] == "/"}
    folders = [
        {"type": "directory", "path": path, "oid": blob_id(path.encode()), "size": 0} for path in sorted(parents)
    ]
    return folders + [
        {"type": "file", "path": name, "oid": blob_id(files[name]), "size": len(files[name])} for name in sorted(names)
    ]


def blob_id(data: bytes) -> str:
    """The name that git gives to a file's content, which the Hub sends as ETag."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
