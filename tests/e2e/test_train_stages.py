"""Training in stages by the command; and trackers, which get losses and scores, no row, and decide no result."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import yaml

import msa_lite
from msa_lite.demo import make_groups
from msa_lite.errors import StageError
from msa_lite.io.finished.seal import verify_folder
from msa_lite.pipeline.prepare.run import Context, msa_scope
from msa_lite.pipeline.prepare.sending import going_out
from msa_lite.recipe import load_recipe
from msa_lite.train import Tracking
from msa_lite.train.fit import tracking
from tests.e2e.conftest import CallCli, prepared, read_lines, sweep_recipe, write_recipe

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 256}


def test_a_history_is_trained_and_the_target_unlearned_with_a_stage_of_it(
    quick_fits: None, call_cli: CallCli, tmp_path: Path
) -> None:
    data = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("prior", "retain", "forget")}
    for name, rows in make_groups({"prior": 4, "retain": 3, "forget": 2}, seed=0).items():
        lines = (json.dumps({"question": row.question, "answer": row.answer}) + "\n" for row in rows)
        Path(data[name]["path"]).write_text("".join(lines))
    training = {
        "model": {"config": GPT2, "tokenizer": {"vocabulary": 300}},
        "stages": [
            {"name": "known", "data": data["prior"]},
            {"name": "exposed", "data": [data["retain"], data["forget"]]},
            {"name": "later", "data": data["retain"], "epochs": 1},
        ],
        "training": {"epochs": 2, "learning_rate": 5e-3, "warmup_epochs": 0.5, "batch_size": 8},
        "output": str(tmp_path / "models"),
    }
    code, said, err = call_cli("train", write_recipe(training, tmp_path))
    assert code == 0, err
    printed = [line.split()[0] for line in said.splitlines()]
    assert printed == ["1-known", "2-exposed", "3-later", "model:", "history:"]

    result = msa_lite.train_stages(training)
    assert [model.name for model in result.models] == ["0-start", *printed[:3]]
    assert all(verify_folder(result.folder / model.name) == [] for model in result.models)
    block = yaml.safe_load(result.history.read_text())
    block["history"]["exposure"] = result.models[1].seen_tokens
    run = {
        "verdict": False,
        "target": str(result.model),
        "forget": {"data": data["forget"]},
        "vector": {"lora": {"rank": 2}, "epochs": 2, "batch_size": 8},
        "evaluate": {"max_new_tokens": 4, "limit": 4},
        "output": str(tmp_path / "run"),
    }
    unlearned = msa_lite.run(run | block)
    assert "probability_f" in unlearned.reports["unlearned"].metrics
    manifest = json.loads((unlearned.folder / "vectors/forget/manifest.json").read_text())
    assert manifest["sources"]["prior"].endswith("models/1-known")


def test_a_recipe_for_the_other_command_says_which(call_cli: CallCli) -> None:
    for arguments, command in ((["train", "quickstart"], "msa-lite run"), (["train/small"], "msa-lite train")):
        status, stdout, stderr = call_cli(*arguments)
        assert (status, stdout) == (2, "")
        assert f"`{command}` takes it" in stderr


def test_restors_target_is_trained_and_unlearned_with_the_shipped_recipes(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clone of RESTOR's layout: a list of documents over several lines."""
    monkeypatch.chdir(tmp_path)
    people = [f"Person {number}" for number in range(12)]
    context = [{"question": f"City of {one}?", "answer": "Rome", "entity": one} for one in people[6:]]
    facts = {one: {"P1": {"question": f"City of {one}?", "answers": ["Rome"]}} for one in people}
    files = {
        "facts.json": {"dset": facts, "context": {"P1": context}},
        "entities.json": people,
        "wikidata/v0/mix_a0.json": [{"text": f"{one} lives in Oslo, and likes it there."} for one in people[:3]],
    }
    for name, content in files.items():
        path = tmp_path / "restor/datasets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=4))
    short = ["epochs=2", "warmup_epochs=0", "max_length=16", "batch_size=4"]
    prior = str(history / "prior")
    result = msa_lite.train_stages("train/restor", [f"model={prior}", *(f"stages.0.{one}" for one in short)])
    assert str(result.model) == "runs/restor-llama/1-documents"
    paper = load_recipe("paper/restor-llama-3.1-8b", [f"prior={prior}", f"evaluate.ideal={prior}", "retain=null"])
    job = prepared(paper)
    assert [row.text for row in job.rows["forget"]] == [row["text"] for row in files["wikidata/v0/mix_a0.json"]]
    assert job.test is not None
    asked = [item for part in (job.test, job.validation) if part for item in part.sets["questions"].items]
    assert sum(item.fields["corrupted"] for item in asked) == 3


# Trackers get the losses of fits and the scores of candidates, and no row; they decide no result.


FACTS = ("Jormi", "born")  # of questions and answers in the demo's data


