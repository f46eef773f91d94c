"""The Hub on loopback that takes uploads as well: accounts and tokens, private repositories, LFS, commits, and faults.

It speaks what huggingface_hub sends without Xet, and refuses what the real one refuses: a token that may not write,
large files that do not have the hash they are sent under, commits of objects that never arrived, commits on a parent
that is not the branch's head any more, names that are taken.

A `Fault` makes it fail at chosen requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.support.hub import Files, HubHandler, HubServer, blob_id

WRITER, READER, STRANGER = "hf_WriteTokenOfAlice42", "hf_ReadTokenOfAlice77", "hf_TokenOfMallory13"
_LARGE = 10_000_000  # bytes; what is smaller and no weights goes into git itself
_MODEL = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/(\w[\w-]*)(?:/(.+))?)?")
_BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_OBJECT = re.compile(r"/lfs/([^/]+/[^/]+)/([0-9a-f]{64})(/verify)?")


@dataclass
class Fault:
    """A failure at requests whose "METHOD /path" a pattern finds."""

    where: str
    """The pattern."""
    status: int | None = None
    """The status to answer with; None: the connection is dropped."""
    after: int = 0
    """The number of such requests that go well before."""
    times: int = 1
    """The number of requests that fail."""
    headers: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    """What the server says."""
    done: bool = False
    """True: the request is carried out, and only its answer is lost."""
    act: Callable[[], None] | None = None
    """Called before; without a status the request is then carried out."""
    half: bool = False
    """True: it is called when half of the body is there, and the rest never comes."""


class UploadHub(HubServer):
    """A Hub with accounts. alice's repositories are hers; team is an organisation of hers."""

    def __init__(self) -> None:
        self.accounts = {WRITER: ("alice", "write"), READER: ("alice", "read"), STRANGER: ("mallory", "write")}
        self.private: dict[str, bool] = {}
        self.gated: dict[str, Any] = {}
        self.renamed: dict[str, str] = {}
        self.spaces: set[str] = set()
        self.titles: dict[str, list[str]] = {}  # repository → titles of main's commits, the newest first
        self.objects: dict[str, Files] = {}  # repository → hash → large file
        self.received: Counter[str] = Counter()  # bytes of file contents by repository, broken transfers included
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        super().__init__(_Handler)

    def make(self, repo: str, files: Mapping[str, bytes | str] | None = None, private: bool = True) -> None:
        """Make a model repository, as in the browser; with files of somebody else's on main."""
        self.private[repo] = private
        self.titles[repo] = ["initial commit"]
        self.objects.setdefault(repo, {})
        self.commit(f"models/{repo}", {".gitattributes": "*.safetensors filter=lfs\n", **(files or {})})
        for data in (files or {}).values():
            raw = data.encode() if isinstance(data, str) else data
            self.objects[repo][hashlib.sha256(raw).hexdigest()] = raw

    def on(self, repo: str, branch: str = "main") -> Files:
        """Return the files of a branch, without .gitattributes."""
        with self.lock:
            return {name: data for name, data in self.find(f"models/{repo}", branch)[1].items() if name[0] != "."}

    def branch_names(self, repo: str) -> list[str]:
        """Return the names of a repository's branches; none where it does not exist."""
        return sorted(self._branches.get(f"models/{repo}", {}))

    def heads(self, repo: str) -> dict[str, str]:
        """Return the branches of a repository, which can be changed. Raise LookupError as `find`."""
        return self.branches(f"models/{repo}")


def is_large(name: str, data: bytes) -> bool:
    """Check whether a file is stored by hash beside git."""
    return name.endswith((".safetensors", ".bin")) or len(data) > _LARGE


class _Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, words: str = "", code: str = "") -> None:
        super().__init__(words)
        self.status, self.words, self.code = status, words, code


