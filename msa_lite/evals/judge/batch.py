"""OpenAI's Batch API: all calls in one file, at half the price, answered within a day.

The batch's id goes to the cache at once, so that a stopped run goes on waiting for the same batch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from msa_lite.errors import StageError
from msa_lite.evals.judge.cache import Cache
from msa_lite.evals.judge.secret import api_key
from msa_lite.io.files import digest
from msa_lite.io.masking import masked
from msa_lite.io.progress import Progress

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
