"""A judge's server that misbehaves: whatever it sends, the run ends soon, with a message, and shows no key."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_lite.errors import StageError
from msa_lite.evals.judge import Ruling, openai_judge
from msa_lite.evals.judge import client as limits
from msa_lite.evals.judge.client import RateLimit, read_duration
from tests.support.judge import RETRY_NOW, JudgeServer, Speaker, Step, judge, letters, say, set_environment

KEY = JudgeServer.key
ANSWER = b'{"choices": [{"message": {"content": "A"}}]}'


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch)


# Where the texts go


@pytest.mark.parametrize(("status", "batched"), [(302, False), (308, True)])
def test_no_redirect_is_followed(tmp_path: Path, status: int, batched: bool) -> None:
    with Speaker(lambda handler: say(handler, ANSWER, content_length=str(len(ANSWER)))) as other:
        place = f"{other.address}/v1/chat/completions?key={KEY}"
        with (
            Speaker(lambda handler: say(handler, b"", status, location=place, content_length="0")) as first,
            pytest.raises(StageError, match=rf"{status}: it points to '{other.address}.*set judge.base_url") as caught,
        ):
            judge(first, tmp_path, batch=batched)
        assert other.paths == []
    assert len(first.paths) == 1
    assert KEY not in str(caught.value)


# How much, and how long


def _bomb(size: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    first, further = (packer.compress(b" " * 2**20) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + further * ((size >> 20) - 1)  # after a full flush, equal data are equal bytes


def _trickle_body(handler: BaseHTTPRequestHandler) -> None:
    say(handler)
    _trickle(handler)


def _trickle_headers(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx-long: ")
    _trickle(handler)


def _trickle(handler: BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b" ")
        threading.Event().wait(0.01)


def _endless_body(handler: BaseHTTPRequestHandler) -> None:
    say(handler)
    while True:
        handler.wfile.write(b" " * 2**16)


def _after_gzip(handler: BaseHTTPRequestHandler) -> None:
    say(handler, gzip.compress(ANSWER), content_encoding="gzip")
    while True:
        handler.wfile.write(b"\0" * 2**16)


def _endless_headers(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx-long: ")
    while True:
        handler.wfile.write(b"x" * 2**16)


CHILD = """
    import resource, sys
    from pathlib import Path
    from msa_lite.errors import StageError
    from msa_lite.evals.judge import JudgeSettings, open_judge, openai_judge
    from tests.support.judge import tofu_asks
    openai_judge._RETRIES = 1
    for url in sys.argv[2:]:
        try:
            open_judge(JudgeSettings("openai", "m", url), Path(sys.argv[1])).ask(tofu_asks(8)[0])
            print("answered")
        except StageError as error:
            print(error)
    status = Path("/proc/self/status").read_text()  # ru_maxrss would count the process that started this one
    print(status.split("VmHWM:")[1].split()[0])
"""
FLOODS: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "plain": _endless_body,
    "length": lambda handler: say(handler, b"x" * 2**22, content_length=str(3 << 30)),
    "gzip": lambda handler: say(handler, BOMB, content_encoding="gzip", content_length=str(len(BOMB))),
    "twice": lambda handler: say(handler, gzip.compress(BOMB), content_encoding="gzip, gzip"),
    "tail": _after_gzip,
    "error": lambda handler: say(handler, BOMB, 400, content_encoding="gzip"),
    "headers": _endless_headers,
}
BOMB = _bomb(1 << 30)  # 1 GB as 1 MB


def test_floods_take_little_memory(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))

    with ExitStack() as stack:
        urls = [f"{stack.enter_context(Speaker(flood)).address}/v1" for flood in FLOODS.values()]
        command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), *urls]
        child = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=limit)
    *messages, peak = child.stdout.splitlines()
    assert [message.startswith("the judge failed: ") for message in messages] == [True] * len(FLOODS)
    assert int(peak) < 600e3  # kB


@pytest.mark.parametrize("speak", [_trickle_body, _trickle_headers], ids=["body", "headers"])
def test_a_server_that_trickles_is_left(
    tmp_path: Path, speak: Callable[[BaseHTTPRequestHandler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_judge, "_DEADLINE", 0.1)
    said = r"does not end its reply within 0\.5 s; raise judge\.timeout"
    with Speaker(speak) as server, pytest.raises(StageError, match=said):
        judge(server, tmp_path, 3, timeout=5.0)


def test_a_packed_reply_is_unpacked(tmp_path: Path) -> None:
    packed = gzip.compress(ANSWER)
    with Speaker(lambda handler: say(handler, packed, content_encoding="gzip")) as server:
        assert judge(server, tmp_path)[0] == [Ruling("A", True)]


def test_a_batch_may_answer_with_more_than_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_judge, "_LIMIT", 2000)
    with JudgeServer() as server:
        verdicts, usage = judge(server, tmp_path, 30, batch=True)
        assert all(verdict.valid for verdict in verdicts)
        assert (usage.calls, server.calls) == (30, [])


# Rate limits


class _Message:
    def __init__(self, status_code: int = 200, **headers: str) -> None:
        self.status_code = status_code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each wait, which take none."""
    seconds: list[float] = []

    async def sleep(time: float) -> None:
        seconds.append(time)

    monkeypatch.setattr(limits, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: 0.0))
    return seconds


def _calls(*responses: _Message) -> None:
    async def run() -> None:
        rates = RateLimit()
        for response in responses:
            rates.after(response, await rates.before(_Message(content_length="1600")))

    asyncio.run(run())


