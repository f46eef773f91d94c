"""The settings of every kind of judge, its key, and the results that it returns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from msa_lite.errors import UsageError, nearest
from msa_lite.evals.judge.prompts import Ask, prompt_version
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.weights.hub import fetch


def api_key() -> str:
    """Return the key in the environment, or ""."""
    return os.environ.get("OPENAI_API_KEY") or ""


KINDS = ("none", "local", "openai")
_OPENAI_MODEL = "gpt-4o"


@dataclass(frozen=True)
class JudgeSettings:
    """A choice of judge."""

    kind: Literal["none", "local", "openai"] = "none"
    """local: a Hugging Face model on this machine. openai: any server with OpenAI's interface."""
    model: str | None = None
    """A model of the server; or a folder or `repo[@revision]`, which a local judge needs."""
    base_url: str | None = None
    """The server's; None for OPENAI_BASE_URL, or OpenAI itself."""
    separate: bool = False
    """True to take acc_forget from a separate call, in which the ideal's answer is no candidate."""
    batch: bool = False
    """True to use the Batch API (half the price, up to 24 hours)."""
    concurrency: int = 8
    """Calls under way at a time."""
    timeout: float = 60.0
    """Seconds without a sign from the server after which to retry a call; a call that takes ten times as long in all
    ends the run."""
    price: tuple[float, float] | None = None
    """USD per million prompt and completion tokens; None for the list price, if we know it."""

    @property
    def model_name(self) -> str:
        """Return the model to ask; "" if a local judge has none."""
        return self.model or (_OPENAI_MODEL if self.kind == "openai" else "")

    @property
    def address(self) -> str | None:
        """Return the server's address; None for OpenAI's own, and for a judge without a server."""
        if self.kind != "openai":
            return None
        return (self.base_url or os.environ.get("OPENAI_BASE_URL") or "").rstrip("/") or None

    def describe(self) -> dict[str, Any]:
        """Return what a manifest records: all that decides the verdicts, not their speed or price."""
        if self.kind == "none":
            return {"kind": "none"}
        return {
            "kind": self.kind,
            "model": self.model_name,
            "base_url": self.address,
            "separate": self.separate,
            "prompts": prompt_version(),
            # Raise UsageError if there is no such model. A changed model gives other verdicts.
            **({"revision": fetch(self.model_name, by_content=False).revision} if self.kind == "local" else {}),
        }

    def check(self) -> None:
        """Raise UsageError for invalid values."""
        if self.kind not in KINDS:
            raise UsageError(f"judge.kind: '{self.kind}'; choose from {', '.join(KINDS)}{nearest(self.kind, KINDS)}")
        if self.kind == "none" and (self.model or self.base_url or self.separate or self.batch):
            raise UsageError("judge.kind is 'none', but other keys of judge are set; choose openai or local")
        if self.concurrency < 1:
            raise UsageError(f"judge.concurrency: {self.concurrency}; it must be at least 1")
        if not self.timeout > 0:
            raise UsageError(f"judge.timeout: {self.timeout}; it must be above 0 seconds")
        if self.price is not None and (len(self.price) != 2 or not all(usd >= 0 for usd in self.price)):
            raise UsageError(f"judge.price: {self.price}; it must be two numbers ≥ 0, USD per million tokens")
        if self.kind == "local" and not self.model:
            raise UsageError("judge.model: a local judge needs one, a folder or repo[@revision]")
        if self.kind == "local" and (self.base_url or self.batch):
            raise UsageError("judge.base_url and judge.batch belong to a judge of kind 'openai', not to a local one")
        if self.address:
            parts = urlsplit(self.address)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise UsageError(f"judge.base_url: '{self.address}' is no address such as http://localhost:8000/v1")
            if parts.username or parts.password:
                raise UsageError("judge.base_url: it is written to manifests; put no password in it")


@dataclass(frozen=True)
class Ruling:
    """The judge's choice, or its text."""

    reply: str
    """One of the ask's letters, or "Z"; for a `TextAsk`, a line of text."""
    valid: bool
    """False if no reply was valid."""


@dataclass(frozen=True)
class Usage:
    """Calls, tokens and cost of the verdicts of one run."""

    calls: int
    """Replies that came in this run."""
    cached: int
    """Asks that needed no reply."""
    prompt_tokens: int
    """As the server counted them; 0 for a local judge."""
    completion_tokens: int
    """As the server counted them; 0 for a local judge."""
    invalid: int
    """Verdicts that are not valid."""
    cost: float | None
    """USD; None if the price is not known."""


class Judge(Protocol):
    """Answer asks, with a model or through a server."""

    def ask(self, asks: Sequence[Ask], progress: Progress = silent) -> tuple[list[Ruling], Usage]:
        """Return (verdicts in the order of the asks, usage). Raise StageError when the judge fails.

        The replies so far stay in the cache, and a rerun does not ask for them again.
        """
