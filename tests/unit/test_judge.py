"""A judge behind a server, on loopback: what comes back, what is kept, what is asked again, what ends the run."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.errors import StageError
from msa_lite.evals.judge import Ask, JudgeSettings, Ruling, Usage, open_judge, openai_judge
from msa_lite.evals.judge import client as limits
from msa_lite.evals.judge.client import read_duration
from msa_lite.io.console.progress import silent
from tests.support.judge import COMPLETION_TOKENS, PROMPT_TOKENS, RETRY_NOW, JudgeServer, Step, letters, tofu_asks

Get = Callable[..., tuple[list[Ruling], Usage]]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setenv("OPENAI_API_KEY", JudgeServer.key)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(openai_judge, "_POLL_SECONDS", 0.01)
    with JudgeServer() as judge:
        yield judge


@pytest.fixture
def get(server: JudgeServer, tmp_path: Path) -> Get:
    """get(asks, **settings): what a judge opened anew, with the same cache, says."""

    def ask(asks: list[Ask], **changes: Any) -> tuple[list[Ruling], Usage]:
        settings = JudgeSettings(**({"kind": "openai", "model": "judge-model", "base_url": server.url} | changes))
        judge = open_judge(settings, tmp_path)
        assert judge is not None
        return judge.ask(asks, silent)

    return ask


def test_letters_come_back_in_order_and_a_rerun_asks_nothing(server: JudgeServer, get: Get) -> None:
    asks, right = tofu_asks(20)
    server.pause = 0.005
    verdicts, usage = get(asks, price=(2.0, 10.0))
    assert letters(verdicts) == right
    assert all(verdict.valid for verdict in verdicts)
    # 20 replies of 100 and 1 tokens: (2000 × 2 + 20 × 10) / 1e6
    assert usage == Usage(20, 0, 20 * PROMPT_TOKENS, 20 * COMPLETION_TOKENS, 0, pytest.approx(0.0042))
    again, usage = get(asks[::-1], concurrency=1, timeout=5.0)
    assert letters(again) == right[::-1]
    assert usage == Usage(0, 20, 0, 0, 0, None)
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


def test_garbage_three_times_counts_as_z_and_invalid_and_stays_so(server: JudgeServer, get: Get) -> None:
    server.script = [Step("?"), Step("Answer"), Step("H")]
    asks, right = tofu_asks(2)
    verdicts, usage = get(asks, concurrency=1)
    assert verdicts == [Ruling("Z", False), Ruling(right[1], True)]
    assert (usage.calls, usage.invalid) == (4, 1)
    verdicts, usage = get(asks)
    assert (letters(verdicts), usage.calls, usage.invalid) == (f"Z{right[1]}", 0, 1)


def test_passing_faults_are_tried_again(server: JudgeServer, get: Get) -> None:
    server.script = [Step(status=status, headers=RETRY_NOW) for status in (429, 500, 408)]
    asks, right = tofu_asks(1)
    verdicts, usage = get(asks)
    assert (letters(verdicts), usage.calls, len(server.calls)) == (right, 1, 4)


@pytest.mark.parametrize("fault", [Step(drop=True), Step(cut=20), Step(body=b'{"choices": [{"mess')], ids=str)
def test_dropped_and_cut_replies_are_tried_again(server: JudgeServer, get: Get, fault: Step) -> None:
    server.script = [fault]
    asks, right = tofu_asks(1)
    assert (letters(get(asks)[0]), len(server.calls)) == (right, 2)


def test_late_replies_are_tried_again(server: JudgeServer, get: Get) -> None:
    server.script = [Step(delay=600)]
    asks, right = tofu_asks(1)
    assert letters(get(asks, timeout=0.5)[0]) == right
    assert len(server.calls) >= 2  # on a busy machine others may be late as well


@pytest.mark.parametrize("headers", [{"retry-after": "0.3"}, {"retry-after-ms": "300", "retry-after": "30"}])
def test_the_server_says_how_long_to_wait(
    server: JudgeServer, get: Get, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("anyio.sleep", sleep)
    server.script = [Step(status=429, headers=headers)]
    get(tofu_asks(1)[0])
    assert waits == pytest.approx([0.3])


def test_no_call_is_made_before_the_rate_limit_is_reset(
    server: JudgeServer, get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, events = [0.0], list[object]()

    async def sleep(seconds: float) -> None:
        events.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(limits, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    server.on_request = lambda method, path: events.append("call")
    nothing_left = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "400ms"}
    few_tokens = {"x-ratelimit-remaining-tokens": "20", "x-ratelimit-reset-tokens": "0.5s"}
    server.script = [Step(headers=nothing_left), Step(headers=few_tokens)]
    asks, right = tofu_asks(4)
    assert letters(get(asks, concurrency=1)[0]) == right
    # A call of some 400 tokens does not fit into 20.
    assert events == ["call", 0.4, "call", 0.5, "call", "call"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("6m0s", 360), ("1.5s", 1.5), ("20ms", 0.02), ("3", 3), ("1h2m3s", 3723), ("", None), ("soon", None)],
)
def test_durations_of_headers(text: str, seconds: float | None) -> None:
    assert read_duration(text) == (None if seconds is None else pytest.approx(seconds))


def test_no_more_calls_are_under_way_than_allowed(server: JudgeServer, get: Get) -> None:
    together = threading.Barrier(3)
    server.on_request, server.pause = lambda method, path: together.wait(600), 0.1
    get(tofu_asks(9)[0], concurrency=3)
    assert server.busiest == 3


def test_a_wrong_key_ends_the_run_at_once_and_is_named_nowhere(
    server: JudgeServer, get: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "sk-wrong-0987654321"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(StageError, match=r"401: Incorrect API key provided: \*\*\*.*check OPENAI_API_KEY") as caught:
        get(tofu_asks(3)[0], concurrency=1)
    assert len(server.requests) == 1
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    get(tofu_asks(3)[0])
    for secret in (key, server.key):
        assert secret not in "".join(traceback.format_exception(caught.value)) + caplog.text
        assert not any(secret.encode() in path.read_bytes() for path in tmp_path.rglob("*"))


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
        get(tofu_asks(3)[0], concurrency=1)
    assert len(server.requests) == 1


def test_the_first_lasting_fault_ends_calls_under_way_too(server: JudgeServer, get: Get) -> None:
    server.script = [Step(delay=600), Step(delay=600), Step(status=400, delay=0.1)]
    with pytest.raises(StageError, match="the server said 400"):
        get(tofu_asks(5)[0], concurrency=3, timeout=600)
    assert len(server.requests) == 3


def test_a_server_of_another_kind_is_told_from_a_judge_that_talks_nonsense(server: JudgeServer, get: Get) -> None:
    server.script = [Step(body=b"<html>welcome</html>", headers={"Content-Type": "text/html"})] * 3
    with pytest.raises(StageError, match="no chat completion; check judge"):
        get(tofu_asks(3)[0], concurrency=1)


def test_what_is_answered_is_kept_when_the_server_dies(
    server: JudgeServer, get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_judge, "_RETRIES", 1)
    asks, right = tofu_asks(10)
    server.script = [Step()] * 6 + [Step(status=503, headers=RETRY_NOW)] * 2
    with pytest.raises(StageError, match=r"503.*6 of 10 answers are kept in .*; a rerun asks only for the rest"):
        get(asks, concurrency=1)
    assert len(server.calls) == 8
    verdicts, usage = get(asks)
    assert (letters(verdicts), usage.calls, usage.cached, len(server.calls)) == (right, 4, 6, 12)
    server.stop()
    with pytest.raises(StageError, match=r"out of reach.*0 of 1 answers are kept"):
        get(tofu_asks(11)[0])


def test_a_time_out_names_the_setting(server: JudgeServer, get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_judge, "_RETRIES", 0)
    server.pause = 3.0
    with pytest.raises(StageError, match=r"no reply within 0\.2 s, 1 times in a row; raise judge.timeout"):
        get(tofu_asks(1)[0], timeout=0.2)


def test_an_interrupt_stops_at_once_and_keeps_what_is_there(server: JudgeServer, get: Get) -> None:
    asks, right = tofu_asks(8)
    server.script = [Step()] * 3 + [Step(delay=600)] * 2

    def interrupt(method: str, path: str) -> None:
        if len(server.requests) == 5:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    server.on_request = interrupt
    with pytest.raises(KeyboardInterrupt):
        get(asks, concurrency=2, timeout=600)
    verdicts, usage = get(asks)
    assert (letters(verdicts), usage.cached) == (right, 3)


def test_it_works_where_an_event_loop_runs_already(get: Get) -> None:
    asks, right = tofu_asks(3)

    async def notebook() -> str:
        return letters(get(asks)[0])

    assert asyncio.run(notebook()) == right


def test_progress_counts_what_the_cache_holds(server: JudgeServer, get: Get, tmp_path: Path) -> None:
    asks, _ = tofu_asks(5)
    get(asks[:3])
    judge = open_judge(JudgeSettings("openai", "judge-model", server.url), tmp_path)
    assert judge is not None
    steps: list[tuple[str, int, int]] = []
    judge.ask(asks, lambda *step: steps.append(step))
    assert steps == [("judge", 4, 5), ("judge", 5, 5), ("judge", 5, 5)]


def test_the_cost_is_estimated_before_the_first_call(
    server: JudgeServer, get: Get, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asks, _ = tofu_asks(10)
    told: list[str] = []
    server.on_request = lambda method, path: told.append(caplog.text)
    tokens = sum(len(ask.system) + len(ask.user) for ask in asks) // 4
    get(asks, price=(1000.0, 1000.0))
    assert f"judge: 10 calls to judge-model, about {tokens} prompt tokens (4 characters each)" in told[0]
    assert f"about {(tokens + 30) / 1000:.2f} USD" in told[0]
    caplog.clear()
    get([*asks, *tofu_asks(12)[0]], price=None)
    assert "judge: 2 calls" in caplog.text
    assert "the price is not known" in caplog.text


def test_texts_are_not_kept(server: JudgeServer, get: Get, tmp_path: Path) -> None:
    asks, _ = tofu_asks(3)
    server.script = [Step("truth"), Step("truth"), Step("truth")]
    get(asks, concurrency=1, batch=True)
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"truth" not in kept
    assert b"Question" not in kept


# Batches


def test_a_batch_answers_all_and_what_it_cannot_is_asked_singly(server: JudgeServer, get: Get) -> None:
    asks, right = tofu_asks(6)
    server.failing = {1, 4}
    verdicts, usage = get(asks, batch=True, price=(2.0, 10.0))
    assert letters(verdicts) == right
    assert len(server.batches) == 1
    assert len(server.calls) == 2
    # A reply costs (100 × 2 + 1 × 10) / 1e6 USD singly, half of it in a batch: 4 × 105 + 2 × 210
    assert (usage.calls, usage.cost) == (6, pytest.approx(840e-6))
    before = len(server.requests)
    assert letters(get(asks, batch=True)[0]) == letters(get(asks)[0]) == right
    assert len(server.requests) == before


def test_a_stopped_run_waits_for_the_same_batch(server: JudgeServer, get: Get) -> None:
    asks, right = tofu_asks(4)
    server.statuses = ["in_progress"]

    def interrupt(method: str, path: str) -> None:
        if sum(path.startswith("/v1/batches/") for _, path in server.requests) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    server.on_request = interrupt
    with pytest.raises(KeyboardInterrupt):
        get(asks, batch=True)
    server.on_request, server.statuses = lambda method, path: None, ["completed"]
    assert letters(get(asks, batch=True)[0]) == right
    assert len(server.batches) == 1
    assert server.calls == []


@pytest.mark.parametrize("status", ["expired", "cancelled", "failed"])
def test_a_batch_that_ends_early_keeps_its_answers_and_is_not_waited_for_again(
    server: JudgeServer, get: Get, status: str
) -> None:
    asks, right = tofu_asks(4)
    server.statuses, server.answered = [status], 3
    kept = 0 if status == "failed" else 3
    reason = "batch batch-0 is failed: line 1 is no JSON" if status == "failed" else f"batch batch-0 is {status};"
    with pytest.raises(StageError, match=f"{reason}.*{kept} of 4 answers are kept"):
        get(asks, batch=True)
    server.statuses, server.answered = ["completed"], None
    assert letters(get(asks, batch=True)[0]) == right
    assert [len(rows) for rows in server.batches] == [4, 4 - kept]


def test_a_batch_that_the_server_does_not_know_any_more_is_made_anew(server: JudgeServer, get: Get) -> None:
    asks, right = tofu_asks(2)
    server.statuses = ["failed"]
    with pytest.raises(StageError):
        get(asks, batch=True)
    server.statuses = ["in_progress"]
    server.on_request = lambda method, path: server.batches.clear() if path == "/v1/batches/batch-1" else None
    with pytest.raises(StageError, match="No such batch"):
        get(asks, batch=True)
    server.on_request, server.statuses = lambda method, path: None, ["completed"]
    assert letters(get(asks, batch=True)[0]) == right
