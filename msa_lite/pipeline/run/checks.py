"""Checks before a run fits anything: the target knows the rows to forget, and the prior has not seen them.

The probe asks the second question on its own, of all candidates for the prior.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.budget.plan import CHECKS
from msa_lite.data import load_rows
from msa_lite.errors import MismatchError, UsageError, allowed_by
from msa_lite.evals.benchmarks.benchmark import Benchmark, Record
from msa_lite.evals.engine.prompt_search import better_prompt
from msa_lite.evals.scores.probe import (
    PROBE_ROWS,
    against_own,
    against_rows,
    probe_inputs,
    probe_model,
    sample_probe,
    suffices,
)
from msa_lite.evals.scores.records import records_by_set
from msa_lite.evals.verdict.knowledge import Fault, find_fault, known, weak_sets
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.launch.crew import Crew, stand_alone
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.pipeline.prepare.models import fit_prior
from msa_lite.pipeline.prepare.run import Context, Run, Scope, msa_scope
from msa_lite.pipeline.run.folder import claimed, stage_list
from msa_lite.pipeline.run.scores import asked, score_model, score_stage, scores_folder
from msa_lite.pipeline.stages.costs import evidence_costs
from msa_lite.pipeline.stages.stage import Stage, execute
from msa_lite.recipe import Recipe, RecipeSource, load_recipe
from msa_lite.report.run.probing import Finding, read_verdicts
from msa_lite.report.run.rows import SideBySide, examples_text
from msa_lite.report.run.stages import write_stages
from msa_lite.report.tables.metrics import metric_kind

logger = logging.getLogger(__name__)

SHOWN = 2  # rows with the target's answers in a message
_CAUSES = "Wrong rows? Wrong model, or target and prior exchanged? Was it trained on them too little to recite any?"
GO_ON = "`verdict: off` in the recipe makes this a warning, and so does --accept for a whole run"
PROBE_FOLDER = "probe"
CHEAP_ROWS = 64  # of each side, for a run's own probe: it takes seconds, and shows rows that were learnt
_SAYS = "do the losses show that a model has seen the rows to forget?"
_PASSES = 2.0  # over the forget rows: they are asked, and about as many others


def check_stages(context: Context, accept: bool = False, probe: bool = False) -> list[Stage]:
    """Return what is looked at before anything is fitted; nothing where the target itself is tuned.

    First the check: target and prior are asked the forget rows, at most 64 of them. Only if these leave it open whether
    the run is refused, the target is asked as many retain and holdout rows. Then, where the user's own rows decide the
    choice, all models are scored on the validation rows, so that each is loaded once. All scores stay: a rerun, and the
    later stages of the run, take them up.

    probe: with the run's own short probe of its prior. accept: warn where the stages would raise MismatchError: if the
    target does not know the rows to forget, or the prior knows them already.
    """
    if context.scope.start != "prior":
        return []
    checks = []
    for name in ("target", "prior", *(["others"] if _has_others(context) else [])):
        stage = score_stage(context, name, "check")
        checks.append(replace(stage, run=partial(_check, context, name, accept)))
    ideal = ["ideal"] if context.has_ideal else []
    needs = {"target": [f"validation: {name}" for name in ideal]}
    scored = [*ideal, "prior", "target"] if context.chooses_by_rows else []
    validation = [score_stage(context, name, "validation", needs.get(name, ())) for name in scored]
    return [*checks, *(cheap_probe(context) if probe else []), *validation]


def _has_others(context: Context) -> bool:
    """Check whether there are retain or holdout rows to ask the target about."""
    if context.prepared:
        return bool(asked(context.run, "others", "check").sets)
    evaluate = context.recipe.evaluate
    return bool(context.recipe.retain or (evaluate and (evaluate.retain or evaluate.holdout)))


def _check(context: Context, name: str, accept: bool, progress: Progress) -> None:
    """Ask one part; with the last that is needed, refuse the run or warn. Raise MismatchError where it refuses."""
    run = context.run
    score_model(run, name, "check", progress)
    if name == "target":
        return
    target, prior = (_records(run, model)["forget"] for model in ("target", "prior"))
    rest = _records(run, "others") if name == "others" else {}
    is_strict = not accept and run.recipe.verdict
    others = rest.get("retain", ()), rest.get("holdout", ())
    fault = find_fault(target, prior, *others)
    if name == "prior" and _has_others(context) and not (is_strict and fault and fault.kind == "unknown"):
        return  # other rows can refute what is "seen"
    if fault is None:
        for note in weak_sets(target, prior, *others):
            logger.warning("%s", note)
        return
    message = _message(run, fault, target)
    if is_strict:
        kept = f"nothing was fitted; the scores stay in {run.folder / 'evaluation'}, and a rerun takes them up"
        raise allowed_by(MismatchError(f"{message}\n{GO_ON}\n{kept}"), "--accept")
    logger.warning("%s", message)


def _records(run: Run, name: str) -> dict[str, list[Record]]:
    """Return the records of a part by set."""
    return records_by_set(scores_folder(run, name, "check"))


def _message(run: Run, fault: Fault, forget: Sequence[Record]) -> str:
    target, prior = run.sources["target"].name, run.sources["prior"].name
    advice = "are these the rows that it was trained on? If so, is the prompt that of the training?"
    headline = f"the target {target} does not know the rows to forget"
    if fault.kind == "unknown":
        advice = _prompt_advice(run)
    elif fault.kind == "seen":
        headline = f"the prior {prior} has already seen the rows to forget, so their vector would miss them"
        advice = "take an earlier checkpoint as the prior, from before they came in (`msa-lite probe` compares some)"
    lines = [f"{headline}: {fault.reason}", f"  ({fault.figures})", f"  {advice}"]
    if fault.kind != "seen" and (examples := _worst(forget)):
        lines += ["", *(f"  {line}".rstrip() for line in examples_text(examples).splitlines()), ""]
    return "\n".join(lines)


def _prompt_advice(run: Run) -> str:
    """Name the one of a few plausible prompts that lets the target answer, or else the possible causes."""
    questions = [row for row in run.rows["forget"] if not row.text]
    if not questions:  # texts have no prompt
        return _CAUSES
    if better := better_prompt(run.sources["target"], questions, run.prompter, run.recipe.seed):
        return f"wrong prompt: {better}"
    return f"Wrong prompt? Ask as the rows were asked in training (`prompt:` in the recipe). {_CAUSES}"


def _worst(forget: Sequence[Record]) -> list[SideBySide]:
    """Return the questions that the target knows least about."""
    answered = [record for record in forget if record.get("generated") is not None]
    worst = sorted(answered, key=known)[:SHOWN]
    return [SideBySide("question", r["question"], r["answer"], {"target": r["generated"]}) for r in worst]


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe."""

    json_keys: ClassVar = {"output": "folder", "rows": "rows", "models": "values"}

    folder: Path
    """The folder of the scores."""
    models: Mapping[str, str]
    """The models by the name of their finding: repository or folder, with revision."""
    findings: list[Finding]
    """A finding for each model."""

    @property
    def title(self) -> str:
        """Return the title of a table: the rows that were compared."""
        forget, compared = self.findings[0].report.settings["rows"].values()
        return f"{forget} forget rows against {compared} holdout rows"

    @property
    def labels(self) -> list[str]:
        """Return the headings of `Finding.cells`."""
        return [metric_kind(name).label for name in self.findings[0].report.metrics]

    @property
    def rows(self) -> Any:
        """Return the numbers of rows on each side."""
        return self.findings[0].report.settings["rows"]

    @property
    def values(self) -> dict[str, Any]:
        """Return verdict and figures of each model."""
        return {
            finding.name: {
                "model": self.models[finding.name],
                "verdict": finding.verdict,
                "said": finding.explanation,
                **{
                    name: {"value": metric.value, "interval": interval, "stderr": metric.stderr, "n": metric.n}
                    for name, metric, interval in finding.measured()
                },
            }
            for finding in self.findings
        }


