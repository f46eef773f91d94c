"""The page of what is given away: its table and its figure are those of the stored scores."""

from __future__ import annotations

from typing import Any

import gives_away
import pytest


def _evidence(model: str) -> dict[str, Any]:
    if model not in gives_away.METHODS:
        return dict.fromkeys(gives_away.SHARES, 0.25)
    tests = {"losses": [0.5, 0.01, 0.2, "control"], "states": [None, 0.3, None, "undecided"]}
    return dict.fromkeys(gives_away.SHARES, 0.25) | tests


def stored(*seeds: int, history: str = "small") -> list[dict[str, Any]]:
    """Scores of two seeds in which every model gives away a tenth more than the one before it."""
    return [
        {
            "history": history,
            "seed": seed,
            "panels": {
                panel: {
                    model: [at / 10 + seed / 10, 0.05, 24]
                    for at, model in enumerate(gives_away.MODELS)
                    if (panel, model) != ("depth", "npo")
                }
                for panel in gives_away.PANELS
            },
            "relearning": {model: {"0": 0.1, "3": 0.5, "6": 0.4} for model in gives_away.MODELS},
            "evidence": {model: _evidence(model) for model in gives_away.MODELS},
        }
        for seed in seeds
    ]


def test_a_figure_is_the_mean_over_seeds_or_has_the_error_of_one() -> None:
    assert gives_away.mean_of(stored(0, 1), "prompt", "unlearned") == pytest.approx((0.25, 0.0707), rel=1e-3)
    assert gives_away.mean_of(stored(0), "prompt", "unlearned") == pytest.approx((0.2, 0.098))
    assert gives_away.mean_of(stored(0), "depth", "npo") is None


def test_the_table_has_a_line_for_each_model_of_each_history() -> None:
    lines = gives_away.table([*stored(0, 1), *stored(0, history="smollm2")]).splitlines()
    assert len(lines) == 2 + 2 * len(gives_away.MODELS)
    cells = [cell.strip() for cell in lines[-1].split("|")[1:-1]]
    assert cells[:2] == ["SmolLM2-135M, seed 0", "NPO"]
    assert cells[2] == "0.50 ± 0.10"
    assert cells[-1] == "0.50"
    assert cells[2 + list(gives_away.PANELS).index("depth")] == "–"


def test_the_table_of_evidence_has_positions_of_each_seed_and_a_mark_where_nothing_is_shown() -> None:
    line = gives_away.evidence_table(stored(0, 1)).splitlines()[-1]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[2:] == ["25 %"] * 3 + ["+0.50 (0.20), +0.50 (0.20)", "?, ?"]


def test_the_page_shows_the_stored_scores() -> None:
    scores = gives_away.load()
    tables = {
        gives_away.PAGE: gives_away.table(gives_away.attacked_of(scores)),
        gives_away.EVIDENCE_PAGE: gives_away.evidence_table(scores),
    }
    for path, text in tables.items():
        page = path.read_text("utf-8")
        assert gives_away.with_table(page, text) == page
        assert page.count(gives_away.MARKS[0]) == page.count(gives_away.MARKS[1]) == 1
