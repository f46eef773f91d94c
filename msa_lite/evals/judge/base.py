"""The settings of a judge, the replies that it gave before, and what every kind of judge does with both.

The file of replies holds hashes of prompts and answers alone, since these may be the data to forget; replies are
letters. Where a reply is a text, the file belongs in the folder of the run.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from msa_lite.errors import UsageError, nearest
from msa_lite.evals.judge.prompts import Ask
from msa_lite.evals.judge.wording import NONE, OURS, JudgeWording, load_wording
from msa_lite.io.console.progress import Progress, part_of, silent
from msa_lite.io.files.cache import Cache
from msa_lite.io.weights.hub import fetch

KINDS = ("none", "local", "openai")
CACHE_FILE = "judge.sqlite"
_OPENAI_MODEL = "gpt-4o"


def api_key() -> str:
    """Return the key in the environment, or ""."""
    return os.environ.get("OPENAI_API_KEY") or ""


def cache_folder() -> Path:
    """Return the folder of the cache: $MSA_LITE_CACHE, or ~/.cache/msa-lite."""
    return Path(os.environ.get("MSA_LITE_CACHE") or "~/.cache/msa-lite").expanduser()


@dataclass(frozen=True)
class JudgeSettings:
    """A choice of judge."""

    kind: Literal["none", "local", "openai"] = "none"
    """local: a Hugging Face model on this machine. openai: any server with OpenAI's interface."""
    model: str | None = None
    """A model of the server; or a folder or `repo[@revision]`, which a local judge needs."""
    base_url: str | None = None
    """The server's; None for OPENAI_BASE_URL, or OpenAI itself."""
    prompts: str | None = None
    """A YAML file with the wording of the prompts, as `load_wording` reads it; None for ours."""

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

    @cached_property
    def wording(self) -> JudgeWording:
        """Return the prompts, read once. Raise UsageError for a file with faults."""
        return load_wording(self.prompts) if self.prompts else OURS

    def describe(self) -> dict[str, Any]:
        """Return what a manifest records: all that decides the verdicts."""
        if self.kind == "none":
            return {"kind": "none"}
        return {
            "kind": self.kind,
            "model": self.model_name,
            "base_url": self.address,
            "prompts": self.wording.version,
            # Raise UsageError if there is no such model. A changed model gives other verdicts.
            **({"revision": fetch(self.model_name, by_content=False).revision} if self.kind == "local" else {}),
        }

    def check(self) -> None:
        """Raise UsageError for invalid values."""
        if self.kind not in KINDS:
            raise UsageError(f"judge.kind: '{self.kind}'; choose from {', '.join(KINDS)}{nearest(self.kind, KINDS)}")
        if self.kind == "none" and (self.model or self.base_url or self.prompts):
            raise UsageError("judge.kind is 'none', but other keys of judge are set; choose openai or local")
        if self.kind == "local" and not self.model:
            raise UsageError("judge.model: a local judge needs one, a folder or repo[@revision]")
        if self.kind == "local" and self.base_url:
            raise UsageError("judge.base_url belongs to a judge of kind 'openai', not to a local one")
        if self.address:
            parts = urlsplit(self.address)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise UsageError(f"judge.base_url: '{self.address}' is no address such as http://localhost:8000/v1")
            if parts.username or parts.password:
                raise UsageError("judge.base_url: it is written to manifests; put no password in it")
        _ = self.wording  # raises for a file with faults

    def check_prompts(self, benchmark: str) -> None:
        """Raise UsageError where the file of prompts has none for the questions of a benchmark."""
        own = {"tofu": self.wording.tofu, "restor": self.wording.restor}.get(benchmark)
        if self.prompts and own in (OURS.tofu, OURS.restor):
            raise UsageError(f"judge.prompts: {self.prompts}: has no prompt of {benchmark}, which is judged here")


@dataclass(frozen=True)
class Ruling:
    """The judge's choice, or its text."""

    reply: str
    """One of the ask's letters, or "Z"."""
    valid: bool
    """False if no reply was valid."""


@dataclass
class Usage:
    """Counts of the verdicts of one run."""

    calls: int = 0
    """Replies that came in this run."""
    cached: int = 0
    """Asks that needed no reply."""
    invalid: int = 0
    """Verdicts that are not valid."""


def open_cache(folder: Path | None = None) -> Cache:
    """Open the replies so far, by the hash of the ask; "" is an invalid one. folder: None for `cache_folder`."""
    return Cache((folder or cache_folder()) / CACHE_FILE, "set MSA_LITE_CACHE to another folder")


class Judge(ABC):
    """Answer asks: from the cache where it can, else with a model or through a server."""

    def __init__(self, settings: JudgeSettings, cache: Cache) -> None:
        self.settings = settings
        self.cache = cache

    @abstractmethod
    def key(self, ask: Ask) -> str:
        """Return the hash of an ask and of whom it goes to, by which the cache keeps its reply."""

    @abstractmethod
    def send(self, todo: Mapping[str, Ask], usage: Usage, progress: Progress) -> None:
        """Get the replies to asks, by their keys: add each to the cache as it comes, and count it in `usage`."""

    def ask(self, asks: Sequence[Ask], progress: Progress = silent) -> tuple[list[Ruling], Usage]:
        """Return (verdicts in the order of the asks, usage); equal asks are sent once.

        Raise StageError when the judge fails, UsageError if there is no such model. The replies so far stay in the
        cache, and a rerun does not ask for them again.
        """
        keys, usage = [self.key(ask) for ask in asks], Usage()
        kept = self.cache.read(keys)
        todo = {key: ask for key, ask in zip(keys, asks, strict=True) if key not in kept}
        total = len(set(keys))
        if todo:
            self.send(todo, usage, part_of(progress, "judge", total - len(todo), total))
        progress("judge", total, total)
        replies = self.cache.read(keys)
        verdicts = [Ruling(replies[key] or NONE, bool(replies[key])) for key in keys]
        usage.cached = len(asks) - len(todo)
        usage.invalid = sum(not verdict.valid for verdict in verdicts)
        return verdicts, usage
