"""Resolve a recipe: find, load and check all that a run needs before its first write, and the settings of its fits."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from msa_lite.data import DataSource, Example, Prompter, Row, encode, shorten
from msa_lite.errors import UsageError, join_faults, nearest
from msa_lite.evals.benchmark import Benchmark, benchmark_class
from msa_lite.evals.dataset import pinned_data
from msa_lite.evals.judge import JudgeSettings, open_judge
from msa_lite.evals.models import check_source, count_weights, load_model
from msa_lite.evals.qa import Qa
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import check_space
from msa_lite.io.launch.crew import Crew
from msa_lite.io.models.devices import check_device
from msa_lite.io.models.heads import choose_precision, note_precision
from msa_lite.io.models.loading import pattern_fault
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.weights.hub import Source
from msa_lite.io.weights.vocabulary import token_tensors
from msa_lite.pipeline.prepare.earlier import EarlierRun, check_earlier, check_rows, open_earlier
from msa_lite.pipeline.prepare.models import check_apart, check_readings, open_models, open_reader
from msa_lite.pipeline.prepare.prompt import resolve_prompt
from msa_lite.pipeline.prepare.questions import (
    ALTERNATIVES,
    Questions,
    WhenToChoose,
    limits_of_evidence,
    load_data,
    load_questions,
)
from msa_lite.pipeline.prepare.rows import divide_retain, separate_sets
from msa_lite.recipe import JudgeKeys, Recipe
from msa_lite.recipe.training import VectorSpec
from msa_lite.train import FitSettings, Until, check_mode, check_trackers
from msa_lite.train.settings import EPOCHS, TRIES, WARMUP_STEPS, auto_batch, auto_rate, most_epochs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPlan:
    """The part of a recipe that one run does."""

    method: str
    """"msa", or the name of a baseline."""
    folder: Path
    """The run's folder."""
    start: Literal["prior", "target"]
    """The model that is tuned."""
    choice: WhenToChoose
    """True if the run makes a choice on validation rows; "if possible": only if there are questions to choose by."""
    vectors: Sequence[str]
    """The names of what is fitted."""
    checkpoints: int = 1
    """The fp32 checkpoints that a fit leaves in full mode."""
    sample: bool = True
    """True if the retain set is sampled as the recipe says."""
    force: bool = False
    """True to run even if the device's memory is too small by prediction."""

    def describe(self, recipe: Recipe, parameters: Mapping[str, Any], compat: Sequence[str] = ()) -> dict[str, Any]:
        """Return the method as the unlearned model's report names it."""
        about = {"name": self.method, "mode": recipe.vector.mode, "start": self.start}
        return about | {"parameters": dict(parameters), "compat": list(compat)}


