"""Claim the folder of a run, or of a training, for one process, and keep the resolved recipe in it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from msa_lite.data import hash_ids, rows_identity
from msa_lite.errors import FormatError, MsaError, OutputError
from msa_lite.io.crew import Crew
from msa_lite.io.extras import require
from msa_lite.io.files import digest, write_json, write_text
from msa_lite.io.gathering import agree
from msa_lite.io.lock import locked
from msa_lite.io.manifest import software_versions
from msa_lite.io.progress import Progress, notices
from msa_lite.io.reading import read_text
from msa_lite.pipeline.changes import warn_of_changes
from msa_lite.pipeline.demo import make_demo
from msa_lite.pipeline.planning_check import check_demo_memory
from msa_lite.pipeline.prepare import Run, RunPlan, prepare
from msa_lite.pipeline.prepare_models import WRITTEN_OUT
from msa_lite.pipeline.prepare_prompt import PROMPT_FILE
from msa_lite.recipe import Recipe, TrainingRecipe, absolute_paths, dump_recipe, given_paths
from msa_lite.record.keyed import KEY_FILE, make_key
from msa_lite.report.provenance import GIVEN, RECIPE_FILE, given_paths_of
from msa_lite.report.purged import PURGED_FILE

BASELINES = "baselines"  # runs of baselines lie in here, each in a folder of its own
HISTORY = "history"  # of the demo
TRACKING = "tracking"  # files of trackers

logger = logging.getLogger(__name__)
Prepared = TypeVar("Prepared")
Kind = Literal["run", "training"]


@contextmanager
def claimed(
    recipe: Recipe, plan: RunPlan, progress: Progress, check: Callable[[Run], None] = lambda run: None, *, crew: Crew
) -> Iterator[Run]:
    """Prepare a run, call `check` on it, and claim its folder. The other processes of the crew prepare it then, too."""
    if plan.start == "prior" and recipe.prior_reason:
        notices.info("%s", recipe.prior_reason)
    check_run_folder(recipe.folder, "run")

    def prepare_checked() -> Run:
        if recipe.demo is not None:
            check_demo_memory(recipe, plan.force)
            make_demo(recipe.demo, recipe.folder / HISTORY, recipe.seed, progress)
        run = replace(prepare(recipe, plan, progress), crew=crew)
        for note in run.notes:
            logger.warning("%s", note)
        check(run)
        return run

    first = None if recipe.demo is None else recipe_text("run", _command(plan), recipe)
    with claim(plan.folder, "run", prepare_checked, _pinned, first) as run:
        if run.prompt_search:
            write_json(run.folder / PROMPT_FILE, run.prompt_search)
        if run.renders:
            notices.info("prompt: %s", run.prompter.sentence)
        agree(crew, lambda: run_inputs(run))
        yield run


def run_inputs(run: Run) -> dict[str, Any]:
    """Return hashes of all that a run starts from, by name. They are the same in all processes of a launcher."""
    inputs = {
        "models": {name: source.identity() for name, source in run.sources.items()},
        "rows": {name: hash_ids(examples) for name, examples in run.examples.items()},
        "questions": [part and part.describe() for part in (run.validation, run.test)],
        "package versions": software_versions(),
    }
    return {name: digest(value) for name, value in inputs.items()}


@contextmanager
def claim(
    folder: Path,
    kind: Kind,
    prepare: Callable[[], Prepared],
    pinned: Callable[[Prepared], str],
    first: str | None = None,
) -> Iterator[Prepared]:
    """Prepare the inputs of a run or training, claim its folder for this process, and write recipe.yaml.

    pinned: returns recipe.yaml for the inputs. first: a recipe.yaml for the time before that, if the preparation itself
    writes into the folder. The claim then comes first. If the preparation fails, a new folder is removed; a demo's
    history stays, since it took minutes. Raise OutputError for a folder that holds something else, or in which another
    process works.
    """
    require("train")
    check_run_folder(folder, kind)
    is_new = not folder.exists()
    if first is None:
        inputs = prepare()
    with locked(folder):
        if first is not None:
            if not (folder / RECIPE_FILE).exists():
                write_text(folder / RECIPE_FILE, first)
            try:
                inputs = prepare()
            except MsaError:
                if is_new and not (folder / HISTORY).exists():
                    shutil.rmtree(folder, ignore_errors=True)
                raise
        text = pinned(inputs)
        warn_of_changes(folder, text)
        write_text(folder / RECIPE_FILE, text)
        yield inputs


def check_run_folder(folder: Path, kind: Kind) -> None:
    """Raise OutputError unless a folder is absent, empty, or holds the recipe.yaml of a run or training.

    Raise it, too, for the folder of a run whose data was purged.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: a file is in the way; choose another output")
    if (folder / PURGED_FILE).exists():
        raise OutputError(
            f"{folder}: its data was purged, and a run would fit the vectors again and write the rows down again; "
            f"choose another output, or remove {folder / PURGED_FILE} if that is what you want"
        )
    recipes = [folder / RECIPE_FILE, *folder.glob(f"{BASELINES}/*/{RECIPE_FILE}")]  # baselines may be run first
    allowed = {".lock", BASELINES, HISTORY, PROMPT_FILE, KEY_FILE, f"{KEY_FILE}.tmp"}
    for name in WRITTEN_OUT:  # before anything else, where models come as adapters
        allowed |= {name, f"{name}.partial", f".{name}.lock"}
    is_ours = any(_is_of_kind(path, kind) for path in recipes)
    if folder.is_dir() and any(path.name not in allowed for path in folder.iterdir()) and not is_ours:
        raise OutputError(f"{folder}: holds something that is no run of msa-lite; choose another output")


