"""The whole job of MSA: recipe → two vectors → the choice of (α, β) → merge → scores → report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msa_lite.baselines.methods import check_grids
from msa_lite.errors import UsageError
from msa_lite.evals.choice import Candidates, Values, load_choice
from msa_lite.evals.points import Points
from msa_lite.io.manifest import load_manifest
from msa_lite.io.progress import Progress, silent
from msa_lite.job import Job, Plan
from msa_lite.merger import Merged, MergedAdapter
from msa_lite.pipeline.folder import claimed, run_folder
from msa_lite.pipeline.stages import (
    check_learns,
    choose_candidate,
    evaluate_all,
    fit_settings,
    load_candidate,
    merge_identity,
    merge_vectors,
    row_hashes,
    write_summary,
)
from msa_lite.recipe import Recipe, load_recipe
from msa_lite.report import Report
from msa_lite.train import fit_vector

Given = Recipe | str | Path | Mapping[str, Any]
"""A recipe, a file, the name of a shipped recipe, or a mapping."""


@dataclass(frozen=True)
class RunResult:
    """What a run made: its folder, what was chosen, the merge, and a report for each model scored.

    method: "msa", or the baseline's name. chosen: alpha and beta; of a baseline that trains, parameters, epoch, scale.
    """

    folder: Path
    method: str
    chosen: Values
    merged: Merged | MergedAdapter
    reports: dict[str, Report]

    @property
    def alpha(self) -> float:
        """The forget vector's strength, of MSA and the task vector."""
        return float(self.chosen["alpha"])

    @property
    def beta(self) -> float:
        """The retain vector's strength, of MSA and the task vector."""
        return float(self.chosen["beta"])

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, for `--json`."""
        return {
            "output": str(self.folder),
            "method": self.method,
            **({"alpha": self.alpha, "beta": self.beta} if "alpha" in self.chosen else {}),
            "chosen": dict(self.chosen),
            "model": self.merged.as_dict(),
            "metrics": {name: report.values() for name, report in self.reports.items()},
        }


def run(recipe: Given, overrides: Iterable[str] = (), progress: Progress = silent) -> RunResult:
    """Do the whole job of a recipe and return what it made.

    recipe: a Recipe, a file, the name of a shipped recipe, or a mapping. Raises before anything is written when the
    recipe or its inputs are at fault; later errors leave finished stages in place and a rerun resumes.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    check_grids(recipe.baseline.methods)
    return run_plan(recipe, msa_plan(recipe), progress)


def msa_plan(recipe: Recipe) -> Plan:
    """The plan of the recipe's own run."""
    vectors = ("forget", "retain") if recipe.retain else ("forget",)
    return Plan("msa", run_folder(recipe), "prior", choice=len(recipe.points) > 1, vectors=vectors)


def run_plan(recipe: Recipe, plan: Plan, progress: Progress) -> RunResult:
    """The whole job, from the model that the plan says."""
    with claimed(recipe, plan, progress, _check) as job:
        fit_vectors(job, job.vector_names, progress)
        alpha, beta, doubts = _choose(job, progress)
        used = {"forget": (job.vector_folder("forget"), alpha), "retain": (job.vector_folder("retain"), beta)}
        merged = merge_vectors(job, used, progress)
        parameters = {"alpha": alpha, "beta": beta}
        method = {"name": plan.method, "mode": recipe.vector.mode, "start": plan.start, "parameters": parameters}
        reports = evaluate_all(job, merged, method | {"compat": []}, progress)
        title = (
            f"{'Unlearned model of' if plan.method == 'msa' else f'Baseline {plan.method} on'} {recipe.target}",
            f"θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0), α = {alpha:g}, β = {beta:g}, "
            f"prior {job.sources['prior'].name}.",
        )
        write_summary(job, title, doubts, merged, reports)
    return RunResult(job.folder, plan.method, {"alpha": alpha, "beta": beta}, merged, reports)


def run_vectors(
    recipe: Given,
    which: Literal["forget", "retain", "all"] = "all",
    overrides: Iterable[str] = (),
    progress: Progress = silent,
) -> list[Path]:
    """Only the vectors of a recipe; their folders. Raises UsageError for a retain vector that the recipe has not."""
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    with claimed(recipe, msa_plan(recipe), progress, _check) as job:
        names = job.vector_names if which == "all" else [which]
        if "retain" in names and "retain" not in job.rows:
            raise UsageError("the recipe has no retain set, so there is no retain vector to fit")
        fit_vectors(job, names, progress)
        return [job.vector_folder(name) for name in names]


def merge_arguments(recipe: Recipe) -> dict[str, Any]:
    """What `merge` and `mergekit_recipe` take, for the merge of a recipe's run.

    Raises UsageError while its vectors are not fitted, or alpha and beta not chosen.
    """
    folder = run_folder(recipe)
    alpha, beta = recipe.points[0]
    if len(recipe.points) > 1:
        if not (folder / "sweep").is_dir():
            raise UsageError(f"{folder}: alpha and beta are not chosen yet; run the recipe, or give one value of each")
        alpha, beta = _strengths(load_choice(folder / "sweep").values)
    vectors = {name: folder / "vectors" / name for name, s in (("forget", alpha), ("retain", beta)) if s}
    missing = [str(path) for path in vectors.values() if load_manifest(path) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)}: not fitted yet; `msa-lite vector` on the recipe does it")
    names = {"target": recipe.target, "prior": recipe.prior_checkpoint}
    names |= {name: str(path) for name, path in vectors.items()}
    return {**names, "alpha": alpha, "beta": beta, "dtype": recipe.merge.dtype}


def fit_vectors(job: Job, names: Iterable[str], progress: Progress = silent) -> None:
    """Fit the named vectors ("forget", "retain") into the run's folder; those that are there already are kept."""
    for name in names:
        fit_vector(
            job.sources["prior"],
            job.examples[name],
            job.vector_folder(name),
            tokenizer=job.prompter.tokenizer,
            settings=fit_settings(job.recipe),
            label=f"{name} vector",
            extra_files=row_hashes(job.rows[name]),
            progress=progress,
        )


def _check(job: Job) -> None:
    check_learns(job, job.vector_names, fit_settings(job.recipe))


def _choose(job: Job, progress: Progress) -> tuple[float, float, Sequence[str]]:
    """(α, β, reasons to doubt the choice)."""
    if job.validation is None:
        return *job.recipe.points[0], []
    vectors = {name: job.vector_folder(name) for name in job.vector_names}

    def load_merged(values: Values | None) -> Any:
        strengths = dict(zip(("forget", "retain"), _strengths(values), strict=True))
        return load_candidate(job, {name: (path, strengths[name]) for name, path in vectors.items()})

    full = job.recipe.vector.mode == "full"
    candidates = Candidates(
        [{"alpha": alpha, "beta": beta} for alpha, beta in job.recipe.points],
        load=load_merged if full else Points(job.sources["target"].folder, vectors),
        made_of={
            "target": job.sources["target"].identity(),
            "vectors": {name: (load_manifest(path) or {}).get("files") for name, path in vectors.items()},
            **(merge_identity(job) if full else {}),
        },
    )
    choice = choose_candidate(job, candidates, "alpha and beta", progress)
    return *_strengths(choice.values), choice.doubts


def _strengths(values: Values | None) -> tuple[float, float]:
    """(α, β) of a point; None is the target."""
    return (float(values["alpha"]), float(values["beta"])) if values else (0.0, 0.0)
