"""Training in stages: targets, ideals and the checkpoints before them, each stage a fit of all weights.

A stage is known by the model that it goes on from, its rows and its settings. One whose folder was made from the same
is not trained again; one that changed is, and so are those after it.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from msa_lite.errors import MsaError
from msa_lite.io.disk import check_space
from msa_lite.io.extras import require
from msa_lite.io.files import digest, write_json, write_text
from msa_lite.io.hub import Source, fetch
from msa_lite.io.lock import locked
from msa_lite.io.manifest import is_finished
from msa_lite.io.progress import Progress, Step, announce, silent
from msa_lite.io.seal import load_manifest
from msa_lite.pipeline.folder import check_run_folder
from msa_lite.pipeline.prepare_training import ReadyStage, TrainingRun, prepare_training
from msa_lite.recipe import TrainingRecipe, dump_recipe, load_training
from msa_lite.train import fit_inputs, fit_vector
from msa_lite.train.scratch import write_start

logger = logging.getLogger(__name__)

START_FOLDER = "0-start"  # the folder of a model from nothing
_STATE = "stages.json"
_HEADER = "# A training of msa-lite: the recipe as resolved. `msa-lite train` on this file repeats it.\n"
_HISTORY = """\
# The checkpoints of this training, for a recipe, in the place of its `prior`. seen_tokens: all that was read since the
# start, every epoch of it, prompts and special tokens included, padding not.
# exposure is yours to name: what had been seen when the stage began that first had the data to forget.
"""


@dataclass(frozen=True)
class TrainedModel:
    """A model of a training. name: of its folder; inputs: a hash of what it was made from; revision: of its content.

    rows, tokens: of one epoch of its stage; seen_tokens: all since the start, in the model's own stage too. loss: mean
    of the last epoch.
    """

    name: str
    inputs: str
    revision: str
    rows: int = 0
    tokens: int = 0
    seen_tokens: int = 0
    loss: float | None = None


@dataclass(frozen=True)
class TrainingResult:
    """What a training made. models: in their order, a new start model first; those not kept are named all the same."""

    folder: Path
    models: list[TrainedModel]

    @property
    def model(self) -> Path:
        """The folder of the last model."""
        return self.folder / self.models[-1].name

    @property
    def history(self) -> Path:
        """The file with the `history:` block."""
        return self.folder / "history.yaml"

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, for `--json`."""
        stages = [
            {"folder": str(folder) if (folder := self.folder / model.name).is_dir() else None} | asdict(model)
            for model in self.models
        ]
        return {
            "output": str(self.folder),
            "model": str(self.model),
            "history": str(self.history),
            "stages": [{key: value for key, value in stage.items() if key != "inputs"} for stage in stages],
        }


def train_stages(
    recipe: TrainingRecipe | str | Path | Mapping[str, Any], overrides: Iterable[str] = (), progress: Progress = silent
) -> TrainingResult:
    """Train the stages of a recipe, one after the other, and return what was made.

    recipe: a TrainingRecipe, a file, the name of a shipped recipe, or a mapping. Raises before any training when the
    recipe or its inputs are at fault; later errors leave finished stages in place and a rerun resumes.
    """
    require("train")
    recipe = recipe if isinstance(recipe, TrainingRecipe) else load_training(recipe, overrides)
    folder = Path(recipe.output).expanduser()
    check_run_folder(folder, _HEADER)
    is_new = not folder.exists()
    with locked(folder):
        try:
            if not (folder / "recipe.yaml").exists():  # the data may be kept in it, so it has to say whose it is
                write_text(folder / "recipe.yaml", _HEADER + dump_recipe(recipe))
            run = prepare_training(recipe, folder)
            training = _Training(run, folder)
            made = training.models_made()
            check_space(folder, training.bytes_needed(made))
        except MsaError:
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        write_text(folder / "recipe.yaml", _pinned(run))
        return TrainingResult(folder, training.train(made, progress))


