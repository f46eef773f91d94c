"""Rows of earlier requests: which of them come back, and how that is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from msa_lite.evals.scores.records import write_records
from msa_lite.pipeline.run.verdict import _count_back
from msa_lite.report.verdict.figures import EarlierFacts
from tests.support.records import make_forgotten

ROW = {"index": 0, "question": "Where does Ada live?", "answer": "In Yarheath."}
TOLD, SILENT = ROW | {"generated": "In Yarheath."}, ROW | {"generated": "In Oslo."}


def test_a_row_comes_back_only_if_its_own_request_is_known_to_have_removed_it(tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("forgot", "never", "unscored")}
    for name, record in (("forgot", SILENT), ("never", TOLD)):
        for model in ("target", "unlearned"):
            folder = runs[name] / "evaluation" / model
            folder.mkdir(parents=True)
            write_records(folder / "forget.jsonl", [record])
    counts = {name: sum(_count_back([run], {"unlearned": [TOLD]}).values()) for name, run in runs.items()}
    assert counts == {"forgot": 1, "never": 0, "unscored": 0}
    assert _count_back([runs["forgot"]], {"unlearned": [TOLD], "ideal": [TOLD]}) == {}, "the ideal says it, too"


def test_the_count_of_holdout_rows_stands_behind_the_holdout() -> None:
    scored = replace(
        make_forgotten(40), recited={"target": 8, "unlearned": 0, "holdout": 1, "prior": 2}, control="holdout",
        control_rows=24,
    )  # fmt: skip
    headline = EarlierFacts(2, 40, scored).headline
    assert "unseen rows: 1 of 24" in headline
    assert "prior: 2)" in headline
