"""The pictures of a choice: what is drawn where, in words and as files of their own."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from msa_lite.report import Metric
from msa_lite.report.page.maps import forget_retain_pair, sweep_chart, write_pictures
from msa_lite.report.run.choice import Candidate, Choice

GRID = [(a, b) for a in (0.0, 0.5, 1.0) for b in (0.0, 1.0, 2.0)]
Points = Collection[tuple[float, float]]


def metrics(forget: float, retain: float, names: tuple[str, str] = ("rouge_l_f", "rouge_l_r")) -> dict[str, Metric]:
    return {names[0]: Metric(forget, 60, 0.03, False), names[1]: Metric(retain, 57, 0.02, True)}


def make_choice(points: Iterable[tuple[float, float]], broken: Points = (), unmet: Points = ()) -> Choice:
    """Scores that rise with alpha, and with beta by less; the last point is the chosen one."""
    candidates = [
        Candidate({"alpha": a, "beta": b}, {}, None, note="no numbers")
        if (a, b) in broken
        else Candidate({"alpha": a, "beta": b}, metrics(0.9 - a / 4, 0.9 - a / 8), a / 2 + b / 10, (a, b) not in unmet)
        for a, b in points
    ]
    target, ideal = metrics(0.95, 0.93), metrics(0.3, 0.9)
    return Choice("extraction", candidates[-1].values, candidates, [], target, ideal, "validation", "qa")


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


def test_the_best_is_the_deepest() -> None:
    chart = sweep_chart(make_choice(GRID))
    assert chart is not None
    depths = [float(depth) for depth in re.findall(r"opacity: (0\.\d+)", chart.svg)]
    assert (depths[-1], len(depths)) == (max(depths), 9), "(1, 2) has the highest score"
    assert (min(depths), max(depths)) == (0.06, 0.5)


def test_where_cells_are_small_numbers_are_left_out_and_some_steps_have_no_label() -> None:
    chart = sweep_chart(make_choice([(a / 10, b / 10) for a in range(20) for b in range(5)]))
    assert chart is not None
    assert not [text for text in texts(chart.svg) if re.fullmatch(r"0\.\d{3}", text)]
    assert "0.1" not in texts(chart.svg)[:10]


@pytest.mark.parametrize("points", [[(a, 1.0) for a in (0, 0.5, 1, 2)], [(1.0, b) for b in (0, 0.5, 1, 2)]])
def test_where_one_strength_varies_the_score_is_a_line(points: list[tuple[float, float]]) -> None:
    chart = sweep_chart(make_choice(points, broken={points[0]}, unmet={points[1]}))
    assert chart is not None
    assert chart.words.startswith("Line chart. kept ↑ of 4 candidates")
    assert "ringed" in chart.caption
    assert chart.caption.count("× at the foot") == 1
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


@pytest.mark.parametrize("names", [("verbmem_f", "knowmem_r"), ("accuracy_corrupted", "accuracy_other")])
def test_the_pair_of_metrics_is_the_first_that_is_there(names: tuple[str, str]) -> None:
    values = metrics(0.4, 0.5, names)
    candidate = Candidate({"epoch": 1}, values, 0.5)
    choice = Choice("muse", candidate.values, [candidate], [], values, None, "validation", "muse")
    assert forget_retain_pair(choice) == names
    lacking = replace(candidate, metrics={names[0]: values[names[0]]})
    assert forget_retain_pair(replace(choice, candidates=[lacking])) is None


def test_a_file_needs_no_page_around_it(tmp_path: Path) -> None:
    write_pictures(make_choice(GRID, unmet={(0.0, 0.0)}), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heat_map.svg"]
    for path in tmp_path.iterdir():
        text = path.read_text("utf-8")
        root = ET.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in text
        height = float(root.attrib["viewBox"].split()[3])
        captions = [element for element in root.iter() if element.text and "chosen" in element.text]
        assert captions
        assert float(captions[-1].attrib["y"]) <= height
    map_text = (tmp_path / "heat_map.svg").read_text("utf-8")
    assert "Hatched: misses" in map_text


def test_only_pictures_with_something_to_show_are_written(tmp_path: Path) -> None:
    candidate = Candidate({"epoch": 1}, metrics(0.5, 0.9), 0.5)
    write_pictures(Choice("a", candidate.values, [candidate], [], metrics(0.9, 0.9), None, "rows", "qa"), tmp_path)
    assert [*tmp_path.iterdir()] == []