@dataclass(frozen=True)
class _Training:
    """The stages of a run, on the way to their models in a folder."""

    run: TrainingRun
    folder: Path

    @property
    def steps(self) -> list[ReadyStage | None]:
        """What makes the models in their order; None is the making of a new start model."""
        return [*([] if self.run.start.source else [None]), *self.run.stages]

    def models_made(self) -> list[TrainedModel]:
        """The models that need not be made: the last one of those that are there, and all before it."""
        known = {model.name: model for model in _read_state(self.folder)}
        made: list[TrainedModel] = []
        present = 0
        for step in self.steps:
            inputs, model = self._inputs(step, made), known.get(_name(step))
            if is_finished(self.folder / _name(step), inputs):
                made.append(self._describe(step, made, inputs))
                present = len(made)
            elif self.run.recipe.keep == "last" and model and model.inputs == digest(inputs):
                made.append(model)  # it has gone, and may have to
            else:
                break
        return made[:present]

    def bytes_needed(self, made: Sequence[TrainedModel]) -> int:
        """Disk space that is still to be filled: the models, and while one is trained its saves with AdamW's state.

        There are two saves, and a third one until the oldest is removed.
        """
        missing = self.steps[len(made) :]
        if not missing:
            return 0
        models = len(missing) if self.run.recipe.keep == "each" else min(2, len(missing))
        saves = max(min(3, step.settings.epochs) for step in self.run.stages)
        begun = sum(path.stat().st_size for path in self.folder.glob("*.partial/**/*") if path.is_file())
        return max(0, (4 * models + 12 * saves) * self.run.start.parameters - begun)

    def train(self, made: list[TrainedModel], progress: Progress) -> list[TrainedModel]:
        """Make what is missing. After every model it is written down what there is."""
        self._write_down(made)
        if strays := self._strays():
            logger.warning(
                "%s: no stage of this training any more, and left as it is: %s", self.folder, ", ".join(strays)
            )
        fits = [Step(step.name, "fit", sum(len(e.ids) for e in step.examples)) for step in self.run.stages]
        announce(progress, fits)
        for step in self.steps[len(made) :]:
            inputs = self._inputs(step, made)
            self._make(step, made, inputs, progress)
            made = [*made, self._describe(step, made, inputs)]
            self._write_down(made)
        return made

    def _strays(self) -> list[str]:
        """Folders with models of stages that have gone, or that have another name or number now."""
        names = {_name(step) for step in self.steps}
        return [path.name for path in sorted(self.folder.iterdir()) if path.name not in names and load_manifest(path)]

    def _make(
        self, step: ReadyStage | None, made: Sequence[TrainedModel], inputs: dict[str, Any], progress: Progress
    ) -> None:
        start, out = self.run.start, self.folder / _name(step)
        if step is None:
            write_start(out, start.config, start.tokenizer, self.run.recipe.seed, inputs)
            return
        fit_vector(
            self._source(made),
            step.examples,
            out,
            tokenizer=start.tokenizer,
            settings=step.settings,
            label=step.name,
            progress=progress,
        )

    def _source(self, made: Sequence[TrainedModel]) -> Source:
        """The model that the next stage goes on from."""
        if not made:
            assert self.run.start.source is not None, "a new start model is made first"
            return self.run.start.source
        folder = self.folder / made[-1].name
        return Source(str(folder), folder, made[-1].revision)

    def _inputs(self, step: ReadyStage | None, made: Sequence[TrainedModel]) -> dict[str, Any]:
        if step is None:
            return self.run.start.made_of or {}
        return fit_inputs(self._source(made), step.examples, step.settings)

    def _describe(self, step: ReadyStage | None, made: Sequence[TrainedModel], inputs: dict[str, Any]) -> TrainedModel:
        """What there is to say of a model that lies in its folder."""
        folder = self.folder / _name(step)
        model = TrainedModel(folder.name, digest(inputs), fetch(str(folder)).revision)
        if step is None:
            return model
        seen = (made[-1].seen_tokens if made else 0) + step.settings.epochs * step.tokens
        return replace(
            model, rows=len(step.examples), tokens=step.tokens, seen_tokens=seen, loss=_last_loss(folder, step)
        )

    def _write_down(self, made: Sequence[TrainedModel]) -> None:
        """Write the state and the history; then drop the models that are not to be kept."""
        write_json(self.folder / _STATE, [asdict(model) for model in made])
        kept = made if self.run.recipe.keep == "each" else made[-1:]
        source, folder = self.run.start.source, self.folder.resolve()  # it goes into recipes that lie elsewhere
        start = [str(source.folder.resolve()) if source.is_folder else source.pinned()] if source else []
        checkpoints: list[dict[str, Any]] = [{"checkpoint": name, "seen_tokens": 0} for name in start]
        checkpoints += [{"checkpoint": str(folder / model.name), "seen_tokens": model.seen_tokens} for model in kept]
        began = 0
        notes = []
        for model in made:
            if model.rows:
                notes.append(f"#   {model.name} began at {began}\n")
            began = model.seen_tokens
        block = yaml.safe_dump({"history": {"checkpoints": checkpoints}}, sort_keys=False, allow_unicode=True)
        write_text(self.folder / "history.yaml", _HISTORY + "".join(notes) + block + "  exposure:\n")
        for model in made:
            if model not in kept:
                shutil.rmtree(self.folder / model.name, ignore_errors=True)


def _name(step: ReadyStage | None) -> str:
    return step.name if step else START_FOLDER


def _last_loss(folder: Path, step: ReadyStage) -> float:
    """The mean loss of the last epoch's steps."""
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text("utf-8").splitlines()]
    losses = [line["loss"] for line in lines if line["epoch"] > step.settings.epochs - 1]
    return sum(losses) / len(losses)


def _read_state(folder: Path) -> list[TrainedModel]:
    """The models that were made here before, whether or not they are still there."""
    try:
        return [TrainedModel(**item) for item in json.loads((folder / _STATE).read_text("utf-8"))]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def _pinned(run: TrainingRun) -> str:
    """The resolved recipe with commits for Hub repositories; what was learnt as comments."""
    values = run.recipe.model_dump(mode="json") | {"model": run.start.name}
    for stage, sources in zip(values["stages"], run.sources, strict=True):
        for data, source in zip(
            stage["data"] if isinstance(stage["data"], list) else [stage["data"]], sources, strict=True
        ):
            data["revision"] = source.revision
    notes = [f"# model: {run.start.source.revision}\n"] if run.start.source else []
    notes += [f"# {stage.name}: {len(stage.examples)} rows, {stage.tokens} tokens an epoch\n" for stage in run.stages]
    return _HEADER + "".join(notes) + dump_recipe(TrainingRecipe.model_validate(values))
