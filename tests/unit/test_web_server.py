"""The page's server: who may ask, whose turn it is, what strangers send, who leaves early, and which runs there are."""

from __future__ import annotations

import http.client
import json
import logging
import os
import runpy
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.errors import StageError, UsageError
from msa_lite.io.finished.seal import in_use, locked
from msa_lite.pipeline.verbs.ask import Question
from msa_lite.report import Metric, Report, write_report
from msa_lite.report.run.stages import ListedStage
from msa_lite.strengths import Strengths
from msa_lite.web import guard
from msa_lite.web.desk import Desk
from msa_lite.web.guard import make_server
from msa_lite.web.runs import list_facts, progress_facts
from msa_lite.web.server import make_app, read_question
from tests.support.runs import make_run_folder, put_stages

TOKEN = "secret"
WAIT = 30.0  # seconds; nothing here takes one
EMPTY: Mapping[str, str] = {}


class Slow:
    """A panel whose answers go on until they are told to end."""

    names = ("target", "unlearned")

    def __init__(self, folder: Path) -> None:
        self.run = SimpleNamespace(folder=folder)
        (folder / "recipe.yaml").write_text("# A run of msa-lite: …\n")
        self.began, self.may_end, self.stopped = threading.Event(), threading.Event(), threading.Event()
        self.asked: list[Question] = []

    def answer(self, name: str, asked: Question, progress: Any, watch: Callable[[str], None]) -> str:
        self.asked.append(asked)
        question = asked.text
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


