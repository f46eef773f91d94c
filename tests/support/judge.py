"""A judge on loopback: as much of OpenAI's HTTP interface as a judge is asked through, with faults by script.

POST  /v1/chat/completions           a reply, or the next step of the script
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from msa_lite.evals.judge import open_judge, openai_judge
from msa_lite.evals.judge.base import Ruling, Usage
from msa_lite.evals.judge.prompts import Ask, tofu_ask
from msa_lite.io.console.progress import silent
from msa_lite.settings import JudgeSettings
from tests.support.loopback import Loopback


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

    calls: the body of each chat call. busiest: the most chat calls that were under way at a time. on_request: called
    with each (method, path).
    """

    key = "sk-very-secret-1234567890"

    def __init__(self) -> None:
        self.script: list[Step] = []
        self.calls: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str]] = []
        self.on_request: Callable[[str, str], None] = lambda method, path: None
        self.reply: Callable[[dict[str, Any]], str] = agreeing_letter
        self.pause = 0.0  # seconds before each reply of the rule
        self.busiest = 0
        self.under_way = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()
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
            "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
        }


def tofu_asks(count: int) -> tuple[list[Ask], str]:
    """Asks whose answers under test are candidates word for word, and the letters of these."""
    asks, right = [], ""
    for i in range(count):
        wrong = tuple(f"Wrong number {n}." for n in range(5))
        truth = f"The truth of {i}."
        record = {"index": i, "question": f"Question {i}?", "generated": truth, "answer": truth}
        ask, tags = tofu_ask(record | {"perturbed_answer": wrong}, f"Ideal {i}.")
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
        self._answer(step.status, said, step.headers, step.cut)

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


def judge(server: Loopback, folder: Path, asks: list[Ask] | None = None, **changes: Any) -> tuple[list[Ruling], Usage]:
    """What a judge behind a server, opened anew with the cache of a folder, says of some asks, or of one."""
    base = {"kind": "openai", "model": "judge-model", "base_url": f"{server.address}/v1", "key_env": "OPENAI_API_KEY"}
    options = base | changes
    opened = open_judge(JudgeSettings(**options), folder)
    assert opened is not None
    return opened.ask(asks or tofu_asks(1)[0], silent)
