"""Open the runs of earlier requests on the same target, whose vectors are merged together with the new ones.

Each request keeps its own run. The unlearned model is one merge of the target and the vectors of all requests, with one
rounding, so a request can be dropped again later: without it, the merge is that of the others from nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msa_lite.data import Prompter, Row, load_rows, shorten
from msa_lite.errors import Faults, FormatError, MismatchError, MsaError, UsageError
from msa_lite.evals.benchmarks.benchmark import Benchmark
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.io.files.reading import local_path, read_objects
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.merger import Precision, Term, open_merge
from msa_lite.pipeline.prepare.models import same_weights
from msa_lite.recipe import Recipe, load_recipe
from msa_lite.record.seal import RECORD_FILE, load_record
from msa_lite.report import REPORT_FILE
from msa_lite.report.run.choice import load_choice
from msa_lite.report.run.provenance import (
    PURGED_FILE,
    RECIPE_FILE,
    purge_day,
    read_run,
    recorded_method,
    recorded_revisions,
)
from msa_lite.report.verdict.figures import EARLIER_SET, EarlierFacts
from msa_lite.strengths import Strengths

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EarlierRun:
    """The finished run of an earlier request."""

    folder: Path
    """The run's folder."""
    recipe: Recipe
    """Its recipe as resolved."""
    strengths: Strengths
    """The point that it chose, or that its recipe names."""
    revisions: Mapping[str, str]
    """The revisions of its models by name: "target", "prior", …"""

    @property
    def terms(self) -> list[Term[Path]]:
        """Return its vectors with their weights; none of strength 0."""
        return [term for term in own_terms(self.recipe, self.folder, self.strengths) if term.weight]

    @property
    def vectors(self) -> dict[str, Path]:
        """Return the folders of these vectors by name ("forget", "retain")."""
        return {term.name: term.vector for term in self.terms}

    @property
    def rows(self) -> list[str]:
        """Return the hashes of the rows that it removed."""
        return read_hashes(forget_list(self.folder))


def forget_list(folder: Path) -> Path:
    """Return the file with the hashes of the rows that a run's forget vector learnt."""
    return folder / "vectors" / "forget" / "rows.jsonl"


def read_hashes(path: Path) -> list[str]:
    """Return the hashes of rows in such a file. Raise FormatError for a broken one."""
    return [str(row["sha256"]) for row in read_objects(path, "sha256")]


def own_terms(recipe: Recipe, folder: Path, strengths: Strengths) -> list[Term[Path]]:
    """Return the vectors of one request, in the folder of its run, with their weights at a point."""
    weights = recipe.weights(strengths)
    return [Term(name, strengths.vector_folder(folder, name), weights[name]) for name in recipe.vector_names]


def earlier_terms(runs: Sequence[EarlierRun]) -> list[Term[Path]]:
    """Return the vectors of all earlier requests with their weights; the new request is number 1."""
    return [replace(term, name=f"{term.name} {number}") for number, run in enumerate(runs, 2) for term in run.terms]


def open_earlier(recipe: Recipe) -> tuple[EarlierRun, ...]:
    """Return the runs of a recipe's key `earlier`, with the earlier ones of these, each once.

    Raise UsageError for a folder that is no finished run of MSA, MismatchError for vectors that are gone or not as they
    were written.
    """
    faults, runs = Faults(), dict[Path, EarlierRun]()
    for name in recipe.earlier:
        with faults.gathered("earlier: "):
            _open_all(Path(name).expanduser(), recipe.folder.resolve(), runs)
    faults.check()
    seen: dict[frozenset[str], Path] = {}
    for run in runs.values():  # a folder may be the copy of another one
        twin = seen.setdefault(frozenset(run.rows), run.folder) if "forget" in run.vectors else run.folder
        if twin != run.folder:
            raise UsageError(f"earlier: {twin} and {run.folder} remove the same rows; leave one out")
    return tuple(runs.values())


