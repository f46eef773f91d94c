"""The cost of work that several stages have in common: fits, merges, questions. Memory, disk and a rough time.

All follows from headers and counts of rows. What a single stage costs stands beside the stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from msa_lite.budget.needs import (
    FitCase,
    Need,
    fit_need,
    fit_rungs,
    head_bytes,
    score_need,
    stream_layers,
    waiting_bytes,
)
from msa_lite.budget.plan import CHECKS, StageCost, gigabytes
from msa_lite.budget.shape import Shape
from msa_lite.budget.speed import Machine, token_operations
from msa_lite.io.models.transit import RAM_SHARE
from msa_lite.pipeline.prepare.earlier import EARLIER_ROWS
from msa_lite.pipeline.prepare.lengths import LEARNT
from msa_lite.pipeline.stages.facts import Facts, RowFacts
from msa_lite.recipe import Recipe
from msa_lite.recipe.training import VectorSpec
from msa_lite.train import FitSettings
from msa_lite.train.fit.until import SAMPLE
from msa_lite.train.memory.rungs import CPU_TOKENS, Rung
from msa_lite.train.objectives.held import REMEMBERED
from msa_lite.train.settings import EPOCHS, MOST_BATCH, auto_batch, most_epochs

CHECKED_ROWS = 64  # of each set, for the check before a run
_LONGEST = 512  # tokens of a question with its answer
_BATCH = 64  # questions that are answered at a time
_TOKENS = 8192  # of a batch that is scored while layers stream (`evals.engine.models`)
_FORWARD = 1 / 3  # the passes of a step of decoding, which goes forward alone
_ANSWER = 22  # tokens of an answer: half as many again as of right ones, since some models know no end

QuestionPart = Literal["check", "others", "validation", "test", "earlier"]
"""The questions of a stage: the check's about forget rows, its others, or those of a part of the run."""

SAVE = 12  # bytes that a save takes for each weight that is trained
MOST_SAVES = 3  # of a fit on disk at a time: two, and a third until the oldest is removed
_MERGE = 512_000_000  # bytes of a merge (`merger.checked.MAX_MEMORY`)
_HELD = 1.1  # the passes of a row that holds a fit, for those of a row that is learnt; the reference runs once
_USUAL = 8  # epochs of open-ended fits: 6 of a small new model, 8 or 9 of SmolLM2-135M; they may take 60
_MEASURED = 0.5  # the passes of a row whose loss is measured, for those of a row that is learnt


