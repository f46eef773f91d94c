"""A judge's server that misbehaves: whatever it sends, the run ends soon, with a message, and shows no key."""

from __future__ import annotations

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
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_lite.errors import StageError
from msa_lite.evals.judge import openai_judge
from tests.support.judge import RETRY_NOW, JudgeServer, Speaker, Step, judge, letters, say, set_environment

KEY = JudgeServer.key
ANSWER = b'{"choices": [{"message": {"content": "A"}}]}'


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch)


# Where the texts go


@pytest.mark.parametrize("status", [302, 308])
def test_no_redirect_is_followed(tmp_path: Path, status: int) -> None:
    with Speaker(lambda handler: say(handler, ANSWER, content_length=str(len(ANSWER)))) as other:
        place = f"{other.address}/v1/chat/completions?key={KEY}"
        with (
            Speaker(lambda handler: say(handler, b"", status, location=place, content_length="0")) as first,
            pytest.raises(StageError, match=rf"{status}: it points to '{other.address}.*set judge.base_url") as caught,
        ):
            judge(first, tmp_path)
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
    monkeypatch.setattr(openai_judge, "_SECONDS", 0.5)
    with Speaker(speak) as server, pytest.raises(StageError, match="does not end its reply in time, 1 times in a row"):
        judge(server, tmp_path, 3)


def test_a_packed_reply_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(ANSWER)
    with (
        Speaker(lambda handler: say(handler, packed, content_encoding="gzip")) as server,
        pytest.raises(StageError, match="compresses its replies, though it was asked not to"),
    ):
        judge(server, tmp_path)


# Replies of any shape

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**301)
    | st.floats()
    | st.text()
    | st.sampled_from(["A", "Z", "\ud800", "\ud83d A", "../x", "", "x" * 100_000]),
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
        verdicts, usage = judge(scripted, folder)
    except StageError as error:
        str(error).encode()
        return
    assert verdicts[0].valid or (letters(verdicts), usage.invalid) == ("Z", 1)
