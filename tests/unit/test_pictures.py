"""The pictures of a sweep: what is drawn where, and that nothing of the caller's matplotlib changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.choose.pictures import draw_pictures, forget_retain, heat_map, write_pictures
from msa_lite.choose.table import Candidate, Sweep
from msa_lite.report import Metric

GRID = [(alpha, beta) for alpha in (0.0, 0.5, 1.0) for beta in (0.0, 1.0, 2.0)]


def metrics(forget: float, retain: float, names: tuple[str, str] = ("rouge_l_f", "rouge_l_r")) -> dict[str, Metric]:
    return {names[0]: Metric(forget, 60, 0.03, False), names[1]: Metric(retain, 57, 0.02, True)}


def sweep(points: Iterable[tuple[float, float]], broken: Any = (), unmet: Any = ()) -> Sweep:
    """Scores that rise with alpha, and with beta by less; the last point is the chosen one."""
    candidates = [
        Candidate({"alpha": a, "beta": b}, {}, None, note="no numbers")
        if (a, b) in broken
        else Candidate({"alpha": a, "beta": b}, metrics(0.9 - a / 4, 0.9 - a / 8), a / 2 + b / 10, (a, b) not in unmet)
        for a, b in points
    ]
    chosen = candidates[-1].values
    return Sweep(candidates, metrics(0.95, 0.93), metrics(0.3, 0.9), chosen, "extraction", "forget10 validation", "qa")


def drawn(figure: Any) -> Any:
    """The axes of the picture itself, which come before those of its colour bar."""
    return figure.axes[0]


def labels(axis: Any) -> list[float]:
    """The values along an axis, one a step."""
    return [float(text.get_text()) for text in axis.get_ticklabels()]


def place(axes: Any, x: float, y: float) -> tuple[float, float]:
    """The values of a step along either axis."""
    return labels(axes.xaxis)[round(x)], labels(axes.yaxis)[round(y)]


def filled(axes: Any) -> dict[tuple[float, float], tuple[float, float, float, float]]:
    """The cells of a heat map, (left, bottom, right, top), by the values that they stand for."""
    boxes = [patch.get_bbox() for patch in axes.patches if patch.get_fill()]
    return {place(axes, (b.x0 + b.x1) / 2, (b.y0 + b.y1) / 2): (b.x0, b.y0, b.x1, b.y1) for b in boxes}


def marked(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The places of what the legend names."""
    signs: dict[str, list[tuple[float, float]]] = {}
    for line in axes.lines:
        signs.setdefault(line.get_label(), []).append(tuple(line.get_xydata()[0]))
    return signs


def legend(figure: Any) -> list[str]:
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def test_pictures_are_png_files_of_a_printable_size(tmp_path: Path) -> None:
    paths = write_pictures(sweep(GRID, broken={(0.5, 2.0)}), tmp_path / "run")
    assert [path.name for path in paths] == ["heat_map.png", "forget_retain.png"]
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert 900 < height < width < 1500
        assert b"Time" not in data[:200]
        assert 10_000 < len(data) < 300_000


def test_a_heat_map_has_a_cell_with_its_score_for_each_point() -> None:
    figure = heat_map(sweep(GRID, broken={(0.5, 2.0)}, unmet={(0.0, 0.0), (0.0, 1.0)}))
    axes = drawn(figure)
    assert (axes.get_xlabel()[0], axes.get_ylabel()[0]) == ("α", "β")
    assert axes.get_title(loc="left") == "Score of each point, forget10 validation"
    cells = filled(axes)
    assert sorted(cells) == GRID
    assert cells[0.5, 1.0] == (0.5, 0.5, 1.5, 1.5)
    # α/2 + β/10 by hand; nothing is written where it is broken, (0.5, 2), or conditions are not met
    written = {place(axes, *text.get_position()): text.get_text() for text in axes.texts}
    assert written == {
        (0.0, 2.0): "0.200",
        (0.5, 0.0): "0.250", (0.5, 1.0): "0.350",
        (1.0, 0.0): "0.500", (1.0, 1.0): "0.600", (1.0, 2.0): "0.700",
    }  # fmt: skip
    assert [place(axes, *at) for at in marked(axes)["broken"]] == [(0.5, 2.0)]
    assert sum(bool(patch.get_hatch()) for patch in axes.patches) == 2
    frames = [patch.get_bbox() for patch in axes.patches if not patch.get_fill() and not patch.get_hatch()]
    assert [(frame.x0, frame.y0, frame.x1, frame.y1) for frame in frames] == [cells[1.0, 2.0]]
    assert legend(figure) == ["conditions not met", "chosen: α = 1, β = 2", "broken"]
    assert [bar.get_ylabel() for bar in figure.axes[1:]] == ["kept ↑"]  # type: ignore[union-attr]


