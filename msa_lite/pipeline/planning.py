"""Plan a run before it starts: the memory, disk and time of each stage, and what would make it fit."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from msa_lite.budget.machine import Device, host_memory, this_device
from msa_lite.budget.need import Need
from msa_lite.budget.plan import Plan, Remedy, StagePlan
from msa_lite.budget.scoring import score_need
from msa_lite.budget.shape import Shape
from msa_lite.budget.speed import Speed, fit_seconds, score_seconds, speed_of
from msa_lite.budget.tuning import FitCase, fit_need, rungs
from msa_lite.errors import RecipeError, UsageError
from msa_lite.io.disk import nearest_place
from msa_lite.merger.plan import parse_size
from msa_lite.pipeline.planning_inputs import PlanInputs, RowFacts, find_plan_inputs
from msa_lite.recipe import Recipe, RecipeSource, load_recipe
from msa_lite.train.auto import EPOCHS, MOST_BATCH, auto_batch, most_epochs
from msa_lite.train.rungs import Rung

_SMALLEST = 100_000_000  # bytes of a GPU; less is a size without its unit
_MERGE = 512_000_000  # bytes of a merge (`merger.memory.MAX_MEMORY`)
_QUESTIONS = 400  # of a published benchmark, where the recipe sets no limit
_SEARCHED = 10  # points of a search
_LONGEST_QUESTION = 512  # tokens
_SAVES = 3  # of a fit on disk at a time: two, and a third until the oldest is removed
_CPU_BATCH = 2048
_CPU_TOKENS = 4096  # of a micro-batch on a CPU (`train.fit`)


def plan(
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    *,
    gpu: str | int | None = None,
    price_per_hour: float | None = None,
) -> Plan:
    """Predict memory, disk and time of each stage of a recipe's run, from headers and configs; read no weights.

    gpu: the memory of a GPU, such as "8GB", in the place of this machine's device. price_per_hour: of that device.
    Raise UsageError where neither target nor prior can be found, on this machine or on the Hub, or `gpu` is no size.
    """
    loaded = load_recipe(recipe, overrides)
    device = Device("", parse_size(gpu)) if gpu is not None else this_device()
    if device.nbytes < _SMALLEST:
        raise UsageError(f"--gpu {gpu} is less than the memory of any GPU; write it with its unit, as 8GB")
    inputs = find_plan_inputs(loaded)
    made = forecast(loaded, inputs, device)
    if loaded.vector.mode == "full" and (count := _enough_processes(loaded, inputs, device)):
        launch = f"accelerate launch --num_processes {count} -m msa_lite"
        made = replace(
            made, notes=[*made.notes, f"{count} of these GPUs hold the fits in full mode together: {launch}"]
        )
    remedies = () if made.fits else tuple(find_remedies(loaded, inputs, device))
    return replace(made, remedies=remedies, price_per_hour=price_per_hour)


def _enough_processes(recipe: Recipe, inputs: PlanInputs, device: Device) -> int | None:
    """Return how many GPUs share a fit in full mode that does not fit on one; None where it does, or 8 are too few."""
    for count in (1, 2, 4, 8) if device.is_gpu else ():
        fits = [stage.need.nbytes for stage in forecast(recipe, inputs, device, count).stages if stage.kind == "fit"]
        if max(fits, default=0) <= device.nbytes:
            return count if count > 1 else None
    return None


def forecast(recipe: Recipe, inputs: PlanInputs, device: Device, processes: int = 1) -> Plan:
    """Return the plan of a recipe's run on a device. processes: those that share a fit in full mode."""
    speed = speed_of(device)
    maker = _Maker(recipe, inputs, device, speed, processes)
    rough = dict.fromkeys(f"{shape.name}: {shape.rough}" for shape in inputs.shapes.values() if shape.rough)
    notes = [*inputs.notes, *(f"{line}: its activations are a rough estimate" for line in rough)]
    notes.append(f"times are estimated from operations and bytes at {speed.source}, and may be off by 2 ×")
    place = nearest_place(recipe.folder)
    free = shutil.disk_usage(place).free
    return Plan(device, list(maker.stages()), host_memory(), maker.disk(), free, notes)


