"""A judge on loopback: as much of OpenAI's HTTP interface as a judge is asked through, with faults by script.

POST  /v1/chat/completions           a reply, or the next step of the script
POST  /v1/files, /v1/batches         a batch is answered whole, by the same rule as single calls
GET   /v1/batches/ID                 its next status
GET   /v1/files/ID/content           what it answered
"""

from __future__ import annotations

import email
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from msa_lite.evals.judge import Ask, JudgeSettings, Question, Ruling, Usage, open_judge, openai_judge, tofu_ask
from msa_lite.io.console.progress import silent
from tests.support.loopback import Loopback

PROMPT_TOKENS, COMPLETION_TOKENS = 100, 1  # of every reply


@dataclass(frozen=True)
class Step:
    """One answer to a chat call. text: the reply; None for the server's rule. body: sent as it is instead.

    delay: seconds before it. drop: close the connection without an answer. cut: bytes of the body that are held back.
    """

    text: str | None = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drop: bool = False
    cut: int = 0
    body: bytes | None = None


RETRY_NOW = {"retry-after-ms": "1"}


class JudgeServer(Loopback):
    """Serves between `__enter__` and `__exit__`. script: steps for the first calls; later ones get the rule's reply.

    calls: the body of each chat call. batches: bodies of each batch, by custom id. busiest: the most chat calls that
    were under way at a time. statuses: what a batch goes through. on_request: called with each (method, path).
    """

    key = "sk-very-secret-1234567890"

    def __init__(self) -> None:
        self.script: list[Step] = []
        self.calls: list[dict[str, Any]] = []
        self.batches: list[dict[str, dict[str, Any]]] = []
        self.statuses = ["validating", "in_progress", "completed"]
        self.failing: set[int] = set()  # rows that a batch cannot answer
        self.answered: int | None = None  # rows that a batch gets to; None for all
        self.requests: list[tuple[str, str]] = []
        self.on_request: Callable[[str, str], None] = lambda method, path: None
        self.reply: Callable[[dict[str, Any]], str] = agreeing_letter
        self.headers: dict[str, str] = {}
        self.pause = 0.0  # seconds before each reply of the rule
        self.busiest = 0
        self.under_way = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.files: dict[str, bytes] = {}
        super().__init__(_JudgeHandler)

    def stop(self) -> None:
        self.stopping.set()
        super().stop()

    @property
    def url(self) -> str:
        """What base_url is set to."""
        return f"{self.address}/v1"

    def completion(self, body: dict[str, Any], text: str | None = None) -> dict[str, Any]:
        """A chat completion; the rule's reply where no text is given. An empty one was cut off by the token limit."""
        said = self.reply(body) if text is None else text
        message = {"role": "assistant", "content": said}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop" if said else "length"}],
            "usage": {
                "prompt_tokens": PROMPT_TOKENS,
                "completion_tokens": COMPLETION_TOKENS,
                "total_tokens": PROMPT_TOKENS + COMPLETION_TOKENS,
            },
        }

    def answer_batch(self, number: int) -> None:
        """Write the files of results and errors of a batch."""
        results, errors = [], []
        for row, (key, body) in enumerate(list(self.batches[number].items())[: self.answered]):
            status = 400 if row in self.failing else 200
            said = {"error": {"message": "no"}} if status == 400 else self.completion(body)
            line = {"custom_id": key, "response": {"status_code": status, "body": said}, "error": None}
            (results if status == 200 else errors).append(json.dumps(line, ensure_ascii=False))
        # Like OpenAI, which answers in no particular order.
        self.files[f"out-{number}"] = "\n".join(reversed(results)).encode()
        self.files[f"err-{number}"] = "\n".join(errors).encode()


def tofu_asks(count: int) -> tuple[list[Ask], str]:
    """Asks whose answers under test are candidates word for word, and the letters of these."""
    asks, right = [], ""
    for i in range(count):
        wrong = tuple(f"Wrong number {n}." for n in range(5))
        made = Question(f"Question {i}?", f"The truth of {i}.", f"The truth of {i}.", f"Ideal {i}.", wrong, i)
        ask, tags = tofu_ask(made)
        asks.append(ask)
        right += ask.letters[tags.index(frozenset({"truth"}))]
    return asks, right


def letters(verdicts: list[Ruling]) -> str:
    """What was chosen, as one word."""
    return "".join(verdict.reply for verdict in verdicts)


def agreeing_letter(body: dict[str, Any]) -> str:
    """The letter of the candidate that is, word for word, the answer under test; otherwise Z."""
    user = body["messages"][-1]["content"]
    tested = re.search(r"^Answer under test: (.*)$", user, re.M)
    found = re.search(rf"^([A-Y])\. {re.escape(tested[1])}$", user, re.M) if tested else None
    return found[1] if found else "Z"


