"""The requests that the Hub on loopback answers, by path."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

if TYPE_CHECKING:
    from tests.support.hub import Fault, HubServer

Files = dict[str, bytes]
_LARGE = 10_000_000  # bytes; what is smaller and no weights goes into git itself
_OBJECT = r"/lfs/([^/]+/[^/]+)/([0-9a-f]{64})(/verify)?"
_ROUTES = {
    r"/api/whoami-v2": "_whoami",
    r"/api/validate-yaml": "_validate",
    r"/api/repos/create": "_create",
    r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch": "_batch",
    _OBJECT: "_store",
    # the commit and the files of a repository; its branches; a folder of it; some paths; what writes
    r"/api/(models|datasets)/([^/]+/[^/]+?)(?:/(\w[\w-]*)(?:/([^/]+)(?:/(.+))?)?)?": "_repository",
    r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)": "_file",
}
_ROUTE_OF = [(re.compile(pattern), name) for pattern, name in _ROUTES.items()]


class _Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, words: str = "", code: str = "") -> None:
        super().__init__(words)
        self.status, self.words, self.code = status, words, code


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def hub(self) -> HubServer:
        owner: HubServer = self.server.owner  # type: ignore[attr-defined]
        return owner

    def do_GET(self) -> None:
        with self.hub.lock:
            self.hub.requests.append((self.command, self.path))
            fault = self._due_fault()
        try:
            self._answer_or_fail(fault)
        except ConnectionError:  # the client is gone
            self.close_connection = True

    do_HEAD = do_POST = do_PUT = do_DELETE = do_CONNECT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing; requests are recorded in HubServer.requests."""

    # Faults

    def _due_fault(self) -> Fault | None:
        for fault in self.hub.faults:
            if fault.times > 0 and re.search(fault.where, f"{self.command} {self.path}"):
                fault.times -= 1
                return fault
        return None

    def _answer_or_fail(self, fault: Fault | None) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        drops = fault is not None and fault.status is None and not fault.act
        body = self.rfile.read(length // 2 if drops else length)
        if self.command == "PUT" and (match := re.fullmatch(_OBJECT, self.path)):
            with self.hub.lock:
                self.hub.received[match[1]] += len(body)
        if drops:
            self._drop()
        elif fault and fault.status is not None:
            self._answer(fault.status, json.dumps({"error": fault.words}).encode())
        else:
            with self.hub.lock:  # nobody looks at the branches before the request is carried out
                if fault and fault.act:
                    fault.act()
                self._serve(body)

    def _drop(self) -> None:
        """Close the connection in the client's face."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    # Answers

    def _serve(self, body: bytes) -> None:
        path = urlsplit(self.path).path if self.path.startswith("/") else ""  # a proxy is asked for http://…
        for pattern, name in _ROUTE_OF:
            if match := pattern.fullmatch(path):
                try:
                    getattr(self, name)(body, *match.groups())
                except LookupError as error:
                    self._refuse(_Refused(404, str(error.args[0]), str(error.args[0])))
                except _Refused as refused:
                    self._refuse(refused)
                return
        self._answer(404, b"")

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _answer_json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, refused: _Refused) -> None:
        if self.headers.get("Accept") == "text/plain":
            self._answer(refused.status, refused.words.encode(), {"Content-Type": "text/plain"})
            return
        code = {"X-Error-Code": refused.code} if refused.code else {}
        headers = {"Content-Type": "application/json", "X-Error-Message": refused.words, **code}
        self._answer(refused.status, json.dumps({"error": refused.words}).encode(), headers)

    # Accounts

    @property
    def _account(self) -> tuple[str, str] | None:
        """(name, role) by the request's token."""
        return self.hub.accounts.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _may_see(self, repo: str) -> bool:
        owner, account = repo.partition("/")[0], self._account
        return account is not None and (owner == account[0] or (owner == "team" and account[0] == "alice"))

    def _check_reader(self, kind: str, repo: str) -> None:
        """Like the Hub, do not tell a repository that is not there from a private one."""
        is_private = kind == "models" and self.hub.private.get(repo) and not self._may_see(repo)
        if f"{kind}/{repo}" not in self.hub._branches or is_private:
            raise _Refused(401 if self._account is None else 404, "Repository not found", "RepoNotFound")

    def _check_writer(self, repo: str) -> None:
        if self._account is None:
            raise _Refused(401, "Invalid username or password.")
        if self._account[1] != "write" or not self._may_see(repo):
            raise _Refused(403, f"you do not have the rights to write to {repo}")

    # Requests, each with its body and the groups of its pattern

    def _whoami(self, body: bytes) -> None:
        if (account := self._account) is None:
            raise _Refused(401, "Invalid credentials in Authorization header")
        token = {"displayName": "of tests", "role": account[1]}
        orgs = [{"type": "org", "name": "team"}] if account[0] == "alice" else []
        auth = {"type": "access_token", "accessToken": token}
        self._answer_json({"type": "user", "name": account[0], "orgs": orgs, "auth": auth})

    def _validate(self, body: bytes) -> None:
        card = json.loads(body)["content"]
        try:
            values = yaml.safe_load(card.split("---\n")[1] if card.startswith("---\n") else "") or {}
        except yaml.YAMLError as error:
            raise _Refused(400, f"YAML: {error}") from None
        if not isinstance(values.get("license", ""), str):
            raise _Refused(400, '"license" must be a string')
        self._answer_json({"errors": [], "warnings": []})

    def _create(self, body: bytes) -> None:
        request = json.loads(body)
        repo = f"{request['organization'] or (self._account or ('',))[0]}/{request['name']}"
        self._check_writer(repo)
        if repo in self.hub.private:
            words = {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo}"}
            self._answer(409, json.dumps(words).encode())
            return
        self.hub.make(repo, private=request.get("private") or request.get("visibility") == "private")
        self._answer_json({"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo})

    def _batch(self, body: bytes, repo: str) -> None:
        self._check_writer(repo)
        objects = self.hub.objects.setdefault(repo, {})
        answers = []
        for item in json.loads(body)["objects"]:
            link = f"{self.hub.url}/lfs/{repo}/{item['oid']}"
            actions = {"upload": {"href": link}, "verify": {"href": f"{link}/verify"}}
            answers.append(item if item["oid"] in objects else {**item, "actions": actions})
        self._answer_json({"transfer": "basic", "objects": answers})

    def _store(self, body: bytes, repo: str, oid: str, verify: str | None) -> None:
        with self.hub.lock:
            if verify and oid not in self.hub.objects[repo]:
                raise _Refused(404, "no such object")
            if not verify:
                if hashlib.sha256(body).hexdigest() != oid:
                    raise _Refused(400, "the content does not have this hash")
                self.hub.objects[repo][oid] = body
        self._answer_json({})

    def _file(self, body: bytes, kind: str | None, repo: str, revision: str, name: str) -> None:
        """A file, or a range of its bytes."""
        kind, name = (kind or "models/").rstrip("/"), unquote(name)
        self._check_reader(kind, repo)
        sha, files = self.hub.find(f"{kind}/{repo}", unquote(revision))
        commit = {"X-Repo-Commit": sha}
        if name not in files:
            self._answer(404, b"", {**commit, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        status, data = 200, files[name]
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            status, data = 206, data[int(wanted[1]) : int(wanted[2]) + 1]
        if self.command != "HEAD":
            self.hub.sent[name] += len(data)
        self._answer(status, data, {**commit, "ETag": f'"{_blob_id(files[name])}"'})

    def _repository(
        self, body: bytes, kind: str, repo: str, call: str | None, revision: str | None, folder: str | None
    ) -> None:
        repo = self.hub.renamed.get(repo, repo)
        self._check_reader(kind, repo)
        place, revision, query = f"{kind}/{repo}", unquote(revision or ""), urlsplit(self.path).query
        options = parse_qs(body.decode() if call == "paths-info" else query)
        with self.hub.lock:
            if call in (None, "revision"):
                self._answer_json(self._describe(place, revision or "main", "blobs" in options))
            elif call == "refs":
                self._answer_json(_refs(self.hub.branches(place)))
            elif call == "tree":
                self._answer_json(_tree(self.hub.find(place, revision)[1], unquote(folder or ""), options))
            elif call == "paths-info":
                entries = _entries(self.hub.find(place, revision)[1])
                self._answer_json([entry for entry in entries if entry["path"] in options.get("paths", [])])
            elif call == "commits":
                facts = {"id": "0" * 40, "message": "", "date": "2026-01-01T00:00:00.000Z", "authors": []}
                self._answer_json([facts | {"title": title} for title in self.hub.titles[repo]])
            else:
                self._check_writer(repo)
                self._answer_json(getattr(self, f"_do_{call.replace('-', '_')}")(repo, revision, body))

    def _describe(self, place: str, revision: str, blobs: bool) -> dict[str, Any]:
        sha, files = self.hub.find(place, revision)
        siblings = []
        for name, data in files.items():
            siblings.append({"rfilename": name})
            if blobs:
                entry = _entry(name, data)
                siblings[-1] |= {"size": entry["size"], "blobId": entry["oid"]}
                if lfs := entry.get("lfs"):
                    siblings[-1]["lfs"] = {"size": lfs["size"], "sha256": lfs["oid"], "pointerSize": lfs["pointerSize"]}
        kind, _, repo = place.partition("/")
        private = kind == "models" and self.hub.private.get(repo, False)
        state = {"private": private, "gated": False}
        return {"id": repo, "sha": sha, "siblings": siblings, "tags": [], "downloads": 0, **state}

    # What writes to a model's repository; each returns the answer

    def _do_auth_check(self, repo: str, branch: str, body: bytes) -> dict[str, Any]:
        return {}

    def _do_preupload(self, repo: str, branch: str, body: bytes) -> dict[str, Any]:
        present = self.hub.find(f"models/{repo}", branch)[1]
        answers = []
        for file in json.loads(body)["files"]:
            name = file["path"]
            mode = "lfs" if _is_large(name, file["size"]) else "regular"
            answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False})
            if (data := present.get(name)) is not None:
                is_large = _is_large(name, len(data))
                answers[-1]["oid"] = hashlib.sha256(data).hexdigest() if is_large else _blob_id(data)
        return {"files": answers}

    def _do_commit(self, repo: str, branch: str, body: bytes) -> dict[str, Any]:
        header, *lines = [json.loads(line) for line in body.splitlines()]
        head, files = self.hub.find(f"models/{repo}", branch)
        if header["value"].get("parentCommit", head) != head:
            raise _Refused(412, "A commit has happened since. Please refresh and try again.")
        after = dict(files)
        for line in lines:
            value, name = line["value"], line["value"]["path"]
            if line["key"] == "deletedFile":
                if after.pop(name, None) is None:
                    raise _Refused(404, "A file with this name doesn't exist", "EntryNotFound")
            elif line["key"] == "file":
                after[name] = base64.b64decode(value["content"])
                if _is_large(name, len(after[name])):
                    raise _Refused(400, f"{name}: large files belong into LFS")
            elif value["oid"] not in self.hub.objects[repo]:
                raise _Refused(400, f"LFS pointer points to a file that does not exist: {name}")
            else:
                after[name] = self.hub.objects[repo][value["oid"]]
        sha = self.hub.commit(f"models/{repo}", after, branch)
        if branch == "main":
            self.hub.titles[repo].insert(0, header["value"]["summary"])
        return {"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True}


def _refs(branches: Mapping[str, str]) -> dict[str, Any]:
    heads = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha} for name, sha in branches.items()]
    return {"branches": heads, "converts": [], "tags": []}


def _tree(files: Files, folder: str, options: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    """What the Hub lists below a folder ("": of all)."""
    below = f"{folder}/" if folder else ""
    recursive = options.get("recursive", ["false"])[0].lower() == "true"
    entries = [entry for entry in _entries(files) if entry["path"].startswith(below)]
    if below and not entries:
        raise LookupError("EntryNotFound")
    return [entry for entry in entries if recursive or "/" not in entry["path"][len(below) :]]


def _entries(files: Files) -> list[dict[str, Any]]:
    """What the Hub says of all folders and files."""
    parents = {name[:at] for name in files for at in range(len(name)) if name[at] == "/"}
    folders = [
        {"type": "directory", "path": path, "oid": _blob_id(path.encode()), "size": 0} for path in sorted(parents)
    ]
    return folders + [{"type": "file", **_entry(name, files[name])} for name in sorted(files)]


def _entry(name: str, data: bytes) -> dict[str, Any]:
    """What the Hub says of a file."""
    entry: dict[str, Any] = {"path": name, "size": len(data), "oid": _blob_id(data)}
    if _is_large(name, len(data)):
        oid = hashlib.sha256(data).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n".encode()
        entry |= {"oid": _blob_id(pointer), "lfs": {"oid": oid, "size": len(data), "pointerSize": len(pointer)}}
    return entry


def _is_large(name: str, size: int) -> bool:
    """Check whether a file is stored by hash beside git."""
    return name.endswith((".safetensors", ".bin")) or size > _LARGE


def _blob_id(data: bytes) -> str:
    """The name that git gives to a file's content, which the Hub sends as ETag."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
