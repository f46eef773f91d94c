"""Write the removal record of a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msa_lite.choose.candidates import Values
from msa_lite.data import Row
from msa_lite.io.hub import Source
from msa_lite.merger import Merged, MergedAdapter
from msa_lite.pipeline.prepare import Run
from msa_lite.record.keyed import KEY_FILE, RowContent, load_key
from msa_lite.record.schema import Removal
from msa_lite.record.write import FoundModel, RunFacts, write_run_record

_MSA = "θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0)"


def check_record_key(folder: Path) -> None:
    """Raise FormatError, before any work, if a run's folder holds a damaged key for its record."""
    if (folder / KEY_FILE).exists():
        load_key(folder / KEY_FILE)


def write_record(run: Run, chosen: Values, merged: Merged | MergedAdapter, earlier: Sequence[Path] = ()) -> Removal:
    """Write record.json into a run's folder, after its verdict. A rerun that changes nothing leaves it as it is.

    chosen: alpha and beta, or what was chosen for a baseline. earlier: the folders of earlier runs whose vectors are
    part of the result.
    """
    names = [
        "target",
        *(["prior"] if run.plan.start == "prior" else []),
        *(["ideal"] if "ideal" in run.sources else []),
    ]
    facts = RunFacts(
        request=run.recipe.request,
        method=run.plan.method,
        formula=_formula(run),
        strengths=chosen,
        kind="adapter" if isinstance(merged, MergedAdapter) else "model",
        models={name: _model(run.sources[name]) for name in names},
        forget_rows=[_content(row) for row in run.rows["forget"]],
        row_counts={name: len(rows) for name, rows in run.rows.items()},
        scored=run.test is not None,
        began=(run.folder / "recipe.yaml").stat().st_mtime,
        earlier=earlier,
    )
    return write_run_record(run.folder, facts)


def _content(row: Row) -> RowContent:
    """Return the part of a row that its keyed hash is of."""
    return row.question, row.answer, row.text


def _formula(run: Run) -> str:
    """Return the merge of a run in one line."""
    if run.plan.method in ("msa", "task_vector"):
        return _MSA if run.plan.start == "prior" else _MSA.replace("θ_0", "θ_D")
    return "θ_u = θ_D + scale (θ_1 − θ_0)" if run.plan.start == "prior" else "θ_u = θ_1, the target tuned by the method"


def _model(source: Source) -> FoundModel:
    """Return a model as the record names it: without the path of a folder."""
    name = "local folder" if source.is_folder else source.pinned()
    return FoundModel(name, source.folder, source.revision, source.tokenizer.revision if source.tokenizer else None)
