"""What is told of the chosen point where it scores otherwise as a merged model than it did in memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.choose.rules import Rank
from msa_lite.pipeline.run import choice as strengths
from msa_lite.report.run.choice import Candidate, Choice


@pytest.mark.parametrize(
    ("after", "warned"),
    [
        (Rank(True, 0.5), False),
        (Rank(True, 0.519), False),
        (Rank(True, 0.481), False),
        (Rank(True, 0.521), True),
        (Rank(True, 0.479), True),
        (Rank(False, 0.5), True),
        ("nothing is left", True),
    ],
)
def test_a_difference_of_more_than_a_fiftieth_is_warned_of(
    after: Rank | str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, line = rescored(after, monkeypatch)
    assert "the chosen point in memory: 0.5000; as merged model: " in line
    assert bool(told) is warned


def rescored(after: Rank | str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """The warnings, and the line on a choice that scores 0.5 whose merged model ranks as `after`."""
    told: list[str] = []
    monkeypatch.setattr(strengths.logger, "warning", lambda text, *values: told.append(text % values))
    values = {"alpha": 1.0, "beta": 0.5}
    choice = Choice("tofu", values, [Candidate(values, {}, 0.5, True)], [], {}, None, "validation", "tofu")
    monkeypatch.setattr(strengths, "score_model", lambda *given: None)
    monkeypatch.setattr(strengths, "load_choice", lambda folder: choice)
    monkeypatch.setattr(strengths, "validation_of", lambda run: SimpleNamespace(rank=lambda *folders: after))
    scope = SimpleNamespace(folder=Path("run"))
    run: Any = SimpleNamespace(folder=Path("run"), scope=scope)
    (line,) = strengths._rescore(run, lambda *step: None)
    return told, line
