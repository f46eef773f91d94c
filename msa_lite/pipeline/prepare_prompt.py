"""Resolve the `prompt` section of a recipe with the target's tokenizer and rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msa_lite.benchmarks import OWN
from msa_lite.data import Prompter, PromptSettings, Row, Template, make_prompter, rows_identity, sample_rows
from msa_lite.errors import MsaError
from msa_lite.evals.models import model_identity
from msa_lite.evals.prompt_search import PROMPT_ROWS, choose_prompt, prompt_forms, rank_prompts
from msa_lite.io.files import canonical_json, digest
from msa_lite.io.hub import Source
from msa_lite.io.progress import notices
from msa_lite.io.reading import read_object
from msa_lite.recipe import Prompt, Recipe

logger = logging.getLogger(__name__)

PROMPT_FILE = "prompt.json"  # in the run's folder: the outcome of `prompt: auto`


def prompt_settings(prompt: Prompt) -> PromptSettings:
    """Return the settings that a recipe's `prompt` section stands for."""
    return PromptSettings(prompt.kind, prompt.system, Template(prompt.prompt, prompt.answer))


def find_prompter(recipe: Recipe, tokenizer: Any) -> Prompter:
    """Return the prompter of a recipe. For `prompt: auto`, return the one to use if nothing is searched."""
    settings = prompt_settings(recipe.prompt)
    if settings.kind == "auto":
        return Prompter.build(tokenizer, "default", settings.template, _system_if_taken(tokenizer, settings))
    published = recipe.evaluate is not None and recipe.evaluate.benchmark != OWN
    return make_prompter(tokenizer, settings, published)


def _system_if_taken(tokenizer: Any, settings: PromptSettings) -> str | None:
    takes = Prompter.build(tokenizer, "default", settings.template).takes_system
    return settings.system if takes else None


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
    sets = [rows.get(name, ()) for name in ("forget", "evaluate.forget")]
    questions = next((one for one in sets if one and not one[0].text), None)
    if questions is None:
        logger.warning(
            "prompt: auto: there are no questions about the forget set to try prompts on, so the default one is used"
        )
        default = recipe.prompt.model_copy(update={"kind": "default"})
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
    return recipe.model_copy(update={"prompt": Prompt(**prompter.settings())}), prompter, outcome


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
