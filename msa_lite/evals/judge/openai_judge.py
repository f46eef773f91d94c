"""Ask a judge behind a server with OpenAI's interface, call by call or by the Batch API at half the price."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msa_lite.errors import StageError
from msa_lite.evals.judge.cache import Cache, Spent, answer
from msa_lite.evals.judge.prompts import Ask
from msa_lite.evals.judge.settings import JudgeSettings, Ruling, Usage, api_key
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.spellings import masked
from msa_lite.io.files.writing import digest

logger = logging.getLogger(__name__)


_POLL_SECONDS = 30.0
_MOST_POLLS = 2 * 24 * 120  # two days; a batch takes one at most
_ID = re.compile(r"[A-Za-z0-9][\w.:-]{0,199}", re.ASCII)
_OVER = ("completed", "failed", "expired", "cancelled")


async def run_batch(
    client: Any, cache: Cache, bodies: Mapping[str, Mapping[str, Any]], progress: Progress
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Run the calls as one batch; return (completions by key, why the batch failed or None).

    bodies: the calls, by the hash that names them. A failed batch also returns the answers that it has; calls that the
    server could not answer are missing. Raise errors of the openai package, and StageError for replies that are no
    batches, or for a batch that does not end within two days.
    """
    import openai

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
    reason = "; ".join(_faults(batch))
    reason = f": {reason[:500]}" if reason else ""
    return completions, f"batch {batch_id} is {batch['status']}{reason}; try again, or without judge.batch"


