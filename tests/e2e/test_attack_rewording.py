"""A judge rewords the questions for `msa-lite attack`: once, for all models alike, and without the answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import msa_lite
from msa_lite.data import Row
from msa_lite.errors import MsaError, UsageError
from msa_lite.evals.judge import JudgeSettings, openai_judge
from msa_lite.evals.judge.prompts import _WAYS, CORNER_WAY, REWORDINGS
from msa_lite.io.finished.seal import verify_stages
from msa_lite.pipeline.attack.ground import open_rewording
from tests.e2e.conftest import FEW, CallCli, changed_recipe
from tests.support.judge import JudgeServer, Step
from tests.support.memorised import make_ground

MODEL = "some_writer"
TRIALS = {f"by some-writer {way}" for way in REWORDINGS}


@pytest.fixture
def copy(attacked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(attacked, tmp_path / "run"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[JudgeServer]:
    """A judge that puts the first word of its instruction's way before the question."""
    monkeypatch.setenv("OPENAI_API_KEY", JudgeServer.key)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MSA_LITE_CACHE", str(tmp_path / "cache"))
    with JudgeServer() as judge:
        judge.reply = lambda body: f'"{way_of(body)}: {question_of(body)}"\nDone.'
        yield judge


def way_of(body: dict[str, Any]) -> str:
    return next(name for name, told in REWORDINGS.items() if told in body["messages"][0]["content"])


def question_of(body: dict[str, Any]) -> str:
    return str(body["messages"][1]["content"].split('"')[1])


def keys(server: JudgeServer) -> list[str]:
    return [*FEW, f"attack.prompt.judge={{kind: openai, model: {MODEL}, base_url: '{server.url}'}}"]


def records(folder: Path, trial: str, model: str = "unlearned") -> list[dict[str, Any]]:
    lines = (folder / "attacks/prompt" / model / f"{trial}.forget.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_each_question_is_reworded_once_for_all_models(copy: Path, server: JudgeServer, call_cli: CallCli) -> None:
    code, _, err = call_cli("attack", copy, *keys(server), "--attacks", "prompt", "--dry-run")
    assert code == 0
    assert f"{MODEL} rewords 4 questions first" in err
    assert server.calls == []
    code, _, err = call_cli("attack", copy, *keys(server), "--attacks", "prompt")
    assert code == 0, err
    assert "rewordings: for example, 'In which year" in err
    assert len(server.calls) == 4 * len(REWORDINGS)
    rows = [json.loads(line) for line in (copy / "attacks/rewordings/rewordings.jsonl").read_text().splitlines()]
    assert [row[way] for row in rows for way in REWORDINGS] == [
        f"{way}: {row['question']}" for row in rows for way in REWORDINGS
    ]
    answers = [json.loads(line)["answer"] for line in Path(data_of(copy)).read_text().splitlines()]
    assert not any(answer in json.dumps(server.calls) for answer in answers)
    for model in ("ideal", "target", "unlearned"):
        assert all(len(records(copy, trial, model)) == 4 for trial in TRIALS)
    assert not any(verify_stages(copy).values())
    before = (copy / "attacks/report.json").read_bytes()
    assert b"other wording: by some-writer casual" in before
    other = call_cli("attack", copy, *keys(server), "attack.prompt.judge.model=b", "--attacks", "prompt", "--dry-run")
    assert "b rewords 4 questions first" in other[2]
    assert call_cli("attack", copy, *keys(server), "--attacks", "prompt")[0] == 0
    assert len(server.calls) == 4 * len(REWORDINGS), "a rerun asks nothing"
    msa_lite.attack(copy / "baselines/task_vector", ["prompt"], overrides=keys(server))
    assert len(server.calls) == 4 * len(REWORDINGS), "nor does a baseline"
    msa_lite.attack(copy, ["prompt"], overrides=[*keys(server), "attack.rows=5"])
    assert len(server.calls) == 5 * len(REWORDINGS), "a further row is all that is asked"
    # What a judge's work leaves elsewhere: its cache, and partial folders.
    assert not [path for path in copy.rglob("*") if path.suffix in (".sqlite", ".partial")]
    msa_lite.purge(copy, remove=True)
    assert not (copy / "attacks/rewordings/rewordings.jsonl").exists()


def data_of(run: Path) -> str:
    return str(yaml.safe_load((run / "recipe.yaml").read_text())["forget"]["data"]["path"])


def test_a_recipe_with_such_a_judge_keeps_the_results(copy: Path, server: JudgeServer) -> None:
    with changed_recipe(copy) as recipe:
        recipe["attack"] = yaml.safe_load(
            f"{{prompt: {{judge: {{kind: openai, model: x, base_url: '{server.url}'}}}}}}"
        )
    msa_lite.attack(copy, ["prompt"], overrides=FEW)
    server.stop()
    result = msa_lite.attack(copy, ["membership"], overrides=FEW)
    assert [one.name for one in result.facts.attacks] == ["membership", "prompt"]


def test_a_judge_that_fails_costs_the_other_attacks_nothing_and_goes_on(
    copy: Path, server: JudgeServer, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_judge, "_AT_A_TIME", 1)
    shutil.rmtree(copy / "attacks/prompt")
    for report in ("report.json", "membership/report.json"):
        (copy / "attacks" / report).unlink()
    server.script = [*[Step(text="one more")] * 5, Step(status=404)]
    code, _, err = call_cli("attack", copy, *keys(server), "--attacks", "prompt,membership")
    assert code == 4
    assert "no rewordings: the judge failed: the server said 404" in err
    assert (copy / "attacks/membership/report.json").is_file()
    assert not (copy / "attacks/prompt").exists()
    assert len(server.calls) == 6
    code, _, _ = call_cli("attack", copy, *keys(server), "--attacks", "prompt")
    assert code == 0
    assert len(server.calls) == 6 + 4 * len(REWORDINGS) - 5, "it asks for the rest"


def test_rows_that_were_not_reworded_are_not_asked(copy: Path, server: JudgeServer, call_cli: CallCli) -> None:
    index = records(copy, "plain")[0]["index"]
    question = json.loads(Path(data_of(copy)).read_text().splitlines()[index])["question"]
    usual = server.reply
    server.reply = lambda body: "<think> Well" if question in body["messages"][1]["content"] else usual(body)
    code, _, err = call_cli("attack", copy, *keys(server), "--attacks", "prompt")
    assert code == 0
    assert f"gave no rewording in 3 of {4 * len(REWORDINGS)} cases" in err
    asked = records(copy, "by some-writer casual")
    assert [row["index"] for row in asked if "nobody has reworded" in row.get("skipped", "")] == [index]


def test_a_model_that_rewords_nothing_is_no_success(
    copy: Path, server: JudgeServer, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_judge, "_TRIES", 1)
    server.reply = lambda body: "<think> Well"
    code, _, err = call_cli("attack", copy, *keys(server), "--attacks", "prompt")
    assert code == 4
    assert "some_writer reworded no question" in " ".join(err.split())


def test_what_forbids_rewordings_is_told_before_any_work(
    copy: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="prompts: for scores alone"):
        msa_lite.attack(copy, ["prompt"], overrides=[*keys(server), "attack.prompt.judge.prompts=a.yaml"])
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UsageError, match="OPENAI_API_KEY"):
        msa_lite.attack(copy, ["prompt"], overrides=keys(server))
    assert server.calls == []