class _JudgeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        judge: JudgeServer = self.server.owner  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        judge.requests.append((self.command, self.path))
        judge.on_request(self.command, self.path)
        sent = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if sent != judge.key:
            # Like some servers, which repeat the key whole.
            message = f"Incorrect API key provided: {sent}."
            self._answer(401, {"error": {"message": message, "code": "invalid_api_key"}})
        elif self.path == "/v1/chat/completions":
            with judge.lock:
                judge.under_way += 1
                judge.busiest = max(judge.busiest, judge.under_way)
                judge.calls.append(json.loads(body))
                step = judge.script.pop(0) if judge.script else Step(delay=judge.pause)
            self._answer_chat(judge, json.loads(body), step)
        elif self.path == "/v1/files":
            self._take_file(judge, body)
        elif self.path == "/v1/batches":
            rows = judge.files[json.loads(body)["input_file_id"]].decode().splitlines()
            judge.batches.append({row["custom_id"]: row["body"] for row in map(json.loads, rows)})
            self._answer(200, self._batch(len(judge.batches) - 1, "validating"))
        elif match := re.fullmatch(r"/v1/batches/batch-(\d+)", self.path):
            if int(match[1]) >= len(judge.batches):
                self._answer(404, {"error": {"message": "No such batch"}})
                return
            judge.answer_batch(int(match[1]))
            status = judge.statuses.pop(0) if len(judge.statuses) > 1 else judge.statuses[0]
            self._answer(200, self._batch(int(match[1]), status))
        elif match := re.fullmatch(r"/v1/files/([\w-]+)/content", self.path):
            self._answer(200, judge.files[match[1]])
        else:
            self._answer(404, {"error": {"message": f"Invalid URL ({self.command} {self.path})"}})

    do_GET = do_POST

    def _answer_chat(self, judge: JudgeServer, body: dict[str, Any], step: Step) -> None:
        judge.stopping.wait(step.delay)
        with judge.lock:
            judge.under_way -= 1
        if step.drop:
            self.close_connection = True
            return
        said: Any = step.body if step.body is not None else judge.completion(body, step.text)
        if step.status != 200 and step.body is None:
            said = {"error": {"message": f"this is fault {step.status}"}}
        self._answer(step.status, said, {**judge.headers, **step.headers}, step.cut)

    def _take_file(self, judge: JudgeServer, body: bytes) -> None:
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        parts = email.message_from_bytes(head + body).get_payload()
        fields = {part.get_param("name", header="content-disposition"): part for part in parts}  # type: ignore
        assert fields["purpose"].get_payload() == "batch"
        name = f"file-{len(judge.files)}"
        judge.files[name] = fields["file"].get_payload(decode=True)
        self._answer(
            200, {"id": name, "object": "file", "bytes": 1, "created_at": 0, "filename": "a", "purpose": "batch"}
        )

    def _batch(self, number: int, status: str) -> dict[str, Any]:
        judge: JudgeServer = self.server.owner  # type: ignore[attr-defined]
        over = status in ("completed", "expired", "cancelled")
        faults = {"data": [{"message": "line 1 is no JSON", "line": 1}]} if status == "failed" else None
        return {
            "id": f"batch-{number}",
            "object": "batch",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "created_at": 0,
            "input_file_id": "file",
            "status": status,
            "errors": faults,
            "output_file_id": f"out-{number}" if over else None,
            "error_file_id": f"err-{number}" if over and judge.files[f"err-{number}"] else None,
            "request_counts": {"completed": 0, "failed": 0, "total": len(judge.batches[number])},
        }

    def _answer(self, status: int, said: Any, headers: Mapping[str, str] | None = None, cut: int = 0) -> None:
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        fields = {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(data))}
        for key, value in fields.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data[: len(data) - cut])
        self.close_connection = self.close_connection or cut > 0

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing; requests are recorded in JudgeServer.requests."""


def set_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the key, leave out a proxy, and let nothing wait or be tried again."""
    monkeypatch.setenv("OPENAI_API_KEY", JudgeServer.key)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(openai_judge, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(openai_judge, "_RETRIES", 0)


class Speaker(Loopback):
    """Answers each request with what `speak` writes. paths: the paths that were asked."""

    def __init__(self, speak: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.speak = speak
        self.paths: list[str] = []
        super().__init__(_SpeakerHandler)


class _SpeakerHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        owner: Speaker = self.server.owner  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        owner.paths.append(self.path)
        self.close_connection = True
        try:
            owner.speak(self)
        except OSError:
            return  # the client hung up

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def say(handler: BaseHTTPRequestHandler, body: bytes = b"", status: int = 200, **headers: str) -> None:
    """Write one response; without a content-length it lasts until the connection is closed."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def judge(server: Loopback, folder: Path, count: int = 1, **changes: Any) -> tuple[list[Ruling], Usage]:
    """What a judge behind a server says of `count` asks."""
    options = {"kind": "openai", "model": "judge-model", "base_url": f"{server.address}/v1"} | changes
    opened = open_judge(JudgeSettings(**options), folder)
    assert opened is not None
    return opened.ask(tofu_asks(count)[0], silent)
