"""Advice is looked at before it is given: each remedy is one that this run has not taken already, and can take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.pipeline.run.choice import remedies_of
from msa_lite.train.settings import FitSettings
from msa_lite.train.until import fit_remedies


@pytest.mark.parametrize(
    ("mode", "start", "retain", "words"),
    [
        ("lora", "prior", True, ["vector.mode full", "a prior", "more retain rows"]),
        ("full", "prior", True, ["a prior", "more retain rows"]),
        ("full", "target", True, ["more retain rows"]),  # a task vector has no prior
        ("qlora", "prior", False, ["vector.mode full", "a prior", "rows to keep"]),
    ],
)
def test_a_choice_that_falls_short_is_told_what_the_run_can_still_try(
    mode: str, start: str, retain: bool, words: list[str]
) -> None:
    vector = SimpleNamespace(mode=mode)
    run: Any = SimpleNamespace(
        recipe=SimpleNamespace(vector=vector, retain=object() if retain else None), scope=SimpleNamespace(start=start)
    )
    remedies = remedies_of(run)
    assert len(remedies) == len(words)
    assert all(remedy.startswith(word) for remedy, word in zip(remedies, words, strict=True))


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_a_fit_that_falls_short_is_not_told_to_take_the_mode_it_has(mode: Any) -> None:
    remedies = fit_remedies(FitSettings(mode=mode))
    assert ("vector.mode full" in remedies) == (mode != "full")
    assert ("rank" in remedies) == (mode != "full")
    assert "learning_rate" in remedies
