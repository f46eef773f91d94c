"""Cases of the server of `msa-lite web`: requests of any bytes, whole or broken, with and without its token."""

from __future__ import annotations

import atexit
import functools
import json
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.tools.fuzz.case import Case
from tests.tools.fuzz.child import Outcome
from tests.tools.fuzz.values import TEXTS, VALUES, dump

TOKEN = "secret-token"
_WAIT = 20.0  # seconds; other processes may have the cores
_NONE = 444  # the status of no answer
METHODS = (*b"GET GET POST POST HEAD OPTIONS PUT DELETE TRACE CONNECT get".split(), b"\xff")
PATHS = (
    b"/", b"", b"/run.json", b"/report.html", b"/report.html", *[b"/answers"] * 9, b"/page.js",
    b"/page.css/", b"//", b"/../etc/passwd", b"/%2e%2e/%2e%2e/etc/passwd", b"/..%2f..%2fetc%2fpasswd", b"/%00", b"/%ff",
    b"/%", b"/report.html%00.js", b"/report.html?x=%0d%0aX:1", b"/page.js#x", b"/" + b"a" * 9000, b"/\\..\\x", b"/;x",
)  # fmt: skip
HEADERS = (
    b"Host: 127.0.0.1", b"Host: evil.example", b"Host: 127.0.0.1@evil.example", b"Host: localhost:99999", b"Host:",
    b"Content-Type: application/json", b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-16",
    b"Origin: http://127.0.0.1", b"Origin: null", b"Origin: http://evil.example", b"Origin: http://127.0.0.1:1",
    b"Sec-Fetch-Site: cross-site", b"Sec-Fetch-Site: same-origin", b"Sec-Fetch-Mode: navigate", b"Expect: 100-continue",
    b"Connection: close", b"Connection: upgrade\r\nUpgrade: websocket", b"Upgrade: h2c", b"Range: bytes=0-1,1-2",
    b"Range: bytes=99999999999-", b"Range: bytes=-" + b"9" * 5000, b"If-Range: x", b"X-Forwarded-Host: evil.example",
    b"X-Forwarded-Proto: https", b"X-Forwarded-For: 10.0.0.1, \xff", b"Forwarded: host=evil.example",
    b"X: " + b"x" * 9000, b"X:\xff\x00", b" folded", b"No colon", b"Content-Length: 5", b"Content-Length: 5, 6",
    b"Content-Length: -1", b"Content-Length: " + b"9" * 30, b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked",
    b"Cookie: a=b", b"Accept-Encoding: gzip", b"Content-Encoding: gzip", b"TE: trailers", b"Proxy: x",
    b"Authorization: Basic x",
)  # fmt: skip
HARMLESS = (
    b"Accept-Encoding: gzip", b"Cookie: a=b", b"Origin: http://localhost", b"Origin: https://localhost", b"DNT: 1",
    b"Sec-Fetch-Site: same-origin", b"X-Forwarded-Host: evil.example", b"TE: trailers", b"Connection: close",
    b"Authorization: Basic x", b"X-Forwarded-For: 10.0.0.1, \xff", b"X-Forwarded-Proto: https", b"Accept: */*",
)  # fmt: skip
BODIES = (
    b"", b"\xff\xfe{", b"\x00", b"[" * 100_000, b'{"a":' * 50_000, b'{"question": "q", "question": "r"}',
    b'{"question": "\\ud800"}', b'{"question": "q", "strengths": {"alpha": 1' + b"0" * 5000 + b"}}",
    b'{"question": "q", "strengths": {"alpha": NaN, "beta": -Infinity}}', b'{"question": "' + b"x" * (1 << 21) + b'"}',
    b'{"question": "q", "models": {"target": 1}}', b'{"question": "q", "models": "target"}',
)  # fmt: skip
POLICY = ("default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")


class Panel:
    """Two models that answer with their names."""

    names = ("target", "unlearned")

    def __init__(self, folder: Path) -> None:
        self.run = SimpleNamespace(folder=folder)

    def answer(self, name: str, question: str, progress: Any, watch: Callable[[str], None], strengths: Any) -> str:
        watch(name[:3])
        return name

    def close(self) -> None: ...


class Running(NamedTuple):
    port: int
    err: Path


@functools.cache
def running() -> Running:
    """Start the server in a process of its own."""
    folder = Path(tempfile.mkdtemp())
    (folder / "report.html").write_text("<p>a report")
    with (folder / "err").open("wb") as err:
        process = subprocess.Popen([sys.executable, "-m", __name__, folder], stdout=subprocess.PIPE, stderr=err)
    atexit.register(process.kill)
    assert process.stdout is not None
    return Running(int(process.stdout.readline()), folder / "err")


def exchange(pieces: list[bytes], end: str) -> bytes:
    """Send pieces, and return what comes back. end: of our side: "wait", "answers", "half" closed, or "gone"."""
    back = b""
    with socket.create_connection(("127.0.0.1", running().port), _WAIT) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            if end == "gone":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return back
            if end == "half":
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(0.4 if end == "wait" else _WAIT)
            while b'"end": true' not in back and (piece := connection.recv(1 << 16)):
                back += piece
                if end == "wait":
                    connection.settimeout(0.05)
        except OSError:  # it has closed before we had sent all; or it waits for more
            pass
    return back


