"""Each setting of a recipe gets to the library that it is for: all of them unlike their defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers

import msa_lite
from msa_lite.pipeline.staged.prepare import prepare_training
from msa_lite.pipeline.verbs.run import run_vectors
from msa_lite.recipe import load_training
from msa_lite.recipe.training import Lora, RetainVector, Training, VectorSpec
from msa_lite.train import FitSettings, Until
from msa_lite.train.fit import loop as trainer
from msa_lite.train.fit import vector as fit

pytestmark = pytest.mark.usefixtures("quick_fits")

SEED = 11
LORA = {"rank": 3, "alpha": 5.0, "dropout": 0.25, "targets": ["q_proj", "up_proj"]}
# 18 rows in batches of 6: three steps an epoch.
VECTOR = {
    "mode": "lora",
    "lora": LORA,
    "epochs": 7,
    "learning_rate": 3e-3,
    "weight_decay": 0.07,
    "warmup_epochs": 1.25,
    "batch_size": 6,
    "micro_batch_size": 2,
    "max_length": 72,
    "optimizer": "adamw",
    "compute": "fp32",
}
ARGUMENTS = {
    "num_train_epochs": 7,
    "learning_rate": 3e-3,
    "weight_decay": 0.07,
    "warmup_steps": 3,  # of 3.75, rounded down
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 6,  # which the objective divides
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "seed": SEED,
}


class Stop(BaseException):
    """Ends a fit where the training would begin."""


@dataclass
class Calls:
    """What the libraries were given: keywords by class, seeds, and the settings and rows of each fit."""

    made: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    micros: list[int] = field(default_factory=list)
    fits: list[tuple[FitSettings, int, Any]] = field(default_factory=list)

    def of(self, name: str, wanted: dict[str, Any]) -> dict[str, Any]:
        """The keywords of the one object of a class that was made, as far as something is wanted of them."""
        (given,) = self.made[name]
        return {key: given[key] for key in wanted}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    noted = Calls()

    def watch(module: Any, name: str) -> None:
        own = getattr(module, name)

        def init(self: Any, *args: Any, **keywords: Any) -> None:
            noted.made.setdefault(name, []).append(keywords)
            own.__init__(self, *args, **keywords)

        monkeypatch.setattr(module, name, type(name, (own,), {"__init__": init}))

    # The check before the work puts an adapter on a model without weights.
    monkeypatch.setattr("msa_lite.pipeline.prepare.models.check_fit", lambda *_: None)
    watch(peft, "LoraConfig")
    watch(transformers, "TrainingArguments")

    def loop(made: trainer.VectorFit, *arguments: Any) -> trainer.Loop:
        noted.fits.append((made.settings, max(len(e.ids) for e in made.examples), made.until))
        return trainer.Loop(made, *arguments)

    def train(*args: Any, **keywords: Any) -> None:
        raise Stop

    make = trainer.make_trainer

    def make_trainer(*arguments: Any, **options: Any) -> Any:
        noted.micros.append(arguments[4])
        return make(*arguments, **options)

    monkeypatch.setattr(trainer, "make_trainer", make_trainer)
    monkeypatch.setattr(fit, "Loop", loop)
    monkeypatch.setattr(transformers, "set_seed", noted.seeds.append)
    monkeypatch.setattr(transformers.Trainer, "train", train)
    return noted


def stopped(run: Callable[..., Any], *given: Any) -> None:
    with pytest.raises(Stop):
        run(*given)


def test_here_nothing_is_at_its_default() -> None:
    of_forgetting = {"hold", "start"}  # test_held, test_priors
    assert {*VECTOR, "mode"} | of_forgetting == VectorSpec.model_fields.keys()
    assert LORA.keys() == Lora.model_fields.keys()
    usual = VectorSpec().model_dump()
    assert [key for key, value in VECTOR.items() if value == usual[key] and key != "mode"] == []
    assert [key for key, value in LORA.items() if value == usual["lora"][key]] == []
    trained = {key: value for key, value in VECTOR.items() if key in Training.model_fields}
    assert {*trained, "schedule"} == Training.model_fields.keys()
    assert [key for key, value in trained.items() if value == Training().model_dump()[key]] == []
    # What a fit can be told, and which of the recipe's settings, here or below, says it.
    said = {"mode", "epochs", "learning_rate", "weight_decay", "warmup_epochs", "batch_size", "micro_batch_size"}
    said |= {"optimizer", "compute"} | {f"lora_{key}" for key in LORA} | {"seed", "schedule", "warmup_steps"}
    assert said == {one.name for one in fields(FitSettings)}


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_vectors_settings_reach_peft_and_the_trainer(mode: str, recipe: dict[str, Any], calls: Calls) -> None:
    stopped(run_vectors, recipe | {"vector": VECTOR | {"mode": mode}, "seed": SEED})
    assert calls.of("TrainingArguments", ARGUMENTS) == ARGUMENTS
    assert (calls.seeds, calls.micros) == ([SEED], [2])
    if mode == "full":
        assert "LoraConfig" not in calls.made
        return
    wanted = {"r": 3, "lora_alpha": 5.0, "lora_dropout": 0.25, "target_modules": ["q_proj", "up_proj"]}
    assert calls.of("LoraConfig", wanted) == wanted
    ((_, longest, until),) = calls.fits
    assert (longest, until) == (72, None)


def test_the_retain_vectors_own_settings_reach_the_trainer(recipe: dict[str, Any], calls: Calls) -> None:
    own = {"epochs": 4, "learning_rate": 2e-3, "weight_decay": 0.03, "warmup_epochs": 0.5, "batch_size": 8}
    assert {*own} == RetainVector.model_fields.keys()
    recipe = recipe | {"retain": recipe["retain"] | {"vector": own}, "vector": VECTOR, "seed": SEED}
    stopped(run_vectors, recipe, ["forget.alpha=0"])
    wanted = ARGUMENTS | {"num_train_epochs": 4, "learning_rate": 2e-3, "weight_decay": 0.03}
    wanted |= {"per_device_train_batch_size": 8, "warmup_steps": 1}  # of three steps an epoch, half
    assert calls.of("TrainingArguments", wanted) == wanted
    assert calls.micros == [2]


def test_what_is_left_to_an_open_ended_fit_reaches_the_trainer(
    recipe: dict[str, Any], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msa_lite.train.fit.until.measure_target", lambda *given: 0.1)
    monkeypatch.setattr("msa_lite.train.fit.until.measure_loss", lambda *given: 9.0)
    stopped(run_vectors, recipe | {"vector": {}, "seed": SEED})
    wanted = {"num_train_epochs": 60, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4, "seed": SEED}
    wanted |= {"per_device_train_batch_size": 4, "weight_decay": 0.01}
    assert calls.of("TrainingArguments", wanted) == wanted
    ((settings, _, until),) = calls.fits
    assert isinstance(until, Until)
    assert calls.made["TrainingArguments"][0]["learning_rate"] == settings.learning_rate
    assert calls.of("LoraConfig", {"r", "lora_alpha", "lora_dropout"}) == {"r": 32, "lora_alpha": 64, "lora_dropout": 0}


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("start", ["target", "prior"])
def test_a_baselines_own_settings_reach_the_trainer(
    mode: str, start: str, recipe: dict[str, Any], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    own = msa_lite.pipeline.baseline.trials.draw_answers
    monkeypatch.setattr(
        "msa_lite.pipeline.baseline.trials.draw_answers",
        lambda count, seed, *more: drawn.append(seed) or own(count, seed, *more),
    )
    asked = {"start": start, "epochs": 6, "learning_rate": 4e-3}
    changes = {"vector": VECTOR | {"mode": mode}, "baseline": asked, "evaluate": None, "seed": SEED}
    stopped(msa_lite.run_baseline, "dpo", recipe | changes)
    wanted = ARGUMENTS | {"num_train_epochs": 6, "learning_rate": 4e-3}
    assert calls.of("TrainingArguments", wanted) == wanted
    assert set(drawn) == set(calls.seeds) == {SEED}
    assert calls.micros == [2]
    assert len(calls.made.get("LoraConfig", [])) == (mode == "lora")


def test_each_stage_of_a_training_has_its_own_settings(history: Path, calls: Calls, tmp_path: Path) -> None:
    tuning = {key: value for key, value in VECTOR.items() if key in Training.model_fields} | {"schedule": "constant"}
    stage = {"data": {"path": str(history / "data/forget.jsonl")}}
    recipe: dict[str, Any] = {
        "model": str(history / "prior"),
        "stages": [{**stage, **tuning}],
        "output": str(tmp_path / "models"),
    }
    stopped(msa_lite.train_stages, recipe | {"seed": SEED})
    wanted = ARGUMENTS | {"lr_scheduler_type": "constant_with_warmup"}
    assert calls.of("TrainingArguments", wanted) == wanted
    assert "LoraConfig" not in calls.made
    assert (calls.seeds, calls.fits[0][1], calls.micros) == ([SEED], 72, [2])
    assert calls.fits[0][0].compute == "fp32"
    again = load_training(recipe | {"stages": recipe["stages"] * 3, "seed": SEED})
    job = prepare_training(again)  # equally many rows are shuffled alike by one seed
    assert [one.settings.seed for one in job.stages] == [SEED, SEED + 1, SEED + 2]


def test_defaults_are_those_of_the_paper() -> None:
    """MSA paper, App. "Obtaining Forget and Retain Vectors"; all weights are trained at 1e-5."""
    found = FitSettings()
    assert (found.lora_rank, found.lora_alpha, found.lora_dropout, found.lora_targets) == (32, 64, 0.0, "all-linear")
    assert (found.epochs, found.learning_rate, found.weight_decay, found.warmup_epochs) == (5, 2e-4, 0.01, 1.0)
    assert (found.batch_size, found.schedule, found.seed, found.warmup_steps) == (32, "linear", 0, None)
    trained = Training()
    assert (trained.epochs, trained.learning_rate, trained.weight_decay, trained.warmup_epochs) == (5, 1e-5, 0.01, 1.0)
    assert (trained.batch_size, trained.schedule, trained.max_length) == (32, "linear", 512)
    assert (VectorSpec().weight_decay, VectorSpec().max_length, VectorSpec().mode) == (0.01, 512, "lora")
    assert (Lora().rank, Lora().alpha, Lora().dropout, Lora().targets) == (32, 64, 0.0, "all-linear")
