"""Train targets, ideals and the checkpoints before them in stages, each stage a fit of all weights.

The model that a stage goes on from, its rows and its settings identify it. A stage whose folder was made from the same
is not trained again. A stage that changed is trained again, and so are those after it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import yaml

from msa_lite.budget.shape import read_shape, shape_of_config
from msa_lite.data import hash_ids
from msa_lite.errors import FormatError
from msa_lite.evals.engine.models import checkpoint_folder
from msa_lite.io.console.progress import Progress, muted, silent
from msa_lite.io.files.writing import check_space, digest, write_text
from msa_lite.io.finished.manifest import is_finished, software_versions
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.launch.crew import Crew
from msa_lite.io.launch.gathering import PREPARE, agree, gathered
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.pipeline.run.folder import TRACKING, claim, recipe_text
from msa_lite.pipeline.run.vectors import FIT, check_shares, help_fit, make_fit
from msa_lite.pipeline.staged.prepare import (
    MODEL,
    START_FOLDER,
    ReadyStage,
    TrainingRun,
    prepare_training,
    training_stages,
)
from msa_lite.pipeline.stages.facts import Facts, RowFacts
from msa_lite.pipeline.stages.stage import Stage, StageState, check_memory, execute, look_ahead
from msa_lite.recipe import RecipeSource, TrainingRecipe, load_training
from msa_lite.report.run.provenance import RECIPE_FILE
from msa_lite.train import Tracking, VectorFit
from msa_lite.train.scratch import write_start

logger = logging.getLogger(__name__)

_COMMAND = "msa-lite train"
TRAINING_FILES = (RECIPE_FILE, "history.yaml")
"""The files of a training beside its models."""
_HISTORY = """\
# The checkpoints of this training. Put this block into a recipe, instead of its `prior`.
# seen_tokens: the tokens read since the start in all epochs, with prompts and special tokens, without padding.
# exposure: yours to fill in. It is seen_tokens at the start of the first stage that had the data to forget.
"""


@dataclass(frozen=True)
class TrainedModel:
    """A model of a training."""

    name: str
    """The name of its folder."""
    revision: str
    """A hash of its content."""
    rows: int = 0
    """The rows of one epoch of its stage."""
    tokens: int = 0
    """The tokens of one epoch of its stage."""
    seen_tokens: int = 0
    """The tokens read since the start, those of its own stage included."""
    loss: float | None = None
    """The mean loss of its last epoch."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training."""

    json_keys: ClassVar = {"output": "folder", "model": "model", "history": "history", "stages": "stages"}

    folder: Path
    """The folder of all models."""
    models: list[TrainedModel]
    """The models in their order, a new start model first."""

    @property
    def model(self) -> Path:
        """The folder of the last model."""
        return self.folder / self.models[-1].name

    @property
    def history(self) -> Path:
        """The file with the `history:` block."""
        return self.folder / "history.yaml"

    @property
    def stages(self) -> list[dict[str, Any]]:
        """Return what is known of each model, with its folder."""
        return [{"folder": self.folder / model.name, **asdict(model)} for model in self.models]


def train_stages(
    recipe: RecipeSource, overrides: Iterable[str] = (), progress: Progress = silent, *, force: bool = False
) -> TrainingResult | None:
    """Train the stages of a recipe, one after the other, and return what was made.

    Raise before any training if the recipe or its inputs are at fault. Later errors leave finished stages in place, and
    a rerun resumes. force: only warn if the device's memory is too small by prediction. Under a launcher all processes
    train each stage together; only the first returns a result, the others return None.
    """
    loaded = load_training(recipe, overrides)
    with gathered(loaded.model_dump(mode="json")) as crew:
        if crew.first:
            return _lead(loaded, crew, progress, force)
        _follow(loaded, crew)
    return None


def _lead(loaded: TrainingRecipe, crew: Crew, progress: Progress, force: bool) -> TrainingResult:
    # Written first: the data may be kept in the folder, which has to say whose it is.
    folder, first = loaded.folder, recipe_text("training", _COMMAND, loaded)
    prepare = partial(_prepare, loaded, crew, force)
    with claim(folder, "training", prepare, lambda training: _pinned(training.run), first) as training:
        agree(crew, lambda: _inputs(training.run))
        return TrainingResult(folder, training.train(progress))


