"""Ask a judge behind a server with OpenAI's interface, call by call or by the Batch API at half the price.

Retries with back-off, time limits and authentication are the openai package's; `judge.client` stands below it. Replies
are read as plain JSON, since a server may send anything.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import openai
from anyio.from_thread import start_blocking_portal

from msa_lite.errors import StageError
from msa_lite.evals.judge.base import Cache, Judge, JudgeSettings, Usage, api_key
from msa_lite.evals.judge.client import Client
from msa_lite.evals.judge.prompts import Ask
from msa_lite.io.console.progress import Progress
from msa_lite.io.files.spellings import masked
from msa_lite.io.files.writing import digest

logger = logging.getLogger(__name__)

_CHAT = "/v1/chat/completions"
_POLL_SECONDS = 30.0
_MOST_POLLS = 2 * 24 * 120  # two days; a batch takes one at most
_ID = re.compile(r"[A-Za-z0-9][\w.:-]{0,199}", re.ASCII)
_OVER = ("completed", "failed", "expired", "cancelled")
_PRICES = {"gpt-4o": (2.50, 10.00), "gpt-4o-mini": (0.15, 0.60)}  # USD per million tokens, OpenAI's list of 2025
_BATCH_SHARE = 0.5  # of the list price
_TRIES = 3  # replies to one ask until one is valid
_RETRIES = 6  # of a call after a fault of server or network; with back-off about half a minute in all
_LIMIT = 1 << 20  # bytes of a reply
_ROW_LIMIT = 16 << 10  # bytes of a reply in a batch, on average
_DEADLINE = 10.0  # times judge.timeout (the wait for each sign of the server): the longest time of a call
_MOST_TOKENS = 10**9  # of one reply; a server that counts more is wrong
_HINTS = {
    401: "check OPENAI_API_KEY",
    403: "check what the key of OPENAI_API_KEY may use",
    404: "check judge.model and judge.base_url, which usually ends in /v1",
    429: "the quota or rate limit is used up; wait, or lower judge.concurrency",
}


def parse(content: bytes) -> Any:
    """Parse JSON of the server; return None for anything else."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def look_up(value: Any, *path: str | int) -> Any:
    """Return what stands at a path of the server's JSON; None where it has another shape."""
    for step in path:
        try:
            value = value[step]
        except (IndexError, KeyError, TypeError):
            return None
    return value


