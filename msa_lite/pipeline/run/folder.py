"""A run's folder: claimed by one process, with the resolved recipe in it; opened again by other commands."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from msa_lite.data import hash_ids, rows_identity
from msa_lite.errors import FormatError, MsaError, OutputError, RecipeError, at_most
from msa_lite.evals.scores.records import ANSWERS_FILE
from msa_lite.io.console.libraries import require
from msa_lite.io.console.progress import Progress, notices
from msa_lite.io.files.reading import parse_yaml, read_text
from msa_lite.io.files.writing import check_writable, digest, write_json, write_text
from msa_lite.io.finished.manifest import software_versions
from msa_lite.io.finished.seal import LOCK, MANIFEST, PURGING, in_use, leaves, load_manifest, locked
from msa_lite.io.launch.crew import Crew
from msa_lite.io.launch.gathering import agree
from msa_lite.pipeline.prepare.models import WRITTEN_OUT, make_demo
from msa_lite.pipeline.prepare.prompt import PROMPT_FILE
from msa_lite.pipeline.prepare.run import Context, Run, Scope, prepare
from msa_lite.pipeline.run.demo import HISTORY, check_demo_memory
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.recipe import Recipe, TrainingRecipe, absolute_paths, dump_recipe, given_paths, load_recipe, moved_paths
from msa_lite.recipe.load import load_any
from msa_lite.record.seal import KEY_FILE, make_key
from msa_lite.report.run.provenance import (
    ENTERED,
    GIVEN,
    PURGED_FILE,
    RECIPE_FILE,
    WITH_VECTORS,
    given_paths_of,
    read_run,
    recorded_revisions,
)
from msa_lite.report.run.stages import StageList

logger = logging.getLogger(__name__)


_MOST = 5
_IDLE = ("publish.", "request", "track", "attack", "evidence", "merge.keep_moments")  # no matter to the model


def warn_of_changes(folder: Path, recipe: str) -> None:
    """Warn if a run with this recipe (the text of recipe.yaml) may replace the model in its folder."""
    results = [name for name in ("model", "adapter") if (folder / name / MANIFEST).is_file()]
    if not results or not (folder / RECIPE_FILE).is_file():
        return
    try:
        changes = list(_changes(read_text(folder / RECIPE_FILE), recipe))
    except MsaError as error:
        logger.warning("%s; so the changes since the last run are unknown", error)
        return
    if changes:
        logger.warning(
            "%s: changed since the last run: %s. The run repeats the stages that depend on it. If the weights "
            "change, it replaces %s/ once the new one is verified",
            folder,
            ", ".join(at_most(changes, _MOST)),
            results[0],
        )


def _changes(former_recipe: str, recipe: str) -> Iterator[str]:
    """Yield `forget.alpha: 1.0 → 1.25` for each key that two recipes differ in, and the data whose content changed."""
    filled = _filled(former_recipe)
    old, new = (dict(leaves(parse_yaml(text, RECIPE_FILE))) for text in (filled, recipe))
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key) and not key.startswith(_IDLE):
            yield f"{key}: {_shown(old.get(key))} → {_shown(new.get(key))}"
    contents, now = recorded_revisions(former_recipe), recorded_revisions(recipe)
    yield from (f"content of {name}" for name, value in now.items() if _differ(contents.get(name), value))


def _filled(recipe: str) -> str:
    """Give keys that an earlier version lacked their defaults. A recipe that this version refuses stays as it is."""
    try:
        return dump_recipe(load_any(parse_yaml(recipe, RECIPE_FILE)))
    except RecipeError:
        return recipe


def _differ(former: str | None, now: str) -> bool:
    """Compare two hashes; none, or one of another kind, as earlier versions wrote them, tells nothing."""
    return former is not None and former.partition(":")[0] == now.partition(":")[0] and former != now


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


BASELINES = "baselines"  # runs of baselines lie in here, each in a folder of its own
TRACKING = "tracking"  # files of trackers


Prepared = TypeVar("Prepared")
FolderKind = Literal["run", "training"]


@contextmanager
def claimed(
    recipe: Recipe, scope: Scope, progress: Progress, check: Callable[[Run], None] = lambda run: None, *, crew: Crew
) -> Iterator[Run]:
    """Prepare a run, call `check` on it, and claim its folder. The other processes of the crew prepare it then, too."""
    if reason := _prior_reason(recipe, scope):
        notices.info("%s", reason)
    check_run_folder(recipe.folder, "run")

    def prepare_checked() -> Run:
        if recipe.demo is not None:
            check_demo_memory(recipe, scope.force)
            make_demo(recipe.demo, recipe.folder / HISTORY, recipe.seed, progress)
        run = replace(prepare(recipe, scope, progress), crew=crew)
        for note in run.notes:
            logger.warning("%s", note)
        check(run)
        return run

    first = None if recipe.demo is None else recipe_text("run", _command(scope), recipe)
    with claim(scope.folder, "run", prepare_checked, _pinned, first) as run:
        if run.prompt_search:
            write_json(run.folder / PROMPT_FILE, run.prompt_search)
        if run.renders:
            notices.info("prompt: %s", run.prompter.sentence)
        if scope.method in WITH_VECTORS and (notice := run.recipe.filter_notice):
            notices.info("%s", notice)
        agree(crew, lambda: run_inputs(run))
        yield run


def stage_list(context: Context, stages: Sequence[Stage]) -> StageList:
    """Return the list of a run's stages for its folder, with what its report looks for."""
    recipe, scope = context.recipe, context.scope
    has_vectors = scope.method in WITH_VECTORS
    values = {"alpha": recipe.alphas, "beta": recipe.betas if recipe.retain else None, "filter": recipe.filters}
    strengths = {name: each[0] for name, each in values.items() if each and len(each) == 1}
    if not strengths.get("filter"):
        strengths.pop("filter", None)
    evaluate = recipe.evaluate
    return StageList(
        stages=tuple(stage.listed(scope.folder) for stage in stages),
        vectors=tuple(recipe.vector_names) if has_vectors else () if scope.checkpoint else None,
        chooses=recipe.has_choice if has_vectors else context.chooses and not scope.checkpoint,
        strengths=strengths,
        models=("target", "unlearned", *(["ideal"] if evaluate.ideal else [])) if evaluate else (),
        starts_at_retain=recipe.starts_at_retain,
        data=context.prepared.content if context.prepared else "",
    )


