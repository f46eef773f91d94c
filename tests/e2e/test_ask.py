"""`msa-lite ask`: the models of a run answer a question side by side, as they did when they were scored."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.evals.engine.generate import generate
from msa_lite.io.files.writing import hash_file
from msa_lite.pipeline.run.folder import open_run
from msa_lite.pipeline.verbs.ask import open_panel
from tests.e2e.conftest import CallCli, tiny_recipe


def records(run: Path, model: str, name: str = "forget") -> list[dict[str, Any]]:
    """A model's records of one set in the scores of a run."""
    lines = (run / f"evaluation/{model}/{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def files(folder: Path) -> dict[Path, str]:
    """The hash of every file in a folder."""
    return {path: hash_file(path) for path in folder.rglob("*") if path.is_file()}


def scored(run: Path, question: str) -> dict[str, str]:
    """What each model of a run answered when it was scored."""
    models = ("target", "unlearned", "ideal")
    return {m: next(r["generated"] for r in records(run, m) if r["question"] == question) for m in models}


@pytest.mark.parametrize("place", ["", "baselines/task_vector"])
def test_the_models_answer_as_in_their_scores_and_nothing_is_written(place: str, finished: Path) -> None:
    folder, before = finished / place, files(finished)
    assert open_run(folder).home == finished.resolve()
    for record in records(folder, "unlearned")[:2]:
        answers = msa_lite.ask(folder, record["question"])
        assert answers.answers == scored(folder, record["question"])
        assert list(answers.answers) == ["target", "unlearned", "ideal"]
    assert files(finished) == before


def test_lines_of_a_pipe_are_asked_one_by_one_and_a_faulty_one_stops_nobody(
    finished: Path, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [record["question"] for record in records(finished, "target")[:2]]
    lines = f"{questions[0]}\n\n{'where ' * 9000}\n{questions[1]}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    status, out, err = call_cli("ask", finished, "--json")
    objects = [json.loads(line) for line in out.splitlines()]
    assert [item["question"] for item in objects] == questions
    assert [item["answers"] for item in objects] == [scored(finished, question) for question in questions]
    assert status == 2
    assert "tokens with its prompt, and the target model has room for 2048" in err
    assert err.count("loading target: done") == 1, "models stay between questions"


def test_answers_stand_side_by_side_and_the_prompt_is_told(finished: Path, call_cli: CallCli) -> None:
    question = records(finished, "target")[0]["question"]
    status, out, err = call_cli("ask", finished, question)
    answers = scored(finished, question)
    assert status == 0
    assert [line.split(maxsplit=1)[0] for line in out.splitlines()] == list(answers)
    assert [line[11:] for line in out.splitlines()] == [text or "(nothing)" for text in answers.values()]
    assert "prompt: 'Question: {question}" in err
    assert "at most 6 tokens" in err


def test_a_model_that_is_gone_is_named_and_the_others_answer(
    history: Path, finished: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace(str(history / "target"), str(tmp_path / "gone")))
    question = records(run, "target")[0]["question"]
    status, out, err = call_cli("ask", run, question, "--json")
    expected = {name: text for name, text in scored(run, question).items() if name != "target"}
    assert status == 0
    assert json.loads(out)["answers"] == expected
    assert json.loads(out)["missing"] == {"target": f"{tmp_path / 'gone'}: no such folder"}
    assert "no target: " in err
    shutil.rmtree(run / "model")
    status, out, err = call_cli("ask", run, question)
    assert (status, out) == (3, "")
    assert "no unlearned model to ask yet; finish the run first" in err


def test_a_run_over_texts_continues_what_is_written(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("Otan Wenmere lives in Yarheath. " * 20)
    recipe = tiny_recipe(history, tmp_path / "run") | {"evaluate": None}
    recipe["forget"]["data"] = {"path": str(text), "format": "text"}
    del recipe["retain"]
    run = msa_lite.run(recipe)
    assert run is not None
    panel = open_panel(run.folder)
    assert panel.continues
    prompts: list[Any] = []

    def keep(runner: Any, tokenizer: Any, ids: Any, *settings: Any, **options: Any) -> Any:
        prompts.extend(ids)
        return generate(runner, tokenizer, ids, *settings, **options)

    monkeypatch.setattr("msa_lite.pipeline.verbs.ask.generate", keep)
    assert set(panel.answers("Otan Wenmere").answers) == {"target", "unlearned"}
    assert prompts == [panel.prompter.tokenizer("Otan Wenmere")["input_ids"]] * 2


def test_models_too_large_to_stay_are_loaded_for_each_question(
    finished: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    question = records(finished, "target")[0]["question"]
    loads: list[str] = []

    def note(label: str, done: int, total: int) -> None:
        loads.extend([label] * done)

    panel = open_panel(finished, several=True)
    assert panel.stays
    for _ in range(2):
        panel.answers(question, note)
    assert len(loads) == 3
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {"cpu": 300_000, 0: 300_000})
    panel = open_panel(finished, several=True)
    assert not panel.stays
    for _ in range(2):
        assert panel.answers(question, note).answers == scored(finished, question)
    assert len(loads) == 3 + 6


def test_a_run_that_was_moved_is_asked_where_it_lies(finished: Path, tmp_path: Path) -> None:
    text = (finished / "recipe.yaml").read_text()
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/recipe.yaml").write_text(
        text.replace(f"target: {open_run(finished).recipe.target}", f"target: {finished}/history/target")
    )
    run = open_run(tmp_path / "moved")
    assert (run.recipe.target, run.home) == (str(tmp_path / "moved/history/target"), tmp_path / "moved")
