"""The settings of fits: a recipe's `vector` sections, with what rows and models decide where it says auto."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from msa_lite.errors import UsageError
from msa_lite.evals.engine.models import count_weights, load_model
from msa_lite.io.models.heads import choose_precision, note_precision
from msa_lite.pipeline.prepare.run import Run
from msa_lite.recipe.training import VectorSpec
from msa_lite.train import FitSettings, Until
from msa_lite.train.settings import EPOCHS, TRIES, WARMUP_STEPS, auto_batch, auto_rate, most_epochs


def is_open_ended(run: Run, name: str) -> bool:
    """Check whether the vector of this name ("forget", "retain") is fitted until it has learnt enough.

    It is not if the target itself is tuned, which knows the rows from the start. Then `epochs: auto` is a number.
    """
    return run.recipe.is_open_ended(name) and run.scope.start == "prior" and run.scope.method == "msa"


def fit_settings(run: Run, name: str, **changes: Any) -> FitSettings:
    """Return the settings of the fit on the examples of this name ("forget", "retain").

    changes: values in the place of the recipe's, such as a baseline's epochs; None changes nothing.
    """
    spec, open_ended = run.recipe.vector_of(name), is_open_ended(run, name)
    rows = len(run.examples[name])
    batch = auto_batch(rows) if spec.batch_size == "auto" else spec.batch_size
    epochs: int | str = spec.epochs
    if epochs == "auto":
        epochs = most_epochs(rows, batch, retain=name == "retain") if open_ended else EPOCHS
    warmup = spec.warmup_epochs
    settings = replace(
        step_settings(spec, batch),
        epochs=int(epochs),
        learning_rate=fit_rate(run, name),
        weight_decay=spec.weight_decay,
        warmup_epochs=1.0 if warmup == "auto" else warmup,
        schedule="constant" if open_ended else "linear",
        seed=run.recipe.seed,
        warmup_steps=WARMUP_STEPS if open_ended and warmup == "auto" else None,
    )
    return replace(settings, **{key: value for key, value in changes.items() if value is not None})


def step_settings(spec: VectorSpec, batch: int) -> FitSettings:
    """Return the settings that decide the time and the memory of a step of `batch` rows; all others are defaults."""
    targets = spec.lora.targets
    return FitSettings(
        mode=spec.mode,
        lora_rank=spec.lora.rank,
        lora_alpha=spec.lora.alpha,
        lora_dropout=spec.lora.dropout,
        lora_targets=targets if isinstance(targets, str) else tuple(targets),
        batch_size=batch,
        micro_batch_size=_micro_batch(spec.micro_batch_size, batch),
        optimizer=spec.optimizer,
        compute=spec.compute,
    )


def fit_until(run: Run, name: str) -> Until | None:
    """Return the rule by which the open-ended fit of this vector ends; None where its epochs are fixed."""
    if not is_open_ended(run, name):
        return None
    target, vector = run.sources["target"], run.recipe.vector_of(name)

    def load() -> Any:
        model = load_model(target.folder, four_bit=vector.mode == "qlora")
        return note_precision(model, choose_precision(vector.compute))

    return Until(
        target,
        load=load,
        tries=TRIES if vector.learning_rate == "auto" else 1,
    )


def fit_rate(run: Run, name: str) -> float:
    """Return the recipe's learning rate of this vector's fit, or the one that suits the model that is tuned."""
    spec = run.recipe.vector_of(name)
    if spec.learning_rate != "auto":
        return spec.learning_rate
    return auto_rate(spec.mode, count_weights(run.sources["prior"]), spec.lora.alpha)


def _micro_batch(micro: int | str, batch: int) -> Any:
    """Return the rows of a forward pass: the largest divisor of the batch that is not above the recipe's number."""
    if isinstance(micro, str):
        return micro
    return next(size for size in range(min(micro, batch), 0, -1) if batch % size == 0)


def first_epoch(settings: FitSettings, rows: int) -> int:
    """Return the first epoch that learns anything. A warm-up begins at rate 0, which may be an epoch's only step."""
    return 2 if rows <= settings.batch_size and settings.warmup_epochs >= 1 else 1


def check_learns(run: Run, names: Iterable[str], **changes: Any) -> None:
    """Raise UsageError if a fit on one of the named sets of examples would end before it learns anything."""
    for name in names:
        check_fit_learns(name, fit_settings(run, name, **changes), len(run.examples[name]))


def check_fit_learns(name: str, settings: FitSettings, rows: int) -> None:
    """Raise UsageError if a fit on so many rows would end before it learns anything. name: what is fitted."""
    if settings.epochs < first_epoch(settings, rows):
        raise UsageError(
            f"{name}: its {rows} rows are one step of batch_size {settings.batch_size}, and with warm-up "
            f"({settings.warmup_epochs:g} epochs) the first step learns nothing; give more epochs, or warmup_epochs: 0"
        )
