"""Candidates to choose from, scored by one process or by several that meet in a folder.

Whoever makes the choice opens the work: it writes down what is to be scored, and under which inputs. Any process that
computes the same inputs may help. A candidate is claimed by a lock, which the system releases when its holder is
killed, and is done when its report is there; nobody waits for anybody but the one who chooses.
"""

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

from msa_lite.choose.search import StrengthSearch
from msa_lite.choose.validation import Validation
from msa_lite.errors import NotFiniteError
from msa_lite.io.files import digest, write_json
from msa_lite.io.seal import MANIFEST
from msa_lite.report.reports import REPORT_FILE

logger = logging.getLogger(__name__)

TARGET = "target"  # what the candidates are held against; scored beside them
WORK = "work.json"
_LOCKS = ".locks"

Values = Mapping[str, float | int | str]
"""What tells a candidate from the others: {"alpha": 0.5, "beta": 1.0}."""


@dataclass(frozen=True)
class Candidates:
    """What there is to choose from, and how to get at it.

    values: one a candidate. load: the model of one, or, for None, the target; ready to be scored. made_of: what the
    models are made of, JSON-able. known: folders with the records and reports of candidates (or `TARGET`) by name.
    refine: how many times points around the best are tried as well (`grid.refined`). search: what finds the values, in
    the place of a list of them.
    """

    values: Sequence[Values]
    load: Callable[[Values | None], Any]
    made_of: Any
    known: Mapping[str, Path] = field(default_factory=dict)
    refine: int = 0
    search: StrengthSearch | None = None

    def inputs(self, validation: Validation) -> dict[str, Any]:
        """What decides the choice, for a manifest."""
        candidates = self.search.describe() if self.search else [dict(values) for values in self.values]
        choice = {"candidates": candidates, "refine": self.refine}
        return choice | validation.describe_rule() | self.scored_by(validation)

    def scored_by(self, validation: Validation) -> dict[str, Any]:
        """What decides the scores of any candidate: they hold for other grids and rules as well."""
        return {"made_of": self.made_of, **validation.describe()}


def candidate_name(values: Values) -> str:
    """The folder of a candidate: `alpha-0.5_beta-1`; no two candidates share one."""
    return "_".join(f"{key}-{v if isinstance(v, str) else format(v, '.12g')}" for key, v in values.items())


@dataclass(frozen=True)
class State:
    """How far a choice is. asked: candidates to score by name, None for the target; done: whether all are scored."""

    asked: Mapping[str, Values | None]
    done: bool


@dataclass(frozen=True)
class SharedWork:
    """Candidates that are scored into a folder, by this process and by others that compute the same key."""

    folder: Path
    candidates: Candidates
    validation: Validation

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """What decides the choice, as of the first call: the tokens of all rows are hashed for it."""
        return self.candidates.inputs(self.validation)

    @cached_property
    def key(self) -> str:
        """Hash of the inputs."""
        return digest(self.inputs)

    @property
    def is_open(self) -> bool:
        """Whether there is something to be scored here, under whatever inputs."""
        return (self.folder / WORK).is_file()

    def open(self, asked: Sequence[Values], done: bool = False) -> None:
        """Write down what is to be scored, and whether that is all."""
        values = {TARGET: None} | {candidate_name(values): dict(values) for values in asked}
        for name, known in self.candidates.known.items():
            if name in values and self.missing([name]):
                copy = self.folder / f"{name}.tmp"  # whole or not at all; what a kill leaves is removed by the next run
                shutil.copytree(known, copy, ignore=shutil.ignore_patterns(MANIFEST), dirs_exist_ok=True)
                shutil.rmtree(self.folder / name, ignore_errors=True)
                copy.rename(self.folder / name)
        (self.folder / _LOCKS).mkdir(exist_ok=True)
        write_json(self.folder / WORK, {"key": self.key, "asked": values, "done": done})

    def close(self, names: Collection[str]) -> None:
        """Remove what was needed meanwhile, and candidates of another choice that a stop has left: all but `names`."""
        (self.folder / WORK).unlink()
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in names:
                shutil.rmtree(path)

    def state(self) -> State | None:
        """What is to be scored, and whether that is all; None while no work with these inputs is open."""
        try:
            work = json.loads((self.folder / WORK).read_text("utf-8"))
            return State(work["asked"], work["done"]) if work["key"] == self.key else None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):  # none, or a damaged one
            return None

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of the candidates that have no report yet."""
        return [name for name in names if not (self.folder / name / REPORT_FILE).is_file()]

    def score(self, asked: Mapping[str, Values | None], after: Callable[[], None] = lambda: None) -> None:
        """Score what is missing and nobody else has claimed, one after the other; `after` is called after each.

        Leaves nothing behind where the work was closed meanwhile.
        """
        from filelock import FileLock, Timeout

        for name, values in asked.items():
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
            shutil.rmtree(self.folder / _LOCKS, ignore_errors=True)  # which the lock has made, with the folder
            with suppress(OSError):  # it has not got its name yet
                self.folder.rmdir()

    def _score(self, name: str, values: Values | None) -> None:
        folder = self.folder / name
        logger.info("scoring %s in process %d", name, os.getpid())
        try:
            about = {"candidate": values or TARGET}
            self.validation.score_into(folder, partial(self.candidates.load, values), about, whole=values is None)
        except NotFiniteError as error:
            if values is None:  # without the target there is nothing to hold candidates against
                raise
            logger.warning("%s: %s; it is left out of the choice", name, error)
            self.validation.write_broken(folder, str(error))
