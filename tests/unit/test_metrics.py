"""The table of metrics: its entries, what knows them, and tables of models side by side."""

from __future__ import annotations

import ast
from itertools import chain

from msa_lite.catalogue import ATTACKS, BENCHMARKS, EVIDENCE, evidence_metric
from msa_lite.comparison.published import load_published, published_tables
from msa_lite.evals.benchmarks.aggregates import NO_IDEAL, NOT_JUDGED
from msa_lite.evals.benchmarks.benchmark import Records, find_benchmark
from msa_lite.evals.benchmarks.restor import QUESTIONS
from msa_lite.evals.scores.probe import PROBE
from msa_lite.report import Metric, Report, reports_table
from msa_lite.report.tables.formats import markdown
from msa_lite.report.tables.metrics import GROUPS, METRICS, attack_metric
from tests.tools.arrows import PACKAGE, sources

# Benchmark → the sets of its records.
SETS: dict[str, list[str]] = {
    "qa": ["forget", "retain", "holdout", "earlier"],
    "tofu": ["forget", "retain", "real_authors", "world_facts", "holdout"],
    "muse": ["verbmem", "knowmem_forget", "knowmem_retain", "privleak_forget", "privleak_holdout"],
    "restor": [QUESTIONS],
    "probe": ["forget", "holdout"],
}


def no_records(benchmark: str) -> Records:
    """Records by set: none, but one with a Min-K++ for the probe, which reports on scores that are there."""
    return {name: [{"min_k_pp": 1.0}] if benchmark == "probe" else [] for name in SETS[benchmark]}


def reported() -> dict[str, tuple[Metric, Metric]]:
    """What the benchmarks report with and without an ideal, by metric."""
    found = {}
    for benchmark in SETS:
        records = no_records(benchmark)
        metrics = (PROBE if benchmark == "probe" else find_benchmark(benchmark)).metrics
        beside, alone = metrics(records, records), metrics(records, None)
        assert list(beside) == list(alone)
        found |= {name: (beside[name], alone[name]) for name in beside}
    return found


def test_what_benchmarks_report_has_an_entry_and_no_entry_is_unused() -> None:
    assert {*BENCHMARKS, "probe"} == SETS.keys()
    attacks = {attack_metric(name) for name in ATTACKS}
    evidence = {evidence_metric(kind, figure) for kind, entry in EVIDENCE.items() for figure in entry.figures}
    assert reported().keys() | attacks | evidence == METRICS.keys()


def test_benchmarks_and_published_tables_name_no_other_metrics() -> None:
    for entry in BENCHMARKS.values():
        names = {*entry.columns, *chain(*entry.sweep_columns), *chain(*entry.scores.values())}
        assert names <= METRICS.keys()
    for name in published_tables():
        assert {metric for row in load_published(name).rows.values() for metric in row} <= METRICS.keys()


def test_entries_say_what_a_metric_needs_and_which_way_is_better() -> None:
    for name, (beside, alone) in reported().items():
        kind = METRICS[name]
        assert (alone.note == NO_IDEAL) == kind.needs_ideal, name
        assert (beside.note == NOT_JUDGED) == (kind.judge == "required"), name
        assert beside.higher_is_better == alone.higher_is_better == kind.higher_is_better, name
    for kind in METRICS.values():
        assert kind.formula, kind.name
        assert kind.source, kind.name
        assert kind.partner is None or METRICS[kind.partner].higher_is_better, kind.name
    assert [kind.group for kind in METRICS.values()] == sorted(
        (kind.group for kind in METRICS.values()), key=GROUPS.index
    )


# Modules that may name a metric: benchmarks and attacks make them (or hold scores of the same name), rules weigh them.
NAMING = {
    "report/tables/metrics.py": "the table",
    "report/verdict/criteria.py": "the words for what a verdict measures",
    "catalogue.py": "what a benchmark shows, and the weights of its selection scores",
    "choose/rules.py": "what a rule measures on the forget set, and of which a usable model keeps something",
    "choose/choice.py": "metrics that show that there are retain rows",
}


def test_metrics_are_named_where_they_are_made_and_weighed_and_nowhere_else() -> None:
    naming = set()
    for path in sources():
        texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        if any(text in METRICS for text in texts if isinstance(text, str)):
            naming.add(str(path.relative_to(PACKAGE)))
    assert {name for name in naming if not name.startswith(("evals/", "attacks/"))} == set(NAMING)


# Tables of models side by side.


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
