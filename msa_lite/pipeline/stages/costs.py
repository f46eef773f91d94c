"""Forecast a run: the memory, disk and time of each stage, and what would make it fit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from msa_lite.budget.needs import CONTEXT, FitCase, Need, fit_need, rungs, score_need, stream_layers
from msa_lite.budget.plan import Plan, Remedy, StagePlan, gigabytes
from msa_lite.budget.shape import Shape
from msa_lite.budget.speed import Device, Measured, Speed, fit_seconds, score_seconds, speed_of, stream_seconds
from msa_lite.errors import RecipeError
from msa_lite.io.files.writing import nearest_place
from msa_lite.io.models.devices import host_memory
from msa_lite.pipeline.stages.facts import PlanInputs, RowFacts, batch_size, vector_names
from msa_lite.recipe import Recipe, load_recipe
from msa_lite.train.rungs import CPU_TOKENS, Rung
from msa_lite.train.settings import EPOCHS, most_epochs

_MERGE = 512_000_000  # bytes of a merge (`merger.checked.MAX_MEMORY`)
_QUESTIONS = 400  # of a published benchmark, where the recipe sets no limit
_SEARCHED = 10  # points of a search
_LONGEST_QUESTION = 512  # tokens
_TEXT, _ANSWER = 100, 200  # tokens of a question with all answers that are scored, at most of one that is generated
_BATCH = 64  # questions
MOST_SAVES = 3  # of a fit on disk at a time: two, and a third until the oldest is removed


def forecast(
    recipe: Recipe, inputs: PlanInputs, device: Device, processes: int = 1, measured: Measured | None = None
) -> Plan:
    """Return the plan of a recipe's run on a device.

    processes: those that share a fit in full mode. measured: times in the place of estimates.
    """
    speed = speed_of(device)
    maker = _Maker(recipe, inputs, device, speed, processes, measured)
    rough = dict.fromkeys(f"{shape.name}: {shape.rough}" for shape in inputs.shapes.values() if shape.rough)
    notes = [*inputs.notes, *(f"{line}: its activations are a rough estimate" for line in rough)]
    notes.append(time_note(device, speed, measured, can_measure=bool(device.name)))
    stages = list(maker.stages())
    if any(stage.kind == "sweep" and stage.streams for stage in stages) and recipe.vector.mode != "full":
        notes.append("select.four_bit=true holds the sweep's target on the GPU in 4 bits, which is much faster")
    free = shutil.disk_usage(nearest_place(recipe.folder)).free
    return Plan(device, stages, host_memory(), maker.disk(), free, notes)


def time_note(device: Device, speed: Speed, measured: Measured | None = None, can_measure: bool = False) -> str:
    """Return the sentence on where the times of a plan come from. can_measure: True if it may name --measure."""
    if measured is None:
        advice = "; `msa-lite plan --measure` times a few real steps" if can_measure else ""
        return (
            f"times are estimates, from operations and bytes at the speed that {speed.source}; they may be off by a "
            f"factor of 2{advice}"
        )
    parts = "scores and answers" if measured.scores else "no scores"
    return f"times are measured on this machine ({device.name}): {measured.steps} steps of fits, and {parts}"


@dataclass(frozen=True)
class _Maker:
    """Makes the stages of a plan."""

    recipe: Recipe
    inputs: PlanInputs
    device: Device
    speed: Speed
    processes: int
    measured: Measured | None

    def stages(self) -> Iterator[StagePlan]:
        """Yield the stages in their order."""
        recipe, vectors = self.recipe, vector_names(self.recipe)
        if open_ended := [name for name in vectors if recipe.vector_of(name).epochs == "auto"]:
            four_bit = recipe.vector.mode == "qlora"
            need, streamed = self._scoring("target", four_bit)
            rows = [self.inputs.rows[name] for name in open_ended if name in self.inputs.rows]
            times = None
            if rows:
                tokens = sum(one.tokens for one in rows)
                seconds = self._load_seconds + self._score_seconds("target", 1, tokens, 0, streamed)
                times = seconds, seconds
            yield StagePlan("the target's loss", "goal", need, None, times, "the goal of the fits")
        for name in vectors:
            yield self.fit(name)
        if recipe.has_choice:
            count = (len(recipe.points) or _SEARCHED) * (1 + len(recipe.select.under))
            yield self._scored("sweep", "target", count, recipe.select.four_bit)
        yield StagePlan(
            "the merge", "merge", Need({"buffers": _MERGE}), None, self._merge_seconds(), "block by block, in RAM"
        )
        if recipe.evaluate:
            largest = max(self.inputs.shapes, key=lambda key: self.inputs.shapes[key].stored)
            models = 1 + sum(key in self.inputs.shapes for key in ("target", "ideal"))
            yield self._scored("scores", largest, models)

    def fit(self, name: str) -> StagePlan:
        """Return the plan of the fit of a vector."""
        spec, rows, shape = self.recipe.vector, self.inputs.rows.get(name), self.inputs.shapes["prior"]
        case = replace(fit_case(self.recipe, rows, self.device), shards=self.processes)
        batch = batch_size(self.recipe, name, rows)
        rung, need = choose_rung(shape, case, batch, spec.micro_batch_size, self.device)
        few, most = self._epochs(name, rows, batch)
        steps = self.measured.fits.get(name) if self.measured else None
        times, load, peak = None, 0.0, None
        if steps:
            rung, load, peak = steps.rung, steps.load, steps.peak and steps.peak + CONTEXT
            need = fit_need(shape, case, rung)
        if rows:
            passes = -(-rows.count // rung.micro)
            once = fit_seconds(shape, spec.mode, rung.checkpointing, rows.tokens, self.speed, passes)
            once = rows.tokens * steps.token if steps else once
            times = load + few * once, load + most * once
        how = f"{rung}; the longest row has {case.longest} tokens"
        return StagePlan(f"the fit of the {name} vector", "fit", need, name, times, how, peak)

    def _epochs(self, name: str, rows: RowFacts | None, batch: int) -> tuple[int, int]:
        """Return the fewest and the most epochs of a fit."""
        epochs = self.recipe.vector_of(name).epochs
        if epochs != "auto":
            return epochs, epochs
        return 1, most_epochs(rows.count, batch, retain=name == "retain") if rows else EPOCHS

    def _scored(self, kind: Literal["sweep", "scores"], model: str, times: int, four_bit: bool = False) -> StagePlan:
        """Return the plan of scoring a model several times."""
        recipe, shape = self.recipe, self.inputs.shapes[model]
        assert recipe.evaluate is not None, "checked"
        sets = list(self.inputs.rows.values())
        limit = recipe.evaluate.limit or _QUESTIONS
        if recipe.evaluate.benchmark == "qa" and sets:
            questions = sum(min(rows.count, limit) for rows in sets)
        else:
            questions = 4 * min(limit, _QUESTIONS)
        if kind == "sweep":
            questions = max(1, round(questions * recipe.validation))
        need, streamed = self._scoring(model, four_bit)
        answer = min(recipe.evaluate.max_new_tokens, _ANSWER)
        seconds = self._score_seconds(model, questions, _TEXT, answer, streamed)
        seconds = times * seconds + self._load_seconds * (times if kind == "scores" else 1)
        how = "batches grow with free memory"
        if streamed:
            how = f"slow: {gigabytes(streamed)} of weights stream from RAM"
        if four_bit:
            how = "in 4 bits, with the adapters beside it"
            beside = sum(one.adapter(recipe.vector.lora.rank) for one in shape.adapted(recipe.vector.lora.targets))
            need = need.plus("adapters", 4 * beside * len(vector_names(recipe)))
        return StagePlan(f"the {kind}", kind, need, None, (seconds, seconds), how, streams=streamed > 0)

    def _score_seconds(self, model: str, questions: int, tokens: int, new_tokens: int, streamed: int) -> float:
        """Return the seconds of scoring questions of so many tokens each, and of answers of so many."""
        if self.measured and (times := self.measured.scores):
            return questions * (tokens * times.token + new_tokens * times.new_token)
        seconds = score_seconds(self.inputs.shapes[model], questions, tokens, new_tokens, _BATCH, self.speed)
        return seconds + stream_seconds(streamed, questions, tokens, new_tokens, _BATCH)

    @property
    def _load_seconds(self) -> float:
        """Return the seconds of loading a model to score, where they were measured."""
        return self.measured.scores.load if self.measured and self.measured.scores else 0.0

    def _scoring(self, model: str, four_bit: bool = False) -> tuple[Need, int]:
        """Return the need of scoring with the smallest batches, and the bytes of weights that stream from RAM.

        Larger batches take what is free.
        """
        shape = self.inputs.shapes[model]
        width = min(shape.width, 4.0) if self.device.is_gpu else 4.0
        width = 2.0 if four_bit and self.device.is_gpu else width
        need = score_need(shape, _LONGEST_QUESTION, width, on_gpu=self.device.is_gpu, four_bit=four_bit)
        host = host_memory() if self.device.name else None  # of another machine, it is not known
        return (need, 0) if four_bit else stream_layers(shape, need, self.device, host)

    def _merge_seconds(self) -> tuple[float, float]:
        seconds = self.inputs.shapes["target"].stored / 2e8
        return seconds / 4, seconds

    def disk(self) -> dict[str, int]:
        """Return the bytes that the run writes, and those that it downloads."""
        recipe, target, prior = self.recipe, self.inputs.shapes["target"], self.inputs.shapes["prior"]
        vectors, spec = len(vector_names(recipe)), recipe.vector
        if spec.mode == "full":
            trained = prior.weights
        else:
            trained = sum(one.adapter(spec.lora.rank) for one in prior.adapted(spec.lora.targets))
        width = {"same": target.width, "float32": 4.0}.get(recipe.merge.dtype, 2.0)
        model = int(width * target.weights) if recipe.merge.form == "model" else 4 * trained * vectors
        sizes = {
            "vectors": 4 * trained * vectors,
            "saves of a fit": MOST_SAVES * 12 * trained,
            "unlearned model": model,
        }
        return sizes | ({"download": self.inputs.download} if self.inputs.download else {})


def fit_case(recipe: Recipe, rows: RowFacts | None, device: Device) -> FitCase:
    """Return the fit of a vector, as far as its memory depends on it."""
    spec = recipe.vector
    longest = min(rows.longest, spec.max_length) if rows else spec.max_length
    targets = spec.lora.targets
    return FitCase(
        mode=spec.mode,
        longest=longest,
        rank=spec.lora.rank,
        targets=targets if isinstance(targets, str) else tuple(targets),
        eight_bit=uses_eight_bit(recipe, device),
        halves=computes_in_halves(spec.compute, device),
        wide=device.is_gpu and not device.has_bf16,
        on_gpu=device.is_gpu,
    )


def uses_eight_bit(recipe: Recipe, device: Device) -> bool:
    """Check whether AdamW keeps its states in 8 bits."""
    optimizer = recipe.vector.optimizer
    return optimizer == "adamw_8bit" or (optimizer == "auto" and recipe.vector.mode == "qlora" and device.is_gpu)


def computes_in_halves(compute: str, device: Device) -> bool:
    """Check whether matrix products are in 16 bits."""
    return compute == "bf16" or (compute == "auto" and device.is_gpu)


def choose_rung(shape: Shape, case: FitCase, batch: int, micro: int | str, device: Device) -> tuple[Rung, Need]:
    """Return the first rung that fits on the device, or the one that needs least, and its need."""
    sizes = [size for size in range(batch, 0, -1) if batch % size == 0]
    if not isinstance(micro, str):
        sizes = [next(size for size in sizes if size <= micro)]
    if not device.is_gpu:  # nothing is tried there: a process that takes too much is killed
        rung = Rung(next((size for size in sizes if size * case.longest <= CPU_TOKENS), sizes[-1]))
        return rung, fit_need(shape, case, rung)
    ladder = [(rung, fit_need(shape, case, rung)) for rung in rungs(shape, case, sizes)]
    fitting = (pair for pair in ladder if pair[1].nbytes <= device.nbytes)
    return next(fitting, min(ladder, key=lambda pair: pair[1].nbytes))


def find_remedies(recipe: Recipe, inputs: PlanInputs, device: Device) -> Iterator[Remedy]:
    """Yield changes of the recipe that lower its peak, by what they cost, each with the peak that it leaves."""
    before, enough = forecast(recipe, inputs, device).peak.need.nbytes, list[set[str]]()
    for overrides, harm in _candidates(recipe):
        if any(part <= {*overrides} for part in enough):  # a part of it fits already
            continue
        try:
            changed = forecast(load_recipe(recipe, overrides), inputs, device)
        except RecipeError:  # keys that exclude each other in this recipe
            continue
        if (peak := changed.peak.need.nbytes) < before:
            enough += [{*overrides}] * changed.fits
            yield Remedy(tuple(overrides), harm, peak, changed.fits)


def _candidates(recipe: Recipe) -> Iterator[tuple[list[str], str]]:
    """Yield changes by harm: first those that leave the result as it is, last those that change it most."""
    spec = recipe.vector
    if spec.micro_batch_size != "auto":
        yield ["vector.micro_batch_size=auto"], "no change of the result"
    if spec.optimizer == "adamw" or (spec.optimizer == "auto" and spec.mode != "qlora"):
        yield ["vector.optimizer=adamw_8bit"], "nearly no change of the result"
    modes = {"full": ["lora", "qlora"], "lora": ["qlora"], "qlora": []}[spec.mode]
    half = max(8, spec.max_length // 2)
    shorter, rank = [f"vector.max_length={half}"], [f"vector.lora.rank={max(1, spec.lora.rank // 4)}"]
    yield shorter, "longer rows are cut"
    for mode in modes:
        yield [f"vector.mode={mode}"], {"lora": "the vector is of low rank", "qlora": "the prior is in 4 bits"}[mode]
    if spec.mode != "full":
        yield rank, "the vector is of lower rank"
    smallest = [*([f"vector.mode={modes[-1]}"] if modes else []), *rank, *shorter]
    yield smallest, "a lower rank and shorter rows" + (", and the prior is in 4 bits" if modes else "")
    if recipe.evaluate:
        points = ["evaluate=null", "forget.alpha=1.0", *(["retain.beta=1.0"] if recipe.retain else [])]
        for changed in ([], *([f"vector.mode={mode}"] for mode in modes)):
            yield [*changed, *points], "nothing is scored here, so α and β are not chosen; evaluate on another machine"
        yield [*smallest, *points], "nothing is scored here, and the vector is rougher"
