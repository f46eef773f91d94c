"""Score the candidates of a choice, each once, into a folder of its own."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.choose.rules import Metrics, Rank
from msa_lite.choose.search import StrengthSearch
from msa_lite.choose.validation import Validation
from msa_lite.errors import NotFiniteError
from msa_lite.io.finished.seal import MANIFEST
from msa_lite.report.run.choice import Values
from msa_lite.report.tables.reports import REPORT_FILE, load_report

logger = logging.getLogger(__name__)


TARGET = "target"  # the folder of the model that candidates are compared with; scored like them


@dataclass(frozen=True)
class Candidates:
    """The candidates to choose from, and how to load their models."""

    values: Sequence[Values]
    """The values of each candidate; unused with a search."""
    load: Callable[[Values | None], Any]
    """Loads a candidate's model, or the target for None, ready to be scored."""
    made_of: Any
    """Identities of the models and vectors that candidates are made from, JSON-able."""
    known: Mapping[str, Path] = field(default_factory=dict)
    """Folders with the records and reports of candidates (or `TARGET`) that are scored already, by name."""
    search: StrengthSearch | None = None
    """The search that finds the values one after the other, in place of a list."""
    release: Callable[[], None] = lambda: None
    """Frees the memory of the loaded models; `load` may be called again."""
    remedies: Sequence[str] = ()
    """What to try in this run where no candidate both forgets and keeps, in words."""
    helped: Callable[[Sequence[Values]], AbstractContextManager[int]] = lambda points: nullcontext(1)
    """Has all n processes of a launch score every n-th of these candidates while the block runs, and gives n."""
    tell: Callable[[Values, Rank | str, Metrics], None] | None = None
    """Called once with each scored candidate, its rank (or why it is broken) and its metrics."""

    def inputs(self, validation: Validation) -> dict[str, Any]:
        """Return all that decides the choice, for a manifest."""
        candidates = self.search.describe() if self.search else [dict(values) for values in self.values]
        return {"candidates": candidates} | validation.describe_rule() | self.scored_by(validation)

    def scored_by(self, validation: Validation) -> dict[str, Any]:
        """Return all that decides the scores of a candidate; they hold for other grids and rules as well."""
        return {"made_of": self.made_of, **validation.describe()}


@dataclass(frozen=True)
class ScoredFolder:
    """The folder that candidates are scored into."""

    folder: Path
    candidates: Candidates
    validation: Validation
    reported: set[str] = field(default_factory=set)
    """The names of the candidates that `Candidates.tell` was called with."""

    def take_known(self, names: Collection[str]) -> None:
        """Copy the records and reports of those that are scored already."""
        for name, known in self.candidates.known.items():
            if name in names and self.missing([name]):
                copy = self.folder / f"{name}.tmp"  # whole or not at all; what a kill leaves is removed by the next run
                shutil.copytree(known, copy, ignore=shutil.ignore_patterns(MANIFEST), dirs_exist_ok=True)
                shutil.rmtree(self.folder / name, ignore_errors=True)
                copy.rename(self.folder / name)

    def keep(self, names: Collection[str]) -> None:
        """Remove candidates that a stopped choice has left: all folders but `names`."""
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in names:
                shutil.rmtree(path)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the names that have no report yet."""
        return [name for name in names if not (self.folder / name / REPORT_FILE).is_file()]

    def tell(self, candidates: Mapping[str, Values | None]) -> None:
        """Tell of the candidates that were scored since the last call."""
        tell = self.candidates.tell
        for name, values in candidates.items():
            if tell and values is not None and name not in self.reported and not self.missing([TARGET, name]):
                self.reported.add(name)
                tell(values, self.rank(name), load_report(self.folder / name).values())

    def rank(self, name: str) -> Rank | str:
        """Return the rank of a candidate or the target, or why it is broken. Raise as `Validation.rank`."""
        return self.validation.rank(self.folder / name, self.folder / TARGET)

    def score(self, candidates: Mapping[str, Values | None], after: Callable[[], None] = lambda: None) -> None:
        """Score the candidates that are missing, by name, None for the target; call `after` after each."""
        for name, values in candidates.items():
            if self.missing([name]):
                self._score(name, values)
                after()

    def _score(self, name: str, values: Values | None) -> None:
        folder = self.folder / name
        logger.info("scoring %s in process %d", name, os.getpid())
        try:
            about, release = {"candidate": values or TARGET}, self.candidates.release
            load = partial(self.candidates.load, values)
            self.validation.score_into(folder, load, about, whole=values is None, release=release)
        except NotFiniteError as error:
            if values is None:  # candidates are compared with the target
                raise
            logger.warning("%s: %s; it is left out of the choice", name, error)
            self.validation.write_broken(folder, str(error))
