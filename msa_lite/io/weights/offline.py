"""Work without a network: look into caches alone, and say why."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

logger = logging.getLogger(__name__)

_REACH = 5  # seconds in which the Hub answers, if it can be reached


@contextmanager
def offline_where_unreachable() -> Iterator[None]:
    """Look into caches alone while the Hub cannot be reached: its clients would try again and again for a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_REACH)
    except Exception as error:  # the HTTP client's errors have no base of the Hub library's own
        logger.debug("the Hub cannot be reached: %s", error)
    else:
        yield
        return
    clients: list[Any] = [constants]
    with suppress(ImportError):  # of a plain installation
        from datasets import config

        clients.append(config)
    before = [client.HF_HUB_OFFLINE for client in clients]
    for client in clients:
        client.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for client, value in zip(clients, before, strict=True):
            client.HF_HUB_OFFLINE = value


def offline_reason() -> str | None:
    """Return, for a message, why nothing is fetched from the Hub now; None where it is asked."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        return None
    variable = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), None)
    return f"{variable} is set" if variable else "the Hub cannot be reached"
