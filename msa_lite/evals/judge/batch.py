"""OpenAI's Batch API: all calls in one file, at half the price, answered within a day.

The batch's id is kept as soon as there is one, so that a stopped run goes on waiting for the same batch.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from msa_lite.evals.judge.cache import Cache
from msa_lite.io.manifest import digest
from msa_lite.io.progress import Progress

logger = logging.getLogger(__name__)

_POLL_SECONDS = 30.0
_OVER = ("completed", "failed", "expired", "cancelled")


async def run_batch(
    client: Any, cache: Cache, bodies: Mapping[str, Mapping[str, Any]], progress: Progress
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """(completions by key, why the batch failed or None), after as long as the server takes.

    bodies: the calls, by the hash that names them. Of a failed batch too what was answered is returned; calls that the
    server could not answer are missing. Raises errors of the openai package.
    """
    import openai

    name = f"batch {digest(sorted(bodies))}"
    batch_id = cache.read([name]).get(name) or await _create(client, bodies)
    cache.keep({name: batch_id})
    logger.info("waiting for batch %s; a stopped run resumes it", batch_id)
    try:
        batch = await client.batches.retrieve(batch_id)
        while batch.status not in _OVER:
            await asyncio.sleep(_POLL_SECONDS)
            batch = await client.batches.retrieve(batch_id)
            if batch.request_counts:
                progress("judge", batch.request_counts.completed, len(bodies))
    except openai.NotFoundError:
        cache.forget(name)
        raise
    completions = await _download(client, batch)
    if batch.status == "completed":
        if len(completions) < len(bodies):
            logger.warning("%d calls failed in the batch and are made singly", len(bodies) - len(completions))
        return completions, None
    cache.forget(name)
    faults = [fault.message for fault in (batch.errors.data if batch.errors else None) or [] if fault.message]
    reason = f": {'; '.join(faults)[:500]}" if faults else ""
    return completions, f"batch {batch_id} is {batch.status}{reason}; try again, or without judge.batch"


async def _create(client: Any, bodies: Mapping[str, Mapping[str, Any]]) -> str:
    """Upload the calls and start the batch; its id."""
    lines = [
        json.dumps({"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body})
        for key, body in bodies.items()
    ]
    file = await client.files.create(file=("judge.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return str(batch.id)


async def _download(client: Any, batch: Any) -> dict[str, dict[str, Any]]:
    """The completions of a batch that is over, by key; the file of errors says why others are missing."""
    completions: dict[str, dict[str, Any]] = {}
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        content = await client.files.content(file_id)
        for row in map(json.loads, filter(None, content.text.split("\n"))):
            response = row.get("response") or {}
            if response.get("status_code") == 200:
                completions[row["custom_id"]] = response["body"]
            else:
                logger.info("a call failed in the batch: %s", row.get("error") or response.get("body"))
    return completions
