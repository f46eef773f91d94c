"""Fit the forget and retain vectors, in this process or in all of a launcher; and the settings of every fit.

Settings are a recipe's `vector` sections, with what rows and models decide where it says auto.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.budget.plan import StageCost
from msa_lite.budget.speed import Machine
from msa_lite.data import Row, pad_id
from msa_lite.errors import NotFiniteError, UsageError
from msa_lite.evals.engine.models import count_weights, load_model
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.finished.manifest import is_finished
from msa_lite.io.launch.crew import Crew
from msa_lite.io.models.heads import choose_precision, note_precision
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.merger import Precision, Term, merge_terms
from msa_lite.merger.checks.inputs import find_inputs
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.folder import TRACKING
from msa_lite.pipeline.stages.costs import merge_cost, step_settings, vector_costs
from msa_lite.pipeline.stages.facts import Facts
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.train import FitSettings, Tracking, Until, VectorFit, run_fit
from msa_lite.train.objectives.held import HeldLoss
from msa_lite.train.settings import EPOCHS, TRIES, WARMUP_STEPS, auto_batch, auto_rate, most_epochs

RETAIN_VECTOR = "retain vector"
START = "start of the forget vector"
FIT = "fit sharded"  # the order that calls the other processes to a full fit
_SAYS = {
    "forget": "a copy of the prior, or else of the target, learns the rows to forget; its change is the vector",
    "retain": "a copy of the prior, or else of the target, learns rows to keep; its change is the vector",
}


def tracking_of(run: Run) -> Tracking:
    """Return the run's trackers."""
    return Tracking(tuple(run.recipe.track), run.folder / TRACKING, run.folder.resolve().name)


def row_hashes(rows: Sequence[Row]) -> dict[str, str]:
    """Return a file with the hashes of the rows that were learnt. The rows themselves are not written down again."""
    return {"rows.jsonl": "".join(json.dumps({"index": r.index, "sha256": r.sha256}) + "\n" for r in rows)}


def fit_stages(context: Context) -> list[Stage]:
    """Return the fits of a recipe's vectors in their order, and what they start from."""
    recipe, folder, stages = context.recipe, context.scope.folder / "vectors", list[Stage]()
    for name in recipe.vector_names:
        needs = []
        if name == "forget" and recipe.starts_at_retain:
            start = [] if recipe.vector.mode == "full" else [_start_stage(context)]  # there θ_2 is a vector itself
            stages, needs = [*stages, *start], [start[0].name if start else RETAIN_VECTOR]
        stages.append(
            Stage(
                f"{name} vector",
                "fit",
                folder / name,
                lambda progress, name=name: fit_one(context.run, name, progress),  # type: ignore[misc]
                needs=needs,
                inputs=lambda name=name: vector_inputs(context.run, name),  # type: ignore[misc]
                cost=partial(vector_costs, recipe, name),
                says=_SAYS[name],
            )
        )
    return stages


def _start_stage(context: Context) -> Stage:
    """Return the stage that merges the retain vector into the prior."""
    folder = context.scope.folder / "vectors/start"

    def terms() -> list[Term[Source]]:
        return [Term("retain", fetch(str(context.run.vector_folder("retain"))), 1.0)]

    def make(progress: Progress) -> None:
        prior = context.run.sources["prior"]
        merge_terms(prior, folder, terms(), prior, Precision(), replace=True, compare=(), progress=progress)

    def inputs() -> dict[str, Any]:
        prior = context.run.sources["prior"]
        return find_inputs(folder, "model", prior, terms(), prior, Precision().record, True).record

    def cost(facts: Facts, machine: Machine) -> list[StageCost]:
        shape = facts.shapes["prior"]
        return [merge_cost("the start", shape, machine, {"start of the forget vector": shape.stored})]

    says = "the retain vector is merged into the prior, which is tuned next"
    return Stage(START, "make", folder, make, [RETAIN_VECTOR], inputs, cost, says=says)


def fit_one(run: Run, name: str, progress: Progress) -> None:
    """Fit a vector ("forget", "retain") into the run's folder, unless it is there already."""
    make_fit(vector_fit(run, name), run.vector_folder(name), run.crew, {"name": name}, progress)


