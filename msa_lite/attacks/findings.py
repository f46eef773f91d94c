"""Compute what a model gives back under attack beyond its control, from records alone: nothing here runs a model.

The ideal is attacked in the same way and is the control: what an attack draws from it was taught, guessed or given away
by the attack, not remembered (arXiv 2506.00688). Without an ideal, the control is what the same model gives on holdout
rows. A finding is a share: 0 is the control, 1 is what the target shows of the same rows. The gain of an attack is its
share, minus the share of the trial without an attack on the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from msa_lite.attacks.attack import Attack, Ground, Means, Measure, Trial
from msa_lite.evals.benchmarks.benchmark import Record, Records, column
from msa_lite.evals.engine import scoring
from msa_lite.evals.verdict.outcome import LEAST
from msa_lite.report import Metric
from msa_lite.report.run.attacks import AttackControl, AttackedModel, Gain, Overshoot, TrialResult

TrialRecords = Mapping[str, Records]
"""The records of an attack on one model: by trial, then by set."""
Drawn = Mapping[str, TrialRecords]
"""The records of an attack by model."""
_TARGET, _IDEAL = "target", "ideal"
_ROUNDS = 1000  # of resampling
_CHANCE = 0.5  # the AUC of a model that has seen neither side


class _Side(NamedTuple):
    """The values of one model in one trial."""

    forget: np.ndarray
    """(forget rows, measures)"""
    holdout: np.ndarray
    """(holdout rows, measures)"""


class _Gap(NamedTuple):
    """The difference of a model to its control by one measure."""

    above: float
    """The part that it shows beyond the control."""
    below: float
    """The part that is missing below the control; only of an AUC, which tells rows apart in both directions."""
    before: float
    """The part that it shows beyond the control without an attack."""
    scale: float
    """The part that the target shows beyond the control without an attack."""
    value: float
    """The measure of the model."""
    control: float
    """The measure of the control."""


def judge_model(drawn: Drawn, model: str, attack: Attack, ground: Ground, control: AttackControl) -> AttackedModel:
    """Return what an attack brings back from a model, trial by trial, with the figures of its protocol.

    Without an ideal, trials that teach the scored rows themselves are left out: holdout rows are no control for them.
    """
    trials, measures = attack.trials(ground), attack.measures(ground)
    plain = next((trial for trial in trials if trial.is_control), None)
    results = tuple(
        judge_trial(drawn, model, trial, plain or trial, measures, control)
        for trial in trials
        if trial.name in drawn[model] and not (control == "holdout" and trial.teaches_forget_rows)
    )
    results = tuple(result for result in results if result.rows) or results
    return AttackedModel(results, attack.figures(mean_values(drawn, measures), model))


def judge_trial(
    drawn: Drawn, model: str, trial: Trial, scale: Trial, measures: Sequence[Measure], control: AttackControl
) -> TrialResult:
    """Return what a trial brings back from a model, over the deciding measures.

    scale: the trial in which the target shows what it knows: the one without an attack, else the same. Where it is
    another one than the trial, the gain over it is measured as well.
    """
    places = {"model": (model, trial), "model before": (model, scale)}
    if any(measure.kind != "share" for measure in measures):
        places["target"] = (_TARGET, scale)
        if control == _IDEAL:
            places |= {"ideal": (_IDEAL, trial), "ideal before": (_IDEAL, scale)}
    records = {name: drawn[who].get(what.name, {}) for name, (who, what) in places.items()}
    deciding = [measure for measure in measures if measure.decides and _is_defined(measure, records.values())]
    sides = {name: _side(of_model, deciding) for name, of_model in records.items()}
    forget = _known([side.forget for side in sides.values()]) if deciding else np.zeros(0, int)
    holdout = _known([side.holdout for side in sides.values()])
    needs_holdout = control == "holdout" or any(measure.kind == "auc" for measure in deciding)

    def share(rows: np.ndarray, unseen: np.ndarray = holdout, *, kind: str = "above") -> float | None:
        shares = [getattr(gap, kind) / gap.scale for gap in gaps(rows, unseen) if gap.scale >= LEAST]
        # As the verdict of a run: each on its own, or one measure would hide what another one shows.
        return float(np.clip(shares, 0.0, 1.0).mean()) if shares else None

    def gain(*redrawn: np.ndarray) -> float | None:
        back, left = share(*redrawn), share(*redrawn, kind="before")
        return None if back is None else back - (left or 0.0)

    def gaps(rows: np.ndarray, unseen: np.ndarray = holdout) -> list[_Gap]:
        drawn_sides = {name: _Side(side.forget[rows], side.holdout[unseen]) for name, side in sides.items()}
        return [_gap(drawn_sides, at, measure) for at, measure in enumerate(deciding)]

    samples = [forget, holdout] if needs_holdout else [forget]
    facts: dict[str, Any] = {"trial": trial.name, "label": trial.label, "rows": len(forget)}
    facts |= {"skipped": len(sides["model"].forget) - len(forget)}
    facts |= {"is_control": trial.is_control, "is_summary": trial.is_summary}
    whole = share(*samples) if all(map(len, samples)) else None
    if whole is None:
        return TrialResult(share=None, interval=None, **facts)
    low, high = _interval(share, samples)
    if scale.is_control and trial.name != scale.name:
        facts["gain"] = Gain(gain(*samples) or 0.0, _interval(gain, samples, least=-1.0))
    if not any(measure.kind == "auc" for measure in deciding):
        return TrialResult(share=whole, interval=(low, max(high, _unseen_leak(len(forget)))), **facts)
    missing = partial(share, kind="below")
    aucs = np.mean([(gap.value, gap.control) for gap in gaps(*samples) if gap.scale >= LEAST], axis=0).tolist()
    overshoot = Overshoot(missing(*samples) or 0.0, _interval(missing, samples), *aucs)
    return TrialResult(share=whole, interval=(low, high), overshoot=overshoot, **facts)


def _interval(
    share: Callable[..., float | None], samples: Sequence[np.ndarray], least: float = 0.0
) -> tuple[float, float]:
    """Return the 95 % interval of a share over rows. A single row says nothing about others: `least` to 1.

    The same samples are redrawn alike each time, so that intervals of a share and of its parts rest on the same rows.
    """
    redrawn = scoring.bootstrap(share, samples, rounds=_ROUNDS)
    low, high = np.quantile(redrawn, [0.025, 0.975]).tolist() if len(redrawn) > 1 else (least, 1.0)
    return low, high


def _unseen_leak(rows: int) -> float:
    """Return the largest share of rows that may leak without one of so many doing so, at 97.5 %: 1 − .025^(1/n).

    Rows that are all alike would otherwise give an interval without width: 9 % for 40 rows, 37 % for 8. It is no bound
    of an AUC, which is made of pairs of rows.
    """
    return 1.0 - 0.025 ** (1 / rows)


def _gap(sides: Mapping[str, _Side], at: int, measure: Measure) -> _Gap:
    """Return how a model differs from the control by one measure.

    The control is the ideal on forget rows, or else the same model on holdout rows; with the attack or without it,
    whichever is nearer to the model: an attack that only confuses the ideal brings nothing back.
    """

    def value(name: str) -> float:
        forget, holdout = sides[name].forget[:, at], sides[name].holdout[:, at]
        if measure.kind != "auc":
            return float(forget.mean())
        auc = scoring.membership_auc(forget, holdout)
        assert auc is not None, "both sides have rows"
        return auc

    def unseen(name: str) -> float:
        return _CHANCE if measure.kind == "auc" else float(sides[name].holdout[:, at].mean())

    shown = value("model")
    if measure.kind == "share":
        return _Gap(shown, 0.0, value("model before"), 1.0, shown, 0.0)
    if "ideal" in sides:
        controls, level = [value("ideal"), value("ideal before")], value("ideal before")
    else:
        controls, level = [unseen("model"), unseen("model before")], unseen("target")
    below = min(controls) - shown if measure.kind == "auc" else 0.0
    before = value("model before") - controls[1]
    return _Gap(shown - max(controls), below, before, value("target") - level, shown, min(controls))


def _side(records: Records, measures: Sequence[Measure]) -> _Side:
    def table(rows: Sequence[Record]) -> np.ndarray:
        columns = [column(rows, measure.name) for measure in measures]
        return np.array(columns, np.float64).reshape(len(measures), len(rows)).T  # None becomes NaN

    return _Side(table(records.get("forget", [])), table(records.get("holdout", [])))


def _is_defined(measure: Measure, sides: Iterable[Records]) -> bool:
    """Check whether every model has a value of a measure for some forget row: without a prior, some have none."""
    return all(any(value is not None for value in column(side.get("forget", []), measure.name)) for side in sides)


def _known(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return the rows that have all values in all tables."""
    return np.flatnonzero(np.all([~np.isnan(table).any(axis=1) for table in tables], axis=0))


