"""The picture of a choice: what is drawn where, and in words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest

from msa_lite.report.page.charts import sweep_chart
from msa_lite.report.run.choice import Candidate, Choice

GRID = [(a, b) for a in (0.0, 0.5, 1.0) for b in (0.0, 1.0, 2.0)]
Points = Collection[tuple[float, float]]


def make_choice(points: Iterable[tuple[float, float]], broken: Points = (), unmet: Points = ()) -> Choice:
    """Scores that rise with alpha, and with beta by less; the last point is the chosen one."""
    candidates = [
        Candidate({"alpha": a, "beta": b}, {}, None, note="no numbers")
        if (a, b) in broken
        else Candidate({"alpha": a, "beta": b}, {}, a / 2 + b / 10, (a, b) not in unmet)
        for a, b in points
    ]
    return Choice("extraction", candidates[-1].values, candidates, [], {}, None, "validation", "qa")


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def shapes(svg: str, style: str) -> int:
    """Count the shapes that are drawn in a style."""
    return len(re.findall(f'style="[^"]*{style}', svg))


def test_a_map_has_a_number_for_each_score_and_a_sign_for_each_point_without() -> None:
    chart = sweep_chart(make_choice(GRID, broken={(0.5, 2.0)}, unmet={(0.0, 0.0), (0.0, 1.0)}))
    assert chart is not None
    # α/2 + β/10 by hand; nothing is written where it is broken, (0.5, 2), or conditions are not met
    written = [text for text in texts(chart.svg) if re.fullmatch(r"0\.\d{3}", text)]
    assert sorted(written) == ["0.200", "0.250", "0.350", "0.500", "0.600", "0.700"]
    assert {"α", "β"} <= set(texts(chart.svg))
    assert "kept ↑ of 9 candidates, from 0.200 to 0.700. Chosen: α\u00a0=\u00a01, β\u00a0=\u00a02." in chart.words
    assert chart.caption.endswith("was chosen. Hatched: misses the conditions of the rule. ×: broken.")
    assert shapes(chart.svg, "stroke-width: 2.4") == 1, "the chosen one is framed"
    assert len(re.findall(r"fill: url\(#sweep-", chart.svg)) == 2, "two are hatched"
    plain = sweep_chart(make_choice(GRID))
    assert plain is not None
    assert plain.caption.endswith("was chosen.")
    assert "url(#sweep-h" not in plain.svg


@pytest.mark.parametrize("points", [[(a, 1.0) for a in (0, 0.5, 1, 2)], [(1.0, b) for b in (0, 0.5, 1, 2)]])
def test_where_one_strength_varies_the_map_has_one_row(points: list[tuple[float, float]]) -> None:
    chart = sweep_chart(make_choice(points, broken={points[0]}, unmet={points[1]}))
    assert chart is not None
    assert chart.words.startswith("Heat map. kept ↑ of 4 candidates")
    assert chart.caption.endswith("Hatched: misses the conditions of the rule. ×: broken.")
    assert [text for text in texts(chart.svg) if text in ("α", "β")] == ["α" if points[0][1] == 1 else "β"]


@pytest.mark.parametrize("points", [GRID, GRID[:3]])
def test_where_nothing_meets_the_conditions_points_are_drawn_without_scores(points: Points) -> None:
    chart = sweep_chart(make_choice(points, unmet=points))
    assert chart is not None
    assert not [text for text in texts(chart.svg) if re.fullmatch(r"0\.\d{3}", text)]
    assert "none of which meets the conditions" in chart.words


def test_no_picture_of_a_score_without_something_to_compare() -> None:
    assert sweep_chart(make_choice([(1.0, 1.0)])) is None
    assert sweep_chart(make_choice(GRID, broken=GRID)) is None
    mixed = make_choice(GRID)
    other = replace(mixed.candidates[0], values={"epoch": 1})
    assert sweep_chart(replace(mixed, candidates=[other, *mixed.candidates])) is None
