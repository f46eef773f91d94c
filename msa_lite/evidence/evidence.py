"""Define a kind of evidence: what it needs, what it observes on the models of a run, what it concludes from that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from msa_lite.errors import UsageError, nearest
from msa_lite.evals.benchmark import Benchmark, Item, Record
from msa_lite.evals.evaluation import NO_JUDGE
from msa_lite.evals.judge import JudgeSettings
from msa_lite.evidence_names import EVIDENCE
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.weights.hub import Source
from msa_lite.report.evidence import EvidenceFinding

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
    judge: JudgeSettings = NO_JUDGE
    """The judge of answers, for evidence that asks one."""
    seed: int = 0

    @property
    def forget(self) -> Sequence[Item]:
        """Return the rows to forget."""
        name = self.benchmark.forget_set
        return self.benchmark.sets[name].items if name in self.benchmark.sets else ()

    @property
    def models(self) -> list[str]:
        """Return the names of the models that evidence is about, as far as the run has them."""
        return [name for name in MODELS if name in self.sources]


Observed = Mapping[str, Sequence[Record]]
"""The records of an observation by the name of their file."""


class EvidenceKind(ABC):
    """A kind of evidence."""

    name: ClassVar[str]
    """Its name in `EVIDENCE`, and that of its folder."""
    uses: ClassVar[Collection[str]] = MODELS
    """The models that decide what it observes."""
    loads: ClassVar[int] = 0
    """The models that it loads and runs, as far as a plan counts them."""
    passes: ClassVar[float] = 0.0
    """The forward passes over the forget rows of all of them."""

    def describe(self, scene: Scene) -> dict[str, Any]:
        """Return its settings, JSON-able: all that decides the finding besides models and rows."""
        return {}

    @abstractmethod
    def lacking(self, scene: Scene) -> str:
        """Return why it has to stay undecided on these models and rows, with what to try; "" where nothing is missing.

        Only names of models and rows are looked at, before any work; the unlearned model need not be there yet.
        """

    @abstractmethod
    def observe(self, scene: Scene, progress: Progress = silent) -> Observed:
        """Look at the models; return a record of each row, without any text of the rows."""

    @abstractmethod
    def conclude(self, observed: Observed, scene: Scene) -> EvidenceFinding:
        """Return the finding from the records alone: nothing here runs a model."""


def make_evidence(name: str) -> EvidenceKind:
    """Return a kind of evidence by its name. Raise UsageError for another name."""
    if name not in EVIDENCE:
        raise UsageError(f"no evidence '{name}'{nearest(name, EVIDENCE)}; choose from {', '.join(EVIDENCE)}")
    module, _, kind = EVIDENCE[name].implementation.rpartition(".")
    make: Callable[[], EvidenceKind] = getattr(import_module(module), kind)
    return make()
