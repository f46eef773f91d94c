"""The verbs that work on a recipe: run, sweep, vector, baseline. Each builds a list of stages and executes it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from msa_lite.baselines.methods import check_grids
from msa_lite.choose.choice import Values
from msa_lite.data import Row
from msa_lite.errors import StageError, UsageError
from msa_lite.io.console.progress import Progress, Step, announce, muted, notices, silent
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import why_unfinished
from msa_lite.io.launch.crew import Crew
from msa_lite.io.launch.gathering import PREPARE, gathered
from msa_lite.merger import Merged, MergedAdapter
from msa_lite.merger.moments import MOMENTS_FOLDER, Moments, load_moments
from msa_lite.pipeline.attack.campaign import open_attacks
from msa_lite.pipeline.attack.run import run_attacks
from msa_lite.pipeline.baseline.entered import AS_MODEL, rows_perhaps_learnt
from msa_lite.pipeline.baseline.trials import Trials
from msa_lite.pipeline.prepare.run import Context, Run, prepare
from msa_lite.pipeline.run.choice import CHOICE, POINTS, chosen_strengths, points_helper
from msa_lite.pipeline.run.demo import demo_stages
from msa_lite.pipeline.run.evidence import findings_of
from msa_lite.pipeline.run.folder import claimed, run_inputs, stage_list
from msa_lite.pipeline.run.merge import merge_precision, run_terms
from msa_lite.pipeline.run.msa import finish_run, learnt_rows
from msa_lite.pipeline.run.report import check_publishing, drop_report, publish_model
from msa_lite.pipeline.run.scores import COLLECT, help_collect, scores_folder
from msa_lite.pipeline.run.vectors import FIT, help_fit, vector_fit
from msa_lite.pipeline.stages.stage import Stage, execute, steps
from msa_lite.pipeline.verbs.commands import CommandName, Verb, find_verb
from msa_lite.publish.upload import Published
from msa_lite.recipe import Recipe, RecipeSource, load_recipe
from msa_lite.report import Report, load_report, reports_table
from msa_lite.report.run.attacks import AttackFacts, attack_summary
from msa_lite.report.run.choice import SYMBOLS, Choice, candidate_name, points_table
from msa_lite.report.run.evidence import EvidenceFinding
from msa_lite.report.run.provenance import RECIPE_FILE
from msa_lite.report.run.rows import SideBySide
from msa_lite.report.run.stages import write_stages
from msa_lite.report.tables.formats import html_table
from msa_lite.report.verdict.verdict import NoVerdict, Verdict
from msa_lite.strengths import Strengths

_Result = TypeVar("_Result")


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run."""

    json_keys: ClassVar = {
        "verdict": "verdict", "no_verdict?": "no_verdict", "output": "folder", "method": "method", "**": "strengths",
        "chosen": "chosen", "model": "merged", "metrics": "metrics", "evidence?": "evidence_values",
        "attacks?": "attack_values", "published?": "published",
    }  # fmt: skip

    folder: Path
    """The run's folder."""
    method: str
    """"msa", or the baseline's name."""
    chosen: Values
    """alpha and beta; of a baseline that trains, parameters, epoch, scale."""
    merged: Merged | MergedAdapter
    """The unlearned model, or the adapter."""
    reports: dict[str, Report]
    """A report for each model that was scored."""
    verdict: Verdict | None = None
    """PASS, PARTLY or FAIL, with the sentence that says what happened."""
    no_verdict: str | None = None
    """The reason why there is no verdict, where there is none."""
    examples: Sequence[SideBySide] = ()
    """Questions with what target, unlearned model and ideal say. They hold the data."""
    evidence: Sequence[EvidenceFinding] = ()
    """What was found beside the scores."""
    attacks: AttackFacts | None = None
    """What attacks brought back, if the recipe says to make some."""
    published: Published | None = None
    """Its place on the Hub, if the recipe says to send it."""

    def __repr__(self) -> str:
        chosen = ", ".join(f"{SYMBOLS.get(key, key)} = {value}" for key, value in self.chosen.items())
        outcome = self.verdict.outcome if self.verdict else "no verdict"
        return f"RunResult({self.folder}: {outcome}, {chosen})"

    def _repr_html_(self) -> str:
        title = f"{self!r}: {self.no_verdict}" if self.no_verdict else repr(self)
        return f"{self.verdict._repr_html_() if self.verdict else ''}{html_table(reports_table(self.reports, title))}"

    @property
    def point(self) -> Strengths:
        """Return α, β and λ of the filter, of MSA and the task vector."""
        return Strengths.of(self.chosen)

    @property
    def strengths(self) -> Values:
        """Return α, β and perhaps λ by name; nothing for a baseline that trains."""
        return self.point.values if "alpha" in self.chosen else {}

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the values of all metrics by model."""
        return {name: report.values() for name, report in self.reports.items()}

    @property
    def evidence_values(self) -> dict[str, Any]:
        """Return the outcome of each kind of evidence, with its sentence."""
        return {found.kind: {"outcome": found.outcome, "sentence": found.sentence} for found in self.evidence}

    @property
    def attack_values(self) -> dict[str, Any] | None:
        """Return what attacks brought back, in short."""
        return attack_summary(self.attacks) if self.attacks else None


@dataclass(frozen=True, repr=False)
class SweepResult:
    """The result of a sweep."""

    json_keys: ClassVar = {
        "output": "folder", "**": "choice.values", "rule": "choice.rule", "score": "choice.score",
        "scores": "choice.scores", "doubts": "choice.doubts", "model": "merged", "validation": "validation",
    }  # fmt: skip

    folder: Path
    """The run's folder."""
    choice: Choice
    """The choice of the point, with its reasons and the metrics of all points."""
    merged: Merged | MergedAdapter
    """The merge of the chosen point."""
    before: Report
    """The scores of the chosen point in memory, on validation rows."""
    after: Report
    """The scores of the merged model, on the same rows."""
    notes: Sequence[str]
    """A sentence that compares the two."""

    def __repr__(self) -> str:
        points = f"{len(self.choice.scores)} points"
        return f"SweepResult({self.folder}: {self.strengths} of {points}, {self.choice.rule})"

    def _repr_html_(self) -> str:
        return html_table(points_table(self.choice))

    @property
    def strengths(self) -> Strengths:
        """Return the chosen point."""
        return Strengths.of(self.choice.values)

    @property
    def validation(self) -> dict[str, Any]:
        """Return the metrics of the chosen point on validation rows, in memory and merged."""
        return {"in_memory": self.before.values(), "merged": self.after.values()}