def test_texts_have_no_other_wording(tmp_path: Path) -> None:
    ground, judge = make_ground(forget=[Row(0, text="It was the day of all days.")]), JudgeSettings("openai", "x")
    assert open_rewording(tmp_path, JudgeSettings(), ground, is_asked=True) is None
    with pytest.raises(UsageError, match="the forget rows are texts"):
        open_rewording(tmp_path, judge, ground, is_asked=False)


def test_a_local_judge_rewords_too(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def answer(_: Any, tokenizer: Any, prompts: Any, decoding: Any) -> Iterator[list[tuple[int, list[str]]]]:
        asked.extend((tokenizer.decode(prompt), decoding.max_new_tokens) for prompt in prompts)
        yield [(at, [f"number {at}?"]) for at in range(len(prompts))]

    monkeypatch.setattr("msa_lite.evals.generate.generate", answer)  # a tiny model says nothing that could be read
    prior = yaml.safe_load((copy / "recipe.yaml").read_text())["prior"]
    judge = f"attack.prompt.judge={{kind: local, model: {prior}}}"
    result = msa_lite.attack(copy, ["prompt"], overrides=[*FEW, judge])
    assert [one.name for one in result.facts.attacks] == ["membership", "prompt"]
    rows = [json.loads(row) for row in (copy / "attacks/rewordings/rewordings.jsonl").read_text().splitlines()]
    for at, (row, way) in enumerate((row, way) for row in rows for way in REWORDINGS):
        text, tokens = asked[at]
        assert row[way] == f"number {at}?"
        assert row["question"] in text
        assert REWORDINGS[way] in text
        assert tokens >= 100
    assert len(asked) == 4 * len(REWORDINGS)


def test_a_judge_words_questions_around_the_corner_where_it_is_asked_to(
    copy: Path, server: JudgeServer, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msa_lite.attacks.corner.FEWEST_ROWS", 1)
    corner, told = "attack.prompt.corner=judge", _WAYS[CORNER_WAY]
    server.reply = lambda body: f"Well: {body['messages'][1]['content'].split(chr(10))[0]}"
    code, _, err = call_cli("attack", copy, *keys(server), corner, "--attacks", "prompt", "--dry-run")
    assert code == 0
    assert "questions first, some with answers in them" in err
    msa_lite.attack(copy, ["prompt"], overrides=[*keys(server), corner])
    calls = [body for body in server.calls if told in json.dumps(body)]
    assert len(calls) == len(server.calls) - 4 * len(REWORDINGS) > 4
    answers = [json.loads(line)["answer"].split()[-1] for line in Path(data_of(copy)).read_text().splitlines()]
    assert any(answer in json.dumps(calls) for answer in answers)
    asked = [row for kind in ("reversed", "comparison") for row in records(copy, kind) if "skipped" not in row]
    assert asked
    count = len(server.calls)
    msa_lite.attack(copy, ["prompt"], overrides=[*keys(server), corner])
    assert len(server.calls) == count, "a rerun asks nothing"
    with pytest.raises(MsaError, match="there is no judge"):
        msa_lite.attack(copy, ["prompt"], overrides=[*FEW, corner])
