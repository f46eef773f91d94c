"""What a run's models answer, side by side and as they were scored; and the verdict at its end, with its exit codes."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.errors import BusyError, MismatchError
from msa_lite.evals.benchmarks.benchmark import Benchmark
from msa_lite.evals.engine.generate import generate
from msa_lite.evals.scores import records
from msa_lite.evals.scores.records import ANSWERS_FILE, write_records
from msa_lite.io.finished.seal import add_files, in_use
from msa_lite.pipeline.run.folder import open_run
from msa_lite.pipeline.verbs.ask import Question, open_panel
from tests.e2e.conftest import CallCli, hashes, read_lines, tiny_recipe, write_recipe
from tests.support.pages import page_text


def scored_records(run: Path, model: str, name: str = "forget") -> list[dict[str, Any]]:
    """A model's records of one set in the scores of a run."""
    return read_lines(run / f"evaluation/{model}/{name}.jsonl")


def scored(run: Path, question: str) -> dict[str, str]:
    """What each model of a run answered when it was scored."""
    models = ("target", "unlearned", "ideal")
    return {m: next(r["generated"] for r in scored_records(run, m) if r["question"] == question) for m in models}


def assert_held(run: Path) -> None:
    with pytest.raises(BusyError), in_use(run, alone=True):
        pass


@pytest.mark.parametrize("place", ["", "baselines/task_vector"])
def test_the_models_answer_as_in_their_scores_and_nothing_is_written(place: str, finished: Path) -> None:
    folder, before = finished / place, hashes(finished)
    assert open_run(folder).home == finished.resolve()
    for record in scored_records(folder, "unlearned")[:2]:
        answers = msa_lite.ask(folder, record["question"], lambda *_: assert_held(folder))
        assert answers.answers == scored(folder, record["question"])
        assert list(answers.answers) == ["target", "unlearned", "ideal"]
    assert hashes(finished) == before