def _open_all(folder: Path, new: Path, runs: dict[Path, EarlierRun], through: Sequence[Path] = ()) -> None:
    """Open a run and all runs that are earlier for it, the oldest first. new: the folder of the new run."""
    place = folder.resolve()
    by = f" (earlier for {through[-1]})" if through else ""
    if place == new:
        raise UsageError(f"{folder}{by}: is this run itself; leave it out, or choose another output")
    if new in place.parents or place in new.parents:
        raise UsageError(f"{folder}{by}: lies in this run's output, or around it ({new}); choose another output")
    if place in [above.resolve() for above in through]:
        raise UsageError(f"{folder}{by}: is earlier for itself; mend the key `earlier` of one of these runs")
    if place in runs:
        return
    run = _open(folder, by)
    for name in run.recipe.earlier:
        inner = Path(name).expanduser()
        # A run's recipe.yaml has full paths; a report shows this one as it shows the run that names it.
        inner = inner if folder.is_absolute() else Path(os.path.relpath(inner))
        _open_all(inner, new, runs, [*through, folder])
    runs[place] = run


def _open(folder: Path, by: str) -> EarlierRun:
    """Open one run. by: for messages, the run that names it."""
    try:
        text = read_run(folder)
        is_own = recorded_method(text)[0] is None
    except UsageError:
        is_own = False
    if not is_own:
        raise UsageError(
            f"{folder}{by}: is no run of msa-lite (it has no {RECIPE_FILE} of one); name the folder of a run"
        )
    again = f"`msa-lite {folder / RECIPE_FILE}` finishes it"
    recipe = load_recipe(folder / RECIPE_FILE)
    result = load_manifest(folder / recipe.merge.form)
    strengths = strengths_of(recipe, folder)
    if strengths is None or (result is None and not (folder / REPORT_FILE).is_file()):
        raise UsageError(f"{folder}{by}: the run is not finished, so it has no strengths yet; {again}")
    revisions = recorded_revisions(text)
    if result is not None:
        models = {name: value for name, value in result["inputs"].items() if isinstance(value, dict)}
        revisions |= {name: str(value["revision"]) for name, value in models.items() if "revision" in value}
    run = EarlierRun(folder, recipe, strengths, revisions)
    _check_vectors(run, by)
    _check_record(run, by)
    forget, weights = run.vectors.get("forget"), recipe.weights(strengths)
    if result is not None and forget and not is_merged_at(result["inputs"], weights, forget):
        raise UsageError(f"{folder}{by}: its vectors or strengths are newer than its model; {again}")
    return run


def is_merged_at(inputs: Mapping[str, Any], weights: Mapping[str, float], forget: Path) -> bool:
    """Check whether a model was merged of a run's own vectors at these weights, by the inputs in its manifest.

    forget: the run's forget vector, which the manifest knows by its revision. With earlier requests the names have
    numbers ("forget 2"), and a retain vector may stand for several, with the sum of their β: it is not compared then.
    """
    recorded = inputs.get("strengths") or {"forget": inputs.get("alpha"), "retain": inputs.get("beta")}
    revision = fetch(str(forget)).revision if forget.is_dir() else "gone"
    vectors = {name: inputs.get(name) or {} for name in recorded if name.startswith("forget")}
    own = next((name for name, vector in vectors.items() if vector.get("revision") == revision), None)
    if own is None:
        return not weights.get("forget") and not recorded.get("forget")
    names = {"forget": own} if own != "forget" else {name: name for name in weights}
    return all((recorded.get(names[name]) or 0.0) == abs(weights[name]) for name in names.keys() & weights.keys())


def _check_vectors(run: EarlierRun, by: str) -> None:
    """Raise MismatchError for vectors that are gone, or not as they were written."""
    for path in run.vectors.values():
        is_readable = load_manifest(path) is not None
        if not is_readable and not path.exists():
            if (run.folder / PURGED_FILE).exists():
                why = "were purged"
                way = "Take the run out of `earlier`; to keep its removal, name its unlearned model as the target"
            else:
                why = f"are gone ({path})"
                way = f"Fit them anew (`msa-lite {run.folder / RECIPE_FILE}`), or take the run out of `earlier`"
            raise MismatchError(
                f"{run.folder}{by}: its vectors {why}, and without them its request cannot be merged again. {way}"
            )
        if faults := verify_folder(path) if is_readable else ["its manifest is damaged"]:
            raise MismatchError(f"{path}{by}: not as it was written: {faults[0]}; see `msa-lite verify {run.folder}`")


