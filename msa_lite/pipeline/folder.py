"""A run's folder: claimed by one process, with the recipe as resolved in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msa_lite.data import rows_identity
from msa_lite.demo import HistorySettings, make_groups, make_history
from msa_lite.errors import FormatError, OutputError
from msa_lite.io.disk import reachable
from msa_lite.io.files import write_json, write_text
from msa_lite.io.progress import Progress, notices
from msa_lite.io.reading import read_text
from msa_lite.pipeline.changes import warn_of_changes
from msa_lite.pipeline.prepare import Run, RunPlan, prepare
from msa_lite.pipeline.prepare_models import WRITTEN_OUT
from msa_lite.pipeline.prepare_prompt import PROMPT_FILE
from msa_lite.recipe import Recipe, absolute_paths, dump_recipe

BASELINES = "baselines"  # runs of baselines lie in here, each in a folder of its own
HISTORY = "history"  # of the demo
_HEADER = "# A run of msa-lite: the recipe as resolved. `msa-lite{command}` on this file repeats the run.\n"


def run_folder(recipe: Recipe) -> Path:
    """Where the recipe's run goes."""
    return Path(recipe.output).expanduser()


@contextmanager
def claimed(
    recipe: Recipe, plan: RunPlan, progress: Progress, check: Callable[[Run], None] = lambda run: None
) -> Iterator[Run]:
    """Check everything (`check` at last), then claim the run's folder for this process and write down the recipe."""
    folder = plan.folder
    if plan.start == "prior" and recipe.prior_reason:
        notices.info("%s", recipe.prior_reason)
    for used in dict.fromkeys([run_folder(recipe), folder]):
        check_run_folder(used, _HEADER)
    if recipe.demo is None:  # with a demo, the inputs that are checked have to be made first
        run = prepare(recipe, plan, progress)
        check(run)
    with locked(folder):
        if recipe.demo is not None:
            write_text(folder / "recipe.yaml", _header(plan) + dump_recipe(recipe))
            sizes = recipe.demo.model_dump()
            people = {name: sizes.pop(name) for name in ("prior", "retain", "forget", "holdout")}
            settings = HistorySettings(**sizes, seed=recipe.seed)
            make_history(run_folder(recipe) / HISTORY, make_groups(people, recipe.seed), settings, progress)
            run = prepare(recipe, plan, progress)
            check(run)
        if run.prompt_search:
            write_json(folder / PROMPT_FILE, run.prompt_search)
        pinned = _pinned(run)
        warn_of_changes(folder, pinned)
        write_text(folder / "recipe.yaml", pinned)
        if run.renders:
            notices.info("prompt: %s", run.prompter.sentence)
        yield run


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a run's folder and keep other processes out of it. Raises OutputError when one is at work there."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    with reachable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(lock.lock_file) and not os.path.isfile(lock.lock_file):
        raise OutputError(f"{lock.lock_file}: is no file; move it elsewhere")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise OutputError(f"{folder}: another msa-lite is working on this run") from error
    try:
        yield
    finally:
        lock.release()


def check_run_folder(folder: Path, header: str) -> None:
    """Raise OutputError unless a folder is absent, empty, or holds a run whose recipe begins as `header` does."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: a file is in the way; choose another output")
    marks = [folder / "recipe.yaml", *folder.glob(f"{BASELINES}/*/recipe.yaml")]  # baselines may be run first
    ours = any(_begins(mark, header.partition(":")[0]) for mark in marks)
    allowed = {".lock", BASELINES, HISTORY, PROMPT_FILE}
    for name in WRITTEN_OUT:  # before anything else, where models come as adapters
        allowed |= {name, f"{name}.partial", f".{name}.lock"}
    if folder.is_dir() and any(path.name not in allowed for path in folder.iterdir()) and not ours:
        raise OutputError(f"{folder}: holds something that is no run of msa-lite; choose another output")


def _begins(file: Path, text: str) -> bool:
    """Check whether a file, if it is there, begins with a text."""
    try:
        return read_text(file).startswith(text)
    except FormatError:
        return False


def _header(plan: RunPlan) -> str:
    return _HEADER.format(command="" if plan.method == "msa" else f" baseline {plan.method}")


def _pinned(run: Run) -> str:
    """The resolved recipe with commits for Hub repositories and full paths; what pins all inputs as comments."""
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
    used = {name: source for name, source in run.sources.items() if name != "prior" or run.plan.start == "prior"}
    reason = run.recipe.prior_reason if run.plan.start == "prior" else None
    notes = [f"# {reason}"] if reason else []
    notes += [f"# {name}: {source.revision}" for name, source in used.items()]
    notes += [f"# rows learnt, {name}: sha256:{rows_identity(rows)['sha256']}" for name, rows in run.rows.items()]
    values = absolute_paths(values, run_folder(run.recipe))
    return _header(run.plan) + "\n".join(notes) + "\n" + dump_recipe(Recipe.model_validate(values))
