"""Choose among candidates by their scores on validation rows, each scored once into a folder of its own."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from msa_lite.choose.rules import LeastExtraction, Metrics, Rank, highest_rank
from msa_lite.choose.search import SMALLEST, StrengthSearch, gentleness
from msa_lite.choose.validation import WHOLE, Validation
from msa_lite.errors import NotFiniteError, StageError, join_faults
from msa_lite.evals.benchmarks.benchmark import Benchmark
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.files.writing import canonical_json, write_json, write_text
from msa_lite.io.finished.manifest import is_finished, partial_folder, stage_folder
from msa_lite.io.finished.seal import MANIFEST, folder_faults, load_manifest
from msa_lite.report import REPORT_FILE, load_report
from msa_lite.report.run.choice import (
    CHOICE_FILE,
    CHOICE_TABLE,
    Choice,
    Values,
    candidate_name,
    load_choice,
    points_markdown,
)
from msa_lite.strengths import Strengths

logger = logging.getLogger(__name__)

IDEAL = "ideal"
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
                (path / REPORT_FILE).unlink(missing_ok=True)  # first: what a kill leaves counts as not scored
                shutil.rmtree(path)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the names that have no report yet."""
        return [name for name in names if not (self.folder / name / REPORT_FILE).is_file()]

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


def choose(
    candidates: Candidates, validation: Validation, out: Path, label: str, progress: Progress = silent
) -> Choice:
    """Score every candidate on validation rows and choose the best by the rule (ties: the smallest α and β, the first).

    Holdout rows show what unseen data scores; only the target is scored on them, unless the rule looks at them. Writes
    records and a report per candidate, their table and choice.json into `out`. Reports of a stopped choice, of
    another rule or of another grid are used again. A broken candidate (outputs that are no numbers, no retain
    performance left) is recorded and never chosen. Other processes may help (`Candidates.helped`).

    Raise StageError if every candidate is broken, DataError if the target lacks a metric that the rule needs.
    """
    inputs, scored_by = candidates.inputs(validation), candidates.scored_by(validation)
    if not is_finished(out, inputs):
        candidates = replace(candidates, known={**scored_before(out, scored_by), **candidates.known})
        with stage_folder(out, "sweep", inputs, resumable=True, resume_key=scored_by) as folder:
            try:
                _choose(ScoredFolder(folder, candidates, validation), label, progress)
            finally:
                candidates.release()  # the memory is for the next model
    return load_choice(out)


def scored_before(out: Path, scored_by: Mapping[str, Any]) -> dict[str, Path]:
    """Return folders by name of the candidates that an earlier choice has scored alike, and that are as written."""
    inputs = (load_manifest(out) or {}).get("inputs", {})
    if any(inputs.get(key) != value for key, value in json.loads(canonical_json(scored_by)).items()):
        return {}
    changed = {IDEAL, *(name.partition("/")[0] for name in folder_faults(out))}
    return {path.parent.name: path.parent for path in out.glob(f"*/{REPORT_FILE}") if path.parent.name not in changed}


def _choose(work: ScoredFolder, label: str, progress: Progress) -> None:
    """Score and rank all candidates, and write down the best."""
    folder, validation = work.folder, work.validation
    if validation.ideal:
        (folder / IDEAL).mkdir(exist_ok=True)
        shutil.copy2(validation.ideal / REPORT_FILE, folder / IDEAL / REPORT_FILE)
    candidates, ranks = _try_all(work, label, progress)
    best = _best(candidates, ranks)
    rank = ranks[best]
    assert isinstance(rank, Rank), "a broken candidate is never chosen"
    work.keep({TARGET, IDEAL, *map(candidate_name, candidates)})
    target, remedies = load_report(folder / TARGET).values(), work.candidates.remedies
    doubts = doubts_of(validation, target, candidates, ranks, best, remedies)
    lines = {
        **candidates[best],
        "score": rank.value,
        "met": rank.met,
        "rule": validation.rule.name,
        "scores": [{**values, **_entry(rank)} for values, rank in zip(candidates, ranks, strict=True)],
        "doubts": doubts,
    }
    write_json(folder / CHOICE_FILE, lines)
    write_text(folder / CHOICE_TABLE, points_markdown(load_choice(folder)))


