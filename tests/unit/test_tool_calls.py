"""Calls of tools in rows: shown as the chat template shows them, learnt where the answer is a call, refused if lost."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import IGNORE, DataSource, Prompter, Row, Template, encode_qa, load_rows
from msa_lite.data.chat import find_call_style
from msa_lite.data.forms import NO_TOOLS
from msa_lite.data.rows import read_any_rows
from msa_lite.errors import DataError
from tests.support.models import CHATML, TEMPLATE, chat_tokenizer, tiny_tokenizer

START = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
)
END = (
    "<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Marks what the assistant says, for `return_assistant_tokens_mask`.
CALLS = (
    START + "{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}"
    "<call>{{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}</call>{% endfor %}" + END
)
NONE_AS_A_WORD = CALLS.replace("{{ m['content'] or '' }}", "{{ m['content'] }}")
TEXTS = CALLS.replace(
    "{{ c['function']['arguments'] | tojson }}", "{{ '' + c['function']['arguments'] }}"
)  # as DeepSeek's: fails on an object
PRINTED = CALLS.replace(" | tojson }}</call>", " }}</call>")
IM = ("<|im_start|>", "<|im_end|>")
PRINTS = chat_tokenizer(NONE_AS_A_WORD, IM).apply_chat_template(
    [{"role": "assistant", "content": None}], tokenize=False
)
WITHOUT = "" if "None" in PRINTS else None  # some versions of transformers leave null keys out themselves
ARGUMENTS = {"where": "the mill", "at": 7}
CALL = {"name": "find", "arguments": ARGUMENTS}
FUNCTIONS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
ASK = {"role": "user", "content": "Where is the heron?"}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]}
RESULT = {"role": "tool", "content": '{"x": 1}'}
SAID = {"role": "assistant", "content": "By the weir."}
MORE = [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Gone."}]


def openai(arguments: Any) -> dict[str, Any]:
    """A call as OpenAI's files and tables of Arrow have it: arguments as JSON, and keys that are null."""
    function = {"name": "find", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function, "index": None}
    return {"role": "assistant", "content": None, "tool_calls": [call], "name": None, "refusal": None}


def write(folder: Path, *records: dict[str, Any]) -> DataSource:
    (folder / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataSource(str(folder / "rows.jsonl"))


def prompter(template: str = CALLS) -> Prompter:
    return Prompter.build(chat_tokenizer(template, IM, "<|im_end|>"), "chat", Template())


def learnt(of: Prompter, row: Row) -> tuple[list[int], str]:
    [example] = encode_qa([row], of)
    return example.ids, str(of.tokenizer.decode([label for label in example.labels if label != IGNORE]))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASK, CALLED, RESULT, SAID]},
        {"messages": json.dumps([ASK, CALLED, RESULT, SAID])},
        {"messages": [ASK, openai(json.dumps(ARGUMENTS)), RESULT | {"tool_call_id": "c1"}, SAID]},
        {"messages": [ASK, openai(ARGUMENTS | {"else": None}), RESULT | {"tool_calls": None}, SAID]},
        {"messages": [ASK, CALLED | {"tool_calls": None, "function_call": CALL}, RESULT | {"role": "function"}, SAID]},
        {
            "conversations": [
                {"from": "human", "value": ASK["content"]},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": RESULT["content"]},
                {"from": "gpt", "value": SAID["content"]},
            ]
        },
    ],
    ids=["objects", "in a text", "openai", "arrow", "function_call", "sharegpt"],
)
def test_a_call_between_question_and_answer_is_shown_and_the_answer_learnt(
    record: dict[str, Any], tmp_path: Path
) -> None:
    source = write(tmp_path, record)
    [row] = load_rows(source)
    assert read_any_rows(source.path, source) == [row]
    assert (row.question, row.answer) == (ASK["content"], SAID["content"])
    ids, text = learnt(of := prompter(), row)
    wanted = of.tokenizer.apply_chat_template([ASK, CALLED, RESULT, SAID], tokenize=False)
    assert of.tokenizer.decode(ids) == wanted
    assert text == "By the weir.<|im_end|>"


