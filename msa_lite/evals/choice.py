"""The choice among candidates (strengths of vectors, epochs of a baseline) by their scores on validation rows."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msa_lite.errors import StageError, join_faults
from msa_lite.evals import selection
from msa_lite.evals.candidates import TARGET, Candidates, Values, Work, candidate_name
from msa_lite.evals.grid import refined
from msa_lite.evals.selection import Metrics, Rank, Rule
from msa_lite.evals.validation import BROKEN, Validation
from msa_lite.io.manifest import is_finished, partial_folder, stage_folder, write_json, write_text
from msa_lite.io.progress import Progress, silent
from msa_lite.report import Report, load_report, write_pictures
from msa_lite.report.points import Candidate, Sweep, points_csv, points_markdown

logger = logging.getLogger(__name__)

CHOICE_FILE = "choice.json"
IDEAL = "ideal"
_POLL = 0.2  # seconds
_PATIENCE = 60.0  # seconds; disks that machines share show what others write only after a while

Check = Callable[[], None]
"""Raises what has ended those who score."""
Crew = Callable[[Path], AbstractContextManager[Check]]
"""Starts others who score what is missing in a folder, in the place of this process, until it has all."""


@dataclass(frozen=True)
class Choice:
    """The chosen candidate with its score, what was chosen by, the score of each in the order tried, reasons to doubt.

    met: whether the chosen meets the rule's conditions. scores: of each its values, "score" (None: broken, and "note"
    says why) and "met".
    """

    values: Values
    score: float
    met: bool
    rule: str
    scores: Sequence[Mapping[str, Any]]
    doubts: Sequence[str]


def choose(
    candidates: Candidates,
    validation: Validation,
    out: Path,
    label: str,
    progress: Progress = silent,
    crew: Crew | None = None,
) -> Choice:
    """Score every candidate on validation rows and choose the best by the rule (ties: the first).

    Holdout rows, if any, say what unseen data scores, and are asked of the target alone unless the rule needs AUCs.
    Writes records and a report per candidate, tables, pictures and choice.json into `out`; candidates that were scored
    before a stop are not scored again. What is broken (outputs that are no numbers, nothing left of what is to be kept)
    is recorded and never chosen. Other processes may help (`help_choose`), or do all of it (`crew`).

    Raises StageError when every candidate is broken.
    """
    inputs = candidates.inputs(validation)
    if not is_finished(out, inputs):
        with stage_folder(out, "sweep", inputs, resumable=True) as folder:
            _choose(Work(folder, candidates, validation), label, progress, crew)
    return load_choice(out)


def _choose(work: Work, label: str, progress: Progress, crew: Crew | None) -> None:
    folder, validation = work.folder, work.validation
    if validation.ideal:
        shutil.copytree(validation.ideal, folder / IDEAL, ignore=_all_but_report, dirs_exist_ok=True)
    asked = list(work.candidates.values)
    work.open(asked)
    with crew(folder) if crew else nullcontext() as check:
        for left in range(work.candidates.refine, -1, -1):
            work.open(asked)
            _score_all(work, asked, label, progress, check)
            ranked = _rank_all(folder, validation, asked)
            if left:
                new = refined(asked, ranked.best)
                logger.info("refining around %s: %d points more", candidate_name(ranked.best), len(new))
                asked += new
        work.open(asked, done=True)
    work.close()
    write_json(folder / CHOICE_FILE, _as_json(ranked.choice(work.candidates)))
    table = load_sweep(folder)
    write_text(folder / "table.md", points_markdown(table))
    write_text(folder / "table.csv", points_csv(table))
    if importlib.util.find_spec("matplotlib"):
        write_pictures(table, folder)
    else:
        logger.info("no pictures of the sweep: pip install 'msa-lite[report]'")


def _all_but_report(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name != "report.json"]


def _score_all(work: Work, asked: Sequence[Values], label: str, progress: Progress, check: Check | None) -> None:
    """Score the target and all candidates, or wait until others have."""
    todo: dict[str, Values | None] = {TARGET: None} | {candidate_name(values): values for values in asked}

    def tell() -> None:
        progress(label, len(todo) - len(work.missing(list(todo))), len(todo))

    while True:
        if check is None:
            work.score(todo, after=tell)
        else:
            check()
        tell()
        if not work.missing(list(todo)):
            return
        time.sleep(_POLL)


def help_choose(make: Callable[[], tuple[Candidates, Validation]], out: Path, opened: bool = False) -> None:
    """Score candidates of a choice that another process makes (`choose` into `out`), until it is made.

    make: computes what that process computes, once its inputs are there. opened: whether that process has opened its
    work by now. Then StageError is raised where this process computes other inputs; else it may be an earlier choice
    that lies open, and a warning is all.
    """
    told, known = False, time.monotonic()
    while True:
        candidates, validation = make()
        work = Work(partial_folder(out), candidates, validation)
        while state := work.state():
            if state.done:
                return
            try:
                work.score(state.asked)
            except OSError:  # all was done meanwhile, and the folder has got its name
                if work.folder.exists():
                    raise
            time.sleep(_POLL)
            known = time.monotonic()
        if is_finished(out, work.inputs):
            return
        if time.monotonic() - known > _PATIENCE:
            fault = (
                f"{out}: this process computes other inputs than the process that chooses; are package versions, and "
                "files at these paths, the same on all machines?"
            )
            if opened:
                raise StageError(fault)
            if work.is_open and not told:
                logger.warning("%s (waiting on, for this may be an earlier choice that was stopped)", fault)
                told = True
        time.sleep(_POLL)


@dataclass(frozen=True)
class _Ranked:
    """Candidates with their ranks, None for those that are broken, which `notes` gives reasons for."""

    asked: Sequence[Values]
    ranks: Mapping[str, Rank | None]
    notes: Mapping[str, str]
    rule: Rule
    reference: Metrics

    @property
    def best(self) -> Values:
        """The candidate of the highest rank, the first of equals."""
        whole = [values for values in self.asked if self._rank(values)]
        if not whole:
            faults = [f"{name}: {note}" for name, note in self.notes.items()]
            raise StageError(
                join_faults("every candidate is broken, so there is none to choose; try gentler ones:", faults)
            )
        return max(whole, key=lambda values: self._rank(values) or Rank(False, 0.0))

    def _rank(self, values: Values) -> Rank | None:
        return self.ranks[candidate_name(values)]

    def choice(self, candidates: Candidates) -> Choice:
        """What is written down."""
        best = self._rank(self.best)
        assert best is not None
        scores = []
        for values in self.asked:
            rank, name = self._rank(values), candidate_name(values)
            line = {**values, "score": rank and rank.value, "met": rank is not None and rank.met}
            scores.append(line | ({"note": self.notes[name]} if name in self.notes else {}))
        doubts = [*self._doubts(best), *_edges(self.asked, self.best), *self.rule.notes(self.reference)]
        return Choice(self.best, best.value, best.met, self.rule.name, scores, doubts)

    def _doubts(self, best: Rank) -> list[str]:
        """Why the choice may mean little; empty when there is no reason."""
        doubts = [] if best.met else [self.rule.unmet(best)]
        if not {"rouge_l_r", "probability_r", "knowmem_r", "accuracy"} & self.reference.keys():
            doubts.append("without questions about a retain set, nothing speaks against the strongest candidate")
        if self.rule.name == "exposure" and selection.exposure(self.reference, self.reference) == 0:
            doubts.append(
                "the target knows no more of the forget set than of rows it never saw, so there is nothing to choose by"
            )
        return doubts


def _rank_all(folder: Path, validation: Validation, asked: Sequence[Values]) -> _Ranked:
    reference = load_report(folder / TARGET).values()
    ideal, rule = validation.ideal_metrics, validation.rule
    ranks: dict[str, Rank | None] = {}
    notes = {}
    for name in map(candidate_name, asked):
        report = load_report(folder / name)
        reason = report.settings.get(BROKEN) or selection.broken(report.values(), reference)
        ranks[name] = None if reason else rule.rank(report.values(), reference, ideal)
        if reason:
            notes[name] = reason
    return _Ranked(asked, ranks, notes, rule, reference)


def _edges(asked: Sequence[Values], best: Values) -> list[str]:
    """Where the best strength is the last of its list, beyond which nobody has looked."""
    found = []
    for key in {"alpha", "beta"} & best.keys():
        tried = sorted({float(values[key]) for values in asked})
        if len(tried) > 1 and best[key] == tried[-1]:
            found.append(f"{key} {best[key]:g} is the largest tried; a larger one may be better")
        if len(tried) > 1 and best[key] == tried[0] > 0:
            found.append(f"{key} {best[key]:g} is the smallest tried; a smaller one may be better")
    return sorted(found)


def _as_json(choice: Choice) -> dict[str, Any]:
    others = asdict(choice)
    return {**others.pop("values"), **others}


def load_choice(out: Path) -> Choice:
    """The choice that `choose` wrote into its folder."""
    found = json.loads((out / CHOICE_FILE).read_text())
    others = {key: found.pop(key) for key in ("score", "met", "rule", "scores", "doubts")}
    return Choice(found, **others)


def load_sweep(out: Path) -> Sweep:
    """All candidates of a choice with their metrics, for tables and pictures."""
    choice = load_choice(out)
    ideal = load_report(out / IDEAL).metrics if (out / IDEAL).is_dir() else None
    target = load_report(out / TARGET)
    rows = []
    for line in choice.scores:
        values = {key: value for key, value in line.items() if key not in ("score", "met", "note")}
        report: Report = load_report(out / candidate_name(values))
        rows.append(Candidate(values, report.metrics, line["score"], line["met"], line.get("note")))
    return Sweep(rows, target.metrics, ideal, choice.values, choice.rule, target.split)
