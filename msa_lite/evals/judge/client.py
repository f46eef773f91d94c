"""Below the openai package: bound a reply's size and duration, and wait as the server's headers ask."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import zlib
from typing import Any

import anyio
import httpx2
import openai

from msa_lite.errors import StageError

logger = logging.getLogger(__name__)


_LONGEST_WAIT = 20.0  # seconds; later than that, we rely on the server's refusal and its Retry-After
_LONGEST_TEXT = 30  # characters of a header to read
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}


class RateLimit:
    """Read after each call what is left of the server's limit, and wait before a call that does not fit into it.

    Some servers name the time until the whole limit is back, and serve calls long before. Once a server did, no call
    waits any more, until the server refuses one.
    """

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}  # requests, tokens → (left, time of the reset)
        self._serves_early = False

    async def before(self, request: Any) -> bool:
        """Wait until there is room for a request, counting 4 bytes of its body as a token.

        Return True if the request goes before the reset that the server named.
        """
        needs = {"requests": 1, "tokens": int(request.headers.get("content-length") or 0) // 4}
        now = time.monotonic()
        waits = [reset - now for kind, (left, reset) in self._left.items() if left < needs[kind]]
        reset_in = max(waits, default=0.0)
        if reset_in > 0 and not self._serves_early:
            seconds = min(reset_in, _LONGEST_WAIT)
            logger.info("rate limit of the judge: waiting %.1f s", seconds)
            await asyncio.sleep(seconds)
        return reset_in > _LONGEST_WAIT

    def after(self, response: Any, early: bool) -> None:
        """Read x-ratelimit-remaining-* and x-ratelimit-reset-*. early: what `before` returned for the call."""
        self._serves_early = response.status_code != 429 and (self._serves_early or early)
        for kind in ("requests", "tokens"):
            left = response.headers.get(f"x-ratelimit-remaining-{kind}", "")
            seconds = read_duration(response.headers.get(f"x-ratelimit-reset-{kind}", ""))
            if re.fullmatch(r"-?\d{1,15}", left) and seconds is not None:
                self._left[kind] = (int(left), time.monotonic() + seconds)


def read_duration(text: str) -> float | None:
    """Read the seconds of "6m0s", "1.5s", "20ms" or "3"; return None for anything else."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smhd]|$)", text[: _LONGEST_TEXT + 1])
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


# The headers that the openai package uses. Others of a hostile server (charset) can only do harm.
_HEADERS = (b"location", b"retry-after", b"retry-after-ms", b"x-should-retry")
_GZIP = 16 + zlib.MAX_WBITS


class Client(openai.DefaultAsyncHttpxClient):
    """Wait for the server's rate limits before each call, and read its reply whole and within limits."""

    def __init__(self, limit: int, seconds: float) -> None:
        """Set the limits: the most bytes of an unpacked reply, and the most seconds until its last byte."""
        super().__init__(follow_redirects=False)
        self._limit = limit
        self._seconds = seconds
        self._rates = RateLimit()

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a call and read its reply to the end. Raise StageError for a reply beyond the limits."""
        request.headers["accept-encoding"] = "gzip"
        early = await self._rates.before(request)
        try:
            with anyio.fail_after(self._seconds):
                response = await super().send(request, stream=True, **options)
                try:
                    body = await self._read(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise StageError(
                f"{_server(request)} does not end its reply within {self._seconds:g} s; raise judge.timeout if it is "
                "that slow"
            ) from None
        self._rates.after(response, early)
        headers = [(name, value) for name, value in response.headers.raw if name.lower() in _HEADERS]
        return httpx2.Response(response.status_code, headers=headers, content=body, request=request)

    async def _read(self, response: httpx2.Response) -> bytes:
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if len(body) > self._limit:
                raise self._too_large(response)
        packing = response.headers.get("content-encoding", "identity").strip().lower()
        if packing in ("identity", ""):
            return bytes(body)
        if packing != "gzip":
            raise StageError(f"{_server(response.request)} compresses its reply in another way than gzip")
        try:
            plain = zlib.decompressobj(_GZIP).decompress(bytes(body), self._limit + 1)
        except zlib.error as error:
            raise httpx2.DecodingError("the reply is no gzip", request=response.request) from error
        if len(plain) > self._limit:
            raise self._too_large(response)
        return plain

    def _too_large(self, response: httpx2.Response) -> StageError:
        return StageError(
            f"{_server(response.request)} sends a reply of more than {self._limit / 1e6:.3g} MB, which is no judge's; "
            "check judge.base_url"
        )


def _server(request: httpx2.Request) -> str:
    return f"{request.url.scheme}://{request.url.host}{f':{request.url.port}' if request.url.port else ''}"