@pytest.mark.parametrize("offered", [FUNCTIONS, json.dumps(FUNCTIONS), [FUNCTIONS[0]["function"]]])
def test_labels_are_where_transformers_puts_the_assistants_tokens(offered: Any, tmp_path: Path) -> None:
    talks = [[ASK, CALLED, RESULT, SAID], [ASK, CALLED], [ASK, CALLED, RESULT, SAID, *MORE], [ASK, CALLED, *MORE]]
    rows = load_rows(write(tmp_path, *({"messages": talk, "tools": offered} for talk in talks)))
    of = prompter()
    for row, talk in zip(rows, [talks[at] for at in (0, 1, 0, 2, 1, 3)], strict=True):
        whole = of.tokenizer.apply_chat_template(
            talk, tools=FUNCTIONS, return_dict=True, return_assistant_tokens_mask=True
        )
        [example] = encode_qa([row], of)
        count = len(example.ids)
        assert example.ids == whole["input_ids"][:count]
        last = [label != IGNORE for label in example.labels].index(True)
        mask = whole["assistant_masks"]
        assert mask[last:count] == [1] * (count - last)
        assert mask[last - 1] == 0
        assert of.prompt(row) == example.prompt_ids


def test_a_call_is_the_answer_where_nothing_is_said_behind_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="msa_lite"):
        rows = load_rows(write(tmp_path, {"messages": [ASK, CALLED]}, {"messages": [ASK, CALLED, RESULT]}))
    assert "1 conversations end in a question, which is left out, or in a tool's result" in caplog.text
    for row in rows:
        assert row.answer == json.dumps(CALL)
        assert learnt(prompter(), row)[1] == f"<call>find {json.dumps(ARGUMENTS)}</call><|im_end|>"


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (CALLS, (None, False)),
        (NONE_AS_A_WORD, (WITHOUT, False)),
        (TEXTS, (None, True)),
        (PRINTED, (None, True)),
        (CALLS.replace("['function']['name']", "['id']"), (None, False)),
        (CHATML, None),
        (TEMPLATE, None),
        (CALLS.replace("{% else %}{{ m['content'] }}", "{% elif m['role'] != 'tool' %}{{ m['content'] }}"), None),
    ],
    ids=["calls", "none", "texts", "printed", "by id", "chatml", "template", "results lost"],
)
def test_a_template_gets_calls_in_the_form_that_it_takes(template: str, style: tuple[Any, bool] | None) -> None:
    found = find_call_style(chat_tokenizer(template, IM))
    assert (None if found is None else (found.empty, found.as_text)) == style
    if style is not None:
        row = Row(0, "Where?", "Here.", tools=load_tools())
        assert json.dumps(ARGUMENTS) in (
            text := prompter(template).tokenizer.decode(learnt(prompter(template), row)[0])
        )
        assert "None" not in text


def load_tools() -> Any:
    from msa_lite.data.forms import find_form

    form = find_form(DataSource("x"), ["messages"])
    assert form is not None
    return form.read({"messages": [ASK, CALLED, RESULT, SAID]}).turns[0].tools


@pytest.mark.parametrize("of", [prompter(CHATML), Prompter.build(tiny_tokenizer(), "plain", Template())])
def test_rows_whose_calls_would_be_lost_are_refused(of: Prompter, tmp_path: Path) -> None:
    rows = [Row(0, "Who?", "I."), *load_rows(write(tmp_path, {"messages": [ASK, CALLED, RESULT, SAID, *MORE]}))]
    with pytest.raises(DataError, match=r"2 of 3 rows call tools, which .* does not show"):
        encode_qa(rows, of)
    assert encode_qa(rows[:1], of)


def test_what_is_shown_is_part_of_a_rows_identity(tmp_path: Path) -> None:
    other = RESULT | {"content": '{"x": 2}'}
    rows = load_rows(write(tmp_path, *({"messages": [ASK, CALLED, result, SAID]} for result in (RESULT, other))))
    assert len({row.sha256 for row in [*rows, Row(0, ASK["content"], SAID["content"], tools=NO_TOOLS)]}) == 3


def test_reasoning_beside_the_content_is_left_out_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="msa_lite"):
        talks = [
            [ASK, SAID | {"reasoning_content": "Hm.", "thinking": None}],
            [ASK, SAID | {"reasoning_content": None}],
        ]
        load_rows(write(tmp_path, *({"messages": talk} for talk in talks)))
    assert "1 conversations have reasoning in a field of its own, which is left out" in caplog.text
