"""From a recipe to a report: the whole job, by the command line and by Python."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.errors import OutputError, StageError
from msa_lite.evals.engine import models
from msa_lite.evals.engine.models import Runner, load_model
from msa_lite.io.finished.seal import MANIFEST, load_manifest, verify_folder
from msa_lite.merger.mergekit.reader import read_recipe
from msa_lite.pipeline.verbs.run import run_vectors
from msa_lite.recipe import load_recipe
from msa_lite.strengths import Strengths
from msa_lite.train import settings as auto
from msa_lite.train.memory import model as trained
from tests.e2e.conftest import CallCli, hashes, read_lines, sweep_recipe, times, tiny_recipe, write_recipe
from tests.support.pages import page_text
from tests.support.processes import fork_cli


def made(run: Path) -> dict[str, str]:
    """Hashes of everything that a run made, but for what names paths or times, and what is hashed with a new key."""
    skip = ("recipe.yaml", "manifest.json", ".lock", "mergekit_config.yml", "record.json", "record.key")
    return {name: value for name, value in hashes(run, *skip).items() if name not in ("report.html", "report.json")}


@pytest.fixture(scope="module")
def whole(history: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """(recipe, folder) of a run by the command line, which tests look at and do not change."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = tiny_recipe(history, folder / "run")
    done = fork_cli(write_recipe(recipe, folder))
    assert done.returncode == 0, done.stderr
    assert "unlearned" in done.stdout
    return recipe, folder / "run"


def test_a_recipe_becomes_a_model_and_a_report(whole: tuple[dict[str, Any], Path], history: Path) -> None:
    _, run = whole
    scored = [f"evaluation/{name}" for name in ("target", "ideal", "unlearned")]
    for stage in ("vectors/forget", "vectors/retain", "model", *scored):
        assert verify_folder(run / stage) == []
    assert "extraction strength" in page_text(run)
    metrics = json.loads((run / "evaluation/unlearned/report.json").read_text())["metrics"]
    assert {"probability_f", "rouge_l_f", "extraction_strength", "exact_memorization", "accuracy_r"} <= set(metrics)
    assert set(metrics["probability_f"]) == {"value", "n", "stderr", "higher_is_better", "skipped", "note"}
    assert metrics["rouge_l_f"]["n"] == 8
    manifest = load_manifest(run / "model")
    assert manifest is not None
    assert (manifest["inputs"]["alpha"], manifest["inputs"]["beta"]) == (1.0, 0.5)
    # The resolved recipe repeats the run, and the rows of the retain sample are on record, as many as to forget.
    assert load_recipe(run / "recipe.yaml").points == [Strengths(1.0, 0.5)]
    rows = read_lines(run / "vectors/retain/rows.jsonl")
    assert len({row["index"] for row in rows}) == len((history / "data/forget.jsonl").read_text().splitlines()) == 18


def test_json_is_all_that_stands_on_stdout(whole: tuple[dict[str, Any], Path], call_cli: CallCli) -> None:
    status, stdout, _ = call_cli("run", whole[1] / "recipe.yaml", "--json")
    result = json.loads(stdout)
    assert (status, result["alpha"], result["beta"]) == (0, 1.0, 0.5)
    assert set(result["metrics"]) == {"target", "ideal", "unlearned"}