def _is_of_kind(file: Path, kind: Kind) -> bool:
    try:
        return read_text(file).startswith(f"# A {kind} of msa-lite")
    except FormatError:  # it is not there, or no text
        return False


def recipe_text(kind: Kind, command: str, recipe: Recipe | TrainingRecipe, notes: Sequence[str] = ()) -> str:
    """Return recipe.yaml: a line by which the folder is known, notes as comments, and the recipe."""
    first = f"A {kind} of msa-lite: the recipe as resolved. `{command}` on this file repeats the {kind}."
    return "".join(f"# {line}\n" for line in (first, *notes)) + dump_recipe(recipe)


def _command(plan: RunPlan) -> str:
    return "msa-lite" if plan.method == "msa" else f"msa-lite baseline {plan.method}"


def _earlier_given(folder: Path) -> dict[str, str]:
    """Return the paths as the recipe has them that recipe.yaml notes: a rerun by that file knows none itself."""
    path = folder / RECIPE_FILE
    return given_paths_of(read_text(path), path) if path.is_file() else {}


def _pinned(run: Run) -> str:
    """Return recipe.yaml with commits for Hub repositories and full paths; what pins all inputs as comments."""
    values = run.recipe.model_dump(mode="json")
    values["target"] = run.sources["target"].pinned()
    if run.plan.start == "prior":
        values |= {"prior": run.sources["prior"].pinned(), "history": None}
    if tokenizer := run.sources["target"].tokenizer:
        values["tokenizer"] = tokenizer.pinned()
    if "ideal" in run.sources:
        values["evaluate"]["ideal"] = run.sources["ideal"].pinned()
    for name, data in run.data.items():
        section, _, key = name.partition(".")
        values[section][key or "data"]["revision"] = data.revision
    reason = run.recipe.prior_reason if run.plan.start == "prior" else None
    models = {name: source for name, source in run.sources.items() if name != "prior" or run.plan.start == "prior"}
    notes = [reason] if reason else []
    notes += [f"{name}: {source.revision}" for name, source in models.items()]
    secret = make_key(run.folder / KEY_FILE)  # a plain hash of few rows could be guessed
    notes += [
        f"rows learnt, {name}: hmac-sha256:{secret.digest('rows', rows_identity(rows)['sha256'])}"
        for name, rows in run.rows.items()
    ]
    if given := _earlier_given(run.folder) | given_paths(values, run.recipe.folder):
        notes.append(f"{GIVEN}{json.dumps(given, ensure_ascii=False)}")
    recipe = Recipe.model_validate(absolute_paths(values, run.recipe.folder))
    return recipe_text("run", _command(run.plan), recipe, notes)
