"""Propose how to fit the vectors of a recipe on this machine, by the same prediction as `msa-lite plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from msa_lite.budget.machine import this_device
from msa_lite.budget.plan import Plan, gigabytes
from msa_lite.budget.table import time_span
from msa_lite.pipeline.planning_inputs import find_plan_inputs
from msa_lite.pipeline.planning_run import find_remedies, forecast
from msa_lite.recipe import load_recipe, set_key


@dataclass(frozen=True)
class Proposal:
    """The settings of the fit, with the reason."""

    vector: dict[str, Any]
    """The section `vector` of the recipe."""
    why: str
    """The reason, in one line."""
    fits: bool
    """True if the run fits into the memory of this machine."""
    time: str
    """The time of the run on this machine, in words; a question mark where it cannot be predicted."""
    notes: Sequence[str] = ()
    """What the user should know, one sentence each."""


def propose(values: Mapping[str, Any]) -> Proposal:
    """Return all weights if they fit on this machine, else adapters, else the change that makes these fit.

    Vectors of all weights came nearer to the ideal than adapters (examples/real_model/RESULTS.md, claim 7). They take
    more memory, and a whole model's room on disk each.
    """
    recipe = load_recipe(values)
    inputs, device = find_plan_inputs(recipe), this_device()
    made = forecast(recipe, inputs, device)
    full = forecast(load_recipe(recipe, ["vector.mode=full"]), inputs, device)
    need, disk = _peak(made), sum(full.disk.values())
    others = f"all weights (full) would need {f'{gigabytes(disk)} of disk' if full.fits else _peak(full)}"
    if full.fits and disk <= full.free:
        why = f"all weights forget more precisely; needs {_peak(full)} of {device}, adapters (lora) {need}"
        return Proposal({"mode": "full"}, why, True, time_span(full.seconds))
    if made.fits:
        return Proposal({"mode": "lora"}, f"needs {need} of {device}; {others}", True, time_span(made.seconds))
    remedies = (one for one in find_remedies(recipe, inputs, device) if one.fits)
    remedy = next((one for one in remedies if all(key.startswith("vector.") for key in one.overrides)), None)
    if remedy is None:
        why = f"needs {need}, more than {device} has; {others}"
        note = f"the run does not fit on this machine, {device}: it needs {need}. Take a larger GPU, or a smaller model"
        return Proposal({"mode": "lora"}, why, False, time_span(None), [note])
    changed = load_recipe(recipe, remedy.overrides)
    why = f"needs {gigabytes(remedy.peak)} of {device}, lora alone {need} ({remedy.harm})"
    changes = reduce(set_key, remedy.overrides, dict[str, Any]())
    section = {"mode": changed.vector.mode} | changes["vector"]
    return Proposal(section, why, True, time_span(forecast(changed, inputs, device).seconds))


def _peak(plan: Plan) -> str:
    return gigabytes(plan.peak.need.nbytes)