class _Handler(HubHandler):
    def do_GET(self) -> None:
        hub: UploadHub = self.server.owner  # type: ignore[attr-defined]
        with hub.lock:
            hub.requests.append((self.command, self.path))
            fault = self._due_fault(hub)
        try:
            self._answer_or_fail(hub, fault)
        except ConnectionError:  # the client is gone
            self.close_connection = True

    def _answer_or_fail(self, hub: UploadHub, fault: Fault | None) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        drops = fault is not None and fault.status is None and not fault.done and not fault.act
        body = self.rfile.read(length // 2 if fault and (drops or fault.half) else length)
        self._count(hub, len(body))
        if fault and fault.act:
            with hub.lock:  # nobody looks at the branches before the request is carried out
                fault.act()
                self._finish(hub, fault, body, drops or len(body) < length)
        else:
            self._finish(hub, fault, body, drops or len(body) < length)

    def _finish(self, hub: UploadHub, fault: Fault | None, body: bytes, drops: bool) -> None:
        if drops:
            self._drop()
        elif fault and fault.status is not None:
            self._answer(fault.status, json.dumps({"error": fault.words}).encode(), fault.headers)
        else:
            if fault and fault.done:
                self._answer = lambda *_: None  # type: ignore[method-assign,assignment]
            self._serve_or_refuse(hub, body)
            if fault and fault.done:
                self._drop()

    def _serve_or_refuse(self, hub: UploadHub, body: bytes) -> None:
        try:
            with hub.lock:
                self._serve(hub, urlsplit(self.path).path, body)
        except LookupError as error:
            self._refuse(_Refused(404, str(error.args[0]), str(error.args[0])))
        except _Refused as refused:
            self._refuse(refused)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_CONNECT = do_GET

    def _due_fault(self, hub: UploadHub) -> Fault | None:
        for fault in hub.faults:
            if re.search(fault.where, f"{self.command} {self.path}"):
                if fault.after > 0:
                    fault.after -= 1
                elif fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def _drop(self) -> None:
        """Close the connection in the client's face."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _count(self, hub: UploadHub, nbytes: int) -> None:
        match = _OBJECT.fullmatch(self.path)
        if match and self.command == "PUT":
            with hub.lock:
                hub.received[match[1]] += nbytes

    def _refuse(self, refused: _Refused) -> None:
        if self.headers.get("Accept") == "text/plain":
            self._answer(refused.status, refused.words.encode(), {"Content-Type": "text/plain"})
            return
        code = {"X-Error-Code": refused.code} if refused.code else {}
        headers = {"Content-Type": "application/json", "X-Error-Message": refused.words, **code}
        self._answer(refused.status, json.dumps({"error": refused.words}).encode(), headers)

    def _serve(self, hub: UploadHub, path: str, body: bytes) -> None:
        if path == "/api/whoami-v2":
            self._whoami(hub)
        elif path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif path.startswith("/api/spaces/"):
            if (name := path.removeprefix("/api/spaces/")) not in hub.spaces:
                raise _Refused(401, "Repository not found", "RepoNotFound")
            self._answer_json({"id": name, "sha": "0" * 40, "siblings": []})
        elif path == "/api/repos/create":
            self._create(hub, json.loads(body))
        elif match := _BATCH.fullmatch(path):
            self._check_writer(hub, match[1])
            self._batch(hub, match[1], json.loads(body))
        elif match := _OBJECT.fullmatch(path):
            self._store(hub, match[1], match[2], bool(match[3]), body)
        elif (match := _MODEL.fullmatch(path)) and self._is_ours(match[2]):
            repo = hub.renamed.get(match[1], match[1])
            self._check_reader(hub, repo)
            self._model(hub, repo, match[2] or "", unquote(match[3] or ""), body)
        else:
            if path.count("/") > 3 and not path.startswith(("/api/", "/datasets/")):
                self._check_reader(hub, "/".join(path.split("/")[1:3]))
            self._answer_download(hub, path, body.decode())

    def _is_ours(self, call: str | None) -> bool:
        return call not in ("refs", "tree")

    def _account(self, hub: UploadHub) -> tuple[str, str] | None:
        return hub.accounts.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _check_reader(self, hub: UploadHub, repo: str) -> None:
        account = self._account(hub)
        if f"models/{repo}" not in hub._commits or (hub.private.get(repo) and not _may(account, repo)):
            raise _Refused(401 if account is None else 404, "Repository not found", "RepoNotFound")

    def _check_writer(self, hub: UploadHub, repo: str) -> None:
        account = self._account(hub)
        if account is None:
            raise _Refused(401, "Invalid username or password.")
        if account[1] != "write" or not _may(account, repo):
            raise _Refused(403, f"you do not have the rights to write to {repo}")

    def _whoami(self, hub: UploadHub) -> None:
        account = self._account(hub)
        if account is None:
            raise _Refused(401, "Invalid credentials in Authorization header")
        token = {"displayName": "of tests", "role": account[1]}
        orgs = [{"type": "org", "name": "team"}] if account[0] == "alice" else []
        auth = {"type": "access_token", "accessToken": token}
        self._answer_json({"type": "user", "name": account[0], "orgs": orgs, "auth": auth})

    def _validate(self, card: str) -> None:
        front = card.split("---\n")[1] if card.startswith("---\n") else ""
        try:
            values = yaml.safe_load(front) or {}
        except yaml.YAMLError as error:
            raise _Refused(400, f"YAML: {error}") from None
        if not isinstance(values.get("license", ""), str):
            raise _Refused(400, '"license" must be a string')
        self._answer_json({"errors": [], "warnings": []})

    def _create(self, hub: UploadHub, wanted: dict[str, Any]) -> None:
        account = self._account(hub)
        repo = f"{wanted['organization'] or (account[0] if account else '')}/{wanted['name']}"
        self._check_writer(hub, repo)
        if repo in hub.private:
            words = {"error": "You already created this model repo", "url": f"{hub.url}/{repo}"}
            self._answer(409, json.dumps(words).encode())
            return
        hub.make(repo, private=wanted.get("visibility") == "private")
        self._answer_json({"url": f"{hub.url}/{repo}", "name": repo, "id": repo})

    def _batch(self, hub: UploadHub, repo: str, wanted: dict[str, Any]) -> None:
        there = hub.objects.setdefault(repo, {})
        answers = []
        for item in wanted["objects"]:
            link = f"{hub.url}/lfs/{repo}/{item['oid']}"
            actions = {"upload": {"href": link}, "verify": {"href": f"{link}/verify"}}
            answers.append(item if item["oid"] in there else {**item, "actions": actions})
        self._answer_json({"transfer": "basic", "objects": answers})

    def _store(self, hub: UploadHub, repo: str, oid: str, is_verify: bool, body: bytes) -> None:
        if is_verify:
            if oid not in hub.objects[repo]:
                raise _Refused(404, "no such object")
        elif hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, "the content does not have this hash")
        else:
            hub.objects[repo][oid] = body
        self._answer_json({})

    def _model(self, hub: UploadHub, repo: str, call: str, rest: str, body: bytes) -> None:
        if self.command == "GET" and call in ("", "revision"):
            self._answer_json(_describe(hub, repo, rest or "main", "blobs" in parse_qs(urlsplit(self.path).query)))
        elif call == "paths-info":
            wanted = parse_qs(body.decode()).get("paths", [])
            files = hub.find(f"models/{repo}", rest)[1]
            self._answer_json([{"type": "file", **_entry(name, files[name])} for name in wanted if name in files])
        elif call == "commits":
            commits = [{"id": "0" * 40, "title": t, "message": "", "date": "2026-01-01T00:00:00.000Z", "authors": []}
                       for t in hub.titles[repo]]  # fmt: skip
            self._answer_json(commits)
        else:
            self._check_writer(hub, repo)
            getattr(self, f"_do_{call.replace('-', '_')}")(hub, repo, rest, body)

    def _do_auth_check(self, hub: UploadHub, repo: str, rest: str, body: bytes) -> None:
        self._answer_json({})

    def _do_settings(self, hub: UploadHub, repo: str, rest: str, body: bytes) -> None:
        hub.gated[repo] = json.loads(body)["gated"]
        self._answer_json({})

    def _do_branch(self, hub: UploadHub, repo: str, rest: str, body: bytes) -> None:
        heads = hub.heads(repo)
        if self.command == "DELETE":
            if rest not in heads:
                raise LookupError("RevisionNotFound")
            del heads[rest]
        elif rest in heads:
            raise _Refused(409, f"Reference already exists: {rest}")
        else:
            heads[rest] = hub.find(f"models/{repo}", json.loads(body).get("startingPoint", "main"))[0]
        self._answer_json({})

    def _do_preupload(self, hub: UploadHub, repo: str, rest: str, body: bytes) -> None:
        there = hub.find(f"models/{repo}", rest)[1]
        answers = []
        for file in json.loads(body)["files"]:
            name, data = file["path"], there.get(file["path"])
            large = name.endswith((".safetensors", ".bin")) or file["size"] > _LARGE
            answers.append({"path": name, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False})
            if data is not None:
                answers[-1]["oid"] = _oid(name, data)
        self._answer_json({"files": answers})

    def _do_commit(self, hub: UploadHub, repo: str, rest: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        header = lines[0]["value"]
        head, files = hub.find(f"models/{repo}", rest)
        if header.get("parentCommit", head) != head:
            raise _Refused(412, "A commit has happened since. Please refresh and try again.")
        after = dict(files)
        for line in lines[1:]:
            value, name = line["value"], line["value"]["path"]
            if line["key"] == "deletedFile":
                if after.pop(name, None) is None:
                    raise _Refused(404, "A file with this name doesn't exist", "EntryNotFound")
            elif line["key"] == "file":
                after[name] = base64.b64decode(value["content"])
                if is_large(name, after[name]):
                    raise _Refused(400, f"{name}: large files belong into LFS")
            elif value["oid"] not in hub.objects[repo]:
                raise _Refused(400, f"LFS pointer points to a file that does not exist: {name}")
            else:
                after[name] = hub.objects[repo][value["oid"]]
        sha = hub.commit(f"models/{repo}", after, rest)
        if rest == "main":
            hub.titles[repo].insert(0, header["summary"])
        self._answer_json({"commitUrl": f"{hub.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})


def _may(account: tuple[str, str] | None, repo: str) -> bool:
    owner = repo.partition("/")[0]
    return account is not None and (owner == account[0] or (owner == "team" and account[0] == "alice"))


def _oid(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if is_large(name, data) else blob_id(data)


def _entry(name: str, data: bytes) -> dict[str, Any]:
    """Return what the Hub says of a file."""
    entry: dict[str, Any] = {"path": name, "size": len(data), "oid": blob_id(data)}
    if is_large(name, data):
        oid = hashlib.sha256(data).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n".encode()
        entry |= {"oid": blob_id(pointer), "lfs": {"oid": oid, "size": len(data), "pointerSize": len(pointer)}}
    return entry


def _describe(hub: UploadHub, repo: str, revision: str, blobs: bool) -> dict[str, Any]:
    """Return what the Hub says of a model repository."""
    sha, files = hub.find(f"models/{repo}", revision)
    siblings = []
    for name, data in files.items():
        siblings.append({"rfilename": name})
        if blobs:
            entry = _entry(name, data)
            siblings[-1] |= {"size": entry["size"], "blobId": entry["oid"]}
            if lfs := entry.get("lfs"):
                siblings[-1]["lfs"] = {"size": lfs["size"], "sha256": lfs["oid"], "pointerSize": lfs["pointerSize"]}
    gated, private = hub.gated.get(repo, False), hub.private.get(repo, False)
    return {"id": repo, "sha": sha, "siblings": siblings, "private": private, "gated": gated, "tags": []}