def test_cells_are_of_one_size_whatever_the_steps_and_missing_points_stay_blank() -> None:
    points = [(a, b) for a in (0.0, 1.0, 3.0) for b in (0.0, 1.0) if (a, b) != (1.0, 0.0)]
    axes = drawn(heat_map(sweep(points)))
    assert sorted(filled(axes)) == points
    assert {(right - left, top - bottom) for left, bottom, right, top in filled(axes).values()} == {(1.0, 1.0)}
    assert (axes.get_xlim(), axes.get_ylim()) == ((-0.5, 2.5), (-0.5, 1.5))


def test_points_of_a_refinement_have_rows_and_columns_of_their_own() -> None:
    coarse = [(float(a), float(b)) for a in range(5) for b in range(5)]
    fine = [(a, b) for a in (1.5, 2.0, 2.5) for b in (1.5, 2.0, 2.5) if (a, b) != (2.0, 2.0)]
    axes = drawn(heat_map(sweep(coarse + fine)))
    assert sorted(filled(axes)) == sorted(coarse + fine)
    assert labels(axes.xaxis) == labels(axes.yaxis) == [0, 1, 1.5, 2, 2.5, 3, 4]
    assert len(axes.texts) == len(coarse + fine)


def test_where_cells_are_small_numbers_are_left_out_and_some_steps_have_no_label() -> None:
    axes = drawn(heat_map(sweep([(a / 10, b / 10) for a in range(20) for b in range(5)])))
    assert not axes.texts
    assert labels(axes.xaxis) == [a / 10 for a in range(0, 20, 2)]


@pytest.mark.parametrize(
    ("points", "label"),
    [
        ([(a, 1.0) for a in (0.0, 0.5, 1.0, 2.0)], "α, strength of the forget vector (β = 1)"),
        ([(1.0, b) for b in (0.0, 0.5, 1.0, 2.0)], "β, strength of the retain vector (α = 1)"),
    ],
)
def test_where_one_strength_varies_the_score_is_a_line(points: list[tuple[float, float]], label: str) -> None:
    given = sweep(points, broken={points[0]}, unmet={points[1]})
    figure = heat_map(given)
    axes = drawn(figure)
    assert (axes.get_xlabel(), axes.get_ylabel()) == (label, "kept ↑")
    xs, ys = axes.lines[0].get_data()
    assert list(ys) == [one.score for one in given.candidates[2:]]
    assert list(xs) == [2, 3]
    assert labels(axes.xaxis) == [0.0, 0.5, 1.0, 2.0]
    assert [line.get_data()[1][0] for line in axes.lines[1:3]] == [0.04, 0.04]  # at the foot: no score to place them by
    assert len(axes.lines) == 1 + 4 + 1  # the line, a marker each, the chosen one's ring
    assert legend(figure)[::2] == ["conditions not met", "broken"]


def test_scores_that_do_not_meet_the_conditions_take_no_colours_from_the_others() -> None:
    given = sweep(GRID, unmet={(0.0, 0.0)})
    far = replace(given.candidates[0], score=-1.0)
    figure: Any = heat_map(replace(given, candidates=[far, *given.candidates[1:]]))
    bar = figure.axes[1]
    assert bar.get_ylim() == pytest.approx((0.1, 0.7))  # of the others: β/10 at (0, 1), and 1/2 + 2/10 at (1, 2)


def test_a_metric_that_is_to_be_low_is_drawn_as_it_is_with_the_lowest_brightest() -> None:
    given = sweep(GRID)
    low = [replace(one, score=-(one.score or 0.0)) for one in given.candidates]  # as a rule ranks it
    figure: Any = heat_map(replace(given, candidates=low, score_name="minimise rouge_l_f"))
    assert figure.axes[1].get_ylabel() == "rouge_l_f ↓"
    assert {text.get_text() for text in drawn(figure).texts} >= {"0.000", "0.700"}
    faces = {p.get_bbox().x0: sum(p.get_facecolor()[:3]) for p in drawn(figure).patches if p.get_fill()}
    assert faces[min(faces)] > faces[max(faces)]


def test_where_nothing_meets_the_conditions_points_are_drawn_without_colours() -> None:
    figure: Any = heat_map(sweep(GRID, unmet=GRID))
    assert len(figure.axes) == 1  # no colour bar
    assert not drawn(figure).texts
    assert sum(bool(patch.get_hatch()) for patch in drawn(figure).patches) == 9


