"""What comes with a model or with tasks and is a program: it is refused, or bounded, and never run unasked."""

from __future__ import annotations

import inspect
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite.data import Prompter, Template, render_chat
from msa_lite.errors import UsageError
from msa_lite.evals.harness import check_no_code, sandboxed
from msa_lite.evals.judge import encode_ask
from msa_lite.evals.judge.prompts import Ask
from msa_lite.io.models.devices import OverrunError, limited
from tests.support.models import tiny_tokenizer


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loops without end found after 0.3 s of processor time."""
    monkeypatch.setattr(inspect.unwrap(limited), "__defaults__", (0.3,))


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = [
    (LOOP, "took more than"),
    ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ("{{ 'a' * 10**10 }}", "too much memory"),
    ("{{ 'a' * 10**7 }}", "far more"),
    ("{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}", "memory"),
    ("{{ messages | tojson(indent=999999999) }}", "memory"),
    ("{{ messages }", "unexpected"),
    ("{{ raise_exception('not this') }}", "not this"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("nothing of it", "leaves out the question and the answer"),
    ("{{ messages[0].content }}", "leaves out the answer"),
    ("{{ messages[-1].content }}", "leaves out the question"),
]


@pytest.mark.parametrize(("template", "told"), TEMPLATES)
def test_chat_templates_that_render_nothing_or_for_ever_are_refused(template: str, told: str) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=told):
        Prompter.build(tokenizer, "chat", Template())


def test_a_template_that_fails_on_a_row_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template += "{% if 'bad' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
    prompter = Prompter.build(tokenizer, "chat", Template())
    assert prompter.prompt("a question")
    for use in (prompter.prompt, lambda text: prompter.full(text, "an answer")):
        with pytest.raises(UsageError, match="cannot be rendered"):
            use("a bad question")


def test_a_judge_s_template_is_bounded_too() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    ask = Ask("system", "user", "AB")
    whole = encode_ask(tokenizer, ask)
    messages = [{"role": "system", "content": "system"}, {"role": "user", "content": "user"}]
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, date_string="10 Apr 2025")
    assert whole == list(given["input_ids"])
    tokenizer.chat_template = LOOP
    with pytest.raises(OverrunError):
        encode_ask(tokenizer, ask)


def test_bounds_leave_signals_and_memory_as_they_were() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with limited():
        assert signal.getsignal(signal.SIGVTALRM) is not before
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    with pytest.raises(MemoryError), limited():
        bytearray(1 << 40)
    assert len(bytearray(300 << 20)) == 300 << 20
    assert render_chat(tiny_tokenizer(chat=True), [{"role": "user", "content": "x"}])


SOUND: dict[str, Any] = {"task": "mine", "dataset_path": "json", "doc_to_text": "{{question}}"}


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"mine.yaml": "task: mine\ndoc_to_text: !function utils.f"}, "mine.yaml: !function utils.f"),
        ({"deep/mine.yaml": "task: mine\nmetric_list:\n- {metric: !function utils.f}"}, "deep/mine.yaml: !function"),
        ({"mine.yaml": "include: base", "base": "doc_to_target: !function utils.f"}, "base: !function utils.f"),
        ({"mine.yaml": "include: [a.yml]", "a.yml": "include: b", "b": "x: !function f"}, "b: !function f"),
        ({"mine.yaml": "include: ../outside.yaml"}, "outside.yaml: lies outside of the folder"),
        ({"mine.yaml": "x: !!python/object/apply:os.system [true]"}, "python/object/apply"),
        ({"mine.yaml": "? !function f\n: 1"}, "!function f"),
        ({"mine.yaml": "a: &a [!function f]\nb: *a"}, "!function"),
        ({"mine.yaml": "include: gone"}, "gone: cannot be opened"),
        ({"mine.yaml": "["}, "not YAML"),
    ],
)
def test_tasks_that_run_code_are_refused_by_name(files: dict[str, str], told: str, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    (tmp_path / "outside.yaml").write_text("task: outside")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(UsageError) as caught:
        check_no_code(folder)
    assert told in str(caught.value)


def test_tasks_without_code_pass_whatever_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(SOUND | {"include": "base"}))
    (tmp_path / "base").write_text("a: &a {x: 1}\nb: *a\ndate: 2026-01-01\n")
    (tmp_path / "utils.py").write_text("raise SystemExit(9)")
    assert check_no_code(tmp_path) is None


def test_templates_of_tasks_reach_no_python() -> None:
    from jinja2.exceptions import SecurityError
    from lm_eval import utils

    usual, document = utils.env, {"question": "a b"}
    with sandboxed():
        assert utils.apply_template("{{ question | regex_replace('a', 'c') }}\n", document) == "c b\n"
        with pytest.raises(SecurityError):
            utils.apply_template("{{ question.__class__.__mro__[1].__subclasses__() }}", document)
    assert utils.env is usual


def test_evaluate_refuses_code_until_it_is_allowed(tmp_path: Path) -> None:
    from msa_lite.evals.harness import check_tasks

    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(SOUND) + "process_docs: !function own.process\n")
    (tmp_path / "own.py").write_text("raise SystemExit(9)")
    with pytest.raises(UsageError, match=r"mine\.yaml: !function own\.process"):
        check_tasks(["mine"], tmp_path)
    check_tasks(["mine"], tmp_path, allow_code=True)
