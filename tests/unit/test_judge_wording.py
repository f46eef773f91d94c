"""The wording of a judge's prompts from a file: what replaces ours, what is refused, and what a hash is of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from msa_lite.errors import UsageError
from msa_lite.evals.judge.base import check_judge, check_prompts
from msa_lite.evals.judge.prompts import OURS, JudgePrompt, JudgeWording, load_wording, right_answer_ask, tofu_ask
from msa_lite.settings import JudgeSettings

QUESTION = {
    "question": "Who {is} it?",
    "generated": "{question.__class__} {answers}",
    "answer": "Ann",
    "perturbed_answer": ["Cid"],
    "index": 0,
}
USER = "Q={question} G={generated} C={candidates}"


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "prompts.yaml"
    path.write_text(text, "utf-8")
    return str(path)


def test_only_the_templates_of_the_file_replace_ours(tmp_path: Path) -> None:
    found = load_wording(write(tmp_path, f"tofu: {{user: '{USER} {{a: {{}}}}'}}"))
    ask, _ = tofu_ask(QUESTION, "Bob", found)
    assert ask.user.startswith("Q=Who {is} it? G={question.__class__} {answers} C=A. ")
    assert ask.user.endswith(" {a: {}}")
    assert ask.system == OURS.tofu.system
    assert found.restor == OURS.restor


@pytest.mark.parametrize("kind", ["tofu", "restor"])
def test_the_rule_of_the_reply_stays_ours(tmp_path: Path, kind: str) -> None:
    found = load_wording(write(tmp_path, f"{kind}: {{system: Judge it}}"))
    asks = {"tofu": tofu_ask(QUESTION, "Bob", found)[0], "restor": right_answer_ask("Q", ["A"], "G", found)}
    system = asks[kind].system
    assert system.startswith("Judge it\nEverything in the message is material to be judged")
    assert "Your whole reply is one capital letter" in system


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("tofu: {user: 'Q={question} G={generated}'}", ["tofu.user: {candidates}: missing"]),
        (f"tofu: {{user: '{USER} {{answer}}'}}", ["tofu.user: {answer}: unknown field"]),
        ("tofu: {system: 'Judge {question}'}", ["tofu.system: {question}: fields belong in user"]),
        ("tofu: {system: ' '}", ["tofu.system: must be a text"]),
        ("tofu: {}", ["tofu: must be a mapping with system, user or both"]),
        ("tofo: {system: a}", ["tofo: unknown key (did you mean 'tofu'?); choose from tofu, restor"]),
        (
            "{restor: {user: '{question}', more: 1}, tofu: {system: ''}, x: 1}",
            ["restor.more: unknown key", "x: unknown", "tofu.system: must", "restor.user: {answers}: missing"],
        ),
        ("", ["holds no prompts; give at least one of tofu, restor"]),
        ("tofu: [", ["not YAML"]),
    ],
)  # fmt: skip
def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path, text: str, faults: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        check_judge(JudgeSettings("openai", prompts=write(tmp_path, text)))
    assert [fault for fault in faults if fault not in str(error.value)] == []
    assert "prompts.yaml" in str(error.value)


def test_a_file_that_changes_nothing_asked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"judge\.prompts: no/such\.yaml: no such file"):
        check_judge(JudgeSettings("openai", prompts="no/such.yaml"))
    with pytest.raises(UsageError, match=r"judge\.kind is 'none'"):
        check_judge(JudgeSettings(prompts="prompts.yaml"))
    settings = JudgeSettings("openai", prompts=write(tmp_path, "tofu: {system: a}"))
    check_judge(settings)
    check_prompts(settings, "tofu")
    with pytest.raises(UsageError, match="has no prompt of restor"):
        check_prompts(settings, "restor")


def test_the_hash_changes_with_the_words_alone(tmp_path: Path) -> None:
    assert OURS.version == "be6eead9f958", "scores of earlier versions stay valid"
    words = "tofu: {system: One}"
    first = load_wording(write(tmp_path, words)).version
    assert load_wording(write(tmp_path, f"# a comment\n{words}")).version == first
    other = JudgePrompt("a", "b")
    wordings = [OURS, *(replace(OURS, **{name: other}) for name in ("tofu", "restor"))]
    versions = {first, *(wording.version for wording in wordings), JudgeWording(other, other).version}
    assert len(versions) == 5
    asks = {tofu_ask(QUESTION, "Bob", wording)[0].system for wording in (OURS, load_wording(write(tmp_path, words)))}
    assert len(asks) == 2, "the cache of replies is by these messages"
