"""Run a judge on this machine: a Hugging Face model that answers the same prompts greedily, in its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msa_lite.data import DATE_STRING, open_tokenizer, render_chat
from msa_lite.evals.judge.cache import Cache, Spent, answer
from msa_lite.evals.judge.prompts import Ask
from msa_lite.evals.judge.settings import JudgeSettings, Ruling, Usage
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import digest
from msa_lite.io.weights.hub import Source, fetch


class LocalJudge:
    """Ask a local model in batches; load it when the first reply is missing from the cache.

    Nothing is asked again after an invalid reply, since greedy answers stay the same.
    """

    def __init__(self, settings: JudgeSettings, cache: Cache) -> None:
        self.settings = settings
        self.cache = cache

    def ask(self, asks: Sequence[Ask], progress: Progress = silent) -> tuple[list[Ruling], Usage]:
        """Return (verdicts in the order of the asks, usage). Raise UsageError when there is no such model."""
        source = fetch(self.settings.model_name, by_content=False)
        keys = [digest(["local", source.revision, ask.system, ask.user, ask.tokens]) for ask in asks]
        return answer(self.cache, keys, asks, progress, lambda todo, part: self._send(source, todo, part))

    def _send(self, source: Source, todo: Mapping[str, Ask], progress: Progress) -> Spent:
        from msa_lite.evals.generate import Decoding, generate
        from msa_lite.evals.models import Runner, load_model

        tokenizer = open_tokenizer(source.folder, source.name)
        keys, asks = list(todo), list(todo.values())
        prompts = [encode_ask(tokenizer, ask) for ask in asks]
        done = 0
        runner = Runner(load_model(source.folder))
        for batch in generate(runner, tokenizer, prompts, Decoding(max(ask.tokens for ask in asks))):
            self.cache.keep({keys[i]: asks[i].read(texts[0]) or "" for i, texts in batch})
            done += len(batch)
            progress("judge", done, len(keys))
        runner.close()
        return Spent(calls=done)


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
