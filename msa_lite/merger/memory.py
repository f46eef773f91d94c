"""Merge into memory: the rows that a merge would store, at any strengths, for a model that is loaded already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from threadpoolctl import threadpool_limits

from msa_lite.io.weights.checkpoint import TensorEntry
from msa_lite.io.weights.hub import Source
from msa_lite.merger.formula import Term
from msa_lite.merger.inputs import group_terms, sum_weights
from msa_lite.merger.on_device import OnDevice
from msa_lite.merger.plan import MergePlan, Precision, make_budget, make_plan
from msa_lite.merger.stream import Put, Stream
from msa_lite.merger.vectors import Vector

MAX_MEMORY = "512MB"


@dataclass(frozen=True)
class OpenMerge:
    """A target with its vectors, opened and checked. `fill` merges them at any strengths, as often as needed.

    Each `fill` reads target and vectors anew: it never adds to the result of an earlier one.
    """

    plan: MergePlan
    """The target with a term for each vector, in the order in which `merge` adds them."""
    names: Mapping[str, tuple[str, ...]]
    """The names of each term's vector, by the first: several where it was given more than once."""

    @property
    def rewritten(self) -> dict[str, TensorEntry]:
        """Return the target's tensors that a vector touches, or that are stored in another dtype, by name."""
        return {name: self.plan.target.tensors[name] for name in self.plan.rewritten}

    def fill(self, weights: Mapping[str, float], put: Put, on_device: OnDevice | None = None) -> None:
        """Hand the rows of every rewritten tensor to `put` as `merge` would store them (`Stream.fill`).

        weights: by the names of the vectors, as they were given to `open_merge`. on_device: makes the rows on a GPU.
        """
        self._fill(replace(self.plan, terms=self._weighted(weights)), put, on_device)

    def restore(self, put: Put) -> None:
        """Hand the target's own rows of every tensor that a vector touches to `put`, as they are stored."""
        self._fill(replace(self.plan, terms=self._weighted({}), precision=Precision()), put)

    def _weighted(self, weights: Mapping[str, float]) -> tuple[Term[Vector], ...]:
        return tuple(
            replace(term, weight=sum_weights(weights.get(name, 0.0) for name in self.names[term.name]))
            for term in self.plan.terms
        )

    def _fill(self, plan: MergePlan, put: Put, on_device: OnDevice | None = None) -> None:
        with threadpool_limits(1, user_api="blas"), Stream(plan, make_budget(plan, MAX_MEMORY, None)) as stream:
            stream.fill(put, on_device)


def open_merge(target: Source, vectors: Mapping[str, Source], prior: Source, precision: Precision) -> OpenMerge:
    """Open the target with vectors by name, such as "forget", "retain", "forget 2". Raise as `merge` does."""
    groups = group_terms([Term(name, vector, 1.0) for name, vector in vectors.items()])
    plan = make_plan(target, [group[0] for group in groups], prior, precision)
    plan.check_factors()
    return OpenMerge(plan, {group[0].name: tuple(term.name for term in group) for group in groups})