def play(pieces: list[bytes], end: str) -> tuple[Outcome, list[str]]:
    """Send a case; return its HTTP status, 0 for those below 300, and each breach."""
    before = running().err.stat().st_size
    back, found = exchange(pieces, end), list[str]()
    heads = re.findall(rb"HTTP/1\.1 (\d+) [^\r]*\r\n(.*?)\r\n\r\n", back, re.DOTALL)
    for status, head in heads:
        lines = head.decode("latin-1").lower().split("\r\n")
        policy = next((line for line in lines if line.startswith("content-security-policy: ")), "")
        if int(status) >= 200 and not all(word in policy for word in POLICY):
            found.append(f"headers: no policy with {status!r}")
        if int(status) >= 200 and "x-content-type-options: nosniff" not in lines:
            found.append(f"headers: nosniff is missing with {status!r}")
        if 200 <= int(status) < 300 and TOKEN.encode() not in b"".join(pieces):
            found.append(f"open: {status!r} without the token")
        if status == b"500" and b'{"error":' not in back:
            found.append("traceback: 500")
    question = json.dumps({"question": "q"}).encode()
    host = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(question)
    started = time.monotonic()
    if b'"end": true' not in exchange([f"POST /{TOKEN}/answers HTTP/1.1\r\n".encode() + host + question], "answers"):
        found.append("dead: a sound question is not answered afterwards")
    if time.monotonic() - started > _WAIT / 2:
        found.append("slow: a sound question waits")
    with running().err.open("rb") as file:
        file.seek(before)
        words = file.read().decode("utf-8", "replace")
    if words:
        found.append(f"stderr: {words[-600:]}")
    status = int(heads[-1][0]) if heads else _NONE
    return Outcome(0 if 200 <= status < 300 else status, "", words, 0, False), found


@st.composite
def web_cases(draw: Callable[..., Any]) -> Case:
    """A request to the server."""
    if draw(st.integers(0, 2)) == 0:  # a sound one
        path = draw(st.sampled_from([b"/", b"/report.html", b"/page.js", b"/colours.css", b"/answers", b"/answers"]))
        fields = draw(st.lists(st.sampled_from(HARMLESS), max_size=3, unique=True))
        body = dump({"question": draw(st.sampled_from(TEXTS)) + "?"}).encode() if path == b"/answers" else b""
        line = (b"POST" if body else b"GET") + b" /" + TOKEN.encode() + path + b" HTTP/1.1"
        start = [line, b"Host: localhost", b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
        sent = b"\r\n".join([*start, *fields, b"", body])
        return Case("web", {}, [], edits=[repr(sent[:600])], act=lambda root: play([sent], "wait"))
    token = draw(st.sampled_from([*[TOKEN] * 9, "wrong", TOKEN[:-1], "", f"x/../{TOKEN}", TOKEN.upper()]))
    fields = draw(st.just([]) | st.lists(st.sampled_from(HEADERS), max_size=3))
    if draw(st.integers(0, 5)):
        fields = [b"Host: 127.0.0.1", b"Content-Type: application/json", *fields]
    json_body = st.fixed_dictionaries(
        {"question": st.sampled_from(TEXTS) | VALUES}, optional={"strengths": VALUES, "models": VALUES}
    ).map(lambda value: dump(value).encode())
    body = draw(json_body | json_body | st.sampled_from(BODIES) | st.binary(max_size=40))
    framing = draw(st.sampled_from(["length", "length", "chunked", "less", "more", "broken", "none"]))
    if framing in ("chunked", "broken"):
        fields.append(b"Transfer-Encoding: chunked")
        broken = st.sampled_from([b"zz", b"-1", b"f" * 40, b"1;x=" + body])
        size = b"%x" % len(body) if framing == "chunked" else draw(broken)
        end = draw(st.sampled_from([b"\r\n", b"X: 1\r\n\r\n", b"\r", b"\x00\r\n\r\n"]))
        body = b"\r\n".join([size, body, b"0", end])
    elif framing != "none":
        fields.append(b"Content-Length: %d" % max(0, len(body) + {"less": -3, "more": 3}.get(framing, 0)))
    method, path = draw(st.sampled_from(METHODS)), draw(st.sampled_from(PATHS))
    version = draw(st.sampled_from([b"HTTP/1.1"] * 20 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b""]))
    sent = b"\r\n".join([b" ".join([method, b"/" + token.encode() + path, version]), *fields, b"", body])
    sent *= draw(st.sampled_from([1, 1, 1, 2]))
    sent += draw(st.sampled_from([b"", b"", b"GET", b"\x16\x03\x01", b"\r\n" * 9]))
    if draw(st.integers(0, 7)) == 0:
        sent = sent[: draw(st.integers(0, min(len(sent), 400)))]
    at = draw(st.integers(0, min(len(sent), 300)))
    pieces = draw(st.sampled_from([[sent], [sent[:at], sent[at:]]]))
    end = draw(st.sampled_from(["wait", "wait", "wait", "wait", "wait", "half", "gone"]))
    note = f"{end}: {sent[:600]!r}"
    return Case("web", {}, [], edits=[note], act=lambda root: play(pieces, end))


WEB = {"web": web_cases()}


def _serve(folder: Path) -> None:
    from msa_lite.web.desk import Desk
    from msa_lite.web.guard import make_server
    from msa_lite.web.server import make_app

    place = socket.create_server(("127.0.0.1", 0))
    panel: Any = Panel(folder)
    print(place.getsockname()[1], flush=True)
    make_server(make_app(panel, Desk(panel), TOKEN)).run(sockets=[place])


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
