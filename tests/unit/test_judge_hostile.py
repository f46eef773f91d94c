"""A judge's server that misbehaves: whatever it sends, the run ends soon, with a message, and shows no key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msa_lite.errors import StageError
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
