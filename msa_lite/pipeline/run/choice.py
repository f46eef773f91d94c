"""Choose the strengths (α, β): each point is tried on one loaded target, and only the chosen one is merged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.choose.candidates import TARGET, Candidates, Points, Values
from msa_lite.choose.choice import Choice, help_choose
from msa_lite.choose.rules import Rank
from msa_lite.choose.search import StrengthSearch
from msa_lite.choose.validation import Validation
from msa_lite.errors import UsageError
from msa_lite.evals.models import load_model
from msa_lite.io.console.progress import Progress, announce
from msa_lite.io.files.writing import json_form
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.launch.crew import Crew
from msa_lite.io.models.devices import free_memory
from msa_lite.io.weights.checkpoint import TensorEntry
from msa_lite.io.weights.hub import fetch
from msa_lite.merger import Merged, MergedAdapter, OnDevice, OpenMerge, Term, as_tensor, open_merge
from msa_lite.pipeline.prepare.earlier import earlier_terms
from msa_lite.pipeline.prepare.run import Run, RunPlan, check_learns
from msa_lite.pipeline.run.folder import claimed
from msa_lite.pipeline.run.knowledge import check_knowledge, probe_rows
from msa_lite.pipeline.run.report import drop_report
from msa_lite.pipeline.run.scores import (
    Terms,
    choose_candidate,
    evaluate_before_fits,
    evaluate_merged,
    evaluate_references,
    merge_candidate,
    merge_identity,
    merge_precision,
    merge_vectors,
    validation_folder,
    validation_of,
)
from msa_lite.pipeline.run.steps import merged_steps
from msa_lite.pipeline.run.vectors import check_processes, fit_vectors
from msa_lite.pipeline.stages.check import check_memory
from msa_lite.recipe import Recipe
from msa_lite.report import REPORT_FILE, Report, load_report
from msa_lite.report.choice import candidate_name, score_heading, shown_score
from msa_lite.strengths import Strengths

logger = logging.getLogger(__name__)


class LoadedTarget:
    """The run's target in memory, from the first call of `merged` on."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._model: Any = None
        self._weights: dict[str, Any] = {}  # of tensors that were rewritten, as matrices, by their names in the files
        self._by_disk = False  # because the model does not hold them as they are stored
        self._merges: dict[tuple[tuple[str, Path], ...], OpenMerge] = {}  # the latest one, by its vectors
        self._last: OpenMerge | None = None
        self._on_device: OnDevice | None = None  # where the model is on a GPU

    def merged(self, terms: Terms) -> Any:
        """Return the model that the merge of these terms would write; it is good until the next call."""
        merge = self._open(terms)
        if not self._by_disk:
            dtype = self._run.recipe.merge.dtype
            stored = None if dtype == "same" else dtype  # as the merged model would be loaded
            if self._model is None:
                self._model = load_model(self._run.sources["target"].folder, dtype=stored)
                self._on_device = OnDevice(self._model.device) if self._model.device.type == "cuda" else None
            self._by_disk = not add_weights(self._weights, self._model, merge)
        if self._by_disk:
            self._model, self._weights = None, {}  # the memory is for the merged one
            free_memory()
            return merge_candidate(self._run, terms)
        if self._last is not None and not self._last.rewritten.keys() <= merge.rewritten.keys():
            self._last.restore(self._put)
        self._last = merge
        merge.fill({term.name: term.weight for term in terms}, self._put, self._on_device)
        return self._model

    def close(self) -> None:
        """Free the memory of the model and its vectors; the next call of `merged` loads them again."""
        self._model, self._weights, self._merges, self._last = None, {}, {}, None
        free_memory()

    def _open(self, terms: Terms) -> OpenMerge:
        key = tuple((term.name, term.vector) for term in terms)
        if key not in self._merges:
            sources, vectors = self._run.sources, {name: fetch(str(folder)) for name, folder in key}
            self._merges = {key: open_merge(sources["target"], vectors, sources["prior"], merge_precision(self._run))}
        return self._merges[key]

    def _put(self, name: str, rows: slice, values: Any) -> None:
        self._weights[name][rows].copy_(as_tensor(values) if isinstance(values, np.ndarray) else values)


def add_weights(weights: dict[str, Any], model: Any, merge: OpenMerge) -> bool:
    """Add the loaded target's weights that a merge rewrites, as matrices, by their names in its files.

    Weights that are there already stay. Return False, with a warning, where the model does not hold the new ones as
    they are stored: loading rearranges some families (experts stacked into one tensor).
    """
    state: Mapping[str, Any] = model.state_dict()
    entries = {name: entry for name, entry in merge.rewritten.items() if name not in weights}
    new = {name: _find(state, name, model.base_model_prefix, entry) for name, entry in entries.items()}
    wrong = {name for name, weight in new.items() if weight is None}

    def compare(name: str, rows: slice, values: np.ndarray) -> None:
        if name in new and name not in wrong and not new[name][rows].equal(as_tensor(values).to(new[name])):
            wrong.add(name)

    if new and not wrong:
        merge.restore(compare)
    if not wrong:
        weights |= new
        return True
    logger.warning(
        "%s: the loaded model holds this tensor in another form than its file, so each candidate is merged to the "
        "disk, scored and removed",
        min(wrong),
    )
    return False