def fit_cost(
    name: str,
    shape: Shape,
    settings: FitSettings,
    rows: RowFacts,
    machine: Machine,
    reference: float = 0.0,
    more: float = 0.0,
) -> StageCost:
    """Return the cost of a fit on the first rung of the ladder that fits the device.

    reference: the part of the layers that the fit's frozen second model has, in full mode. more: the passes besides
    those over its own rows, for each token of them: over rows that hold it, or rows to keep.
    """
    case = _fit_case(settings, rows.longest, machine, reference)
    rung, need = _choose_rung(shape, case, settings, machine)
    waiting = waiting_bytes(shape, case, rung)
    seconds = None
    if rows.count:
        trained = shape.trained(case.mode, case.rank, case.targets)
        computed = (1 + more) * (shape.in_linear + shape.vocabulary * shape.hidden) * rows.tokens
        passes = (1 + more) * -(-rows.count // rung.micro)
        seconds = machine.seconds(
            shape,
            settings.epochs * token_operations(case.mode, rung.checkpointing) * computed,
            disk=(settings.epochs * SAVE + 4) * trained,
            bus=settings.epochs * passes * 2 * (waiting + head_bytes(shape, case, rung)),  # forward, again backward
            passes=settings.epochs * passes,
        )
    how = f"{rung}; the longest row has {rows.longest} tokens"
    in_file = max(0, waiting - int(RAM_SHARE * machine.host)) if machine.host else 0
    files = {"layers without room in RAM": in_file} if in_file else {}
    return StageCost(name, "fit", need, seconds, how, waiting=waiting, while_running=files)


def _fit_case(settings: FitSettings, longest: int, machine: Machine, reference: float) -> FitCase:
    """Return a fit as the machine's device computes it, as far as its memory depends on it."""
    device = machine.device
    is_small = settings.optimizer == "auto" and settings.mode == "qlora" and device.is_gpu
    return FitCase(
        settings.mode,
        longest,
        settings.lora_rank,
        settings.lora_targets,
        eight_bit=settings.optimizer == "adamw_8bit" or is_small,
        halves=settings.compute == "bf16" or (settings.compute == "auto" and device.is_gpu),
        wide=device.is_gpu and not device.has_bf16,
        on_gpu=device.is_gpu,
        shards=machine.processes if settings.mode == "full" else 1,
        reference=reference,
    )


def _choose_rung(shape: Shape, case: FitCase, settings: FitSettings, machine: Machine) -> tuple[Rung, Need]:
    """Return the first rung that fits on the device, or the one that needs least, and its need."""
    batch, micro = settings.batch_size, settings.micro_batch_size
    sizes = [size for size in range(batch, 0, -1) if batch % size == 0] if micro == "auto" else [micro]
    if not machine.device.is_gpu:  # nothing is tried there: a process that takes too much is killed
        rung = Rung(next((size for size in sizes if size * case.longest <= CPU_TOKENS), sizes[-1]))
        return rung, fit_need(shape, case, rung)
    ladder = [(rung, fit_need(shape, case, rung)) for rung in fit_rungs(shape, case, sizes)]
    fitting = (pair for pair in ladder if pair[1].nbytes <= machine.device.nbytes)
    return next(fitting, min(ladder, key=lambda pair: pair[1].nbytes))


def step_settings(spec: VectorSpec, batch: int) -> FitSettings:
    """Return the settings that decide the time and the memory of a step of `batch` rows; all others are defaults."""
    targets, micro = spec.lora.targets, spec.micro_batch_size
    if not isinstance(micro, str):  # the largest divisor of the batch that is not above the recipe's number
        micro = next(size for size in range(min(micro, batch), 0, -1) if batch % size == 0)
    return FitSettings(
        mode=spec.mode,
        lora_rank=spec.lora.rank,
        lora_alpha=spec.lora.alpha,
        lora_dropout=spec.lora.dropout,
        lora_targets=targets if isinstance(targets, str) else tuple(targets),
        batch_size=batch,
        micro_batch_size=micro,
        optimizer=spec.optimizer,
        compute=spec.compute,
    )


def vector_costs(
    recipe: Recipe, name: str, facts: Facts, machine: Machine, reference: float = 0.0, more: float = 0.0
) -> list[StageCost]:
    """Return the cost of fitting a vector; where its end is open, that of measuring the target first.

    reference, more: see `fit_cost`.
    """
    spec, prior, is_open = recipe.vector_of(name), facts.shapes["prior"], recipe.is_open_ended(name)
    rows, retain = facts.rows_of(name, spec.max_length), facts.rows_of("retain", spec.max_length)
    batch = spec.batch_size
    if batch == "auto":
        batch = auto_batch(rows.count) if rows.count else MOST_BATCH
    epochs, costs = EPOCHS if spec.epochs == "auto" else spec.epochs, list[StageCost]()
    if is_open:  # it measures the loss on a sample after each epoch
        goal = asking_cost("the target's loss", facts.shapes["target"], rows, machine, four_bit=spec.mode == "qlora")
        costs.append(replace(goal, kind="goal", seconds=goal.seconds if rows.count else None))
        epochs = min(_USUAL, most_epochs(rows.count, batch, retain=name == "retain")) if rows.count else _USUAL
        more += _MEASURED * (min(SAMPLE, rows.count) / rows.count if rows.count else 1.0)
    if recipe.hold and name == "forget":
        reference, more = 1.0, more + facts.retain_ratio * _HELD
        rows = replace(rows, longest=max(rows.longest, retain.longest if retain.count else 0))
    settings = replace(step_settings(spec, batch), epochs=epochs)
    fit = fit_cost(f"the fit of the {name} vector", prior, settings, rows, machine, reference, more)
    if recipe.hold and name == "forget" and not machine.device.is_gpu:  # which leaves them in RAM
        states = min(REMEMBERED, 4 * prior.hidden * retain.tokens)
        parts = {**fit.need.parts, "reference": fit.need.parts.get("reference", 0) + states}
        fit = replace(fit, need=replace(fit.need, parts=parts))
    how = f"{fit.how}; its time is for {epochs} epochs" if is_open else fit.how
    trained = trained_weights(recipe, prior)
    files = {**fit.while_running, "saves of a fit": MOST_SAVES * SAVE * trained}
    return [*costs, replace(fit, how=how, disk={"vectors": 4 * trained}, while_running=files)]


def trained_weights(recipe: Recipe, prior: Shape) -> int:
    """Return the number of weights that the fit of a vector trains."""
    lora = recipe.vector.lora
    return prior.trained(recipe.vector.mode, lora.rank, lora.targets)


def merge_cost(what: str, shape: Shape, machine: Machine, disk: Mapping[str, int]) -> StageCost:
    """Return the cost of a merge into a model of this shape: block by block, in RAM. disk: bytes that it writes."""
    seconds = machine.seconds(shape, disk=shape.stored)
    need = Need({"buffers": _MERGE})
    return StageCost(what, "merge", need, seconds, "block by block, in RAM", disk=disk, place="host")


def asking_cost(
    what: str,
    shape: Shape,
    rows: RowFacts,
    machine: Machine,
    *,
    answer: int = 0,
    four_bit: bool = False,
    loads: int = 1,
) -> StageCost:
    """Return the cost of scoring so many rows with a model, with the smallest batches; larger ones take what is free.

    answer: tokens that the model answers to each row, at most. four_bit: the model is loaded in 4 bits. loads: the
    models that are asked, one after the other.
    """
    device = machine.device
    width = (2.0 if four_bit else min(shape.width, 4.0)) if device.is_gpu else 4.0
    need = score_need(shape, _LONGEST, width, on_gpu=device.is_gpu, four_bit=four_bit)
    need, streamed = stream_layers(shape, need, device, four_bit)
    length = min(answer, _ANSWER)
    steps = length * -(-rows.count // _BATCH)  # of decoding
    tokens = rows.tokens * (2 if length else 1)  # once with the right answer, and once to answer
    seconds = machine.seconds(
        shape,
        2 * shape.weights * (tokens + length * rows.count),
        bus=streamed * (-(-tokens // _TOKENS) + steps),
        passes=_FORWARD * steps,
        loads=loads,
    )
    how = f"slow: {gigabytes(streamed)} of weights stream from RAM" if streamed else "batches grow with free memory"
    return StageCost(what, "checks" if what == CHECKS else "scores", need, seconds, how, waiting=streamed)


def asking_costs(
    recipe: Recipe, what: str, model: str, part: QuestionPart, chooses: bool, facts: Facts, machine: Machine
) -> list[StageCost]:
    """Return the cost of asking a model a part of the questions.

    what: the name of such stages in a plan. chooses: whether some questions are set apart for a choice.
    """
    shape = facts.shapes.get(model, facts.shapes["target"])  # the unlearned model is as large as the target
    rows = facts.asked(_count_questions(recipe, model, part, chooses, facts))
    return [asking_cost(what, shape, rows, machine, answer=recipe.max_new_tokens)]


def _count_questions(recipe: Recipe, model: str, part: QuestionPart, chooses: bool, facts: Facts) -> float:
    """Return about how many questions a model is asked. Where nothing is scored, those are rows that vectors learn.

    A set that is whole among the validation rows, too, is asked there.
    """
    if part == "earlier":
        return EARLIER_ROWS
    sets = facts.questions or {name: facts.rows[name].count for name in LEARNT if name in facts.rows}
    if part in ("check", "others"):
        return sum(min(CHECKED_ROWS, sets[name]) for name in sets if (name == "forget") == (part == "check"))
    whole, share = (1.0, recipe.validation) if part == "validation" else (0.0, 1 - recipe.validation)
    counts = {name: count * (whole if name in ("forget", "holdout") else share) for name, count in sets.items()}
    return sum(count for name, count in (counts if chooses else sets).items() if model != "prior" or name == "forget")


def candidates_costs(recipe: Recipe, count: int, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of scoring so many candidates on the validation rows, one after the other in one target."""
    known = replace(facts, questions={name: rows for name, rows in facts.questions.items() if name != "holdout"})
    rows = facts.asked(count * _count_questions(recipe, "target", "validation", True, known))
    cost = asking_cost("the sweep", facts.shapes["target"], rows, machine, answer=recipe.max_new_tokens)
    return [replace(cost, kind="sweep")]


def evidence_costs(what: str, loads: int, passes: float, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of evidence, or of a probe.

    what: the name of such stages in a plan. loads: the models that it runs. passes: over the forget rows, of all of
    them.
    """
    rows = facts.asked(passes * facts.questions.get("forget", 0))
    return [asking_cost(what, facts.shapes["target"], rows, machine, loads=loads)]
