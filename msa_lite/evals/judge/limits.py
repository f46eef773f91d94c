"""Keeping to a server's rate limits by what its headers say, before it has to refuse a call."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any

logger = logging.getLogger(__name__)

_LONGEST_WAIT = 120.0  # seconds; a reset further off is left to the server's refusal and its Retry-After
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}


class RateLimit:
    """Hooks of an HTTP client: `after` reads what is left, `before` waits where that is too little.

    All calls wait then, rather than each of them learning it by a refusal.
    """

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}  # requests, tokens → (left, time of the reset)

    async def before(self, request: Any) -> None:
        """Wait until there is room for a request, its body counted as a token for 4 bytes."""
        wanted = {"requests": 1, "tokens": int(request.headers.get("content-length") or 0) // 4}
        now = time.monotonic()
        waits = [reset - now for kind, (left, reset) in self._left.items() if left < wanted[kind]]
        seconds = min(max(waits, default=0.0), _LONGEST_WAIT)
        if seconds > 0:
            logger.info("rate limit of the judge: waiting %.1f s", seconds)
            await asyncio.sleep(seconds)

    async def after(self, response: Any) -> None:
        """Read x-ratelimit-remaining-* and x-ratelimit-reset-*; what a response does not say stays as it was."""
        for kind in ("requests", "tokens"):
            left = response.headers.get(f"x-ratelimit-remaining-{kind}", "")
            seconds = read_duration(response.headers.get(f"x-ratelimit-reset-{kind}", ""))
            if re.fullmatch(r"-?\d+", left) and seconds is not None:
                self._left[kind] = (int(left), time.monotonic() + seconds)


def read_duration(text: str) -> float | None:
    """Seconds of "6m0s", "1.5s", "20ms" or "3" (seconds); None for anything else."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smhd]|$)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)
