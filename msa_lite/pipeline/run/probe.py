"""The probe: check which candidates for the prior have already seen the forget set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.errors import UsageError
from msa_lite.evals.benchmarks.benchmark import Benchmark
from msa_lite.evals.scores.probe import PROBE_ROWS, probe_inputs, probe_model, sample_probe
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.launch.crew import Crew, stand_alone
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.pipeline.prepare.models import fit_prior
from msa_lite.pipeline.prepare.run import Context, Run, Scope, msa_scope
from msa_lite.pipeline.run.folder import claimed, stage_list
from msa_lite.pipeline.run.knowledge import PROBE_FOLDER, PROBE_SAYS, probe_rows
from msa_lite.pipeline.stages.asking import evidence_costs
from msa_lite.pipeline.stages.stage import Stage, execute
from msa_lite.recipe import Recipe, RecipeSource, load_recipe
from msa_lite.report.run.probing import Finding, read_verdicts
from msa_lite.report.run.stages import ROWS, write_stages
from msa_lite.report.tables.metrics import metric_kind

_COST = partial(evidence_costs, "the probe", 1, 2.0)  # forget rows, and about as many others


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
        stages = _stages(run, sources)
        write_stages(stage_list(Context.of(run), stages), run.folder)
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
    folder = context.scope.folder / PROBE_FOLDER
    if context.prepared is None:
        return [Stage("probe: prior", "check", folder / "prior", cost=_COST, says=PROBE_SAYS, holds=ROWS)]
    return _stages(context.run, _models(context.run))


def _stages(run: Run, sources: Mapping[str, Source]) -> list[Stage]:
    rows, folder = _sampled(run), run.folder / PROBE_FOLDER
    return [
        Stage(
            f"probe: {name}",
            "check",
            folder / name,
            partial(probe_model, source, rows, folder / name, run.recipe.folder, f"probe: {name}"),
            inputs=partial(probe_inputs, source, rows),
            cost=_COST,
            says=PROBE_SAYS,
            holds=ROWS,
        )
        for name, source in sources.items()
    ]


def _sampled(run: Run) -> Benchmark:
    rows = probe_rows(run)
    assert rows is not None, "checked"
    return sample_probe(rows, PROBE_ROWS, run.recipe.seed)


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
