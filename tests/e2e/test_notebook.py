"""The notebook of the quickstart runs from its first cell to its last, on models of a few thousand weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples/quickstart.ipynb"
SMALL = [
    *(f"demo.{name}={count}" for name, count in {"prior": 6, "retain": 6, "forget": 3, "holdout": 2}.items()),
    *("vector.epochs=2", "vector.batch_size=8", "vector.lora.rank=2"),
    *("forget.alpha=[0.5, 1.0]", "retain.beta=0.5", "evaluate.max_new_tokens=4", "verdict=off"),
]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(cell: Any) -> str:
    """What a cell printed and returned, as text."""
    return "".join(output.get("text", "") or str(output.get("data", "")) for output in cell.outputs)


def test_the_notebook_is_stored_without_outputs() -> None:
    for cell in code_cells(nbformat.read(NOTEBOOK, 4)):
        assert (cell.outputs, cell.execution_count) == ([], None), "clear all outputs before you commit it"


@pytest.mark.slow
def test_the_notebook_runs_to_its_last_cell(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    parameters = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source = f"overrides = {SMALL!r}"
    with patch.dict(os.environ, {"PYTHONPATH": str(NOTEBOOK.parents[1]), "HF_HUB_OFFLINE": "1"}):
        nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    run, scores, questions, pictures, merge, compared = map(outputs_of, code_cells(notebook)[1:])
    assert "RunResult(runs/quickstart: " in run
    assert "forget vector: done" in run, "progress, as lines"
    assert "unlearned" in scores
    assert questions.count("  unlearned  ") == 2
    assert "image/svg+xml" in str(code_cells(notebook)[4].outputs), pictures
    assert "weights in" in merge
    assert "twice the α" in compared