def test_a_second_run_does_nothing_and_a_changed_one_only_what_changed(
    whole: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    recipe = whole[0] | {"output": str(shutil.copytree(whole[1], tmp_path / "run"))}
    before = times(tmp_path / "run")
    labels: list[str] = []
    msa_lite.run(recipe, progress=lambda label, done, total: labels.append(label))
    assert labels == []
    assert times(tmp_path / "run") == before
    msa_lite.run(recipe, ["forget.alpha=0.5"], progress=lambda label, done, total: labels.append(label))
    assert set(labels) == {"merge", "scores: unlearned"}


def test_several_points_are_tried_on_validation_rows_and_scored_on_the_others(finished: Path) -> None:
    choice = json.loads((finished / "sweep/choice.json").read_text())
    assert choice["score"] == max(point["score"] for point in choice["scores"])
    assert len(choice["scores"]) == 2

    def rows(path: str) -> set[int]:
        return {row["index"] for row in read_lines(finished / path)}

    tried, tested = rows("sweep/alpha-0.5_beta-0/retain.jsonl"), rows("evaluation/unlearned/retain.jsonl")
    assert (len(tried), len(tested), tried & tested) == (2, 6, set())
    everything = rows("evaluation/unlearned/forget.jsonl")
    assert rows("sweep/alpha-0.5_beta-0/forget.jsonl") == everything, "the promise concerns each forget row"
    assert len(everything) == 8
    assert not list((finished / "sweep").rglob("*.safetensors"))


def test_no_retain_set_needs_no_retain_input_and_makes_a_choice_doubtful(
    recipe: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    del recipe["retain"]
    with caplog.at_level("WARNING", logger="msa_lite"):
        result = msa_lite.run(recipe, ["forget.alpha=[0.5,1.0]"])
    assert result.point.beta == 0
    assert not (result.folder / "vectors/retain").exists()
    assert "accuracy_r" not in result.reports["unlearned"].metrics
    assert "nothing shows what else was lost" in caplog.text
    assert "Doubt: there are no retain rows" in page_text(result.folder)


def test_a_disk_that_is_too_small_is_noticed_first(recipe: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1000))
    with pytest.raises(OutputError, match="are needed, 1 kB are free"):
        msa_lite.run(recipe)
    assert not (tmp_path / "run").exists()


def test_a_diverging_vector_stops_the_job_with_exit_code_4(
    recipe: dict[str, Any], tmp_path: Path, call_cli: CallCli
) -> None:
    status, _, stderr = call_cli(write_recipe(recipe, tmp_path), "vector.learning_rate=1e30", "vector.warmup_epochs=0")
    assert status == 4
    assert "Try a lower learning_rate" in stderr
    assert not list((tmp_path / "run/vectors").iterdir())


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["evalute={}"], 2, "evalute: unknown key (did you mean 'evaluate'?)"),
        (["forget.data.columns.answer=reply"], 3, "no column 'reply'; there are 'question', 'answer'"),
        (["vector.lora.targets=[q_porj]"], 2, "q_porj: the target has no such module (did you mean 'q_proj'?)"),
        (["vector.lora.targets=[q_proj,embed_tokens]"], 2, "embed_tokens: the target ties embedding and head"),
        (["vector.lora.targets=.*(q_proj|embed_tokens)"], 3, "embed_tokens.weight: the target ties embedding and head"),
    ],
)
def test_bad_input_is_caught_before_anything_is_written(
    overrides: list[str], code: int, words: str, recipe: dict[str, Any], tmp_path: Path, call_cli: CallCli
) -> None:
    path = write_recipe(recipe, tmp_path)
    # A vector that no merge could take is refused by whatever looks ahead.
    for command in (["run"], ["plan"], ["run", "--dry-run"]) if words.startswith("embed_tokens.weight") else (["run"],):
        status, stdout, stderr = call_cli(*command, path, *overrides)
        assert (status, stdout) == (code, ""), command
        assert words in stderr
        assert "Traceback" not in stderr
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_is_edited_while_its_run_works_is_not_sealed(recipe: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run/recipe.yaml"

    def edit(label: str, done: int, total: int) -> None:
        if label == "merge" and done == total:
            path.write_text(path.read_text().replace("rank: 2", "rank: 8"))

    with pytest.raises(StageError, match=r"recipe\.yaml: was changed"):
        msa_lite.run(recipe | {"output": str(path.parent), "evaluate": None}, progress=edit)
    assert not (path.parent / "record.json").exists()


# A recipe's result in its other forms: as one adapter, and as a recipe for mergekit.


def test_a_recipe_can_end_in_one_adapter_that_scores_as_the_model_does(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["evaluate"].pop("ideal")
    whole = msa_lite.run(recipe | {"output": str(tmp_path / "whole"), "merge": {"dtype": "float32"}})
    light = msa_lite.run(recipe | {"output": str(tmp_path / "light"), "merge": {"as": "adapter"}})
    assert verify_folder(tmp_path / "light" / "adapter") == []
    assert not (tmp_path / "light" / "model").exists()
    assert "Rank of the adapter" in page_text(tmp_path / "light")
    scores, expected = light.reports["unlearned"].values(), whole.reports["unlearned"].values()
    assert {name: value for name, value in expected.items() if value is not None} == pytest.approx(
        {name: value for name, value in scores.items() if value is not None}, abs=1e-4, rel=1e-4
    )


def test_a_runs_merge_is_printed_for_mergekit_once_its_vectors_are_there(
    recipe: dict[str, Any], tmp_path: Path, call_cli: CallCli
) -> None:
    path = write_recipe(recipe, tmp_path)
    status, stdout, stderr = call_cli("mergekit", path)
    assert (status, stdout) == (2, "")
    assert "not fitted yet; `msa-lite run RECIPE --until vectors`" in stderr
    run_vectors(path)
    status, stdout, stderr = call_cli("mergekit", path)
    assert status == 0, stderr
    (tmp_path / "merge.yml").write_text(stdout)
    request = read_recipe(tmp_path / "merge.yml")
    assert {term.name: (str(term.vector), term.weight) for term in request.terms} == {
        "forget": (str(tmp_path / "run/vectors/forget"), -1.0),
        "retain": (str(tmp_path / "run/vectors/retain"), 0.5),
    }
    status, stdout, stderr = call_cli(
        "merge", "--mergekit", tmp_path / "merge.yml", "--out", tmp_path / "out", "--json"
    )
    assert status == 0, stderr
    assert json.loads(stdout)["weights_changed"] > 0
    status, _, stderr = call_cli("mergekit", path, "--alpha", "2")
    assert (status, "already says --alpha" in stderr) == (2, True)


# One model at a time: whenever a run loads a model, the memory of all earlier ones is free again.


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each model that was loaded, how many earlier ones were still in memory."""
    counts: list[int] = []
    references: list[weakref.ref[Any]] = []
    load = models.load_whole

    def count(folder: Path, **how: Any) -> Any:
        counts.append(sum(reference() is not None for reference in references))
        model = load(folder, **how)
        references.append(weakref.ref(model))
        return model

    for module in (models, trained):
        monkeypatch.setattr(module, "load_whole", count)
    return counts


def sweep_small(learnt: Path, output: Path) -> dict[str, Any]:
    """A recipe whose fits go on until the target's loss, which is measured first; two gentle points."""
    recipe = sweep_recipe(learnt, output)
    recipe["forget"]["alpha"] = [0.25]
    recipe["vector"] |= {"epochs": "auto", "learning_rate": 1e-3}
    return recipe


def test_a_run_holds_one_model_at_a_time(
    learnt: Path, tmp_path: Path, beside: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_MOST_PASSES", 5)
    assert msa_lite.run(sweep_small(learnt, tmp_path / "run")) is not None
    assert beside == [0] * len(beside)
    assert len(beside) >= 10  # to compare with, each vector's goal and fit, points, the merged one, test rows


def test_a_scored_model_goes_when_it_is_closed(make_checkpoint: Callable[..., Path]) -> None:
    runner = Runner(load_model(make_checkpoint("llama")))
    scored = weakref.ref(runner.model)
    assert runner.halves
    runner.close()
    assert scored() is None


def flipped(raw: bytes) -> bytes:
    """Return the bytes with one bit flipped; of text, in a digit, so that it stays JSON."""
    digits = [place for place, byte in enumerate(raw) if byte in b"024"] if b"\0" not in raw else []
    at = digits[len(digits) // 2] if digits else len(raw) * 3 // 5
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": flipped,
    "zeros": lambda raw: bytes(len(raw)),
    "cut and filled up": lambda raw: raw[: len(raw) // 2].ljust(len(raw)),
    "exchanged halves": lambda raw: raw[len(raw) // 2 :] + raw[: len(raw) // 2],
}


def damage(path: Path, how: Callable[[bytes], bytes]) -> None:
    """Change a file's content, but neither its size nor its time."""
    raw, status = path.read_bytes(), path.stat()
    assert how(raw) != raw
    path.write_bytes(how(raw))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("first", [0, 1])
def test_damage_of_any_stage_is_made_anew_and_the_run_ends_as_it_was(
    finished: Path, tmp_path: Path, call_cli: CallCli, first: int
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    stages = [path.parent for path in sorted(run.rglob(MANIFEST)) if "baselines" not in path.parts]
    assert len(stages) > 12
    damaged = []
    for number, stage in enumerate(stages):
        names = sorted((load_manifest(stage) or {})["files"].keys() - {"README.md", "mergekit_config.yml"})
        damaged.append(stage / names[(first + number) % len(names)])
        damage(damaged[-1], [*DAMAGES.values()][(2 * first + number) % len(DAMAGES)])
    code, _, err = call_cli("run", run / "recipe.yaml", f"output={run}")
    assert code == 0, err
    told = " ".join(err.split())
    reason = "made anew, because it is not as it was written"
    assert [stage for stage in stages if f"{stage}: {reason}" not in told] == []
    assert made(run) == made(finished)
    assert call_cli("verify", run)[0] == 0


FORGET = "evaluation/unlearned/forget.jsonl"


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("compare RUN", "evaluation/target/report.json"),
        ("compare RUN", "evidence/says/report.json"),
        ("attack RUN --attacks membership", "model/model.safetensors"),
        ("attack RUN --attacks membership", "sweep/choice.json"),
        ("ask RUN Who?", "model/model.safetensors"),
        ("ask RUN Who?", FORGET),
        ("web RUN --port 0", "model/tokenizer.json"),
        ("publish RUN/model a/b --dry-run --accept", "model/model.safetensors"),
        ("merge --target TARGET --forget RUN/vectors/forget --out RUN/x", "vectors/forget/adapter_model.safetensors"),
        ("evaluate RUN/model --forget ROWS --out RUN/x", "model/model.safetensors"),
        ("evaluate TARGET --forget ROWS --ideal RUN/evaluation/ideal --out RUN/x", "evaluation/ideal/forget.jsonl"),
    ],
)
def test_a_command_that_reads_refuses_what_is_not_as_it_was_written(
    finished: Path, history: Path, tmp_path: Path, call_cli: CallCli, words: str, file: str
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    damage(run / file, flipped)
    places = {"RUN": run, "TARGET": history / "target", "ROWS": history / "data/forget.jsonl"}
    for name, place in places.items():
        words = words.replace(name, str(place))
    code, _, err = call_cli(*words.split())
    assert code == 3, err
    assert Path(file).name in err
    assert not (run / "x").exists()
