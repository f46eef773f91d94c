"""Draw the rows of earlier requests that a later run asks its models again: a sample of fixed size, spread over all.

Rows of all earlier requests are as many as there were requests; a sample keeps the cost of a request from growing with
their number. It is drawn by seeded hashes of the rows, first one of each request, then a second one of each, and so on.
So a later run draws nearly the same rows again, and takes up what target and ideal said of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msa_lite.data import Prompter, Row, load_rows, shorten
from msa_lite.errors import MsaError
from msa_lite.evals.benchmarks.benchmark import Benchmark
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.io.files.reading import local_path
from msa_lite.io.files.writing import digest
from msa_lite.pipeline.prepare.earlier import EarlierRun, forget_list, read_hashes
from msa_lite.pipeline.prepare.questions import source_of
from msa_lite.recipe import Recipe, load_recipe
from msa_lite.report.run.provenance import RECIPE_FILE, purge_day, read_run
from msa_lite.report.verdict.comeback import EARLIER_SET

logger = logging.getLogger(__name__)

EARLIER_ROWS = 60
"""The most rows of earlier requests that a run asks its models; `evaluate.limit` may set fewer. Fixed before any score
was seen: if none of 60 is recited, and none by a control of 60, the difference is below 4 points (`least_bound`)."""
_GONE = "its data cannot be read any more"


@dataclass(frozen=True)
class RemovedRows:
    """The rows of earlier requests that are asked again."""

    questions: Benchmark | None
    """The sample, in one set; None where no row is left to ask."""
    owners: Sequence[Path]
    """The folder of the run that removed each row of the sample."""
    total: int
    """The rows that the earlier requests removed, as far as that is known."""
    requests: int
    """The earlier requests."""
    unscored: Mapping[Path, str]
    """The reason why rows of a request cannot be asked, by the folder of its run."""

    @property
    def notes(self) -> list[str]:
        """Return a sentence for each request whose rows cannot be asked."""
        return [
            f"rows of an earlier request cannot be scored again ({folder}): {reason}"
            for folder, reason in self.unscored.items()
        ]


@dataclass(frozen=True)
class _Request:
    """An earlier request: its run, and the hashes of the rows that it removed."""

    folder: Path
    recipe: Recipe
    hashes: Sequence[str]

    @classmethod
    def open(cls, folder: Path, recipe: Recipe) -> _Request:
        """Return a request; without a list of its rows, as a baseline's run, the rows are read."""
        listed = forget_list(folder)
        hashes = read_hashes(listed) if listed.is_file() else [row.sha256 for row in _read(recipe)]
        return cls(folder, recipe, tuple(dict.fromkeys(hashes)))

    def rows(self, prompter: Prompter) -> dict[str, Row]:
        """Return its rows by their hash, as they are now, cut as its run cut them."""
        rows = _read(self.recipe)
        shorter = shorten(rows, prompter, self.recipe.vector.max_length)
        return {row.sha256: row for row in [*rows, *shorter]}


def _read(recipe: Recipe) -> list[Row]:
    return load_rows(source_of(recipe.forget.data, recipe.columns))


def draw_removed(recipe: Recipe, earlier: Sequence[EarlierRun], prompter: Prompter) -> RemovedRows | None:
    """Return the rows of earlier requests to ask again; None if there are no earlier requests, or nothing is scored.

    Earlier requests are those whose vectors are merged, too, and those whose removal the target holds: where it lies in
    the folder of the run that made it. Their data may be gone, or have changed: such rows are left out, with the
    reason.
    """
    if recipe.evaluate is None:
        return None
    runs = {run.folder: run.recipe for run in earlier if "forget" in run.vectors}
    runs |= {folder: found for folder, found in _runs_in(recipe.target) if folder not in runs}
    if not runs:
        return None
    requests, unscored = list[_Request](), dict[Path, str]()
    for folder, theirs in runs.items():
        try:
            if day := purge_day(folder):
                unscored[folder] = f"its data was purged on {day}"
            else:
                requests.append(_Request.open(folder, theirs))
        except MsaError as error:
            logger.debug("%s: %s", folder, error)
            unscored[folder] = _GONE
    most = min(EARLIER_ROWS, recipe.evaluate.limit or EARLIER_ROWS)
    rows, owners = list[Row](), list[Path]()
    for request, wanted in _draw(requests, most, recipe.seed):
        try:
            there = request.rows(prompter)
        except MsaError as error:
            logger.debug("%s: %s", request.folder, error)
            unscored[request.folder] = _GONE
            continue
        found = [there[sha256] for sha256 in wanted if sha256 in there]
        if len(found) < len(wanted):
            lost = len(wanted) - len(found)
            unscored[request.folder] = f"its data has changed: {lost} of {len(wanted)} rows are not there any more"
        rows += found
        owners += [request.folder] * len(found)
    named = [replace(row, index=index) for index, row in enumerate(rows)]
    questions = load_qa({EARLIER_SET: named}, prompter, recipe.evaluate.max_new_tokens, _SPLIT) if named else None
    total = sum(len(request.hashes) for request in requests)
    return RemovedRows(questions, owners, total, len(runs), unscored)


_SPLIT = "earlier requests"


def _draw(requests: Sequence[_Request], most: int, seed: int) -> Iterator[tuple[_Request, list[str]]]:
    """Yield the requests that rows are drawn of, with the hashes of these rows."""
    places = []
    for number, request in enumerate(requests):
        ordered = sorted(request.hashes, key=lambda sha256: digest([seed, sha256]))
        places += [(rank, digest([seed, sha256]), number, sha256) for rank, sha256 in enumerate(ordered)]
    drawn: dict[int, list[str]] = {}
    for _, _, number, sha256 in sorted(places)[:most]:
        drawn.setdefault(number, []).append(sha256)
    yield from ((requests[number], drawn[number]) for number in sorted(drawn))


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
