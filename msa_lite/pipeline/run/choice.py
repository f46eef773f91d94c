"""Choose the strengths (α, β): each point is tried on one loaded target, and only the chosen one is merged.

Several processes may score the points: under a launcher, the others score points with the first one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.choose.choice import TARGET, Candidates, Values, choose, help_choose
from msa_lite.choose.search import StrengthSearch
from msa_lite.io.console.progress import Progress
from msa_lite.io.finished.manifest import is_finished
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.launch.crew import Crew
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.filtering import filter_identity
from msa_lite.pipeline.run.merge import LoadedTarget, merge_identity, run_terms
from msa_lite.pipeline.run.scores import score_model, score_stage, scores_folder, validation_of
from msa_lite.pipeline.run.vectors import tracking_of
from msa_lite.pipeline.stages.costs import candidates_costs
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.recipe import Recipe
from msa_lite.report import REPORT_FILE
from msa_lite.report.run.choice import Candidate, Choice, load_choice, score_heading
from msa_lite.strengths import Strengths
from msa_lite.train import Line

logger = logging.getLogger(__name__)

POINTS = "score points"  # the order to score a share of points; without points, the choice is made
CHOICE = "choosing alpha and beta"
_APART = 0.02  # difference of a score before and after the merge that is worth a warning


def choice_stages(context: Context, needs: Sequence[str]) -> list[Stage]:
    """Return the choice of α and β on the validation rows; nothing where the recipe names one point.

    needs: the names of the stages before it. The ideal is scored on the same rows first.
    """
    if not context.chooses:
        return []
    ideal = [score_stage(context, "ideal", "validation")] if context.has_ideal else []
    names = list(dict.fromkeys([*needs, *(stage.name for stage in ideal)]))
    search = _search(context.recipe)
    points = search.most if search else len(context.recipe.points)
    choice = Stage(
        CHOICE,
        "choose",
        context.scope.folder / "sweep",
        lambda progress: _choose_strengths(context.run, progress),
        needs=names,
        inputs=lambda: _sweep_inputs(context.run),
        cost=partial(candidates_costs, context.recipe, 1 + points),  # the target is scored, too
        says="strengths are tried in memory, by scores on validation rows",
    )
    return [*ideal, choice]


def rescore_stages(context: Context) -> list[Stage]:
    """Return the scores of the merged model on the validation rows, beside those of the chosen point in memory."""
    if not context.chooses:
        return []
    stage = score_stage(context, "unlearned", "validation", ["merge"])
    return [replace(stage, run=lambda progress: _rescore(context.run, progress))]


def chosen_strengths(run: Run) -> Strengths:
    """Return α and β: those of the recipe, or those that were chosen."""
    return Strengths.of(load_choice(run.folder / "sweep").values) if run.validation else run.recipe.points[0]


def _choose_strengths(run: Run, progress: Progress) -> Choice:
    """Return the best point on the validation rows."""
    candidates = replace(_candidates(run), helped=partial(_share, run.crew))
    choice = choose_candidate(run, candidates, "alpha and beta", progress)
    with run.crew.helped(POINTS, {"points": []}):  # no more of them
        return choice


@contextmanager
def _share(crew: Crew, points: Sequence[Values]) -> Iterator[int]:
    """Have all processes of the launch score their share of points while the block runs; give the number of shares."""
    with crew.helped(POINTS, {"points": [dict(values) for values in points]}):
        yield crew.ranks.count


def points_helper(run: Run) -> Callable[[Sequence[Values]], None]:
    """Return a function that scores this process's share of points; without points, it frees the memory."""
    ranks, candidates, validation = run.crew.ranks, _candidates(run), validation_of(run)

    def score(points: Sequence[Values]) -> None:
        help_choose(candidates, validation, run.folder / "sweep", points[ranks.rank :: ranks.count])
        if not points:
            candidates.release()

    return score


