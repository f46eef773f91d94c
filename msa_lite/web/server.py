"""Serve the page of a run to this machine: a token in the address, one process, nothing written.

GET  /TOKEN/            the page, and its script and styles
GET  /TOKEN/run.json    what it shows (`facts`)
GET  /TOKEN/report.html the report of the run
POST /TOKEN/answers     {"question", "strengths": {"alpha", "beta", "filter"} | null, "models"} → server-sent events
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.errors import MsaError, UsageError
from msa_lite.io.console.libraries import require
from msa_lite.io.finished.seal import in_use
from msa_lite.pipeline.verbs.ask import Panel, open_panel
from msa_lite.report.page.charts import COLOURS_FILE
from msa_lite.report.run.provenance import PAGE_FILE
from msa_lite.strengths import Strengths
from msa_lite.web.desk import Desk, Emit, OpenQuestion
from msa_lite.web.facts import page_facts

HOST = "127.0.0.1"
_FILES = Path(__file__).parent / "page"
_MOST_BYTES = 1 << 20  # of a question
_POLL = 0.5  # seconds between looks whether the page is still there


@dataclass(frozen=True)
class WebPage:
    """The page of a run, with its port taken; `serve` answers until it is interrupted."""

    address: str
    """The address to open, with the token."""
    panel: Panel
    _socket: socket.socket
    _token: str
    _held: ExitStack
    """Its port, and the folder of its run."""

    def serve(self) -> None:
        """Answer requests until the process is interrupted (Ctrl-C)."""
        from msa_lite.web.guard import make_server

        desk = Desk(self.panel)
        app = make_app(self.panel, desk, self._token)
        try:
            with suppress(KeyboardInterrupt):
                make_server(app).run(sockets=[self._socket])
        finally:
            desk.close()
            self._held.close()


def open_page(folder: str | Path, port: int = 0) -> WebPage:
    """Open the page of a run on a port of this machine; 0 takes a free one. Raise as `ask`, UsageError for the port.

    A purge and a new run of the folder refuse as long as it is open.
    """
    require("web")
    with ExitStack() as held:
        held.enter_context(in_use(Path(folder)))
        panel = open_panel(folder, several=True)
        place = held.enter_context(socket.socket())
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind((HOST, port))
            place.listen()  # who opens the address now waits until `serve`
        except OSError as error:
            raise UsageError(f"--port {port}: {error.strerror}; leave it out to take a free one") from error
        token = secrets.token_urlsafe(24)
        return WebPage(f"http://{HOST}:{place.getsockname()[1]}/{token}/", panel, place, token, held.pop_all())


def make_app(panel: Panel, desk: Desk, token: str) -> Any:
    """Return the ASGI application; all of it lies below the token."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route

    from msa_lite.web.guard import guarded

    def file_route(address: str, path: Path) -> Route:
        async def send(request: Any) -> Response:
            if not path.is_file() or not os.access(path, os.R_OK):
                return JSONResponse({"error": f"{path.name} is not there, or cannot be read"}, 404)
            return FileResponse(path)

        return Route(address, send)

    def send_facts(request: Any) -> Response:  # no coroutine: it reads files, in a thread of its own
        try:
            return JSONResponse(page_facts(panel))
        except MsaError as error:  # a file of the run was broken, or removed, while the page is served
            return JSONResponse({"error": str(error)}, 500)

    async def send_answers(request: Any) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return JSONResponse({"error": "a question is sent as application/json"}, 415)
        try:
            text, strengths, models = read_question(await _body(request), panel.names)
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        except UsageError as error:
            return JSONResponse({"error": str(error)}, 400)
        events = _events(request, desk, partial(OpenQuestion, text, strengths, models))
        return StreamingResponse(events, media_type="text/event-stream")

    routes = [
        file_route("/", _FILES / "index.html"),
        file_route("/page.css", _FILES / "page.css"),
        *(file_route(f"/{path.name}", path) for path in sorted(_FILES.glob("*.js"))),
        file_route("/colours.css", COLOURS_FILE),
        file_route(f"/{PAGE_FILE}", panel.run.folder / PAGE_FILE),
        Route("/run.json", send_facts),
        Route("/answers", send_answers, methods=["POST"]),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])  # no other name may lead here
    return guarded(Starlette(routes=[Mount(f"/{token}", routes=routes)], middleware=[hosts]), f"/{token}/")


async def _body(request: Any) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            raise UsageError("the question is too long")
    return bytes(body)


def read_question(body: bytes, known: Sequence[str]) -> tuple[str, Strengths | None, list[str]]:
    """Return question, strengths and models in a request. Raise UsageError for anything else.

    known: the models that there are; all of them are asked where the request names none.
    """
    try:
        values = json.loads(body)
        text, strengths = values["question"], values.get("strengths")
        numbers = None if strengths is None else Strengths.of(strengths)
        asked = values.get("models", [*known])
        models = [name for name in known if name in asked]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(
            'expected {"question": text, "strengths": {"alpha", "beta", "filter"} or null, "models": [names]}'
        ) from error
    if not isinstance(asked, list):
        raise UsageError("models are a list of names")
    if not isinstance(text, str) or not text.strip():
        raise UsageError("the question is empty")
    if numbers and not all(math.isfinite(value) and value >= 0 for value in numbers.values.values()):
        raise UsageError("strengths are numbers of at least 0")
    return text, numbers, models


async def _events(request: Any, desk: Desk, make: Callable[[Emit], OpenQuestion]) -> AsyncIterator[str]:
    """Yield the answers to a question as server-sent events. A page that is closed stops its answer."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()

    def emit(event: Mapping[str, Any] | None) -> None:
        with suppress(RuntimeError):  # the server is closing
            loop.call_soon_threadsafe(events.put_nowait, event)

    question = make(emit)
    try:
        yield _event({"ahead": desk.take(question)})
        while not await request.is_disconnected():
            with suppress(asyncio.TimeoutError):
                event = await asyncio.wait_for(events.get(), _POLL)
                yield _event(event if event is not None else {"end": True})
                if event is None:
                    return
    finally:
        question.stop.set()


def _event(event: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"
