"""Define a kind of evidence: what it needs, and what it finds on the models of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.evals.benchmarks.benchmark import Benchmark, Item, Record
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.weights.hub import Source
from msa_lite.report.run.evidence import EvidenceFinding

MODELS = ("target", "ideal", "unlearned")
"""The models that evidence is about, in the order of tables."""


@dataclass(frozen=True)
class Scene:
    """The models of a run with the rows that they were asked."""

    benchmark: Benchmark
    """The questions, in sets; `forget_set` names the rows to forget."""
    sources: Mapping[str, Source]
    """The models by name: target, prior and ideal where there are such, unlearned once it is merged."""
    scores: Mapping[str, Path] = field(default_factory=dict)
    """The folders with the records of target, unlearned and ideal, by name."""
    seed: int = 0

    @property
    def forget(self) -> Sequence[Item]:
        """Return the rows to forget."""
        name = self.benchmark.forget_set
        return self.benchmark.sets[name].items if name in self.benchmark.sets else ()


class EvidenceKind(ABC):
    """A kind of evidence."""

    name: ClassVar[str]
    """Its name in `EVIDENCE`, and that of its folder."""
    loads: ClassVar[int]
    """The models that it loads and runs, as far as a plan counts them."""
    passes: ClassVar[float]
    """The forward passes over the forget rows of all of them."""

    @abstractmethod
    def describe(self, scene: Scene) -> dict[str, Any]:
        """Return its settings, JSON-able: all that decides the finding besides models and rows."""

    @abstractmethod
    def lacking(self, scene: Scene) -> str:
        """Return why it has to stay undecided on these models and rows, with what to try; "" where nothing is missing.

        Only names of models and rows are looked at, before any work; the unlearned model need not be there yet.
        """

    @abstractmethod
    def find(self, scene: Scene, progress: Progress = silent) -> tuple[EvidenceFinding, Mapping[str, Sequence[Record]]]:
        """Look at the models; return the finding, and by file a record of each row, without any text of the rows."""
