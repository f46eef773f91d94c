"""Hugging Face's Trainer with an objective of ours in place of the model's own loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msa_lite.train.objective import Objective
    from msa_lite.train.settings import FitSettings


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
