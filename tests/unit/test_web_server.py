"""The page's server: who may ask, whose turn it is, and what happens when somebody leaves before the end."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from msa_lite.errors import StageError, UsageError
from msa_lite.strengths import Strengths
from msa_lite.web.desk import Desk, OpenQuestion
from msa_lite.web.server import make_app, read_question

TOKEN = "secret"
WAIT = 30.0  # seconds; nothing here takes one


class Slow:
    """A panel whose answers go on until they are told to end."""

    names = ("target", "unlearned")

    def __init__(self, folder: Path) -> None:
        self.run = SimpleNamespace(folder=folder)
        self.began, self.may_end, self.stopped = threading.Event(), threading.Event(), threading.Event()
        self.strengths: list[Strengths | None] = []

    def answer(self, name: str, question: str, progress: Any, watch: Callable[[str], None], strengths: Any) -> str:
        self.strengths.append(strengths)
        if question == "faulty":
            raise StageError("out of memory")
        if question == "deaf":  # as a model that is being loaded
            self.began.set()
            self.may_end.wait(WAIT)
        if question == "slow":
            self.began.set()
            try:
                while not self.may_end.wait(0.01):
                    watch("and on")
            except BaseException:
                self.stopped.set()
                raise
        watch(name[:3])
        return name

    def close(self) -> None:
        self.began.clear()


@pytest.fixture
def panel(tmp_path: Path) -> Slow:
    return Slow(tmp_path)


@pytest.fixture
def port(panel: Slow) -> Iterator[int]:
    """A server of the page over the panel."""
    desk = Desk(panel)  # type: ignore[arg-type]
    app = make_app(panel, desk, TOKEN)  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    panel.may_end.set()
    server.should_exit = True
    desk.close()
    thread.join(WAIT)
    assert not thread.is_alive()


@contextmanager
def reply(port: int, path: str, body: Any = None, **headers: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    text = body if body is None or isinstance(body, str) else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, text, headers)
    response = connection.getresponse()
    try:
        yield response
    finally:
        response.close()
        connection.close()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


def all_events(port: int, question: str, **more: Any) -> list[dict[str, Any]]:
    with reply(port, f"/{TOKEN}/answers", {"question": question, **more}) as response:
        return list(events(response))


def test_nothing_is_served_without_the_token_or_under_another_name(port: int) -> None:
    for path in ("/", "/run.json", "/page.js", "/wrong/", f"/{TOKEN}x/", f"/{TOKEN}/../../etc/passwd"):
        with reply(port, path) as response:
            assert response.status == 404, path
    with reply(port, f"/{TOKEN}/", Host="evil.example") as response:  # another name that leads to this address
        assert response.status == 400
    with reply(port, f"/{TOKEN}/") as response:
        assert response.status == 200
        assert "default-src 'none'" in str(response.getheader("Content-Security-Policy"))
        assert response.getheader("Cache-Control") == "no-store"


def test_answers_come_model_by_model(port: int, panel: Slow) -> None:
    got = all_events(port, "who?", strengths={"alpha": 0.5, "filter": 1})
    assert [event["answer"] for event in got if "answer" in event] == ["target", "unlearned"]
    assert [event["text"] for event in got if "text" in event] == ["tar", "unl"]
    assert got[-1] == {"end": True}
    assert panel.strengths == [Strengths(0.5, 0.0, 1.0)] * 2
    assert [e["model"] for e in all_events(port, "who?", models=["unlearned", "x"]) if "answer" in e] == ["unlearned"]


def test_a_second_page_waits_for_the_first(port: int, panel: Slow) -> None:
    with reply(port, f"/{TOKEN}/answers", {"question": "slow"}) as first:
        assert next(events(first)) == {"ahead": 0}
        assert panel.began.wait(WAIT)
        with reply(port, f"/{TOKEN}/answers", {"question": "who?"}) as second:
            assert next(events(second)) == {"ahead": 1}
            panel.may_end.set()
            assert [e["answer"] for e in events(second) if "answer" in e] == ["target", "unlearned"]
        assert [e["answer"] for e in events(first) if "answer" in e] == ["target", "unlearned"]


def test_an_answer_stops_where_its_page_is_closed(port: int, panel: Slow) -> None:
    with reply(port, f"/{TOKEN}/answers", {"question": "slow"}) as response:
        assert next(events(response)) == {"ahead": 0}
        assert panel.began.wait(WAIT)
    assert panel.stopped.wait(WAIT)
    assert [e["answer"] for e in all_events(port, "who?") if "answer" in e] == ["target", "unlearned"]


def test_a_run_that_cannot_be_read_is_told_to_the_page(port: int) -> None:
    with reply(port, f"/{TOKEN}/run.json") as response:
        assert response.status == 500
        assert json.loads(response.read())["error"]


def test_a_fault_is_told_and_the_next_question_is_answered(port: int) -> None:
    assert {"error": "out of memory"} in all_events(port, "faulty")
    assert any("answer" in event for event in all_events(port, "who?"))


@pytest.mark.parametrize(
    "body",
    [
        "", "[]", "{", '{"question": 1}', '{"question": " "}', '{"question": "q", "strengths": {"alpha": "x"}}',
        '{"question": "q", "strengths": {"alpha": -1}}', '{"question": "q", "strengths": {"alpha": NaN}}',
        '{"question": "q", "strengths": {"alpha": 1' + 400 * "0" + "}}", '{"question": "q", "strengths": 3}',
        '{"question": "q", "models": 3}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_request_that_is_no_question_is_refused(body: str) -> None:
    with pytest.raises(UsageError):
        read_question(body.encode(), ["target"])


def test_a_question_without_end_is_refused(port: int) -> None:
    for body in ("", json.dumps({"question": "x" * (1 << 21)})):
        with reply(port, f"/{TOKEN}/answers", body) as response:
            assert response.status == 400
            assert "question" in json.loads(response.read())["error"]


def test_a_load_that_holds_up_the_end_is_told(panel: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msa_lite.web.desk._SOON", 0.05)
    desk = Desk(panel)  # type: ignore[arg-type]
    for _ in range(2):  # the second one never begins
        desk.take(OpenQuestion("deaf", None, ["target"], lambda event: None))
    assert panel.began.wait(WAIT)
    monkeypatch.setattr("msa_lite.web.desk.notices", SimpleNamespace(info=lambda text: panel.may_end.set()))
    desk.close()
    assert panel.may_end.is_set()
    assert len(panel.strengths) == 1
