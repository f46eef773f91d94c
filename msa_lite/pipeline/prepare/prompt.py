"""The prompt of a run: as the recipe says, or as found by `prompt: auto`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.catalogue import OWN
from msa_lite.data import (
    IGNORE,
    Example,
    Prompter,
    PromptSettings,
    Row,
    decode_part,
    encode_qa,
    encode_text,
    load_rows,
    make_prompter,
    open_tokenizer,
    rows_identity,
    sample_rows,
)
from msa_lite.errors import MsaError, UsageError
from msa_lite.evals.engine.models import model_identity
from msa_lite.evals.engine.prompt_search import PROMPT_ROWS, choose_prompt, prompt_forms, rank_prompts
from msa_lite.evals.scores.suite import OwnQuestions, PublishedBenchmark
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import notices
from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import canonical_json, digest
from msa_lite.io.weights.hub import Source
from msa_lite.pipeline.prepare.models import find_tokenizer
from msa_lite.recipe import SETS, Recipe

logger = logging.getLogger(__name__)


PROMPT_FILE = "prompt.json"  # in the run's folder: the outcome of `prompt: auto`


def find_prompter(recipe: Recipe, tokenizer: Any) -> Prompter:
    """Return the prompter of a recipe. For `prompt: auto`, return the default, used where no search takes place."""
    settings = recipe.prompt
    if settings.kind == "auto":
        default = Prompter.build(tokenizer, "default", settings.template, thinking=settings.thinking)
        return replace(default, system=settings.system) if default.takes_system else default
    published = recipe.evaluate is not None and recipe.evaluate.benchmark != OWN
    return make_prompter(tokenizer, settings, published)


def resolve_prompt(
    recipe: Recipe, target: Source, tokenizer: Any, rows: Mapping[str, Sequence[Row]], folders: Sequence[Path]
) -> tuple[Recipe, Prompter, dict[str, Any] | None]:
    """Return the recipe with the prompt that `prompt: auto` finds, its prompter, and the outcome of the search.

    rows: by data set; a few questions about the forget set decide. folders: places that may hold the outcome of the
    same search (`PROMPT_FILE`). Log doubts of the choice. Return another kind of prompt as it is.
    """
    prompter = find_prompter(recipe, tokenizer)
    if recipe.prompt.kind != "auto":
        return recipe, prompter, None
    candidates = [rows.get(name, ()) for name in ("forget", "evaluate.forget")]
    questions = next((rows for rows in candidates if rows and not rows[0].text), None)
    if questions is None:
        logger.warning(
            "prompt: auto: there are no questions about the forget set to try prompts on, so the default one is used"
        )
        default = replace(recipe.prompt, kind="default")
        return recipe.model_copy(update={"prompt": default}), prompter, None
    few = sample_rows(questions, PROMPT_ROWS, recipe.seed)
    forms = prompt_forms(prompter)
    inputs = {
        "target": model_identity(target),
        "rows": rows_identity(few),
        "forms": {name: digest(form.describe()) for name, form in forms.items()},
    }
    outcome = _earlier_search(folders, inputs)
    if outcome is None:
        ranked = rank_prompts(target, tokenizer, few, prompter, recipe.seed)
        choice = choose_prompt(ranked, list(forms))
        outcome = {
            "inputs": inputs,
            "ranking": {item.name: item.probability for item in ranked},
            "chosen": choice.chosen.name,
            "prompt": choice.chosen.prompter.settings(),
            "why": choice.why,
            "doubts": list(choice.doubts),
        }
    notices.info("prompt: auto takes %s", outcome["why"])
    for doubt in outcome["doubts"]:
        logger.warning("%s", doubt)
    prompter = replace(forms[outcome["chosen"]], tokenizer=tokenizer)
    return recipe.model_copy(update={"prompt": PromptSettings(**prompter.settings())}), prompter, outcome


def _earlier_search(folders: Sequence[Path], inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the outcome of an earlier search from the same inputs; None where there is none."""
    for folder in folders:
        try:
            outcome = read_object(folder / PROMPT_FILE)
        except MsaError:  # none, or a damaged one
            continue
        if outcome.get("inputs") == json.loads(canonical_json(inputs)):
            return outcome
    return None