@dataclass(frozen=True)
class Run:
    """A recipe with its inputs, ready to run."""

    recipe: Recipe
    """The recipe, with its prompt and its benchmark's data resolved."""
    plan: RunPlan
    """The part of it that this run does."""
    sources: Mapping[str, Source]
    """The models by name: "target", "prior" (the one that is tuned) and perhaps "ideal"."""
    data: Mapping[str, DataSource]
    """The data sets by their places in the recipe, pinned."""
    prompter: Prompter
    """Renders the prompts, with the target's tokenizer."""
    rows: Mapping[str, list[Row]]
    """The rows that vectors learn, by vector ("forget", "retain")."""
    examples: Mapping[str, list[Example]]
    """The same rows as token ids."""
    questions: Questions
    """The validation and test rows."""
    alternatives: list[str]
    """The answers that the recipe gives for dpo."""
    retain: Sequence[Row] = ()
    """The retain rows that MSA's vector learns, also where this run's method learns all of them."""
    earlier: tuple[EarlierRun, ...] = ()
    """The runs of earlier requests, whose vectors are merged, too."""
    prompt_search: dict[str, Any] | None = None
    """The outcome of `prompt: auto` in detail. The recipe has the prompt itself."""
    notes: Sequence[str] = ()
    """What its data cannot show, and rows that are left out, a sentence each."""
    crew: Crew = field(default_factory=Crew, compare=False)
    """The processes at work on it."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.plan.folder

    @property
    def renders(self) -> bool:
        """Check whether there are questions to put into a prompt."""
        published = self.test is not None and self.test.prompted and not isinstance(self.test, Qa)
        return published or any(source.format == "qa" for source in self.data.values())

    @property
    def validation(self) -> Benchmark | None:
        """The questions that a choice is made by; None if there is nothing to choose."""
        return self.questions.validation

    @property
    def test(self) -> Benchmark | None:
        """The questions that the models are scored on; None if nothing is scored."""
        return self.questions.test

    @property
    def judge(self) -> JudgeSettings:
        """The judge of the test questions."""
        return judge_settings(self.recipe.evaluate.judge) if self.recipe.evaluate else JudgeSettings()

    @property
    def vector_names(self) -> list[str]:
        """The vectors that the recipe needs: those whose strength is not 0, or is searched."""
        strengths = {"forget": self.recipe.alphas, "retain": self.recipe.betas}
        return [name for name, values in strengths.items() if values is None or any(values)]

    def vector_folder(self, name: str) -> Path:
        """Return the folder of the forget or retain vector."""
        return self.folder / "vectors" / name


def prepare(recipe: Recipe, plan: RunPlan, progress: Progress = silent) -> Run:
    """Find and check every input of a planned run. Only an adapter as target or prior is written, merged into its base.

    Raise MismatchError with the tensors on which target and prior differ.
    """
    recipe = _pin_benchmark(recipe)
    check_device()
    check_mode(recipe.vector.mode, recipe.vector.optimizer, recipe.vector.compute)
    check_trackers(recipe.trackers)
    if recipe.merge.form == "adapter" and recipe.vector.mode == "full":
        raise UsageError("merge.as: vector.mode full makes no adapter; choose merge.as model, or vector.mode lora")
    if recipe.evaluate:
        open_judge(judge_settings(recipe.evaluate.judge))  # it may lack a key
    earlier = open_earlier(recipe)
    sources = open_models(recipe, plan.start, progress)
    if plan.start == "prior":
        check_apart(sources["target"], sources["prior"])
    check_earlier(recipe, earlier, sources)
    target = load_checkpoint(sources["target"].folder)
    _check_lora_targets(recipe, target)
    _check_same_rows(recipe, target, sources["prior"])
    check_space(plan.folder, _bytes_needed(target, recipe, plan))

    tokenizer = open_reader(sources["target"], recipe.target)
    data, all_rows = load_data(recipe, plan.method)
    all_rows, notes = separate_sets(all_rows)
    notes += limits_of_evidence(recipe, all_rows, plan.sample)
    places = (plan.folder, recipe.folder)
    recipe, prompter, search = resolve_prompt(recipe, sources["target"], tokenizer, all_rows, places)
    all_rows = {name: shorten(rows, prompter, recipe.vector.max_length) for name, rows in all_rows.items()}
    learnt = {name: rows for name, rows in all_rows.items() if "." not in name}
    check_rows(earlier, learnt["forget"])
    sample: Sequence[Row] = ()
    if recipe.retain:
        whole, sample, all_rows["retain"] = divide_retain(recipe, all_rows)
        learnt["retain"] = sample if plan.sample else whole
    check_readings(sources, tokenizer, learnt["forget"])
    questions = load_questions(recipe, data, plan.choice, prompter, all_rows)
    examples = {name: encode(rows, data[name], prompter, recipe.vector.max_length) for name, rows in learnt.items()}
    _check_ids(sources, examples, questions)
    return Run(
        recipe=recipe,
        plan=plan,
        sources=sources,
        data=data,
        prompter=prompter,
        rows=learnt,
        examples=examples,
        questions=questions,
        alternatives=_alternatives(all_rows.get(ALTERNATIVES, ())),
        retain=sample,
        earlier=earlier,
        prompt_search=search,
        notes=notes,
    )


def _check_ids(sources: Mapping[str, Source], examples: Mapping[str, list[Example]], questions: Questions) -> None:
    """Raise MismatchError where a model would get a token that its embedding has no row for."""
    ids = {token for rows in examples.values() for example in rows for token in example.ids}
    for benchmark in (questions.validation, questions.test):
        ids |= benchmark.ids() if benchmark else set()
    for source in sources.values():
        check_source(source, ids)


def _pin_benchmark(recipe: Recipe) -> Recipe:
    """Return the recipe with its benchmark's data named, and pinned to a commit of the Hub."""
    evaluate = recipe.evaluate
    home = evaluate and (evaluate.data or benchmark_class(evaluate.benchmark).home)
    if not evaluate or not home:
        return recipe
    return recipe.model_copy(update={"evaluate": evaluate.model_copy(update={"data": pinned_data(home)})})


