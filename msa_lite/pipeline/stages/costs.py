"""The cost of fits, merges, filters and questions: memory, disk and time, from headers and row counts alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

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
from msa_lite.budget.plan import StageCost, gigabytes
from msa_lite.budget.shape import Linear, Shape
from msa_lite.budget.speed import Device, Machine, token_operations
from msa_lite.io.models.waiting import RAM_SHARE
from msa_lite.pipeline.stages.facts import Facts, RowFacts, batch_size, trained_weights
from msa_lite.recipe import Recipe
from msa_lite.train.moments import HELD, MOST_LABELS
from msa_lite.train.rungs import CPU_TOKENS, Rung
from msa_lite.train.settings import EPOCHS, most_epochs
from msa_lite.train.until import SAMPLE

SEARCHED = 10  # points of a search
CHECKS = "the checks"  # the name of checks in a plan
CHECKED_ROWS = 64  # of each set, for the check before a run
_LONGEST = 512  # tokens of a question with its answer
_BATCH = 64  # questions that are answered at a time
_TOKENS = 8192  # of a batch that is scored while layers stream (`evals.engine.models`)
_FORWARD = 1 / 3  # the passes of a step of decoding, which goes forward alone
_LONGER = 1.5  # the length of a model's answers beside right ones: some models know no end

QuestionPart = Literal["check", "others", "validation", "test", "earlier"]
"""The questions of a stage: the check's about forget rows, its others, or those of a part of `Facts.asked`."""

SAVE = 12  # bytes that a save takes for each weight that is trained
MOST_SAVES = 3  # of a fit on disk at a time: two, and a third until the oldest is removed
_MERGE = 512_000_000  # bytes of a merge (`merger.checked.MAX_MEMORY`)
_HELD = 4 / 3  # the passes of a row that holds a fit, the reference's among them, for those of a row that is learnt
_USUAL = 8  # epochs of open-ended fits: 6 of a small new model, 8 or 9 of SmolLM2-135M; they may take 60
_MEASURED = 0.5  # the passes of a row whose loss is measured, for those of a row that is learnt
_ADAMW = 7 * 4  # bytes of a step for each weight: it reads weight, gradient and two states in fp32, and writes three
_MANY = 1 << 20  # tokens, more than a layer has inputs


@dataclass(frozen=True)
class FitSize:
    """A fit, as far as its memory and time depend on it."""

    what: str
    """"the fit of the forget vector", "the training of 1-books"."""
    case: FitCase
    """Mode, length of rows, adapters, optimiser."""
    rows: RowFacts | None
    """None where they are not known."""
    epochs: int
    batch: int
    """Rows of an optimiser step."""
    micro: int | str
    """Rows of a forward pass, or "auto"."""
    more: float = 0.0
    """The passes besides those over its own rows, for each token of them: over rows that hold it, or rows to keep."""


