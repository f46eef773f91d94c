"""Score the candidates of a choice, in one process or several."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from msa_lite.choose.rules import Metrics, Rank
from msa_lite.choose.search import StrengthSearch
from msa_lite.choose.validation import Validation
from msa_lite.errors import NotFiniteError
from msa_lite.io.files.writing import digest, write_json
from msa_lite.io.finished.seal import MANIFEST
from msa_lite.report.choice import Values, candidate_name
from msa_lite.report.reports import REPORT_FILE, load_report

logger = logging.getLogger(__name__)


TARGET = "target"  # the folder of the model that candidates are compared with; scored like them
WORK = "work.json"
_LOCKS = ".locks"


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
class SharedWork:
    """Candidates that this process and others with the same key score into a folder."""

    folder: Path
    candidates: Candidates
    validation: Validation
    reported: set[str] = field(default_factory=set)
    """The names of the candidates that `Candidates.tell` was called with."""

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """Return all that decides the choice, computed once: it hashes the tokens of all rows."""
        return self.candidates.inputs(self.validation)

    @cached_property
    def key(self) -> str:
        """Return the hash of the inputs."""
        return digest(self.inputs)

    @property
    def is_open(self) -> bool:
        """Check whether the folder has open work, with whatever inputs."""
        return (self.folder / WORK).is_file()

    def open(self, candidates: Sequence[Values]) -> None:
        """Write down which candidates to score."""
        values = {TARGET: None} | {candidate_name(values): dict(values) for values in candidates}
        for name, known in self.candidates.known.items():
            if name in values and self.missing([name]):
                copy = self.folder / f"{name}.tmp"  # whole or not at all; what a kill leaves is removed by the next run
                shutil.copytree(known, copy, ignore=shutil.ignore_patterns(MANIFEST), dirs_exist_ok=True)
                shutil.rmtree(self.folder / name, ignore_errors=True)
                copy.rename(self.folder / name)
        (self.folder / _LOCKS).mkdir(exist_ok=True)
        write_json(self.folder / WORK, {"key": self.key, "asked": values})

    def close(self, names: Collection[str]) -> None:
        """Remove working files, and candidates that a stopped choice has left: all folders but `names`."""
        (self.folder / WORK).unlink()
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in names:
                shutil.rmtree(path)

    def todo(self) -> Mapping[str, Values | None] | None:
        """Load the candidates to score, by name, None for the target; None while no work with these inputs is open."""
        try:
            work = json.loads((self.folder / WORK).read_text("utf-8"))
            return dict(work["asked"]) if work["key"] == self.key else None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):  # none, or a damaged one
            return None

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
        """Score the candidates that are missing and not claimed by others, and call `after` after each.

        Leaves nothing behind if the work was closed in the meantime.
        """
        from filelock import FileLock, Timeout

        for name, values in candidates.items():
            if not self.missing([name]):
                continue
            try:
                with FileLock(self.folder / _LOCKS / name, timeout=0):
                    if not self.is_open:
                        break
                    if self.missing([name]):
                        self._score(name, values)
                        after()
            except Timeout:
                continue
        if not self.is_open:
            shutil.rmtree(self.folder / _LOCKS, ignore_errors=True)  # FileLock made it again, with the folder
            with suppress(OSError):  # not empty: it has not been renamed yet
                self.folder.rmdir()

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