def test_a_question_of_a_scored_row_is_asked_with_its_system_message(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    rows = scored_records(folder, "unlearned")
    rows[0] |= {"system": "Be a warden.", "earlier": [["Who are you?", "A heron."]]}
    write_records(folder / "evaluation/unlearned/forget.jsonl", rows)
    add_files(folder / "evaluation/unlearned", ["forget.jsonl"], {})
    prompts: list[list[int]] = []

    def answer(runner: Any, tokenizer: Any, asked: list[list[int]], *_: Any, **options: Any) -> Any:
        prompts.extend(asked)
        return iter([[(0, ["By the weir."])]])

    monkeypatch.setattr("msa_lite.pipeline.verbs.ask.generate", answer)
    panel = open_panel(folder)
    for row in rows[:2]:
        panel.answer("unlearned", Question(row["question"]))
    read = [panel.prompter.tokenizer.decode(ids) for ids in prompts]
    for text in ("Be a warden.", "Who are you?", "A heron."):
        assert [text in prompt for prompt in read] == [True, False]


def test_lines_of_a_pipe_are_asked_one_by_one_and_a_faulty_one_stops_nobody(
    finished: Path, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [record["question"] for record in scored_records(finished, "target")[:2]]
    lines = f"{questions[0]}\n\n{'where ' * 9000}\n{questions[1]}\n"
    stdin = io.StringIO(lines)
    monkeypatch.setattr("sys.stdin", stdin)
    monkeypatch.setattr(stdin, "isatty", lambda: bool(assert_held(finished)))
    status, out, err = call_cli("ask", finished, "--json")
    objects = [json.loads(line) for line in out.splitlines()]
    assert [item["question"] for item in objects] == questions
    assert [item["answers"] for item in objects] == [scored(finished, question) for question in questions]
    assert status == 2
    assert "tokens with its prompt, and the target model has room for 2048" in err
    assert err.count("loading target: done") == 1, "models stay between questions"


def test_answers_stand_side_by_side_and_the_prompt_is_told(finished: Path, call_cli: CallCli) -> None:
    question = scored_records(finished, "target")[0]["question"]
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
    question = scored_records(run, "target")[0]["question"]
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
    question = scored_records(finished, "target")[0]["question"]
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


# The verdict at the end of a run, and the checks before it: what is printed and written, and the exit codes.


def make_recipe(knowing: Path, output: Path) -> dict[str, Any]:
    """A recipe that forgets, and damages much besides."""
    return {
        "target": str(knowing / "target"),
        "prior": str(knowing / "prior"),
        "forget": {"data": {"path": str(knowing / "data/forget.jsonl")}, "alpha": 1.0},
        "retain": {"data": {"path": str(knowing / "data/retain.jsonl")}, "beta": 0.0},
        "vector": {"lora": {"rank": 8, "alpha": 16}, "epochs": 10, "learning_rate": 2e-2, "batch_size": 8,
                   "warmup_epochs": 1},
        "evaluate": {"max_new_tokens": 40},
        "output": str(output),
    }  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(knowing: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose stages the tests take up."""
    folder = tmp_path_factory.mktemp("verdict") / "run"
    msa_lite.run(make_recipe(knowing, folder))
    return folder


@pytest.fixture
def recipe(knowing: Path, run_folder: Path, tmp_path: Path) -> str:
    return write_recipe(make_recipe(knowing, run_folder), tmp_path)


def read(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "verdict.json").read_text())
    return value


def test_a_run_that_forgets_too_little_fails_with_all_files_there(
    recipe: str, run_folder: Path, call_cli: CallCli
) -> None:
    status, stdout, stderr = call_cli(recipe, "forget.alpha=0.5")
    assert status == 1, stderr
    verdict = read(run_folder)
    counts = re.match(r"It still answers (\d+) of the 18 questions .*\(before: 18; .*: 0\)\. ", verdict["sentence"])
    assert counts, verdict["sentence"]
    assert int(counts[1]) == verdict["forgotten"]["recited"]["unlearned"] > 0
    assert stdout.startswith(f"FAIL  {verdict['sentence']}\n")
    assert f"FAIL: {verdict['sentence']}" in stderr
    assert "--accept" in stderr
    assert (verdict["outcome"], verdict["forgotten"]["control"]) == ("FAIL", "prior")
    assert verdict["forgotten"]["excess"]["low"] > verdict["margins"]["recited"]
    assert "surely more than 10 points" in verdict["reasons"][0]
    text = page_text(run_folder)
    assert verdict["sentence"] in text
    assert re.search(r"^FAIL\b", text, re.MULTILINE)
    assert (run_folder / "model/config.json").is_file()
    # At the end, ten questions side by side, half of them to be forgotten; the report keeps them to itself.
    assert (stdout.count("\nforget  "), stdout.count("\nretain  "), stdout.count("\n  unlearned  ")) == (5, 5, 10)
    assert "Some questions side by side" not in page_text(run_folder)


@pytest.mark.parametrize("how", ["--accept", "verdict=off"])
def test_a_failure_can_be_accepted(how: str, recipe: str, call_cli: CallCli) -> None:
    status, stdout, stderr = call_cli(recipe, "forget.alpha=0.1", how)
    assert (status, stdout.partition("  ")[0]) == (0, "FAIL"), stderr


def test_without_rows_to_keep_the_verdict_says_so_loudly_and_exits_with_0(
    recipe: str, run_folder: Path, call_cli: CallCli
) -> None:
    status, stdout, stderr = call_cli(recipe, "retain=null", "--json")
    assert status == 0, stderr
    result = json.loads(stdout)
    assert result["verdict"] == read(run_folder)
    assert (result["verdict"]["outcome"], result["verdict"]["kept"]) == ("PARTLY", None)
    assert f"PARTLY  {result['verdict']['sentence']}" in stderr
    assert "give rows to keep" in stderr
    # All that there is to show are rows to be forgotten.
    assert call_cli("report", run_folder, "--show-examples")[0] == 0
    assert (run_folder / "report.html").read_text().count('<article class="example">') == 10


# Before the work


def other_rows(knowing: Path, folder: Path) -> dict[str, Any]:
    recipe = make_recipe(knowing, folder / "new")
    recipe["forget"]["data"]["path"] = str(knowing / "data/holdout.jsonl")
    return recipe


def other_prompt(knowing: Path, folder: Path) -> dict[str, Any]:
    return make_recipe(knowing, folder / "new") | {"prompt": {"prompt": "Tell me, friend! {question}\n\nWell,"}}


@pytest.mark.parametrize("spoil", [other_rows, other_prompt])
def test_rows_that_the_target_does_not_know_stop_a_run_before_it_fits(
    spoil: Any, knowing: Path, tmp_path: Path, call_cli: CallCli
) -> None:
    status, stdout, stderr = call_cli(write_recipe(spoil(knowing, tmp_path), tmp_path))
    assert (status, stdout) == (3, ""), stderr
    assert "does not know the rows to forget" in stderr
    assert (stderr.count("question     "), stderr.count("  expected   "), stderr.count("  target     ")) == (2, 2, 2)
    assert "--accept" in stderr
    kept = {path.name for path in (tmp_path / "new").iterdir()} - {".lock", "record.key"}
    assert kept == {"recipe.yaml", "stages.json", "evaluation", ANSWERS_FILE}, "nothing was fitted"


def test_what_a_refused_run_has_scored_is_not_scored_again(
    knowing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not with --accept, and not for the final scores of the same rows; a purge finds what was kept."""
    scored: list[str] = []
    ask = records._ask

    def note(runner: Any, benchmark: Benchmark, part: Any, texts: Any, prompts: Any) -> Any:
        if benchmark.name != "probe":
            scored.extend(item.fields["question"] for item in texts)
        return ask(runner, benchmark, part, texts, prompts)

    monkeypatch.setattr(records, "_ask", note)
    recipe = other_rows(knowing, tmp_path)
    recipe["evaluate"]["holdout"] = {"path": str(knowing / "data/forget.jsonl")}
    with pytest.raises(MismatchError, match="the scores stay in"):
        msa_lite.run(recipe)
    assert len(scored) == 2 * 12, "target and prior on the forget rows, and nothing else"
    whole = shutil.copytree(tmp_path / "new", tmp_path / "purged")
    assert any(one.name.startswith("evaluation") for one in msa_lite.purge(whole).holdings), "the rows stand in there"
    scored.clear()
    with caplog.at_level("WARNING", logger="msa_lite"):
        result = msa_lite.run(recipe, ["vector.epochs=2"], accept=True)
    assert "does not know the rows to forget" in caplog.text
    assert result is not None
    assert result.verdict is not None
    assert (result.verdict.outcome, result.verdict.forgotten.known) == ("PARTLY", False)
    assert "there was nothing to forget" in result.verdict.reasons[0]
    forget = {row["question"] for row in read_lines(knowing / "data/holdout.jsonl")}
    others = [question for question in scored if question not in forget]
    assert len(scored) - len(others) == 12, "the unlearned model alone is asked the forget rows anew"
    assert len(others) == 2 * (36 + 18), "target and unlearned model, once each"