def _try_all(work: ScoredFolder, label: str, progress: Progress) -> tuple[list[Values], list[Rank | str]]:
    """Score and rank candidates until the search adds none; return them with their ranks."""
    search = work.candidates.search
    candidates: list[Values] = [] if search else [*work.candidates.values]
    ranks: list[Rank | str] = []
    while True:
        if search:
            scored = dict(zip(map(Strengths.of, candidates), ranks, strict=True))
            candidates += [point.values for point in search.next_points(scored)]
        if len(ranks) == len(candidates):
            progress(label, len(candidates) + 1, len(candidates) + 1)  # a search may end before its most points
            return candidates, ranks
        _score_all(work, candidates, label, progress)
        ranks = [work.rank(candidate_name(values)) for values in candidates]


def _best(candidates: Sequence[Values], ranks: Sequence[Rank | str]) -> int:
    """Return the number of the highest rank: of equals the gentlest, then the first.

    Raise StageError if every candidate is broken.
    """
    best = highest_rank(dict(enumerate(ranks)), lambda number: gentleness(Strengths.of(candidates[number])))
    if best is None:
        faults = [f"{candidate_name(values)}: {reason}" for values, reason in zip(candidates, ranks, strict=True)]
        raise StageError(
            join_faults("every candidate is broken, so there is none to choose; try gentler ones:", faults)
        )
    return best


def _entry(rank: Rank | str) -> dict[str, Any]:
    """Return the entry of a candidate in choice.json, without its values."""
    if isinstance(rank, str):
        return {"score": None, "met": False, "note": rank}
    return {"score": rank.value, "met": rank.met, **({"note": rank.note} if rank.note else {})}


def _score_all(work: ScoredFolder, candidates: Sequence[Values], label: str, progress: Progress) -> None:
    """Score the target and all candidates.

    The target comes first, since a metric that it lacks cannot rank candidates.
    """
    todo: dict[str, Values | None] = {TARGET: None} | {candidate_name(values): values for values in candidates}
    work.take_known(todo)
    search = work.candidates.search
    likely = 1 + search.most if search else len(todo)

    def report_progress() -> None:
        progress(label, len(todo) - len(work.missing(list(todo))), likely)

    work.score({TARGET: None}, report_progress)
    report_progress()
    work.rank(TARGET)
    left = {name: values for values in candidates if work.missing([name := candidate_name(values)])}
    with work.candidates.helped(list(left.values())) as count:
        work.score(dict([*left.items()][::count]), report_progress)
    work.score(left, report_progress)  # on a shared disk, what others wrote may not show yet
    report_progress()


def help_choose(candidates: Candidates, validation: Validation, out: Path, points: Sequence[Values]) -> None:
    """Score these candidates of a choice that another process makes (`choose` into `out`)."""
    work = ScoredFolder(partial_folder(out), candidates, validation)
    work.score({candidate_name(values): values for values in points})


FEW = 12  # rows of a set, of which each is almost a tenth
_UNTOUCHED = 0.98  # a kept share above which a vector has changed next to nothing


def doubts_of(
    validation: Validation,
    target: Metrics,
    candidates: Sequence[Mapping[str, Any]],
    ranks: Sequence[Rank | str],
    best: int,
    remedies: Sequence[str] = (),
) -> list[str]:
    """Return the reasons to doubt the choice of candidate number `best`; empty if there is none.

    target: the target's metrics. candidates: their values, in the order of the ranks. remedies: what this run can try
    where no candidate both forgets and keeps.
    """
    rule, benchmark, rank = validation.rule, validation.benchmark, ranks[best]
    assert isinstance(rank, Rank), "a broken candidate is never chosen"
    doubts = [rule.unmet(rank)] if isinstance(rule, LeastExtraction) and not rank.met else []
    if not {"rouge_l_r", "probability_r", *benchmark.vital} & target.keys():
        doubts.append(
            "there are no retain rows, so nothing shows what else was lost; add rows to keep (retain.data, or "
            "evaluate.retain)"
        )
    if coarse := benchmark.resolution(rule.needs):
        doubts.append(coarse)
    advice = strength_advice(candidates, ranks, best, remedies)
    return [*doubts, *few_rows(benchmark), *advice, *rule.notes(target, validation.unjudged)]


