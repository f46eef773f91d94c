"""An HTTP server on loopback for as long as a `with` block lasts; what it says is up to the handler."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # of 5, as is usual, connections that come at once would have to wait for a second


class Loopback:
    """Serves between `__enter__` and `__exit__`. Its handlers find it as `self.server.owner`."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        self._http = _Server(("127.0.0.1", port), handler)
        self._http.owner = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the port: from here on connections are refused. May be called twice."""
        self._http.shutdown()
        self._http.server_close()

    @property
    def port(self) -> int:
        """The port; a free one where none was wanted."""
        return self._http.server_port

    @property
    def address(self) -> str:
        """Where it is, without a path."""
        return f"http://127.0.0.1:{self.port}"