def _check_record(run: EarlierRun, by: str) -> None:
    """Raise MismatchError for a record that is damaged: the new record would name it, once all work is done."""
    path = run.folder / RECORD_FILE
    try:
        if path.exists():
            load_record(path)
    except FormatError as error:
        raise MismatchError(
            f"{path}{by}: damaged ({error}). Put a copy of it there, or remove it, and "
            f"`msa-lite {run.folder / RECIPE_FILE}` writes it anew"
        ) from error


def strengths_of(recipe: Recipe, folder: Path) -> Strengths | None:
    """Return the strengths of a run in this folder: those of its recipe, or its choice; None while it has none."""
    if not recipe.has_choice:
        return recipe.points[0]
    if load_manifest(folder / "sweep") is None:
        return None
    return Strengths.of(load_choice(folder / "sweep").values)


def check_earlier(recipe: Recipe, runs: Sequence[EarlierRun], sources: Mapping[str, Source]) -> None:
    """Raise MismatchError for earlier runs on another target, or whose vectors do not fit it or need another prior;
    UsageError for vectors that are checkpoints where the recipe wants adapters.
    """
    faults = Faults()
    for run in runs:
        with faults.gathered("earlier: "):
            _check_fits(recipe, run, sources)
    faults.check()
    if terms := earlier_terms(runs):
        vectors = {term.name: fetch(str(term.vector)) for term in terms}
        open_merge(sources["target"], vectors, sources["prior"], Precision())


def _check_fits(recipe: Recipe, run: EarlierRun, sources: Mapping[str, Source]) -> None:
    target = sources["target"]
    if not _same_model(run, "target", target):
        raise MismatchError(
            f"{run.folder}: is a run on another target, {run.recipe.target} ({run.revisions.get('target')}); this "
            f"run's is {target.name} ({target.revision}). Vectors fit only the target that they were made for: name "
            "that one, with its commit if it is on the Hub"
        )
    if run.recipe.vector.mode != "full":
        return
    if not _same_model(run, "prior", sources["prior"]):
        raise MismatchError(
            f"{run.folder}: its vectors are full checkpoints of another prior, {run.recipe.prior_checkpoint}; all full "
            f"checkpoints of a merge need the same one, this run's is {sources['prior'].name}"
        )
    if recipe.merge.form == "adapter":
        raise UsageError(
            f"{run.folder}: its vectors are full checkpoints, which merge.as: adapter cannot take; leave it out"
        )


def _same_model(run: EarlierRun, name: str, source: Source) -> bool:
    """Check whether an earlier run's model is this one: by revision, else by its weights, where it is still there."""
    if run.revisions.get(name) == source.revision:
        return True
    place = getattr(run.recipe, name)
    try:
        model = fetch(place) if place and Path(place).expanduser().is_dir() else None
    except MsaError:
        return False
    if model is None or model.revision != run.revisions.get(name):  # it may have been changed since
        return False
    return same_weights(load_checkpoint(model.folder), load_checkpoint(source.folder))


EARLIER_ROWS = 60
"""The most rows of earlier requests that a run asks its models; `evaluate.limit` may set fewer. Fixed before any score
was seen: if none of 60 is recited, and none by a control of 60, the difference is below 4 points (`least_bound`)."""
_SPLIT = "earlier requests"


@dataclass(frozen=True)
class RemovedRows:
    """The rows of earlier requests that are asked again: a sample of fixed size, spread over all requests.

    Rows of all earlier requests are as many as there were requests; a sample keeps the cost of a request from growing
    with their number. It is drawn by seeded hashes of the rows, first one of each request, then a second one of each,
    and so on. So a later run draws nearly the same rows again, and takes up what target and ideal said of them.
    """

    questions: Benchmark | None
    """The sample, in one set; None where no row is left to ask."""
    owners: Sequence[Path]
    """The folder of the run that removed each row of the sample."""
    facts: EarlierFacts
    """The counts of requests and rows, and why rows of a request cannot be asked; nothing is scored yet."""


