"""Make metrics of per-item scores, each with n and standard error; the deviations that published numbers depend on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from msa_lite.catalogue import BENCHMARKS
from msa_lite.errors import UsageError, nearest
from msa_lite.evals.benchmarks.benchmark import Record, column, find_benchmark
from msa_lite.evals.engine import scoring
from msa_lite.report import Metric
from msa_lite.report.tables.metrics import metric_kind

NO_IDEAL = "needs the ideal model: give it, or a report of it, as the ideal"
NOT_JUDGED = "needs a judge"


def make_metric(
    name: str, value: float | None, n: int, stderr: float | None = None, skipped: int = 0, note: str | None = None
) -> Metric:
    """Return a metric with the direction that the table of metrics gives for its name."""
    return Metric(value, n, stderr, metric_kind(name).higher_is_better, skipped, note)


def mean_metric(name: str, scores: Sequence[float | None], note: str | None = None) -> Metric:
    """Return the mean of the scores, with its standard error. Scores that are None are left out and counted."""
    value, n, stderr = scoring.mean_and_error(scores)
    if not n:
        note = "no item has this score" if scores else "the set has no items"
    return make_metric(name, value, n, stderr, len(scores) - n, note)


def missing_metric(name: str, reason: str, skipped: int = 0) -> Metric:
    """Return a metric without a value, with the reason."""
    return make_metric(name, None, 0, None, skipped, reason)


def harmonic_metric(name: str, parts: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Metric:
    """Return the harmonic mean of the means of several scores on several sets, with a bootstrapped standard error.

    parts: scores by set and name; those of one set belong to the same items and are redrawn together. n: items with
    all scores; those that lack one are counted as skipped, and still count in the means of the others. None where one
    of the means is not defined.
    """
    tables = [np.array([*scores.values()], np.float64).T for scores in parts.values()]  # None becomes NaN

    def statistic(*samples: np.ndarray) -> float | None:
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.concatenate([np.nansum(s, axis=0) / np.sum(~np.isnan(s), axis=0) for s in samples])
        return None if np.isnan(means).any() else scoring.harmonic_mean(means.tolist())

    value, total = statistic(*tables), sum(map(len, tables))
    if value is None:
        return missing_metric(name, "one of its parts has no items", total)
    skipped = sum(int(np.isnan(table).any(axis=1).sum()) for table in tables)
    return make_metric(name, value, total - skipped, _error(statistic, tables), skipped)


Sides = tuple[Sequence[Record], Sequence[Record]]
"""Records of forget texts, and of holdout texts, which no model was trained on."""


def membership_metrics(sides: Sides, ideal: Sides | None) -> dict[str, Metric]:
    """Return min_k and min_k_pp, the AUCs of telling forget texts from holdout texts, and their distances to the ideal.

    An AUC of 1 tells them apart every time; ½ is chance. Lower is better only down to the ideal's AUC: a model below
    it is over-unlearned, which the distance shows.
    """
    metrics = {}
    for key in ("min_k", "min_k_pp"):
        gap = f"{key}_gap"
        metrics[key] = auc_metric(key, [column(records, key) for records in sides], lambda auc: auc)
        metrics[gap] = _beside_ideal(gap, key, sides, ideal, lambda auc, ideal_auc: abs(auc - ideal_auc))
    return metrics


def privleak_metric(sides: Sides, ideal: Sides | None) -> Metric:
    """Return PrivLeak by `scoring.priv_leak` from the min_k of both models, in percent; best at 0."""
    return _beside_ideal("privleak", "min_k", sides, ideal, scoring.priv_leak, "best at 0")


def _beside_ideal(
    name: str,
    key: str,
    sides: Sides,
    ideal: Sides | None,
    value_of: Callable[[float, float], float],
    note: str | None = None,
) -> Metric:
    """Return a metric of a model's AUC and the ideal's. Its standard error takes the ideal's AUC as exact."""
    if ideal is None:
        return missing_metric(name, NO_IDEAL)
    ideal_auc = scoring.membership_auc(*(column(records, key) for records in ideal))
    if ideal_auc is None:
        return missing_metric(name, "one of the ideal's two sides has no items")
    scores = [column(records, key) for records in sides]
    return auc_metric(name, scores, lambda auc: value_of(auc, ideal_auc), note)