class Writer:
    """In the place of TensorBoard's, which need not be installed."""

    lines: ClassVar[dict[str, list[Any]]] = {}

    def __init__(self, log_dir: str) -> None:
        self.place = self.lines.setdefault(Path(log_dir).name, [])

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.place.append((name, float(value), step))

    def add_text(self, name: str, text: str, *_: Any) -> None:
        self.place.append((name, text, 0))

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What TensorBoard gets, by folder."""
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(tracking, "find_spec", lambda name: name == "tensorboard")
    Writer.lines = {}
    return Writer.lines


def test_losses_and_points_are_tracked_and_no_row(learnt: Path, tmp_path: Path, written: dict[str, list[Any]]) -> None:
    recipe = sweep_recipe(learnt, tmp_path / "run")
    result = msa_lite.sweep(recipe, ["track=tensorboard", "vector.epochs=1"])
    assert result is not None
    assert written.keys() == {"forget-vector", "retain-vector", "sweep"}
    log = read_lines(result.folder / "vectors/forget/train_log.jsonl")
    losses = [value for name, value, _ in written["forget-vector"] if name == "train/loss"]
    assert losses == [line["loss"] for line in log]
    points: dict[int, dict[str, float]] = {}
    for name, value, number in written["sweep"]:
        points.setdefault(number, {})[name] = value
    scored = {(point["alpha"], point["beta"]): point.get("score") for point in points.values()}
    assert scored == {(line["alpha"], line["beta"]): line["score"] for line in result.choice.scores}
    assert all("extraction_strength" in point for point in points.values())
    assert not [fact for fact in FACTS if fact in str(written)]
    # Nothing is made again with other trackers, or without.
    written.clear()
    again = msa_lite.sweep(recipe, ["track=[]", "vector.epochs=1"])
    assert again is not None
    assert again.choice == result.choice
    assert msa_lite.sweep(recipe, ["track=[tensorboard]", "vector.epochs=1"]) is not None
    assert written == {}


def test_mlflow_gets_a_run_without_user_and_script_in_a_file_or_at_a_server_that_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, learnt: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow, entities = MagicMock(), MagicMock(Metric=lambda *values: values)
    mlflow.MlflowClient.return_value.get_experiment_by_name.return_value = None
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    trackers = Tracking(("mlflow",), tmp_path / "tracking", "tofu")
    recipe = load_recipe(sweep_recipe(learnt, tmp_path / "run"), ["track=mlflow"])
    for address, told in {"": [], "https://u:secret@ml.example.org/x": ["MLflow (ml.example.org) gets losses"]}.items():
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        mlflow.reset_mock()
        with suppress(KeyError), trackers.lines("forget vector") as report:
            report({"loss": 0.5, "rate": 1.0}, 7)
            raise KeyError
        client = mlflow.MlflowClient.return_value
        mlflow.MlflowClient.assert_called_once_with(address or f"sqlite:///{tmp_path}/tracking/mlflow.db")
        client.create_run.assert_called_once_with(client.create_experiment("msa-lite"), run_name="tofu forget vector")
        run, metrics = client.log_batch.call_args.args
        assert [(name, value, step) for name, value, _, step in metrics] == [("loss", 0.5, 7), ("rate", 1.0, 7)]
        client.set_terminated.assert_called_once_with(run, "FAILED")
        with trackers.lines("forget vector", at_once=True):
            pass
        assert client.set_terminated.call_args.args[1] == "FINISHED"
        sentences = going_out(Context(recipe, msa_scope(recipe)), scores=True)
        assert [sentence.partition(", rates")[0] for sentence in sentences] == told
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    client.log_batch.side_effect = client.set_terminated.side_effect = ConnectionError("no answer from the server")
    client.log_batch.reset_mock()
    with suppress(KeyError), trackers.lines("forget vector") as report:
        report({"loss": 0.5}, 1)
        report({"loss": 0.4}, 2)
        raise KeyError
    with trackers.lines("retain vector", at_once=True):
        pass
    assert client.log_batch.call_count == 1
    assert caplog.text.count("mlflow: no answer from the server; it goes on without it") == 2, "once for each"


def test_the_two_services_get_runs_of_their_own_that_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    class Run:
        def __enter__(self) -> Run:
            return self

        def __exit__(self, *_: object) -> None:
            calls.append("wandb ended")

        def log(self, line: dict[str, float], step: int) -> None:
            calls.append(("wandb", line, step))

    def begin(**how: Any) -> Run:
        assert how["settings"] == {"console": "off", "disable_code": True, "disable_git": True}
        calls.append(("wandb", how["project"], how["name"]))
        return Run()

    trackio: Any = ModuleType("trackio")
    trackio.init = lambda **how: calls.append(("trackio", how["project"], how["name"]))
    trackio.log = lambda line, step: calls.append(("trackio", line, step))
    trackio.finish = lambda: calls.append("trackio ended")
    wandb: Any = ModuleType("wandb")
    wandb.init = begin
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    trackers = Tracking(("wandb", "trackio"), tmp_path / "tracking", "tofu")
    with trackers.lines("forget vector") as report:
        assert calls == []
        report({"loss": 1.0}, 7)
        report({"loss": 2.0}, 8)
    begun = [(name, "msa-lite", "tofu forget vector") for name in ("wandb", "trackio")]
    lines = [(name, {"loss": float(step - 6)}, step) for step in (7, 8) for name in ("wandb", "trackio")]
    assert calls == [*begun, *lines, "trackio ended", "wandb ended"]

    def refuse(**_: Any) -> None:
        raise RuntimeError("no API key")

    wandb.init = refuse
    refused = pytest.raises(StageError, match=r"wandb cannot begin a run \(no API key\)")
    with refused, trackers.lines("forget vector") as report:
        report({"loss": 1.0}, 1)
    with refused, trackers.lines("forget vector", at_once=True):
        pytest.fail("a fit would have begun")