def make_fit(fit: VectorFit, out: Path, crew: Crew, arguments: Mapping[str, Any], progress: Progress) -> None:
    """Make a fit into its folder, unless it is there already: of all weights by all processes of a crew, else by one.

    arguments: those of the order `FIT`, by which the other processes find the same fit. Raise as `fit_with_all`.
    """
    if crew.is_alone or fit.settings.mode != "full":
        run_fit(fit, out, progress)
    elif not is_finished(out, fit.inputs()):
        with crew.helped(FIT, arguments):
            fit_with_all(fit, out, crew, progress)


def help_fit(fit: VectorFit, out: Path, crew: Crew) -> None:
    """Make a fit with the first process, which decides what comes of it."""
    with suppress(NotFiniteError):
        fit_with_all(fit, out, crew, silent)


def fit_with_all(fit: VectorFit, out: Path, crew: Crew, progress: Progress) -> None:
    """Make a fit of all weights by all processes of a crew; each of them has to call it.

    Raise NotFiniteError, in all of them, where the loss is no number any more.
    """
    from msa_lite.train.processes.fit import fit_sharded

    fault: NotFiniteError | None = None
    with crew.group():  # an error that escapes would leave this process in the group
        try:
            fit_sharded(fit, out, progress)
        except NotFiniteError as error:
            fault = error
    if fault is not None:
        raise fault


def check_fits(run: Run) -> None:
    """Raise UsageError, before any work, if a vector would learn nothing, or the crew cannot fit it together."""
    for name in run.recipe.vector_names:
        settings = fit_settings(run, name)
        check_learns(name, settings, len(run.examples[name]))
        check_shares(run.crew, settings)


def check_shares(crew: Crew, settings: FitSettings) -> None:
    """Raise UsageError if a fit is for all processes of a crew, and they share a GPU or cannot have its settings."""
    from msa_lite.train.processes.fit import check_sharded

    if crew.is_alone or settings.mode != "full":
        return
    if not crew.own_gpus:
        raise UsageError(f"{crew.ranks.count} processes are more than there are GPUs; start one for each GPU")
    check_sharded(settings, crew.ranks.count)


def vector_fit(run: Run, name: str) -> VectorFit:
    """Return the fit of a vector."""
    return VectorFit(
        vector_start(run, name),
        run.examples[name],
        run.prompter.tokenizer,
        fit_settings(run, name),
        objective=_hold(run) if name == "forget" else None,
        until=fit_until(run, name),
        label=f"{name} vector",
        extra_files=row_hashes(run.rows[name]),
        tracking=tracking_of(run),
    )


def vector_start(run: Run, name: str) -> Source:
    """Return the model that a vector is fitted from, and differs from."""
    prior = run.sources["prior"]
    if name != "forget" or not run.recipe.starts_at_retain:
        return prior
    start = "retain" if run.recipe.vector.mode == "full" else "start"
    return replace(fetch(str(run.vector_folder(start))), added=prior.added)


def _hold(run: Run) -> HeldLoss | None:
    """Return the loss that also holds the model on retain rows, if the recipe has `vector.hold`, else None."""
    recipe = run.recipe
    if not recipe.hold:
        return None
    return HeldLoss(
        run.examples["forget"],
        run.examples["retain"],
        recipe.hold,
        pad=pad_id(run.prompter.tokenizer),
        seed=recipe.seed,
        full=recipe.vector.mode == "full",
    )


def vector_inputs(run: Run, name: str) -> dict[str, Any]:
    """Return all that decides a vector, as its manifest records it."""
    return vector_fit(run, name).inputs()


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


def first_epoch(settings: FitSettings, rows: int) -> int:
    """Return the first epoch that learns anything. A warm-up begins at rate 0, which may be an epoch's only step."""
    return 2 if rows <= settings.batch_size and settings.warmup_epochs >= 1 else 1


def check_learns(name: str, settings: FitSettings, rows: int) -> None:
    """Raise UsageError if a fit on so many rows would end before it learns anything. name: what is fitted."""
    if settings.epochs < first_epoch(settings, rows):
        raise UsageError(
            f"{name}: its {rows} rows are one step of batch_size {settings.batch_size}, and with warm-up "
            f"({settings.warmup_epochs:g} epochs) the first step learns nothing; give more epochs, or warmup_epochs: 0"
        )
