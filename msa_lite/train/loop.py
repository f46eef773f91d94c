"""The training loop: Hugging Face's Trainer with our objective, log, saves and steps after an epoch."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msa_lite.data import Example
from msa_lite.errors import MsaError, NotFiniteError
from msa_lite.io.console.libraries import without_bars
from msa_lite.io.console.progress import Progress, tell
from msa_lite.io.finished.manifest import discarded
from msa_lite.io.models.heads import autocast, choose_precision
from msa_lite.train.model import broken_weight, save_model
from msa_lite.train.rungs import Rung
from msa_lite.train.settings import AfterEpoch, KeptEpochs, Objective
from msa_lite.train.tracking import UNTRACKED, Tracking

if TYPE_CHECKING:
    from msa_lite.io.weights.hub import Source
    from msa_lite.train.settings import FitSettings
    from msa_lite.train.until import Gauge

logger = logging.getLogger(__name__)


def steps_per_epoch(rows: int, settings: FitSettings) -> int:
    """Return the optimiser steps of an epoch."""
    return math.ceil(rows / settings.batch_size)


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
    options: its arguments that concern saves and reports.
    """
    from transformers import PrinterCallback, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        # The objective divides the rows of a step itself, since its means are over all of them.
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=1,
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.count_warmup(steps_per_epoch(rows, settings)),
        lr_scheduler_type={"linear": "linear", "constant": "constant_with_warmup"}[settings.schedule],
        max_grad_norm=1.0,
        seed=settings.seed,
        **settings.trainer_options(),
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,  # of indices
        **options,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # a process trains on one GPU; DataParallel would spread it over all
    trainer = trainer_class(objective, micro)(
        model=model,
        args=arguments,
        callbacks=[callback],
        train_dataset=list(range(rows)),
        data_collator=lambda batch: {"rows": list(batch)},
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trainer_class(objective: Objective, micro: int) -> Any:
    """Return a Trainer class whose steps are those of an objective."""
    from transformers import Trainer

    class ObjectiveTrainer(Trainer):
        def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Any:
            model.train()
            epoch = int(self.state.epoch or 0)
            with self.compute_loss_context_manager():
                return objective.step(model, inputs["rows"], epoch, micro, self.accelerator.backward)

        def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
            return 0  # the Trainer's own looks for token ids, which these inputs lack

    return ObjectiveTrainer


def last_loss(state: Any) -> str:
    """Return the last logged loss, that of the step before, as a note for the progress."""
    return next((f"loss {line['loss']:.3g}" for line in reversed(state.log_history) if "loss" in line), "")


SAVES = "checkpoints"
SCORES = "scores"  # the folder that `after_epoch` writes into
_SAVED_WHOLE = "complete"
LOG = "train_log.jsonl"
_LOGGED = ("loss", "grad_norm", "learning_rate")
_MOST_SKIPPED = 20  # steps in a row whose gradients overflow in fp16; the loss's scale starts at 2^16 and is halved
SAVE_SECONDS = 60.0  # between saves of an open-ended fit, whose epochs may take seconds, and its saves longer
_LOWEST = Rung(1)


@dataclass(frozen=True)
class Loop:
    """One training run."""

    source: Source
    """The prior."""
    examples: Sequence[Example]
    tokenizer: Any
    settings: FitSettings
    partial: Path
    """The folder to write into."""
    label: str
    objective: Objective
    after_epoch: AfterEpoch | None
    progress: Progress
    gauge: Gauge | None = None
    """Ends an open-ended run, which is saved about once a minute, not every epoch. None: the run has fixed epochs."""
    rung: Rung = _LOWEST
    """Its use of memory."""
    tracking: Tracking = UNTRACKED
    """The trackers that the Trainer reports to."""

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimiser steps of an epoch."""
        return steps_per_epoch(len(self.examples), self.settings)

    def run(self, model: Any) -> None:
        """Train, from the last whole save where there is one, and write the weights."""
        with self.tracking.fit(self.label), without_bars():  # the Trainer's saves have bars of their own
            self._run(model)

    def _run(self, model: Any) -> None:
        resume = last_save(self.partial / SAVES)
        state = (
            json.loads((resume / "trainer_state.json").read_text("utf-8")) if resume else {"global_step": 0, "epoch": 0}
        )
        cut_log(self.partial / LOG, state["global_step"])
        self._drop_epochs(lambda epoch: epoch > round(state["epoch"]))  # written after the save, perhaps half
        trainer = self._trainer(model)  # which puts the model on its device
        try:
            if self.gauge is not None:
                self.gauge.begin(model, round(state["epoch"]), state["global_step"], self.rung.micro)
            self.objective.prepare(model)
            ended = resume and self.after_epoch and not self.finish_epoch(model, round(state["epoch"]), False).go_on
            if not ended:
                trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        finally:
            self.objective.release()
        if self.after_epoch is None:
            if name := broken_weight(model):
                raise self.failure(f"{name} is no number after training")
            self._save(model, self.partial)

    def _save(self, model: Any, folder: Path) -> None:
        save_model(model, self.source, folder, self.tokenizer, self.settings)

    def failure(self, fault: str) -> MsaError:
        """Return the error for a training that left nothing to keep."""
        return discarded(NotFiniteError(f"{self.label}: {fault}; nothing was kept. Try a lower learning_rate"))

    def finish_epoch(self, model: Any, epoch: int, write: bool = True) -> KeptEpochs:
        """Ask `after_epoch` which epochs to keep; save this one's weights if it is among them, and drop the others.

        Raise NotFiniteError where the model's outputs or weights are no numbers.
        """
        assert self.after_epoch is not None
        if write and (name := broken_weight(model)):  # before scoring: an epoch that is not kept must leave no scores
            raise NotFiniteError(f"{name} is no number")
        training = model.training
        with autocast(model):  # as the Trainer has it, also for parts of the model that it does not call
            choice = self.after_epoch(model.eval(), epoch, self.partial / SCORES)
        model.train(training)
        if write and epoch in choice.epochs:
            self._save(model, epoch_folder(self.partial, epoch))
        self._drop_epochs(lambda epoch: epoch not in choice.epochs)
        return choice

    def _drop_epochs(self, unwanted: Callable[[int], bool]) -> None:
        for folder in self.partial.glob("epoch-*"):
            if unwanted(int(folder.name.removeprefix("epoch-"))):
                shutil.rmtree(folder)

    def _trainer(self, model: Any) -> Any:
        return make_trainer(
            model,
            self.objective,
            len(self.examples),
            self.settings,
            self.rung.micro,
            _make_callback(self),
            self.partial / SAVES,
            save_strategy="no" if self.gauge else "epoch",
            save_total_limit=2,
            **self.tracking.arguments(self.label),
        )


def epoch_folder(folder: Path, epoch: int) -> Path:
    """Return the folder of an epoch's weights, counted from 1, in a vector's folder."""
    return folder / f"epoch-{epoch}"


@dataclass
class _Overflow:
    """Tells steps that are skipped, since their gradients overflowed in fp16, from gradients that are broken."""

    scales: bool
    """True if the loss is scaled, so that a skipped step is followed by one with a smaller scale."""
    skipped: int = 0
    """The steps skipped in a row."""

    def is_in(self, line: Mapping[str, Any]) -> bool:
        """Check whether the gradients of a logged step overflowed, and not its loss."""
        is_infinite = not math.isfinite(float(line.get("grad_norm", 0))) and math.isfinite(float(line["loss"]))
        self.skipped = self.skipped + 1 if is_infinite else 0
        return is_infinite and self.scales and self.skipped <= _MOST_SKIPPED


def _make_callback(loop: Loop) -> Any:
    """Make the Trainer callback: log, progress, the check for a broken loss, epochs' ends, the mark on whole saves."""
    from transformers import TrainerCallback

    overflow = _Overflow(choose_precision(loop.settings.compute) == "fp16")

    class Watch(TrainerCallback):
        broken = False
        saved_at = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" not in logs:
                return
            line = {"step": state.global_step, "epoch": state.epoch} | {k: logs[k] for k in _LOGGED if k in logs}
            if overflow.is_in(line):  # the step is skipped, and the next one has a smaller scale
                del line["grad_norm"]
            if not all(math.isfinite(float(line[k])) for k in ("loss", "grad_norm") if k in line):
                self._stop(control, "the loss is {loss} (gradient norm {grad_norm}) at step {step}".format_map(line))
                return
            with open(loop.partial / LOG, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")

        def _stop(self, control: Any, fault: str) -> None:
            """End the training and keep its epochs so far. Raise NotFiniteError where there are none."""
            if not list(loop.partial.glob("epoch-*")):
                raise loop.failure(fault)
            logger.warning("%s: %s; earlier epochs are kept", loop.label, fault)
            self.broken = control.should_training_stop = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            likely = loop.gauge.likely_steps(loop.steps_per_epoch) if loop.gauge else state.max_steps
            tell(loop.progress, loop.label, state.global_step, likely, last_loss(state))

        def _measure(self, model: Any, state: Any, control: Any) -> None:
            """Ask the gauge whether the fit goes on; if so, save it when the last save is over a minute old."""
            assert loop.gauge is not None
            try:
                control.should_training_stop = not loop.gauge.after_epoch(model, round(state.epoch), state.global_step)
            except NotFiniteError as error:
                raise loop.failure(str(error)) from error
            if control.should_training_stop:
                loop.progress(loop.label, state.global_step, state.global_step)
            elif time.monotonic() - self.saved_at > SAVE_SECONDS:
                control.should_save, self.saved_at = True, time.monotonic()

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if loop.gauge is not None:
                self._measure(kwargs["model"], state, control)
            if loop.after_epoch is None or self.broken:
                return
            try:
                control.should_training_stop |= not loop.finish_epoch(kwargs["model"], round(state.epoch)).go_on
            except NotFiniteError:
                self._stop(control, f"the model's weights or outputs are no numbers after epoch {state.epoch:g}")

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.broken:
                (Path(args.output_dir) / f"checkpoint-{state.global_step}" / _SAVED_WHOLE).touch()

    return Watch()


def last_save(saves: Path) -> Path | None:
    """Return the newest save that was written to its end; a kill may have left a half one."""
    whole = [path.parent for path in saves.glob(f"checkpoint-*/{_SAVED_WHOLE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def cut_log(log: Path, steps: int) -> None:
    """Drop the lines of steps that will be trained again."""
    if log.exists():
        lines = [line for line in log.read_text("utf-8").splitlines() if line.endswith("}")]
        log.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= steps), "utf-8")