def mean_values(drawn: Drawn, measures: Sequence[Measure]) -> Means:
    """Return the mean of each measure over the forget rows, an AUC for those of that kind; None where there is none."""
    return {key: metric.value for key, metric in measured(drawn, measures).items()}


def measured(drawn: Drawn, measures: Sequence[Measure]) -> dict[tuple[str, str, str], Metric]:
    """Return each measure with its standard error, by (model, trial, measure)."""
    return {
        (model, trial, measure.name): _metric(records, measure)
        for model, trials in drawn.items()
        for trial, records in trials.items()
        for measure in measures
    }


def _metric(records: Records, measure: Measure) -> Metric:
    forget, holdout = (column(records.get(name, []), measure.name) for name in ("forget", "holdout"))
    skipped = sum(value is None for value in forget)
    if measure.kind != "auc":
        value, count, error = scoring.mean_and_error(forget)
        return Metric(value, count, error, False, skipped, None if count else "no row has a value")
    sides = [np.array([v for v in side if v is not None], np.float64) for side in (forget, holdout)]
    value = scoring.membership_auc(*sides)
    redrawn = scoring.bootstrap(scoring.membership_auc, sides, rounds=_ROUNDS) if value is not None else np.zeros(0)
    note = "one of the two sides has no rows" if value is None else None
    return Metric(value, sum(map(len, sides)), scoring.spread(redrawn), False, skipped, note)