def probe(recipe: RecipeSource, overrides: Iterable[str] = (), progress: Progress = silent) -> ProbeResult | None:
    """Check the candidates for the prior, and target and ideal as controls, for signs of having seen the forget set.

    Candidates are all checkpoints of the recipe's history, or its prior. Write a folder for each model into
    OUTPUT/probe. Models that were scored before are not scored again. Before any scoring, raise UsageError if
    there is nothing to compare the forget rows with, and MismatchError for a candidate of another shape. Under a
    launcher the first process does it alone; return None in the others.
    """
    recipe = load_recipe(recipe, overrides)
    if not stand_alone().first:
        return None
    with claimed(recipe, probe_scope(recipe), progress, check_probe, crew=Crew()) as run:
        sources, folder = _models(run), run.folder / PROBE_FOLDER
        context = Context.of(run)
        stages = _stages(context, sources)
        write_stages(stage_list(context, stages), run.folder)
        results = execute(stages, progress)
        reports = {name: results[f"probe: {name}"] for name in sources}
        models = {name: source.pinned() for name, source in sources.items()}
        return ProbeResult(folder, models, read_verdicts(reports))
    return None


def probe_scope(recipe: Recipe) -> Scope:
    """Return the scope of a recipe's probe. Nothing is chosen, so no rows are set apart for it."""
    return replace(msa_scope(recipe), choice=False, vectors=())