async def _create(client: Any, bodies: Mapping[str, Mapping[str, Any]]) -> str:
    """Upload the calls and start the batch; return its id."""
    lines = [
        json.dumps({"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body})
        for key, body in bodies.items()
    ]
    content = "\n".join(lines).encode()
    reply = await client.files.with_raw_response.create(file=("judge.jsonl", content), purpose="batch")
    file_id = _id(_object(reply.content).get("id"))
    reply = await client.batches.with_raw_response.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return _id(_object(reply.content).get("id"))


async def _wait(client: Any, batch_id: str, calls: int, progress: Progress) -> dict[str, Any]:
    """Wait until a batch is over, and return it."""
    for _ in range(_MOST_POLLS):
        reply = await client.batches.with_raw_response.retrieve(batch_id)
        batch = _object(reply.content)
        if not isinstance(batch.get("status"), str):
            raise _no_batch()
        if batch["status"] in _OVER:
            return batch
        counts = batch.get("request_counts")
        done = counts.get("completed") if isinstance(counts, dict) else None
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
            row = _parsed(line)
            key = row.get("custom_id")
            response = row.get("response")
            response = response if isinstance(response, dict) else {}
            body = response.get("body")
            if response.get("status_code") == 200 and isinstance(body, dict) and isinstance(key, str) and key in bodies:
                completions[key] = body
            else:
                logger.info("a call failed in the batch: %s", masked(line.decode(errors="replace"), api_key()))
    return completions


def _faults(batch: Mapping[str, Any]) -> list[str]:
    """Return the server's error messages for a failed batch."""
    errors = batch.get("errors")
    faults = errors.get("data") if isinstance(errors, dict) else None
    messages = [
        fault.get("message") for fault in (faults if isinstance(faults, list) else []) if isinstance(fault, dict)
    ]
    return [masked(message, api_key()) for message in messages[:10] if isinstance(message, str) and message]


def _parsed(content: bytes) -> dict[str, Any]:
    """Parse a JSON object of the server; return an empty one for anything else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _object(content: bytes) -> dict[str, Any]:
    value = _parsed(content)
    if not value:
        raise _no_batch()
    return value


def _id(value: Any) -> str:
    """Return an id of the server. Raise StageError for one that does not fit into an address, or contains the key."""
    if not isinstance(value, str) or not _ID.fullmatch(value) or masked(value, api_key()) != value:
        raise _no_batch()
    return value


def _no_batch() -> StageError:
    return StageError("the server's replies are none of the Batch API; try without judge.batch")


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


class OpenAIJudge:
    """Ask a server, with `concurrency` calls at a time or in one batch, and keep each reply as it comes."""

    def __init__(self, settings: JudgeSettings, cache: Cache) -> None:
        self.settings = settings
        self.cache = cache
        listed = None if settings.address else _PRICES.get(settings.model_name)
        self._price = settings.price or listed

    def ask(self, asks: Sequence[Ask], progress: Progress = silent) -> tuple[list[Ruling], Usage]:
        """Return (verdicts in the order of the asks, usage). Raise StageError when the server fails for good."""
        keys = [digest(["openai", self.settings.address, self._body(ask)]) for ask in asks]
        return answer(self.cache, keys, asks, progress, self._send)

    def _body(self, ask: Ask, seed: int = 0) -> dict[str, Any]:
        # OpenAI's newer models know only max_completion_tokens. Some other servers do not, would ignore it and write an
        # essay; so these get the older name, which all of them know.
        limit = "max_tokens" if self.settings.address else "max_completion_tokens"
        messages = [{"role": "system", "content": ask.system}, {"role": "user", "content": ask.user}]
        name = self.settings.model_name
        return {"model": name, "messages": messages, "temperature": 0, "seed": seed, limit: ask.tokens}

    def _send(self, todo: Mapping[str, Ask], progress: Progress) -> Spent:
        import openai
        from anyio.from_thread import start_blocking_portal

        self._estimate(todo)
        spent = Spent(cost=0.0 if self._price else None)
        try:
            # A thread with its own loop also works in a notebook, whose loop runs already, and Ctrl-C cancels it.
            with start_blocking_portal() as portal:
                portal.call(self._work, todo, spent, progress)
        except (openai.OpenAIError, StageError) as error:
            count = len(self.cache.read(todo))
            raise StageError(
                f"the judge failed: {self._explain(error)}. {count} of {len(todo)} answers are kept in "
                f"{self.cache.path}; a rerun asks only for the rest"
            ) from None  # the cause holds the server's own words, which may contain the key
        return spent

    async def _work(self, todo: Mapping[str, Ask], spent: Spent, progress: Progress) -> None:
        import openai

        from msa_lite.evals.judge.client import Client

        limit = _LIMIT + (_ROW_LIMIT * len(todo) if self.settings.batch else 0)
        async with openai.AsyncOpenAI(
            base_url=self.settings.address,
            timeout=self.settings.timeout,
            max_retries=_RETRIES,
            http_client=Client(limit, _DEADLINE * self.settings.timeout),
        ) as client:
            if self.settings.batch:
                await self._ask_batch(client, todo, spent, progress)
            replies = self.cache.read(todo)
            queue = iter([(key, ask) for key, ask in todo.items() if key not in replies])
            answered = len(replies)

            async def work() -> None:
                nonlocal answered
                for key, ask in queue:
                    self.cache.keep({key: await self._ask_one(client, ask, spent)})
                    answered += 1
                    progress("judge", answered, len(todo))

            workers = [asyncio.create_task(work()) for _ in range(min(self.settings.concurrency, len(todo)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _ask_batch(self, client: Any, todo: Mapping[str, Ask], spent: Spent, progress: Progress) -> None:
        """Keep the valid answers of a batch; the caller asks for the rest. Raise StageError when the batch fails."""
        bodies = {key: self._body(ask) for key, ask in todo.items()}
        completions, failure = await run_batch(client, self.cache, bodies, progress)
        replies = {key: self._read(reply, todo[key], spent, _BATCH_SHARE) for key, reply in completions.items()}
        # All at once: the hash of the rest is the name of the batch that a rerun looks for.
        self.cache.keep({key: reply for key, reply in replies.items() if reply})
        if failure:
            raise StageError(failure)

    async def _ask_one(self, client: Any, ask: Ask, spent: Spent) -> str:
        """Return the valid reply; "" if none of _TRIES, each with its own seed, is valid."""
        for seed in range(_TRIES):
            completion = await self._complete(client, self._body(ask, seed))
            reply = self._read(completion, ask, spent) if completion else None
            if reply:
                return reply
        if completion is None:
            address = self.settings.address or "the server"
            raise StageError(f"{address} answers with something that is no chat completion; {_HINTS[404]}")
        return ""

    @staticmethod
    async def _complete(client: Any, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Make one call and return its completion; None for any other reply, such as broken JSON or a web page."""
        reply = await client.chat.completions.with_raw_response.create(**body)
        try:
            completion = json.loads(reply.content)  # not checked further: we use a line and two numbers of it
        except (ValueError, RecursionError):
            return None
        return completion if isinstance(completion, dict) and "choices" in completion else None

    def _read(self, completion: Mapping[str, Any], ask: Ask, spent: Spent, share: float = 1.0) -> str | None:
        """Return the valid reply of a completion, or None; add its tokens to `spent`."""
        tokens = _tokens(completion, "prompt_tokens"), _tokens(completion, "completion_tokens")
        spent.calls += 1
        spent.prompt_tokens += tokens[0]
        spent.completion_tokens += tokens[1]
        if self._price:
            spent.cost = (spent.cost or 0.0) + share * _usd(tokens, self._price)
        return ask.read(_content(completion))

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
        import openai

        text = str(error)
        if isinstance(error, openai.APIStatusError):
            if 300 <= error.status_code < 400:
                place = masked(error.response.headers.get("location", ""), api_key())
                return (
                    f"the server said {error.status_code}: it points to '{place}'. msa-lite sent nothing there, since "
                    "it would get the texts to judge; set judge.base_url to the right server"
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


def _usd(tokens: tuple[int, int], price: tuple[float, float]) -> float:
    return sum(count * usd for count, usd in zip(tokens, price, strict=True)) / 1e6


def _content(completion: Mapping[str, Any]) -> str:
    """Return the text of a completion; "" if any part of it has an unexpected type."""
    choices = completion.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    text = message.get("content") if isinstance(message, dict) else None
    return text if isinstance(text, str) else ""


def _tokens(completion: Mapping[str, Any], name: str) -> int:
    """Return the server's count of tokens; 0 if that is no count."""
    used = completion.get("usage")
    count = used.get(name) if isinstance(used, dict) else None
    return count if type(count) is int and 0 < count < _MOST_TOKENS else 0


def _message(error: Any) -> str:
    """Return the server's own words, on one line, cut and masked."""
    words = error.body.get("message") if isinstance(error.body, dict) else None
    return masked(words if isinstance(words, str) and words else str(error.message), api_key())