_FIRST = 100  # rows among which the one with the most turns is shown


@dataclass(frozen=True)
class ShownPrompt:
    """One row as the model reads it."""

    json_keys: ClassVar = {"form": "form", "row": "row", "tokens": "tokens", "learnt": "learnt", "parts": "pieces"}

    form: str
    """The prompt in words."""
    row: int
    """The number of the row in the forget set."""
    pieces: list[dict[str, Any]]
    """The text in pieces with special tokens, each with whether it is learnt: {"text": …, "learnt": …}."""
    tokens: int
    """The tokens of the row."""
    learnt: int
    """The tokens that are learnt."""

    def marked(self) -> str:
        """Return the text with learnt pieces between ⟦ and ⟧."""
        return "".join(f"⟦{piece['text']}⟧" if piece["learnt"] else piece["text"] for piece in self.pieces)


def show_prompt(recipe: Recipe) -> list[ShownPrompt]:
    """Render one row of the forget set as the vectors learn it, with the target's tokenizer. No model is loaded.

    The row is the one with the most turns among the first 100. `prompt: auto` gives it in each of the forms that it
    tries. Raise UsageError if the target or its tokenizer is missing, and whatever is wrong with the data.
    """
    if recipe.demo is not None and not Path(recipe.target).expanduser().is_dir():
        raise UsageError("--show-prompt: the recipe's demo makes target and data first; run it, then ask again")
    require("train")
    place = find_tokenizer(recipe)
    tokenizer = open_tokenizer(place.folder, place.name)
    row = max(load_rows(recipe.forget.data.source(recipe.columns))[:_FIRST], key=lambda row: len(row.earlier))
    length, prompter = recipe.vector.max_length, find_prompter(recipe, tokenizer)
    if row.text:
        chunk = encode_text([row], prompter, length)[0]
        return [_shown("none: every token of a text is learnt", row, chunk, tokenizer)]
    if recipe.prompt.kind != "auto":
        return [_shown(prompter.sentence, row, encode_qa([row], prompter, length)[0], tokenizer)]
    return [
        _shown(f"auto tries: {name}", row, encode_qa([row], form, length)[0], tokenizer)
        for name, form in prompt_forms(prompter).items()
    ]


def _shown(form: str, row: Row, example: Example, tokenizer: Any) -> ShownPrompt:
    pieces, end = list[dict[str, Any]](), 0
    for learnt, labels in groupby(example.labels, key=lambda label: label != IGNORE):
        start, end = end, end + len(list(labels))
        pieces.append({"text": decode_part(tokenizer, example.ids, start, end), "learnt": learnt})
    learnt_tokens = sum(label != IGNORE for label in example.labels)
    return ShownPrompt(form, row.index, pieces, len(example.ids), learnt_tokens)


def evaluation_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return arguments of `evaluate` that ask a model the questions that the recipe's run asks, of all rows.

    These are questions, limit, seed, prompt and judge. For `prompt: auto`, it is the prompt that the run
    found, if it has searched already.
    """
    evaluate = recipe.evaluate
    arguments = {"seed": recipe.seed, "prompt": _settings(recipe), "limit": evaluate.limit if evaluate else None}
    if evaluate:
        arguments["judge"] = evaluate.judge
    if evaluate is None or evaluate.benchmark == OWN:
        sets = {name: recipe.data_sets.get(f"evaluate.{name}") or recipe.data_sets.get(name) for name in SETS}
        sources: dict[str, Any] = {name: data.source(recipe.columns) for name, data in sets.items() if data}
        return arguments | {"questions": OwnQuestions(**sources, max_new_tokens=recipe.max_new_tokens)}
    questions = PublishedBenchmark(evaluate.benchmark, evaluate.split, evaluate.data, evaluate.compat)
    return arguments | {"questions": questions}


def _settings(recipe: Recipe) -> PromptSettings:
    settings = recipe.prompt
    if settings.kind != "auto":
        return settings
    try:
        search = read_object(recipe.folder / PROMPT_FILE)
        return PromptSettings(**search["prompt"])
    except (MsaError, ValueError, KeyError, TypeError):
        return settings
