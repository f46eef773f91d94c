"""Wait for a server's rate limits as its headers announce them, before it refuses a call.

The openai package only reacts to refusals (Retry-After, back-off), gives up after a few, and OpenAI counts refused
calls against the limit.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any

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
