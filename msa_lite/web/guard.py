"""Keep strangers out of the page: the headers of all responses, requests of other sites, connections without end."""

from __future__ import annotations

from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

_PATIENCE = 10.0  # seconds within which a whole request has to come
_BURST = 150  # connections that are taken at once, before any of them is read
try:
    from resource import RLIMIT_NOFILE, getrlimit

    _FILES = getrlimit(RLIMIT_NOFILE)[0]  # that may be open; 256 on macOS; -1: no limit
except ImportError:  # Windows
    _FILES = -1
_MOST = min(500, max(20, _FILES - _BURST - 50)) if _FILES > 0 else 500  # connections that wait for their request
_UNENDED = (h11.IDLE, h11.SEND_BODY)  # states of a client whose request is not whole
_CLOSED = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_PAGE = f"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; {_CLOSED}"
# Of all but the page. Somebody may have changed the report: it has no script, an origin of its own, and sends nothing
# out but what a user clicks on. A bare connection (rel=preconnect) is beyond a policy; it carries no text.
_OTHER = f"sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; {_CLOSED}"


def _headers(policy: str) -> list[tuple[bytes, bytes]]:
    lines = {
        "content-security-policy": policy,
        "cache-control": "no-store",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return [(name.encode(), text.encode()) for name, text in lines.items()]


def guarded(app: Any, page: str) -> Any:
    """Return an ASGI application that refuses requests of other sites, and sends each response with our headers.

    page: the path of the one document that may run its scripts.
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_headers(_PAGE if scope["path"] == page else _OTHER)]
            await send(message)

        refusal = None if _is_own(scope) else JSONResponse({"error": "this is for the page itself"}, 403)
        await (refusal or app)(scope, receive, send_guarded)

    return answer


def _is_own(scope: Any) -> bool:
    """Check that no other site sends a request; browsers name it. A link to the page may stand anywhere."""
    headers = Headers(scope=scope)
    site, origin = headers.get("sec-fetch-site", "same-origin"), headers.get("origin")
    if scope["method"] in ("GET", "HEAD") and (site == "none" or headers.get("sec-fetch-mode") == "navigate"):
        return True
    # A tunnel may add encryption on the way.
    return site == "same-origin" and (origin is None or origin.partition("://")[2] == headers.get("host"))


class Connection(H11Protocol):
    """A connection whose requests come whole within seconds. The oldest of too many that still wait is dropped."""

    deadline: Any = None
    """The timer that drops it; None once its request is whole."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state not in _UNENDED:
            self._end_wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_wait()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close the connection."""
        lines = [(b"connection", b"close"), (b"content-length", b"0"), *_headers(_OTHER)]
        self.transport.write(b"\r\n".join([b"HTTP/1.1 400 Bad Request", *map(b": ".join, lines), b"\r\n"]))
        self.transport.close()

    def _wait(self) -> None:
        self._end_wait()
        if self.conn.their_state in _UNENDED:
            self.deadline = self.loop.call_later(_PATIENCE, self._drop)
        waiting = [each for each in self.connections if each.deadline]
        if len(waiting) > _MOST:
            min(waiting, key=lambda each: each.deadline.when())._drop()

    def _end_wait(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _drop(self) -> None:
        self._end_wait()
        self.transport.abort()


def make_server(app: Any) -> Server:
    """Return a server for this machine: no proxy before it, no web sockets, no words about strangers' requests."""
    return Server(
        Config(
            app, http=Connection, ws="none", lifespan="off", backlog=_BURST, proxy_headers=False, server_header=False,
            log_level="error", access_log=False, timeout_graceful_shutdown=1,
        )
    )  # fmt: skip
