"""A judge behind a server, on loopback: what comes back, what is kept, what is asked again, what ends the run."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from msa_lite.errors import StageError
from msa_lite.evals.judge import openai_judge
from msa_lite.evals.judge.base import Ruling, Usage
from tests.support.judge import RETRY_NOW, JudgeServer, Step, letters, tofu_asks
from tests.support.judge import judge as ask_judge

Get = Callable[..., tuple[list[Ruling], Usage]]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setenv("OPENAI_API_KEY", JudgeServer.key)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with JudgeServer() as judge:
        yield judge


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_judge, "_AT_A_TIME", 1)


@pytest.fixture
def get(server: JudgeServer, tmp_path: Path) -> Get:
    """get(asks, **settings): what a judge opened anew, with the same cache, says."""
    return partial(ask_judge, server, tmp_path)


def test_letters_come_back_in_order_and_a_rerun_asks_nothing(server: JudgeServer, get: Get) -> None:
    asks, right = tofu_asks(20)
    server.pause = 0.005
    verdicts, usage = get(asks)
    assert letters(verdicts) == right
    assert all(verdict.valid for verdict in verdicts)
    assert usage == Usage(20, 0, 0)
    again, usage = get(asks[::-1])
    assert letters(again) == right[::-1]
    assert usage == Usage(0, 20, 0)
    assert len(server.requests) == 20


def test_what_is_sent_is_deterministic_and_short(server: JudgeServer, get: Get) -> None:
    ask = tofu_asks(1)[0][0]
    get([ask, ask])  # equal asks are one call
    messages = [{"role": "system", "content": ask.system}, {"role": "user", "content": ask.user}]
    sent = {"model": "judge-model", "messages": messages, "temperature": 0, "seed": 0, "max_tokens": 3}
    assert server.calls == [sent]
    get([ask], model="other-model")  # another judge's reply is not taken for it
    assert [call["model"] for call in server.calls] == ["judge-model", "other-model"]


@pytest.mark.parametrize("bad", [Step("none of them"), Step(""), Step(body=b'{"choices": [], "usage": null}')])
def test_a_garbage_or_empty_reply_is_asked_again(server: JudgeServer, get: Get, bad: Step) -> None:
    server.script = [bad, bad]
    asks, right = tofu_asks(1)
    verdicts, usage = get(asks)
    assert (verdicts, usage.calls, usage.invalid) == ([Ruling(right, True)], 3, 0)
    assert [call["seed"] for call in server.calls] == [0, 1, 2]


@pytest.mark.usefixtures("one_by_one")
def test_garbage_three_times_counts_as_z_and_invalid_and_stays_so(server: JudgeServer, get: Get) -> None:
    server.script = [Step("?"), Step("Answer"), Step("H")]
    asks, right = tofu_asks(2)
    verdicts, usage = get(asks)
    assert verdicts == [Ruling("Z", False), Ruling(right[1], True)]
    assert (usage.calls, usage.invalid) == (4, 1)
    verdicts, usage = get(asks)
    assert (letters(verdicts), usage.calls, usage.invalid) == (f"Z{right[1]}", 0, 1)


@pytest.mark.parametrize("fault", [Step(drop=True), Step(cut=20), Step(body=b'{"choices": [{"mess')], ids=str)
def test_dropped_and_cut_replies_are_tried_again(server: JudgeServer, get: Get, fault: Step) -> None:
    server.script = [fault]
    asks, right = tofu_asks(1)
    assert (letters(get(asks)[0]), len(server.calls)) == (right, 2)


def test_no_more_calls_are_under_way_than_allowed(
    server: JudgeServer, get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_judge, "_AT_A_TIME", 3)
    together = threading.Barrier(3)
    server.on_request, server.pause = lambda method, path: together.wait(600), 0.1
    get(tofu_asks(9)[0])
    assert server.busiest == 3


@pytest.mark.usefixtures("one_by_one")
def test_a_wrong_key_ends_the_run_at_once_and_is_named_nowhere(
    server: JudgeServer, get: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "sk-wrong-0987654321"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(StageError, match=r"401: Incorrect API key provided: \*\*\*.*check OPENAI_API_KEY") as caught:
        get(tofu_asks(3)[0])
    assert len(server.requests) == 1
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    get(tofu_asks(3)[0])
    for secret in (key, server.key):
        assert secret not in "".join(traceback.format_exception(caught.value)) + caplog.text
        assert not any(secret.encode() in path.read_bytes() for path in tmp_path.rglob("*"))


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Step(status=400), "the server said 400: this is fault 400"),
        (Step(status=403), "check what the key"),
        (Step(status=404), "check judge.model and judge.base_url"),
    ],
)
def test_lasting_faults_end_the_run_at_once(server: JudgeServer, get: Get, step: Step, said: str) -> None:
    server.script = [step]
    with pytest.raises(StageError, match=said):
        get(tofu_asks(3)[0])
    assert len(server.requests) == 1


def test_the_first_lasting_fault_ends_calls_under_way_too(
    server: JudgeServer, get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_judge, "_AT_A_TIME", 3)
    server.script = [Step(delay=600), Step(delay=600), Step(status=400, delay=0.1)]
    with pytest.raises(StageError, match="the server said 400"):
        get(tofu_asks(5)[0])
    assert len(server.requests) == 3


@pytest.mark.usefixtures("one_by_one")
def test_a_server_of_another_kind_is_told_from_a_judge_that_talks_nonsense(server: JudgeServer, get: Get) -> None:
    server.script = [Step(body=b"<html>welcome</html>", headers={"Content-Type": "text/html"})] * 3
    with pytest.raises(StageError, match="no chat completion; check judge"):
        get(tofu_asks(3)[0])


@pytest.mark.usefixtures("one_by_one")
def test_what_is_answered_is_kept_when_the_server_dies(
    server: JudgeServer, get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_judge, "_RETRIES", 1)
    asks, right = tofu_asks(10)
    server.script = [Step()] * 6 + [Step(status=503, headers=RETRY_NOW)] * 2
    with pytest.raises(StageError, match=r"503.*6 of 10 answers are kept in .*; a rerun asks only for the rest"):
        get(asks)
    assert len(server.calls) == 8
    verdicts, usage = get(asks)
    assert (letters(verdicts), usage.calls, usage.cached, len(server.calls)) == (right, 4, 6, 12)
    server.stop()
    with pytest.raises(StageError, match=r"out of reach.*0 of 1 answers are kept"):
        get(tofu_asks(11)[0])


def test_a_server_that_is_too_slow_is_named(server: JudgeServer, get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_judge, "_RETRIES", 0)
    monkeypatch.setattr(openai_judge, "_SECONDS", 0.2)
    server.pause = 3.0
    with pytest.raises(StageError, match=f"{server.url} does not end its reply in time, 1 times in a row"):
        get(tofu_asks(1)[0])


def test_an_interrupt_stops_at_once_and_keeps_what_is_there(
    server: JudgeServer, get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_judge, "_AT_A_TIME", 2)
    asks, right = tofu_asks(8)
    server.script = [Step()] * 3 + [Step(delay=600)] * 2

    def interrupt(method: str, path: str) -> None:
        if len(server.requests) == 5:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    server.on_request = interrupt
    with pytest.raises(KeyboardInterrupt):
        get(asks)
    verdicts, usage = get(asks)
    assert (letters(verdicts), usage.cached) == (right, 3)


def test_it_works_where_an_event_loop_runs_already(get: Get) -> None:
    asks, right = tofu_asks(3)

    async def notebook() -> str:
        return letters(get(asks)[0])

    assert asyncio.run(notebook()) == right


def test_texts_are_not_kept(server: JudgeServer, get: Get, tmp_path: Path) -> None:
    asks, _ = tofu_asks(3)
    server.script = [Step("truth"), Step("truth"), Step("truth")]
    get(asks)
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"truth" not in kept
    assert b"Question" not in kept