def few_rows(benchmark: Benchmark) -> list[str]:
    """Say which sets have few rows, and whether choice and final scores share the retain rows."""
    few = [f"{name}: {len(part.items)}" for name, part in benchmark.sets.items() if len(part.items) < FEW]
    doubts = [f"it rests on few rows ({', '.join(few)})"] if few else []
    if benchmark.split == WHOLE and (retain := benchmark.sets.get("retain")):
        doubts.append(
            f"there are too few retain rows to divide ({len(retain.items)}), so the final scores are on the same rows "
            "as the choice; add rows (evaluate.retain)"
        )
    return doubts


def strength_advice(
    candidates: Sequence[Mapping[str, Any]], ranks: Sequence[Rank | str], best: int, remedies: Sequence[str] = ()
) -> list[str]:
    """Say in which direction a better point may lie that was not tried; nothing if the best is good enough.

    candidates: their values, in the order of the ranks. `Rank.aim` gives the direction, if the rule can tell; if it
    cannot, every edge of the grid may hide a better point. remedies: as of `doubts_of`.
    """
    rank, values = ranks[best], candidates[best]
    assert isinstance(rank, Rank), "a broken candidate is never chosen"
    if "alpha" not in values:
        hint = "try gentler ones: a lower baseline.learning_rate, or fewer epochs"
        return [hint] if rank.aim == "gentler" else []
    # The same α forgets more or less with another λ. No λ below the smallest is advised: no filter at all was in no
    # history surely nearer to the ideal.
    beside = [(c, r) for c, r in zip(candidates, ranks, strict=True) if c.get("filter") == values.get("filter")]
    tried = {key: sorted({float(c[key]) for c, _ in beside if key in c}) for key in ("alpha", "beta")}
    several = {key for key, numbers in tried.items() if len(numbers) > 1}
    largest = sorted(key for key in several if values[key] == tried[key][-1])
    smallest = sorted(key for key in several if values[key] == tried[key][0] > 0)
    strength, filters = values.get("filter") or 0.0, {c.get("filter") or 0.0 for c in candidates}
    further = []
    if len(filters) > 1 and strength == max(filters):
        further = [
            f"λ {strength:g} is the largest tried; a larger one may be nearer or not (merge.filter={4 * strength:g})"
        ]
    if rank.aim is None:
        edges = [f"{key} {values[key]:g} is the largest tried; a larger one may be better" for key in largest]
        edges += [f"{key} {values[key]:g} is the smallest tried; a smaller one may be better" for key in smallest]
        return edges + further
    if rank.aim == "enough":
        return []
    aims = {other.aim if isinstance(other, Rank) else "gentler" for _, other in beside}
    first, last = tried["alpha"][0], tried["alpha"][-1]
    given = f" merge.filter={strength:g}" if strength else ""
    smaller = f"forget.alpha=[{first / 4:g}, {first / 2:g}, {first:g}]{given}"
    larger = f"forget.alpha=[{last:g}, {1.5 * last:g}, {2 * last:g}]{given}"
    if "neither" in aims or aims >= {"stronger", "gentler"}:
        instead = f". Try {', or '.join(remedies)}" if remedies else ""
        if "alpha" in smallest and rank.aim != "stronger":
            further.insert(0, f"alpha {first:g} is the smallest tried; a smaller one may be nearer ({smaller})")
        return [
            f"gentler points know too much, stronger ones lose too much{instead}",
            *(f"{key} {values[key]:g} is the largest tried; a larger one may be nearer" for key in largest),
            *further,
        ]
    if rank.aim == "gentler":
        shorter = "; the forget vector may have learnt too much: fit it shorter (vector.epochs), or at a lower rate"
        why = shorter if first <= SMALLEST else ""
        return [f"no alpha below {first:g} was tried; a smaller one may keep more ({smaller}){why}", *further]
    if rank.kept > _UNTOUCHED:
        return [
            f"no point forgets, up to alpha {last:g}, and all of them keep enough. The forget vector may have learnt "
            "too little, see its loss: fit it longer (vector.epochs), at a higher vector.learning_rate, or try larger "
            f"alphas ({larger})"
        ]
    return [f"an alpha larger than {last:g} may forget more ({larger})"]