@contextmanager
def served(app: Any) -> Iterator[int]:
    server, place = make_server(app), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([place],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield place.getsockname()[1]
    server.should_exit = True
    thread.join(WAIT)
    assert not thread.is_alive()


@pytest.fixture
def port(panel: Slow, caplog: pytest.LogCaptureFixture) -> Iterator[int]:
    """A server of the page over the panel; it tells of no fault of its own."""
    desk = Desk()
    desk.panels[panel.run.folder] = panel  # type: ignore[assignment]
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    with served(make_app(panel.run.folder, desk, TOKEN)) as number:
        yield number
        panel.may_end.set()
        desk.close()
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@contextmanager
def reply(
    port: int, path: str, body: Any = None, more: Mapping[str, str] = EMPTY
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    text = body if body is None or isinstance(body, str) else json.dumps(body)
    headers = {} if body is None else {"Content-Type": "application/json"}
    connection.request("GET" if body is None else "POST", path, text, headers | more)
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


def all_events(port: int, text: str, model: str = "target", **more: Any) -> list[dict[str, Any]]:
    with reply(port, f"/{TOKEN}/answers", {"text": text, "model": model, **more}) as response:
        return list(events(response))


def test_nothing_is_served_without_the_token_or_under_another_name(port: int) -> None:
    for path in ("/", "/run.json", "/page.js", "/wrong/", f"/{TOKEN}x/", f"/{TOKEN}/../../etc/passwd"):
        with reply(port, path) as response:
            assert response.status == 404, path
    with reply(
        port, f"/{TOKEN}/", more={"Host": "evil.example"}
    ) as response:  # another name that leads to this address
        assert response.status == 400
    with reply(port, f"/{TOKEN}/") as response:
        assert response.status == 200


HOST = b"Host: 127.0.0.1\r\n"
JSON = HOST + b"Content-Type: application/json\r\n"
ASK = f"POST /{TOKEN}/answers HTTP/1.1\r\n".encode() + JSON
PAGE = f"GET /{TOKEN}/ HTTP/1.1\r\n".encode() + HOST
# What is sent, and the status of its answer; 0 for none.
REQUESTS = [
    (PAGE + b"\r\n", 200),
    (PAGE.replace(b"GET", b"HEAD") + b"\r\n", 200),
    (PAGE.replace(b"GET", b"POST") + b"\r\n", 405),
    (PAGE.replace(b"GET", b"OPTIONS") + b"\r\n", 405),
    (PAGE.replace(b"127.0.0.1", b"evil.example") + b"\r\n", 400),
    (PAGE.replace(b"127.0.0.1", b"evil.example") + b"X-Forwarded-Host: 127.0.0.1\r\n\r\n", 400),
    (PAGE + b"X-Forwarded-For: 10.0.0.1\r\nX-Forwarded-Proto: https\r\nForwarded: for=1\r\n\r\n", 200),
    (PAGE.replace(b"/ ", b"/report.html ") + b"\r\n", 200),
    (PAGE.replace(b"/ ", b"/report.html ") + b"Range: bytes=x\r\n\r\n", 200),
    (PAGE.replace(b"/ ", b"/page.js ") + b"\r\n", 200),
    (PAGE.replace(b"/ ", b"/run.json ") + b"\r\n", 500),
    (PAGE.replace(b"/ ", b" ") + b"\r\n", 307),
    (PAGE.replace(b"/ ", b"/../x%2f..%00 ") + b"\r\n", 404),
    (PAGE.replace(TOKEN.encode(), b"wrong") + b"\r\n", 404),
    (PAGE + b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\n\r\n", 200),
    (b"\x16\x03\x01 is no HTTP\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nX: " + 20_000 * b"x", 400),
    (ASK + b"Content-Length: 2\r\n\r\n[]", 400),
    (ASK + b'Content-Length: 99999\r\n\r\n{"question"', 0),
    (ASK + b"Content-Length: -1\r\n\r\n", 400),
    (ASK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n[]", 0),
    (ASK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n[]\r\n0\r\n\r\n", 400),
    (ASK.replace(TOKEN.encode(), b"wrong") + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n[]\r\n0\r\n\r\n", 400),
    (PAGE + b"\r\n" + b"\x00\r\n\r\n", 200),
    (ASK.replace(b"application/json", b"text/plain") + b"Content-Length: 2\r\n\r\n[]", 415),
    (ASK + b"Origin: http://evil.example\r\nContent-Length: 2\r\n\r\n[]", 403),
    (ASK + b"Origin: null\r\nContent-Length: 2\r\n\r\n[]", 403),
    (ASK + b"Origin: http://127.0.0.1\r\nContent-Length: 2\r\n\r\n[]", 400),
    (ASK + b"Origin: https://127.0.0.1\r\nContent-Length: 2\r\n\r\n[]", 400),
    (ASK + b"Origin: http://127.0.0.1:1\r\nContent-Length: 2\r\n\r\n[]", 403),
    (ASK + b"Sec-Fetch-Site: cross-site\r\nContent-Length: 2\r\n\r\n[]", 403),
    (ASK + b"Sec-Fetch-Site: none\r\nSec-Fetch-Mode: navigate\r\nContent-Length: 2\r\n\r\n[]", 403),
    (ASK + b"Sec-Fetch-Site: same-origin\r\nContent-Length: 2\r\n\r\n[]", 400),
    (PAGE + b"Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\n\r\n", 200),
    (PAGE + b"Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n\r\n", 403),
]  # fmt: skip


def head_of(port: int, sent: bytes, ends: bool) -> str:
    """The head of what comes back for some bytes. ends: nothing comes after them."""
    with socket.create_connection(("127.0.0.1", port), WAIT) as connection:
        connection.sendall(sent)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        back = b""
        while b"\r\n\r\n" not in back and (piece := connection.recv(1 << 16)):
            back += piece
    return back.partition(b"\r\n\r\n")[0].decode().lower()


def test_every_answer_has_the_headers_whatever_was_sent(port: int, panel: Slow) -> None:
    (panel.run.folder / "report.html").write_text("<p>a report")
    for sent, status in REQUESTS:
        head = head_of(port, sent, not status)
        first, *lines = head.split("\r\n")
        assert first.split()[1:2] == ([str(status)] if status else []), (sent[:200], head)
        if not status:
            continue
        headers = dict(line.split(": ", 1) for line in lines)
        policy = headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "form-action 'none'", "frame-ancestors 'none'"} <= {*policy}, sent
        assert ("sandbox" in policy) is not ("script-src 'self'" in policy)
        assert ("sandbox" not in policy) is (f" /{TOKEN}/ ".encode() in sent), sent
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers
    assert any("answer" in event for event in all_events(port, "who?"))


def test_a_question_may_hold_any_text(port: int) -> None:
    for question in ("\ud800", "\x00", "\u202e", "é" * 9, "[" * 99_999):
        assert all_events(port, question)[-1] == {"end": True}


def test_strangers_who_never_end_their_requests_keep_nobody_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_MOST", 20)
    starts = (b"", b"GET /", PAGE, ASK + b"Content-Length: 9\r\n\r\n{", ASK.replace(TOKEN.encode(), b"x") + b"\r\n{")
    strangers: list[socket.socket] = []
    with reply(port, f"/{TOKEN}/answers", {"text": "slow", "model": "target"}) as owner:
        for number in range(200):
            strangers.append(socket.create_connection(("127.0.0.1", port), WAIT))
            strangers[-1].sendall(starts[number % len(starts)])
        with reply(port, f"/{TOKEN}/") as response:
            assert response.status == 200
        assert sum(map(is_open, strangers)) <= 20
        assert next(events(owner)) == {"ahead": 0}


def test_connections_leave_room_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((256, 56), (1024, 500), (-1, 500)):
        monkeypatch.setattr("resource.getrlimit", lambda kind, limit=limit: (limit, -1))
        assert runpy.run_path(str(guard.__file__))["_MOST"] == most


def is_open(connection: socket.socket, wait: float = 0.0) -> bool:
    with connection, suppress(ConnectionResetError):
        connection.settimeout(wait)
        try:
            while connection.recv(1 << 16):
                pass
        except (BlockingIOError, TimeoutError):
            return True
    return False


@pytest.mark.parametrize("start", [b"", b"GET /", PAGE, PAGE + b"\r\n" + PAGE, ASK + b"Content-Length: 9\r\n\r\n{"])
def test_a_request_that_does_not_end_is_dropped(port: int, start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_PATIENCE", 0.3)
    with socket.create_connection(("127.0.0.1", port), WAIT) as connection:
        connection.sendall(start)
        assert not is_open(connection, WAIT)


def test_two_hundred_questions_at_once_are_answered(port: int) -> None:
    body = json.dumps({"text": "who?", "model": "target"}).encode()
    sent = ASK + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    connections = [socket.create_connection(("127.0.0.1", port), WAIT) for _ in range(200)]
    for connection in connections:
        connection.sendall(sent)
    for connection in connections:
        with connection:
            text = b"".join(iter(lambda: connection.recv(1 << 16), b""))  # noqa: B023
            assert (text.count(b'"answer"'), text.count(b'"end"')) == (1, 1)


def test_an_answer_comes_as_it_grows_with_all_that_was_asked(port: int, panel: Slow) -> None:
    more = {"system": "Be brief.", "earlier": [["Hi", "Ho"]], "tokens": 9, "strengths": {"alpha": 0.5, "filter": 1}}
    got = all_events(port, "who?", "unlearned", **more)
    assert [event["text"] for event in got if "text" in event] == ["unl"]
    assert [event["answer"] for event in got if "answer" in event] == ["unlearned"]
    assert got[-1] == {"end": True}
    assert panel.asked == [Question("who?", "Be brief.", (("Hi", "Ho"),), 9, Strengths(0.5, 0.0, 1.0))]


def test_a_second_page_waits_for_the_first(port: int, panel: Slow) -> None:
    with reply(port, f"/{TOKEN}/answers", {"text": "slow", "model": "target"}) as first:
        assert next(events(first)) == {"ahead": 0}
        assert panel.began.wait(WAIT)
        with reply(port, f"/{TOKEN}/answers", {"text": "who?", "model": "target"}) as second:
            assert next(events(second)) == {"ahead": 1}
            panel.may_end.set()
            assert [e["answer"] for e in events(second) if "answer" in e] == ["target"]
        assert [e["answer"] for e in events(first) if "answer" in e] == ["target"]


def test_an_answer_stops_where_its_page_is_closed(port: int, panel: Slow) -> None:
    with reply(port, f"/{TOKEN}/answers", {"text": "slow", "model": "target"}) as response:
        assert next(events(response)) == {"ahead": 0}
        assert panel.began.wait(WAIT)
    assert panel.stopped.wait(WAIT)
    assert [e["answer"] for e in all_events(port, "who?") if "answer" in e] == ["target"]


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
        "", "[]", "{", b"\xff{", b"\xff\xfe{", "[" * 100_000, '{"text": 1, "model": "target"}', '{"text": "q"}',
        '{"text": "q", "model": "x"}', '{"text": "q", "model": ["target"]}',
        *(f'{{"text": "q", "model": "target", {more}}}' for more in (
            '"strengths": {"alpha": "x"}', '"strengths": {"alpha": -1}', '"strengths": {"alpha": NaN}',
            '"strengths": 3', '"strengths": {"alpha": 1' + 400 * "0" + "}", '"system": 3', '"tokens": -1',
            '"tokens": 99999',
            '"tokens": "many"', '"earlier": "no"', '"earlier": [["question"]]', '"earlier": [["question", null]]',
        )),
    ],
)  # fmt: skip
def test_a_request_that_is_no_question_is_refused(body: str | bytes) -> None:
    with pytest.raises(UsageError):
        read_question(body if isinstance(body, bytes) else body.encode(), ["target"])


def test_a_question_without_end_is_refused(port: int) -> None:
    for body in ("", json.dumps({"text": "x" * (1 << 21)})):
        with reply(port, f"/{TOKEN}/answers", body) as response:
            assert response.status == 400
            assert "question" in json.loads(response.read())["error"]


def test_a_load_that_holds_up_the_end_is_told(panel: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msa_lite.web.desk._SOON", 0.05)
    desk = Desk()
    for _ in range(2):  # the second one never begins
        desk.take(panel, "target", Question("deaf"), lambda event: None)  # type: ignore[arg-type]
    assert panel.began.wait(WAIT)
    monkeypatch.setattr("msa_lite.web.desk.notices", SimpleNamespace(info=lambda text: panel.may_end.set()))
    desk.close()
    assert panel.may_end.is_set()
    assert len(panel.asked) == 1


def test_a_list_says_which_runs_are_purged_broken_or_not_finished(tmp_path: Path) -> None:
    runs = {
        name: make_run_folder(tmp_path / name) for name in ("done", "purged", "broken", "begun", "again", "<b>going")
    }
    (runs["purged"] / "purged.json").write_text('{"began": "2026-01-02T00:00:00+00:00", "removed": []}')
    (runs["broken"] / "verdict.json").write_text('{"outcome": ')
    for name in ("begun", "<b>going"):
        (runs[name] / "verdict.json").unlink()
        (runs[name] / "model/manifest.json").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/recipe.yaml").write_text("target: x\n")
    (runs["again"] / "verdict.json").unlink()  # a run that makes another model in the place of the one there
    with locked(runs["<b>going"]), locked(runs["again"]):
        lines = {line["name"]: line for line in list_facts(tmp_path)["runs"]}
        with served(make_app(tmp_path, Desk(), TOKEN)) as port:
            for name, view in (("", "list"), ("?run=begun", "watch"), ("?run=..%2Fx", None), ("?run=", None)):
                with reply(port, f"/{TOKEN}/run.json{name}") as response:
                    assert json.loads(response.read()).get("view") == view, name
    notes = {name: line["note"].partition(":")[0] for name, line in lines.items()}
    assert notes == {
        "done": "", "purged": "purged on 2026-01-02", "broken": "cannot be read", "begun": "not finished",
        "<b>going": "still going", "again": "still going", "other": "cannot be read",
    }  # fmt: skip
    assert (lines["done"]["outcome"], lines["begun"]["outcome"]) == ("PASS", None)
    assert lines["done"]["model"]


def test_a_run_that_goes_on_shows_stages_losses_and_points_and_is_not_held_up(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path / "run")
    began = time.time() - 100
    names = {"moments": "moments", "forget vector": "vectors/forget", "choice": "sweep", "merge": "model", "later": "x"}
    kinds = {"moments": "measure", "forget vector": "fit", "choice": "choose", "merge": "merge", "later": "score"}
    put_stages(run, stages=tuple(ListedStage(name, kinds[name], folder) for name, folder in names.items()))
    os.utime(run / "recipe.yaml", (began, began))
    for name, share in (("target", 0.9), ("alpha-1_beta-0", 0.2)):
        metrics = {metric: Metric(share, 12, 0.1, None) for metric in ("rouge_l_f", "rouge_l_r")}
        (run / "sweep.partial" / name).mkdir(parents=True)
        write_report(Report("qa", "validation", metrics, {}), run / "sweep.partial" / name)
    os.rename(run / "model", run / "model.partial")
    (run / "model.partial/.msa-lite-partial.json").write_text("{}")
    os.rename(run / "vectors/retain", run / "vectors/retain.partial")
    with open(run / "vectors/retain.partial/train_log.jsonl", "a") as log:
        log.write('{"step": 9, "epoch"')  # cut off
    with locked(run):
        facts = progress_facts(run)
    assert json.loads(json.dumps(facts, allow_nan=False))
    stages = {stage["name"]: stage for stage in facts["stages"]}
    assert [name for name, stage in stages.items() if stage.get("done", 0) > began] == ["forget vector", "choice"]
    assert [name for name, stage in stages.items() if "begun" in stage] == ["merge"]
    assert facts["losses"]["forget"][0] == (1, 3.0)
    assert "retain" not in facts["losses"]
    spots = {(spot["role"], spot["x"], str(spot["values"])) for spot in facts["chart"]["spots"]}
    assert spots == {("target", 0.9, "None"), ("candidate", 0.2, str({"alpha": 1.0, "beta": 0.0}))}
    assert (facts["works"], facts["can_ask"]) == (Path("/proc/locks").is_file(), False)
    with locked(run), in_use(run, alone=True):  # what a run does first
        assert progress_facts(run)["stages"]


COMMAND = """
import signal, sys, types, webbrowser
from pathlib import Path
import msa_lite.web
from msa_lite.cli.asking import web_command

panel = types.SimpleNamespace(names=[], missing={}, close=lambda: None, run=types.SimpleNamespace(folder=Path()))
msa_lite.web.desk.open_panel = lambda folder, several: panel
msa_lite.web.server.find_runs = lambda folder: {"": folder}
msa_lite.web.server.can_be_asked = lambda folder: True
webbrowser.open = lambda address: print(address, flush=True)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
web_command(["/", "--open"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_file_with_the_token_is_of_this_user_and_goes_with_the_page(number: signal.Signals, tmp_path: Path) -> None:
    environment, pipes = os.environ | {"TMPDIR": str(tmp_path)}, {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", COMMAND], text=True, env=environment, **pipes) as process:
        address, file = process.stdout.readline().strip(), process.stdout.readline().strip()
        (path,) = tmp_path.iterdir()
        assert (path.as_uri(), stat.S_IMODE(path.stat().st_mode)) == (file, 0o600)
        assert address in path.read_text()
        with reply(int(address.split(":")[2].split("/")[0]), "/") as response:
            assert response.status == 404
        process.send_signal(number)
        try:
            _, err = process.communicate(timeout=WAIT)
        finally:
            process.kill()
        assert (process.returncode, "Traceback" in err) == (0, False), err
    assert not list(tmp_path.iterdir())