def fit_cost(shape: Shape, size: FitSize, machine: Machine) -> StageCost:
    """Return the cost of a fit on the first rung of the ladder that fits the device."""
    case, rows, seconds = (
        replace(size.case, shards=machine.processes if size.case.mode == "full" else 1),
        size.rows,
        None,
    )
    rung, need = choose_rung(shape, case, size.batch, size.micro, machine.device)
    waiting = waiting_bytes(shape, case, rung)
    if rows:
        adapters = sum(linear.adapter(case.rank) for linear in shape.adapted(case.targets))
        trained = shape.weights if case.mode == "full" else adapters
        computed = (1 + size.more) * (shape.in_linear + shape.vocabulary * shape.hidden) * rows.tokens
        passes = (1 + size.more) * -(-rows.count // rung.micro)
        seconds = machine.seconds(
            shape,
            size.epochs * token_operations(case.mode, rung.checkpointing) * computed,
            memory=size.epochs * -(-rows.count // size.batch) * _ADAMW * trained,
            disk=(size.epochs * SAVE + 4) * trained,
            bus=size.epochs * passes * 2 * (waiting + head_bytes(shape, case, rung)),  # forward, and again backward
            passes=size.epochs * passes,
        )
    how = f"{rung}; the longest row has {case.longest} tokens"
    in_file = max(0, waiting - int(RAM_SHARE * machine.host)) if machine.host else 0
    files = {"layers without room in RAM": in_file} if in_file else {}
    return StageCost(size.what, "fit", need, seconds, how, waiting=waiting, while_running=files)


def vector_costs(
    recipe: Recipe, name: str, facts: Facts, machine: Machine, reference: float = 0.0, more: float = 0.0
) -> list[StageCost]:
    """Return the cost of fitting a vector; where its end is open, that of measuring the target first.

    reference: the part of the layers that the fit's frozen second model has, in full mode. more: see `FitSize`.
    """
    costs, rows, prior = [], facts.rows.get(name), facts.shapes["prior"]
    if recipe.is_open_ended(name):
        target = facts.shapes["target"]
        need, streamed = scoring_need(target, machine, recipe.vector.mode == "qlora")
        seconds = ask_seconds(target, rows.count, rows.tokens, 0, streamed, machine) if rows else None
        costs.append(StageCost("the target's loss", "goal", need, seconds, "the goal of the fits"))
    size = vector_size(recipe, name, rows, machine.device)
    size = replace(size, case=replace(size.case, reference=reference), more=size.more + more)
    if recipe.hold and name == "forget":
        size = _held(size, facts.rows.get("retain"), recipe.vector.max_length)
    fit = fit_cost(prior, size, machine)
    if recipe.is_open_ended(name):
        fit = replace(fit, how=f"{fit.how}; its time is for {size.epochs} epochs")
    trained = trained_weights(recipe, prior)
    disk = {"vectors": 4 * trained}
    files = {**fit.while_running, "saves of a fit": MOST_SAVES * SAVE * trained}
    return [*costs, replace(fit, disk=disk, while_running=files)]


def _held(size: FitSize, retain: RowFacts | None, most_tokens: int) -> FitSize:
    """Return a fit that is held by retain rows; where they are not known, by rows like its own."""
    per_row = [rows.tokens / rows.count for rows in (retain, size.rows) if rows]
    longest = max(size.case.longest, min(retain.longest, most_tokens) if retain else 0)
    ratio = per_row[0] / per_row[-1] if per_row else 1.0
    return replace(size, case=replace(size.case, longest=longest, reference=1.0), more=size.more + ratio * _HELD)


def moments_costs(recipe: Recipe, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of measuring the inputs of the target's layers: one or a few forward passes over the rows."""
    shape, tokens = facts.shapes["target"], _tokens(facts)
    need, streamed = scoring_need(shape, machine)
    kept = [min(count, MOST_LABELS) for count in tokens]
    disk = sum(4 * linear.count * linear.inputs * min(count, linear.inputs) for linear in _fed(shape) for count in kept)
    often = -(-disk // HELD)  # where roots do not fit into memory at once, the rows run again
    seconds = ask_seconds(shape, 1, often * sum(tokens), 0, streamed, machine) if facts.rows else None
    cost = StageCost("the moments", "moments", need, seconds, "the inputs of the target's layers")
    return [replace(cost, disk={"moments": disk})]


def filter_costs(recipe: Recipe, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of filtering the forget vector with one λ: a system of equations for each input, in RAM."""
    shape, tokens = facts.shapes["target"], sum(min(count, MOST_LABELS) for count in _tokens(facts))
    sizes = [(linear, min(tokens, linear.inputs)) for linear in _fed(shape)]
    # The products of all pairs of rows, and a system; of all weights, its solution for each input, too.
    right = 2 if recipe.vector.mode == "full" else 0
    work = sum(linear.count * size**2 * ((1 + right) * linear.inputs + size) for linear, size in sizes)
    memory = max((8 * linear.inputs * 6 * size for linear, size in sizes), default=0)
    seconds = machine.seconds(shape, host=work) if facts.rows else None
    disk = 4 * trained_weights(recipe, facts.shapes["prior"])
    need = Need({"buffers": memory})
    cost = StageCost("the filter", "filter", need, seconds, "layer by layer, in RAM")
    return [replace(cost, disk={"filtered vector": disk})]


def _tokens(facts: Facts) -> list[int]:
    """Return the tokens of the rows to forget and to keep; of rows that are not known, as many as a root can hold."""
    others = "retain" if "retain" in facts.rows else "evaluate.holdout"
    return [facts.rows[side].tokens if side in facts.rows else _MANY for side in ("forget", others)]


def _fed(shape: Shape) -> list[Linear]:
    """Return a model's linear layers without those that get the same input as another one."""
    return [linear for linear in shape.linear if linear.name not in ("k_proj", "v_proj", "up_proj")]


def merge_costs(recipe: Recipe, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of the merge: block by block, in RAM."""
    target, prior = facts.shapes["target"], facts.shapes["prior"]
    width = {"same": target.width, "float32": 4.0}.get(recipe.merge.dtype, 2.0)
    adapters = 4 * trained_weights(recipe, prior) * len(recipe.vector_names)
    size = int(width * target.weights) if recipe.merge.form == "model" else adapters
    return [_merge_cost("the merge", target, machine, {"unlearned model": size})]


def start_costs(facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of merging the retain vector into the prior."""
    prior = facts.shapes["prior"]
    return [_merge_cost("the start", prior, machine, {"start of the forget vector": prior.stored})]


def _merge_cost(what: str, shape: Shape, machine: Machine, disk: Mapping[str, int]) -> StageCost:
    seconds = machine.seconds(shape, disk=shape.stored)
    return StageCost(what, "merge", Need({"buffers": _MERGE}), seconds, "block by block, in RAM", disk=disk)


def vector_size(recipe: Recipe, name: str, rows: RowFacts | None, device: Device) -> FitSize:
    """Return the fit of a vector, as far as its memory and time depend on it."""
    spec = recipe.vector
    batch = batch_size(recipe, name, rows)
    targets, epochs = spec.lora.targets, recipe.vector_of(name).epochs
    most = most_epochs(rows.count, batch, retain=name == "retain") if rows else EPOCHS
    case = FitCase(
        mode=spec.mode,
        longest=min(rows.longest, spec.max_length) if rows else spec.max_length,
        rank=spec.lora.rank,
        targets=targets if isinstance(targets, str) else tuple(targets),
        eight_bit=uses_eight_bit(recipe, device),
    )
    case = on_device(case, spec.compute, device)
    count, more = EPOCHS if epochs == "auto" else epochs, 0.0
    if recipe.is_open_ended(name):  # it measures the loss on a sample after each epoch
        count = min(_USUAL, most)
        more = _MEASURED * (min(SAMPLE, rows.count) / rows.count if rows else 1.0)
    return FitSize(f"the fit of the {name} vector", case, rows, count, batch, spec.micro_batch_size, more)


def full_size(what: str, rows: RowFacts | None, settings: Any, most_tokens: int, device: Device) -> FitSize:
    """Return a training of all weights. settings: epochs, batch_size, micro_batch_size and compute, as attributes.

    most_tokens: of a row.
    """
    longest = min(rows.longest, most_tokens) if rows else most_tokens
    case = on_device(FitCase("full", longest), settings.compute, device)
    return FitSize(what, case, rows, settings.epochs, settings.batch_size, settings.micro_batch_size)


def on_device(case: FitCase, compute: str, device: Device) -> FitCase:
    """Return a fit as a device computes it. compute: the recipe's precision, or "auto"."""
    halves = compute == "bf16" or (compute == "auto" and device.is_gpu)
    return replace(case, halves=halves, wide=device.is_gpu and not device.has_bf16, on_gpu=device.is_gpu)


def uses_eight_bit(recipe: Recipe, device: Device) -> bool:
    """Check whether AdamW keeps its states in 8 bits."""
    optimizer = recipe.vector.optimizer
    return optimizer == "adamw_8bit" or (optimizer == "auto" and recipe.vector.mode == "qlora" and device.is_gpu)


def choose_rung(shape: Shape, case: FitCase, batch: int, micro: int | str, device: Device) -> tuple[Rung, Need]:
    """Return the first rung that fits on the device, or the one that needs least, and its need."""
    sizes = [size for size in range(batch, 0, -1) if batch % size == 0]
    if not isinstance(micro, str):
        sizes = [next(size for size in sizes if size <= micro)]
    if not device.is_gpu:  # nothing is tried there: a process that takes too much is killed
        rung = Rung(next((size for size in sizes if size * case.longest <= CPU_TOKENS), sizes[-1]))
        return rung, fit_need(shape, case, rung)
    ladder = [(rung, fit_need(shape, case, rung)) for rung in fit_rungs(shape, case, sizes)]
    fitting = (pair for pair in ladder if pair[1].nbytes <= device.nbytes)
    return next(fitting, min(ladder, key=lambda pair: pair[1].nbytes))


def asking_costs(
    recipe: Recipe,
    what: str,
    model: str,
    part: QuestionPart,
    facts: Facts,
    machine: Machine,
) -> list[StageCost]:
    """Return the cost of asking a model a part of the questions.

    what: the name of such stages in a plan.
    """
    shape = facts.shapes.get(model, facts.shapes["target"])  # the unlearned model is as large as the target
    sets = _sets(facts, part)
    need, streamed = scoring_need(shape, machine)
    if model == "prior":
        sets = {name: size for name, size in sets.items() if name == "forget"}
    seconds = _seconds(recipe, shape, sets.values(), streamed, machine)
    return [StageCost(what, _kind(what), need, seconds, _how(streamed), waiting=streamed)]


def choice_costs(recipe: Recipe, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of scoring all points of a choice on one loaded target."""
    points = len(recipe.points) or SEARCHED
    return candidates_costs(recipe, points, facts, machine)


def candidates_costs(recipe: Recipe, count: int, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of scoring so many candidates on the validation rows, one after the other in one target."""
    shape = facts.shapes["target"]
    need, streamed = scoring_need(shape, machine)
    sets = [
        size.part(count * size.count) for name, size in facts.asked.get("validation", {}).items() if name != "holdout"
    ]
    seconds = _seconds(recipe, shape, sets, streamed, machine)
    return [StageCost("the sweep", "sweep", need, seconds, _how(streamed), waiting=streamed)]


def evidence_costs(what: str, loads: int, passes: float, facts: Facts, machine: Machine) -> list[StageCost]:
    """Return the cost of evidence, or of a probe.

    what: the name of such stages in a plan. loads: the models that it runs. passes: over the forget rows, of all of
    them.
    """
    shape = facts.shapes["target"]
    need, streamed = scoring_need(shape, machine)
    forget = facts.asked.get("test", {}).get("forget", RowFacts(0, 0, 0))
    questions, tokens = passes * forget.count, passes * forget.tokens / 2  # without the prompts of answers
    seconds = ask_seconds(shape, questions, tokens, 0, streamed, machine, loads)
    return [StageCost(what, _kind(what), need, seconds, "of each model", waiting=streamed)]


def _how(streamed: int) -> str:
    return f"slow: {gigabytes(streamed)} of weights stream from RAM" if streamed else "batches grow with free memory"


def _kind(what: str) -> Literal["checks", "scores"]:
    return "checks" if what == CHECKS else "scores"


def scoring_need(shape: Shape, machine: Machine, four_bit: bool = False) -> tuple[Need, int]:
    """Return the need of scoring with the smallest batches, and the bytes of weights that stream from RAM.

    Larger batches take what is free.
    """
    device = machine.device
    width = min(shape.width, 4.0) if device.is_gpu else 4.0
    width = 2.0 if four_bit and device.is_gpu else width
    need = score_need(shape, _LONGEST, width, on_gpu=device.is_gpu, four_bit=four_bit)
    return stream_layers(shape, need, device, four_bit)


def _seconds(recipe: Recipe, shape: Shape, asked: Iterable[RowFacts], streamed: int, machine: Machine) -> float | None:
    """Return the seconds of asking a model some questions; 0 where there are none."""
    sets = list(asked)
    questions = sum(size.count for size in sets)
    answers = sum(min(recipe.max_new_tokens * size.count, _LONGER * size.answers) for size in sets)
    tokens = sum(size.tokens for size in sets)
    return ask_seconds(shape, questions, tokens, answers, streamed, machine) if questions else 0.0


def ask_seconds(
    shape: Shape, questions: float, tokens: float, answers: float, streamed: int, machine: Machine, loads: int = 1
) -> float | None:
    """Return the seconds of scoring questions with so many tokens in all, and of answers with so many in all.

    streamed: bytes of weights that come from RAM in each pass. loads: the models that are asked.
    """
    steps = answers / max(1.0, questions) * -(-questions // _BATCH)  # of decoding: each reads all weights
    width = 2 if shape.stored < 3 * shape.weights else 4
    return machine.seconds(
        shape,
        2 * shape.weights * (tokens + answers),
        memory=steps * width * shape.weights,
        bus=streamed * (-(-tokens // _TOKENS) + steps),
        passes=_FORWARD * steps,
        loads=loads,
    )


def _sets(facts: Facts, part: QuestionPart) -> dict[str, RowFacts]:
    """Return the questions of a part, by set. A set that is whole among the validation rows, too, is asked there."""
    validation, test = (facts.asked.get(name, {}) for name in ("validation", "test"))
    if part in ("check", "others"):  # where nothing is scored, of the rows that vectors learn
        sets = (validation or test or facts.rows).items()
        return {
            name: size.part(min(CHECKED_ROWS, size.count))
            for name, size in sets
            if (name == "forget") == (part == "check")
        }
    before = validation if part == "test" else {}
    return {name: size for name, size in facts.asked.get(part, {}).items() if before.get(name) != size}
