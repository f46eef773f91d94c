"""Resolve a recipe: find, load and check all that a run needs before its first write."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from msa_lite.baselines.methods import TASK_VECTOR
from msa_lite.catalogue import OWN, paper_scores
from msa_lite.data import DataSource, Example, Prompter, Row, rows_identity
from msa_lite.evals.benchmarks.benchmark import Benchmark, data_home
from msa_lite.evals.benchmarks.dataset import pinned_data
from msa_lite.evals.engine.models import check_source, smallest_window
from msa_lite.evals.judge import open_judge
from msa_lite.evals.judge.base import check_prompts
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import check_space, digest
from msa_lite.io.launch.crew import Crew
from msa_lite.io.models.devices import check_device
from msa_lite.io.weights.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.weights.hub import Source
from msa_lite.pipeline.prepare.division import compare_with_earlier, separate_sets
from msa_lite.pipeline.prepare.earlier import (
    EarlierRun,
    RemovedRows,
    check_earlier,
    draw_removed,
    open_earlier,
    removed_hashes,
)
from msa_lite.pipeline.prepare.lengths import FILTER, find_filter_rows, fit_rows, is_filtered
from msa_lite.pipeline.prepare.models import check_readings, find_models, open_models, open_reader
from msa_lite.pipeline.prepare.prompt import resolve_prompt
from msa_lite.pipeline.prepare.questions import (
    Questions,
    WhenToChoose,
    limits_of_evidence,
    load_data,
    load_questions,
    questions_of,
    terms_left_out,
)
from msa_lite.recipe import Recipe
from msa_lite.report.run.provenance import WITH_VECTORS
from msa_lite.settings import JudgeSettings
from msa_lite.train import check_mode, check_trackers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scope:
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
    sample: bool = True
    """True if the retain set is sampled as the recipe says."""
    force: bool = False
    """True to run even if the device's memory is too small by prediction."""
    is_baseline: bool = False
    """True for a method beside the recipe's own run, in a folder of its own."""
    checkpoint: str | None = None
    """The finished model of another method, a folder or `repo[@revision]`; None where the run makes its model."""

    def describe(self, recipe: Recipe, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the method as the unlearned model's report names it."""
        if self.checkpoint:
            return {"name": self.method, "entered": True, "parameters": {}}
        about = {"name": self.method, "mode": recipe.vector.mode, "start": self.start}
        own: dict[str, Any] = {"hold": recipe.hold, "later": recipe.starts_at_retain}
        about |= {key: value for key, value in own.items() if value and self.method in WITH_VECTORS}
        return about | {"parameters": dict(parameters)}


def msa_scope(recipe: Recipe) -> Scope:
    """Return the scope of a recipe's own run: of MSA, or of the task vector where there is no prior."""
    vectors = ("forget", "retain") if recipe.retain else ("forget",)
    if recipe.has_prior:
        return Scope("msa", recipe.folder, "prior", choice=recipe.has_choice, vectors=vectors)
    return Scope(TASK_VECTOR, recipe.folder, "target", choice=recipe.has_choice, vectors=vectors)


@dataclass(frozen=True)
class Run:
    """A recipe with its inputs, ready to run."""

    recipe: Recipe
    """The recipe, with its prompt and its benchmark's data resolved."""
    scope: Scope
    """The part of it that this run does."""
    sources: Mapping[str, Source]
    """The models by name: "target", "prior" (the one that is tuned), perhaps "ideal" and "checkpoint" (`Scope`)."""
    data: Mapping[str, DataSource]
    """The data sets by their places in the recipe, pinned."""
    prompter: Prompter
    """Renders the prompts, with the target's tokenizer."""
    rows: Mapping[str, list[Row]]
    """The rows that vectors learn, by vector ("forget", "retain")."""
    examples: Mapping[str, list[Example]]
    """The same rows as token ids, and under `FILTER` those that a filter leaves as they are."""
    questions: Questions
    """The validation and test rows."""
    content: str = ""
    """The hash of the content of all data sets, whole."""
    spared: Sequence[Row] = ()
    """The rows that a filter leaves as they are."""
    retain: Sequence[Row] = ()
    """The retain rows that MSA's vector learns, also where this run's method learns all of them."""
    earlier: tuple[EarlierRun, ...] = ()
    """The runs of earlier requests, whose vectors are merged, too."""
    removed: RemovedRows | None = None
    """The rows of earlier requests that are asked again; None where there were no such requests."""
    prompt_search: dict[str, Any] | None = None
    """The outcome of `prompt: auto` in detail. The recipe has the prompt itself."""
    notes: Sequence[str] = ()
    """What its data cannot show, and rows that are left out, a sentence each."""
    crew: Crew = field(default_factory=Crew, compare=False)
    """The processes at work on it."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.scope.folder

    @property
    def renders(self) -> bool:
        """Check whether there are questions to put into a prompt."""
        published = self.test is not None and self.test.prompted and self.test.name != OWN
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
    def removed_rows(self) -> Benchmark | None:
        """The rows of earlier requests that are asked again; None if there are none."""
        return self.removed.questions if self.removed else None

    @property
    def judge(self) -> JudgeSettings:
        """The judge of the test questions."""
        return self.recipe.evaluate.judge if self.recipe.evaluate else JudgeSettings()

    def vector_folder(self, name: str) -> Path:
        """Return the folder of the forget or retain vector."""
        return self.folder / "vectors" / name


@dataclass(frozen=True)
class Context:
    """The base of a list of stages: a recipe, and its inputs once they are prepared.

    Without the inputs, a list can be built, shown and planned, but not executed. It then has the stages that the recipe
    alone tells of.
    """

    recipe: Recipe
    """The recipe; once prepared, with its prompt and its benchmark's data resolved."""
    scope: Scope
    """The part of it that is run."""
    prepared: Run | None = None
    """The inputs, once they are there."""

    @classmethod
    def of(cls, run: Run) -> Context:
        """Return the context of a prepared run."""
        return cls(run.recipe, run.scope, run)

    @property
    def run(self) -> Run:
        """The prepared inputs."""
        assert self.prepared is not None, "only shown, never executed"
        return self.prepared

    @property
    def chooses(self) -> bool:
        """Check whether something is chosen by validation rows."""
        if self.prepared:
            return self.prepared.validation is not None
        return self.recipe.evaluate is not None and self.scope.choice is not False

    @property
    def asks_judge(self) -> bool:
        """Check whether a judge is asked about candidates, as far as this is known."""
        if self.prepared:
            return self.prepared.questions.judged
        return self.chooses and self.recipe.select.score in paper_scores()

    @property
    def chooses_by_rows(self) -> bool:
        """Check whether the choice is by the user's own forget rows, so that all models are scored on them."""
        if self.prepared and self.prepared.validation:
            return self.prepared.validation.name == OWN
        return self.chooses and self._asks_own_rows

    @property
    def compares_with_prior(self) -> bool:
        """Check whether the prior is scored on the forget rows, as the level of a model that never saw them."""
        return self._asks_own_rows and self.scope.start == "prior" and not self.has_ideal

    @property
    def _asks_own_rows(self) -> bool:
        return self.recipe.evaluate is not None and self.recipe.evaluate.benchmark == OWN

    @property
    def asks_earlier(self) -> bool:
        """Check whether models are asked the rows of earlier requests."""
        if self.prepared:
            return self.prepared.removed_rows is not None
        return bool(self.recipe.evaluate and self.recipe.earlier)

    @property
    def earlier_models(self) -> list[str]:
        """Return the models that are asked the rows of earlier requests; without an ideal, the prior is the control."""
        control = "ideal" if self.has_ideal else "prior" if self.scope.start == "prior" else None
        return [*([control] if control else []), "target", "unlearned"]

    @property
    def has_ideal(self) -> bool:
        """Check whether the recipe names an ideal."""
        return bool(self.recipe.evaluate and self.recipe.evaluate.ideal)

    @property
    def scored(self) -> list[str]:
        """Return the models that are scored on the test rows, the ideal first: it is the others' yardstick."""
        return [*(["ideal"] if self.has_ideal else []), "target", "unlearned"] if self.recipe.evaluate else []


def prepare(recipe: Recipe, scope: Scope, progress: Progress = silent) -> Run:
    """Find and check every input of a planned run. Only an adapter as target or prior is written, merged into its base.

    Raise MismatchError with the tensors on which target and prior differ.
    """
    recipe = _pin_benchmark(recipe)
    check_mode(recipe.vector.mode, recipe.vector.optimizer)
    check_trackers(recipe.track)
    if recipe.evaluate:
        judge = recipe.evaluate.judge
        open_judge(judge)  # it may lack a key
        check_prompts(judge, recipe.evaluate.benchmark)
    earlier = open_earlier(recipe)
    found = find_models(recipe, scope.start, scope.checkpoint)
    data, all_rows = load_data(recipe)
    content = digest({place: rows_identity(rows) for place, rows in all_rows.items()})
    all_rows, notes = separate_sets(all_rows, removed_hashes(recipe, earlier))
    # From here on the checks need torch and transformers, which take seconds to load.
    check_device()
    check_mode(recipe.vector.mode, compute=recipe.vector.compute)
    sources = open_models(recipe, found, progress)
    check_earlier(recipe, earlier, sources)
    check_space(scope.folder, _bytes_needed(load_checkpoint(sources["target"].folder), recipe, scope))

    tokenizer = open_reader(sources["target"], recipe.target)
    notes += limits_of_evidence(recipe, all_rows, scope.sample)
    places = (scope.folder, recipe.folder)
    recipe, prompter, search = resolve_prompt(recipe, sources["target"], tokenizer, all_rows, places)
    prompter = replace(prompter, window=smallest_window(sources.values()))
    fitted = fit_rows(recipe, data, all_rows, prompter, scope.sample)
    learnt = fitted.learnt
    notes += fitted.notes
    notes += compare_with_earlier(learnt["forget"], earlier)
    check_readings(sources, tokenizer, learnt["forget"])
    questions = load_questions(recipe, fitted.rows, scope.choice, prompter)
    notes += terms_left_out(recipe) if questions.validation else []
    for published in questions.published:
        notes += [*published.unasked(), *published.unscored()]
    spared = find_filter_rows(recipe, fitted, prompter, questions_of(questions.published))
    notes += spared.notes if scope.vectors and is_filtered(recipe, scope.sample) else []
    examples = {**fitted.examples, FILTER: spared.examples} if spared.examples else fitted.examples
    if removed := draw_removed(recipe, earlier, prompter):
        notes += removed.facts.notes
    _check_ids(sources, examples, [questions.validation, questions.test, removed.questions if removed else None])
    return Run(
        recipe=recipe,
        scope=scope,
        sources=sources,
        data=data,
        prompter=prompter,
        rows=learnt,
        examples=examples,
        questions=questions,
        content=content,
        spared=spared.rows,
        retain=fitted.sample,
        earlier=earlier,
        removed=removed,
        prompt_search=search,
        notes=notes,
    )


def _check_ids(
    sources: Mapping[str, Source], examples: Mapping[str, list[Example]], questions: Sequence[Benchmark | None]
) -> None:
    """Raise MismatchError where a model would get a token that its embedding has no row for."""
    ids = {token for rows in examples.values() for example in rows for token in example.ids}
    for benchmark in questions:
        ids |= benchmark.ids() if benchmark else set()
    for source in sources.values():
        check_source(source, ids)


def _pin_benchmark(recipe: Recipe) -> Recipe:
    """Return the recipe with its benchmark's data named, and pinned to a commit of the Hub."""
    evaluate = recipe.evaluate
    home = evaluate and (evaluate.data or data_home(evaluate.benchmark, evaluate.split))
    if not evaluate or not home:
        return recipe
    return recipe.model_copy(update={"evaluate": evaluate.model_copy(update={"data": pinned_data(home)})})


def _bytes_needed(target: Checkpoint, recipe: Recipe, scope: Scope) -> int:
    """Return the disk space that the run still needs; stages that are there already need none.

    It holds the merged model. In full mode it also holds an fp32 checkpoint of each vector, or of the best epoch of a
    baseline, and during a fit three saves with AdamW's state and, of a baseline, two more epochs.
    """
    if not scope.vectors:  # nothing is made, or a checkpoint is taken as it is
        return 0
    folder = scope.folder
    count = sum(entry.nbytes // {"F64": 8, "F32": 4}.get(entry.dtype, 2) for entry in target.tensors.values())
    size = 0
    if recipe.merge.form == "model" and not (folder / "model").exists():
        size += {"same": target.nbytes, "float32": 4 * count}.get(recipe.merge.dtype, 2 * count)
    if recipe.starts_at_retain and recipe.vector.mode != "full" and not (folder / "vectors/start").exists():
        size += target.nbytes  # of the prior with the retain vector, which is as large
    if recipe.vector.mode == "full":
        missing = [name for name in scope.vectors if not (folder / "vectors" / name).exists()]
        most = 2 if scope.is_baseline else len(missing)  # the best of all settings, and that of the running one
        size += (4 * min(most, len(missing)) + (4 + 3 * 12 if missing else 0)) * count
    return size