def probe_stages(context: Context) -> list[Stage]:
    """Return the stages of a probe, one a model; of inputs that are not here yet, only the prior's is known."""
    if context.prepared is None:
        return [_stage(context, "prior", "the probe", "")]
    return _stages(context, _models(context.run))


def _stages(context: Context, sources: Mapping[str, Source]) -> list[Stage]:
    rows = probe_rows(context.run)
    assert rows is not None, "checked"
    few = sample_probe(rows, PROBE_ROWS, context.recipe.seed)
    return [_stage(context, name, "the probe", "", source, few) for name, source in sources.items()]


def cheap_probe(context: Context) -> list[Stage]:
    """Return a run's own short probe: a warning where its prior shows signs of having seen the forget set.

    Nothing where there are no rows to compare with. The scores stay in OUTPUT/probe/cheap, so a rerun loads no model.
    """
    if context.prepared is None:
        evaluate = context.recipe.evaluate
        return [_stage(context, "prior", CHECKS, "cheap")] if evaluate and evaluate.holdout else []
    if (rows := probe_rows(context.run)) is None:
        return []
    few, sources = sample_probe(rows, CHEAP_ROWS, context.recipe.seed, with_z=False), context.run.sources
    stages = [
        _stage(context, name, CHECKS, "cheap", sources[name], few) for name in ("prior", "ideal") if name in sources
    ]
    return [replace(stages[0], run=partial(_warn_of_signs, context.run, stages))]


def _stage(
    context: Context, name: str, what: str, place: str, source: Source | None = None, rows: Benchmark | None = None
) -> Stage:
    """Return the stage that probes a model.

    what: the name of such stages in a plan. place: the folder of its scores in OUTPUT/probe. source, rows: the model
    and the rows, once they are there.
    """
    folder, cost = context.scope.folder / PROBE_FOLDER / place / name, partial(evidence_costs, what, 1, _PASSES)
    stage = Stage(f"probe: {name}", "check", folder, cost=cost, says=_SAYS)
    if source is None or rows is None:
        return stage
    run = partial(probe_model, source, rows, folder, context.recipe.folder, stage.name)
    return replace(stage, run=run, inputs=partial(probe_inputs, source, rows))


def _warn_of_signs(run: Run, stages: Sequence[Stage], progress: Progress) -> None:
    """Warn if the prior shows signs of having seen the forget set. Signs that the ideal shows as well mean nothing.

    stages: the probe of the prior, and that of the ideal, which is asked only if the prior shows signs.
    """
    reports = {}
    for stage in stages:
        reports[stage.name.removeprefix("probe: ")] = stage.run(progress)
        finding = read_verdicts(reports)[0]
        if finding.verdict != "signs":
            return
    forget, compared = reports["prior"].settings["rows"].values()
    logger.warning(
        "the prior %s %s. %s forget rows were compared with %s holdout rows; `msa-lite probe` looks closer. MSA "
        "fails with a prior that has already seen the forget set: take an earlier checkpoint",
        run.sources["prior"].name,
        finding.explanation,
        forget,
        compared,
    )


def probe_rows(run: Run) -> Benchmark | None:
    """Return the forget rows and the rows they are compared with; None if there are none.

    The comparison rows are the recipe's holdout rows, or else the benchmark's. A benchmark's validation part is used if
    it has enough rows. Otherwise its test part is: no candidate is scored on it here, and nothing is chosen by it.
    """
    forget, holdout = run.data.get("evaluate.forget", run.data["forget"]), run.data.get("evaluate.holdout")
    if holdout is None or holdout.format != forget.format:
        probes = [probe for benchmark in (run.validation, run.test) if benchmark and (probe := against_own(benchmark))]
        return next((probe for probe in probes if suffices(probe)), probes[-1] if probes else None)
    return against_rows(load_rows(forget), load_rows(holdout), run.prompter, run.recipe.vector.max_length)


def check_probe(run: Run) -> None:
    """Raise UsageError if there is nothing to compare the forget rows with."""
    if probe_rows(run) is None:
        raise UsageError(
            "there is nothing to compare the forget rows with: give evaluate.holdout, rows of the same kind that no "
            "candidate has seen"
        )


def _models(run: Run) -> dict[str, Source]:
    """Return the models by the names of their folders: candidates in the order of the history, then the controls.

    Raise MismatchError for a checkpoint that does not fit the target.
    """
    history, prior = run.recipe.history, run.recipe.prior_checkpoint
    names = [item.checkpoint for item in history.checkpoints] if history else [prior]
    candidates = {}
    for place, name in enumerate(names, start=1):
        if name == prior:
            candidates["prior"] = run.sources["prior"]
        else:
            candidates[f"checkpoint-{place}"] = fit_prior(run.sources["target"], fetch(name), "checkpoint")
    controls = {name: run.sources[name] for name in ("target", "ideal") if name in run.sources}
    return candidates | controls
