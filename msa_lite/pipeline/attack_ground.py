"""Choose the rows that the models of a run are attacked on."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from msa_lite.attacks.attack import Ground
from msa_lite.budget.shape import read_shape
from msa_lite.data import Prompter, Row, load_rows, sample_rows
from msa_lite.errors import DataError, Faults
from msa_lite.evals.benchmark import Benchmark, BenchmarkSettings, Item
from msa_lite.io.checkpoint import load_checkpoint
from msa_lite.pipeline.prepare import Run
from msa_lite.pipeline.prepare_data import load_set

_HOLDOUT = 100  # rows; membership inference scores them cheaply, and with fewer, none of them is 1 %
MOST_TOKENS = 200  # of an answer, where the recipe scores nothing


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
    settings = run.recipe.evaluate
    return Ground(
        rewordings=_rewordings(run, forget),
        forget=forget,
        retain=run.retain,
        holdout=holdout,
        learnt=run.rows["forget"],
        prompter=_prompter(run, questions),
        max_new_tokens=settings.max_new_tokens if settings else MOST_TOKENS,
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
    )


def _prompter(run: Run, questions: Sequence[Benchmark]) -> Prompter:
    """Return the prompter of the rows: a published benchmark may ask in its own form."""
    return next((part.prompter for part in questions if _rows([part], "forget")), run.prompter)


def _rows(questions: Sequence[Benchmark], name: str) -> list[Row]:
    """Return the items of a set as rows, in the order of the data; none where they are no questions and no texts."""
    items = [item for part in questions if name in part.sets for item in part.sets[name].items]
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


def _rewordings(run: Run, forget: Sequence[Row]) -> dict[str, list[str]]:
    """Return other wordings of the forget rows' questions by name: the benchmark's own, and those of the recipe.

    Raise DataError for a set that has not one row for each row of the data that the forget rows are from.
    """
    if any(row.text for row in forget):
        return {}
    rewordings = _own_wordings(run, forget)
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
    faults.check()
    return rewordings


def _free_name(name: str, taken: Collection[str]) -> str:
    """Return a name for files and tables: of letters, digits, blanks and "-", with a number if it is taken."""
    clean = re.sub(r"[^A-Za-z0-9 -]+", "-", name)
    return next(free for number in count(1) if (free := clean if number == 1 else f"{clean} {number}") not in taken)


def _own_wordings(run: Run, forget: Sequence[Row]) -> dict[str, list[str]]:
    """Return the wordings that the run's benchmark has of its own questions."""
    settings = run.recipe.evaluate
    if settings is None or run.test is None:
        return {}
    part = BenchmarkSettings(settings.data, settings.split)
    return type(run.test).wordings(part, [row.question for row in forget])


def _loaded_holdout(run: Run) -> Sequence[Row]:
    """Return the rows of `evaluate.holdout`, or of `probe.against` where these are no paraphrases."""
    places = ["evaluate.holdout", *([] if run.recipe.probe.paired else ["probe.against"])]
    source = next((run.data[place] for place in places if place in run.data), None)
    return load_rows(source) if source else ()