def auc_metric(
    name: str, sides: Sequence[Sequence[float | None]], value_of: Callable[[float], float], note: str | None = None
) -> Metric:
    """Return a metric of the AUC of telling two sides apart by scores, with a bootstrapped standard error.

    sides: scores of what was learnt and of what was not, higher for what looks unlearnt. value_of: what becomes of the
    AUC. Scores that are None are left out and counted.
    """
    samples = [np.array([score for score in side if score is not None], np.float64) for side in sides]

    def statistic(*drawn: np.ndarray) -> float | None:
        auc = scoring.membership_auc(*drawn)
        return None if auc is None else value_of(auc)

    value, n = statistic(*samples), sum(map(len, samples))
    skipped = sum(map(len, sides)) - n
    if value is None:
        return missing_metric(name, "one of the two sides has no items", skipped)
    return make_metric(name, value, n, _error(statistic, samples), skipped, note)


def _error(statistic: Callable[..., float | None], samples: Sequence[np.ndarray]) -> float | None:
    return scoring.spread(scoring.bootstrap(statistic, samples)) if all(len(s) for s in samples) else None


def judged_metric(name: str, records: Sequence[Record]) -> Metric:
    """Return the mean of a judged score, which has the metric's name in the verdicts; None where there are none.

    The note counts invalid replies, and items whose right answer the ideal gave too: there one candidate is both.
    """
    verdicts = [record.get("judge", {}) for record in records]
    if not any(verdicts):
        return missing_metric(name, NOT_JUDGED)
    invalid = sum(not verdict.get("valid", True) for verdict in verdicts)
    merged = sum(verdict.get("merged", False) for verdict in verdicts)
    notes = [f"{invalid} replies of the judge were invalid and count as none of the candidates"] if invalid else []
    notes += [f"for {merged} items the right answer and the ideal's were one candidate"] if merged else []
    return mean_metric(name, [verdict.get(name) for verdict in verdicts], "; ".join(notes) or None)


COMMON = {
    "mask_eq_pad": "tokens equal to the padding token are hidden wherever they stand, so that with pad = end of turn "
    "the prompt's own ends of turn are hidden too",
    "es_floor": "extraction strength of a text without a right token is 1/N, not 0",
    "drop_last_token": "extraction strength, exact memorization and Min-K leave out the last token of texts that have "
    "no end token, a token of their content",
    "second_end": "answers keep what a chat template puts behind its end token (ChatML: a newline) and get a second "
    "end token; all of that is scored",
    "trailing_blank": "plain prompts end in a blank after 'Answer:', which many tokenizers merge into the answer",
}
"""The switches of open-unlearning, whose code evaluates several benchmarks; each benchmark adds its own."""


def known_switches() -> list[str]:
    """Return the names of all switches."""
    return [*COMMON, *(switch for name in BENCHMARKS for switch in find_benchmark(name).switches)]


def known_presets() -> dict[str, Collection[str]]:
    """Return the switches of each preset: open-unlearning's, and those of each benchmark's own code."""
    presets = {name: find_benchmark(name).preset for name in BENCHMARKS}
    return {"open-unlearning": tuple(COMMON), **{name: switches for name, switches in presets.items() if switches}}


def switches_of(benchmark: str) -> set[str]:
    """Return the switches that change something in a benchmark."""
    kind = find_benchmark(benchmark)
    return {*kind.reads, *kind.switches}


def resolve_compat(names: Iterable[str], benchmark: str) -> frozenset[str]:
    """Return the switches of a benchmark that names of switches and presets stand for.

    Raise UsageError for an unknown name, and for one that changes nothing in the benchmark.
    """
    switches: set[str] = set()
    presets, choices = known_presets(), [*known_presets(), *known_switches()]
    for name in names:
        if name not in choices:
            raise UsageError(f"compat: unknown '{name}'{nearest(name, choices)}; choose from {', '.join(choices)}")
        meant = switches_of(benchmark).intersection(presets.get(name, (name,)))
        if not meant:
            raise UsageError(f"compat: '{name}' changes nothing in {benchmark}; leave it out")
        switches |= meant
    return frozenset(switches)
