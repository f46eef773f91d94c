"""Which judge to ask and how, and what comes back, for every kind of judge."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from msa_lite.errors import UsageError, nearest
from msa_lite.evals.judge.prompts import Ask, prompt_version
from msa_lite.io.hub import fetch
from msa_lite.io.progress import Progress, silent

KINDS = ("none", "local", "openai")
_OPENAI_MODEL = "gpt-4o"


@dataclass(frozen=True)
class JudgeSettings:
    """kind: "none", "local" (a Hugging Face model on this machine) or "openai" (any server with OpenAI's interface).

    model: a model of the server, or a folder or `repo[@revision]`, which a local judge needs. base_url: the server's;
    None for OPENAI_BASE_URL, or OpenAI itself. separate: whether acc_forget comes from a call of its own, in which the
    ideal's answer is no candidate. batch: whether calls go through the Batch API (half the price, up to 24 hours).
    concurrency: calls under way at a time. timeout: seconds without a sign from the server after which a call is
    tried again; a reply that is not at its end after ten times as many ends the run. price: USD per million prompt and
    completion tokens; None for the list price, where it is known.
    """

    kind: Literal["none", "local", "openai"] = "none"
    model: str | None = None
    base_url: str | None = None
    separate: bool = False
    batch: bool = False
    concurrency: int = 8
    timeout: float = 60.0
    price: tuple[float, float] | None = None

    @property
    def model_name(self) -> str:
        """The model to ask; "" where a local judge has none."""
        return self.model or (_OPENAI_MODEL if self.kind == "openai" else "")

    @property
    def address(self) -> str | None:
        """The server's address; None for OpenAI's own, and for a judge without server."""
        if self.kind != "openai":
            return None
        return (self.base_url or os.environ.get("OPENAI_BASE_URL") or "").rstrip("/") or None

    def describe(self) -> dict[str, Any]:
        """What a manifest records: what decides the verdicts, not how fast or at what price they come."""
        if self.kind == "none":
            return {"kind": "none"}
        return {
            "kind": self.kind,
            "model": self.model_name,
            "base_url": self.address,
            "separate": self.separate,
            "prompts": prompt_version(),
            # Raises UsageError where there is no such model: it is needed, and a changed one gives other verdicts.
            **({"revision": fetch(self.model_name, by_content=False).revision} if self.kind == "local" else {}),
        }

    def check(self) -> None:
        """Raise UsageError for values that mean nothing."""
        if self.kind not in KINDS:
            raise UsageError(f"judge.kind: '{self.kind}'; choose from {', '.join(KINDS)}{nearest(self.kind, KINDS)}")
        if self.kind == "none" and (self.model or self.base_url or self.separate or self.batch):
            raise UsageError("judge.kind is 'none', but something else of a judge is given; choose openai or local")
        if self.concurrency < 1:
            raise UsageError(f"judge.concurrency: {self.concurrency}; it has to be at least 1")
        if not self.timeout > 0:
            raise UsageError(f"judge.timeout: {self.timeout}; it has to be above 0 seconds")
        if self.price is not None and (len(self.price) != 2 or not all(usd >= 0 for usd in self.price)):
            raise UsageError(f"judge.price: {self.price}; it has to be two numbers ≥ 0, USD per million tokens")
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
    """What the judge chose: one of the ask's letters, or "Z". valid: False where no reply opened with one of these."""

    letter: str
    valid: bool


@dataclass(frozen=True)
class Usage:
    """What verdicts took. calls: replies got in this run. cached: asks that needed none. invalid: verdicts not valid.

    prompt_tokens, completion_tokens: as the server counted them in this run; 0 for a local judge. cost: USD of them,
    None where the price is not known.
    """

    calls: int
    cached: int
    prompt_tokens: int
    completion_tokens: int
    invalid: int
    cost: float | None


class Judge(Protocol):
    """Whatever answers asks."""

    def ask(self, asks: Sequence[Ask], progress: Progress = silent) -> tuple[list[Ruling], Usage]:
        """(verdicts in the order of the asks, what they took). Raises StageError when the judge fails.

        What was answered until then is kept, and asked no more by a rerun.
        """
