"""Serve the page of a run, or of the runs in a folder, to this machine: a token in the address, nothing written.

GET  /TOKEN/             the page, and its script and styles
GET  /TOKEN/run.json     what it shows: a run to ask (`facts`), one that is going on, or the list of runs (`runs`)
GET  /TOKEN/report.html  the report of the run
POST /TOKEN/answers      {"model", "text", "system", "earlier": [[question, answer]], "tokens", "strengths"}
                         → server-sent events
?run=NAME names one of several runs; ?watch asks only how far it is.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import MsaError, UsageError
from msa_lite.io.console.libraries import require
from msa_lite.io.files.reading import read_text
from msa_lite.pipeline.verbs.ask import Panel, Question
from msa_lite.report.page.charts import COLOURS_FILE
from msa_lite.report.run.provenance import PAGE_FILE
from msa_lite.web.desk import Desk
from msa_lite.web.facts import page_facts
from msa_lite.web.runs import can_be_asked, find_runs, list_facts, progress_facts

HOST = "127.0.0.1"
_FILES = Path(__file__).parent / "page"
_MOST_BYTES = 1 << 20  # of a question
_MOST_TOKENS = 1 << 14  # of an answer


@dataclass(frozen=True)
class WebPage:
    """The page of a run, or of a folder of runs, with its port taken; `serve` answers until it is interrupted."""

    address: str
    """The address to open, with the token."""
    _app: Any
    _socket: socket.socket
    _held: ExitStack
    """Its port, and the runs that are open."""

    def serve(self) -> None:
        """Answer requests until the process is interrupted (Ctrl-C)."""
        from msa_lite.web.guard import make_server

        with self._held, suppress(KeyboardInterrupt):
            make_server(self._app).run(sockets=[self._socket])


def open_page(folder: str | Path, port: int = 0) -> WebPage:
    """Open the page of a run, or of the runs in a folder, on a port of this machine; 0 takes a free one.

    A purge and a new run of a finished run refuse as long as it is open; one that is going on is not held. Raise
    UsageError for a folder without runs and for the port; for a finished run, raise as `ask`.
    """
    require("web")
    folder, desk, token = Path(folder), Desk(), secrets.token_urlsafe(24)
    with ExitStack() as held:
        held.callback(desk.close)
        if (run := find_runs(folder).get("")) and can_be_asked(run):
            desk.open(run)
        try:
            place = held.enter_context(socket.create_server((HOST, port)))  # who opens the address waits until `serve`
        except OSError as error:
            raise UsageError(f"--port {port}: {error.strerror}; leave it out to take a free one") from error
        app, address = make_app(folder, desk, token), f"http://{HOST}:{place.getsockname()[1]}/{token}/"
        return WebPage(address, app, place, held.pop_all())


def make_app(folder: Path, desk: Desk, token: str) -> Any:
    """Return the ASGI application; all of it lies below the token. folder: that of a run, or of several."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect
    from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    from msa_lite.web.guard import guarded

    def find(request: Any) -> Path:
        name = request.query_params.get("run", "")
        if run := find_runs(folder).get(name):
            return run
        raise UsageError(f"{folder / name}: no run of msa-lite")

    def send_facts(request: Any) -> Response:  # no coroutine: it reads files, in a thread of its own
        if "run" not in request.query_params and "" not in find_runs(folder):
            return JSONResponse(list_facts(folder))
        run = find(request)
        if "watch" in request.query_params or not can_be_asked(run):
            return JSONResponse(progress_facts(run))
        return JSONResponse(page_facts(desk.panel(run)))

    async def send_answers(request: Any) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return JSONResponse({"error": "a question is sent as application/json"}, 415)
        panel = await asyncio.to_thread(lambda: desk.panel(find(request)))
        model, question = read_question(await _body(request), panel.names)
        return StreamingResponse(_events(request, desk, panel, model, question), media_type="text/event-stream")

    def tell(request: Any, error: Exception) -> Response:  # such as a file that was removed, or broken, meanwhile
        return JSONResponse({"error": str(error)}, 400 if isinstance(error, UsageError) else 500)

    routes = [
        Route(f"/{PAGE_FILE}", lambda request: HTMLResponse(read_text(find(request) / PAGE_FILE))),
        Route("/run.json", send_facts),
        Route("/answers", send_answers, methods=["POST"]),
        Route(f"/{COLOURS_FILE.name}", lambda _: FileResponse(COLOURS_FILE)),
        Mount("/", StaticFiles(directory=_FILES, html=True)),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])  # no other name may lead here
    handlers: Any = {MsaError: tell, ClientDisconnect: tell}
    app = Starlette(routes=[Mount(f"/{token}", routes=routes)], middleware=[hosts], exception_handlers=handlers)
    return guarded(app, f"/{token}/")


async def _body(request: Any) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            raise UsageError("the question is too long")
    return bytes(body)


def read_question(body: bytes, known: Sequence[str]) -> tuple[str, Question]:
    """Return the model and the question of a request. Raise UsageError for anything else.

    known: the models that there are.
    """
    from pydantic import TypeAdapter

    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
        values = json.loads(text.encode("utf-8", "replace"))  # without halves of signs
        model, question = values.pop("model"), TypeAdapter(Question).validate_python(values)
        numbers = [1, *(question.strengths.values.values() if question.strengths else ())]
        if model in known and 0 < (question.tokens or 1) <= _MOST_TOKENS and all(0 <= n < math.inf for n in numbers):
            return model, question
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"no question: {error}") from error
    raise UsageError(f"a question is to one of {', '.join(known)}, for 1 to {_MOST_TOKENS} tokens, at strengths ≥ 0")


async def _events(request: Any, desk: Desk, panel: Panel, model: str, question: Question) -> AsyncIterator[str]:
    """Yield the answer to a question as server-sent events. A page that is closed stops its answer."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()

    def emit(event: Mapping[str, Any] | None) -> None:
        with suppress(RuntimeError):  # the server is closing
            loop.call_soon_threadsafe(events.put_nowait, event)

    ahead, stop = desk.take(panel, model, question, emit)
    events.put_nowait({"ahead": ahead})
    try:
        while not await request.is_disconnected():
            with suppress(asyncio.TimeoutError):
                event = await asyncio.wait_for(events.get(), 0.5)  # or see whether the page is there
                yield f"data: {json.dumps(event or {'end': True})}\n\n"
                if event is None:
                    return
    finally:
        stop.set()
