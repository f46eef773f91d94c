"""Limit the size and the duration of a server's reply, in the HTTP client below the openai package.

A reply of three tokens is small and comes at once, so one that is large, or never ends, is an error. The client does
not follow redirects, since the texts to judge would go to wherever they point.
"""

from __future__ import annotations

import zlib
from typing import Any

import anyio
import httpx2
import openai

from msa_lite.errors import StageError
from msa_lite.evals.judge.limits import RateLimit

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
