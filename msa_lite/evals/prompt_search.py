"""Which prompt does a model know its rows in? A few plausible forms, ranked by the probability of the rows' answers.

A model that was tuned with one prompt may look as if it did not know its rows when it is asked with another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from msa_lite.data import SYSTEM_PROMPT, Example, Prompter, Row, Template, sample_rows
from msa_lite.evals import scoring
from msa_lite.evals.forward import score_bundles
from msa_lite.evals.models import Runner, load_model
from msa_lite.io.hub import Source

PROMPT_ROWS = 16
BAD = 0.5  # a mean probability below which the best form is doubted: what was learnt as an answer has more
_ALIKE = 0.01  # forms whose mean probabilities differ by no more are as good as each other
_LONGEST = 2048  # tokens of a row that are looked at

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
    """Of each row's answer: the geometric mean of its tokens' probabilities."""

    @property
    def probability(self) -> float:
        """The mean over the rows."""
        return fmean(self.probabilities)


def prompt_forms(base: Prompter) -> dict[str, Prompter]:
    """Return the forms to try by name: chat template with and without a system message, and plain ones.

    base: the prompt that would be taken otherwise. Its system message and plain template are among them. Simple forms
    come first.
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
    """Return the forms, the one under which the model gives the rows the highest probability first.

    rows: questions; of more than `PROMPT_ROWS`, a seeded sample is asked. base: see `prompt_forms`. Of equals, the
    simpler one comes first. The model is loaded for it, and let go.
    """
    from accelerate.utils.memory import clear_device_cache

    few = sample_rows(rows, PROMPT_ROWS, seed)
    forms = prompt_forms(replace(base, tokenizer=tokenizer))
    texts = {name: _examples(few, prompter) for name, prompter in forms.items()}
    runner: Runner | None = Runner(load_model(source.folder))
    source.check_unchanged()
    assert runner is not None
    ranked = [RankedPrompt(name, forms[name], tuple(_score(runner, examples))) for name, examples in texts.items()]
    runner = None
    clear_device_cache(garbage_collection=True)
    return sorted(ranked, key=lambda item: -item.probability)


def _examples(rows: Sequence[Row], prompter: Prompter) -> list[Example]:
    """The rows in one form; a system message that a template does not take is left out, and the form does worse."""
    found = []
    for row in rows:
        system = row.system if prompter.takes_system else ""
        whole = prompter.example(row.index, row.question, row.answer, row.earlier, system)
        found.append(Example(row.index, whole.ids[:_LONGEST], whole.labels[:_LONGEST]))
    return found


def _score(runner: Runner, examples: Sequence[Example]) -> list[float]:
    """Probabilities of the examples' answers; 0 where there is nothing to score."""
    window = (runner.window or _LONGEST) + 1  # the last token is only predicted
    cut = [Example(e.index, e.ids[:window], e.labels[:window]) for e in examples]
    found: dict[int, float] = {}
    for batch in score_bundles(runner, [(example,) for example in cut]):
        found |= {at: scoring.probability(scores[0].log_probs) or 0.0 for at, scores in batch}
    return [found[at] for at in range(len(cut))]


@dataclass(frozen=True)
class PromptChoice:
    """The form that `prompt: auto` takes, with what is to be said of it."""

    chosen: RankedPrompt
    why: str
    doubts: tuple[str, ...]


def choose_prompt(ranked: Sequence[RankedPrompt], order: Sequence[str]) -> PromptChoice:
    """Take the best form; of those that are as good, the first in `order`.

    Doubted is a form that another one equals within the noise of the rows, and one in which the model knows them badly.
    """
    best = ranked[0]
    alike = [item for item in ranked if best.probability - item.probability <= _ALIKE]
    chosen = min(alike, key=lambda item: order.index(item.name))
    others = [item for item in ranked if item is not chosen]
    rows = len(best.probabilities)
    said = f"{chosen.name}: answers have a mean probability of {chosen.probability:.3f} in it, over {rows} rows"
    if others:
        said += f"; in the next best form ({others[0].name}) {others[0].probability:.3f}"
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
    return PromptChoice(chosen, said, tuple(doubts))


def _ties(best: RankedPrompt, other: RankedPrompt) -> bool:
    """Check whether two forms differ by no more than twice the standard error over the rows."""
    gaps = [a - b for a, b in zip(best.probabilities, other.probabilities, strict=True)]
    return fmean(gaps) <= max(_ALIKE, 2 * (scoring.standard_error(gaps) or 0.0))


def better_prompt(source: Source, rows: Sequence[Row], used: Prompter, seed: int = 0) -> str | None:
    """Return what to put into a recipe where the model knows the rows in another form than the one used, in words.

    None where it knows them in no form, or in the used one as well as in the best.
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