def _prepare(loaded: TrainingRecipe, crew: Crew, force: bool) -> _Training:
    """Find and check all that a training needs before its first step."""
    training = _Training(prepare_training(loaded), crew)
    check_space(loaded.folder, training.bytes_needed)
    for stage in training.run.stages:
        check_shares(crew, stage.settings)
    try:
        facts = training.facts()
    except FormatError as error:  # a config in words that we do not know
        logger.debug("the memory is not predicted: %s", error)
    else:
        check_memory(training.stages(), facts, crew.ranks.count, lambda machine: iter(()), force)
    return training


def _follow(loaded: TrainingRecipe, crew: Crew) -> None:
    """Train stages with the first process, as it orders, until it has ended."""
    runs: list[TrainingRun] = []

    def do(task: str, arguments: dict[str, Any]) -> Any:
        with muted():
            if task == PREPARE:
                runs.append(prepare_training(loaded))
                return _inputs(runs[0])
            assert task == FIT, "the first process orders nothing else"
            source = Source(arguments["name"], Path(arguments["folder"]), arguments["revision"])
            step = next(step for step in runs[0].stages if step.name == arguments["stage"])
            help_fit(_fit_of(runs[0], step, source), loaded.folder / step.name, crew)
            return None

    crew.follow(do)


def _inputs(run: TrainingRun) -> dict[str, Any]:
    """Return hashes of all that a training starts from, by name."""
    start = run.start.source.identity() if run.start.source else run.start.made_of
    rows = {step.name: hash_ids(step.examples) for step in run.stages}
    return {"model": digest(start), "rows": digest(rows), "package versions": digest(software_versions())}


def training_ahead(recipe: TrainingRecipe, force: bool = False) -> list[StageState]:
    """Return what a training would do with each of its stages. All that it reads has to be on this machine."""
    training = _prepare(recipe, Crew(), force)
    done = [StageState(model.name, recipe.folder / model.name, "done") for model in training.models]
    return [*done, *look_ahead(training.stages())]


def _fit_of(run: TrainingRun, step: ReadyStage, source: Source) -> VectorFit:
    """Return the fit of a stage, which goes on from a model."""
    folder = run.recipe.folder
    tracking = Tracking(tuple(run.recipe.track), folder / TRACKING, folder.resolve().name)
    return VectorFit(source, step.examples, run.start.tokenizer, step.settings, label=step.name, tracking=tracking)


