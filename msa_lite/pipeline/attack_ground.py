"""Choose the rows that the models of a run are attacked on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msa_lite.attacks.attack import Ground
from msa_lite.data import Prompter, Row, load_rows, sample_rows
from msa_lite.evals.benchmark import Benchmark, Item
from msa_lite.pipeline.prepare import Run

MOST_TOKENS = 200  # of an answer, where the recipe scores nothing


def make_ground(run: Run) -> Ground:
    """Return all rows that attacks may use.

    Forget rows are the test rows, which nothing was chosen by: those of the benchmark where it asks about the forget
    set, else the rows that the vector learnt. Holdout rows are of the same kind as these.
    """
    test = run.test
    forget, holdout = (_rows(test, name) for name in ("forget", "holdout"))
    forget = forget or run.rows["forget"]
    is_text = bool(forget[0].text)
    holdout = [row for row in holdout or _loaded_holdout(run) if bool(row.text) == is_text]
    seen = {row.subject for row in (*forget, *holdout)}
    retain = [row for row in run.rows.get("retain", ()) if row.subject not in seen]
    settings = run.recipe.evaluate
    return Ground(
        forget=forget,
        retain=retain,
        holdout=holdout,
        learnt=run.rows["forget"],
        prompter=_prompter(run, test),
        max_new_tokens=settings.max_new_tokens if settings else MOST_TOKENS,
        max_length=run.recipe.vector.max_length,
        seed=run.recipe.seed,
    )


def limit_ground(ground: Ground, rows: int) -> Ground:
    """Return the ground with at most so many forget rows, and as many holdout rows: seeded samples."""
    forget, holdout = (sample_rows(part, rows, ground.seed) for part in (ground.forget, ground.holdout))
    return replace(ground, forget=forget, holdout=holdout)


def _prompter(run: Run, test: Benchmark | None) -> Prompter:
    """Return the prompter of the rows: a published benchmark may ask in its own form."""
    return test.prompter if test is not None and _rows(test, "forget") else run.prompter


def _rows(test: Benchmark | None, name: str) -> list[Row]:
    """Return the items of a set as rows; none where they are no questions with answers, and no texts."""
    items = test.sets[name].items if test is not None and name in test.sets else ()
    rows = [_row(item) for item in items]
    return [row for row in rows if row is not None]


def _row(item: Item) -> Row | None:
    fields = item.fields
    if fields.get("text"):
        return Row(item.index, text=fields["text"])
    if not (fields.get("question") and fields.get("answer")):
        return None
    earlier = tuple((question, answer) for question, answer in fields.get("earlier", ()))
    return Row(item.index, fields["question"], fields["answer"], earlier=earlier, system=fields.get("system", ""))


def _loaded_holdout(run: Run) -> Sequence[Row]:
    """Return the rows of `evaluate.holdout`, or of `probe.against` where these are no paraphrases."""
    places = ["evaluate.holdout", *([] if run.recipe.probe.paired else ["probe.against"])]
    source = next((run.data[place] for place in places if place in run.data), None)
    return load_rows(source) if source else ()
