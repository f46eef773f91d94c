"""What comes with a model and is a program: it is refused, or bounded, and never run unasked."""

from __future__ import annotations

import inspect
import signal

import pytest

from msa_lite.data import Prompter, Row, Template, render_chat
from msa_lite.errors import UsageError
from msa_lite.evals.judge.base import encode_ask
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
    assert prompter.prompt(Row(0, "a question"))
    for use in (prompter.prompt, prompter.full):
        with pytest.raises(UsageError, match="cannot be rendered"):
            use(Row(0, "a bad question", "an answer"))


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
