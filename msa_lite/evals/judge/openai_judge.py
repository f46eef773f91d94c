"""Ask a judge behind a server with OpenAI's interface: OpenAI itself, vLLM, llama.cpp, and the like.

The openai package retries after 408, 409, 429, 5xx, time-outs and dropped connections, with exponential back-off and
jitter, or after the time in Retry-After or retry-after-ms. Any other fault ends the run; each reply is on disk by then.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from msa_lite.errors import StageError
from msa_lite.evals.judge.batch import run_batch
from msa_lite.evals.judge.cache import Cache, Spent, answer
from msa_lite.evals.judge.prompts import Ask
from msa_lite.evals.judge.secret import api_key
from msa_lite.evals.judge.settings import JudgeSettings, Ruling, Usage
from msa_lite.io.files import digest
from msa_lite.io.masking import masked
from msa_lite.io.progress import Progress, silent

logger = logging.getLogger(__name__)

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
