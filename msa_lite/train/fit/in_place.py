"""Tune a loaded model for a while, look at it on the way, and put it back bit for bit. Nothing is written."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from msa_lite.data import Example
from msa_lite.errors import NotFiniteError, StageError, UsageError
from msa_lite.io.console.progress import Progress, silent, tell
from msa_lite.io.models.devices import free_bytes, free_memory, free_ram, is_out_of_memory, memory_fault
from msa_lite.io.models.heads import autocast, choose_precision, note_precision
from msa_lite.io.models.streaming import is_streamed
from msa_lite.train.fit.loop import last_loss, make_trainer
from msa_lite.train.memory.adapted import speed_up
from msa_lite.train.memory.model import with_adapter
from msa_lite.train.memory.rungs import Static, ladder, longest_first, micro_batches, set_up, step_fault
from msa_lite.train.objectives.plain import PlainLoss
from msa_lite.train.settings import FitSettings

TuningMode = Literal["full", "lora"]
_BYTES = 20  # of a weight in full mode: as it is loaded, in fp32 to train, its gradient and two states of AdamW
_SPARE = 0.8  # part of the free memory that these may take; activations need the rest
_ADAPTER = "tuned"


def tune(
    model: Any,
    examples: Sequence[Example],
    after: Callable[[int], None],
    *,
    pad: int,
    settings: FitSettings,
    steps: Collection[int],
    label: str = "tuning",
    progress: Progress = silent,
) -> None:
    """Tune a loaded model, call after(step) at some steps, and put the model back as it was, whatever is raised.

    after: called with the model in eval mode, tuned for so many steps. steps: the training ends with the last of them.
    settings: mode "full" trains all weights in fp32, "lora" an adapter that is taken off again. An adapter that is on
    the model stays as it is. pad: the token that fills up rows.

    Raise UsageError for a model that is stored quantised or streams from RAM, NotFiniteError where the loss is no
    longer finite, StageError when memory runs out.
    """
    from transformers import set_seed

    check_tunable(model)
    is_full = settings.mode == "full"
    watch = _make_watch(after, frozenset(steps), label, progress)
    set_seed(settings.seed)
    try:
        with _put_back(model), _weights_in_fp32(model) if is_full else nullcontext():
            _train(model if is_full else _put_on_adapter(model, settings), PlainLoss(examples, pad), settings, watch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise StageError(
            f"{label}: out of memory ({memory_fault(error)}); end other programs, or take a device with more of it"
        ) from error
    finally:
        free_memory()


def _train(model: Any, objective: PlainLoss, settings: FitSettings, watch: Any) -> None:
    """Train a model at the first use of memory that fits and can be undone."""
    note_precision(model, choose_precision(settings.compute))
    micro = _find_micro(model, objective, settings)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            model, objective, len(objective.examples), settings, micro, watch, Path(folder), save_strategy="no"
        )
        objective.prepare(model)
        try:
            trainer.train()
        finally:
            objective.release()


def _find_micro(model: Any, objective: PlainLoss, settings: FitSettings) -> int:
    """Set the model up at the first rung that a step fits at; return its rows of a pass. Raise StageError for none."""
    rows, fault = longest_first(objective.examples), None
    for rung in ladder(model, micro_batches(settings, objective.longest), moves=False):
        set_up(model, rung)
        fault = step_fault(model, objective, settings, rows, rung.micro)
        if fault is None:
            return rung.micro
    raise StageError(f"no step of the fit is possible: out of memory ({fault}): {Static.of(model, settings)}")


def check_tunable(model: Any) -> None:
    """Raise UsageError for a model whose weights cannot be trained."""
    if getattr(model, "is_quantized", False):
        raise UsageError("a model that is stored quantised cannot be tuned; give the unquantised model")
    if is_streamed(model):
        raise UsageError("the model does not fit into the GPU's memory, so it cannot be tuned; use a larger GPU")


def roomy_mode(weights: int) -> TuningMode:
    """Return "full" where the device has room to tune so many weights, else "lora"."""
    free = free_bytes()
    return "full" if _BYTES * weights < _SPARE * (free_ram() if free is None else free) else "lora"


@contextmanager
def _put_back(model: Any) -> Iterator[None]:
    """Put back what libraries change on a model: its modules and their attributes, and which weights are trained."""
    modules = []
    for module in model.modules():
        tables = [(value, dict(value)) for value in vars(module).values() if isinstance(value, dict)]
        modules.append((module, dict(vars(module)), tables))
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    cache = model.config.use_cache
    try:
        yield
    finally:
        for module, attributes, tables in modules:
            vars(module).clear()
            vars(module).update(attributes)
            for table, entries in tables:
                table.clear()
                table.update(entries)
        for parameter, flag in flags:
            parameter.grad = None
            parameter.requires_grad_(flag)
        model.config.use_cache = cache


@contextmanager
def _weights_in_fp32(model: Any) -> Iterator[None]:
    """Train fp32 copies in the place of all weights but an adapter's. The weights themselves wait untouched."""
    import torch

    prefix = model.base_model.prefix if hasattr(model, "peft_config") else None
    stored = [
        (parameter, parameter.data)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and not (prefix and prefix in name)
    ]
    model.requires_grad_(False)
    try:
        for parameter, value in stored:
            parameter.data = value.to(torch.float32, copy=True)
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, value in stored:
            parameter.grad = None
            parameter.data = value


def _put_on_adapter(model: Any, settings: FitSettings) -> Any:
    """Return the model under a new adapter, beside those that are on it already; only the new one is trained."""
    is_adapted = hasattr(model, "peft_config")
    active = list(model.active_adapters) if is_adapted else []
    precision = "fp32" if is_adapted else choose_precision(settings.compute)  # else older layers would change as well
    trained = with_adapter(model, settings, precision, _ADAPTER)
    if not is_adapted:  # all its layers are new, and go with the adapter
        speed_up(trained)
    trained.base_model.set_adapter([*active, _ADAPTER])
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(f".{_ADAPTER}." in name)
    return trained


def _make_watch(after: Callable[[int], None], steps: frozenset[int], label: str, progress: Progress) -> Any:
    """Make the Trainer callback: progress, the check for a broken loss, looks at the model, and the end."""
    from transformers import TrainerCallback

    last = max(steps)

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if not math.isfinite(float(logs.get("loss", 0.0))):
                raise NotFiniteError(f"{label}: the loss is {logs['loss']} at step {state.global_step}")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step, model = state.global_step, kwargs["model"]
            if step in steps:
                with autocast(model):  # as the Trainer has it
                    model.eval()
                    after(step)
            control.should_training_stop |= step >= last
            tell(progress, label, min(step, last), last, last_loss(state))

    return Watch()
