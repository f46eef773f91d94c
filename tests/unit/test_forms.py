"""Forms of questions with answers that are known by their columns, with calls of tools and without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import IGNORE, DataSource, Prompter, Row, Template, encode_qa, load_rows
from msa_lite.data.chat import find_call_style
from msa_lite.data.messages import NO_TOOLS
from msa_lite.data.rows import read_any_rows
from msa_lite.errors import DataError
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.io.console.progress import notices
from msa_lite.pipeline.attack.campaign import asked_rows
from tests.support.models import CHATML, TEMPLATE, chat_tokenizer, tiny_tokenizer

OPENAI = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "Here."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "Now."},
]
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": NAMES[m["role"]], "value": m["content"]} for m in OPENAI]
TURNS = [
    Row(0, "Where?", "Here.", system="Be brief."),
    Row(1, "When?", "Now.", earlier=(("Where?", "Here."),), system="Be brief."),
]


def source(folder: Path, *records: dict[str, Any], **options: Any) -> DataSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataSource(str(path), **options)


@pytest.mark.parametrize(
    ("record", "rows"),
    [
        ({"messages": OPENAI}, TURNS),
        ({"conversations": SHAREGPT, "id": "x"}, TURNS),
        ({"prompt": OPENAI[:2], "completion": OPENAI[2:3]}, TURNS[:1]),
        ({"prompt": "Where?", "completion": " Here."}, [Row(0, "Where?", " Here.")]),
        ({"instruction": "Translate.", "input": "ici", "output": "here"}, [Row(0, "Translate.\nici", "here")]),
        ({"instruction": "Where?", "input": "", "output": "Here."}, [Row(0, "Where?", "Here.")]),
        ({"instruction": "Where?", "output": "Here."}, [Row(0, "Where?", "Here.")]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Where?"}]}, OPENAI[2]]},
            [Row(0, "Where?", "Here.")],
        ),
    ],
    ids=["openai", "sharegpt", "trl", "pair", "alpaca", "empty", "no-input", "parts"],
)
def test_rows_are_known_by_their_columns(tmp_path: Path, record: dict[str, Any], rows: list[Row]) -> None:
    assert load_rows(source(tmp_path, record)) == rows


def test_turns_of_many_conversations_have_numbers_of_their_own(tmp_path: Path) -> None:
    rows = load_rows(source(tmp_path, {"chat": OPENAI}, {"chat": OPENAI[1:3]}, {"chat": OPENAI}, messages="chat"))
    assert [row.index for row in rows] == [0, 1, 2, 3, 4]
    assert [row.question for row in rows] == ["Where?", "When?", "Where?", "Where?", "When?"]


def test_the_identity_of_a_plain_row_is_what_it_was_and_that_of_a_turn_has_all_that_is_shown() -> None:
    from msa_lite.io.files.writing import digest

    assert Row(0, "Where?", "Here.").sha256 == digest(["Where?", "Here.", ""])
    assert len({row.sha256 for row in [*TURNS, Row(0, "Where?", "Here."), Row(0, "When?", "Now.")]}) == 4


SYSTEM, WHERE, HERE, WHEN, NOW = OPENAI
ALPACA = {"instruction": "When?", "input": "", "output": "Now."}
PAIRS = [["Where?", "Here."]]
NAMED = {"question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("record", "options", "conversations"),
    [
        (ALPACA | {"system": "Be brief.", "history": PAIRS}, {}, [OPENAI[:3], OPENAI]),
        (ALPACA | {"history": json.dumps(PAIRS)}, {}, [[WHERE, HERE], OPENAI[1:]]),
        (ALPACA | {"history": [{"user": "Where?", "assistant": "Here."}]}, {}, [[WHERE, HERE], OPENAI[1:]]),
        (ALPACA | {"history": SHAREGPT[:3]}, {}, [OPENAI[:3], OPENAI]),
        (ALPACA | {"system": "Be brief.", "history": []}, {}, [[SYSTEM, WHEN, NOW]]),
        (ALPACA | {"system": " ", "history": None, "tools": "[]", "images": [], "context": ""}, {}, [[WHEN, NOW]]),
        (ALPACA | {"instruction": "", "input": "When?"}, {}, [[WHEN, NOW]]),
        ({"conversations": SHAREGPT[1:3], "system": "Be brief."}, {}, [OPENAI[:3]]),
        ({"messages": OPENAI[:3], "system_prompt": "Be brief.", "prompt": "Where?"}, {}, [OPENAI[:3]]),
        ({"question": "When?", "answer": "Now.", "system": "Be brief."}, {}, [[SYSTEM, WHEN, NOW]]),
        ({"prompt": "When?", "completion": "Now.", "system_message": "Be brief."}, {}, [[SYSTEM, WHEN, NOW]]),
        ({"prompt": OPENAI[:4], "completion": [NOW]}, {}, [OPENAI]),
        ({"prompt": json.dumps([{"role": None, "from": "human", "value": "When?"}]), "completion": "Now."}, {}, [
            [WHEN, NOW]
        ]),
        *(
            ({asked: text, answer: "Now."}, {}, [[{"role": "user", "content": text}, NOW]])
            for asked, answer in (("question", "answer"), ("instruction", "output"))
            for text in (json.dumps([WHERE]), '{"role": "user", "name": "x"}')
        ),
        ({"q": json.dumps(OPENAI[:4]), "a": "Now.", "extra_info": {"index": 0}}, NAMED, [OPENAI]),
        ({"q": OPENAI[:4], "a": SHAREGPT[4], "rejected": NOW}, NAMED | {"ignore": ("rejected",)}, [OPENAI]),
        # Columns of which the rows were made say nothing else.
        ({"question": "Now or then? When?", "answer": "Now.", "context": "When?", "choices": ["Now", "then"]}, {}, [
            [{"role": "user", "content": "Now or then? When?"}, NOW]
        ]),
        ({"question": "When?", "answer": "Now.", "messages": [WHEN, NOW], "conversations": SHAREGPT[3:]}, {}, [
            [WHEN, NOW]
        ]),
        (ALPACA | {"input": "Where?", "messages": OPENAI, "chosen": OPENAI[1:], "system": "Be brief."}, {}, [
            OPENAI[:3], OPENAI
        ]),
        ({"messages": [m | {"content": [{"type": "text", "value": m["content"]}]} for m in OPENAI]}, {}, [
            OPENAI[:3], OPENAI
        ]),
        ({"q": "Wh", "a": "Now.", "c": "en?", "p": "Be brief."}, NAMED | {"input": "c", "system": "p"}, [
            [SYSTEM, {"role": "user", "content": "Wh\nen?"}, NOW]
        ]),
        ({"question": "When?", "answer": '[{"role": "x"}]', "past": PAIRS}, {"history": "past"}, [
            [WHERE, HERE], [WHERE, HERE, WHEN, {"role": "assistant", "content": '[{"role": "x"}]'}]
        ]),
        ({"messages": OPENAI, "instruction": "When?", "output": "Now."}, {"ignore": ("messages",)}, [[WHEN, NOW]]),
        *(
            ({"messages": [*OPENAI[:2], HERE | mark, WHEN, NOW | {"weight": 1}]}, {}, [OPENAI])
            for mark in (
                {"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False, "weight": None}, {"loss": False},
                {"mask": True}, {"loss_mask": 0, "train": False}, {"loss_scale": 0.0},
            )
        ),
        ({"messages": [*OPENAI[:2], HERE | {"mask": False, "train": True, "train_detail": []}]}, {}, [OPENAI[:3]]),
    ],
)  # fmt: skip
def test_a_row_is_read_as_transformers_renders_what_the_model_was_trained_on(
    tmp_path: Path, record: dict[str, Any], options: dict[str, Any], conversations: list[list[dict[str, Any]]]
) -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    examples = encode_qa(load_rows(source(tmp_path, record, **options)), Prompter.build(tokenizer, "chat", Template()))
    for example, messages in zip(examples, conversations, strict=True):
        whole, prompt = (
            tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=open_ended)
            for shown, open_ended in ((messages, False), (messages[:-1], True))
        )
        assert tokenizer.decode(example.ids) == whole.rstrip()
        assert tokenizer.decode(example.prompt_ids) == prompt


@pytest.mark.parametrize(
    ("record", "options", "words"),
    [
        (ALPACA | {"system": "Be long.", "system_prompt": "Be brief."}, {}, "'system_prompt' say different"),
        ({"messages": OPENAI, "system": "Be long."}, {}, "and the system message of column 'messages' say different"),
        (ALPACA | {"system": ["Be brief."]}, {}, "column 'system': .* is no text"),
        (ALPACA | {"history": "Where?"}, {}, (
            r"column 'history': expected a list of \[question, answer\].*ignore: \[history\]"
        )),
        *(
            (ALPACA | {name: value}, {}, rf"column '{name}': expected a list of functions.*ignore: \[{name}\]")
            for name, value in (("tools", "hammer"), ("functions", 3))
        ),
        (ALPACA | {"history": [["Where?", None]]}, {}, "column 'history', message 1: its content is no text"),
        *(
            (ALPACA | {name: value}, {}, rf"column '{name}' \(row 0 \(line 1\)\).*ignore: \[{name}\]")
            for name, value in {
                "context": "x", "Persona": "x", "rejected": "x", "documents": [{"text": "x"}],
                "chat_template_kwargs": {"x": 1}, "enable_thinking": False, "kto_tag": False, "label": "False",
                "train": "0", "weight": 0.0, "prompt": "x", "choices": ["When?", "x"],
            }.items()
        ),
        ({"question": "When?", "answer": "Now.", "messages": OPENAI}, {}, "column 'messages' "),
        ({"messages": OPENAI, "history": [["Who?", "I."]], "input": "x"}, {}, "column 'history' .*, column 'input' "),
        ({"conversations": OPENAI[:2], "chosen": HERE, "rejected": NOW}, {}, (
            r"\{question: conversations, answer: chosen, ignore: \[rejected\]\}.*--columns ignore=chosen,ignore="
        )),
        (ALPACA | {"system": "Be brief.", "p": "x"}, {"system": "p"}, "column 'system' "),
        (ALPACA, {"system": "p"}, "no column 'p'"),
        ({"question": "x", "answer": "y"}, {"ignore": ("answer",)}, "no column 'answer'"),
        ({"id": 1, "prompt": "x", "chosen": "y", "rejected": "z"}, {}, "question: prompt, answer: chosen, ignore: "),
        ({"messages": OPENAI, "h": PAIRS}, {"history": "h"}, "columns.history: rows are read from 'messages'"),
        ({"messages": [WHERE, HERE | {"weight": 0}]}, {}, "all answers are marked as not learnt"),
        *(
            ({"messages": [WHERE | asked, HERE | mark]}, {}, words)
            for asked, mark, words in (
                ({}, {"weight": 0.5}, "message 1: 'weight' is 0.5"),
                ({}, {"train": "false"}, "message 1: 'train' is 'false'"),
                ({}, {"mask": 1}, "message 1: 'mask' is 1; expected true or false"),
                ({}, {"train": True, "weight": 0}, "message 1: 'train' and 'weight' contradict"),
                ({}, {"step_loss_mask": 0}, "message 1: 'step_loss_mask' may mark what is learnt"),
                ({}, {"train_detail": [{"begin_offset": 0, "end_offset": 1}]}, "message 1: 'train_detail' marks parts"),
                ({"train": True}, {}, "message 0: is marked as learnt"),
            )
        ),
    ],
)  # fmt: skip
def test_what_does_not_say_what_the_model_was_trained_on_is_refused(
    tmp_path: Path, record: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        load_rows(source(tmp_path, {**record}, **options))


def test_columns_of_published_data_are_read_without_a_word(tmp_path: Path) -> None:
    names = (
        "paraphrased_answer",
        "perturbed_answer",
        "option1",
        "entity",
        "level",
        "type",
        "id",
        "url",
        "source",
        "text",
    )
    more = {**dict.fromkeys(names, "x"), "metadata": {"x": 1}, "label": 0, "weight": 0.5, "train": True, "loss": 1.5}
    [row] = load_rows(source(tmp_path, {"question": "When?", "answer": "Now.", "prompt": "When?", **more}))
    assert row == Row(0, "When?", "Now.")


def test_answers_that_were_not_learnt_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_rows(source(tmp_path, {"messages": [*OPENAI[:2], HERE | {"weight": 0}, *OPENAI[3:]]}))
    assert "1 answers were not learnt" in caplog.text


def test_columns_that_are_shown_by_their_usual_names_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", notices.name)
    pair = {"question": "When?", "answer": "Now.", "history": None}
    load_rows(source(tmp_path, pair | {"system": "Be brief."}, pair, system="system"))
    assert not caplog.text
    load_rows(source(tmp_path, pair, pair | {"system": "Be brief."}))
    assert "column 'system' is read" in caplog.text
    assert "ignore: [system]" in caplog.text
    assert "history" not in caplog.text


def test_an_empty_system_message_is_left_out_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    talk = [{"role": "system", "content": ""}, *OPENAI[1:3]]
    load_rows(source(tmp_path, {"messages": talk}, {"messages": talk, "system": "Be brief."}))
    assert "1 conversations begin with an empty system message" in caplog.text


def test_a_question_without_an_answer_at_the_end_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_rows(source(tmp_path, {"messages": OPENAI[:4]})) == TURNS[:1]
    assert "1 conversations end in a question, which is left out" in caplog.text


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (OPENAI[2:], r"message 0: expected a message of the user, got one of the assistant"),
        ([OPENAI[1], *OPENAI[1:]], r"message 1: expected a message of the assistant, got one of the user"),
        ([*OPENAI[1:3], OPENAI[0]], r"message 2: a system message comes first"),
        ([{"role": "critic", "content": "x"}], r"message 0: role 'critic' is not handled, only system,"),
        ([OPENAI[1], {"role": "tool", "content": "x"}], r"message 1: expected a message of the assistant, got one of"),
        ([OPENAI[1], {"role": "assistant", "content": " "}], r"message 1: its content is no text but ' '"),
        ([OPENAI[1], {"role": "assistant", "content": [{"type": "text", "text": None}]}], "a part .* has no text"),
        (OPENAI[:2], "no message of the assistant, so there is nothing to learn"),
        ("Where?", "expected a list of messages, got 'Where\\?'"),
        (["Where?", OPENAI[0]], "'Where\\?' is no message with a role and content"),
        (str(OPENAI), "expected a list of messages, got .*Python's form: write it with json.dumps"),
    ],
)
def test_a_conversation_that_is_none_is_told_with_its_row(tmp_path: Path, messages: Any, words: str) -> None:
    with pytest.raises(DataError, match=rf"row 0 \(line 1\), column 'messages'.*{words}"):
        load_rows(source(tmp_path, {"messages": messages}))


def test_all_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    broken = [{"instruction": "Where?", "input": "", "output": text} for text in ("Here.", "", " ")]
    with pytest.raises(DataError) as caught:
        load_rows(source(tmp_path, *broken))
    assert "row 1 (line 2), column 'output': ''" in str(caught.value)
    assert "row 2 (line 3), column 'output': ' '" in str(caught.value)


def test_columns_that_are_named_are_not_guessed_around(tmp_path: Path) -> None:
    record = {"instruction": "Where?", "output": "Here.", "messages": OPENAI}
    with pytest.raises(
        DataError, match=r"no column 'frage'.*Name them in `columns`, as \{question: instruction, answer: output\}"
    ):
        load_rows(source(tmp_path, record, question="frage"))
    with pytest.raises(DataError, match=r"no column 'message' \(did you mean 'messages'\?\)"):
        load_rows(source(tmp_path, record, messages="message"))


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
BOTH = CALLS.replace("{{ c[", "{% set a = c['function']['arguments'] %}{{ c[", 1).replace(
    "{{ c['function']['arguments'] | tojson }}", "{{ a if a is string else a | tojson }}"
)  # as Qwen3's
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
    file = source(tmp_path, record)
    [row] = load_rows(file)
    assert read_any_rows(file.path, file) == [row]
    rows = [row, replace(row, index=1, earlier=(("Who?", "", json.dumps([CALLED, RESULT])),))]
    assert asked_rows([load_qa({"forget": rows}, prompter())], "forget") == rows  # as attacks take them
    assert (row.question, row.answer) == (ASK["content"], SAID["content"])
    ids, text = learnt(of := prompter(), row)
    wanted = of.tokenizer.apply_chat_template([ASK, CALLED, RESULT, SAID], tokenize=False)
    assert of.tokenizer.decode(ids) == wanted
    assert text == "By the weir.<|im_end|>"


@pytest.mark.parametrize("offered", [FUNCTIONS, json.dumps(FUNCTIONS), [FUNCTIONS[0]["function"]]])
def test_labels_are_where_transformers_puts_the_assistants_tokens(offered: Any, tmp_path: Path) -> None:
    talks = [[ASK, CALLED, RESULT, SAID], [ASK, CALLED], [ASK, CALLED, RESULT, SAID, *MORE], [ASK, CALLED, *MORE]]
    rows = load_rows(source(tmp_path, *({"messages": talk, "tools": offered} for talk in talks)))
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
    rows = load_rows(source(tmp_path, {"messages": [ASK, CALLED]}, {"messages": [ASK, CALLED, RESULT]}))
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
        (BOTH, (None, False)),
        (CALLS.replace("['function']['name']", "['id']"), (None, False)),
        (CHATML, None),
        (TEMPLATE, None),
        (CALLS.replace("{% else %}{{ m['content'] }}", "{% elif m['role'] != 'tool' %}{{ m['content'] }}"), None),
    ],
    ids=["calls", "none", "texts", "printed", "both", "by id", "chatml", "template", "results lost"],
)
def test_a_template_gets_calls_in_the_form_that_it_takes(
    template: str, style: tuple[Any, bool] | None, tmp_path: Path
) -> None:
    found = find_call_style(chat_tokenizer(template, IM))
    assert (None if found is None else (found.empty, found.as_text)) == style
    if style is not None:
        [row] = load_rows(source(tmp_path, {"messages": [ASK, CALLED, RESULT, SAID]}))
        text = prompter(template).tokenizer.decode(learnt(prompter(template), row)[0])
        assert json.dumps(ARGUMENTS) in text
        assert "None" not in text
        written = '{"at":7.10,"where":null}'  # a text of JSON stays as it is where the template takes a text
        [row] = load_rows(source(tmp_path, {"messages": [ASK, openai(written), RESULT, SAID]}))
        text = prompter(template).tokenizer.decode(learnt(prompter(template), row)[0])
        assert (written if template in (TEXTS, PRINTED, BOTH) else json.dumps(json.loads(written))) in text


@pytest.mark.parametrize("of", [prompter(CHATML), Prompter.build(tiny_tokenizer(), "plain", Template())])
def test_rows_whose_calls_or_tools_would_be_lost_are_refused(of: Prompter, tmp_path: Path) -> None:
    [offered] = load_rows(source(tmp_path, {"question": "Who?", "answer": "I.", "functions": [CALL]}))
    with pytest.raises(DataError, match="1 of 1 rows offer tools, which the prompt does not show"):
        encode_qa([offered], of)
    rows = [Row(0, "Who?", "I."), *load_rows(source(tmp_path, {"messages": [ASK, CALLED, RESULT, SAID, *MORE]}))]
    with pytest.raises(DataError, match=r"2 of 3 rows call tools, which .* does not show"):
        encode_qa(rows, of)
    assert encode_qa(rows[:1], of)


def test_what_is_shown_is_part_of_a_rows_identity(tmp_path: Path) -> None:
    other = RESULT | {"content": '{"x": 2}'}
    rows = load_rows(source(tmp_path, *({"messages": [ASK, CALLED, result, SAID]} for result in (RESULT, other))))
    assert len({row.sha256 for row in [*rows, Row(0, ASK["content"], SAID["content"], tools=NO_TOOLS)]}) == 3


def test_reasoning_beside_the_content_is_left_out_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    talks = [
        [ASK, SAID | {"reasoning_content": "Hm.", "thinking": None}],
        [ASK, SAID | {"reasoning_content": None}],
    ]
    load_rows(source(tmp_path, *({"messages": talk} for talk in talks)))
    assert "1 conversations have reasoning in a field of its own, which is left out" in caplog.text


def test_numbers_of_a_call_are_as_python_prints_them(tmp_path: Path) -> None:
    written = json.dumps({"messages": [ASK, openai({"x": "NUMBERS"}), RESULT, SAID]})
    path = tmp_path / "rows.jsonl"
    path.write_text(written.replace('"NUMBERS"', "[-0, 1.10, 1e3, 12345678901234567890123]"))
    [row] = load_rows(DataSource(str(path)))
    shown = prompter().tokenizer.decode(learnt(prompter(), row)[0])
    assert '{"x": [0, 1.1, 1000.0, 12345678901234567890123]}' in shown
    path.write_text(written.replace('"NUMBERS"', "7" * 5000))
    with pytest.raises(DataError, match=r"row 0 \(line 1\), column 'messages', message 1: .* write it as text"):
        load_rows(DataSource(str(path)))