def run(
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    progress: Progress = silent,
    *,
    accept: bool = False,
    force: bool = False,
) -> RunResult | None:
    """Run a recipe: fit the vectors, choose α and β, merge, score, and write the report.

    accept: only warn if the target does not know the rows to forget, or the prior does. force: only warn if the
    device's memory is too small by prediction. Raise before anything is written for faults of the recipe or its inputs.
    Later errors leave finished stages in place, and a rerun resumes. A verdict of FAIL raises nothing. Under a launcher
    all processes work, and only the first returns a result; the others return None.
    """
    recipe = load_recipe(recipe, overrides)
    check_grids(recipe.baseline.methods)
    verb = find_verb("run", recipe, accept=accept, force=force)
    if result := _lead(recipe, verb, progress, partial(_run, verb, progress)):
        published = publish_model(recipe, result.merged.folder, result.verdict, accept)
        return replace(result, published=published)
    return None


def run_baseline(
    method: str | None,
    recipe: RecipeSource,
    overrides: Iterable[str] = (),
    progress: Progress = silent,
    *,
    model: str | None = None,
    force: bool = False,
) -> RunResult | None:
    """Run a baseline on a recipe's models and data, and score it in the same way as MSA.

    The run goes into `baselines/METHOD` of the recipe's output (`METHOD-prior` with `start: prior`). Raise before
    anything is written for faults of method, recipe or inputs. model: the finished checkpoint of a method of your own,
    with None for `method`; nothing is trained, and the run goes into `baselines/NAME`, the checkpoint's name. force:
    only warn if the device's memory is too small by prediction. Return None in the processes of a launcher but the
    first.
    """
    if (method is None) == (model is None):
        raise UsageError("give either a method, or the checkpoint of another one (--model)")
    recipe = load_recipe(recipe, [*overrides, *(AS_MODEL if model else ())])
    verb = find_verb("baseline", recipe, method or "", force=force, model=model)
    return _lead(recipe, verb, progress, partial(_run, verb, progress))


