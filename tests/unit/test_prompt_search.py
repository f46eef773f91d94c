"""`prompt: auto`: the form that a model was tuned with is found, and what is doubtful about a choice is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import SYSTEM_PROMPT, Prompter, Row, Template, encode_qa, to_batch
from msa_lite.evals.engine.prompt_search import (
    PROMPT_ROWS,
    RankedPrompt,
    better_prompt,
    choose_prompt,
    prompt_forms,
    rank_prompts,
)
from msa_lite.io.weights.hub import fetch
from tests.support.models import GEMMA, SMOL, chat_tokenizer, tiny_model, tiny_tokenizer

ROWS = [Row(i, f"Where is {name}?", f"In {place}.") for i, (name, place) in enumerate([("A", "Rome"), ("B", "Oslo")])]


def tuned(folder: Path, prompter: Prompter, others: Sequence[Prompter]) -> Path:
    """A small model that has learnt the rows in a prompt, and to answer otherwise in the others."""
    import torch

    model = tiny_model("llama", max_position_embeddings=512).train()
    wrong = [replace(row, answer="No.") for row in ROWS]
    rows = [*encode_qa(ROWS, prompter), *(example for other in others for example in encode_qa(wrong, other))]
    batch = to_batch(rows, 2)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(400):
        loss = model(**batch).loss
        if loss < 0.02:
            break
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert loss < 0.1
    model.save_pretrained(folder)
    prompter.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "form",
    [f"chat template, system message {SYSTEM_PROMPT!r}", "plain, the answer on the next line"],
)
def test_the_form_that_a_model_was_tuned_with_is_found(tmp_path: Path, form: str) -> None:
    base = Prompter.build(chat_tokenizer(SMOL), "default", Template())
    forms = prompt_forms(base)
    source = fetch(str(tuned(tmp_path, forms[form], [other for name, other in forms.items() if name != form])))
    ranked = rank_prompts(source, base.tokenizer, ROWS, base)
    assert {item.name for item in ranked} == set(forms)
    choice = choose_prompt(ranked, list(forms))
    assert choice.chosen.name == form
    assert choice.chosen.probability > 0.8
    assert choice.chosen.prompter == forms[form]
    assert choice.why.startswith(f"{form}: answers have a mean probability of 0.")
    assert ranked[1].name in choice.why
    assert better_prompt(source, ROWS, forms[form]) is None
    other = forms["plain, nothing around question and answer"]
    advice = better_prompt(source, ROWS, other)
    assert advice is not None
    assert advice.startswith(f"it knows them as {form} (mean probability 0.")
    assert advice.endswith(f"set `prompt: {json.dumps(forms[form].settings())}`")


def test_forms_are_those_that_the_tokenizer_has() -> None:
    def names(tokenizer: Any, system: str | None = None, template: Template = Template()) -> list[str]:  # noqa: B008
        return [*prompt_forms(Prompter.build(tokenizer, "default", template, system))]

    plain = names(tiny_tokenizer())
    assert all(name.startswith("plain") for name in plain)
    assert names(chat_tokenizer(GEMMA)) == ["chat template, no system message", *plain]
    helpful = f"chat template, system message {SYSTEM_PROMPT!r}"
    assert names(chat_tokenizer(SMOL)) == ["chat template, no system message", helpful, *plain]
    assert names(chat_tokenizer(SMOL), "Be brief.")[1:3] == ["chat template, system message 'Be brief.'", helpful]
    own = Template("Q: {question}", " A: {answer}")
    assert names(tiny_tokenizer(), template=own) == ["the recipe's plain template", *plain]


def ranking(**probabilities: list[float]) -> list[RankedPrompt]:
    prompter = Prompter.build(tiny_tokenizer(), "plain", Template())
    found = [RankedPrompt(name, prompter, tuple(values)) for name, values in probabilities.items()]
    return sorted(found, key=lambda item: -item.probability)


def test_a_tie_is_said_and_the_simpler_form_taken_of_equals() -> None:
    choice = choose_prompt(ranking(a=[0.9, 0.8, 0.7], b=[0.9, 0.81, 0.7], c=[0.1, 0.2, 0.1]), ["a", "b", "c"])
    assert choice.chosen.name == "a"
    [doubt] = choice.doubts
    assert doubt.startswith("prompt: auto cannot tell forms apart: ")
    assert "b (0.803)" in doubt
    assert "c (" not in doubt
    # Within the noise of the rows, but not equal: the best is taken.
    noisy = choose_prompt(ranking(a=[0.5, 0.9, 0.6], b=[0.9, 0.6, 0.8]), ["a", "b"])
    assert noisy.chosen.name == "b"
    assert "a (0.667) does as well" in noisy.doubts[0]


def test_a_bad_best_is_said() -> None:
    choice = choose_prompt(ranking(a=[0.2, 0.21, 0.2], b=[0.01, 0.02, 0.01]), ["a", "b"])
    assert choice.chosen.name == "a"
    [doubt] = choice.doubts
    assert "no form in which the model knows the rows: the best one is a, with a mean probability of 0.203" in doubt


def test_no_more_rows_are_asked_than_it_takes(tmp_path: Path, make_checkpoint: Any) -> None:
    base = Prompter.build(tiny_tokenizer(), "plain", Template())
    rows = [Row(i, f"Where is {i}?", "Here.") for i in range(PROMPT_ROWS + 10)]
    source = fetch(str(make_checkpoint("llama")))
    assert better_prompt(source, rows, base) is None  # it knows them in no form
    ranked = rank_prompts(source, base.tokenizer, rows, base)
    assert {len(item.probabilities) for item in ranked} == {PROMPT_ROWS}
    again = rank_prompts(source, base.tokenizer, rows, base)
    assert [item.probabilities for item in again] == [item.probabilities for item in ranked]
    other = rank_prompts(source, base.tokenizer, rows, base, seed=1)
    assert {item.name: item.probabilities for item in other} != {item.name: item.probabilities for item in ranked}
