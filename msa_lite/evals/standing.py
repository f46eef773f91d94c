"""Place a candidate beside control and target: what the choice of strengths looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from msa_lite.evals.benchmark import Models, Records
from msa_lite.evals.bounds import add_up, bounded, share_bound, unit_of_rows
from msa_lite.evals.outcome import (
    Control,
    Yardstick,
    column_of,
    find_control,
    independent_rows,
    score_of,
    weigh_recited,
)
from msa_lite.report.measured import Forgotten, score_label


@dataclass(frozen=True)
class Standing:
    """A candidate beside the control: what the choice of strengths looks at."""

    inside: bool
    """True if it recites no more than the control may by its upper bound, and no score lies above the control's."""
    above: Sequence[str]
    """The figures that lie above the control's bounds, in words."""
    kept: float
    """What is kept of the retain set, as `Kept.share`; 1 without retain rows."""
    distance: float
    """(mean |forget score − control| + mean |retain score − the target's|) / 2, in [0, 1]: the distance to the ideal,
    estimated without one."""
    forgotten: Forgotten
    """What was measured of the forget set, as the verdict has it."""


def stand(models: Models, yardstick: Yardstick) -> Standing | str:
    """Return how the model "unlearned" stands beside the control, or the reason why nothing can be said.

    Without a control the level of unseen rows is 0, in the place of a better one.
    """
    weighed = weigh_recited(models, yardstick)
    if isinstance(weighed, str):
        return weighed
    forgotten, kept = weighed
    control, name = find_control(models, yardstick), yardstick.forget_set
    above = []
    others = control.records[name] if control else []
    most = share_bound(forgotten.control_share, independent_rows(others, yardstick.is_recited)) if control else 0.0
    if forgotten.share("unlearned") > most:
        above.append(f"{forgotten.recited['unlearned']} of {forgotten.rows} are recited, at most {most:.0%} wanted")
    for place, score in yardstick.left_scores:
        value, bound = _mean(models["unlearned"], place, score), _upper(control, place, score)
        if value is not None and value > bound:
            above.append(f"{score_label(score)} is {value:.4f}, at most {bound:.4f} wanted")
    far = [_apart(_mean(models["unlearned"], *at), _level(control, *at)) for at in yardstick.near_scores]
    lost = [
        _apart(*(_mean(models[model], yardstick.retain_set, score) for model in ("unlearned", "target")))
        for score in yardstick.retain_scores
    ]
    distance = (_average(far) + _average(lost)) / 2
    return Standing(not above, above, kept.share.value if kept else 1.0, distance, forgotten)


def _upper(control: Control | None, name: str, score: str) -> float:
    """Return the upper bound of the control's mean; 0 without a control."""
    values = control.values(name, score) if control else np.zeros(0)
    if not len(values) or control is None:
        return 0.0
    rows = [record for record in control.records[name] if score_of(record, score) is not None]
    return bounded(float(values.mean()), add_up(unit_of_rows(rows), (values - values.mean()) / len(values))).high


def _level(control: Control | None, name: str, score: str) -> float | None:
    values = control.values(name, score) if control else np.zeros(1)
    return float(values.mean()) if len(values) else None


def _mean(records: Records, name: str, score: str) -> float | None:
    values = column_of(records.get(name, ()), score)
    return float(values.mean()) if len(values) else None


def _apart(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else abs(first - second)


def _average(values: Sequence[float | None]) -> float:
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else 0.0
