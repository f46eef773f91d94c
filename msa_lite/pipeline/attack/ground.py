"""The rows that the models of a run are attacked on, also in other words."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from textwrap import shorten
from typing import Any

from msa_lite.attacks.attack import Ground
from msa_lite.attacks.corner import corner_texts, make_corners
from msa_lite.budget.shape import read_shape
from msa_lite.data import Row, load_rows, sample_rows
from msa_lite.errors import DataError, Faults, StageError, UsageError
from msa_lite.evals.benchmark import Benchmark, BenchmarkSettings, Item
from msa_lite.evals.judge import JudgeSettings, open_judge
from msa_lite.evals.judge.base import CACHE_FILE
from msa_lite.evals.judge.prompts import CORNER_WAY, REWORDINGS, reword_ask, rewording_version
from msa_lite.evals.records import read_records, write_records
from msa_lite.io.console.progress import Progress, notices, under
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.pipeline.prepare.questions import load_set
from msa_lite.pipeline.prepare.run import Run
from msa_lite.report.attacks import ATTACKS_FOLDER

logger = logging.getLogger(__name__)


_HOLDOUT = 100  # rows; membership inference scores them cheaply, and with fewer, none of them is 1 %


def make_ground(run: Run) -> Ground:
    """Return all rows that attacks may use.

    Forget rows are all questions about the forget set, those that a choice was made by, too: the vector is fitted to
    all rows, and all are to be forgotten. Where the run asks none, they are the rows that the vector learnt. Holdout
    rows are of the same kind. Each row is there once. Retain rows are those of MSA's vector, whatever the run's method
    learns, so that all methods are attacked alike.
    """
    questions = run.questions.everything
    forget, holdout = (_rows(questions, name) for name in ("forget", "holdout"))
    forget = forget or _distinct(run.rows["forget"])
    is_text = bool(forget[0].text)
    holdout = [row for row in holdout or _loaded_holdout(run) if bool(row.text) == is_text]
    # A published benchmark may ask in its own form.
    prompter = next((benchmark.prompter for benchmark in questions if _rows([benchmark], "forget")), run.prompter)
    rewordings, references = _rewordings(run, forget)
    return Ground(
        rewordings=rewordings,
        references=references,
        forget=forget,
        retain=run.retain,
        holdout=holdout,
        learnt=run.rows["forget"],
        prompter=prompter,
        max_new_tokens=run.recipe.max_new_tokens,
        max_length=run.recipe.vector.max_length,
        layers=read_shape(load_checkpoint(run.sources["target"].folder), run.sources["target"].name).layers,
        seed=run.recipe.seed,
    )


def limit_ground(ground: Ground, rows: int) -> Ground:
    """Return the ground with at most so many forget rows, and as many holdout rows, or 100: seeded samples.

    An attack that holdout rows are only the control of takes as many as there are forget rows.
    """
    places = sample_rows(range(len(ground.forget)), rows, ground.seed)
    return replace(
        ground,
        forget=[ground.forget[at] for at in places],
        holdout=sample_rows(ground.holdout, max(rows, _HOLDOUT), ground.seed),
        rewordings={name: [questions[at] for at in places] for name, questions in ground.rewordings.items()},
        references={name: [answers[at] for at in places] for name, answers in ground.references.items()},
    )


def _rows(questions: Sequence[Benchmark], name: str) -> list[Row]:
    """Return the items of a set as rows, in the order of the data; none where they are no questions and no texts."""
    items = [item for benchmark in questions if name in benchmark.sets for item in benchmark.sets[name].items]
    rows = [_row(item) for item in items]
    return sorted(_distinct([row for row in rows if row is not None]), key=lambda row: row.index)


def _distinct(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, of those with the same content only the first."""
    kept: dict[str, Row] = {}
    for row in rows:
        kept.setdefault(row.sha256, row)
    return list(kept.values())


