"""The whole job: recipe → two vectors → the choice of (α, β) → merge → scores → report. Order of stages and resume.

This is the only module that knows both what a recipe is and what the stages are. Every stage skips itself when its
folder was made from the same inputs, so running a recipe again does only what is missing or has changed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msa_lite.data import rows_identity
from msa_lite.demo import HistorySettings, make_groups, make_history
from msa_lite.errors import OutputError, UsageError
from msa_lite.evals.evaluation import Ideal, evaluate_benchmark
from msa_lite.evals.points import choose_point, load_choice
from msa_lite.io.hub import fetch
from msa_lite.io.manifest import load_manifest, write_text
from msa_lite.io.progress import Progress, silent
from msa_lite.job import Job, prepare
from msa_lite.merger import Merged, MergedAdapter, merge, merge_adapters
from msa_lite.recipe import Recipe, dump_recipe, load_recipe
from msa_lite.report import Report, markdown_table
from msa_lite.train import FitSettings, fit_vector

logger = logging.getLogger(__name__)

RUN_HEADER = "# A run of msa-lite: the recipe as resolved. `msa-lite` on this file repeats the run.\n"


@dataclass(frozen=True)
class RunResult:
    """What a run made: its folder, the strengths used, the merge, and a report for each model scored."""

    folder: Path
    alpha: float
    beta: float
    merged: Merged | MergedAdapter
    reports: dict[str, Report]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, for `--json`."""
        return {
            "output": str(self.folder),
            "alpha": self.alpha,
            "beta": self.beta,
            "model": self.merged.as_dict(),
            "metrics": {name: report.values() for name, report in self.reports.items()},
        }


def run(
    recipe: Recipe | str | Path | Mapping[str, Any], overrides: Iterable[str] = (), progress: Progress = silent
) -> RunResult:
    """Do the whole job of a recipe and return what it made.

    recipe: a Recipe, a file, the name of a shipped recipe, or a mapping. Raises before anything is written when the
    recipe or its inputs are at fault; later errors leave finished stages in place and a rerun resumes.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    with _claimed(recipe, progress) as job:
        fit_vectors(job, job.vector_names, progress)
        alpha, beta, doubts = _choose(job, progress)
        merged = _merge(job, alpha, beta, progress)
        reports = _evaluate_all(job, merged, progress)
        _write_summary(job, alpha, beta, doubts, merged, reports)
    return RunResult(job.folder, alpha, beta, merged, reports)


def run_vectors(
    recipe: Recipe | str | Path | Mapping[str, Any],
    which: Literal["forget", "retain", "all"] = "all",
    overrides: Iterable[str] = (),
    progress: Progress = silent,
) -> list[Path]:
    """Only the vectors of a recipe; their folders. Raises UsageError for a retain vector that the recipe has not."""
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    with _claimed(recipe, progress) as job:
        names = job.vector_names if which == "all" else [which]
        if "retain" in names and "retain" not in job.rows:
            raise UsageError("the recipe has no retain set, so there is no retain vector to fit")
        fit_vectors(job, names, progress)
        return [job.vector_folder(name) for name in names]


def _merge(job: Job, alpha: float, beta: float, progress: Progress) -> Merged | MergedAdapter:
    """The unlearned model, or one adapter on the target where the recipe asks for that."""
    settings = job.recipe.merge
    common: dict[str, Any] = {
        "forget": fetch(str(job.vector_folder("forget"))) if alpha else None,
        "alpha": alpha,
        "retain": fetch(str(job.vector_folder("retain"))) if beta else None,
        "beta": beta,
        "prior": job.sources["prior"],
        "replace": True,
        "progress": progress,
    }
    if settings.form == "adapter":
        return merge_adapters(job.sources["target"], job.folder / "adapter", **common)
    folder, rounding = job.folder / "model", settings.rounding
    return merge(job.sources["target"], folder, **common, dtype=settings.dtype, rounding=rounding, seed=job.recipe.seed)


def merge_arguments(recipe: Recipe) -> dict[str, Any]:
    """What `merge` and `mergekit_recipe` take, for the merge of a recipe's run.

    Raises UsageError while its vectors are not fitted, or alpha and beta not chosen.
    """
    folder = Path(recipe.output).expanduser()
    alpha, beta = recipe.points[0]
    if len(recipe.points) > 1:
        if not (folder / "sweep").is_dir():
            raise UsageError(f"{folder}: alpha and beta are not chosen yet; run the recipe, or give one value of each")
        choice = load_choice(folder / "sweep")
        alpha, beta = choice.alpha, choice.beta
    vectors = {name: folder / "vectors" / name for name, s in (("forget", alpha), ("retain", beta)) if s}
    missing = [str(path) for path in vectors.values() if load_manifest(path) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)}: not fitted yet; `msa-lite vector` on the recipe does it")
    names = {name: str(path) for name, path in vectors.items()}
    strengths = {"alpha": alpha, "beta": beta}
    return {"target": recipe.target, "prior": recipe.prior, **names, **strengths, "dtype": recipe.merge.dtype}


@contextmanager
def _claimed(recipe: Recipe, progress: Progress) -> Iterator[Job]:
    """Check everything, then claim the run's folder for this process and write down the resolved recipe."""
    from filelock import FileLock, Timeout

    folder = Path(recipe.output).expanduser()
    _check_run_folder(folder)
    if recipe.demo is None:  # with a demo, the inputs that are checked have to be made first
        job = prepare(recipe, folder)
    lock = FileLock(folder / ".lock")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise OutputError(f"{folder}: another msa-lite is working on this run") from error
    try:
        if recipe.demo is not None:
            write_text(folder / "recipe.yaml", RUN_HEADER + dump_recipe(recipe))
            sizes = recipe.demo.model_dump()
            people = {name: sizes.pop(name) for name in ("prior", "retain", "forget", "holdout")}
            settings = HistorySettings(**sizes, seed=recipe.seed)
            make_history(folder / "history", make_groups(people, recipe.seed), settings, progress)
            job = prepare(recipe, folder)
        write_text(folder / "recipe.yaml", _pinned(job))
        yield job
    finally:
        lock.release()


