"""The merge of a run: the vectors of this request and of earlier ones, at the strengths that were given or chosen.

Candidates of a choice are merged in memory (`LoadedTarget`): one loaded target gets the weights that the merge would
store. A candidate costs one evaluation and one reading of target and vectors, and no model is written. Its scores are
those of the merged model, since weights are rounded alike (with merge.as adapter, they are not rounded). Each candidate
is made from the target's files, never on top of the one before.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.budget.plan import StageCost
from msa_lite.budget.speed import Machine
from msa_lite.evals.engine.models import load_model
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.models.devices import free_memory
from msa_lite.io.models.places import find_places
from msa_lite.io.weights.checkpoint import TensorEntry
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.io.weights.matching import find_name
from msa_lite.merger import (
    Merged,
    MergedAdapter,
    OnDevice,
    OpenMerge,
    Precision,
    Term,
    as_tensor,
    hash_vector,
    merge_terms,
    merge_terms_to_adapter,
    open_merge,
)
from msa_lite.merger.checks.inputs import find_inputs
from msa_lite.pipeline.prepare.earlier import EarlierRun, earlier_terms, own_terms
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.stages.costs import merge_cost, trained_weights
from msa_lite.pipeline.stages.facts import Facts
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.recipe import Recipe
from msa_lite.strengths import Strengths

logger = logging.getLogger(__name__)

Terms = Sequence[Term[Path]]
"""The folders of vectors, with their weights."""


def merge_stage(context: Context, terms: Callable[[], Terms], needs: Sequence[str]) -> Stage:
    """Return the stage that writes the unlearned model. terms: returns the vectors with their weights, once chosen."""
    return Stage(
        "merge",
        "merge",
        context.scope.folder / context.recipe.merge.form,
        lambda progress: merge_vectors(context.run, terms(), progress),
        needs=needs,
        inputs=lambda: merge_inputs(context.run, terms()),
        cost=partial(_merge_cost, context.recipe),
        says="the vectors are folded into the target, which gives the unlearned model",
    )


def _merge_cost(recipe: Recipe, facts: Facts, machine: Machine) -> list[StageCost]:
    target, adapter = facts.shapes["target"], 4 * trained_weights(recipe, facts.shapes["prior"])
    width = {"same": target.width, "float32": 4.0}.get(recipe.merge.dtype, 2.0)
    is_model = recipe.merge.form == "model"
    size = int(width * target.weights) if is_model else adapter * len(recipe.vector_names)
    return [merge_cost("the merge", target, machine, {"unlearned model": size})]


def run_terms(run: Run, strengths: Strengths) -> list[Term[Path]]:
    """Return the vectors of the run, and of the earlier ones, with their weights."""
    return point_terms(run.folder, run.recipe, run.earlier, strengths)


def point_terms(folder: Path, recipe: Recipe, earlier: Sequence[EarlierRun], strengths: Strengths) -> list[Term[Path]]:
    """Return the vectors in a run's folder, and those of earlier runs, with their weights at a point."""
    return [*own_terms(recipe, folder, strengths), *earlier_terms(earlier)]


def merge_vectors(run: Run, terms: Terms, progress: Progress) -> Merged | MergedAdapter:
    """Write the unlearned model, or one adapter on the target where the recipe asks for that."""
    if run.recipe.merge.form == "adapter":
        target, folder = run.sources["target"], run.folder / "adapter"
        return merge_terms_to_adapter(
            target,
            folder,
            _open_terms(terms),
            run.sources["prior"],
            replace=True,
            compare=_own_folders(run, terms),
            progress=progress,
        )
    return _merge_model(run, run.folder / "model", terms, progress, _own_folders(run, terms))


def merge_candidate(run: Run, terms: Terms) -> Any:
    """Return the merged model, loaded from a folder that is removed again.

    Processes that share the run's folder take turns.
    """
    from filelock import FileLock

    folder = run.folder / "candidate"
    with FileLock(run.folder / ".candidate.lock"):
        shutil.rmtree(folder, ignore_errors=True)  # what a kill may have left
        _merge_model(run, folder, terms, silent, compare=())
        try:
            return load_model(folder)
        finally:
            shutil.rmtree(folder)


def merge_inputs(run: Run, terms: Terms) -> dict[str, Any]:
    """Return all that decides the unlearned model, as its manifest records it."""
    form = run.recipe.merge.form
    options = {"max_rank": None} if form == "adapter" else merge_precision(run.recipe).record
    sources, opened = run.sources, _open_terms(terms)
    return find_inputs(run.folder / form, form, sources["target"], opened, sources["prior"], options, True).record


def merge_identity(run: Run) -> dict[str, Any]:
    """Return all that decides a merge besides its vectors and their weights, for a manifest."""
    models = {name: run.sources[name].identity() for name in ("target", "prior")}
    settings = run.recipe.merge.model_dump(exclude={"form", "filter", "keep_moments"})  # they decide no weight
    identity = models | {"merge": settings, "seed": run.recipe.seed}
    earlier = sorted([hash_vector(term.vector), term.weight] for term in earlier_terms(run.earlier))
    return identity | ({"earlier": earlier} if earlier else {})


def merge_precision(recipe: Recipe) -> Precision:
    """Return the dtype and rounding that a recipe asks for."""
    return Precision(recipe.merge.dtype, recipe.merge.rounding, recipe.seed)