def _left(kind: str, left: str, reset: str, status: int = 200) -> _Message:
    return _Message(status, **{f"x-ratelimit-remaining-{kind}": left, f"x-ratelimit-reset-{kind}": reset})


@pytest.mark.parametrize(
    ("kind", "left", "reset", "expected"),
    [
        ("requests", "0", "2s", [2.0] * 3),
        ("tokens", "399", "2s", [2.0] * 3),  # 1600 bytes are 400 tokens
        ("tokens", "400", "2s", []),
        ("requests", "0", "110s", [20.0]),  # served before the reset, so the header says something else
        ("requests", "0", "9" * 30 + "d", [20.0]),
        ("requests", "9" * 5000, "110s", []),
        ("requests", "0", "soon", []),
    ],
)
def test_calls_wait_only_where_nothing_is_left_and_the_server_means_it(
    waits: list[float], kind: str, left: str, reset: str, expected: list[float]
) -> None:
    _calls(*[_left(kind, left, reset)] * 4)
    assert waits == pytest.approx(expected)


def test_calls_wait_again_once_one_is_refused(waits: list[float]) -> None:
    busy = _left("requests", "0", "110s")
    _calls(busy, busy, busy, _left("requests", "0", "110s", 429), busy)
    assert waits == pytest.approx([20.0, 20.0])


def test_a_reset_without_a_count_is_no_reason_to_wait(waits: list[float]) -> None:
    _calls(*[_Message(**{"x-ratelimit-reset": "110s", "x-ratelimit-reset-requests": "110s"})] * 3)
    assert waits == []


@pytest.mark.parametrize("text", ["9" * 100_000 + "x", "1s" * 50_000, "1." * 50_000])
def test_long_durations_are_none(text: str) -> None:
    assert read_duration(text) is None


# Replies of any shape

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**301)
    | st.floats()
    | st.text()
    | st.sampled_from(["A", "Z", "\ud800", "\ud83d A", "completed", "batch-0", "file-0", "../x", "", "x" * 100_000]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "usage", "prompt_tokens", "id", "status", "error"])
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
odd: st.SearchStrategy[Any] = json_values | st.sampled_from([[], {}, [None], [[]], [{}], 0, "A", -1, 1e400])
completions = st.fixed_dictionaries(
    {
        "choices": odd
        | st.lists(
            odd | st.fixed_dictionaries({"message": odd | st.fixed_dictionaries({"content": odd})}),
            min_size=1,
            max_size=2,
        )
    },
    optional={"usage": odd | st.fixed_dictionaries({"prompt_tokens": odd, "completion_tokens": odd}), "error": odd},
)
bodies = (
    (json_values | completions).map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=40)
    | st.sampled_from([b"[" * 100_000, b'{"choices":' * 100_000, b"9" * 5000, b'{"choices": 1' + b"0" * 5000 + b"}"])
)


@pytest.fixture(scope="module")
def scripted() -> Iterator[JudgeServer]:
    with JudgeServer() as server:
        yield server


anything = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@anything
@given(body=bodies, status=st.sampled_from([200, 200, 200, 201, 204, 400, 404, 418, 429, 500]))
def test_a_reply_of_any_shape_is_an_answer_or_an_error(
    scripted: JudgeServer, tmp_path_factory: pytest.TempPathFactory, body: bytes, status: int
) -> None:
    scripted.script = [Step(body=b"" if status == 204 else body, status=status, headers=RETRY_NOW)] * 3
    folder = tmp_path_factory.mktemp("cache")
    try:
        verdicts, usage = judge(scripted, folder, price=(1.0, 1.0))
    except StageError as error:
        str(error).encode()
        return
    assert all(type(count) is int and 0 <= count < 10**10 for count in (usage.prompt_tokens, usage.completion_tokens))
    assert usage.cost is not None
    assert 0 <= usage.cost < 1e5
    assert verdicts[0].valid or (letters(verdicts), usage.invalid) == ("Z", 1)


@anything
@given(data=st.data())
def test_batches_of_any_shape_are_answers_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    ids = st.just("file-0") | odd
    whole = st.fixed_dictionaries(
        {},
        optional={
            "id": ids,
            "status": st.sampled_from(["completed", "failed", "expired", "in_progress", "odd"]) | odd,
            "errors": odd
            | st.fixed_dictionaries({"data": odd | st.lists(odd | st.fixed_dictionaries({"message": odd}))}),
            "request_counts": odd | st.fixed_dictionaries({"completed": odd}),
            "output_file_id": ids,
            "error_file_id": ids,
        },
    )
    row = st.fixed_dictionaries(
        {},
        optional={
            "custom_id": odd,
            "response": odd | st.fixed_dictionaries({"status_code": st.just(200), "body": odd}),
        },
    )
    replies = {
        "/v1/files": st.just({"id": "file-0"}) | odd,
        "/v1/batches": st.just({"id": "batch-0"}) | odd,
        "/v1/batches/batch-0": whole | odd,
        "/v1/files/file-0/content": row | odd,
        "/v1/chat/completions": st.just(json.loads(ANSWER)),
    }

    def speak(handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        body = json.dumps(drawn.get(path, {})).encode()
        say(handler, body, content_length=str(len(body)))

    drawn = {path: data.draw(strategy, label=path) for path, strategy in replies.items()}
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch, Speaker(speak) as server:
        patch.setattr(openai_judge, "_MOST_POLLS", 3)
        try:
            verdicts, _ = judge(server, folder, 2, batch=True)
        except StageError as error:
            str(error).encode()
            return
        assert letters(verdicts) == "AA"