def run_inputs(run: Run) -> dict[str, Any]:
    """Return hashes of all that a run starts from, by name. They are the same in all processes of a launcher."""
    inputs = {
        "models": {name: source.identity() for name, source in run.sources.items()},
        "rows": {name: hash_ids(examples) for name, examples in run.examples.items()},
        "questions": [questions and questions.describe() for questions in (run.validation, run.test, run.removed_rows)],
        "package versions": software_versions(),
    }
    return {name: digest(value) for name, value in inputs.items()}


@contextmanager
def claim(
    folder: Path,
    kind: FolderKind,
    prepare: Callable[[], Prepared],
    pinned: Callable[[Prepared], str],
    first: str | None = None,
) -> Iterator[Prepared]:
    """Prepare the inputs of a run or training, claim its folder for this process, and write recipe.yaml.

    pinned: returns recipe.yaml for the inputs. first: a recipe.yaml for the time before that, if the preparation itself
    writes into the folder. The claim then comes first, as it does for a run that is there already: the preparation may
    write models into it, which a purge beside it would miss. If the preparation fails, a new folder is removed; a
    demo's history stays, since it took minutes. Raise OutputError for a folder that holds something else, or in which
    another process works.
    """
    require("train")
    check_run_folder(folder, kind)
    check_writable(folder / RECIPE_FILE)
    is_new, is_first = not folder.exists(), first is not None or home_of(folder).exists()
    with ExitStack() as locks:
        if is_first:
            locks.enter_context(_locked_unpurged(folder))
        try:
            if first is not None and not (folder / RECIPE_FILE).exists():
                write_text(folder / RECIPE_FILE, first)
            inputs = prepare()
        except MsaError:
            if is_first and is_new:
                _remove_new(folder)
            raise
        if not is_first:
            locks.enter_context(_locked_unpurged(folder))
        text = pinned(inputs)
        warn_of_changes(folder, text)
        write_text(folder / RECIPE_FILE, text)
        yield inputs


