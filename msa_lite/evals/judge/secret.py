"""The key of the judge's server."""

from __future__ import annotations

import os


def api_key() -> str:
    """Return the key in the environment, or ""."""
    return os.environ.get("OPENAI_API_KEY") or ""
