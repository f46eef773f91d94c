"""The choice among candidates (strengths of vectors, epochs of a baseline) by their scores on validation rows."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from msa_lite.choose.candidates import TARGET, Candidates, SharedWork, Values, candidate_name
from msa_lite.choose.doubts import few_rows, strength_advice
from msa_lite.choose.grid import refined
from msa_lite.choose.pictures import DRAWN, draw_missing, draw_pictures
from msa_lite.choose.rules import Exposure, Metrics, Rank, exposure
from msa_lite.choose.search import Point, gentleness
from msa_lite.choose.table import Candidate, Sweep, points_csv, points_markdown
from msa_lite.choose.validation import Validation
from msa_lite.errors import StageError, join_faults
from msa_lite.io.files import canonical_json, write_json, write_text
from msa_lite.io.manifest import is_finished, partial_folder, stage_folder
from msa_lite.io.progress import Progress, silent
from msa_lite.io.seal import load_manifest
from msa_lite.report import REPORT_FILE, Report, load_report

logger = logging.getLogger(__name__)

CHOICE_FILE = "choice.json"
IDEAL = "ideal"
_POLL = 0.2  # seconds
_PATIENCE = 60.0  # seconds; disks that machines share show what others write only after a while


@dataclass(frozen=True)
class Choice:
    """The chosen candidate with its score, what was chosen by, the score of each in the order tried, reasons to doubt.

    met: whether the chosen meets the rule's conditions. scores: of each its values, "score" (None: broken) and "met",
    and where it is broken or does not meet the conditions, "note" with the reason.
    """

    values: Values
    score: float
    met: bool
    rule: str
    scores: Sequence[Mapping[str, Any]]
    doubts: Sequence[str]


def choose(
    candidates: Candidates, validation: Validation, out: Path, label: str, progress: Progress = silent
) -> Choice:
    """Score every candidate on validation rows and choose the best by the rule (ties: the smallest α and β, the first).

    Holdout rows, if any, say what unseen data scores, and are asked of the target alone unless the rule goes by them.
    Writes records and a report per candidate, tables, pictures and choice.json into `out`. Candidates that were scored
    before a stop, or for a choice by another rule or from another grid, are not scored again. What is broken (outputs
    that are no numbers, nothing left of what is to be kept) is recorded and never chosen. Other processes may help
    (`help_choose`).

    Raises StageError when every candidate is broken, DataError where the target lacks what the rule goes by.
    """
    inputs, scored_by = candidates.inputs(validation), candidates.scored_by(validation)
    if is_finished(out, inputs):
        draw_missing(out, load_sweep)
    else:
        facts: dict[str, Any] = {}
        candidates = replace(candidates, known={**_scored_before(out, scored_by), **candidates.known})
        with stage_folder(out, "sweep", inputs, facts, resumable=True, resume_key=scored_by) as folder:
            _choose(SharedWork(folder, candidates, validation), label, progress)
            facts[DRAWN] = draw_pictures(load_sweep(folder), folder)
    return load_choice(out)


def _scored_before(out: Path, scored_by: Mapping[str, Any]) -> dict[str, Path]:
    """Folders of candidates by name that an earlier choice has scored alike."""
    inputs = (load_manifest(out) or {}).get("inputs", {})
    if any(inputs.get(key) != value for key, value in json.loads(canonical_json(scored_by)).items()):
        return {}
    return {path.parent.name: path.parent for path in out.glob(f"*/{REPORT_FILE}") if path.parent.name != IDEAL}


def _choose(work: SharedWork, label: str, progress: Progress) -> None:
    folder, validation = work.folder, work.validation
    if validation.ideal:
        shutil.copytree(validation.ideal, folder / IDEAL, ignore=_all_but_report, dirs_exist_ok=True)
    search = work.candidates.search
    asked = _as_values(search.next_points({})) if search else list(work.candidates.values)
    left = work.candidates.refine
    while True:
        work.open(asked)
        _score_all(work, asked, label, progress)
        new = _searched(work, asked) if left == work.candidates.refine else []
        if not new and left:
            left -= 1
            best = _rank_all(folder, validation, asked).best
            new = refined(asked, best)
            logger.info("refining around %s: %d points more", candidate_name(best), len(new))
        if not new:
            break
        asked = [*asked, *new]
    progress(label, len(asked) + 1, len(asked) + 1)  # a search may end before its most points
    ranked = _rank_all(folder, validation, asked)
    work.open(asked, done=True)
    work.close({TARGET, IDEAL, *map(candidate_name, asked)})
    write_json(folder / CHOICE_FILE, _as_json(ranked.choice()))
    table = load_sweep(folder)
    write_text(folder / "table.md", points_markdown(table))
    write_text(folder / "table.csv", points_csv(table))


def _searched(work: SharedWork, asked: Sequence[Values]) -> list[Values]:
    """Return the points that a search tries next, given the ranks so far; none where it has ended, or there is none."""
    search = work.candidates.search
    if search is None:
        return []
    ranks = _ranks(work.folder, work.validation, asked)
    scored = {(float(v["alpha"]), float(v["beta"])): rank for v, rank in zip(asked, ranks, strict=True)}
    return _as_values(search.next_points(scored))


def _as_values(points: Sequence[Point]) -> list[Values]:
    return [{"alpha": alpha, "beta": beta} for alpha, beta in points]


def _all_but_report(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name != "report.json"]


def _score_all(work: SharedWork, asked: Sequence[Values], label: str, progress: Progress) -> None:
    """Score the target and all candidates; wait for those that helpers have claimed.

    The target comes first: what it lacks, candidates could not be held against.
    """
    todo: dict[str, Values | None] = {TARGET: None} | {candidate_name(values): values for values in asked}

    search = work.candidates.search
    likely = max(len(todo), 1 + search.most if search and search.alphas is None else 0)

    def tell() -> None:
        progress(label, len(todo) - len(work.missing(list(todo))), likely)

    for part in ({TARGET: None}, todo):
        while True:
            work.score(part, after=tell)
            tell()
            if not work.missing(list(part)):
                break
            time.sleep(_POLL)
        work.validation.rank(work.folder / TARGET, work.folder / TARGET)


def help_choose(make: Callable[[], tuple[Candidates, Validation]], out: Path) -> None:
    """Score candidates of a choice that another process makes (`choose` into `out`), until it is made.

    make: computes what that process computes, once its inputs are there. If work with other inputs lies open for a
    minute, one warning says so. It may be an earlier choice that was stopped, so the helper waits on.
    """
    warned, known = False, time.monotonic()
    while True:
        candidates, validation = make()
        work = SharedWork(partial_folder(out), candidates, validation)
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
        if not warned and work.is_open and time.monotonic() - known > _PATIENCE:
            logger.warning(
                "%s: this process computes other inputs than the process that chooses. Are package versions, and files "
                "at these paths, the same on all machines? It waits on, for this may be an earlier choice that was "
                "stopped",
                out,
            )
            warned = True
        time.sleep(_POLL)


@dataclass(frozen=True)
class _Ranked:
    """Candidates with their ranks, or, where they are broken, the reasons; best: the number of the one to choose."""

    asked: Sequence[Values]
    ranks: Sequence[Rank | str]
    number: int
    validation: Validation
    reference: Metrics

    @property
    def best(self) -> Values:
        """The values of the best."""
        return self.asked[self.number]

    def choice(self) -> Choice:
        """What is written down."""
        best = self.ranks[self.number]
        assert isinstance(best, Rank), "what is broken is never chosen"
        scores = [{**values, **_line(rank)} for values, rank in zip(self.asked, self.ranks, strict=True)]
        rule = self.validation.rule
        advice = strength_advice(self.asked, self.ranks, self.number)
        doubts = [*self._doubts(best), *advice, *rule.notes(self.reference)]
        return Choice(self.best, best.value, best.met, rule.name, scores, doubts)

    def _doubts(self, best: Rank) -> list[str]:
        """Why the choice may mean little; empty when there is no reason."""
        rule, benchmark = self.validation.rule, self.validation.benchmark
        doubts = [] if best.met else [rule.unmet(best)]
        if not {"rouge_l_r", "probability_r", *benchmark.vital} & self.reference.keys():
            doubts.append(
                "there are no retain rows, so nothing says what was lost beside the forget set; give some that have to "
                "stay (retain.data, or evaluate.retain)"
            )
        prior = load_report(self.validation.prior).values() if self.validation.prior else {}
        if isinstance(rule, Exposure) and exposure(self.reference, self.reference, prior) == 0:
            doubts.append(
                "the target knows no more of the forget set than "
                + ("the prior, or than of rows it never saw" if prior else "of rows it never saw")
                + ", so there is nothing to choose by"
            )
        if coarse := benchmark.resolution(rule.needs()):
            doubts.append(coarse)
        return [*doubts, *few_rows(benchmark)]


def _line(rank: Rank | str) -> dict[str, Any]:
    """Return the entry of a candidate in choice.json."""
    if isinstance(rank, str):
        return {"score": None, "met": False, "note": rank}
    return {"score": rank.value, "met": rank.met, **({"note": rank.note} if rank.note else {})}


def _ranks(folder: Path, validation: Validation, asked: Sequence[Values]) -> list[Rank | str]:
    """The ranks of all that is scored, or the reasons why it is broken."""
    return [validation.rank(folder / candidate_name(values), folder / TARGET) for values in asked]


def _rank_all(folder: Path, validation: Validation, asked: Sequence[Values]) -> _Ranked:
    """The ranks of all that is scored, and the best. Raises StageError where everything is broken."""
    ranks = _ranks(folder, validation, asked)
    whole = {number: rank for number, rank in enumerate(ranks) if isinstance(rank, Rank)}
    if not whole:
        faults = [f"{candidate_name(values)}: {reason}" for values, reason in zip(asked, ranks, strict=True)]
        raise StageError(
            join_faults("every candidate is broken, so there is none to choose; try gentler ones:", faults)
        )
    best = max(whole, key=lambda number: (whole[number], _gentleness(asked[number])))  # the first of equals
    return _Ranked(asked, ranks, best, validation, load_report(folder / TARGET).values())


def _gentleness(values: Values) -> Point:
    """Return a key that is larger for gentler strengths; candidates without strengths are equal."""
    return gentleness((float(values.get("alpha", 0.0)), float(values.get("beta", 0.0))))


def _as_json(choice: Choice) -> dict[str, Any]:
    others = asdict(choice)
    return {**others.pop("values"), **others}


def load_choice(out: Path) -> Choice:
    """The choice that `choose` wrote into its folder."""
    found = json.loads((out / CHOICE_FILE).read_text("utf-8"))
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
    return Sweep(rows, target.metrics, ideal, choice.values, choice.rule, target.split, target.benchmark)