@contextmanager
def _locked_unpurged(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder.

    Raise OutputError where a page shows the run, and where a purge works in it or has ended meanwhile. A purge holds
    its own lock first, and then looks for folders whose lock is held; so one of the two gives way.
    """
    is_new, home = not folder.exists(), home_of(folder)
    with locked(folder):
        try:
            with locked(home, PURGING) if (home / PURGING).exists() else nullcontext():
                refuse_purged(home)
            with in_use(folder, alone=True):  # a page that is opened later shows what it finds
                pass
        except OutputError:
            if is_new:
                _remove_new(folder)
            raise
        yield


def _remove_new(folder: Path) -> None:
    """Remove a folder that this process has made for nothing; a demo's history in it stays."""
    if not (folder / HISTORY).exists():
        shutil.rmtree(folder, ignore_errors=True)
        if folder.parent.name == BASELINES:
            with suppress(OSError):  # not empty
                folder.parent.rmdir()


def home_of(folder: Path) -> Path:
    """Return the folder of the recipe's own run: this one, or for the run of a baseline the one above `baselines`."""
    place = folder.resolve()
    return place.parent.parent if place.parent.name == BASELINES else folder


def refuse_purged(folder: Path) -> None:
    """Raise OutputError for the folder of a run whose data was purged."""
    if (folder / PURGED_FILE).exists():
        raise OutputError(
            f"{folder}: its data was purged, and a run would fit the vectors again and write the rows down again; "
            f"choose another output, or remove {folder / PURGED_FILE} if that is what you want"
        )


def check_run_folder(folder: Path, kind: FolderKind) -> None:
    """Raise OutputError unless a folder is absent, empty, or holds the recipe.yaml of a run or training.

    Raise it, too, for the folder of a run whose data was purged.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: a file is in the way; choose another output")
    refuse_purged(folder)
    recipes = [folder / RECIPE_FILE, *folder.glob(f"{BASELINES}/*/{RECIPE_FILE}")]  # baselines may be run first
    recipes += [folder / f"{RECIPE_FILE}.tmp"]  # cut off by a kill
    allowed = {LOCK, PURGING, BASELINES, HISTORY, PROMPT_FILE, ANSWERS_FILE, KEY_FILE, f"{KEY_FILE}.tmp"}
    for name in WRITTEN_OUT:  # before anything else, where models come as adapters
        allowed |= {name, f"{name}.partial", f".{name}.lock"}
    is_ours = any(_is_of_kind(path, kind) for path in recipes)
    if folder.is_dir() and any(path.name not in allowed for path in folder.iterdir()) and not is_ours:
        raise OutputError(f"{folder}: holds something that is no run of msa-lite; choose another output")


def _is_of_kind(file: Path, kind: FolderKind) -> bool:
    beginning = f"# A {kind} of msa-lite"
    try:
        text = read_text(file)[: len(beginning)]
        return text == beginning or (file.suffix == ".tmp" and beginning.startswith(text))
    except FormatError:  # it is not there, or no text
        return False


def recipe_text(kind: FolderKind, command: str, recipe: Recipe | TrainingRecipe, notes: Sequence[str] = ()) -> str:
    """Return recipe.yaml: a line by which the folder is known, notes as comments, and the recipe."""
    first = f"A {kind} of msa-lite: the recipe as resolved. `{command}` on this file repeats the {kind}."
    return "".join(f"# {line}\n" for line in (first, *notes)) + dump_recipe(recipe)


def _command(scope: Scope) -> str:
    if scope.checkpoint:
        return f"msa-lite {ENTERED} {scope.method}"  # without its path: the file is handed on
    return f"msa-lite baseline {scope.method}" if scope.is_baseline else "msa-lite"


def _prior_reason(recipe: Recipe, scope: Scope) -> str | None:
    """Return why a run starts from its prior, or from the target for want of one; None where it is no question."""
    return recipe.prior_reason if scope.start == "prior" or not scope.is_baseline else None


def _earlier_given(folder: Path) -> dict[str, str]:
    """Return the paths as the recipe has them that recipe.yaml notes: a rerun by that file knows none itself."""
    path = folder / RECIPE_FILE
    return given_paths_of(read_text(path), path) if path.is_file() else {}


def _pinned(run: Run) -> str:
    """Return recipe.yaml with commits for Hub repositories and full paths; what pins all inputs as comments."""
    values = run.recipe.model_dump(mode="json")
    values["target"] = run.sources["target"].pinned()
    if run.scope.start == "prior":
        values |= {"prior": run.sources["prior"].pinned(), "history": None}
    if "ideal" in run.sources:
        values["evaluate"]["ideal"] = run.sources["ideal"].pinned()
    for name, data in run.data.items():
        section, _, key = name.partition(".")
        values[section][key or "data"]["revision"] = data.revision
    reason = _prior_reason(run.recipe, run.scope)
    models = {name: source for name, source in run.sources.items() if name != "prior" or run.scope.start == "prior"}
    notes = [reason] if reason else []
    notes += [f"{name}: {source.revision}" for name, source in models.items()]
    secret = make_key(run.folder / KEY_FILE)  # a plain hash of few rows could be guessed
    notes += [
        f"rows learnt, {name}: hmac-sha256:{secret.digest('rows', rows_identity(rows)['sha256'])}"
        for name, rows in run.rows.items()
    ]
    if as_given := _earlier_given(run.folder) | given_paths(values, run.recipe.folder):
        notes.append(f"{GIVEN}{json.dumps(as_given, ensure_ascii=False)}")
    recipe = Recipe.model_validate(absolute_paths(values, run.recipe.folder))
    return recipe_text("run", _command(run.scope), recipe, notes)


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and the recipe that was resolved for it."""

    folder: Path
    """The folder of this run."""
    recipe: Recipe
    """Its recipe, with the paths of files in the folder as they are now."""

    @property
    def home(self) -> Path:
        """Return the folder of the recipe: this one, or for the run of a baseline the one above `baselines`."""
        return self.recipe.folder

    @property
    def result(self) -> Path:
        """Return the folder of what the run makes: the unlearned model, or an adapter on the target."""
        return self.folder / ("adapter" if self.recipe.merge.form == "adapter" else "model")

    def check_result(self, verb: str) -> None:
        """Raise OutputError where there is no unlearned model yet. verb: what was to be done with it."""
        if load_manifest(self.result) is None:
            raise OutputError(
                f"{self.folder}: there is no unlearned model to {verb} yet; finish the run first (the command is in "
                f"the first line of {self.folder / RECIPE_FILE})"
            )


def open_run(folder: str | Path) -> RunFolder:
    """Open the folder of a run. Raise UsageError for any other folder; RecipeError if its recipe cannot be read."""
    folder = Path(folder)
    read_run(folder)
    recipe = load_recipe(folder / RECIPE_FILE)
    moved = moved_paths(recipe.model_dump(mode="json"), recipe.output.rstrip("/"), home_of(folder))
    return RunFolder(folder, load_recipe(moved))