def _find(state: Mapping[str, Any], name: str, prefix: str, entry: TensorEntry) -> Any:
    """Return the tensor of a file's entry in a model's state, as a matrix; None where there is none of its shape."""
    weight = state.get(name, state.get(f"{prefix}.{name}"))
    return weight.view(entry.matrix_shape) if weight is not None and tuple(weight.shape) == entry.shape else None


CHOOSE = "choose"  # the order to score points
_APART = 0.02  # difference of a score before and after the merge that is worth a warning


@dataclass(frozen=True)
class Swept:
    """The point that is merged, with the choice that led to it."""

    strengths: Strengths
    """The point."""
    choice: Choice | None = None
    """The choice among several points; None where the recipe names one."""

    @property
    def doubts(self) -> Sequence[str]:
        """Return the reasons to doubt the choice."""
        return self.choice.doubts if self.choice else []


@dataclass(frozen=True, repr=False)
class SweepResult:
    """The result of a sweep."""

    folder: Path
    """The run's folder."""
    choice: Choice
    """The choice of the point, with its reasons and the metrics of all points."""
    merged: Merged | MergedAdapter
    """The merge of the chosen point."""
    before: Report
    """The scores of the chosen point in memory, on validation rows."""
    after: Report
    """The scores of the merged model, on the same rows."""
    notes: Sequence[str]
    """A sentence that compares the two."""

    def __repr__(self) -> str:
        points = f"{len(self.choice.scores)} points"
        return f"SweepResult({self.folder}: {self.strengths} of {points}, {self.choice.rule})"

    @property
    def strengths(self) -> Strengths:
        """Return the chosen point."""
        return Strengths.of(self.choice.values)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        choice = self.choice
        return {
            "output": str(self.folder),
            **choice.values,
            "rule": choice.rule,
            "score": choice.score,
            "scores": [dict(line) for line in choice.scores],
            "doubts": list(choice.doubts),
            "model": json_form(self.merged),
            "validation": {"in_memory": self.before.values(), "merged": self.after.values()},
        }


def _check(run: Run) -> None:
    check_strengths(run)
    check_memory(run)


def sweep_plan(recipe: Recipe, plan: RunPlan, progress: Progress, crew: Crew) -> SweepResult:
    """Fit the vectors of a recipe, score its points, merge the best. Raise UsageError where there is only one point."""
    check_sweep(recipe)
    with claimed(recipe, plan, progress, _check, crew=crew) as run:
        announce(progress, merged_steps(run))
        check_knowledge(run, progress=progress)
        evaluate_before_fits(run, progress)
        fit_vectors(run, run.vector_names, progress)
        swept = choose_strengths(run, progress)
        assert swept.choice is not None, "there are several points"
        former = load_manifest(run.folder / run.recipe.merge.form)
        merged = merge_chosen(run, swept, progress)
        if load_manifest(merged.folder) != former:
            drop_report(run.folder)  # it is that of another model
        notes = rescore(run, swept, merged, progress)
        out = run.folder / "sweep"
        before = load_report(out / candidate_name(swept.strengths.values))
        after = load_report(validation_folder(run, "unlearned"))
    return SweepResult(run.folder, swept.choice, merged, before, after, notes)


def check_sweep(recipe: Recipe) -> None:
    """Raise UsageError for a recipe with a single point."""
    if not recipe.has_choice:
        raise UsageError(
            "forget.alpha, retain.beta: one point, so there is nothing to sweep; give a list of values, or auto"
        )


def help_sweep(run: Run) -> None:
    """Score points of a sweep that the first process makes, until it has its choice."""
    load, release = _open_points(run)

    def make() -> tuple[Candidates, Validation]:
        return _candidates(run, load, release), validation_of(run)

    help_choose(make, run.folder / "sweep")


def check_strengths(run: Run) -> None:
    """Raise UsageError, before any work, if a vector would learn nothing, or the probe or 4-bit trial cannot work."""
    check_learns(run, run.vector_names)
    check_processes(run)
    if run.recipe.probe.against:  # the one comparison that can be at fault
        probe_rows(run)
    if run.recipe.select.four_bit and run.recipe.vector.mode == "full":
        raise UsageError("select.four_bit: only adapters can be tried on a 4-bit target, not vector.mode full")


def choose_strengths(run: Run, progress: Progress) -> Swept:
    """Return the recipe's one point, or the best of several on validation rows."""
    if run.validation is None:
        return Swept(run.recipe.points[0])
    evaluate_references(run, progress)  # by all processes, before they turn to the points
    with run.crew.helped(CHOOSE):
        choice = choose_candidate(run, _candidates(run, *_open_points(run)), "alpha and beta", progress)
    return Swept(Strengths.of(choice.values), choice)


