"""The work of a table, with rows that cost nothing: who makes a row, what is made again, what a failure stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msa_lite.errors import StageError
from msa_lite.io.files.writing import write_text
from msa_lite.pipeline.table import rows as rows_module
from msa_lite.pipeline.table import work as work_module
from msa_lite.pipeline.table.work import TableResult, look_at_table, table

Rows = list[str]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TableResult, Rows]]:
    """A function that makes a table, and returns its result with the folders that were made, in their order."""
    made: Rows = []
    broken: set[str] = set()

    def make(recipe: Any, folder: Path, result: str) -> None:
        made.append(folder.name)
        (folder / result).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / result, "{}")
        if folder.name in broken:  # late: an older result may be there
            raise StageError(f"{folder.name} fell off the bus")

    def run(recipe: Any, **options: Any) -> None:
        make(recipe, recipe.folder, "evaluation/unlearned/report.json")

    def run_baseline(method: str, recipe: Any, **options: Any) -> None:
        make(recipe, recipe.folder / "baselines" / method, "evaluation/unlearned/report.json")

    def train(recipe: Any, **options: Any) -> None:
        make(recipe, recipe.folder, f"1-{recipe.stages[0].title}/manifest.json")

    monkeypatch.setattr(rows_module, "run", run)
    monkeypatch.setattr(rows_module, "run_baseline", run_baseline)
    monkeypatch.setattr(rows_module, "train_stages", train)
    monkeypatch.setattr(work_module, "check_table", lambda *arguments: None)  # of models that are not here
    monkeypatch.setattr(work_module, "compare", lambda entries, published: None)
    monkeypatch.setattr(work_module, "FORMATS", {})

    def call(broken_rows: tuple[str, ...] = (), only: tuple[str, ...] = (), **changes: Any) -> tuple[TableResult, Rows]:
        made.clear()
        broken.clear()
        broken.update(broken_rows)
        result = table({**plan(tmp_path), **changes}, only=only)
        return result, list(made)

    return call


def plan(folder: Path) -> dict[str, Any]:
    """A table of one training, MSA's row on what it makes, and two baselines, the second on the training's model."""
    return {
        "recipe": "paper/tofu-forget10-llama-3.2-1b", "output": str(folder / "table"),
        "train": [{"recipe": "train/tofu", "set": {"output": str(folder / "target")}}],
        "msa": {"MSA": {"target": str(folder / "target/1-tofu")}},
        "methods": ["npo", {"method": "undial", "set": {"target": str(folder / "target/1-tofu")}}],
    }  # fmt: skip


def states(result: TableResult) -> list[str]:
    return [row.state for row in result.rows]


def test_a_row_is_made_once_and_again_only_when_its_recipe_changes(work: Any, tmp_path: Path) -> None:
    result, made = work()
    assert made == ["target", "msa", "npo", "undial"]
    assert result.is_complete
    assert work()[1] == [], "all rows are done"
    changed = {"MSA": {"target": str(tmp_path / "target/1-tofu"), "forget.alpha": 0.5}}
    assert work(msa=changed)[1] == ["msa"]
    (tmp_path / "table/npo/baselines/npo/evaluation/unlearned/report.json").unlink()
    assert work(msa=changed)[1] == ["npo"], "its result was deleted"


def test_a_failure_stops_only_the_rows_that_are_made_of_it(work: Any) -> None:
    result, made = work(broken_rows=("target",))
    assert made == ["target", "npo"]
    assert states(result) == ["failed", "failed", "done", "failed"]
    assert [row.error for row in result.of("failed")][1:] == ["train: target failed"] * 2
    result, made = work(broken_rows=("undial",))
    assert made == ["target", "msa", "undial"], "what failed is tried again"
    assert [row.label for row in result.of("failed")] == ["UNDIAL"]


def test_a_dry_run_tells_what_is_done_and_what_is_made_anew(work: Any, tmp_path: Path) -> None:
    work(only=("MSA",))
    ahead = look_at_table(plan(tmp_path))
    assert [row.state for row in ahead.rows] == ["done", "done", "to do", "to do"]
    ahead = look_at_table({**plan(tmp_path), "msa": {"MSA": {}}})
    assert [row.state for row in ahead.rows] == ["done", "anew", "to do", "to do"]


def test_the_jobs_of_an_array_divide_the_rows_and_share_a_training(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MIN": 1, "MAX": 5, "STEP": 2, "COUNT": 3}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    rows = []
    for job in (3, 1, 5):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(job))
        rows.append(work()[1])
    assert rows == [["npo"], ["target", "msa"], ["undial"]]
    assert (tmp_path / "table/table.json").is_file()
    assert work()[0].is_complete


def test_only_makes_the_rows_that_it_names_and_what_they_need(work: Any) -> None:
    result, made = work(only=("UNDIAL",))
    assert made == ["target", "undial"]
    assert states(result) == ["done", "left", "left", "done"]


def test_published_figures_and_the_rows_that_are_done_are_compared(
    work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(work_module, "compare", lambda *arguments: compared.append(arguments))
    work(published="tofu-forget10-llama-3.2-1b", broken_rows=("undial",))
    entries = [f"MSA={tmp_path}/table/msa", f"NPO={tmp_path}/table/npo/baselines/npo"]
    assert compared == [(entries, "tofu-forget10-llama-3.2-1b")]
