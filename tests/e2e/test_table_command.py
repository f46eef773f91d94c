"""A table of tiny models, with a row that fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_rows
import small_table
import yaml

import msa_lite
from msa_lite.errors import StageError
from msa_lite.io.finished.seal import verify_folder
from msa_lite.pipeline.table import rows as table_module
from msa_lite.pipeline.table.work import TableResult
from msa_lite.recipe import load_table_recipe
from tests.e2e.conftest import CallCli, tiny_recipe

DATA = Path(__file__).parents[3] / "shared/data"


def tiny_table(history: Path, folder: Path) -> dict[str, Any]:
    """A table of two methods and two seeds, whose recipe lies beside it."""
    folder.mkdir(exist_ok=True)
    recipe = tiny_recipe(history, folder / "unused")
    recipe["baseline"] = {"epochs": 1, "methods": {"rmu": {"layer": 0}}}
    recipe["evaluate"] |= {"limit": None, "max_new_tokens": 4}  # a sample of each seed would share no row
    recipe["vector"]["warmup_epochs"] = 0
    recipe["forget"]["alpha"] = [0.5, 1.0]  # baselines choose, too
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return {
        "recipe": str(folder / "recipe.yaml"), "msa": {"MSA": {}}, "methods": ["grad_diff"], "seeds": [0, 1],
        "output": str(folder / "table"),
    }  # fmt: skip


def states(result: TableResult) -> dict[str, str]:
    return {row.label: row.state for row in result.rows}


@pytest.fixture(scope="module")
def made(history: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table") / "made"
    result = msa_lite.table(tiny_table(history, folder))
    assert set(states(result).values()) == {"done"}
    return folder / "table"


def test_a_table_has_all_rows_in_five_files(made: Path, history: Path) -> None:
    labels = ["MSA, seed 0", "MSA, seed 1", "GradDiff, seed 0", "GradDiff, seed 1"]
    for seed in (0, 1):
        text = (made / f"table-seed-{seed}.md").read_text()
        assert [label for label in labels if label in text] == labels[seed::2]
        assert "| Target " in text
    assert {path.suffix for path in made.glob("table-seed-0.*")} == {".md", ".tex", ".html", ".csv"}
    values = json.loads((made / "table.json").read_text())
    assert values["complete"] is True
    assert sorted(row["row"] for row in values["rows"]) == sorted(labels)


def test_a_row_that_fails_leaves_the_others_and_is_tried_again(
    history: Path, tmp_path: Path, call_cli: CallCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "failing"
    table = {**tiny_table(history, folder), "seeds": [0]}
    (folder / "table.yaml").write_text(yaml.safe_dump(table))

    def fail(*arguments: Any, **options: Any) -> None:
        raise StageError("the GPU fell off the bus")

    with monkeypatch.context() as patch:
        patch.setattr(table_module, "run", fail)
        code, out, _ = call_cli("table", folder / "table.yaml")
    assert code == 4
    assert "failed:  MSA: the GPU fell off the bus" in out
    assert "GradDiff" in (folder / "table/table.md").read_text()
    code, out, _ = call_cli("table", folder / "table.yaml", "--only", "MSA")
    assert (code, "failed" in out) == (0, False)
    assert "MSA" in (folder / "table/table.md").read_text()
    assert not verify_folder(folder / "table/msa/model")


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="no benchmark rows in ../shared/data")
@pytest.mark.parametrize(
    ("name", "row", "data", "metric", "epochs"),
    [
        ("tofu-forget10-llama-3.2-1b", "MSA (instruct)", "tofu", "forget quality", 6),
        ("restor-llama-3.1-8b", "MSA (instruct)", "restor", "accuracy", 1),
        ("muse-books-llama-3.1-8b", "MSA (filter)", "muse-books-pd", "PrivLeak", 3),
    ],
)
def test_a_table_at_small_size(
    name: str,
    row: str,
    data: str,
    metric: str,
    epochs: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each benchmark, from its rows to its table: two rows of it, with models that have learnt a little."""
    benchmark = name.partition("-")[0]
    short = replace(small_table._SIZES[benchmark], prior=1, tuning=epochs)
    monkeypatch.setitem(small_table._SIZES, benchmark, short)
    monkeypatch.setattr(small_rows, "_PASSAGES", 12)
    monkeypatch.setattr(small_rows, "_ORDERS", 6)
    few = {"evaluate.limit": 8, "evaluate.max_new_tokens": 4, "forget.alpha": [0.1, 0.2]}  # baselines choose, too
    few["baseline.methods.npo"] = {"retain_weight": 2}
    table = load_table_recipe(name).model_dump(mode="json")
    (tmp_path / "table.yaml").write_text(yaml.safe_dump({**table, "set": {**table["set"], **few}}))
    words = ["small_table.py", f"{tmp_path}/table.yaml", f"{DATA / data}", "--folder", f"{tmp_path}/out"]
    monkeypatch.setattr("sys.argv", [*words, "--only", f"{row},NPO"])
    assert small_table.main() == 0
    text = (tmp_path / "out/table.md").read_text()
    assert metric in text
    assert f"| {row} " in text
    assert "| NPO " in text
    assert "published" in text
