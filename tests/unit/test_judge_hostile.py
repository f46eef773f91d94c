"""A judge's server that misbehaves: the run ends soon, with a message, and the key is written nowhere."""

from __future__ import annotations

import base64
import json
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_lite.errors import StageError, UsageError
from msa_lite.evals.judge import open_judge
from msa_lite.evals.judge.server import check_consent, find_server
from msa_lite.io.files.spellings import masked
from msa_lite.pipeline.prepare.run import Context, msa_scope
from msa_lite.pipeline.prepare.sending import going_out
from msa_lite.recipe import load_recipe
from msa_lite.settings import JudgeSettings
from tests.support.judge import RETRY_NOW, JudgeServer, Speaker, Step, judge, letters, say, set_environment

KEY = JudgeServer.key


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch)


def _escaped(key: str) -> dict[str, str]:
    """The key as servers may repeat it."""
    raw = key.encode()
    return {
        "raw": key,
        "upper": key.upper(),
        "part": key[5:13],
        "long part": key[:-3],
        "bearer": f"Bearer {key}",
        "percent": quote(key, safe=""),
        "percent, all": "".join(f"%{byte:02x}" for byte in raw),
        "percent, twice": quote("".join(f"%{byte:02X}" for byte in raw)),
        "base64": base64.b64encode(raw).decode(),
        "base64 of bearer": base64.b64encode(b"Bearer " + raw).decode(),
        "base64 of a login": base64.b64encode(b"me:" + raw + b"\n").decode(),
        "urlsafe": base64.urlsafe_b64encode(b"x" + raw).decode(),
        "json": "".join(f"\\u{byte:04x}" for byte in raw),
        "bytes": "".join(f"\\x{byte:02x}" for byte in raw),
        "half": "".join(f"\\u{byte:04X}" if i % 2 else chr(byte) for i, byte in enumerate(raw)),
        "html": "".join(f"&#{byte};" for byte in raw),
        "hex": raw.hex(),
        "backwards": key[::-1],
        "apart": " ".join(key),
        "dots": ".".join(key),
        "quoted": json.dumps(json.dumps(key)),
    }


KEYS = [KEY, "sk-a/b+c=d&e\"f\\g<h>i'j~k", "aaaaaaaaaaaaaaaa", "gsk_Zz09.Yy18-Xx27"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("form", _escaped(KEY))
def test_no_spelling_of_the_key_is_shown(key: str, form: str) -> None:
    spelt = _escaped(key)[form]
    shown = masked(f"Incorrect key {spelt} given; {spelt * 3}", key)
    assert "***" in shown or "left out" in shown
    for i in range(len(spelt) - 19):
        assert spelt[i : i + 20] not in shown
    for i in range(len(key) - 7):
        assert key[i : i + 8].lower() not in shown.lower()


def test_other_words_are_shown() -> None:
    text = "The model `judge-model` does not exist: see https://example.org/a%20b?c=d&amp;e, or \\u00e9 and 9876"
    assert masked(text, KEY) == text
    assert masked(f"{text} {KEY}!", KEY) == f"{text} ***!"
    assert masked("a\x1b[31m\nb", "") == "a [31m b"
    assert masked("xyz", "x") == "***yz"
    assert masked(text, "") == text


@pytest.mark.parametrize("key", ["sk-1234567890\n", " sk-1234567890", "sk-123\r\nx-other: 1", "sk-1234–5678"])
def test_a_key_that_no_header_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UsageError, match="OPENAI_API_KEY") as caught:
        open_judge(JudgeSettings("openai"), tmp_path)
    assert "123" not in str(caught.value)


def test_a_key_in_the_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"judge\.base_url") as caught:
        open_judge(JudgeSettings("openai", base_url=f"http://localhost/v1?key={KEY}"), tmp_path)
    assert KEY not in str(caught.value)


def _speak_of_the_key(form: str, place: str) -> Callable[[BaseHTTPRequestHandler], None]:
    spelt = _escaped(KEY)[form]
    body = json.dumps({"error": {"message": f"wrong: {spelt}", "code": spelt}}).encode()

    def speak(handler: BaseHTTPRequestHandler) -> None:
        if place == "reason":
            handler.wfile.write(f"HTTP/1.1 401 {spelt}\r\ncontent-length: 0\r\n\r\n".encode())
        elif place == "protocol":
            handler.wfile.write(f"{spelt}\r\n\r\n".encode())
        elif place == "page":
            say(handler, f"<p>{spelt}</p>".encode(), 400, content_type="text/html")
        elif place == "location":
            say(handler, body, 307, location=f"http://127.0.0.1:1/{spelt}")
        elif place == "header":
            say(handler, body, 403, x_request_id=spelt, set_cookie=f"a={spelt}", openai_organization=spelt)
        else:
            say(handler, body, 401)

    return speak


