"""Ask a judge behind a server with OpenAI's interface, a few calls at a time.

Retries with back-off, timeouts and authentication are the openai package's. A reply is read as plain JSON, since a
server may send anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import openai
from anyio.from_thread import start_blocking_portal

from msa_lite.errors import StageError
from msa_lite.evals.judge.base import Judge, Usage
from msa_lite.evals.judge.prompts import Ask
from msa_lite.evals.judge.server import Server
from msa_lite.io.console.progress import Progress
from msa_lite.io.files.cache import Cache
from msa_lite.io.files.spellings import masked
from msa_lite.io.files.writing import digest
from msa_lite.settings import JudgeSettings

_AT_A_TIME = 8  # calls, which a server of one's own also takes
_TRIES = 3  # replies to one ask until one is valid
_RETRIES = 6  # of a call; with back-off about half a minute in all, since many servers limit the calls of a minute
_SECONDS = 300.0  # for one try: a slow server of one's own may need minutes for _AT_A_TIME calls
_HINTS = {
    401: "check {key}",
    403: "check what the key of {key} may use",
    404: "check judge.model and judge.base_url, which usually ends in /v1",
    429: "the quota or rate limit is used up; wait",
}


# Headers that a server gets that only the recipe names. The openai package adds others from the environment, such as
# OPENAI_ORG_ID and OPENAI_CUSTOM_HEADERS; by the last one here it knows itself how to read the response.
_HEADERS = {
    "host", "connection", "accept", "accept-encoding", "content-type", "content-length", "user-agent",
    "x-stainless-raw-response",
}  # fmt: skip


class OpenAIJudge(Judge):
    """Ask a server, and keep each reply as it comes."""

    def __init__(self, settings: JudgeSettings, cache: Cache, server: Server) -> None:
        super().__init__(settings, cache)
        self.server = server

    def key(self, ask: Ask) -> str:
        return digest(["openai", self.settings.address, self._body(ask)])

    def _body(self, ask: Ask, seed: int = 0) -> dict[str, Any]:
        # OpenAI's newer models know only max_completion_tokens. Some other servers do not, would ignore it and write an
        # essay; so these get the older name, which all of them know.
        limit = "max_tokens" if self.settings.address else "max_completion_tokens"
        messages = [{"role": "system", "content": ask.system}, {"role": "user", "content": ask.user}]
        name = self.settings.model_name
        return {"model": name, "messages": messages, "temperature": 0, "seed": seed, limit: ask.tokens}

    def send(self, todo: Mapping[str, Ask], usage: Usage, progress: Progress) -> None:
        try:
            # A thread with its own loop also works in a notebook, whose loop runs already, and Ctrl-C cancels it.
            with start_blocking_portal() as portal:
                portal.call(self._work, todo, usage, progress)
        except (openai.OpenAIError, StageError) as error:
            count = len(self.cache.read(todo))
            raise StageError(
                f"the judge failed: {self._explain(error)}. {count} of {len(todo)} answers are kept in "
                f"{self.cache.path}; a rerun asks only for the rest"
            ) from None  # the cause holds the server's own words, which may contain the key

    async def _work(self, todo: Mapping[str, Ask], usage: Usage, progress: Progress) -> None:
        queue = iter(todo.items())
        answered = 0

        async def work() -> None:
            nonlocal answered
            for key, ask in queue:
                self.cache.keep({key: await self._ask_one(client, ask, usage)})
                answered += 1
                progress("judge", answered, len(todo))

        server = self.server
        http = openai.DefaultAsyncHttpxClient(
            follow_redirects=False,  # elsewhere is not where the texts may go
            trust_env=not (server.is_here and server.is_plain),  # neither is a proxy, on the way to this machine
            event_hooks={"request": [] if server.is_own else [self._strip]},
        )
        key = server.key or "none"
        async with openai.AsyncOpenAI(
            api_key=key, base_url=server.address, max_retries=_RETRIES, timeout=_SECONDS, http_client=http
        ) as client:
            try:
                async with asyncio.TaskGroup() as group:  # the first fault ends all calls
                    for _ in range(_AT_A_TIME):
                        group.create_task(work())
            except BaseExceptionGroup as faults:
                raise faults.exceptions[0] from None

    async def _strip(self, request: Any) -> None:
        """Leave what a server that the recipe names has to get, and the key that it asks for."""
        for name in {*request.headers} - _HEADERS:
            del request.headers[name]
        if self.server.key:
            request.headers["authorization"] = f"Bearer {self.server.key}"

    async def _ask_one(self, client: openai.AsyncOpenAI, ask: Ask, usage: Usage) -> str:
        """Return the valid reply; "" if none of _TRIES, each with its own seed, is valid."""
        for seed in range(_TRIES):
            response = await client.chat.completions.with_raw_response.create(**self._body(ask, seed))
            completion = _parse(response.content)
            is_completion = isinstance(completion, dict) and "choices" in completion
            usage.calls += is_completion
            text = _look_up(completion, "choices", 0, "message", "content")
            if reply := ask.read(text if isinstance(text, str) else ""):
                return reply
        if not is_completion:  # broken JSON, or a web page
            raise StageError(f"{self.server.address} answers with something that is no chat completion; {_HINTS[404]}")
        return ""

    def _explain(self, error: Exception) -> str:
        """Say what went wrong and what to try, without the key, which servers like to repeat."""
        server, key = self.server.address, self.server.key
        if isinstance(error, openai.APIStatusError):
            if 300 <= error.status_code < 400:
                place = masked(error.response.headers.get("location", ""), key)
                return (
                    f"the server said {error.status_code}: it points to '{place}'. msa-lite sent nothing there, "
                    "because it would get the texts to judge; set judge.base_url to the right server"
                )
            words = _look_up(error.body, "message")
            words = masked(words if isinstance(words, str) and words else str(error.message), key)
            hint = _HINTS.get(error.status_code, "see what the server says, or try another judge.model")
            name = self.server.key_name or "judge.key_env: no key was sent"
            return f"the server said {error.status_code}: {words}; {hint.format(key=name)}"
        if isinstance(error, openai.APITimeoutError):
            return f"{server} does not end its reply in time, {_RETRIES + 1} times in a row"
        if isinstance(error, openai.APIConnectionError):
            return f"{server} is out of reach ({masked(str(error.__cause__ or error), key)})"
        return str(error)


def _parse(content: bytes) -> Any:
    """Parse JSON of the server; return None for anything else."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _look_up(value: Any, *path: str | int) -> Any:
    """Return what stands at a path of the server's JSON; None where it has another shape."""
    for step in path:
        try:
            value = value[step]
        except (IndexError, KeyError, TypeError):
            return None
    return value
