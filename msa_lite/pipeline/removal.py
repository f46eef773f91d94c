"""Write the removal record of a finished run, and answer by it which rows it was about."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from msa_lite.baselines.methods import TASK_VECTOR
from msa_lite.choose.candidates import Values
from msa_lite.data import DataSource, Row
from msa_lite.data.plain import read_any_rows
from msa_lite.errors import MsaError
from msa_lite.io.hub import Source
from msa_lite.merger import Merged, MergedAdapter
from msa_lite.pipeline.prepare import Run
from msa_lite.recipe import load_recipe
from msa_lite.record.facts import ResultKind
from msa_lite.record.find import RowAnswer, find_rows
from msa_lite.record.keyed import RowContent
from msa_lite.record.schema import Removal
from msa_lite.record.write import ModelSource, RunFacts, write_run_record
from msa_lite.report.provenance import RECIPE_FILE
from msa_lite.report.story import formula_of

_WITH_STRENGTHS = ("msa", TASK_VECTOR)  # the methods whose merge has alpha and beta


def write_record(run: Run, chosen: Values, merged: Merged | MergedAdapter) -> Removal:
    """Write record.json into a run's folder, after its verdict. A rerun that changes nothing leaves it as it is.

    chosen: alpha and beta, or what was chosen for a baseline.
    """
    names = [
        "target",
        *(["prior"] if run.plan.start == "prior" else []),
        *(["ideal"] if "ideal" in run.sources else []),
    ]
    scored = [
        name for name in ("target", "ideal", "unlearned") if name in (*names, "unlearned") and run.test is not None
    ]
    kind: ResultKind = "adapter" if isinstance(merged, MergedAdapter) else "model"
    vectors = run.vector_names if run.plan.method in _WITH_STRENGTHS else run.plan.vectors
    choice = ["sweep"] if run.validation is not None else []
    facts = RunFacts(
        request=run.recipe.request,
        method=run.plan.method,
        formula=_formula(run),
        strengths=chosen,
        kind=kind,
        models={name: _model(run.sources[name]) for name in names},
        forget_rows=[_content(row) for row in run.rows["forget"]],
        row_counts={name: len(rows) for name, rows in run.rows.items()},
        scored=scored,
        stages=[*(f"vectors/{name}" for name in vectors), *choice, kind, *(f"evaluation/{name}" for name in scored)],
        began=(run.folder / RECIPE_FILE).stat().st_mtime,
        earlier=[other.folder for other in run.earlier],
    )
    return write_run_record(run.folder, facts)


def find_forgotten(folder: Path, rows: str, key: str | None = None) -> list[RowAnswer]:
    """Return for each row of a file whether a run, or an earlier one in its chain, was to forget it.

    The columns are those of the run's forget set, where its recipe can be read; else the usual ones. key: a copy of
    the run's record.key. Raise as `find_rows`, and FormatError for a file without rows.
    """
    columns = DataSource(rows)
    with suppress(MsaError):
        recipe = load_recipe(str(folder / RECIPE_FILE))
        columns = DataSource(**recipe.forget.data.flat(recipe.columns))
    return find_rows(folder, [_content(row) for row in read_any_rows(rows, columns)], key)


def _content(row: Row) -> RowContent:
    """Return the part of a row that its keyed hash is of."""
    return row.question, row.answer, row.text


def _formula(run: Run) -> str:
    """Return the merge of a run in one line."""
    if run.earlier:
        return "θ_u = θ_D + Σ weight · vector, over all vectors of this request and of the earlier ones"
    return formula_of(run.plan.method, run.plan.start)


def _model(source: Source) -> ModelSource:
    """Return a model as the record names it: without the path of a folder."""
    name = "local folder" if source.is_folder else source.pinned()
    return ModelSource(name, source.folder, source.revision, source.tokenizer.revision if source.tokenizer else None)
