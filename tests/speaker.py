"""An HTTP server on loopback that says whatever it is told to, and a judge that asks it."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from msa_lite.evals.judge import JudgeSettings, Ruling, Usage, open_judge, openai_judge
from msa_lite.io.console.progress import silent
from tests.judge_server import JudgeServer, tofu_asks
from tests.loopback import Loopback


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
        super().__init__(_Handler)


class _Handler(BaseHTTPRequestHandler):
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
