"""Ask the judge: a language model that says which candidate a generated answer agrees with.

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
from typing import Any

from msa_lite.data import DATE_STRING, encode_start, open_tokenizer, render_chat, without_special
from msa_lite.data.tokenizers import encode_plain
from msa_lite.errors import UsageError, nearest
from msa_lite.evals.judge.prompts import NONE, OURS, Ask, JudgeWording, load_wording
from msa_lite.evals.judge.server import find_server
from msa_lite.io.console.progress import Progress, part_of, silent
from msa_lite.io.files.cache import Cache
from msa_lite.io.files.writing import digest
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.settings import JudgeSettings

KINDS = ("none", "local", "openai")
CACHE_FILE = "judge.sqlite"


def cache_folder() -> Path:
    """Return the folder of the cache: $MSA_LITE_CACHE, or ~/.cache/msa-lite."""
    return Path(os.environ.get("MSA_LITE_CACHE") or "~/.cache/msa-lite").expanduser()


def wording_of(settings: JudgeSettings) -> JudgeWording:
    """Return the prompts of a judge. Raise UsageError for a file with faults."""
    return load_wording(settings.prompts) if settings.prompts else OURS


def describe_judge(settings: JudgeSettings) -> dict[str, Any]:
    """Return what a manifest records of a judge: all that decides the verdicts."""
    if settings.kind == "none":
        return {"kind": "none"}
    name = settings.model_name
    return {
        "kind": settings.kind,
        "model": name,
        "base_url": settings.address,
        "prompts": wording_of(settings).version,
        # Raise UsageError if there is no such model. A changed model gives other verdicts.
        **({"revision": fetch(name, by_content=False).revision} if settings.kind == "local" else {}),
    }


def check_judge(settings: JudgeSettings) -> None:
    """Raise UsageError for invalid settings."""
    kind = settings.kind
    if kind not in KINDS:
        raise UsageError(f"judge.kind: '{kind}'; choose from {', '.join(KINDS)}{nearest(kind, KINDS)}")
    if kind == "none" and settings != JudgeSettings():
        raise UsageError("judge.kind is 'none', but other keys of judge are set; choose openai or local")
    if kind == "local" and not settings.model:
        raise UsageError("judge.model: a local judge needs one, a folder or repo[@revision]")
    if kind == "local" and (settings.base_url or settings.key_env):
        raise UsageError("judge.base_url and judge.key_env belong to a judge of kind 'openai', not to a local one")
    find_server(settings)  # raises for an invalid address
    wording_of(settings)  # raises for a file with faults


def check_prompts(settings: JudgeSettings, benchmark: str) -> None:
    """Raise UsageError where the file of prompts has none for the questions of a benchmark."""
    wording = wording_of(settings)
    own = {"tofu": wording.tofu, "restor": wording.restor}.get(benchmark)
    if settings.prompts and own in (OURS.tofu, OURS.restor):
        raise UsageError(f"judge.prompts: {settings.prompts}: has no prompt of {benchmark}, which is judged here")


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


class LocalJudge(Judge):
    """Ask a Hugging Face model on this machine, greedily and in batches; load it when a reply is missing.

    Nothing is asked again after an invalid reply, since greedy answers stay the same.
    """

    @cached_property
    def _source(self) -> Source:
        return fetch(self.settings.model_name, by_content=False)

    def key(self, ask: Ask) -> str:
        return digest(["local", self._source.revision, ask.system, ask.user, ask.tokens])

    def send(self, todo: Mapping[str, Ask], usage: Usage, progress: Progress) -> None:
        from msa_lite.evals.engine.generate import Decoding, generate
        from msa_lite.evals.engine.models import Runner, load_model

        tokenizer = open_tokenizer(self._source.folder, self._source.name)
        keys, asks = list(todo), list(todo.values())
        prompts = [encode_ask(tokenizer, ask) for ask in asks]
        runner = Runner(load_model(self._source.folder))
        for batch in generate(runner, tokenizer, prompts, Decoding(max(ask.tokens for ask in asks))):
            self.cache.keep({keys[i]: asks[i].read(without_special(tokenizer, texts[0])) or "" for i, texts in batch})
            usage.calls += len(batch)
            progress("judge", usage.calls, len(keys))
        runner.close()


def encode_ask(tokenizer: Any, ask: Ask) -> list[int]:
    """Return the token ids of an ask: by the chat template, or as plain text if the tokenizer has none.

    A template without a system role gets system and user text as one message. Special tokens in the texts are blanks:
    an answer must not end the judge's turn.
    """
    system, user = (without_special(tokenizer, text) for text in (ask.system, ask.user))
    whole = f"{system}\n\n{user}"
    if not tokenizer.chat_template:
        return encode_start(tokenizer, whole)
    try:
        return _chat(tokenizer, [{"role": "system", "content": system}, {"role": "user", "content": user}])
    except Exception:  # templates without a system role raise an error of their own (Gemma)
        return _chat(tokenizer, [{"role": "user", "content": whole}])


def _chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = render_chat(tokenizer, messages, add_generation_prompt=True, date_string=DATE_STRING)
    return encode_plain(tokenizer, text)