def draw_removed(recipe: Recipe, earlier: Sequence[EarlierRun], prompter: Prompter) -> RemovedRows | None:
    """Return the rows of earlier requests to ask again; None if there are no earlier requests, or nothing is scored.

    Their data may be gone, or have changed: such rows are left out, with the reason.
    """
    if recipe.evaluate is None:
        return None
    recipes, hashes, unscored = list_removed(recipe, earlier)
    if not recipes:
        return None
    most = min(EARLIER_ROWS, recipe.evaluate.limit or EARLIER_ROWS)
    rows, owners = list[Row](), list[Path]()
    for folder, wanted in _draw(hashes, most, recipe.seed).items():
        with _reading(folder, unscored):
            whole = _load(recipes[folder])
            shorter, _ = shorten(whole, prompter, recipes[folder].vector.max_length)  # as the run itself cut them
            there = {row.sha256: row for row in [*whole, *shorter]}
            found = [there[sha256] for sha256 in wanted if sha256 in there]
            if gone := len(wanted) - len(found):
                unscored[folder] = f"its data has changed: {gone} of {len(wanted)} rows are not there any more"
            rows += found
            owners += [folder] * len(found)
    named = [replace(row, index=index) for index, row in enumerate(rows)]
    questions = load_qa({EARLIER_SET: named}, prompter, recipe.evaluate.max_new_tokens, _SPLIT) if named else None
    reasons = {os.path.abspath(folder): reason for folder, reason in unscored.items()}
    facts = EarlierFacts(len(recipes), sum(map(len, hashes.values())), None, unscored=reasons)
    return RemovedRows(questions, owners, facts)


def list_removed(
    recipe: Recipe, earlier: Sequence[EarlierRun]
) -> tuple[dict[Path, Recipe], dict[Path, list[str]], dict[Path, str]]:
    """Return the recipes of earlier requests, the hashes of their rows, and why some are not known, by run.

    Earlier requests are those whose vectors are merged, too, and those whose removal the target holds: where it lies in
    the folder of the run that made it.
    """
    recipes = {run.folder: run.recipe for run in earlier if "forget" in run.vectors}
    recipes |= {folder: found for folder, found in _runs_in(recipe.target) if folder not in recipes}
    hashes, unknown = dict[Path, list[str]](), dict[Path, str]()
    for folder, theirs in recipes.items():
        with _reading(folder, unknown):
            if day := purge_day(folder):
                unknown[folder] = f"its data was purged on {day}"
                continue
            listed = forget_list(folder)  # the run of a baseline has none
            names = read_hashes(listed) if listed.is_file() else [row.sha256 for row in _load(theirs)]
            hashes[folder] = list(dict.fromkeys(names))
    return recipes, hashes, unknown


def removed_hashes(recipe: Recipe, earlier: Sequence[EarlierRun]) -> set[str]:
    """Return the hashes of the rows that earlier requests removed, as far as they are known."""
    return set().union(*list_removed(recipe, earlier)[1].values())


def _load(recipe: Recipe) -> list[Row]:
    return load_rows(recipe.forget.data.source(recipe.columns))


@contextmanager
def _reading(folder: Path, unscored: dict[Path, str]) -> Iterator[None]:
    """Note a request whose data cannot be read any more."""
    try:
        yield
    except MsaError as error:
        logger.debug("%s: %s", folder, error)
        unscored[folder] = "its data cannot be read any more"


def _draw(hashes: Mapping[Path, Sequence[str]], most: int, seed: int) -> dict[Path, list[str]]:
    """Return the hashes of the rows that are drawn, by the run that removed them. hashes: those of all its rows."""
    places = []
    for number, (folder, names) in enumerate(hashes.items()):
        ordered = sorted((digest([seed, sha256]), sha256) for sha256 in names)
        places += [(rank, key, number, folder, sha256) for rank, (key, sha256) in enumerate(ordered)]
    drawn = sorted(places)[:most]
    by_run = {folder: [each[4] for each in drawn if each[3] == folder] for folder in hashes}
    return {folder: names for folder, names in by_run.items() if names}


def _runs_in(target: str) -> Iterator[tuple[Path, Recipe]]:
    """Yield the runs whose removal a target holds, the last one first, with their recipes.

    A target holds that of a run if it is the run's unlearned model and still lies in its folder.
    """
    places, seen = [local_path(target)], set[Path]()
    while places:
        place = places.pop(0)
        folder = place.parent if place.name in ("model", "adapter") else place
        if folder.resolve() in seen or not (folder / RECIPE_FILE).is_file() or (not seen and folder == place):
            continue
        seen.add(folder.resolve())
        try:
            read_run(folder)
            recipe = load_recipe(folder / RECIPE_FILE)
        except MsaError:
            continue
        yield folder, recipe
        places += map(local_path, [*recipe.earlier, recipe.target])