def sweep(
    recipe: RecipeSource, overrides: Iterable[str] = (), progress: Progress = silent, *, force: bool = False
) -> SweepResult | None:
    """Fit the vectors of a recipe, score its points on validation rows, merge the best and score that again.

    This is `run` without the scores on test rows. Under a launcher all processes work on it, and only the first returns
    a result; the others return None. force: only warn if the device's memory is too small by prediction. Raise
    UsageError for a recipe with a single point.
    """

    def result(run: Run, results: dict[str, Any]) -> SweepResult:
        choice = results[CHOICE]
        return SweepResult(
            run.folder,
            choice,
            results["merge"],
            load_report(run.folder / "sweep" / candidate_name(choice.values)),
            load_report(scores_folder(run, "unlearned", "validation")),
            results["validation: unlearned"],
        )

    return _do_part("sweep", load_recipe(recipe, overrides), progress, force, result)


def run_vectors(
    recipe: RecipeSource, overrides: Iterable[str] = (), progress: Progress = silent, *, force: bool = False
) -> list[Path] | None:
    """Fit only the vectors of a recipe. Return their folders; None in the processes of a launcher but the first.

    force: only warn if the device's memory is too small by prediction.
    """
    loaded = load_recipe(recipe, overrides)
    names = loaded.vector_names
    return _do_part("vector", loaded, progress, force, lambda run, _: [run.vector_folder(name) for name in names])


def run_moments(
    recipe: RecipeSource, overrides: Iterable[str] = (), progress: Progress = silent, *, force: bool = False
) -> Moments | None:
    """Measure the inputs of the layers of a recipe's target, on its rows to forget and to keep, into RUN/moments.

    `filter_vector` takes them. Return the moments; None in the processes of a launcher but the first. force: only
    warn if the device's memory is too small by prediction. Raise UsageError for a recipe without a retain set.
    """
    loaded = load_recipe(recipe, overrides)
    return _do_part("moments", loaded, progress, force, lambda run, _: load_moments(run.folder / MOMENTS_FOLDER))


def _do_part(
    command: CommandName,
    recipe: Recipe,
    progress: Progress,
    force: bool,
    result: Callable[[Run, dict[str, Any]], _Result],
) -> _Result | None:
    """Do the stages of a part of a run, and return what `result` makes of the run and of what the stages gave."""

    def work(run: Run, stages: list[Stage]) -> _Result:
        def merge(stage: Stage, progress: Progress) -> Any:
            assert stage.folder is not None
            assert stage.inputs is not None
            if why_unfinished(stage.folder, stage.inputs()):
                drop_report(run.folder)  # that of another model; before, so that a kill leaves none
            return stage.run(progress)

        stages = [replace(stage, run=partial(merge, stage)) if stage.kind == "merge" else stage for stage in stages]
        return result(run, execute(stages, progress))

    return _lead(recipe, find_verb(command, recipe, force=force), progress, work)


def _lead(
    recipe: Recipe, verb: Verb, progress: Progress, work: Callable[[Run, list[Stage]], _Result]
) -> _Result | None:
    """Claim a run's folder, write the list of its stages, and return what `work` makes of the run and its stages.

    The models that a demo makes first are announced with all stages after them, as one count. In the processes of a
    launcher but the first, do what that one orders, and return None.
    """
    with gathered([verb.scope.method, recipe.model_dump(mode="json")]) as crew:
        if not crew.first:
            _follow(crew, recipe, verb)
            return None
        if verb.publishes:
            check_publishing(recipe)
        if made := demo_stages(recipe):
            announce(progress, steps([*made, *verb.stages(Context(recipe, verb.scope))]))
        with claimed(recipe, verb.scope, progress, verb.check, crew=crew) as run:
            context = Context.of(run)
            for line in verb.going_out(context):
                notices.info("%s", line)
            stages = verb.stages(context)
            write_stages(stage_list(context, [*demo_stages(recipe, made=True), *stages]), run.folder)
            return work(run, stages)
    return None


