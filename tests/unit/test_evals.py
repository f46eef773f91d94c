"""Tables of models side by side."""

from __future__ import annotations

from msa_lite.report import Metric, Report, markdown_table


def test_a_table_shows_models_side_by_side_and_a_dash_for_what_is_not_there() -> None:
    known = Report("qa", "all", {"accuracy_f": Metric(0.5, 4, 0.25, False), "rouge_l_r": Metric(1.0, 2, None, True)})
    empty = Report("qa", "all", {"accuracy_f": Metric(None, 0, None, False, 4, "no item")})
    lines = markdown_table({"target": known, "unlearned": empty}).splitlines()
    assert lines[0] == "| set | metric | n | target | unlearned |"
    assert lines[2:] == [
        "| forget set | accuracy ↓ | 4 | 0.500 ± 0.250 | – |",
        "| retain set | ROUGE-L recall ↑ | 2 | 1.000 | – |",
        "",
        "- accuracy: no item.",
        "- accuracy, forget set: items left out: 4.",
    ]


def test_every_published_metric_has_a_group_and_small_numbers_stay_visible() -> None:
    found = {
        "forget_quality": Metric(1.06e-239, 400, None, True),
        "acc_retain": Metric(0.5, 10, 0.1, True),
        "truth_ratio_wf": Metric(0.25, 117, 0.01, True),
        "privleak": Metric(-57.3, 200, 4.0, None),
        "accuracy_other": Metric(0.75, 853, 0.01, True),
    }
    judge = {"model": "gpt-4o", "calls": 8, "cached": 2, "invalid": 1}
    report = Report("any", "all", found, {"judge": judge})
    rows = markdown_table({"model": report}).splitlines()[2:]
    assert rows == [
        "| forget set | forget quality ↑ | 400 | 1.1e-239 |",
        "| retain set | Acc retain (judge) ↑ | 10 | 0.500 ± 0.100 |",
        "| world facts | truth ratio ↑ | 117 | 0.250 ± 0.010 |",
        "| forget against holdout set | PrivLeak in % → 0 | 200 | -57.300 ± 4.000 |",
        "| questions | accuracy (other entities) ↑ | 853 | 0.750 ± 0.010 |",
        "",
        "- judge gpt-4o: 8 calls, 2 verdicts from earlier ones, 1 invalid.",
    ]
