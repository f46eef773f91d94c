"""Tables of models side by side."""

from __future__ import annotations

from msa_lite.report import Metric, Report, reports_table
from msa_lite.report.tables.formats import markdown


def test_a_table_shows_models_side_by_side_and_a_dash_for_what_is_not_there() -> None:
    known = Report("qa", "all", {"accuracy_f": Metric(0.5, 4, 0.25, False), "rouge_l_r": Metric(1.0, 2, None, True)})
    empty = Report("qa", "all", {"accuracy_f": Metric(None, 0, None, False, 4, "no item")})
    lines = markdown(reports_table({"target": known, "unlearned": empty})).splitlines()
    assert lines[0] == "| metric | n | target | unlearned |"
    assert lines[2:6] == [
        "| *forget set* |  |  |  |",
        "| accuracy ↓ | 4 | 0.500 ± 0.250 | – |",
        "| *retain set* |  |  |  |",
        "| ROUGE-L recall ↑ | 2 | 1.000 | – |",
    ]
    assert lines[-2:] == [
        "- accuracy: no item.",
        "- accuracy, forget set: items left out: 4.",
    ]


def test_metrics_stand_in_their_groups_and_small_numbers_stay_visible() -> None:
    found = {
        "forget_quality": Metric(1.06e-239, 400, None, True),
        "truth_ratio_wf": Metric(0.25, 117, 0.01, True),
        "privleak": Metric(-57.3, 200, 4.0, None),
    }
    report = Report("any", "all", found)
    rows = markdown(reports_table({"model": report})).splitlines()[2:8]
    assert rows == [
        "| *forget set* |  |  |",
        "| forget quality ↑ | 400 | 1.1e-239 |",
        "| *world facts* |  |  |",
        "| truth ratio ↑ | 117 | 0.250 ± 0.010 |",
        "| *forget against holdout set* |  |  |",
        "| PrivLeak in % → 0 | 200 | -57.300 ± 4.000 |",
    ]
