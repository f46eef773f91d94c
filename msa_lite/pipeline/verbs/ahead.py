"""The times of a run, told before it starts: beside its stages while they run, and beside what they took at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from msa_lite.budget.speed import this_device
from msa_lite.errors import FormatError
from msa_lite.io.console.progress import Progress, Step, announce
from msa_lite.io.launch.crew import Crew
from msa_lite.pipeline.attack.campaign import attack_label, open_attacks
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.demo import demo_stages
from msa_lite.pipeline.stages.facts import Facts, find_facts
from msa_lite.pipeline.stages.forecast import planned_times, with_times
from msa_lite.pipeline.stages.machine import Machine
from msa_lite.pipeline.stages.measure import measure_run, why_run_unmeasured
from msa_lite.pipeline.stages.stage import Stage, steps
from msa_lite.pipeline.verbs.lists import Verb, facts_of_run
from msa_lite.recipe import Recipe

logger = logging.getLogger(__name__)

Times = Mapping[str, tuple[float, float]]
"""The shortest and the longest time of stages, by name."""


def announce_demo(recipe: Recipe, verb: Verb, progress: Progress) -> Machine | None:
    """Announce the models of a demo with all stages after them, as one count; return the machine for their times.

    Return None where the demo is made already, or there is none.
    """
    made = demo_stages(recipe)
    if not made:
        return None
    facts, context = find_facts(recipe, verb.scope.choice), Context(recipe, verb.scope)
    stages = [*made, *verb.stages(context)]
    machine = _machine(recipe, stages, facts, Crew())
    announce(progress, steps(stages, planned_times(stages, facts, machine)))
    return machine


def times_of_run(run: Run, stages: Sequence[Stage], machine: Machine | None = None) -> Times:
    """Return the times of a prepared run's stages; none of a model in words that we do not know.

    machine: that of `announce_demo`.
    """
    try:
        facts = facts_of_run(run)
    except FormatError as error:
        logger.debug("the times are not predicted: %s", error)
        return {}
    return planned_times(stages, facts, machine or _machine(run.recipe, stages, facts, run.crew))


def attack_steps(run: Run) -> list[Step]:
    """Return the attacks that a run's recipe ends it with, as steps; their times are measured once there is a model."""
    if not run.recipe.attack.attacks:
        return []
    return [Step(attack_label(name, model), "attack") for name, model in open_attacks(run, None).pairs()]


def _machine(recipe: Recipe, stages: Sequence[Stage], facts: Facts, crew: Crew) -> Machine:
    """Return this machine, with times that were measured where the work is long enough for it."""
    machine = Machine(this_device(), crew.ranks.count)
    if not crew.is_alone or why_run_unmeasured(recipe, facts):
        return machine
    return with_times(stages, facts, machine, partial(measure_run, recipe, facts))
