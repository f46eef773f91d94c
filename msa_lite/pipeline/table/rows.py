"""The rows of a table: each is a run, a baseline or a training, with a folder of its own. All faults are told here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from msa_lite.baselines.methods import check_grids
from msa_lite.comparison.entries import METHOD_LABELS
from msa_lite.comparison.published import load_published
from msa_lite.data import DataSource, is_remote_data
from msa_lite.errors import Faults, MsaError, OutputError, UsageError, nearest
from msa_lite.evals.benchmarks.benchmark import find_benchmark
from msa_lite.evals.judge.server import check_consent
from msa_lite.io.console.progress import Progress
from msa_lite.io.files.reading import local_path, read_object, read_text
from msa_lite.io.files.writing import digest, write_json
from msa_lite.io.weights.offline import offline_reason, offline_where_unreachable
from msa_lite.pipeline.baseline.settings import baseline_scope
from msa_lite.pipeline.run.folder import check_run_folder
from msa_lite.pipeline.staged.prepare import named_stages
from msa_lite.pipeline.staged.training import train_stages
from msa_lite.pipeline.stages.facts import find_headers
from msa_lite.pipeline.verbs.run import run, run_baseline
from msa_lite.recipe import Recipe, TableRecipe, TrainingRecipe, load_recipe, load_training, overrides_of
from msa_lite.report import REPORT_FILE

Moved = TypeVar("Moved")
TABLE_FILE = "table.yaml"
TABLE_HEADER = "# A table of msa-lite"
_STATES = "rows"  # the folder with the state of each row, and its lock
_RESTOR = "restor/datasets"  # where the shipped recipes expect RESTOR's data; it is no repository


@dataclass(frozen=True)
class RunRow:
    """A row of a table, or a training that makes its models."""

    label: str
    """The label in the table; of a training "train: FOLDER"."""
    kind: str
    """"train", "msa", or the name of a baseline."""
    recipe: Recipe | TrainingRecipe
    """The recipe of the run, with its own output."""
    folder: Path
    """The folder of the run."""
    place: Path
    """The folder with its state and its lock, in that of the table."""
    needs: tuple[str, ...] = ()
    """The labels of the trainings that make its models."""
    chooses: bool | None = None
    """True if it is scored without the rows that it chooses by; None for a training."""

    @property
    def inputs(self) -> str:
        """Return a hash of the row's recipe."""
        return digest([self.kind, self.recipe.model_dump(mode="json")])

    @property
    def state(self) -> Mapping[str, Any]:
        """Return the state that the last run left: inputs, seconds, error; empty before."""
        with suppress(MsaError):  # absent or damaged: the run itself knows what is finished
            return read_object(self.place / "state.json")
        return {}

    @property
    def is_done(self) -> bool:
        """Check whether the row is made, of the recipe as it is now."""
        state = self.state
        return state.get("inputs") == self.inputs and state.get("error") is None and self._result.exists()

    @property
    def _result(self) -> Path:
        if isinstance(self.recipe, TrainingRecipe):
            return self.folder / [*named_stages(self.recipe)][-1]
        return self.folder / "evaluation" / "unlearned" / REPORT_FILE

    def leave(self, seconds: float, error: str | None = None) -> None:
        """Write down how the row ended."""
        state = {"label": self.label, "inputs": self.inputs, "seconds": round(seconds, 1), "error": error}
        write_json(self.place / "state.json", state)

    def make(self, progress: Progress, force: bool) -> None:
        """Make the row, or what is missing of it."""
        if isinstance(self.recipe, TrainingRecipe):
            train_stages(self.recipe, progress=progress, force=force)
        elif self.kind == "msa":
            run(self.recipe, progress=progress, force=force)
        else:
            run_baseline(self.kind, self.recipe, progress=progress, force=force)


