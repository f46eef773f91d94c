"""Metrics out of per-item scores, each with n, standard error and direction, or None with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from msa_lite.evals import scoring
from msa_lite.evals.benchmark import Record, column
from msa_lite.report import Metric

NO_IDEAL = "needs the ideal model: give it, or a report of it, as the ideal"
NOT_JUDGED = "needs a judge"


def mean_metric(values: Sequence[float | None], higher_is_better: bool | None, note: str | None = None) -> Metric:
    """The mean of what is defined, with its standard error; what is None is counted as skipped."""
    value, n, stderr = scoring.mean_and_error(values)
    if not n:
        note = "no item has this score" if values else "the set has no items"
    return Metric(value, n, stderr, higher_is_better, len(values) - n, note)


def missing(reason: str, higher_is_better: bool | None) -> Metric:
    """A metric that cannot be given, with the reason."""
    return Metric(None, 0, None, higher_is_better, 0, reason)


def harmonic_metric(parts: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Metric:
    """Harmonic mean of the means of several scores on several sets, with a bootstrapped standard error.

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
    skipped = sum(int(np.isnan(table).any(axis=1).sum()) for table in tables)
    if value is None:
        return Metric(None, 0, None, True, total, "one of its parts has no items")
    return Metric(value, total - skipped, _error(statistic, tables), True, skipped)


Sides = tuple[Sequence[Record], Sequence[Record]]
"""Records of forget texts and of holdout texts, which nobody learnt."""


def membership_metrics(sides: Sides, ideal: Sides | None) -> dict[str, Metric]:
    """min_k and min_k_pp: AUC of telling forget texts from holdout texts (1 = always, ½ = chance), and each one's
    distance to the ideal's.

    Lower is better only as far down as the ideal: below, the model is over-unlearned, which the distance shows.
    """
    found = {}
    for key in ("min_k", "min_k_pp"):
        found[key] = _auc_metric([column(records, key) for records in sides], lambda auc: auc, False)
        found[f"{key}_gap"] = _beside_ideal(key, sides, ideal, lambda auc, wanted: abs(auc - wanted), False)
    return found


def privleak_metric(sides: Sides, ideal: Sides | None) -> Metric:
    """PrivLeak of `scoring.priv_leak` from the min_k of both models, in percent; best at 0."""
    return _beside_ideal("min_k", sides, ideal, scoring.priv_leak, None, "best at 0")


def _beside_ideal(
    key: str,
    sides: Sides,
    ideal: Sides | None,
    value_of: Callable[[float, float], float],
    higher_is_better: bool | None,
    note: str | None = None,
) -> Metric:
    """A metric of a model's AUC and the ideal's; its standard error takes the latter as given."""
    if ideal is None:
        return missing(NO_IDEAL, higher_is_better)
    wanted = scoring.membership_auc(*(column(records, key) for records in ideal))
    if wanted is None:
        return missing("one of the ideal's two sides has no items", higher_is_better)
    values = [column(records, key) for records in sides]
    return _auc_metric(values, lambda auc: value_of(auc, wanted), higher_is_better, note)


def _auc_metric(
    sides: Sequence[Sequence[float | None]],
    value_of: Callable[[float], float],
    higher_is_better: bool | None,
    note: str | None = None,
) -> Metric:
    samples = [np.array([v for v in side if v is not None], np.float64) for side in sides]

    def statistic(*drawn: np.ndarray) -> float | None:
        auc = scoring.membership_auc(*drawn)
        return None if auc is None else value_of(auc)

    value, n = statistic(*samples), sum(map(len, samples))
    skipped = sum(map(len, sides)) - n
    if value is None:
        return Metric(None, 0, None, higher_is_better, skipped, "one of the two sides has no items")
    return Metric(value, n, _error(statistic, samples), higher_is_better, skipped, note)


def _error(statistic: Callable[..., float | None], samples: Sequence[np.ndarray]) -> float | None:
    return scoring.bootstrap_error(statistic, samples) if all(len(s) for s in samples) else None


def judged_metric(records: Sequence[Record], key: str, higher_is_better: bool | None = True) -> Metric:
    """The mean of a judged score; None with the reason where nothing was judged.

    The note counts invalid replies, and items whose right answer the ideal gave too: there one candidate is both.
    """
    verdicts = [record.get("judge", {}) for record in records]
    if not any(verdicts):
        return missing(NOT_JUDGED, higher_is_better)
    invalid = sum(not verdict.get("valid", True) for verdict in verdicts)
    merged = sum(verdict.get("merged", False) for verdict in verdicts)
    notes = [f"{invalid} replies of the judge were invalid and count as none of the candidates"] if invalid else []
    notes += [f"for {merged} items the right answer and the ideal's were one candidate"] if merged else []
    return mean_metric([verdict.get(key) for verdict in verdicts], higher_is_better, "; ".join(notes) or None)
