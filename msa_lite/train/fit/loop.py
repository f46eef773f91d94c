"""What is fitted, and the training loop: the Trainer with our objective, log, saves and steps after an epoch."""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from msa_lite.data import Example, hash_ids, pad_id
from msa_lite.errors import MsaError, NotFiniteError, discarded
from msa_lite.io.console.libraries import without_bars
from msa_lite.io.console.progress import Progress, tell
from msa_lite.io.files.writing import write_text
from msa_lite.io.models.heads import choose_precision
from msa_lite.io.weights.hub import Source
from msa_lite.train.fit.tracking import UNTRACKED, Reporter, Tracking
from msa_lite.train.fit.until import OpenFit, Until
from msa_lite.train.memory.model import broken_weight, save_model
from msa_lite.train.memory.rungs import Rung
from msa_lite.train.objectives.objective import Objective
from msa_lite.train.objectives.plain import PlainLoss
from msa_lite.train.settings import AfterEpoch, FitSettings, KeptEpochs

logger = logging.getLogger(__name__)


def make_trainer(
    model: Any,
    objective: Objective,
    rows: int,
    settings: FitSettings,
    micro: int,
    callback: Any,
    folder: Path,
    **options: Any,
) -> Any:
    """Return a Trainer for a model, which it puts on its device. It prints nothing.

    rows: the number of the objective's examples. micro: see `Objective.step`. folder: for what the Trainer saves.
    options: its arguments that concern saves.
    """
    with redirect_stdout(sys.stderr):  # what trackers that it finds say as they are loaded
        from transformers import PrinterCallback, Trainer, TrainingArguments

    class ObjectiveTrainer(Trainer):
        def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Any:
            model.train()
            epoch = int(self.state.epoch or 0)
            with self.compute_loss_context_manager():
                return objective.step(model, inputs["rows"], epoch, micro, self.accelerator.backward)

        def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
            return 0  # the Trainer's own looks for token ids, which these inputs lack

    arguments = TrainingArguments(
        output_dir=str(folder),
        # The objective divides the rows of a step itself, since its means are over all of them.
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=1,
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.count_warmup(settings.steps_per_epoch(rows)),
        lr_scheduler_type=settings.scheduler,
        max_grad_norm=1.0,
        seed=settings.seed,
        **settings.trainer_options(),
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,  # of indices
        **options,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # a process trains on one GPU; DataParallel would spread it over all
    trainer = ObjectiveTrainer(
        model=model,
        args=arguments,
        callbacks=[callback],
        train_dataset=list(range(rows)),
        data_collator=lambda batch: {"rows": list(batch)},
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def last_loss(state: Any) -> str:
    """Return the last logged loss, that of the step before, as a note for the progress."""
    return next((f"loss {line['loss']:.3g}" for line in reversed(state.log_history) if "loss" in line), "")


SAVES = "checkpoints"
SCORES = "scores"  # the folder that `after_epoch` writes into
SAVED_WHOLE = "complete"
LOG = "train_log.jsonl"
_LOGGED = ("loss", "grad_norm", "learning_rate")
_MOST_SKIPPED = 20  # steps in a row whose gradients overflow in fp16; the loss's scale starts at 2^16 and is halved
SAVE_SECONDS = 60.0  # between saves of an open-ended fit, whose epochs may take seconds, and its saves longer
_LOWEST = Rung(1)


@dataclass(frozen=True)
class VectorFit:
    """A fit: the model, the rows, the end, and what callers add. The last three fields decide no result."""

    prior: Source
    examples: Sequence[Example]
    tokenizer: Any
    settings: FitSettings = FitSettings()
    objective: Objective | None = None
    """A function to minimise in place of the plain loss of the examples."""
    after_epoch: AfterEpoch | None = None
    """Chooses the epochs whose weights are kept, in folders `epoch-1`, `epoch-2`, … of the vector's."""
    until: Until | None = None
    """Makes the fit open-ended, with at most `settings.epochs` epochs. It ends by the plain loss of the examples,
    whatever it minimises."""
    label: str = "vector"
    """Its name in messages and trackers."""
    extra_files: Mapping[str, str] = field(default_factory=dict)
    """Texts to write beside the weights, by the name of the file."""
    tracking: Tracking = UNTRACKED

    def __post_init__(self) -> None:
        assert not self.until or not self.after_epoch, "an open-ended fit chooses its end, not its epochs"

    def inputs(self) -> dict[str, Any]:
        """Return all that decides the result, as its manifest records it and `is_finished` compares it."""
        rules = {"objective": self.objective, "kept": self.after_epoch, "until": self.until}
        return {
            "prior": self.prior.identity(),
            "examples": hash_ids(self.examples),
            "settings": self.settings.describe(),
            **{key: rule.describe() for key, rule in rules.items() if rule is not None},
        }

    def facts(self) -> dict[str, Any]:
        """Return what the manifest records beside the inputs."""
        return {"sources": {"prior": self.prior.pinned()}, "rows": len(self.examples)}

    def write_files(self, partial: Path) -> None:
        """Write the extra files."""
        for name, text in self.extra_files.items():
            (partial / name).write_text(text, "utf-8")


@dataclass(frozen=True)
class Loop:
    """One training run of a fit."""

    fit: VectorFit
    partial: Path
    """The folder to write into."""
    progress: Progress
    open_fit: OpenFit | None = None
    """Ends an open-ended run, which is saved about once a minute, not every epoch. None: the run has fixed epochs."""
    rung: Rung = _LOWEST
    """Its use of memory."""

    @cached_property
    def objective(self) -> Objective:
        """Return what the run minimises."""
        return self.fit.objective or PlainLoss(self.fit.examples, pad_id(self.fit.tokenizer))

    def open(self, until: Until) -> OpenFit:
        """Return the attempts of an open-ended fit, from where a stopped one left them."""
        fit = self.fit
        return OpenFit.resume(until, fit.examples, pad_id(fit.tokenizer), fit.settings, fit.label, self.partial)

    def attempt(self, rate: float, folder: Path, label: str, open_fit: OpenFit | None) -> Loop:
        """Return the run of an open-ended fit's attempt into a folder of its own."""
        settings = replace(self.fit.settings, learning_rate=rate)
        return replace(self, fit=replace(self.fit, settings=settings, label=label), partial=folder, open_fit=open_fit)

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimiser steps of an epoch."""
        return self.fit.settings.steps_per_epoch(len(self.fit.examples))

    @property
    def most_steps(self) -> int:
        """Return the steps of the whole fit; an open-ended one may end before."""
        return self.fit.settings.epochs * self.steps_per_epoch

    def run(self, model: Any) -> None:
        """Train, from the last whole save where there is one, and write the weights."""
        fit, resume, step, epoch = self.fit, None, 0, 0
        saves = whole_saves(self.partial / SAVES)
        for half in {*(self.partial / SAVES).glob("checkpoint-*")} - {*saves}:
            shutil.rmtree(half)  # for half a save of a later step, the Trainer would remove the next whole ones
        if saves:
            resume = str(saves[-1])
            state = json.loads((saves[-1] / "trainer_state.json").read_text("utf-8"))
            step, epoch = state["global_step"], round(state["epoch"])
        cut_log(self.partial / LOG, step)
        self.keep_epochs(range(epoch + 1))  # others were written after the save, perhaps half
        # The Trainer's saves have bars of their own.
        with fit.tracking.lines(fit.label, at_once=True) as report, without_bars():
            trainer = self.make_trainer(model, report)  # which puts the model on its device
            try:
                if self.open_fit is not None:
                    self.open_fit.begin(model, epoch, step, self.rung.micro)
                self.objective.prepare(model)
                ended = resume and fit.after_epoch and not self.finish_epoch(model, epoch, False).go_on
                if not ended:
                    trainer.train(resume_from_checkpoint=resume)
            finally:
                self.objective.release()
            if fit.after_epoch is None:
                if name := broken_weight(model):
                    raise self.failure(f"{name} is no number after training")
                self._save(model, self.partial)

    def make_trainer(self, model: Any, report: Reporter) -> Any:
        """Return the Trainer of this run."""
        fit, watch = self.fit, _make_callback(self, report)
        saves = {"save_strategy": "no" if self.open_fit else "epoch", "save_total_limit": 2}
        return make_trainer(
            model,
            self.objective,
            len(fit.examples),
            fit.settings,
            self.rung.micro,
            watch,
            self.partial / SAVES,
            **saves,
        )

    def _save(self, model: Any, folder: Path) -> None:
        save_model(model, self.fit.prior, folder, self.fit.tokenizer, self.fit.settings)

    def log(self, line: Mapping[str, Any], report: Reporter) -> None:
        """Add a step's line to the log, and report it to the trackers."""
        with open(self.partial / LOG, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        report({f"train/{name}": value for name, value in line.items()}, line["step"])

    def failure(self, fault: str) -> MsaError:
        """Return the error for a training that left nothing to keep."""
        return discarded(NotFiniteError(f"{self.fit.label}: {fault}; nothing was kept. Try a lower learning_rate"))

    def finish_epoch(self, model: Any, epoch: int, write: bool = True) -> KeptEpochs:
        """Save an epoch's weights, ask `after_epoch` which epochs to keep, and drop the others.

        write: False where the weights were saved before. Raise NotFiniteError where the model's outputs or weights are
        no numbers.
        """
        if write:
            if name := broken_weight(model):
                raise NotFiniteError(f"{name} is no number")
            self._save(model, epoch_folder(self.partial, epoch))
        training = model.training
        choice = self.choose_epochs(model.eval(), epoch)
        model.train(training)
        self.keep_epochs(choice.epochs)
        return choice

    def choose_epochs(self, model: Any, epoch: int) -> KeptEpochs:
        """Ask `after_epoch` which epochs to keep. model: in eval mode. Remove an epoch whose outputs are no numbers."""
        assert self.fit.after_epoch is not None
        try:
            return self.fit.after_epoch(model, epoch, self.partial / SCORES)
        except NotFiniteError:
            shutil.rmtree(epoch_folder(self.partial, epoch), ignore_errors=True)
            raise

    def keep_epochs(self, epochs: Container[int]) -> None:
        """Remove the weights of the other epochs."""
        for folder in self.partial.glob("epoch-*"):
            if int(folder.name.removeprefix("epoch-")) not in epochs:
                shutil.rmtree(folder)


def epoch_folder(folder: Path, epoch: int) -> Path:
    """Return the folder of an epoch's weights, counted from 1, in a vector's folder."""
    return folder / f"epoch-{epoch}"


def _make_callback(loop: Loop, report: Reporter) -> Any:
    """Make the Trainer callback: log, progress, the check for a broken loss, epochs' ends, the mark on whole saves."""
    from transformers import TrainerCallback

    scales_loss = choose_precision(loop.fit.settings.compute) == "fp16"

    class Watch(TrainerCallback):
        broken = False
        overflows = 0  # steps in a row whose gradients overflowed, but not their loss
        saved_at = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" not in logs:
                return
            line = {"step": state.global_step, "epoch": state.epoch} | {k: logs[k] for k in _LOGGED if k in logs}
            has_overflowed = math.isfinite(float(line["loss"])) and not math.isfinite(float(line.get("grad_norm", 0)))
            self.overflows = self.overflows + 1 if has_overflowed else 0
            if scales_loss and 0 < self.overflows <= _MOST_SKIPPED:  # skipped; the next step has a smaller scale
                del line["grad_norm"]
            if not all(math.isfinite(float(line[k])) for k in ("loss", "grad_norm") if k in line):
                self._stop(control, "the loss is {loss} (gradient norm {grad_norm}) at step {step}".format_map(line))
                return
            loop.log(line, report)

        def _stop(self, control: Any, fault: str) -> None:
            """End the training and keep its epochs so far. Raise NotFiniteError where there are none."""
            if not list(loop.partial.glob("epoch-*")):
                raise loop.failure(fault)
            logger.warning("%s: %s; earlier epochs are kept", loop.fit.label, fault)
            self.broken = control.should_training_stop = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tell(loop.progress, loop.fit.label, state.global_step, loop.most_steps, last_loss(state))

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if loop.open_fit is not None:
                control.should_training_stop = not loop.open_fit.after_epoch(
                    kwargs["model"], round(state.epoch), state.global_step
                )
                if control.should_training_stop:
                    loop.progress(loop.fit.label, state.global_step, state.global_step)
                elif time.monotonic() - self.saved_at > SAVE_SECONDS:
                    control.should_save, self.saved_at = True, time.monotonic()
            if loop.fit.after_epoch is None or self.broken:
                return
            try:
                control.should_training_stop |= not loop.finish_epoch(kwargs["model"], round(state.epoch)).go_on
            except NotFiniteError:
                self._stop(control, f"the model's weights or outputs are no numbers after epoch {state.epoch:g}")

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.broken:
                (Path(args.output_dir) / f"checkpoint-{state.global_step}" / SAVED_WHOLE).touch()

    return Watch()


def whole_saves(saves: Path, kind: str = "checkpoint") -> list[Path]:
    """Return the saves that were written to their end, oldest first; a kill may have left a half one.

    kind: "checkpoint" for the Trainer's, "step" for those of several processes.
    """
    whole = [mark.parent for mark in saves.glob(f"{kind}-*/{SAVED_WHOLE}")]
    return sorted(whole, key=lambda save: int(save.name.rpartition("-")[2]))


def drop_saves(folder: Path) -> None:
    """Remove a folder of saves, their marks first: a kill in between must leave none that counts."""
    for mark in folder.rglob(SAVED_WHOLE):
        mark.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def cut_log(log: Path, steps: int) -> None:
    """Drop the lines of steps that will be trained again."""
    if log.exists():
        lines = [line for line in log.read_text("utf-8").splitlines() if line.endswith("}")]
        write_text(log, "".join(line + "\n" for line in lines if json.loads(line)["step"] <= steps))