def _check_run_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: a file is in the way; choose another output")
    mark = folder / "recipe.yaml"
    ours = mark.is_file() and mark.read_text().startswith(RUN_HEADER.partition(":")[0])
    if folder.is_dir() and any(p.name != ".lock" for p in folder.iterdir()) and not ours:
        raise OutputError(f"{folder}: holds something that is no run of msa-lite; choose another output")


def _pinned(job: Job) -> str:
    """The resolved recipe with commits for Hub repositories; commits and content hashes of all inputs as comments."""
    values = job.recipe.model_dump(mode="json")
    values["target"], values["prior"] = job.sources["target"].pinned(), job.sources["prior"].pinned()
    if "ideal" in job.sources:
        values["evaluate"]["ideal"] = job.sources["ideal"].pinned()
    for name, data in job.data.items():
        place = values["evaluate"][name.partition(".")[2]] if "." in name else values[name]["data"]
        place["revision"] = data.revision
    notes = [f"# {name}: {source.revision}" for name, source in job.sources.items()]
    notes += [f"# rows learnt, {name}: sha256:{rows_identity(rows)['sha256']}" for name, rows in job.rows.items()]
    return RUN_HEADER + "\n".join(notes) + "\n" + dump_recipe(Recipe.model_validate(values))


def fit_vectors(job: Job, names: Iterable[str], progress: Progress = silent) -> None:
    """Fit the named vectors ("forget", "retain") into the run's folder; those that are there already are kept."""
    spec = job.recipe.vector
    targets = spec.lora.targets
    settings = FitSettings(
        **spec.model_dump(exclude={"lora", "max_length"}),
        lora_rank=spec.lora.rank,
        lora_alpha=spec.lora.alpha,
        lora_dropout=spec.lora.dropout,
        lora_targets=targets if isinstance(targets, str) else tuple(targets),
        seed=job.recipe.seed,
    )
    for name in names:
        rows = job.rows[name]
        fit_vector(
            job.sources["prior"],
            job.examples[name],
            job.vector_folder(name),
            tokenizer=job.prompter.tokenizer,
            settings=settings,
            label=f"{name} vector",
            # Which rows were learnt, by hash: what is to be forgotten is not written down again.
            extra_files={
                "rows.jsonl": "".join(json.dumps({"index": r.index, "sha256": r.sha256}) + "\n" for r in rows)
            },
            progress=progress,
        )


def _choose(job: Job, progress: Progress) -> tuple[float, float, list[str]]:
    """(α, β, reasons to doubt the choice)."""
    if job.validation is None:
        return *job.recipe.points[0], []
    choice = choose_point(
        job.sources["target"],
        {name: job.vector_folder(name) for name in job.vector_names},
        job.recipe.points,
        job.validation,
        job.folder / "sweep",
        job.recipe.select.keep,
        progress,
    )
    for doubt in choice.doubts:
        logger.warning("the choice of alpha and beta: %s", doubt)
    return choice.alpha, choice.beta, choice.doubts


def _evaluate_all(job: Job, merged: Merged | MergedAdapter, progress: Progress) -> dict[str, Report]:
    """Reports of target, ideal and unlearned model, in this order; the ideal is scored first, as the yardstick."""
    if job.test is None:
        return {}
    models = {name: job.sources[name] for name in ("ideal", "target") if name in job.sources}
    models["unlearned"] = fetch(str(merged.folder))
    folder = job.folder / "evaluation"
    reports = {}
    for name, source in models.items():
        ideal: Ideal = "itself" if name == "ideal" else folder / "ideal" if "ideal" in job.sources else None
        label = f"scores: {name}"
        report = evaluate_benchmark(
            source, job.test, folder / name, ideal=ideal, judge=job.judge, label=label, progress=progress
        )
        assert report is not None, "a recipe runs in one process"
        reports[name] = report
    return {name: reports[name] for name in ("target", "ideal", "unlearned") if name in reports}


def _write_summary(
    job: Job,
    alpha: float,
    beta: float,
    doubts: list[str],
    merged: Merged | MergedAdapter,
    reports: Mapping[str, Report],
) -> None:
    lines = [
        f"# Unlearned model of {job.sources['target'].name}\n",
        f"θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0), α = {alpha:g}, β = {beta:g}, prior {job.sources['prior'].name}.\n",
        "".join(f"- {line}\n" for line in merged.describe().splitlines()),
        *(f"Warning: {note}.\n" for note in merged.notes),
    ]
    if reports:
        split = next(iter(reports.values())).split
        lines += [
            f"Scores on {split} rows, mean ± standard error; ↑ higher, ↓ lower is better.\n",
            markdown_table(reports),
        ]
        if "ideal" not in reports:
            lines.append("No ideal model was given, so there is nothing to say how low the forget scores should go.\n")
    if job.validation is not None:
        lines += ["How α and β were chosen, on validation rows:\n", (job.folder / "sweep" / "table.md").read_text()]
        lines += [f"Doubt: {doubt}.\n" for doubt in doubts]
    lines.append(
        "Unlearning by weight arithmetic is approximate. These scores are evidence, not a proof that the data has no "
        "influence left; prompts, further tuning or quantisation may bring some of it back.\n"
    )
    write_text(job.folder / "report.md", "\n".join(lines))
