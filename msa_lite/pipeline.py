"""The whole job: recipe → two vectors → the choice of (α, β) → merge → scores → report. Order of stages and resume.

This is the only module that knows both what a recipe is and what the stages are. Every stage skips itself when its
folder was made from the same inputs, so running a recipe again does only what is missing or has changed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from msa_lite.data import (
    DataSource,
    Example,
    Prompter,
    Row,
    Template,
    encode,
    load_rows,
    pin_source,
    sample_rows,
    split_rows,
)
from msa_lite.demo import HistorySettings, make_groups, make_history
from msa_lite.errors import MismatchError, OutputError, UsageError, join_faults
from msa_lite.evals.points import choose_point
from msa_lite.evals.qa import QaSettings, evaluate_qa
from msa_lite.io.checkpoint import Checkpoint, load_checkpoint
from msa_lite.io.hub import Source, fetch
from msa_lite.io.manifest import check_space, write_text
from msa_lite.io.progress import Progress, silent
from msa_lite.merger import Merged, check_mergeable, merge
from msa_lite.recipe import Data, Evaluate, Recipe, dump_recipe, load_recipe
from msa_lite.report import Report, load_report, markdown_table
from msa_lite.train import FitSettings, check_mode, fit_vector
from msa_lite.vectors import compare_checkpoints

logger = logging.getLogger(__name__)

RUN_HEADER = "# A run of msa-lite: the recipe as resolved. `msa-lite` on this file repeats the run.\n"


@dataclass(frozen=True)
class RunResult:
    """What a run made: its folder, the strengths used, the merge, and a report for each model scored."""

    folder: Path
    alpha: float
    beta: float
    merged: Merged
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


@dataclass(frozen=True)
class Job:
    """A recipe with everything found, loaded and checked, before the first write."""

    recipe: Recipe
    folder: Path
    target: Source
    prior: Source
    ideal: Source | None
    prompter: Prompter
    data: Mapping[str, DataSource]
    rows: Mapping[str, list[Row]]
    examples: Mapping[str, list[Example]]
    questions: Mapping[str, list[Row]]

    @property
    def needs_retain(self) -> bool:
        """True when some β is above 0, so that a retain vector is fitted."""
        return any(beta > 0 for _, beta in self.recipe.points)

    @property
    def vector_names(self) -> list[str]:
        """The vectors that the recipe's points use."""
        forget = ["forget"] if any(alpha > 0 for alpha, _ in self.recipe.points) else []
        return forget + (["retain"] if self.needs_retain else [])

    def vector_folder(self, name: str) -> Path:
        """Where the forget or retain vector goes."""
        return self.folder / "vectors" / name


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
        alpha, beta = _choose(job, progress)
        merged = merge(
            job.target,
            job.folder / "model",
            forget=fetch(str(job.vector_folder("forget"))) if alpha else None,
            alpha=alpha,
            retain=fetch(str(job.vector_folder("retain"))) if beta else None,
            beta=beta,
            prior=job.prior if recipe.vector.mode == "full" else None,
            dtype=recipe.merge.dtype,
            replace=True,
            progress=progress,
        )
        reports = _evaluate_all(job, merged, progress)
        _write_summary(job, alpha, beta, merged, reports)
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
    """The resolved recipe with commits for Hub repositories, and content hashes of local inputs as comments."""
    recipe = job.recipe
    values: dict[str, Any] = {"target": job.target.pinned(), "prior": job.prior.pinned()}
    sources = {"target": job.target, "prior": job.prior}
    if recipe.evaluate and job.ideal:
        values["evaluate"] = recipe.evaluate.model_copy(update={"ideal": job.ideal.pinned()})
        sources["ideal"] = job.ideal
    for name in ("forget", "retain"):
        part = getattr(recipe, name)
        if part and job.data[name].revision != part.data.revision:
            data = part.data.model_copy(update={"revision": job.data[name].revision})
            values[name] = part.model_copy(update={"data": data})
    notes = "".join(f"# {name}: {source.revision}\n" for name, source in sources.items())
    return RUN_HEADER + notes + dump_recipe(recipe.model_copy(update=values))