def merge_chosen(run: Run, swept: Swept, progress: Progress) -> Merged | MergedAdapter:
    """Write the unlearned model of the chosen point."""
    return merge_vectors(run, run_terms(run, swept.strengths), progress)


def run_terms(run: Run, strengths: Strengths) -> list[Term[Path]]:
    """Return the vectors of the run, and of the earlier ones, with their weights."""
    own = [Term(name, run.vector_folder(name), strengths.weights[name]) for name in run.vector_names]
    return [*own, *earlier_terms(run.earlier)]


def rescore(run: Run, swept: Swept, merged: Merged | MergedAdapter, progress: Progress) -> list[str]:
    """Score the chosen point again, merged, on the validation rows. Return a sentence on the two figures."""
    if swept.choice is None:
        return []
    scores = evaluate_merged(run, merged, progress)
    validation, place = validation_of(run), run.folder / "sweep"
    chosen = place / candidate_name(swept.choice.values)
    score, met = swept.choice.score, swept.choice.met
    rank = validation.rank(scores, place / TARGET, rounded=(chosen, place / TARGET))
    if run.recipe.select.under:  # both as they are: the choice has the worst score of several forms
        plain = validation.rank(chosen, place / TARGET)
        assert isinstance(plain, Rank), "a broken candidate is never chosen"
        score, met = plain.value, plain.met
    rule = swept.choice.rule
    in_memory = _scored(rule, score, met)
    after = f"broken ({rank})" if isinstance(rank, str) else _scored(rule, rank.value, rank.met)
    name = score_heading(rule)[:-2]
    line = f"{name}, the chosen point in memory: {in_memory}; as merged model: {after}"
    if isinstance(rank, str) or abs(score - rank.value) > _APART or rank.met != met:
        logger.warning("%s; its weights are rounded, or the points were tried in 4-bit", line)
    return [f"{line[0].upper()}{line[1:]}.\n"]


def _scored(rule: str, score: float, met: bool) -> str:
    number = shown_score(rule, score, met)
    return f"conditions not met, short by {-score:.4f}" if number is None else f"{number:.4f}"


def _open_points(run: Run) -> tuple[Callable[[Values | None], Any], Callable[[], None]]:
    """Return a function that gives the model of a point, or, for None, the target; and one that frees its memory."""
    if run.recipe.select.four_bit:
        earlier = earlier_terms(run.earlier)
        adapters = {name: run.vector_folder(name) for name in run.vector_names}
        adapters |= {term.name: term.vector for term in earlier}
        points = Points(run.sources["target"].folder, adapters, {term.name: term.weight for term in earlier})
        return points, points.close
    target = LoadedTarget(run)

    def load(values: Values | None) -> Any:
        terms = run_terms(run, Strengths.of(values or {}))
        return target.merged(terms if values is not None else [replace(term, weight=0.0) for term in terms])

    return load, target.close


def sweep_inputs(run: Run) -> dict[str, Any]:
    """Return all that decides the choice of α and β, as the sweep's manifest records it."""
    return _candidates(run, *_open_points(run)).inputs(validation_of(run))


def recorded_points(recipe: Recipe) -> Any:
    """Return the points of a recipe with a choice, as the sweep's manifest records them."""
    search = _search(recipe)
    return search.describe() if search else [point.values for point in recipe.points]


def _search(recipe: Recipe) -> StrengthSearch | None:
    """Return the search for alpha and beta; None where the recipe gives both."""
    if not recipe.is_searched:
        return None
    alphas, betas = (None if values is None else tuple(values) for values in (recipe.alphas, recipe.betas))
    return StrengthSearch(alphas, betas)


def _candidates(run: Run, load: Callable[[Values | None], Any], release: Callable[[], None]) -> Candidates:
    vectors: Mapping[str, Path] = {name: run.vector_folder(name) for name in run.vector_names}
    return Candidates(
        [point.values for point in run.recipe.points],
        load=load,
        made_of={
            "vectors": {name: (load_manifest(path) or {}).get("files") for name, path in vectors.items()},
            "four_bit": run.recipe.select.four_bit,
            **merge_identity(run),
        },
        known=_known(run),
        refine=run.recipe.select.refine,
        search=_search(run.recipe),
        release=release,
        remedies=remedies_of(run),
        under=run.recipe.select.under,
    )


def remedies_of(run: Run) -> list[str]:
    """Return what the recipe can change where no point both forgets and keeps."""
    remedies = [] if run.recipe.vector.mode == "full" else ["vector.mode full"]
    if run.plan.start == "prior":
        remedies.append("a prior that answers such questions better")
    return [*remedies, "more retain rows" if run.recipe.retain else "rows to keep (retain.data)"]


def _known(run: Run) -> dict[str, Path]:
    """Return the folder of the target's scores if the check before the fits has scored the target as points are."""
    folder = validation_folder(run, "target")
    alike = run.recipe.merge.dtype == "same" and not run.recipe.select.four_bit and not run.recipe.select.under
    return {TARGET: folder} if alike and (folder / REPORT_FILE).is_file() else {}