def judge_settings(keys: JudgeKeys) -> JudgeSettings:
    """Return the settings of a judge in a recipe."""
    return JudgeSettings(**keys.model_dump())


def _alternatives(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a set of texts."""
    return [line.strip() for row in rows for line in row.text.splitlines() if line.strip()]


def _check_lora_targets(recipe: Recipe, target: Checkpoint) -> None:
    """Raise UsageError for modules that the target lacks, or whose adapters cannot be merged."""
    targets = recipe.vector.lora.targets
    if recipe.vector.mode == "full" or (isinstance(targets, str) and targets.lower() == "all-linear"):
        return
    modules = [name.removesuffix(".weight") for name, entry in target.tensors.items() if len(entry.shape) == 2]
    if isinstance(targets, str):  # PEFT takes it for a regular expression over whole names
        if fault := pattern_fault([targets], modules):
            raise UsageError(f"vector.lora.targets: {fault}")
        if not any(re.fullmatch(targets, module) for module in modules):
            raise UsageError(
                f"vector.lora.targets: {targets}: the target has no module of which this is the whole name"
            )
        return
    faults = []
    for name in targets:
        matched = [module for module in modules if module == name or module.endswith(f".{name}")]
        embeds = any("embed" in module or module.endswith("wte") for module in matched)
        if target.config.get("tie_word_embeddings") and (name == "lm_head" or embeds):
            faults.append(f"{name}: the target ties embedding and head, and an adapter would change one of the two")
        elif not matched:
            leaves = {module.rpartition(".")[2] for module in modules}
            faults.append(f"{name}: the target has no such module{nearest(name, leaves)}")
    if faults:
        raise UsageError(join_faults("vector.lora.targets:", faults))


def _check_same_rows(recipe: Recipe, target: Checkpoint, prior: Source) -> None:
    """Raise UsageError if adapters on the embedding would be loaded beside a target with other tokens."""
    theirs, own = token_tensors(target), token_tensors(load_checkpoint(prior.folder))
    names = [name for name in theirs if name in own and theirs[name].shape != own[name].shape]
    targets = recipe.vector.lora.targets
    if recipe.vector.mode == "full" or isinstance(targets, str) or not names:
        return
    tuned = [part for part in targets if any(f".{name}".endswith(f".{part}.weight") for name in names)]
    keys = {"merge.as: adapter": recipe.merge.form == "adapter", "select.four_bit": recipe.select.four_bit}
    for key in (key for key, is_set in keys.items() if is_set and tuned):
        raise UsageError(
            f"vector.lora.targets: {', '.join(tuned)}: target and prior differ in the number of tokens, so such an "
            f"adapter cannot be put on the target ({key}); leave them out, or merge to a model"
        )


def _bytes_needed(target: Checkpoint, recipe: Recipe, plan: RunPlan) -> int:
    """Return the disk space that the run still needs; stages that are there already need none.

    It holds the merged model. In full mode it also holds the fp32 checkpoints of each vector, and during a fit three
    saves with AdamW's state and a new best epoch beside the old one.
    """
    folder = plan.folder
    count = sum(entry.nbytes // {"F64": 8, "F32": 4}.get(entry.dtype, 2) for entry in target.tensors.values())
    size = 0
    if recipe.merge.form == "model" and not (folder / "model").exists():
        size += {"same": target.nbytes, "float32": 4 * count}.get(recipe.merge.dtype, 2 * count)
    if recipe.vector.mode == "full":
        missing = [name for name in plan.vectors if not (folder / "vectors" / name).exists()]
        size += (4 * plan.checkpoints * len(missing) + (4 + 3 * 12 if missing else 0)) * count
    return size


def is_open_ended(run: Run, name: str) -> bool:
    """Check whether the vector of this name ("forget", "retain") is fitted until it has learnt enough.

    It is not if the target itself is tuned, which knows the rows from the start. Then `epochs: auto` is a number.
    """
    return run.recipe.vector_of(name).epochs == "auto" and run.plan.start == "prior" and run.plan.method == "msa"


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
