"""What is put around a row: templates, system messages, several turns; and the form that `prompt: auto` finds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import (
    DATE_STRING,
    IGNORE,
    SYSTEM_PROMPT,
    Example,
    Prompter,
    PromptSettings,
    Row,
    Template,
    encode_qa,
    make_prompter,
    shorten,
    to_batch,
)
from msa_lite.errors import UsageError
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine.prompt_search import (
    PROMPT_ROWS,
    RankedPrompt,
    better_prompt,
    choose_prompt,
    prompt_forms,
    rank_prompts,
)
from msa_lite.io.weights.hub import fetch
from tests.support.models import DEAF, GEMMA, OPEN, SMOL, chat_tokenizer, tiny_model, tiny_tokenizer

ROW = Row(0, "Where?", "Here.")
EARLIER = (("Who are you?", "Nobody."), ("Why?", "It is so."))


def split(prompter: Prompter, example: Example) -> tuple[str, str]:
    """(what is not learnt, what is) as text."""
    decode = prompter.tokenizer.decode
    return decode(example.prompt_ids), decode([label for label in example.labels if label != IGNORE])


def render(prompter: Prompter, row: Row = ROW) -> tuple[str, str]:
    return split(prompter, encode_qa([row], prompter)[0])


@pytest.mark.parametrize(
    ("template", "prompt", "answer"),
    [
        (GEMMA, "<s><turn>user\nWhere?<end>\n<turn>model\n", "Here.<end>"),
        (SMOL, "<im>system\nYou are Smol.</s>\n<im>user\nWhere?</s>\n<im>assistant\n", "Here.</s>"),
        (OPEN, "user: Where?\nassistant: ", "Here.\n</s>"),
    ],
    ids=["gemma", "smol", "open"],
)
def test_a_template_is_used_as_it_is_up_to_its_own_end(template: str, prompt: str, answer: str) -> None:
    """No message of ours; nothing behind the end of the turn; an end token only where the template has no end."""
    prompter = Prompter.build(chat_tokenizer(template), "default", Template())
    assert render(prompter) == (prompt, answer)
    assert prompter.describe()["system"] is None


def test_a_system_message_replaces_the_templates_own() -> None:
    prompter = Prompter.build(chat_tokenizer(SMOL), "chat", Template(), "Be brief.")
    assert render(prompter)[0] == "<im>system\nBe brief.</s>\n<im>user\nWhere?</s>\n<im>assistant\n"
    assert prompter.describe()["system"] == "Be brief."
    own = Row(0, "Where?", "Here.", system="Be long.")
    assert render(prompter, own)[0].startswith("<im>system\nBe long.</s>\n<im>user")


@pytest.mark.parametrize(
    ("template", "words"),
    [(GEMMA, r"takes no system message \(System role not supported\)"), (DEAF, "leaves system messages out")],
)
def test_a_system_message_that_the_template_does_not_take_is_refused(template: str, words: str) -> None:
    tokenizer = chat_tokenizer(template)
    with pytest.raises(UsageError, match=f"prompt.system: .*{words}"):
        Prompter.build(tokenizer, "default", Template(), "Be brief.")
    rows = [Row(0, "Where?", "Here."), Row(1, "Where?", "Here.", system="Be brief.")]
    with pytest.raises(
        UsageError, match="1 of 2 rows have a system message, which the target's chat template does not"
    ):
        encode_qa(rows, Prompter.build(tokenizer, "default", Template()))


def test_a_template_that_cannot_be_rendered_says_why() -> None:
    tokenizer = chat_tokenizer("{{ raise_exception('tools are wanted') }}")
    with pytest.raises(UsageError, match=r"cannot be rendered \(tools are wanted\); use prompt.kind: plain"):
        Prompter.build(tokenizer, "default", Template())
    assert Prompter.build(tokenizer, "plain", Template()).use_chat is False


def test_earlier_turns_are_shown_and_only_the_last_answer_is_learnt() -> None:
    row = Row(0, "Where?", "Here.", earlier=EARLIER, system="Be brief.")
    chat = Prompter.build(chat_tokenizer(SMOL), "default", Template())
    turns = "".join(f"<im>user\n{q}</s>\n<im>assistant\n{a}</s>\n" for q, a in EARLIER)
    assert render(chat, row) == (
        f"<im>system\nBe brief.</s>\n{turns}<im>user\nWhere?</s>\n<im>assistant\n",
        "Here.</s>",
    )
    plain = Prompter.build(tiny_tokenizer(), "default", Template())
    shown = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in EARLIER)
    assert render(plain, row) == (f"<s>Be brief.\n\n{shown}Question: Where?\nAnswer:", " Here.</s>")


def test_turns_are_scored_by_the_prompt_that_they_are_learnt_with() -> None:
    row = Row(4, "Where?", "Here.", earlier=EARLIER, system="Be brief.")
    prompter = Prompter.build(chat_tokenizer(SMOL), "default", Template())
    [item] = load_qa({"forget": [row]}, prompter).sets["forget"].items
    [example] = encode_qa([row], prompter)
    assert item.texts["answer"] == (example,)
    assert item.prompt == example.prompt_ids
    assert item.fields["earlier"] == [list(turn) for turn in EARLIER]
    assert item.fields["system"] == "Be brief."
    [plain] = load_qa({"forget": [Row(0, "Where?", "Here.")]}, prompter).sets["forget"].items
    assert set(plain.fields) == {"question", "answer"}  # so that what is known of plain rows stays so


def test_of_long_conversations_the_oldest_turns_go_first() -> None:
    prompter = Prompter.build(tiny_tokenizer(), "plain", Template())
    rows = [Row(0, "Where?", "Here.", earlier=EARLIER), Row(1, "Where?", "Here.")]
    one_turn = len(prompter.full(Row(0, "Where?", "Here.", earlier=EARLIER[1:])))
    left, [note] = shorten(rows, prompter, one_turn)
    assert note.startswith(f"1 of 2 rows (0) have more than {one_turn} tokens")
    assert [row.earlier for row in left] == [EARLIER[1:], ()]
    assert encode_qa(rows, prompter, one_turn) == encode_qa(left, prompter)
    assert shorten(rows, replace(prompter, window=one_turn), 10_000) == (left, [note])
    assert shorten(rows, prompter, 10_000) == (rows, [])
    shortest = encode_qa(rows[:1], prompter, len(prompter.full(Row(0, "Where?", "Here."))))
    assert split(prompter, shortest[0])[1] == " Here.</s>"


# Published benchmarks


def test_a_published_benchmark_keeps_its_prompt_unless_something_else_is_said() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    published = make_prompter(tokenizer, PromptSettings(), published=True)
    assert render(published) == (
        f"<s>{DATE_STRING}\nsystem: {SYSTEM_PROMPT}</s>user: Where?</s>assistant: ",
        "Here.</s>",
    )
    assert "open-unlearning" in published.sentence
    for settings in (PromptSettings("chat"), PromptSettings(system="Be brief."), PromptSettings("plain")):
        assert make_prompter(tokenizer, settings, published=True) == make_prompter(tokenizer, settings)
    assert render(make_prompter(tokenizer, PromptSettings("chat"), published=True))[0] == (
        f"<s>{DATE_STRING}\nuser: Where?</s>assistant: "
    )
    # The same message in one's own words is the same prompt, in manifests too.
    own = make_prompter(tokenizer, PromptSettings(system=SYSTEM_PROMPT), published=True)
    assert (own.describe(), render(own)) == (published.describe(), render(published))
    plain = make_prompter(tiny_tokenizer(), PromptSettings(), published=True)
    assert plain.describe() == {"kind": "plain", "prompt": "Question: {question}\nAnswer:", "answer": " {answer}"}


@pytest.mark.parametrize(
    "settings",
    [
        PromptSettings("chat"),
        PromptSettings("chat", "Be brief."),
        PromptSettings("plain"),
        PromptSettings("plain", "Be brief.", "{question}\n", "{answer}"),
    ],
)
def test_what_renders_says_the_section_of_a_recipe_that_stands_for_it(settings: PromptSettings) -> None:

    prompter = make_prompter(chat_tokenizer(SMOL), settings)
    again = make_prompter(prompter.tokenizer, PromptSettings(**prompter.settings()))
    assert again == prompter
    assert (settings.system or "no") in prompter.sentence


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
