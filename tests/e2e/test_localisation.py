"""The example that locates updates: all of it runs at the smallest size, and its results are those of its scores."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/localisation"


@pytest.mark.slow
def test_the_example_locates_updates_in_a_tiny_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["msa-full", "undial"]
    arguments = ["--tiny", "--seeds", "3", "--methods", *methods, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    runpy.run_path(str(EXAMPLE / "run.py"), run_name="__main__")
    rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == ["target", *methods, "exact undo"]
    target, *unlearned, undo = rows
    assert (target["precision"], target["auc"], target["undone"]) == (None, 0.5, 0)
    for row in unlearned:
        assert row["chance"] < row["chance_within"] == pytest.approx(0.05, rel=0.2)
        assert row["precision"] < 0.5
        assert row["undone"] != 0
    assert [undo[key] for key in ("precision", "auc", "precision_within", "energy")] == [1, 1, 1, 1]
    assert [undo[key] for key in ("cosine", "undone")] == pytest.approx([1, 1])
    out = capsys.readouterr().out
    assert all(out.count(f"| {name} |") == 2 for name in ("target", *methods, "exact undo"))


def test_the_table_of_the_results_is_that_of_the_scores() -> None:
    rows = [json.loads(line) for line in (EXAMPLE / "scores.jsonl").read_text().splitlines()]
    names = runpy.run_path(str(EXAMPLE / "run.py"))
    assert [row["seed"] for row in rows] == sorted([0, 1, 2] * (len(names["METHODS"]) + 2))
    for columns in names["TABLES"].values():
        assert names["as_markdown"](rows, columns) in (EXAMPLE / "RESULTS.md").read_text()