def _merge_model(run: Run, folder: Path, terms: Terms, progress: Progress, compare: Collection[Path]) -> Merged:
    return merge_terms(
        run.sources["target"],
        folder,
        _open_terms(terms),
        run.sources["prior"],
        merge_precision(run.recipe),
        replace=True,
        compare=compare,
        progress=progress,
    )


def _own_folders(run: Run, terms: Terms) -> list[Path]:
    """Return the folders of the run's own vectors: what earlier requests have in common was told by their runs."""
    theirs = {term.vector for term in earlier_terms(run.earlier)}
    return [term.vector for term in terms if term.vector not in theirs]


def _open_terms(terms: Terms) -> list[Term[Source]]:
    """Return the terms with their vectors as sources; those of weight 0, which need not exist, are left out."""
    return [term.with_vector(fetch(str(term.vector))) for term in terms if term.weight]


class LoadedTarget:
    """A target in memory, from the first call of `merged` on."""

    def __init__(self, target: Source, prior: Source, precision: Precision, merge_anew: Callable[[Terms], Any]) -> None:
        """merge_anew: returns the merged model of some terms where the loaded one cannot be rewritten."""
        self._target, self._prior, self._precision, self._merge_anew = target, prior, precision, merge_anew
        self._model: Any = None
        self._weights: dict[str, Any] = {}  # of tensors that were rewritten, as matrices, by their names in the files
        self._by_disk = False  # because the model does not hold them as they are stored
        self._merges: dict[tuple[tuple[str, Path], ...], OpenMerge] = {}  # the latest one, by its vectors
        self._last: OpenMerge | None = None
        self._on_device: OnDevice | None = None  # where the model is on a GPU

    @classmethod
    def of(cls, run: Run) -> LoadedTarget:
        """Return the target of a run, which merges to the disk where it cannot be rewritten."""
        target, prior = run.sources["target"], run.sources["prior"]
        return cls(target, prior, merge_precision(run.recipe), lambda terms: merge_candidate(run, terms))

    def merged(self, terms: Terms) -> Any:
        """Return the model that the merge of these terms would write; it is good until the next call."""
        merge = self._open(terms)
        if not self._by_disk:
            dtype = self._precision.dtype
            stored = None if dtype == "same" else dtype  # as the merged model would be loaded
            if self._model is None:
                self._model = load_model(self._target.folder, dtype=stored)
                self._on_device = OnDevice(self._model.device) if self._model.device.type == "cuda" else None
            self._by_disk = not add_weights(self._weights, self._model, merge)
        if self._by_disk:
            self._model, self._weights = None, {}  # the memory is for the merged one
            free_memory()
            return self._merge_anew(terms)
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
            vectors = {name: fetch(str(folder)) for name, folder in key}
            self._merges = {key: open_merge(self._target, vectors, self._prior, self._precision)}
        return self._merges[key]

    def _put(self, name: str, rows: slice, values: Any) -> None:
        self._weights[name][rows].copy_(as_tensor(values) if isinstance(values, np.ndarray) else values)


def add_weights(weights: dict[str, Any], model: Any, merge: OpenMerge) -> bool:
    """Add the loaded target's weights that a merge rewrites, as matrices, by their names in its files.

    Weights that are there already stay. Loading rearranges some families: experts that files hold one by one are parts
    of one tensor. Return False, with a warning, where the model holds the new ones in no part of its own.
    """
    state: Mapping[str, Any] = model.state_dict()
    entries = {name: entry for name, entry in merge.rewritten.items() if name not in weights}
    new = {name: _find(state, name, model.base_model_prefix, entry) for name, entry in entries.items()}
    if any(weight is None for weight in new.values()):
        new |= _find_parts(model, {name: entries[name] for name, weight in new.items() if weight is None})
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
        "%s: the loaded model holds this tensor in another form than its file, so strengths cannot be set in memory; a "
        "run merges each candidate to the disk, scores it and removes it",
        min(wrong),
    )
    return False


def _find_parts(model: Any, entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the parts of a model's weights that hold these tensors of its files, as matrices that can be written to.

    None for a tensor without such a part.
    """
    held = {path: weight for path, weight in model.named_parameters() if weight.dim() in (2, 3)}
    counts = {path: len(weight) if weight.dim() == 3 else 0 for path, weight in held.items()}
    places, parts = find_places(model, counts, entries), dict[str, Any].fromkeys(entries)
    for name, ([place, *others], _) in places.items():
        weight = held[place.parameter].detach()
        if others:  # a tensor of three dimensions, of whole matrices in their order
            part = weight.view(-1, weight.shape[-1])
        else:
            matrix = weight[place.number] if weight.dim() == 3 else weight
            first, last = (round(share * len(matrix)) for share in place.rows)
            part = matrix[first:last]
        is_same = not place.is_turned and tuple(part.shape) == entries[name].matrix_shape
        parts[name] = part if is_same else None
    return parts


def _find(state: Mapping[str, Any], name: str, prefix: str, entry: TensorEntry) -> Any:
    """Return the tensor of a file's entry in a model's state, as a matrix; None where there is none of its shape."""
    weight = state.get(find_name(name, state) or f"{prefix}.{name}")
    return weight.view(entry.matrix_shape) if weight is not None and tuple(weight.shape) == entry.shape else None