@dataclass(frozen=True)
class _Training:
    """The stages of a training, on the way to their models in its folder."""

    run: TrainingRun
    crew: Crew

    @property
    def folder(self) -> Path:
        return self.run.recipe.folder

    @property
    def steps(self) -> list[ReadyStage | None]:
        """The steps that make the models, in their order; None makes a new start model."""
        return [*([] if self.run.start.source else [None]), *self.run.stages]

    @cached_property
    def models(self) -> list[TrainedModel]:
        """The models so far: at first those that are there, up to one that is missing or made of something else."""
        models: list[TrainedModel] = []
        for step in self.steps:
            if not is_finished(self.folder / _name(step), self._inputs(step, models)):
                break
            models.append(self._describe(step, models))
        return models

    def stages(self) -> list[Stage]:
        """Return the stages whose models are still to be made."""
        named = {stage.name: stage for stage in training_stages(self.run.recipe)}
        done, names = len(self.models), [_name(step) for step in self.steps]
        return [
            replace(
                named[name],
                run=partial(self._make, step),
                inputs=partial(self._inputs, step, self.models),
                needs=names[done:place],
            )
            for place, (name, step) in enumerate(zip(names, self.steps, strict=True))
            if place >= done
        ]

    def facts(self) -> Facts:
        """Return the sizes of the model and of the rows. Raise FormatError for a config in words that are not known."""
        start = self.run.start
        if start.source is not None:
            shape = read_shape(load_checkpoint(checkpoint_folder(start.source.folder)), start.source.name)
        else:
            shape = shape_of_config(start.config.to_dict(), "the new model")
        return Facts({MODEL: shape}, {step.name: RowFacts.of(step.examples) for step in self.run.stages})

    @property
    def bytes_needed(self) -> int:
        """The disk space still needed: the models and, while one is trained, its saves with AdamW's state.

        There are two saves, and a third one until the oldest is removed.
        """
        missing = self.steps[len(self.models) :]
        if not missing:
            return 0
        saves = max(min(3, step.settings.epochs) for step in self.run.stages)
        begun = sum(path.stat().st_size for path in self.folder.glob("*.partial/**/*") if path.is_file())
        return max(0, (4 * len(missing) + 12 * saves) * self.run.start.parameters - begun)

    def train(self, progress: Progress) -> list[TrainedModel]:
        """Make the missing models and return all. Update the history after each model."""
        self._write_history()
        if strays := self._strays():
            logger.warning(
                "%s: left as it is, since no stage of this training makes it: %s", self.folder, ", ".join(strays)
            )
        execute(self.stages(), progress)
        return self.models

    def _strays(self) -> list[str]:
        """Return folders with models of stages that are gone, or have another name or number now."""
        names = {_name(step) for step in self.steps}
        return [path.name for path in sorted(self.folder.iterdir()) if path.name not in names and load_manifest(path)]

    def _make(self, step: ReadyStage | None, progress: Progress) -> None:
        """Make the next model from the last one, and update the history."""
        start, out = self.run.start, self.folder / _name(step)
        if step is None:
            write_start(out, start.config, start.tokenizer, self.run.recipe.seed, self._inputs(step, ()))
        else:
            source = self._source(self.models)
            model = {"name": source.name, "folder": str(source.folder.resolve()), "revision": source.revision}
            fit = _fit_of(self.run, step, source)
            make_fit(fit, out, self.crew, {"stage": step.name, **model}, progress)
        self.models.append(self._describe(step, self.models))
        self._write_history()

    def _source(self, models: Sequence[TrainedModel]) -> Source:
        """Return the model that the next stage goes on from."""
        if not models:
            assert self.run.start.source is not None, "a new start model is made first"
            return self.run.start.source
        folder = self.folder / models[-1].name
        return Source(str(folder), folder, models[-1].revision)

    def _inputs(self, step: ReadyStage | None, models: Sequence[TrainedModel]) -> dict[str, Any]:
        if step is None:
            return self.run.start.made_of or {}
        return _fit_of(self.run, step, self._source(models)).inputs()

    def _describe(self, step: ReadyStage | None, models: Sequence[TrainedModel]) -> TrainedModel:
        """Return the record of a model that lies in its folder. models: those before it."""
        folder = self.folder / _name(step)
        revision = fetch(str(folder)).revision
        if step is None:
            return TrainedModel(folder.name, revision)
        seen = (models[-1].seen_tokens if models else 0) + step.settings.epochs * step.tokens
        return TrainedModel(folder.name, revision, len(step.examples), step.tokens, seen, _last_loss(folder, step))

    def _write_history(self) -> None:
        """Write the checkpoints so far as the `history:` of a run's recipe."""
        source, folder = self.run.start.source, self.folder.resolve()  # it goes into recipes that lie elsewhere
        start = [str(source.folder.resolve()) if source.is_folder else source.pinned()] if source else []
        checkpoints: list[dict[str, Any]] = [{"checkpoint": name, "seen_tokens": 0} for name in start]
        began, notes = 0, []
        for model in self.models:
            checkpoints.append({"checkpoint": str(folder / model.name), "seen_tokens": model.seen_tokens})
            if model.rows:
                notes.append(f"#   {model.name} began at {began}\n")
            began = model.seen_tokens
        block = yaml.safe_dump({"history": {"checkpoints": checkpoints}}, sort_keys=False, allow_unicode=True)
        write_text(self.folder / "history.yaml", _HISTORY + "".join(notes) + block + "  exposure:\n")


def _name(step: ReadyStage | None) -> str:
    return step.name if step else START_FOLDER


def _last_loss(folder: Path, step: ReadyStage) -> float:
    """Return the mean loss of the last epoch's steps."""
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text("utf-8").splitlines()]
    losses = [line["loss"] for line in lines if line["epoch"] > step.settings.epochs - 1]
    return sum(losses) / len(losses)


def _pinned(run: TrainingRun) -> str:
    """Return recipe.yaml with commits for Hub repositories; what is learnt as comments."""
    values = run.recipe.model_dump(mode="json") | {"model": run.start.name}
    for stage, step in zip(values["stages"], run.stages, strict=True):
        sets = stage["data"] if isinstance(stage["data"], list) else [stage["data"]]
        for data, source in zip(sets, step.sources, strict=True):
            data["revision"] = source.revision
    notes = [f"model: {run.start.source.revision}"] if run.start.source else []
    notes += [f"{step.name}: {len(step.examples)} rows, {step.tokens} tokens an epoch" for step in run.stages]
    return recipe_text("training", _COMMAND, TrainingRecipe.model_validate(values), notes)
