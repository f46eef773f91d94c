"""Write the removal record of a finished run."""

from __future__ import annotations

from msa_lite.baselines.methods import TASK_VECTOR
from msa_lite.choose.candidates import Values
from msa_lite.data import Row
from msa_lite.io.hub import Source
from msa_lite.merger import Merged, MergedAdapter
from msa_lite.pipeline.prepare import Run
from msa_lite.record.facts import ResultKind
from msa_lite.record.keyed import RowContent
from msa_lite.record.schema import Removal
from msa_lite.record.write import FoundModel, RunFacts, write_run_record
from msa_lite.report.provenance import RECIPE_FILE

_WITH_STRENGTHS = ("msa", TASK_VECTOR)  # the methods whose merge has alpha and beta
_MSA = "θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0)"


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


def _content(row: Row) -> RowContent:
    """Return the part of a row that its keyed hash is of."""
    return row.question, row.answer, row.text


def _formula(run: Run) -> str:
    """Return the merge of a run in one line."""
    if run.earlier:
        return "θ_u = θ_D + Σ weight · vector, over all vectors of this request and of the earlier ones"
    if run.plan.method in _WITH_STRENGTHS:
        return _MSA if run.plan.start == "prior" else _MSA.replace("θ_0", "θ_D")
    return "θ_u = θ_D + scale (θ_1 − θ_0)" if run.plan.start == "prior" else "θ_u = θ_1, the target tuned by the method"


def _model(source: Source) -> FoundModel:
    """Return a model as the record names it: without the path of a folder."""
    name = "local folder" if source.is_folder else source.pinned()
    return FoundModel(name, source.folder, source.revision, source.tokenizer.revision if source.tokenizer else None)