def _follow(crew: Crew, recipe: Recipe, verb: Verb) -> None:
    """Prepare the same run as the first process, and do what that one orders until it has ended the run.

    Warnings of tasks that the first process does, too, are left out.
    """
    runs, helpers = list[Run](), list[Callable[..., None]]()
    tasks: dict[str, Callable[..., None]] = {
        COLLECT: help_collect,
        FIT: partial(_help_fit, verb),
    }

    def do(task: str, arguments: Mapping[str, Any]) -> Any:
        if task == POINTS:
            helpers.extend([] if helpers else [points_helper(runs[0])])
            return helpers[0](**arguments)
        with muted():
            if task != PREPARE:
                return tasks[task](runs[0], **arguments)
            runs.append(replace(prepare(recipe, verb.scope), crew=crew))
            return run_inputs(runs[0])

    crew.follow(do)


def _help_fit(verb: Verb, run: Run, name: str) -> None:
    """Make a fit of a vector with the first process, or one of a baseline's settings by the name of its folder."""
    fit = Trials(Context.of(run), verb.settings).fit_named(name) if verb.settings else vector_fit(run, name)
    help_fit(fit, run.vector_folder(name), run.crew)


def _run(verb: Verb, progress: Progress, run: Run, stages: list[Stage]) -> RunResult:
    """Execute the stages of a run, of MSA or of a baseline; then its attacks."""
    if verb.settings and not run.crew.is_alone and run.recipe.vector.mode != "full":
        notices.info("%s: one process trains; the others help with the scores", run.scope.method)
    drop_report(run.folder)
    written = hash_file(recipe := run.folder / RECIPE_FILE)
    results = execute(stages, progress, _attack_steps(run))
    if hash_file(recipe) != written:  # report and record would tell of another run
        raise StageError(f"{recipe}: was changed while the run worked; run the same command again; its stages stay")
    merged = results["merge"]
    chosen, learnt = _chosen(Context.of(run), verb)
    findings = finish_run(run, chosen, merged, learnt)
    attacks = run_attacks(open_attacks(run, merged.folder), progress).facts if run.recipe.attack.attacks else None
    if run.earlier:
        _tell_how_to_rebuild(run)
    judged = findings.verdict
    verdict, reason = (None, judged.reason) if isinstance(judged, NoVerdict) else (judged, None)
    reports = {name: results[key] for name in ("target", "ideal", "unlearned") if (key := f"scores: {name}") in results}
    return RunResult(
        run.folder,
        run.scope.method,
        chosen,
        merged,
        reports,
        verdict,
        reason,
        findings.examples,
        findings_of(results),
        attacks,
    )


def _attack_steps(run: Run) -> list[Step]:
    """Return the attacks that a run's recipe ends it with, as steps."""
    wanted = run.recipe.attack.attacks
    stages = open_attacks(run, None).stages() if wanted else {}
    return steps(stage for (name, _), stage in stages.items() if name in wanted)


def _chosen(context: Context, verb: Verb) -> tuple[Values, Sequence[Row]]:
    """Return what was chosen, and the rows to keep that the merged model learnt."""
    if verb.scope.checkpoint:
        return {}, rows_perhaps_learnt(context.run)
    if not verb.settings:
        strengths = chosen_strengths(context.run)
        return strengths.values, learnt_rows(context.run, strengths)
    trials = Trials(context, verb.settings)
    setting, epoch, scale = trials.chosen()
    is_learnt, run = setting.parameters.get("retain_weight"), context.run
    learnt = [*(run.rows.get("retain", ()) if is_learnt else ()), *(run.spared if trials.filter else ())]
    return trials.values_of(setting, epoch, scale), learnt


def _tell_how_to_rebuild(run: Run) -> None:
    """Tell the command that makes the model of a run with earlier requests from nothing."""
    names = {key: str(s.folder) if s.is_folder else s.pinned() for key, s in run.sources.items()}
    words = ["msa-lite", "merge", "--target", names["target"]]
    for term in (term for term in run_terms(run, chosen_strengths(run)) if term.weight):
        option, strength = ("--forget", "--alpha") if term.side == "forget" else ("--retain", "--beta")
        words += [option, str(term.vector), strength, str(abs(term.weight))]
    options = merge_precision(run.recipe).record if run.recipe.merge.form == "model" else {"as": "adapter"}
    changed = {option: value for option, value in options.items() if (option, value) != ("dtype", "same")}
    words += ["--prior", names["prior"], *(word for key, value in changed.items() for word in (f"--{key}", str(value)))]
    command = shlex.join([*words, "--out", "OUT"])
    notices.info("to merge the same model by hand (leave a request out to drop it): %s", command)
