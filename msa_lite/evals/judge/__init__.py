"""Open the judge: a language model that says which candidate a generated answer agrees with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from msa_lite.data import DATE_STRING, open_tokenizer, render_chat
from msa_lite.errors import UsageError
from msa_lite.evals.judge.base import Judge, Usage, api_key, check_judge, open_cache
from msa_lite.evals.judge.prompts import Ask
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress
from msa_lite.io.files.reading import local_path
from msa_lite.io.files.writing import digest
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.settings import JudgeSettings


def open_judge(settings: JudgeSettings, cache_folder: Path | None = None) -> Judge | None:
    """Make the judge of the settings; return None for kind "none".

    Do all checks that need no network and load no model. cache_folder: where to keep replies; None for
    $MSA_LITE_CACHE, or ~/.cache/msa-lite. Raise UsageError for invalid settings, a missing key or a missing `openai`
    package, OutputError when the cache cannot be written, and as `check_source` for a local model in a folder.
    """
    check_judge(settings)
    if settings.kind == "none":
        return None
    if settings.kind == "local":
        from msa_lite.evals.engine.models import check_source

        if local_path(settings.model_name).is_dir():
            check_source(fetch(settings.model_name, by_content=False))
        return LocalJudge(settings, open_cache(cache_folder))
    require("judge")
    key = api_key()
    if not key:
        raise UsageError(
            "a judge of kind 'openai' needs a key in the environment: set OPENAI_API_KEY (to any word for a server of "
            "your own that needs none)"
        )
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise UsageError("OPENAI_API_KEY: no key has a line break, a letter beyond ASCII, or a space at its ends")
    if len(key) >= 8 and key in (settings.address or ""):
        raise UsageError("judge.base_url: it is written to manifests; put no key in it")
    from msa_lite.evals.judge.openai_judge import OpenAIJudge

    return OpenAIJudge(settings, open_cache(cache_folder))


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
            self.cache.keep({keys[i]: asks[i].read(texts[0]) or "" for i, texts in batch})
            usage.calls += len(batch)
            progress("judge", usage.calls, len(keys))
        runner.close()


def encode_ask(tokenizer: Any, ask: Ask) -> list[int]:
    """Return the token ids of an ask: by the chat template, or as plain text if the tokenizer has none.

    A template without a system role gets system and user text as one message.
    """
    whole = f"{ask.system}\n\n{ask.user}"
    if not tokenizer.chat_template:
        return list(tokenizer(whole)["input_ids"])
    try:
        return _chat(tokenizer, [{"role": "system", "content": ask.system}, {"role": "user", "content": ask.user}])
    except Exception:  # templates without a system role raise an error of their own (Gemma)
        return _chat(tokenizer, [{"role": "user", "content": whole}])


def _chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = render_chat(tokenizer, messages, add_generation_prompt=True, date_string=DATE_STRING)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