def choose_candidate(run: Run, candidates: Candidates, what: str, progress: Progress) -> Choice:
    """Return the best candidate on the run's validation rows. Warn of reasons to doubt it."""
    validation, out = validation_of(run), run.folder / "sweep"
    is_new = not is_finished(out, candidates.inputs(validation))
    choice = choose(candidates, validation, out, f"choosing {what}", progress)
    if is_new:
        with tracking_of(run).lines("sweep") as report:
            for number, candidate in enumerate(choice.candidates, 1):
                report(_tracked_line(candidate), number)
    for doubt in (doubt for doubt in choice.doubts if doubt not in run.notes):  # the run has begun with its notes
        logger.warning("the choice of %s: %s", what, doubt)
    return choice


def _tracked_line(candidate: Candidate) -> Line:
    """Return the numbers of a candidate: its values, its score unless it is broken, its metrics."""
    scored = {} if candidate.score is None else {"score": candidate.score, "conditions_met": float(candidate.met)}
    line = {**candidate.values, **scored, **{name: metric.value for name, metric in candidate.metrics.items()}}
    return {name: float(value) for name, value in line.items() if isinstance(value, int | float)}


def _rescore(run: Run, progress: Progress) -> list[str]:
    """Score the chosen point again, merged, on the validation rows. Return a sentence on the two figures."""
    score_model(run, "unlearned", "validation", progress)
    validation, place = validation_of(run), run.folder / "sweep"
    choice, scores = load_choice(place), scores_folder(run, "unlearned", "validation")
    rank = validation.rank(scores, place / TARGET)
    in_memory = _scored(choice.score, choice.met)
    after = f"broken ({rank})" if isinstance(rank, str) else _scored(rank.value, rank.met)
    name = score_heading(choice.rule)[:-2]
    line = f"{name}, the chosen point in memory: {in_memory}; as merged model: {after}"
    if isinstance(rank, str) or abs(choice.score - rank.value) > _APART or rank.met != choice.met:
        logger.warning("%s; the final scores are those of the merged model", line)
    return [f"{line[0].upper()}{line[1:]}.\n"]


def _scored(score: float, met: bool) -> str:
    return f"{score:.4f}" if met else f"conditions not met, short by {-score:.4f}"


def _sweep_inputs(run: Run) -> dict[str, Any]:
    """Return all that decides the choice of α and β, as the sweep's manifest records it."""
    return _candidates(run).inputs(validation_of(run))


def recorded_points(recipe: Recipe) -> Any:
    """Return the points of a recipe with a choice, as the sweep's manifest records them."""
    search = _search(recipe)
    return search.describe() if search else [point.values for point in recipe.points]


def _search(recipe: Recipe) -> StrengthSearch | None:
    """Return the search for alpha and beta; None where the recipe gives both."""
    if not recipe.is_searched:
        return None
    alphas, betas = (None if values is None else tuple(values) for values in (recipe.alphas, recipe.betas))
    return StrengthSearch(alphas, betas, tuple(recipe.filters))


def _candidates(run: Run) -> Candidates:
    """Return the points of a run, each the target in memory with its weights rewritten."""
    target = LoadedTarget.of(run)

    def load(values: Values | None) -> Any:
        terms = run_terms(run, Strengths.of(values or {}))
        return target.merged(terms if values is not None else [replace(term, weight=0.0) for term in terms])

    vectors: Mapping[str, Path] = {name: run.vector_folder(name) for name in run.recipe.vector_names}
    return Candidates(
        [point.values for point in run.recipe.points],
        load=load,
        made_of={
            "vectors": {name: (load_manifest(path) or {}).get("files") for name, path in vectors.items()},
            **filter_identity(run),
            **merge_identity(run),
        },
        known=_known(run),
        search=_search(run.recipe),
        release=target.close,
        remedies=remedies_of(run),
    )


def remedies_of(run: Run) -> list[str]:
    """Return what the recipe can change where no point both forgets and keeps."""
    remedies = [] if run.recipe.vector.mode == "full" else ["vector.mode full"]
    if run.scope.start == "prior":
        remedies.append("a prior that answers such questions better")
    return [*remedies, "more retain rows" if run.recipe.retain else "rows to keep (retain.data)"]


def _known(run: Run) -> dict[str, Path]:
    """Return the folder of the target's scores if the check before the fits has scored the target as points are."""
    folder = scores_folder(run, "target", "validation")
    alike = run.recipe.merge.dtype == "same"
    return {TARGET: folder} if alike and (folder / REPORT_FILE).is_file() else {}
