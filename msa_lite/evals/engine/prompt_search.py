"""Search for the prompt that a model was tuned with: rank a few plausible forms by the answers' probability.

A model that was tuned with one prompt may seem ignorant of its rows under another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from msa_lite.data import NO_TOOLS, SYSTEM_PROMPT, Example, Prompter, Row, Template, sample_rows
from msa_lite.evals.engine import scoring
from msa_lite.evals.engine.forward import mean_losses
from msa_lite.evals.engine.models import Runner, open_runner
from msa_lite.io.weights.hub import Source

PROMPT_ROWS = 16
BAD = 0.5  # a mean probability below which the best form is doubted: learnt answers have a higher one
_ALIKE = 0.01  # forms whose mean probabilities differ by no more are equally good
_LONGEST = 2048  # tokens of a row that are scored

_PLAIN: Mapping[str, Template] = {
    "plain": Template(),
    "plain, the answer on the next line": Template("{question}\n", "{answer}"),
    "plain, nothing around question and answer": Template("{question}", "{answer}"),
    "plain, Alpaca's": Template(
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{question}\n\n### Response:\n",
        "{answer}",
    ),
}


@dataclass(frozen=True)
class RankedPrompt:
    """A form and how well the model knows the rows in it."""

    name: str
    """The form in words."""
    prompter: Prompter
    """The prompter of the form; `prompter.settings()` is the recipe's `prompt` that stands for it."""
    probabilities: tuple[float, ...]
    """For each row, the geometric mean of the probabilities of its answer's tokens."""

    @property
    def probability(self) -> float:
        """Return the mean over the rows."""
        return fmean(self.probabilities)


def prompt_forms(base: Prompter) -> dict[str, Prompter]:
    """Return the forms to try, by name: chat template with and without a system message, and plain ones.

    base: the prompt to fall back on; the forms include its system message and its plain template. Simple forms come
    first.
    """
    common: dict[str, Any] = {"published": False, "system": None}
    forms: dict[str, Prompter] = {}
    if base.tokenizer.chat_template:
        chat = replace(base, use_chat=True, **common)
        forms["chat template, no system message"] = chat
        for message in dict.fromkeys([base.system, SYSTEM_PROMPT]):
            if message is not None and chat.takes_system:
                forms[f"chat template, system message {message!r}"] = replace(chat, system=message)
    templates = dict(_PLAIN)
    if base.template not in templates.values():
        templates = {"the recipe's plain template": base.template, **templates}
    return forms | {
        name: replace(base, use_chat=False, template=template, **common) for name, template in templates.items()
    }


def rank_prompts(
    source: Source, tokenizer: Any, rows: Sequence[Row], base: Prompter, seed: int = 0
) -> list[RankedPrompt]:
    """Return the forms by the mean probability of the rows' answers, the highest first; of equals, the simpler first.

    rows: questions; of more than `PROMPT_ROWS`, a seeded sample is scored. base: see `prompt_forms`. The model is
    loaded for this, and freed again.
    """
    few = sample_rows(rows, PROMPT_ROWS, seed)
    forms = prompt_forms(replace(base, tokenizer=tokenizer))
    texts = {name: _examples(few, prompter) for name, prompter in forms.items()}
    with open_runner(source) as runner:
        ranked = [RankedPrompt(name, forms[name], tuple(_score(runner, examples))) for name, examples in texts.items()]
    return sorted(ranked, key=lambda item: -item.probability)


def _examples(rows: Sequence[Row], prompter: Prompter) -> list[Example]:
    """Return the rows in one form, without system message and tools that it does not take (it then does worse)."""
    examples = []
    for row in rows:
        taken = row if prompter.takes_system else replace(row, system="")
        if row.calls_tools and prompter.call_style is None:
            taken = replace(taken, earlier=tuple(turn[:2] for turn in row.earlier), tools=NO_TOOLS)
        whole = replace(prompter, window=_LONGEST).example(taken)
        examples.append(Example(row.index, whole.ids[:_LONGEST], whole.labels[:_LONGEST]))
    return examples


def _score(runner: Runner, examples: Sequence[Example]) -> list[float]:
    """Return the probabilities of the examples' answers; 0 if there is nothing to score."""
    window = (runner.window or _LONGEST) + 1  # the last token is only predicted
    cut = [Example(e.index, e.ids[:window], e.labels[:window]) for e in examples]
    losses = dict(mean_losses(runner, cut))
    return [math.exp(-losses[at]) if at in losses else 0.0 for at in range(len(cut))]


@dataclass(frozen=True)
class PromptChoice:
    """The form that `prompt: auto` chooses."""

    chosen: RankedPrompt
    why: str
    """Its mean probability, and that of the next best form, in words."""
    doubts: tuple[str, ...]
    """Reasons to doubt it."""


def choose_prompt(ranked: Sequence[RankedPrompt], order: Sequence[str]) -> PromptChoice:
    """Choose the best form; of equally good ones, the first in `order`.

    The choice is doubtful if another form is as good within the noise of the rows, or if the model knows them badly in
    all forms.
    """
    best = ranked[0]
    alike = [item for item in ranked if best.probability - item.probability <= _ALIKE]
    chosen = min(alike, key=lambda item: order.index(item.name))
    others = [item for item in ranked if item is not chosen]
    rows = len(best.probabilities)
    why = f"{chosen.name}: answers have a mean probability of {chosen.probability:.3f} in it, over {rows} rows"
    if others:
        why += f"; in the next best form ({others[0].name}) {others[0].probability:.3f}"
    doubts = []
    if tied := [f"{item.name} ({item.probability:.3f})" for item in others if _ties(best, item)]:
        doubts.append(
            f"prompt: auto cannot tell forms apart: {', '.join(tied)} {'does' if len(tied) == 1 else 'do'} as well as "
            f"{chosen.name} ({chosen.probability:.3f}); if you know which one the model was tuned with, name it"
        )
    if chosen.probability < BAD:
        doubts.append(
            f"prompt: auto found no form in which the model knows the rows: the best one is {chosen.name}, with a mean "
            f"probability of {chosen.probability:.3f}. It was tuned with another prompt, or has not learnt them"
        )
    return PromptChoice(chosen, why, tuple(doubts))


def _ties(best: RankedPrompt, other: RankedPrompt) -> bool:
    """Check whether two forms differ by no more than twice the standard error over the rows."""
    gaps = [a - b for a, b in zip(best.probabilities, other.probabilities, strict=True)]
    return fmean(gaps) <= max(_ALIKE, 2 * (scoring.standard_error(gaps) or 0.0))


def better_prompt(source: Source, rows: Sequence[Row], used: Prompter, seed: int = 0) -> str | None:
    """Say which `prompt` to write into the recipe, if the model knows the rows better in another form than in `used`.

    None if it knows them in no form, or in the used one as well as in the best.
    """
    ranked = rank_prompts(source, used.tokenizer, rows, used, seed)
    best = ranked[0]
    own = next((item for item in ranked if item.prompter.describe() == used.describe()), None)
    if best.probability < BAD or (own is not None and _ties(best, own)):
        return None
    against = f", against {own.probability:.2f} in this one" if own else ""
    return (
        f"it knows them as {best.name} (mean probability {best.probability:.2f}{against}): set "
        f"`prompt: {json.dumps(best.prompter.settings(), ensure_ascii=False)}`"
    )