def table_rows(table: TableRecipe) -> list[RunRow]:
    """Return the trainings of a table, then its rows, seed by seed. Raise all faults of their recipes in one error."""
    faults, rows = Faults(), list[RunRow]()
    for number, training in enumerate(table.train):
        with faults.gathered(f"train.{number}: "):
            recipe = load_training(training.recipe, overrides_of(training.set))
            recipe = load_training(moved(recipe.model_dump(mode="json"), _homes(table)))
            name = f"train: {recipe.folder.name}"
            rows.append(RunRow(name, "train", recipe, recipe.folder, _place(table, name)))
    for seed in table.seeds:
        for label, kind, changes in _wanted(table):
            with faults.gathered(f"{label}: "):
                label = f"{label}, seed {seed}" if len(table.seeds) > 1 else label
                rows.append(_row(table, label, kind, changes, seed))
    if table.published:
        with faults.gathered():
            load_published(table.published)
    faults.extend(_clashes(rows))
    faults.check()
    made = {_text(row.folder): row.label for row in rows if row.kind == "train"}
    return [replace(row, needs=tuple(dict.fromkeys(_makers(row, made)))) for row in rows]


def _wanted(table: TableRecipe) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (label, kind, changes of the recipe) of each row."""
    yield from ((label, "msa", changes) for label, changes in table.msa.items())
    for item in table.baselines:
        yield item.label or METHOD_LABELS.get(item.method, item.method), item.method, item.set


def _row(table: TableRecipe, label: str, kind: str, changes: Mapping[str, Any], seed: int) -> RunRow:
    if "=" in label or not _slug(label):
        raise UsageError("a label needs a letter or a digit, and takes no '='")
    home = str(table.folder / _slug(label))
    overrides = [*overrides_of(table.set), f"seed={seed}", f"output={home}", *overrides_of(changes)]
    recipe = load_recipe(table.recipe, overrides)
    values = moved(recipe.model_dump(mode="json"), _homes(table))
    if table.data and recipe.evaluate:
        values["evaluate"]["data"] = table.data
    recipe = load_recipe(values)
    check_grids(recipe.baseline.methods)
    if recipe.evaluate is None:
        raise UsageError("evaluate: a row of a table is scored, so it cannot be null")
    if kind == "msa":
        return RunRow(label, kind, recipe, recipe.folder, _place(table, label), chooses=recipe.has_choice)
    scope = baseline_scope(kind, recipe)[0]
    return RunRow(label, kind, recipe, scope.folder, _place(table, label), chooses=bool(scope.choice))


def _homes(table: TableRecipe) -> dict[str, str]:
    """Return the places of the benchmarks' data that `data` stands for."""
    if not table.data:
        return {}
    homes = [find_benchmark(name).home for name in ("tofu", "muse")]
    return {home: table.data for home in (*homes, _RESTOR) if home}


def moved(value: Moved, places: Mapping[str, str]) -> Moved:
    """Return a recipe's values with other texts for models and data: those of `places`, and paths below them."""
    changed: Any = value
    if isinstance(value, dict):
        changed = {key: moved(item, places) for key, item in value.items()}
    elif isinstance(value, list):
        changed = [moved(item, places) for item in value]
    elif isinstance(value, str):
        known = [place for place in places if value == place or value.startswith(f"{place}/")]
        longest = max(known, key=len, default=None)
        changed = value if longest is None else places[longest] + value[len(longest) :]
    return cast("Moved", changed)


def _place(table: TableRecipe, label: str) -> Path:
    return table.folder / _STATES / _slug(label)


