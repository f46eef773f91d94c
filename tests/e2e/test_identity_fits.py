"""Every option of a recipe that decides a baseline's fit, or a stage of a training, is part of what it is known by."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from msa_lite.io.files.writing import canonical_json
from msa_lite.pipeline.baseline import trials
from msa_lite.pipeline.run import vectors
from msa_lite.pipeline.staged import training
from msa_lite.pipeline.staged.training import train_stages
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.pipeline.verbs.run import run_baseline
from msa_lite.recipe import TrainingRecipe
from msa_lite.recipe.training import Baseline, Training, TrainingStage
from msa_lite.report import Report, write_report
from msa_lite.train import VectorFit
from msa_lite.train.fit import tracking
from tests.support.identity import DATA, OF_TEXT, UNSAID, base, changed, fill, leaves, tables_once, write_place

__all__ = ["tables_once"]  # a fixture


class Stop(BaseException):
    """Ends a run once the inputs of a fit are known."""


@pytest.fixture(scope="module")
def place(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_place(tmp_path_factory.mktemp("recipes"), make_checkpoint)
    template = shutil.copytree(folder / "target", folder / "tokenizer") / "chat_template.jinja"
    template.write_text("{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}{% endfor %}")
    return folder


PLAIN = {"prompt.kind": "plain"}
# Baselines

BASELINE: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "baseline.start": ("npo", "prior", {}),
    "baseline.epochs": ("npo", 3, {}),
    "baseline.learning_rate": ("npo", 3e-3, {}),
    "baseline.methods": ("npo", {"npo": {"beta": 0.3}}, {}),
    "seed": ("npo", 1, {}),
    "vector.weight_decay": ("npo", 0.07, {}),
    "retain.data.path": ("npo", "OTHER", {}),
    "select.keep": ("npo", 0.5, {}),
    "select.validation": ("npo", 0.5, {}),
    "request": ("npo", "A 1", {}),  # decides nothing
}


# Candidates' values, which are in the identity of the choice.
OF_NO_FIT = {"scale"}


def test_every_option_of_a_baseline_is_here() -> None:
    assert {f"baseline.{name}" for name in leaves(Baseline) - OF_NO_FIT} == {n for n in BASELINE if "baseline." in n}


def only_fits(stages: Sequence[Stage], progress: Any, *_: Any) -> None:
    for stage in stages:
        if stage.kind == "fit":
            stage.run(progress)


@pytest.mark.parametrize("option", BASELINE)
def test_an_option_decides_a_baselines_fit(
    option: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(Report("qa", "validation", {}), tmp_path)
    found: list[str] = []

    def fit(fit: VectorFit, out: Path, progress: Any) -> None:
        found.append(canonical_json([fit.inputs()]))
        raise Stop

    monkeypatch.setattr(vectors, "run_fit", fit)
    monkeypatch.setattr("msa_lite.pipeline.verbs.run.execute", only_fits)
    monkeypatch.setattr(trials, "scores_folder", lambda *given: tmp_path)
    method, value, others = BASELINE[option]
    lists = {"forget.alpha": 1.0, "retain.beta": 0.5, "output": str(tmp_path / "run")}
    before = changed(base(place), lists | fill(others, place), place)
    for recipe in (before, changed(before, fill({option: value}, place), place)):
        with pytest.raises(Stop):
            run_baseline(method, recipe)
    assert (found[0] == found[1]) is (option == "request")


# Trainings in stages

LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
NEW = {"model": {"config": LLAMA, "tokenizer": "{place}/target"}}
OWN_TOKENIZER = {"model": {"config": LLAMA, "tokenizer": {"vocabulary": 320}}}
# Of what a fit is told; test_identity and test_settings_reach follow every setting.
TUNED = {"epochs": 3, "max_length": 60, "schedule": "constant"}
TEXT = {"stages.0.data.format": "text", "training.max_length": 60}
# As above; an option of a stage stands behind `stages.0`.
TRAINING: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"{part}.{name}": (value, {}) for part in ("training", "stages.0") for name, value in TUNED.items()},
    **{f"stages.0.data.{name}": (DATA[name], {"training.max_length": 200}) for name in ("path", "columns.question")},
    "stages.0.tokens": (40, TEXT),
    "model": ("{place}/other", {}),
    "model.config": (LLAMA | {"hidden_size": 32}, NEW),
    "model.tokenizer": ("{place}/tokenizer", NEW),
    "model.tokenizer.vocabulary": (310, OWN_TOKENIZER),
    "columns.question": ("question2", {}),
    "columns.answer": ("answer2", {}),
    "columns.messages": ("messages", {}),
    "columns.text": ("text2", TEXT),
    "prompt.kind": ("plain", {}),
    "prompt.system": ("Be kind.", {}),
    "prompt.prompt": ("Q: {question}\nA:", PLAIN),
    "prompt.answer": (" - {answer}", PLAIN),
    "seed": (1, NEW),  # that of a stage: test_settings_reach
}
OF_NO_STAGE = {
    "output": "elsewhere", "stages.0.name": "known", "track": "tensorboard",
    "prompt.thinking": "template",  # where a template has no block of thoughts; else: test_answer_ends
}  # fmt: skip


def test_every_option_of_a_training_is_here() -> None:
    every = leaves(TrainingRecipe) - {"stages"} | leaves(TrainingStage, "stages.0.")
    every -= {f"{part}.{name}" for part in ("training", "stages.0") for name in Training.model_fields}
    left = {f"stages.0.data.{name}" for name in {*UNSAID, *DATA, *OF_TEXT}} - {*TRAINING}
    assert every - {*TRAINING, *OF_NO_STAGE} == {"columns.subject", *left}


@pytest.mark.parametrize("option", [*TRAINING, *OF_NO_STAGE])
def test_an_option_decides_a_stage_of_a_training(
    option: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def is_finished(folder: Path, inputs: dict[str, Any]) -> bool:
        found.append(canonical_json(inputs))
        raise Stop

    monkeypatch.setattr(training, "is_finished", is_finished)
    monkeypatch.setattr(tracking, "find_spec", lambda name: True)
    data = base(place)["forget"]["data"]
    recipe = {"model": str(place / "target"), "stages": [{"data": data}], "output": str(tmp_path / "models")}
    monkeypatch.chdir(tmp_path)
    value, more = TRAINING.get(option) or (OF_NO_STAGE[option], {})
    before = changed(recipe, fill(more, place), place)
    for one in (before, changed(before, fill({option: value}, place), place)):
        with pytest.raises(Stop):
            train_stages(one)
    assert (found[0] == found[1]) is (option in OF_NO_STAGE)
