"""The merge without a file: what it would store, at any strengths, for a model that is in memory already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from threadpoolctl import threadpool_limits

from msa_lite.io.checkpoint import TensorEntry
from msa_lite.io.hub import Source
from msa_lite.merger.plan import DTYPES, MergePlan, Precision, make_budget, make_plan
from msa_lite.merger.stream import Put, Stream

MAX_MEMORY = "512MB"


@dataclass(frozen=True)
class OpenMerge:
    """A target with its vectors, opened and fitted together; `fill` is called for as many strengths as there are.

    Each time target and vectors are read anew: nothing is ever added to what an earlier call has given.
    """

    plan: MergePlan

    @property
    def rewritten(self) -> dict[str, TensorEntry]:
        """The target's tensors that do not stay as they are, by name: touched by a vector, or stored otherwise."""
        return {name: self.plan.target.tensors[name] for name in self.plan.rewritten}

    def fill(self, alpha: float, beta: float, put: Put) -> None:
        """Hand the rows of every rewritten tensor to `put` as `merge` would store them (`Stream.fill`)."""
        self._fill(replace(self.plan, alpha=alpha, beta=beta), put)

    def restore(self, put: Put) -> None:
        """Hand the target's own rows of every tensor that a vector touches to `put`, as they are stored."""
        self._fill(replace(self.plan, alpha=0.0, beta=0.0, precision=Precision()), put)

    def _fill(self, plan: MergePlan, put: Put) -> None:
        with threadpool_limits(1, user_api="blas"), Stream(plan, make_budget(plan, MAX_MEMORY, None)) as stream:
            stream.fill(put)


def open_merge(
    target: Source, vectors: Mapping[str, Source], prior: Source, dtype: str, rounding: str, seed: int
) -> OpenMerge:
    """Open what `merge` would be given. vectors: by the names "forget" and "retain". Raises as `merge` does."""
    precision = Precision(DTYPES[dtype], rounding == "stochastic", seed)
    plan = make_plan({"target": target, "prior": prior, **vectors}, 1.0, 1.0, precision)
    plan.check_factors()
    return OpenMerge(plan)
