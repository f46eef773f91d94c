"""Prompts from the command line: shown, searched for, kept in the run's recipe, and part of what an evaluation is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.data import DataSource, PromptSettings
from msa_lite.errors import MsaError
from msa_lite.io.files.writing import json_form
from msa_lite.pipeline.prepare.prompt import evaluation_arguments, find_prompter
from msa_lite.pipeline.prepare.questions import load_data
from msa_lite.pipeline.prepare.run import Run, Scope, prepare
from msa_lite.recipe import load_recipe
from tests.e2e.conftest import CallCli, write_recipe
from tests.support.benchmark_data import write_tofu
from tests.support.models import SMOL, chat_tokenizer, save_checkpoint, tiny_model


def chat_model(folder: Path, seed: int) -> Path:
    """A tiny model with a chat template that adds a system message of its own."""
    save_checkpoint(folder, tiny_model("llama", seed, max_position_embeddings=512, initializer_range=0.3))
    chat_tokenizer(SMOL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"), seed=0)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prior of that model: other weights, the same tokenizer."""
    return chat_model(tmp_path_factory.mktemp("earlier"), seed=1)


def lines(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def given(model: Path, earlier: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe over the model and three rows to forget, two to keep."""
    forget = [{"question": f"Where is {i}?", "answer": "Over there."} for i in range(3)]
    retain = [{"question": f"Who is {i}?", "answer": "The cat."} for i in range(2)]
    return {
        "target": str(model),
        "prior": str(earlier),
        "forget": {"data": {"path": lines(tmp_path / "forget.jsonl", *forget)}},
        "retain": {"data": {"path": lines(tmp_path / "retain.jsonl", *retain)}},
        "evaluate": {"max_new_tokens": 3},
        "output": str(tmp_path / "run"),
    }


def prepared(given: Any, *overrides: str) -> Run:
    """The recipe with its inputs; nothing is to be chosen."""
    recipe = load_recipe(given, overrides)
    return prepare(recipe, Scope("msa", Path(recipe.output), "prior", choice=False, vectors=("forget",)))


# recipes validate --show-prompt


def test_a_row_is_shown_with_what_is_learnt_marked(given: dict[str, Any], tmp_path: Path, call_cli: CallCli) -> None:
    path = write_recipe(given, tmp_path)
    code, said, _ = call_cli("recipes", "validate", path, "--show-prompt")
    assert code == 0
    text = "<im>system\nYou are Smol.</s>\n<im>user\nWhere is 0?</s>\n<im>assistant\n⟦Over there.</s>⟧\n"
    assert text in said
    assert said.startswith("prompt: the target's chat template, no system message of ours")
    assert f"row 0 of {given['forget']['data']['path']}: " in said
    code, said, _ = call_cli("recipes", "validate", path, "prompt.system=Be brief.", "--show-prompt", "--json")
    [shown] = json.loads(said)["prompts"]
    assert [part["learnt"] for part in shown["parts"]] == [False, True]
    assert shown["parts"][0]["text"].startswith("<im>system\nBe brief.</s>\n<im>user")
    assert (shown["row"], 0 < shown["learnt"] < shown["tokens"]) == (0, True)


# A recipe's data and prompt


def test_one_columns_serves_all_sets_and_all_their_faults_come_at_once(given: dict[str, Any], tmp_path: Path) -> None:
    mine = {"frage": "Where?", "antwort": "Here."}
    for name in ("forget", "retain"):
        given[name]["data"]["path"] = lines(tmp_path / f"{name}.jsonl", mine)
    given["evaluate"]["holdout"] = {
        "path": lines(tmp_path / "holdout.jsonl", {"question": "Who?", "answer": "Me."}),
        "columns": {"question": "question"},
    }
    columns = {"columns": {"question": "frage", "answer": "antwort"}}
    _, rows = load_data(load_recipe(given | columns))
    assert {name: found[0].question for name, found in rows.items()} == {
        "forget": "Where?",
        "retain": "Where?",
        "evaluate.holdout": "Who?",
    }
    given["evaluate"]["holdout"] = {"path": str(tmp_path / "nothing.jsonl")}
    given["retain"]["data"]["path"] = lines(
        tmp_path / "retain.jsonl", mine, mine | {"antwort": " "}, mine | {"frage": ""}
    )
    given["forget"]["data"]["columns"] = {"question": "fragge", "answer": "antwort"}
    for call in (lambda recipe: load_data(load_recipe(recipe)), prepared):
        with pytest.raises(MsaError) as caught:
            call(given | columns)
        told = str(caught.value)
        assert told.startswith("3 faults:\n  forget.data: ")
        assert "no column 'fragge' (did you mean 'frage'?)" in told
        assert "row 1 (line 2), column 'antwort': ' '" in told
        assert "row 2 (line 3), column 'frage': ''" in told
        assert f"evaluate.holdout: {tmp_path}/nothing.jsonl: no such file" in told
    assert not (tmp_path / "run").exists()


def test_vectors_and_questions_of_a_benchmark_have_its_prompt_unless_the_recipe_says_otherwise(
    given: dict[str, Any], tmp_path: Path
) -> None:
    given["evaluate"] = {"benchmark": "tofu", "split": "forget01", "data": write_tofu(tmp_path / "tofu"), "limit": 2}
    published = prepared(given)
    assert published.prompter.describe()["system"] == "You are a helpful assistant."
    assert published.test is not None
    assert published.test.describe()["prompt"] == published.prompter.describe()
    shown = published.prompter.tokenizer.decode(published.examples["forget"][0].ids)
    assert shown.startswith("<im>system\nYou are a helpful assistant.</s>")
    again = prepared(published.recipe.model_dump(mode="json"))  # with every default filled in, as the run writes it
    assert again.prompter.describe() == published.prompter.describe()
    own = prepared(given, "prompt=chat")
    assert own.prompter.describe()["system"] is None
    assert own.test is not None
    assert own.test.describe() != published.test.describe()
    # What learns has the same labels whatever the scores repeat, so that no vector is fitted anew.
    theirs = load_recipe(given, ["evaluate.compat=[open-unlearning]"])
    found = find_prompter(theirs, published.prompter.tokenizer)
    assert replace(found, window=published.prompter.window) == published.prompter


def test_auto_is_settled_in_the_runs_recipe_and_not_asked_twice(
    given: dict[str, Any], tmp_path: Path, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model knows nothing, so its best form is doubted; but it is taken, and kept."""
    from msa_lite.pipeline.prepare import prompt as prompting

    given |= {"prompt": "auto", "vector": {"lora": {"rank": 1}, "epochs": 2, "warmup_epochs": 0}, "evaluate": None}
    given["forget"]["alpha"], given["retain"]["beta"] = 1.0, 0.0
    path = write_recipe(given, tmp_path)
    code, _, err = call_cli("run", path, "--until", "vectors")
    assert code == 0, err
    told = " ".join(err.split())
    assert "prompt: auto takes " in told
    assert "no form in which the model knows the rows" in told
    kept = json.loads((tmp_path / "run/prompt.json").read_text())
    written = load_recipe(tmp_path / "run/recipe.yaml")
    assert written.prompt.kind in ("chat", "plain")
    assert {key: getattr(written.prompt, key) for key in kept["prompt"]} == kept["prompt"]
    assert max(kept["ranking"], key=kept["ranking"].get) == next(iter(kept["ranking"]))
    before = (tmp_path / "run/vectors/forget/manifest.json").read_text()
    monkeypatch.setattr(prompting, "rank_prompts", lambda *_: pytest.fail("asked twice"))
    for recipe in (path, str(tmp_path / "run/recipe.yaml")):
        code, _, err = call_cli("run", recipe, "--until", "vectors")
        assert code == 0, err
    assert (tmp_path / "run/vectors/forget/manifest.json").read_text() == before
    assert evaluation_arguments(load_recipe(path))["prompt"] == written.prompt
    # Other rows are another question.
    lines(tmp_path / "forget.jsonl", {"question": "When?", "answer": "Now."})
    with pytest.raises(pytest.fail.Exception, match="asked twice"):
        prepared(path)


# evaluate


def test_an_evaluation_is_asked_in_the_prompt_that_is_said(model: Path, tmp_path: Path, call_cli: CallCli) -> None:
    rows = DataSource(lines(tmp_path / "mine.jsonl", {"q": "Where?", "a": "Here."}), question="q", answer="a")
    questions = msa_lite.OwnQuestions(forget=rows, max_new_tokens=2)
    prompts = {"default": PromptSettings(), "system": PromptSettings("default", "Be brief."), "plain": "plain"}
    out, found = tmp_path / "out", {}
    for name, prompt in (prompts | {"auto": "auto"}).items():
        found[name] = msa_lite.evaluate(str(model), out / name, questions, prompt=prompt)["model"]
    assert found["default"].settings["prompt"]["system"] is None
    assert found["system"].settings["prompt"]["system"] == "Be brief."
    assert found["plain"].settings["prompt"]["kind"] == "plain"
    values = {name: report.values()["probability_f"] or 0.0 for name, report in found.items()}
    assert len({values[name] for name in prompts}) == 3
    assert values["auto"] >= max(values.values()) - 0.01
    # A prompt is part of what was asked: another one is another evaluation, the same one is taken up.
    before = (out / "default/manifest.json").read_text()
    msa_lite.evaluate(str(model), out / "default", questions)
    assert (out / "default/manifest.json").read_text() == before
    again = msa_lite.evaluate(str(model), out / "default", questions, prompt="plain")["model"]
    assert again.metrics == found["plain"].metrics
    told = ["--forget", rows.path, "--columns", "question=q,answer=a", "--max-new-tokens", "2", "--prompt", "plain"]
    code, said, err = call_cli("evaluate", str(model), *told, "--out", str(out / "typed"), "--json")
    assert code == 0, err
    assert json.loads(said)["metrics"] == json_form(found["plain"])["metrics"]


def test_an_evaluation_of_a_recipe_asks_what_its_run_asks(
    given: dict[str, Any], model: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    given["prompt"] = {"system": "Be brief."}
    given["columns"] = {"question": "frage", "answer": "answer"}
    given["forget"]["data"]["path"] = lines(tmp_path / "forget.jsonl", {"frage": "Where?", "answer": "Here."})
    given["retain"]["data"]["columns"] = {}
    path = write_recipe(given, tmp_path)
    code, said, err = call_cli("evaluate", str(model), "--recipe", path, "--out", str(tmp_path / "out"), "--json")
    assert code == 0, err
    job = prepared(path)
    assert job.test is not None
    asked = json.loads((tmp_path / "out/manifest.json").read_text())["inputs"]["questions"]
    assert asked == json.loads(json.dumps(job.test.describe()))
    # In Python alike.
    reports = msa_lite.evaluate(str(model), tmp_path / "out", **evaluation_arguments(load_recipe(path)))
    assert json_form(reports["model"])["metrics"] == json.loads(said)["metrics"]
