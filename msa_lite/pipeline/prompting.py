"""Apply a recipe's prompt in other commands: show a row as the models read it, and give `evaluate` its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from msa_lite.benchmarks import OWN
from msa_lite.data import (
    IGNORE,
    Example,
    PromptSettings,
    Row,
    encode_qa,
    encode_text,
    load_rows,
    open_tokenizer,
)
from msa_lite.errors import MsaError, UsageError
from msa_lite.evals.prompt_search import prompt_forms
from msa_lite.io.adapter import base_name, is_adapter
from msa_lite.io.extras import require
from msa_lite.io.reading import read_object
from msa_lite.io.tokenizer import fetch_tokenizer, has_tokenizer
from msa_lite.pipeline.prepare_data import source_of
from msa_lite.pipeline.prepare_prompt import PROMPT_FILE, find_prompter, prompt_settings
from msa_lite.pipeline.prepare_questions import SETS
from msa_lite.recipe import Data, Prompt, Recipe

_FIRST = 100  # rows among which the one with the most turns is shown


@dataclass(frozen=True)
class ShownPrompt:
    """One row as the model reads it."""

    form: str
    """The prompt in words."""
    row: int
    """The number of the row in the forget set."""
    parts: list[tuple[str, bool]]
    """The text in pieces with special tokens, each with whether it is learnt."""
    tokens: int
    """The tokens of the row."""
    learnt: int
    """The tokens that are learnt."""

    def marked(self) -> str:
        """Return the text with learnt pieces between ⟦ and ⟧."""
        return "".join(f"⟦{text}⟧" if learnt else text for text, learnt in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able form, for `--json`."""
        parts = [{"text": text, "learnt": learnt} for text, learnt in self.parts]
        return {"form": self.form, "row": self.row, "tokens": self.tokens, "learnt": self.learnt, "parts": parts}


def show_prompt(recipe: Recipe) -> list[ShownPrompt]:
    """Render one row of the forget set as the vectors learn it, with the target's tokenizer. No model is loaded.

    The row is the one with the most turns among the first 100. `prompt: auto` gives it in each of the forms that it
    tries. Raise UsageError if the target or its tokenizer is missing, and whatever is wrong with the data.
    """
    if recipe.demo is not None and not Path(recipe.target).expanduser().is_dir():
        raise UsageError("--show-prompt: the recipe's demo makes target and data first; run it, then ask again")
    require("train")
    tokenizer = _load_tokenizer(recipe)
    row = max(load_rows(source_of(recipe.forget.data, recipe.columns))[:_FIRST], key=lambda row: len(row.earlier))
    length = recipe.vector.max_length
    if row.text:
        chunk = encode_text([row], tokenizer, length)[0]
        return [_shown("none: every token of a text is learnt", row, chunk, tokenizer)]
    prompter = find_prompter(recipe, tokenizer)
    if recipe.prompt.kind != "auto":
        return [_shown(prompter.sentence, row, encode_qa([row], prompter, length)[0], tokenizer)]
    return [
        _shown(f"auto tries: {name}", row, encode_qa([row], form, length)[0], tokenizer)
        for name, form in prompt_forms(prompter).items()
    ]


def _load_tokenizer(recipe: Recipe) -> Any:
    """Return the tokenizer that the run will use. Nothing else of the target is fetched."""
    name = recipe.tokenizer or recipe.target
    folder = Path(name).expanduser()
    if is_adapter(folder) and not has_tokenizer(folder):
        name = base_name(folder)
    return open_tokenizer(fetch_tokenizer(name).folder, name)


def _shown(form: str, row: Row, example: Example, tokenizer: Any) -> ShownPrompt:
    parts = []
    for learnt, pairs in groupby(zip(example.ids, example.labels, strict=True), key=lambda pair: pair[1] != IGNORE):
        ids = [token for token, _ in pairs]
        parts.append((str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)), learnt))
    learnt_tokens = sum(label != IGNORE for label in example.labels)
    return ShownPrompt(form, row.index, parts, len(example.ids), learnt_tokens)


def evaluation_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `evaluate` that ask a model what the recipe's run asks its models, of all rows.

    These are benchmark, data, columns, limits, seed and prompt. For `prompt: auto`, it is the prompt that the run
    found, if it has searched already.
    """
    evaluate = recipe.evaluate
    arguments: dict[str, Any] = {"seed": recipe.seed, "prompt": _settings(recipe)}
    if evaluate is None or evaluate.benchmark == OWN:
        training = {"forget": recipe.forget.data, "retain": recipe.retain.data if recipe.retain else None}
        for name in SETS:
            data: Data | None = (getattr(evaluate, name) if evaluate else None) or training.get(name)
            arguments[name] = source_of(data, recipe.columns) if data else None
        return arguments | ({"limit": evaluate.limit, "max_new_tokens": evaluate.max_new_tokens} if evaluate else {})
    names = ("benchmark", "split", "data", "compat", "limit")
    return arguments | {name: getattr(evaluate, name) for name in names}


def _settings(recipe: Recipe) -> PromptSettings:
    settings = prompt_settings(recipe.prompt)
    if settings.kind != "auto":
        return settings
    try:
        search = read_object(recipe.folder / PROMPT_FILE)
        return prompt_settings(Prompt(**search["prompt"]))
    except (MsaError, ValueError, KeyError, TypeError):
        return settings
