"""One fit: fine-tune a prior on rows and write the vector, with the Hugging Face Trainer underneath.

A fit minimises the loss of the rows, or an `Objective` in its place, as the baselines do.

Three modes. `lora`: a PEFT adapter in fp32 on a frozen prior. `qlora`: the same on a prior held in 4-bit NF4. `full`:
all weights, fp32 masters, saved as an fp32 checkpoint so that the difference to the prior is not rounded. Where the
device has it, arithmetic runs in bf16 autocast. Training is saved after every epoch, and a rerun goes on from there
with the same result.

A fit has a fixed number of epochs, or is open-ended (`Until`): it goes on until the prior knows the rows as well as the
target does.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msa_lite.data import Example, hash_ids, pad_id
from msa_lite.errors import StageError, UsageError
from msa_lite.io.extras import require
from msa_lite.io.hub import Source, fetch
from msa_lite.io.manifest import is_finished, stage_folder
from msa_lite.io.progress import Progress, silent
from msa_lite.train.loop import SAVES, SCORES, Loop
from msa_lite.train.model import load_trainable
from msa_lite.train.objective import AfterEpoch, Objective
from msa_lite.train.plain import PlainLoss
from msa_lite.train.settings import FitSettings
from msa_lite.train.tries import Gauge, Tries
from msa_lite.train.until import Until

logger = logging.getLogger(__name__)

_CPU_TOKENS = 4096  # tokens of a micro-batch on a CPU, where running out of memory cannot be caught


def fit_vector(
    prior: str | Source,
    examples: Sequence[Example],
    out: str | Path,
    *,
    tokenizer: Any,
    settings: FitSettings = FitSettings(),
    label: str = "vector",
    extra_files: dict[str, str] | None = None,
    objective: Objective | None = None,
    after_epoch: AfterEpoch | None = None,
    until: Until | None = None,
    progress: Progress = silent,
) -> Path:
    """Tune the prior on the examples and write the vector's folder: a PEFT adapter, or an fp32 checkpoint in full mode.

    Also writes train_log.jsonl (one line a step: step, epoch, loss, grad_norm, learning_rate), the files of
    `extra_files` (name → text) and a manifest. With `after_epoch`, the weights that it keeps go into its folders
    `epoch-1`, `epoch-2`, … With `until`, the fit is open-ended: it has at most `settings.epochs` epochs, course.json
    and the manifest (`fit`) record how it went, and a warning says when it has not learnt enough. A folder made from
    the same inputs is left as it is. A stopped fit goes on after its last save.

    Raise UsageError where packages are missing (torch; for qlora, bitsandbytes), NotFiniteError when the loss is no
    longer finite and there is no epoch to keep.
    """
    require("train")
    source = prior if isinstance(prior, Source) else fetch(str(prior))
    out = Path(out)
    assert until is None or (objective is None and after_epoch is None), "an open-ended fit minimises the plain loss"
    inputs = fit_inputs(source, examples, settings, objective, after_epoch, until)
    if is_finished(out, inputs):
        logger.info("%s: already made from the same inputs", out)
        return out
    check_mode(settings.mode)
    facts: dict[str, Any] = {"sources": {"prior": source.pinned()}, "rows": len(examples)}
    with stage_folder(out, "vector", inputs, facts, resumable=True) as partial:
        loss = objective or PlainLoss(examples, pad_id(tokenizer))
        loop = Loop(source, examples, tokenizer, settings, partial, label, loss, after_epoch, progress)
        facts |= _run_until(loop, until) if until else {"micro_batch_size": _run(loop)}
        for name, text in (extra_files or {}).items():
            (partial / name).write_text(text, "utf-8")
    return out


def fit_inputs(
    prior: Source,
    examples: Sequence[Example],
    settings: FitSettings,
    objective: Objective | None = None,
    after_epoch: AfterEpoch | None = None,
    until: Until | None = None,
) -> dict[str, Any]:
    """Return all that decides the result of a fit, as its manifest records it and `is_finished` compares it."""
    inputs = {
        "prior": prior.identity(),
        "examples": hash_ids(examples),
        "settings": settings.describe(),
    }
    if objective is not None:
        inputs["objective"] = objective.describe()
    if after_epoch is not None:
        inputs["kept"] = after_epoch.describe()
    if until is not None:
        inputs["until"] = until.describe()
    return inputs


def check_mode(mode: str) -> None:
    """Raise UsageError when the mode needs a package that is not installed."""
    if mode == "qlora":
        require("qlora")


def _run_until(loop: Loop, until: Until) -> dict[str, Any]:
    """Train until enough is learnt, perhaps several times at different rates; return facts for the manifest."""

    def fit(rate: float, folder: Path, gauge: Gauge, label: str) -> int:
        folder.mkdir(exist_ok=True)
        settings = replace(loop.settings, learning_rate=rate)
        return _run(replace(loop, settings=settings, partial=folder, gauge=gauge, label=label))

    settings, pad = loop.settings, pad_id(loop.tokenizer)
    tries = Tries(until, loop.examples, pad, settings.learning_rate, settings.epochs, settings.seed, loop.label, fit)
    return tries.run(loop.partial)


def _run(loop: Loop) -> int:
    """Train, with smaller micro-batches when the device runs out of memory; return the size that fitted."""
    from accelerate.utils import find_executable_batch_size
    from accelerate.utils.memory import clear_device_cache

    sizes = _micro_batches(loop)
    run = find_executable_batch_size(
        lambda micro: _attempt(loop, micro),
        starting_batch_size=next(sizes),
        reduce_batch_size_fn=lambda: next(sizes, 0),
    )
    try:
        fitted = run()
    except RuntimeError as error:
        if "No executable batch size" not in str(error):
            raise
        raise StageError(
            f"{loop.label}: out of memory, even with one row at a time; try a smaller max_length, or, for "
            "vectors, vector.mode qlora"
        ) from error
    finally:  # in bf16, accelerate makes a reference cycle of the model, which would keep it in memory
        clear_device_cache(garbage_collection=True)
    shutil.rmtree(loop.partial / SAVES)
    return int(fitted)


def _attempt(loop: Loop, micro: int) -> int:
    """Train with one size of micro-batch; return it."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)  # of a model that did not fit
    partial, saves = loop.partial, loop.partial / SAVES
    if saves.exists() and not (saves / f"micro-{micro}").exists():  # left by a larger one that did not fit
        for mark in saves.glob("micro-*"):  # first, so that a rerun after a kill in between resumes nothing
            mark.unlink()
        for folder in (*partial.glob("epoch-*"), partial / SCORES, saves):
            shutil.rmtree(folder, ignore_errors=True)
    saves.mkdir(exist_ok=True)
    (saves / f"micro-{micro}").touch()
    replace(loop, micro=micro).run(_load(loop))
    return micro


def _load(loop: Loop) -> Any:
    """Load the model to tune. Raise StageError when its files have changed since they were first read."""
    model = load_trainable(loop.source.folder, loop.settings, loop.source.added)
    loop.source.check_unchanged()
    return model


def _micro_batches(loop: Loop) -> Iterator[int]:
    """Return the sizes to try, largest first: the divisors of batch_size up to the last one tried before."""
    import torch

    size, fixed = loop.settings.batch_size, loop.settings.micro_batch_size
    if fixed != "auto":
        if size % fixed:
            raise UsageError(f"micro_batch_size {fixed} does not divide batch_size {size}")
        return iter([fixed])
    limit = size
    if not torch.cuda.is_available():
        limit = max(1, _CPU_TOKENS // max(loop.objective.longest, max(len(e.ids) for e in loop.examples)))
    for mark in (loop.partial / SAVES).glob("micro-*"):
        limit = min(limit, int(mark.name.removeprefix("micro-")))
    return (part for part in range(size, 0, -1) if size % part == 0 and part <= limit)