def prepare(recipe: Recipe, folder: Path) -> Job:
    """Find and check every input of a recipe: models by their headers, data by its columns, the disk by its space.

    Raises MismatchError with the tensors on which target and prior differ, and whatever the parts raise.
    """
    from transformers import AutoTokenizer

    target, prior = fetch(recipe.target), fetch(recipe.prior)
    ideal = fetch(recipe.evaluate.ideal) if recipe.evaluate and recipe.evaluate.ideal else None
    check_mode(recipe.vector.mode)
    checkpoint = load_checkpoint(target.folder)
    check_mergeable(checkpoint)
    faults = compare_checkpoints(checkpoint, load_checkpoint(prior.folder), ("target", "prior"))
    if faults:
        raise MismatchError(join_faults(f"target {recipe.target} and prior {recipe.prior} do not fit:", faults))
    sizes = [load_checkpoint(m.folder).config.get("vocab_size") for m in (target, ideal) if m]
    if ideal and sizes[0] != sizes[1]:
        raise MismatchError(
            f"evaluate.ideal: a vocabulary of {sizes[1]}, the target has {sizes[0]}; another tokenizer?"
        )
    data = {"forget": _data_source(recipe.forget.data)}
    if recipe.retain:
        data["retain"] = _data_source(recipe.retain.data)
    data = {name: pin_source(source) for name, source in data.items()}
    rows = {name: load_rows(source) for name, source in data.items()}
    if recipe.retain and recipe.retain.data.sample == "match_forget":
        rows["retain"] = sample_rows(rows["retain"], len(rows["forget"]), recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(target.folder)
    template = Template(recipe.prompt.prompt, recipe.prompt.answer)
    _check_vocabulary(tokenizer, checkpoint, recipe.target)
    prompter = Prompter.build(tokenizer, recipe.prompt.kind, template)
    length = recipe.vector.max_length
    check_space(folder, _bytes_needed(checkpoint, recipe))
    return Job(
        recipe=recipe,
        folder=folder,
        target=target,
        prior=prior,
        ideal=ideal,
        prompter=prompter,
        data=data,
        rows=rows,
        examples={name: encode(rows[name], data[name], prompter, length) for name in rows},
        questions=_questions(recipe, data) if recipe.evaluate else {},
    )


def _data_source(data: Data) -> DataSource:
    return DataSource(**data.model_dump(exclude={"columns", "sample"}), **data.columns.model_dump())


def _check_vocabulary(tokenizer: Any, target: Checkpoint, name: str) -> None:
    size = target.config.get("vocab_size")
    if size is not None and len(tokenizer) > size:
        raise MismatchError(f"{name}: the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {size}")


def _bytes_needed(target: Checkpoint, recipe: Recipe) -> int:
    """Disk space of a run: the merged model; in full mode also two fp32 vectors and two saves with AdamW's state."""
    count = sum(entry.nbytes // {"F64": 8, "F32": 4}.get(entry.dtype, 2) for entry in target.tensors.values())
    size = {"same": target.nbytes, "float32": 4 * count}.get(recipe.merge.dtype, 2 * count)
    if recipe.vector.mode == "full":
        size += 2 * 4 * count + 2 * 12 * count
    return size


def _questions(recipe: Recipe, data: Mapping[str, DataSource]) -> dict[str, list[Row]]:
    """Rows to score by set: those that `evaluate` names, else the training sets where these are questions."""
    evaluate = recipe.evaluate or Evaluate()
    sources: dict[str, DataSource] = {name: source for name, source in data.items() if source.format == "qa"}
    for name in ("forget", "retain", "holdout"):
        given = getattr(evaluate, name)
        if given is not None:
            if given.format != "qa":
                raise UsageError(
                    f"evaluate.{name}.format is '{given.format}'; benchmark qa scores questions (format qa)"
                )
            sources[name] = _data_source(given)
    if not sources:
        logger.warning("nothing can be scored: no set holds questions. Give evaluate.forget, or set evaluate: null")
    questions = {}
    for name in ("forget", "retain", "holdout"):
        if name in sources:
            rows = load_rows(sources[name])
            questions[name] = sample_rows(rows, evaluate.limit or len(rows), recipe.seed)
    return questions


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
            job.prior,
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


def _split(job: Job) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
    """(validation, test) rows by set; a single point needs no validation. Holdout rows are in both, whole."""
    if len(job.recipe.points) == 1:
        return {}, dict(job.questions)
    share, seed = job.recipe.select.validation, job.recipe.seed
    parts = {name: split_rows(rows, share, seed) for name, rows in job.questions.items() if name != "holdout"}
    short = [f"{name}: {len(v)} for validation, {len(t)} for the test" for name, (v, t) in parts.items() if not t]
    if "forget" not in parts or short:
        why = join_faults("too few rows to split:", short) if short else "there are no questions about the forget set"
        raise UsageError(f"several values of alpha or beta need rows to choose by, but {why}")
    whole = {name: rows for name, rows in job.questions.items() if name == "holdout"}
    return {name: part[0] for name, part in parts.items()} | whole, {
        name: part[1] for name, part in parts.items()
    } | whole


def _choose(job: Job, progress: Progress) -> tuple[float, float]:
    points = job.recipe.points
    if len(points) == 1:
        return points[0]
    assert job.recipe.evaluate is not None  # the schema sees to it
    choice = choose_point(
        job.target,
        {name: job.vector_folder(name) for name in job.vector_names},
        points,
        job.prompter,
        _split(job)[0],
        job.folder / "sweep",
        QaSettings(job.recipe.evaluate.max_new_tokens, "validation"),
        job.recipe.select.keep,
        progress,
    )
    return choice.alpha, choice.beta


def _evaluate_all(job: Job, merged: Merged, progress: Progress) -> dict[str, Report]:
    if job.recipe.evaluate is None or not job.questions:
        return {}
    models = {"target": job.target, "ideal": job.ideal, "unlearned": fetch(str(merged.folder))}
    split = "all" if len(job.recipe.points) == 1 else "test"
    settings = QaSettings(job.recipe.evaluate.max_new_tokens, split)
    test = _split(job)[1]
    return {
        name: evaluate_qa(
            source,
            job.prompter,
            test,
            job.folder / "evaluation" / name,
            settings,
            label=f"scores: {name}",
            progress=progress,
        )
        for name, source in models.items()
        if source is not None
    }


def _write_summary(job: Job, alpha: float, beta: float, merged: Merged, reports: Mapping[str, Report]) -> None:
    lines = [
        f"# Unlearned model of {job.target.name}\n",
        f"θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0) with α = {alpha:g}, β = {beta:g}, prior {job.prior.name}.\n",
        f"{merged.weights_changed} of {merged.weights_touched} weights in {merged.tensors_touched} tensors changed; "
        f"rounding to the stored dtype lost {merged.rounding_loss:.2%} of the update.\n",
    ]
    if reports:
        split = next(iter(reports.values())).split
        lines += [
            f"Scores on {split} rows, mean ± standard error; ↑ higher, ↓ lower is better.\n",
            markdown_table(reports),
        ]
        if "ideal" not in reports:
            lines.append("No ideal model was given, so there is nothing to say how low the forget scores should go.\n")
    if (job.folder / "sweep").is_dir() and len(job.recipe.points) > 1:
        lines += ["How α and β were chosen, on validation rows:\n", (job.folder / "sweep" / "table.md").read_text()]
    lines.append(
        "Unlearning by weight arithmetic is approximate. These scores are evidence, not a proof that the data has no "
        "influence left; prompts, further tuning or quantisation may bring some of it back.\n"
    )
    write_text(job.folder / "report.md", "\n".join(lines))


def evaluate(
    model: str,
    out: str | Path,
    *,
    forget: DataSource | None = None,
    retain: DataSource | None = None,
    holdout: DataSource | None = None,
    ideal: str | None = None,
    limit: int | None = None,
    max_new_tokens: int = 200,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Report]:
    """Score a model on questions without a recipe; reports by name ("model" and, where given, "ideal").

    ideal: a model, which is then scored too, or the report.json (or its folder) of an earlier evaluation. limit: at
    most so many rows of each set, a seeded sample. Records and report.json go into `out`/model and `out`/ideal.
    Raises UsageError when no set is given.
    """
    from transformers import AutoTokenizer

    given = {"forget": forget, "retain": retain, "holdout": holdout}
    sets = {name: load_rows(source) for name, source in given.items() if source is not None}
    if not sets:
        raise UsageError("nothing to score: give at least one of forget, retain and holdout")
    sets = {name: sample_rows(rows, limit or len(rows), seed) for name, rows in sets.items()}
    sources = {"model": fetch(model)}
    reports: dict[str, Report] = {}
    if ideal is not None and (Path(ideal).is_file() or (Path(ideal) / "report.json").is_file()):
        reports["ideal"] = load_report(Path(ideal))
    elif ideal is not None:
        sources["ideal"] = fetch(ideal)
    for source in sources.values():
        load_checkpoint(source.folder)
    prompter = Prompter.build(AutoTokenizer.from_pretrained(sources["model"].folder), "auto", Template())
    settings = replace(QaSettings(), max_new_tokens=max_new_tokens)
    for name, source in sources.items():
        reports[name] = evaluate_qa(
            source, prompter, sets, Path(out) / name, settings, label=f"scores: {name}", progress=progress
        )
    return dict(sorted(reports.items(), reverse=True))
