"""The table and the picture of a choice: who is chosen, broken or beside the conditions."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest
from rich.console import Console

from msa_lite.report import Metric
from msa_lite.report.page.charts import sweep_chart
from msa_lite.report.run.choice import Candidate, Choice, points_markdown, points_table, shown_metrics
from msa_lite.report.tables.formats import terminal_table


def metric(value: float | None, up: bool = False, n: int = 60, stderr: float | None = 0.02) -> Metric:
    return Metric(value, n, stderr, up)


def metrics(forget: float, retain: float) -> dict[str, Metric]:
    return {"rouge_l_f": metric(forget), "probability_f": metric(0.3), "rouge_l_r": metric(retain, True, 57)}


SWEEP = Choice(
    candidates=[
        Candidate({"alpha": 0.5, "beta": 0}, metrics(0.7, 0.92), 0.375),
        Candidate({"alpha": 1.0, "beta": 0}, metrics(0.4, 0.9), 0.75),
        Candidate({"alpha": 1.5, "beta": 0}, metrics(0.2, 0.4), -0.5, met=False, note="rouge_l_r is 0.4, 0.9 wanted"),
        Candidate({"alpha": 2.0, "beta": 0}, {}, None, note="not a number |\nin the logits [of x]"),
    ],
    target=metrics(0.96, 0.95),
    ideal=metrics(0.35, 0.94),
    values={"alpha": 1, "beta": 0.0},  # as it may come back from JSON
    rule="extraction",
    doubts=(),
    split="forget10 validation",
    benchmark="qa",
)


def rendered(choice: Choice, width: int = 100) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(terminal_table(points_table(choice), dense=True))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_terminal_marks_candidates_in_words() -> None:
    lines = rendered(SWEEP)
    cells = [line.split() for line in lines]
    assert lines[0].rstrip() == "Sweep, forget10 validation; chosen: α = 1, β = 0."
    assert ["target", "–", "0.960", "0.950"] in cells
    chosen = cells.index(["chosen", "1", "0", "0.750", "0.400", "0.900"])
    assert cells[chosen + 1] == ["±", "0.020", "±", "0.020"]
    assert ["not", "met", "1.5", "0", "–", "0.200", "0.400"] in cells
    assert ["broken", "2", "0", "–", "–", "–"] in cells


def test_nothing_of_a_wide_table_is_cut_in_eighty_columns() -> None:
    names = ["extraction_strength", "model_utility", "acc_forget", "acc_recover", "acc_retain"]
    more = {name: metric(0.123, True) for name in names}
    wide = replace(
        SWEEP,
        candidates=[replace(one, metrics=one.metrics and {**one.metrics, **more}) for one in SWEEP.candidates],
        target={**SWEEP.target, **more},
        ideal=None,
        benchmark="tofu",
    )
    assert len(shown_metrics(wide)) == 8
    row = next(line.split() for line in rendered(wide, 80) if line.startswith((" not met", "not met ")))
    assert row == ["not", "met", "1.5", "0", "–", "0.200", "0.123", "0.300", "0.123", "0.400", *["0.123"] * 3]


def test_markdown_has_every_standard_error_and_odd_signs_break_no_cell() -> None:
    text = points_markdown(SWEEP)
    lines = text.splitlines()
    assert lines[0] == "Sweep, forget10 validation; chosen: α = 1, β = 0."
    assert lines[2].startswith("| model | alpha | beta | kept ↑ | ROUGE-L recall, forget set ↓ (n = 60) |")
    assert lines[2].endswith("| ROUGE-L recall, retain set ↑ (n = 57) |")
    assert "| target |  |  | – | 0.960 ± 0.020 | 0.950 ± 0.020 |" in lines
    assert "| **chosen** | 1 | 0 | 0.750 | 0.400 ± 0.020 | 0.900 ± 0.020 |" in lines
    assert "| not met | 1.5 | 0 | – | 0.200 ± 0.020 | 0.400 ± 0.020 |" in lines
    assert "| broken | 2 | 0 | – | – | – |" in lines
    assert r"- α = 2, β = 0: broken: not a number \| in the logits \[of x\]." in lines


def test_candidates_of_a_baseline_are_told_by_their_own_values() -> None:
    values: list[dict[str, float | int | str]] = [{"learning_rate": 1e-4, "epoch": 1}, {"start": "prior", "epoch": 2}]
    choice = replace(
        SWEEP, candidates=[Candidate(one, metrics(0.5, 0.9), 0.5) for one in values], values=dict(values[1])
    )
    lines = points_markdown(choice).splitlines()
    assert lines[2].startswith("| model | learning_rate | epoch | start | kept")
    assert any(line.startswith("|  | 0.0001 | 1 |  | 0.500 |") for line in lines)
    assert any(line.startswith("| **chosen** |  | 2 | prior | 0.500 |") for line in lines)


@pytest.mark.parametrize(
    ("benchmark", "there", "shown"),
    [
        ("restor", "accuracy_other accuracy accuracy_corrupted", "accuracy accuracy_corrupted accuracy_other"),
        ("qa", "exact_memorization extraction_strength probability_r", "extraction_strength probability_r"),
        ("my-own", "own_score_r own_score", "own_score_r own_score"),
    ],
)
def test_the_metrics_shown_are_the_main_ones_of_the_benchmark(benchmark: str, there: str, shown: str) -> None:
    values = {name: metric(0.5) for name in there.split()}
    choice = Choice(
        "extraction", {"alpha": 1}, [Candidate({"alpha": 1}, values, 0.5)], (), values, None, "all", benchmark
    )
    assert list(shown_metrics(choice)) == shown.split()


# The picture of a choice: what is drawn where, and in words.


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