def _slug(label: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", label).strip("-.").lower()


def _text(place: str | Path) -> str:
    return str(local_path(str(place)).resolve())


def _clashes(rows: Sequence[RunRow]) -> Iterator[MsaError]:
    """Yield a fault for two rows of one label or one output."""
    labels, places = dict[str, str](), dict[str, str]()
    for row in rows:
        slug, folder = row.place.name, _text(row.folder)
        if slug in labels:
            yield UsageError(f"{row.label}: two rows have this label (or {labels[slug]!r}, which is like it)")
        elif folder in places:
            yield UsageError(f"{row.label}: its output {row.folder} is that of {places[folder]}, too")
        labels.setdefault(slug, row.label)
        places.setdefault(folder, row.label)


def _models(row: RunRow) -> dict[str, str]:
    """Return the models that a row reads, by role."""
    recipe = row.recipe
    if isinstance(recipe, TrainingRecipe):
        model = recipe.model if isinstance(recipe.model, str) else recipe.model.tokenizer
        return {"model": model} if isinstance(model, str) else {}
    prior = recipe.prior_checkpoint if recipe.has_prior and row.kind != "task_vector" else None
    ideal = recipe.evaluate.ideal if recipe.evaluate else None
    roles = {"target": recipe.target, "prior": prior, "ideal": ideal}
    return {role: name for role, name in roles.items() if name}


def _makers(row: RunRow, made: Mapping[str, str]) -> Iterator[str]:
    for name in _models(row).values():
        yield from (label for folder, label in made.items() if _text(Path(_text(name)).parent) == folder)


def check_table(table: TableRecipe, rows: Sequence[RunRow]) -> None:
    """Raise, in one error, what forbids the work: an output in use, models and data that cannot be had."""
    faults = Faults()
    with faults.gathered():
        _check_folder(table.folder)
    by_choice = {chooses: row.label for row in rows if (chooses := row.chooses) is not None}
    if len(by_choice) == 2:
        faults.append(
            UsageError(
                f"{by_choice[True]} chooses strengths or epochs on some of the rows, {by_choice[False]} does not, so "
                "they would be scored on different rows; give both a list, as forget.alpha=[0.5, 1.0]"
            )
        )
    stages = {
        _text(row.folder / name)
        for row in rows
        if isinstance(row.recipe, TrainingRecipe)
        for name in named_stages(row.recipe)
    }
    absent: dict[tuple[str, str], list[str]] = {}
    with offline_where_unreachable():
        heads = {name for row in rows for name in _models(row).values() if _text(name) not in stages}
        missing = {name for name in sorted(heads) if not _can_be_had(name)}
        source = f"the Hub (offline: {reason})" if (reason := offline_reason()) else "the Hub"
    for row in rows:
        for role, name in _models(row).items():
            if name in missing:
                absent.setdefault((name, role), []).append(row.label)
        for path in _data(row):
            if not local_path(path).exists() and not is_remote_data(DataSource(path)):
                absent.setdefault((path, "data"), []).append(row.label)
        with faults.gathered(f"{row.label}: "):
            check_run_folder(row.recipe.folder, "training" if row.kind == "train" else "run")
            if isinstance(row.recipe, Recipe) and row.recipe.evaluate:
                check_consent(row.recipe.evaluate.judge)
    for (name, role), labels in absent.items():
        users = f"all {len(rows)} rows" if len(rows) == len(labels) > 1 else ", ".join(dict.fromkeys(labels))
        faults.append(UsageError(f"{name}: neither on this machine nor to be had from {source}; the {role} of {users}"))
    faults.check()


def _can_be_had(name: str) -> bool:
    try:
        return find_headers(name) is not None
    except MsaError:
        return False


def _data(row: RunRow) -> Iterator[str]:
    """Yield the folders, files or repositories of a row's data."""
    recipe = row.recipe
    if isinstance(recipe, TrainingRecipe):
        yield from (data.path for stage in recipe.stages for data in stage.sets)
        return
    yield from (data.path for data in recipe.data_sets.values())
    if recipe.evaluate and recipe.evaluate.data:
        yield recipe.evaluate.data


def _check_folder(folder: Path) -> None:
    """Raise OutputError unless a folder is absent, empty, or that of a table."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: a file is in the way; choose another folder, as output=FOLDER")
    file = folder / TABLE_FILE
    is_ours = file.is_file() and read_text(file).startswith(TABLE_HEADER)
    if folder.is_dir() and any(folder.iterdir()) and not is_ours:
        raise OutputError(f"{folder}: holds something that is no table of msa-lite; choose another, as output=FOLDER")


def choose_rows(rows: Sequence[RunRow], only: Sequence[str]) -> list[RunRow]:
    """Return the rows of these labels, with the trainings that they need. Raise UsageError for unknown labels."""
    labels = [row.label for row in rows if row.kind != "train"]
    if unknown := [f"'{label}'{nearest(label, labels)}" for label in only if label not in labels]:
        raise UsageError(f"--only: no row {', '.join(unknown)}; choose from {', '.join(labels)}")
    wanted = {row.label for row in rows if row.label in only} if only else set(labels)
    needed = {label for row in rows if row.label in wanted for label in row.needs}
    before: set[str] = set()
    while needed - before:  # trainings go on from models of others
        before = set(needed)
        needed |= {label for row in rows if row.label in needed for label in row.needs}
    return [row for row in rows if row.label in wanted | needed]