@dataclass(frozen=True)
class _Maker:
    """Makes the stages of a plan."""

    recipe: Recipe
    inputs: PlanInputs
    device: Device
    speed: Speed
    processes: int

    def stages(self) -> Iterator[StagePlan]:
        """Yield the stages in their order."""
        recipe, vectors = self.recipe, vector_names(self.recipe)
        if recipe.vector.epochs == "auto":
            four_bit = recipe.vector.mode == "qlora"
            need = self._scoring("target", four_bit, least=True)
            yield StagePlan("the target's loss", "goal", need, seconds=(0.0, 60.0), how="the goal of the fits")
        for name in vectors:
            yield self.fit(name)
        if recipe.has_choice:
            yield self._scored("sweep", "target", len(recipe.points) or _SEARCHED, recipe.select.four_bit)
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
        batch = batch_size(self.recipe, rows)
        rung, need = choose_rung(shape, case, batch, spec.micro_batch_size, self.device)
        few, most = self._epochs(name, rows, batch)
        times = None
        if rows:
            once = fit_seconds(shape, spec.mode, rung.checkpointing, rows.tokens, self.speed)
            times = few * once, most * once
        how = f"{rung}; the longest row has {case.longest} tokens"
        return StagePlan(f"the fit of the {name} vector", "fit", need, name, times, how)

    def _epochs(self, name: str, rows: RowFacts | None, batch: int) -> tuple[int, int]:
        """Return the fewest and the most epochs of a fit."""
        epochs = self.recipe.vector.epochs
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
        seconds = score_seconds(shape, questions, 100, min(recipe.evaluate.max_new_tokens, 200), 64, self.speed)
        how = "in 4 bits, with the adapters beside it" if four_bit else "batches grow with free memory"
        need = self._scoring(model, four_bit)
        if four_bit:
            beside = sum(one.adapter(recipe.vector.lora.rank) for one in shape.adapted(recipe.vector.lora.targets))
            need = need.plus("adapters", 4 * beside * len(vector_names(recipe)))
        return StagePlan(f"the {kind}", kind, need, None, (times * seconds, times * seconds), how)

    def _scoring(self, model: str, four_bit: bool = False, least: bool = True) -> Need:
        """Return the need of scoring with the smallest batches; larger ones take what is free."""
        shape = self.inputs.shapes[model]
        width = min(shape.width, 4.0) if self.device.is_gpu else 4.0
        width = 2.0 if four_bit and self.device.is_gpu else width
        tokens = _LONGEST_QUESTION if least else _CPU_BATCH
        return score_need(shape, tokens, width, on_gpu=self.device.is_gpu, four_bit=four_bit)

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
        sizes = {"vectors": 4 * trained * vectors, "saves of a fit": _SAVES * 12 * trained, "unlearned model": model}
        return sizes | ({"download": self.inputs.download} if self.inputs.download else {})


def vector_names(recipe: Recipe) -> list[str]:
    """Return the vectors that a recipe needs: those whose strength is not 0, or is searched."""
    strengths = {"forget": recipe.alphas, "retain": recipe.betas}
    return [name for name, values in strengths.items() if values is None or any(values)]


def batch_size(recipe: Recipe, rows: RowFacts | None) -> int:
    """Return the rows of an optimiser step."""
    batch = recipe.vector.batch_size
    if batch != "auto":
        return batch
    return auto_batch(rows.count) if rows else MOST_BATCH


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
        halves=computes_in_halves(recipe, device),
        wide=device.is_gpu and not device.has_bf16,
        on_gpu=device.is_gpu,
    )


def uses_eight_bit(recipe: Recipe, device: Device) -> bool:
    """Check whether AdamW keeps its states in 8 bits."""
    optimizer = recipe.vector.optimizer
    return optimizer == "adamw_8bit" or (optimizer == "auto" and recipe.vector.mode == "qlora" and device.is_gpu)


def computes_in_halves(recipe: Recipe, device: Device) -> bool:
    """Check whether matrix products are in 16 bits."""
    return recipe.vector.compute == "bf16" or (recipe.vector.compute == "auto" and device.is_gpu)


def choose_rung(shape: Shape, case: FitCase, batch: int, micro: int | str, device: Device) -> tuple[Rung, Need]:
    """Return the first rung that fits on the device, or the one that needs least, and its need."""
    sizes = [size for size in range(batch, 0, -1) if batch % size == 0]
    if not isinstance(micro, str):
        sizes = [next(size for size in sizes if size <= micro)]
    if not device.is_gpu:  # nothing is tried there: a process that takes too much is killed
        rung = Rung(next((size for size in sizes if size * case.longest <= _CPU_TOKENS), sizes[-1]))
        return rung, fit_need(shape, case, rung)
    ladder = [(rung, fit_need(shape, case, rung)) for rung in rungs(shape, case, sizes)]
    fitting = (pair for pair in ladder if pair[1].nbytes <= device.nbytes)
    return next(fitting, min(ladder, key=lambda pair: pair[1].nbytes))


def find_remedies(recipe: Recipe, inputs: PlanInputs, device: Device) -> Iterator[Remedy]:
    """Yield changes of the recipe that lower its peak, by what they cost, each with the peak that it leaves."""
    before = forecast(recipe, inputs, device).peak.need.nbytes
    for overrides, harm in _candidates(recipe):
        try:
            changed = forecast(load_recipe(recipe, overrides), inputs, device)
        except RecipeError:  # keys that exclude each other in this recipe
            continue
        if (peak := changed.peak.need.nbytes) < before:
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