def _row(item: Item) -> Row | None:
    fields, about = item.fields, "" if item.group is None else str(item.group)
    if fields.get("text"):
        return Row(item.index, text=fields["text"], about=about)
    if not (fields.get("question") and fields.get("answer")):
        return None
    earlier = tuple((question, answer) for question, answer in fields.get("earlier", ()))
    system = fields.get("system", "")
    return Row(item.index, fields["question"], fields["answer"], earlier=earlier, system=system, about=about)


def _rewordings(run: Run, forget: Sequence[Row]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return other wordings of the forget rows' questions by name: the benchmark's own, and those of the recipe.

    With them, the right answers to those of the recipe, by name, where they are not the rows' own. Raise DataError for
    a set that has not one row for each row of the data that the forget rows are from.
    """
    if any(row.text for row in forget):
        return {}, {}
    rewordings, references, settings = dict[str, list[str]](), dict[str, list[str]](), run.recipe.evaluate
    if settings and run.test:
        published = BenchmarkSettings(settings.data, settings.split)
        rewordings |= type(run.test).wordings(published, [row.question for row in forget])
    places = len(load_rows(run.data.get("evaluate.forget", run.data["forget"])))
    faults = Faults()
    for at, data in enumerate(run.recipe.attack.prompt.rewordings):
        with faults.gathered(f"attack.prompt.rewordings.{at}: "):
            _, rows = load_set(data, run.recipe.columns)
            if len(rows) != places or any(row.text for row in rows):
                raise DataError(
                    f"{data.path}: {len(rows)} rows, but the forget rows are from {places}; one question for each of "
                    "them is wanted, in the same order"
                )
            name = _free_name(data.name or Path(data.path).stem, rewordings)
            rewordings[name] = [rows[row.index].question for row in forget]
            answers = [rows[row.index].answer or row.answer for row in forget]
            if answers != [row.answer for row in forget]:
                references[name] = answers
    faults.check()
    return rewordings, references


def _free_name(name: str, taken: Collection[str]) -> str:
    """Return a name for files and tables, with a number if it is taken."""
    clean = _clean_name(name)
    return next(free for number in count(1) if (free := clean if number == 1 else f"{clean} {number}") not in taken)


def _clean_name(name: str) -> str:
    """Return a name with nothing but letters, digits, blanks and "-"."""
    return re.sub(r"[^A-Za-z0-9 -]+", "-", name)


def _loaded_holdout(run: Run) -> Sequence[Row]:
    """Return the rows of `evaluate.holdout`, or of `probe.against` where these are no paraphrases."""
    places = ["evaluate.holdout", *([] if run.recipe.probe.paired else ["probe.against"])]
    source = next((run.data[place] for place in places if place in run.data), None)
    return load_rows(source) if source else ()


_NAME = "rewordings"  # of folder, stage and progress
_FILE = "rewordings.jsonl"


@dataclass(frozen=True)
class Rewording:
    """A judge that rewords questions, and the folder of what it wrote."""

    folder: Path
    judge: JudgeSettings
    kinds: tuple[str, ...] = ()
    """The kinds of indirect questions that it rewords, too. They hold answers of the rows."""

    def known(self, ground: Ground) -> Ground:
        """Return the ground with the rewordings that are there.

        In the place of those that are still to be written stand the questions, for estimates of time.
        """
        return self._reworded(ground, self._read())

    def missing(self, ground: Ground) -> list[str]:
        """Return the questions that are still to be reworded."""
        written = self._read()
        return [text for text in self._wanted(ground) if text not in written]

    def make(self, ground: Ground, progress: Progress) -> Ground:
        """Have the missing questions reworded; return the ground with all rewordings.

        A question that the judge did not reword has "". Raise StageError where that are all, or the judge fails; a
        rerun asks only for the rest.
        """
        written, todo, wanted = self._read(), self.missing(ground), self._wanted(ground)
        if todo:
            asks = [reword_ask(question, way) for question in todo for way in wanted[question]]
            inputs = self._settings() | {"questions": digest([*written, *todo])}
            with stage_folder(self.folder, _NAME, inputs, resumable=True) as partial:
                judge = open_judge(self.judge, partial)
                assert judge is not None
                rulings = iter(judge.ask(asks, under(progress, _NAME))[0])
                for question in todo:
                    replies = {way: next(rulings) for way in wanted[question]}
                    written[question] = {way: ruling.reply if ruling.valid else "" for way, ruling in replies.items()}
                self._check({question: written[question] for question in todo})
                write_records(partial / _FILE, [{"question": text, **wordings} for text, wordings in written.items()])
                (partial / CACHE_FILE).unlink()
        return self._reworded(ground, written)

    def _check(self, written: Mapping[str, Mapping[str, str]]) -> None:
        """Raise StageError if the judge reworded nothing; warn where it did not reword all; show an example."""
        lacking = sum(not text for wordings in written.values() for text in wordings.values())
        total = sum(map(len, written.values()))
        if lacking == total:
            raise StageError(
                f"attack.prompt.judge: {self.judge.model_name} reworded no question; take a model that follows "
                "instructions"
            )
        question, text = next((q, text) for q, wordings in written.items() for text in wordings.values() if text)
        notices.info("rewordings: for example, '%s' became '%s'", question, shorten(text, 200))
        if lacking:
            logger.warning("%s gave no rewording in %d of %d cases", self.judge.model_name, lacking, total)

    def _settings(self) -> dict[str, Any]:
        """Return what decides the rewording of a question."""
        judge = self.judge.describe()
        keys = {key: judge[key] for key in ("kind", "model", "base_url", "revision") if key in judge}
        return {"judge": keys, "prompts": rewording_version()}

    def _read(self) -> dict[str, dict[str, str]]:
        """Return what the judge has written, by question."""
        inputs = (load_manifest(self.folder) or {}).get("inputs", {})
        is_same = {key: inputs.get(key) for key in ("judge", "prompts")} == self._settings()
        if not (is_same and is_finished(self.folder, inputs)):
            return {}
        return {record.pop("question"): record for record in read_records(self.folder / _FILE)}

    def _corners(self, ground: Ground) -> list[str]:
        return [*corner_texts(make_corners(ground, self.kinds))] if self.kinds else []

    def _wanted(self, ground: Ground) -> dict[str, Collection[str]]:
        """Return the ways to reword each question."""
        ways: dict[str, Collection[str]] = {row.question: REWORDINGS for row in ground.forget}
        return ways | dict.fromkeys(self._corners(ground), (CORNER_WAY,))

    def _reworded(self, ground: Ground, written: Mapping[str, Mapping[str, str]]) -> Ground:
        model, rewordings = _clean_name(Path(self.judge.model_name).name), dict(ground.rewordings)
        for way in REWORDINGS:
            wordings = {question: ways[way] for question, ways in written.items() if way in ways}
            rewordings[f"by {model} {way}"] = [wordings.get(row.question, row.question) for row in ground.forget]
        corners = {text: written[text][CORNER_WAY] for text in self._corners(ground) if text in written}
        return replace(ground, rewordings=rewordings, corners=corners)


def open_rewording(
    home: Path, judge: JudgeSettings, ground: Ground, is_asked: bool, kinds: Collection[str] = ()
) -> Rewording | None:
    """Return the judge that rewords; None for kind "none".

    home: the folder of the recipe. is_asked: False where only what it wrote before is read. kinds: of the indirect
    questions that it rewords. Raise UsageError for rows that have no other wording, and, for a judge that is
    asked, as `open_judge`.
    """
    if judge.kind == "none":
        return None
    if is_asked:
        open_judge(judge)
    if any(row.text for row in ground.forget):
        raise UsageError("attack.prompt.judge: the forget rows are texts, which have no other wording; leave it out")
    return Rewording(home / ATTACKS_FOLDER / _NAME, judge, tuple(kinds))