def test_no_heat_map_without_two_strengths_to_compare() -> None:
    baseline = [Candidate({"epoch": epoch}, metrics(0.5, 0.8), 0.5 + epoch / 10) for epoch in (1, 2)]
    assert heat_map(replace(sweep(GRID), candidates=baseline, chosen={"epoch": 2})) is None
    assert heat_map(sweep([(1.0, 1.0)])) is None
    assert heat_map(sweep(GRID, broken=GRID)) is None
    assert heat_map(replace(sweep(GRID), candidates=[])) is None


def test_all_scores_alike_are_drawn() -> None:
    given = sweep(GRID)
    alike = replace(given, candidates=[replace(one, score=0.25) for one in given.candidates])
    assert {text.get_text() for text in drawn(heat_map(alike)).texts} == {"0.250"}


def test_forget_stands_against_retain_with_target_ideal_and_chosen_named() -> None:
    figure = forget_retain(sweep(GRID, broken={(0.5, 2.0)}))
    axes = drawn(figure)
    assert axes.get_xlabel() == "← better   ROUGE-L recall, forget set (0…1)"
    assert axes.get_ylabel() == "ROUGE-L recall, retain set (0…1)   better →"
    assert axes.get_title(loc="left") == "Forget set against retain set, forget10 validation"
    assert len(axes.containers) == 8 + 2  # candidates that are not broken, target and ideal: each with error bars
    assert legend(figure) == ["target", "ideal", "chosen: α = 1, β = 2"]
    signs = marked(axes)
    assert [signs[name] for name in legend(figure)] == [[(0.95, 0.93)], [(0.3, 0.9)], [(0.9 - 1 / 4, 0.9 - 1 / 8)]]
    across, up = (bars.get_segments()[0] for bars in axes.containers[2][2])  # the first candidate's
    assert across[:, 0] == pytest.approx([0.87, 0.93])  # 0.9 ± 0.03
    assert up[:, 1] == pytest.approx([0.88, 0.92])  # 0.9 ± 0.02


def test_the_pair_of_metrics_is_the_first_that_is_there() -> None:
    for names, up in ((("verbmem_f", "knowmem_r"), False), (("accuracy_corrupted", "accuracy_other"), True)):
        values = {name: Metric(0.4, 50, None, up) for name in names}
        only = Candidate({"epoch": 1}, values, 0.5)
        given = Sweep([only], values, None, only.values, "muse", "validation", "muse")
        figure = forget_retain(given)
        assert drawn(figure).get_xlabel().startswith("← better") is not up
        assert legend(figure) == ["target", "chosen: epoch = 1"]
        assert forget_retain(replace(given, candidates=[replace(only, metrics={names[0]: values[names[0]]})])) is None


def test_only_pictures_with_something_to_show_are_written(tmp_path: Path) -> None:
    only = Candidate({"epoch": 1}, metrics(0.5, 0.9), 0.5)
    given = Sweep([only], metrics(0.9, 0.9), None, only.values, "$a$ of $b", "$c$ rows$", "qa")
    assert [path.name for path in write_pictures(given, tmp_path)] == ["forget_retain.png"]
    assert write_pictures(replace(given, candidates=[replace(only, metrics={})]), tmp_path / "none") == []


def test_without_matplotlib_a_warning_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw_pictures(sweep(GRID), tmp_path)
    assert "pip install matplotlib" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_neither_import_nor_drawing_touches_what_is_global(tmp_path: Path) -> None:
    code = f"""
import json, sys
from msa_lite.choose.pictures import write_pictures
from msa_lite.choose.table import Candidate, Sweep
from msa_lite.report import Metric
early = sorted({{"matplotlib", "rich"}} & set(sys.modules))
metrics = {{"rouge_l_f": Metric(0.5, 9, 0.1, False), "rouge_l_r": Metric(0.5, 9, 0.1, True)}}
found = [Candidate({{"alpha": a, "beta": b}}, metrics, a + b) for a in (0, 1) for b in (0, 1)]
sweep = Sweep(found, metrics, None, found[-1].values, "extraction", "rows", "qa")
import matplotlib
before = list(dict.items(matplotlib.rcParams))  # as they are stored: asking for the backend loads pyplot
paths = write_pictures(sweep, __import__("pathlib").Path({str(tmp_path)!r}))
same = before == list(dict.items(matplotlib.rcParams))
print(json.dumps([early, len(paths), "matplotlib.pyplot" in sys.modules, same]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], 2, False, True]