async def run_batch(
    client: Any, cache: Cache, bodies: Mapping[str, Mapping[str, Any]], progress: Progress
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Run the calls as one batch; return (completions by key, why the batch failed or None).

    bodies: the calls, by the hash that names them. A failed batch also returns the answers that it has; calls that the
    server could not answer are missing. Raise errors of the openai package, and StageError for replies that are no
    batches, or for a batch that does not end within two days.
    """
    name = f"batch {digest(sorted(bodies))}"
    batch_id = cache.read([name]).get(name) or await _create(client, bodies)
    cache.keep({name: batch_id})
    logger.info("waiting for batch %s; a stopped run resumes it", batch_id)
    try:
        batch = await _wait(client, batch_id, len(bodies), progress)
    except openai.NotFoundError:
        cache.forget(name)
        raise
    completions = await _download(client, batch, bodies)
    if batch["status"] == "completed":
        if len(completions) < len(bodies):
            logger.warning("%d calls failed in the batch; making them one by one", len(bodies) - len(completions))
        return completions, None
    cache.forget(name)
    faults = look_up(batch, "errors", "data")
    messages = [look_up(fault, "message") for fault in (faults if isinstance(faults, list) else [])[:10]]
    words = "; ".join(masked(message, api_key()) for message in messages if isinstance(message, str) and message)
    reason = f": {words[:500]}" if words else ""
    return completions, f"batch {batch_id} is {batch['status']}{reason}; try again, or without judge.batch"


async def _create(client: Any, bodies: Mapping[str, Mapping[str, Any]]) -> str:
    """Upload the calls and start the batch; return its id."""
    lines = [
        json.dumps({"custom_id": key, "method": "POST", "url": _CHAT, "body": body}) for key, body in bodies.items()
    ]
    content = "\n".join(lines).encode()
    reply = await client.files.with_raw_response.create(file=("judge.jsonl", content), purpose="batch")
    reply = await client.batches.with_raw_response.create(
        input_file_id=_id(look_up(parse(reply.content), "id")), endpoint=_CHAT, completion_window="24h"
    )
    return _id(look_up(parse(reply.content), "id"))


async def _wait(client: Any, batch_id: str, calls: int, progress: Progress) -> dict[str, Any]:
    """Wait until a batch is over, and return it."""
    for _ in range(_MOST_POLLS):
        reply = await client.batches.with_raw_response.retrieve(batch_id)
        batch = parse(reply.content)
        status = look_up(batch, "status")
        if not isinstance(status, str):
            raise _no_batch()
        if status in _OVER:
            return batch
        done = look_up(batch, "request_counts", "completed")
        if type(done) is int and 0 <= done <= calls:
            progress("judge", done, calls)
        await asyncio.sleep(_POLL_SECONDS)
    raise StageError(f"batch {batch_id} does not end; try again, or without judge.batch")


async def _download(client: Any, batch: Mapping[str, Any], bodies: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the completions of a finished batch by key; log why others are missing, from the file of errors."""
    completions: dict[str, dict[str, Any]] = {}
    for file_id in filter(None, (batch.get("output_file_id"), batch.get("error_file_id"))):
        reply = await client.files.with_raw_response.content(_id(file_id))
        for line in filter(None, reply.content.split(b"\n")):
            row = parse(line)
            key, body = look_up(row, "custom_id"), look_up(row, "response", "body")
            is_answer = look_up(row, "response", "status_code") == 200 and isinstance(body, dict)
            if is_answer and isinstance(key, str) and key in bodies:
                completions[key] = body
            else:
                logger.info("a call failed in the batch: %s", masked(line.decode(errors="replace"), api_key()))
    return completions


def _id(value: Any) -> str:
    """Return an id of the server. Raise StageError for one that does not fit into an address, or contains the key."""
    if not isinstance(value, str) or not _ID.fullmatch(value) or masked(value, api_key()) != value:
        raise _no_batch()
    return value


def _no_batch() -> StageError:
    return StageError("the server's replies are none of the Batch API; try without judge.batch")


class OpenAIJudge(Judge):
    """Ask a server, with `concurrency` calls at a time or in one batch, and keep each reply as it comes."""

    def __init__(self, settings: JudgeSettings, cache: Cache) -> None:
        super().__init__(settings, cache)
        listed = None if settings.address else _PRICES.get(settings.model_name)
        self._price = settings.price or listed

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
        self._estimate(todo)
        usage.cost = 0.0 if self._price else None
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
        limit = _LIMIT + (_ROW_LIMIT * len(todo) if self.settings.batch else 0)
        async with openai.AsyncOpenAI(
            base_url=self.settings.address,
            timeout=self.settings.timeout,
            max_retries=_RETRIES,
            http_client=Client(limit, _DEADLINE * self.settings.timeout),
        ) as client:
            if self.settings.batch:
                await self._ask_batch(client, todo, usage, progress)
            replies = self.cache.read(todo)
            queue = iter([(key, ask) for key, ask in todo.items() if key not in replies])
            answered = len(replies)

            async def work() -> None:
                nonlocal answered
                for key, ask in queue:
                    self.cache.keep({key: await self._ask_one(client, ask, usage)})
                    answered += 1
                    progress("judge", answered, len(todo))

            workers = [asyncio.create_task(work()) for _ in range(min(self.settings.concurrency, len(todo)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _ask_batch(self, client: Any, todo: Mapping[str, Ask], usage: Usage, progress: Progress) -> None:
        """Keep the valid answers of a batch; the caller asks for the rest. Raise StageError when the batch fails."""
        bodies = {key: self._body(ask) for key, ask in todo.items()}
        completions, failure = await run_batch(client, self.cache, bodies, progress)
        replies = {key: self._read(reply, todo[key], usage, _BATCH_SHARE) for key, reply in completions.items()}
        # All at once: the hash of the rest is the name of the batch that a rerun looks for.
        self.cache.keep({key: reply for key, reply in replies.items() if reply})
        if failure:
            raise StageError(failure)

    async def _ask_one(self, client: Any, ask: Ask, usage: Usage) -> str:
        """Return the valid reply; "" if none of _TRIES, each with its own seed, is valid."""
        for seed in range(_TRIES):
            response = await client.chat.completions.with_raw_response.create(**self._body(ask, seed))
            completion = parse(response.content)  # not checked further: we use a line and two numbers of it
            is_completion = isinstance(completion, dict) and "choices" in completion
            if is_completion and (reply := self._read(completion, ask, usage)):
                return reply
        if not is_completion:  # broken JSON, or a web page
            address = self.settings.address or "the server"
            raise StageError(f"{address} answers with something that is no chat completion; {_HINTS[404]}")
        return ""

    def _read(self, completion: Any, ask: Ask, usage: Usage, share: float = 1.0) -> str | None:
        """Return the valid reply of a completion, or None; add its tokens to `usage`."""
        prompt, reply = (look_up(completion, "usage", name) for name in ("prompt_tokens", "completion_tokens"))
        tokens = [count if type(count) is int and 0 < count < _MOST_TOKENS else 0 for count in (prompt, reply)]
        usage.calls += 1
        usage.prompt_tokens += tokens[0]
        usage.completion_tokens += tokens[1]
        if self._price:
            usage.cost = (usage.cost or 0.0) + share * _usd(tokens, self._price)
        text = look_up(completion, "choices", 0, "message", "content")
        return ask.read(text if isinstance(text, str) else "")

    def _estimate(self, todo: Mapping[str, Ask]) -> None:
        prompt = sum(len(ask.system) + len(ask.user) for ask in todo.values()) // 4
        text = (
            f"judge: {len(todo)} calls to {self.settings.model_name}, about {prompt} prompt tokens (4 characters each)"
        )
        if self._price is None:
            logger.info("%s; the price is not known", text)
            return
        share = _BATCH_SHARE if self.settings.batch else 1.0
        usd = share * _usd((prompt, sum(ask.tokens for ask in todo.values())), self._price)
        logger.warning("%s: about %.2f USD", text, usd)  # a warning, since it costs money

    def _explain(self, error: Exception) -> str:
        """Say what went wrong and what to try, without the key, which servers like to repeat."""
        text = str(error)
        if isinstance(error, openai.APIStatusError):
            if 300 <= error.status_code < 400:
                place = masked(error.response.headers.get("location", ""), api_key())
                return (
                    f"the server said {error.status_code}: it points to '{place}'. msa-lite sent nothing there, "
                    "because it would get the texts to judge; set judge.base_url to the right server"
                )
            hint = _HINTS.get(error.status_code, "see what the server says, or try another judge.model")
            hint += ", or try without judge.batch" if self.settings.batch else ""
            text = f"the server said {error.status_code}: {_message(error)}; {hint}"
        elif isinstance(error, openai.APITimeoutError):
            text = f"no reply within {self.settings.timeout:g} s, {_RETRIES + 1} times in a row; raise judge.timeout"
        elif isinstance(error, openai.APIConnectionError):
            reason = masked(str(error.__cause__ or error), api_key())
            text = f"{self.settings.address or 'the server'} is out of reach ({reason})"
        return text


def _usd(tokens: Sequence[int], price: tuple[float, float]) -> float:
    return sum(count * usd for count, usd in zip(tokens, price, strict=True)) / 1e6


def _message(error: Any) -> str:
    """Return the server's own words, on one line, cut and masked."""
    words = look_up(error.body, "message")
    return masked(words if isinstance(words, str) and words else str(error.message), api_key())
