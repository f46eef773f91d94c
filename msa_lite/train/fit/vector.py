"""One fit: fine-tune a prior on rows and write the vector, with the Hugging Face Trainer underneath.

A fit minimises the loss of the rows, or an `Objective` in its place, as the baselines do.

Three modes. `lora`: a PEFT adapter in fp32 on a frozen prior. `qlora`: the same on a prior held in 4-bit NF4. `full`:
all weights, fp32 masters, saved as an fp32 checkpoint so that the difference to the prior is not rounded. On a GPU,
matrix products run in bf16, or in fp16 with loss scaling. Training is saved after every epoch, and a rerun goes on from
there with the same result. Where memory runs out, so does the fit itself, in a way that takes less (`Rung`).

A fit has a fixed number of epochs, or is open-ended (`Until`): it goes on until the prior knows the rows as well as the
target does.
"""

from __future__ import annotations

import logging
import shutil
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msa_lite.data import Example
from msa_lite.errors import NotFiniteError, StageError
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress, notices, readable, silent
from msa_lite.io.files.reading import read_object
from msa_lite.io.files.writing import write_json
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.models.devices import avoid_fragments, free_memory, is_out_of_memory, memory_fault, total_bytes
from msa_lite.io.models.heads import Compute, choose_precision
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.train.fit.loop import SAVES, SCORES, Loop, VectorFit, drop_saves, whole_saves
from msa_lite.train.fit.until import Until
from msa_lite.train.memory.model import copy_trained, load_trainable, restore_trained
from msa_lite.train.memory.rungs import Rung, Static, ladder, longest_first, micro_batches, set_up, step_fault
from msa_lite.train.objectives.plain import PlainLoss
from msa_lite.train.settings import FitSettings

logger = logging.getLogger(__name__)

_RUNG = "rung.json"  # beside the saves: the rung that they were made at


def fit_vector(
    prior: str | Source,
    examples: Sequence[Example],
    out: str | Path,
    *,
    tokenizer: Any,
    settings: FitSettings = FitSettings(),
    until: Until | None = None,
    label: str = "vector",
    progress: Progress = silent,
) -> Path:
    """Tune the prior on the examples and write the vector's folder: a PEFT adapter, or an fp32 checkpoint in full mode.

    Also writes train_log.jsonl (one line a step: step, epoch, loss, grad_norm, learning_rate) and a manifest. With
    `until`, the fit is open-ended: course.json and the manifest (`fit`) record how it went, and a warning says when it
    has not learnt enough. A folder made from the same inputs is left as it is. A stopped fit goes on after its last
    save. `msa_lite.train.VectorFit` can do more: another objective, weights of several epochs, trackers.

    Raise UsageError where packages are missing (torch; for qlora, bitsandbytes), NotFiniteError when the loss is no
    longer finite and there is no epoch to keep, StageError when memory runs out whatever is tried.
    """
    require("train")
    source = prior if isinstance(prior, Source) else fetch(str(prior))
    return run_fit(VectorFit(source, examples, tokenizer, settings, until=until, label=label), out, progress)


def run_fit(fit: VectorFit, out: str | Path, progress: Progress = silent) -> Path:
    """Make a fit by this process and write the vector's folder, as `fit_vector` does."""
    require("train")
    out, inputs, settings = Path(out), fit.inputs(), fit.settings
    if is_finished(out, inputs):
        logger.info("%s: already made from the same inputs", out)
        return out
    avoid_fragments()
    check_mode(settings.mode, settings.optimizer, settings.compute)
    facts = fit.facts()
    with stage_folder(out, "vector", inputs, facts, resumable=True) as partial:
        loop = Loop(fit, partial, progress)
        facts |= _run_until(loop, fit.until) if fit.until else {"micro_batch_size": _run(loop)}
        fit.write_files(partial)
    return out


def check_mode(mode: str, optimizer: str = "auto", compute: Compute = "auto") -> None:
    """Raise UsageError when settings need a package that is not installed, or a precision that the device lacks."""
    if mode == "qlora":
        require("qlora")
    if optimizer == "adamw_8bit":
        require("qlora", "vector.optimizer adamw_8bit needs bitsandbytes")
    if compute == "bf16":
        choose_precision(compute)


def _run_until(loop: Loop, until: Until) -> dict[str, Any]:
    """Train until enough is learnt, perhaps several times at different rates; return facts for the manifest."""
    open_fit = loop.open(until)
    while (attempt := open_fit.next_attempt()) is not None:
        error: NotFiniteError | None = None
        try:
            _run(loop.attempt(*attempt, open_fit))
        except NotFiniteError as fault:
            error = fault
        open_fit.end_attempt(error)
    return open_fit.finish()


