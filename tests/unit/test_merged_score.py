"""The chosen point once it is merged: its score is told beside the one in memory, with a warning where they differ."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.evals.selection import Rank
from msa_lite.io.progress import silent
from msa_lite.pipeline import strengths
from msa_lite.pipeline.strengths import Swept, rescore


@pytest.mark.parametrize(
    ("rank", "warns"),
    [
        (Rank(True, 0.80), False),
        (Rank(True, 0.819), False),
        (Rank(True, 0.781), False),
        (Rank(True, 0.821), True),
        (Rank(True, 0.779), True),
        (Rank(False, 0.80), True),
        ("gibberish", True),
    ],
)
def test_a_merged_score_is_told_and_one_that_is_apart_is_warned_of(
    rank: Any, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    choice: Any = SimpleNamespace(rule="exposure", score=0.8, met=True)
    scored: list[Any] = []
    monkeypatch.setattr(strengths, "evaluate_merged", lambda *given: scored.append(given[1]))
    monkeypatch.setattr(strengths, "validation_of", lambda job: SimpleNamespace(rank=lambda *folders: rank))
    job: Any = SimpleNamespace(folder=tmp_path)
    with caplog.at_level(logging.WARNING, strengths.logger.name):
        (line,) = rescore(job, Swept(1.0, 0.0, choice), "the merged model", silent)  # type: ignore[arg-type]
    assert scored == ["the merged model"]
    assert "in memory: 0.8000; as merged model: " in line
    assert [record.message for record in caplog.records if "weights are rounded" in record.message] == (
        [f"{line[0].lower()}{line[1:-2]}; its weights are rounded, or the points were tried in 4-bit"] if warns else []
    )


def test_nothing_is_told_where_nothing_was_chosen() -> None:
    assert rescore(None, Swept(1.0, 0.0), None, silent) == []  # type: ignore[arg-type]