@pytest.mark.parametrize(
    ("form", "place"),
    [
        *(("raw", place) for place in ("body", "reason", "protocol", "page", "location", "header")),
        *(("base64 of bearer", place) for place in ("body", "location")),
        ("json", "body"),
    ],
)
def test_a_server_that_repeats_the_key_gets_it_written_nowhere(
    tmp_path: Path, form: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "msa_lite")
    with Speaker(_speak_of_the_key(form, place)) as server, pytest.raises(StageError) as caught:
        judge(server, tmp_path)
    written = "".join(traceback.format_exception(caught.value))
    written += "".join(record.getMessage() for record in caplog.records if record.name.startswith("msa_lite"))
    written += "".join(path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file())
    for spelt in {KEY, _escaped(KEY)[form]}:
        assert spelt not in written


ANSWER = b'{"choices": [{"message": {"content": "A"}}]}'


# Where the texts go, and the key

RECIPE = {"target": "T", "prior": "P", "forget": {"data": {"path": "x.jsonl"}}, "output": "out"}

OPENAI = "https://api.openai.com"
SERVERS: list[tuple[str, str]] = [  # address → "own", "here", "other" or "refused"
    *((address, "own") for address in (OPENAI, f"{OPENAI}/v1", "https://API.OpenAI.com:443/v1", "HTTP://Gate:80")),
    *((f"http://{host}/v1", "here") for host in ("localhost:8000", "127.0.0.1", "127.9.9.9", "[::1]:1")),
    *((f"{OPENAI}{end}/v1", "other") for end in (".evil.example", ".", ":8443")),
    *((f"http://{host}/v1", "other") for host in ("api.openai.com", "10.0.0.5", "0.0.0.0:1", "gpu.local", "[fd00::2]")),
    *((f"http://{host}/v1", "other") for host in ("2130706433", "127.1", "localhost.", "127.0.0.1.nip.io", "gate:81")),
    *((f"{OPENAI}{end}", "refused") for end in ("@evil.example", "\\@evil.example", "#@evil.example", "?a=b", " ")),
    *((address, "refused") for address in ("https://api.openаi.com", "ftp://localhost", "//localhost", "localhost:80")),
    ("http://localhost:99999", "refused"),
]


@pytest.mark.parametrize(("address", "kind"), SERVERS)
def test_only_an_own_server_gets_the_key_and_only_it_and_this_machine_get_rows_unasked(
    monkeypatch: pytest.MonkeyPatch, address: str, kind: str
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://gate/v1")
    settings = JudgeSettings("openai", base_url=address)
    if kind == "refused":
        with pytest.raises(UsageError, match=r"judge\.base_url"):
            find_server(settings)
        return
    server = find_server(settings)
    assert server is not None
    assert (server.is_own, server.is_here) == (kind == "own", kind == "here")
    assert server.key == (KEY if kind == "own" else "")
    monkeypatch.setenv("OTHER", "secret")
    for key_env, needs in ((None, kind == "other"), ("OTHER", kind != "own")):
        named = replace(settings, key_env=key_env)
        check_consent(named, accept=True)
        with pytest.raises(UsageError, match=f"OPENAI_BASE_URL={re.escape(address)}") if needs else nullcontext():
            check_consent(named)
        judge = {"kind": "openai", "base_url": address, "key_env": key_env}
        recipe = load_recipe(RECIPE | {"evaluate": {"benchmark": "tofu", "split": "forget10", "judge": judge}})
        (sentence,) = going_out(Context(recipe, msa_scope(recipe)), scores=True)
        assert (address in sentence, "needs --accept" in sentence) == (True, needs)
    server = find_server(named)
    assert server is not None
    assert server.key == "secret"
    assert "the key OTHER" in server.gets("m", "rows")


@pytest.mark.parametrize(("key_env", "sent"), [(None, None), ("OTHER", "Bearer other")])
def test_a_server_of_the_recipe_gets_nothing_else_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key_env: str | None, sent: str | None
) -> None:
    headers: list[dict[str, str]] = []

    def speak(handler: BaseHTTPRequestHandler) -> None:
        headers.append({name.lower(): value for name, value in handler.headers.items()})
        say(handler, ANSWER, content_length=str(len(ANSWER)))

    for name in ("ORG_ID", "PROJECT_ID", "ADMIN_KEY"):
        monkeypatch.setenv(f"OPENAI_{name}", f"secret {name}")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer secret\nx-gate: secret")
    monkeypatch.setenv("OTHER", "other")
    with Speaker(speak) as proxy, Speaker(speak) as server:
        monkeypatch.setenv("HTTP_PROXY", proxy.address)
        monkeypatch.delenv("NO_PROXY")
        assert judge(server, tmp_path, key_env=key_env)[0][0].valid
        assert (len(server.paths), proxy.paths) == (1, [])
    assert headers[0].get("authorization") == sent
    assert "secret" not in str(headers)
    assert KEY not in str(headers)


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


# Replies of any shape

odd: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.floats() | st.sampled_from(["A", "\ud800", "\ud83d A", "", "x" * 100_000, 10**300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
message = odd | st.fixed_dictionaries({"content": odd})
choices = odd | st.lists(odd | st.fixed_dictionaries({"message": message}), min_size=1, max_size=2)
usage = odd | st.fixed_dictionaries({"prompt_tokens": odd, "completion_tokens": odd})
completions = st.fixed_dictionaries({"choices": choices}, optional={"usage": usage, "error": odd})
bodies = (
    (odd | completions).map(lambda value: json.dumps(value).encode())
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