def _run(loop: Loop) -> int:
    """Train at the first rung that fits into memory; return its rows of a forward pass."""
    micros = micro_batches(loop.fit.settings, max(loop.objective.longest, max(len(e.ids) for e in loop.fit.examples)))
    _drop_other_saves(loop)
    model = _load(loop)
    rungs = _rungs_left(loop, ladder(model, micros))
    start = None if loop.fit.settings.mode == "full" else copy_trained(model)
    is_plain = isinstance(loop.objective, PlainLoss)  # others look at the prior before the last save is loaded
    rows = longest_first(loop.fit.examples)
    try:
        for rung, lower in zip(rungs, [*rungs[1:], None], strict=True):
            set_up(model, rung, loop.partial)
            fault, has_run = step_fault(model, loop.objective, loop.fit.settings, rows, rung.micro), False
            if fault is None:
                fault, has_run = _attempt(replace(loop, rung=rung), model), True
            if fault is None:
                drop_saves(loop.partial / SAVES)
                return rung.micro
            if lower is None:
                raise _too_large(loop, model, rung, fault)
            notices.info("%s: out of memory with %s (%s); going on with %s", loop.fit.label, rung, fault, lower)
            if has_run and start is not None:
                restore_trained(model, start)
            elif has_run and not (is_plain and whole_saves(loop.partial / SAVES)):
                model = None
                model = _load(loop)
    finally:  # in bf16, accelerate makes a reference cycle of the model, which would keep it in memory
        model = None
        free_memory()
    raise AssertionError("the lowest rung fits or raises")


def _attempt(loop: Loop, model: Any) -> str | None:
    """Train at a rung; return why memory ran out, or None. Its saves stay."""
    record = {"rung": loop.rung, "has_8bit_states": loop.fit.settings.has_8bit_states}
    write_json(loop.partial / SAVES / _RUNG, record)
    try:
        loop.run(model)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return memory_fault(error)
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        free_memory()
    return None


def _load(loop: Loop) -> Any:
    """Load the model to tune onto the device; if it finds no room there and is frozen, with its layers in RAM.

    Raise StageError when it does not fit even so, or its files have changed since.
    """
    free_memory()  # of the target, whose loss was measured, or of a model that did not fit
    source, settings = loop.fit.prior, loop.fit.settings
    model, fault = None, ""
    for spill in (None,) if settings.mode == "full" else (None, loop.partial):
        if spill:
            notices.info(
                "%s: the weights do not fit (%s); layers wait in RAM and stream to the device", loop.fit.label, fault
            )
        try:
            model = load_trainable(source.folder, settings, source.added, spill=spill)
            break
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold weights
            fault = memory_fault(error)
        free_memory()
    if model is None:
        change = {"full": "vector.mode lora", "lora": "vector.mode qlora", "qlora": "a larger GPU"}[settings.mode]
        raise StageError(
            f"{loop.fit.label}: the weights do not fit into the memory of the device, {readable(total_bytes())} in all "
            f"({fault}). Close other programs that use it, or choose {change}"
        )
    source.check_unchanged()
    return model


def _too_large(loop: Loop, model: Any, rung: Rung, fault: str) -> StageError:
    """Return the error for a fit that has no rung left."""
    settings, longest = loop.fit.settings, max(len(e.ids) for e in loop.fit.examples)
    rows = "even with one row at a time" if rung.micro == 1 else f"with micro_batch_size {rung.micro}"
    changes = {
        "full": "vector.optimizer adamw_8bit, vector.mode lora",
        "lora": "vector.mode qlora, a smaller max_length",
        "qlora": "a smaller max_length or vector.lora.rank",
    }[settings.mode]
    if rung.micro > 1:
        changes = f"micro_batch_size auto, {changes}"
    return StageError(
        f"{loop.fit.label}: out of memory, {rows} ({fault}): {Static.of(model, settings)}; the longest row has "
        f"{longest} tokens. Try {changes}"
    )


def _drop_other_saves(loop: Loop) -> None:
    """Remove saves that cannot be resumed here: those of another optimiser, or of several processes."""
    partial, saves = loop.partial, loop.partial / SAVES
    record = read_object(saves / _RUNG) if (saves / _RUNG).exists() else {}
    if saves.exists() and record.get("has_8bit_states") is not loop.fit.settings.has_8bit_states:
        (saves / _RUNG).unlink(missing_ok=True)  # first, so that a rerun after a kill in between resumes nothing
        for folder in (*partial.glob("epoch-*"), partial / SCORES):
            shutil.rmtree(folder, ignore_errors=True)
        drop_saves(saves)
    saves.mkdir(exist_ok=True)


def _rungs_left(loop: Loop, rungs: list[Rung]) -> list[Rung]:
    """Return the rungs from the one on that the saves were made at."""
    path = loop.partial / SAVES / _RUNG
    if not path.exists():
        return rungs
    last = Rung(**read_object(path)["rung"])
    left = rungs[rungs.index(last) :] if last in rungs else [rung for rung in rungs if rung.micro <= last.micro]
    return left or rungs[-1:]
