"""What each command does with a recipe: its scope, its list of stages, and what forbids it before any work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from msa_lite.budget.shape import read_shape
from msa_lite.errors import FormatError, UsageError
from msa_lite.evals.engine.models import checkpoint_folder
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.pipeline.attack.campaign import open_attacks
from msa_lite.pipeline.baseline.settings import Setting, baseline_scope
from msa_lite.pipeline.baseline.trials import Trials
from msa_lite.pipeline.prepare.run import Context, Run, Scope, msa_scope
from msa_lite.pipeline.run.checks import check_probe, probe_scope, probe_stages
from msa_lite.pipeline.run.evidence import check_evidence
from msa_lite.pipeline.run.filtering import moments_stage
from msa_lite.pipeline.run.msa import msa_stages, sweep_stages
from msa_lite.pipeline.run.report import END_FILES, check_licence
from msa_lite.pipeline.run.vectors import check_fits, fit_stages
from msa_lite.pipeline.stages.facts import Facts, RowFacts
from msa_lite.pipeline.stages.forecast import check_memory, find_remedies
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.recipe import Recipe
from msa_lite.record.seal import KEY_FILE
from msa_lite.report.run.provenance import RECIPE_FILE
from msa_lite.report.run.stages import STAGES_FILE

logger = logging.getLogger(__name__)

_FILES = (RECIPE_FILE, STAGES_FILE, KEY_FILE)
_ALL_FILES = (*_FILES, *END_FILES)  # of a command that ends with a report
CommandName = Literal["run", "sweep", "vector", "moments", "baseline", "probe"]


@dataclass(frozen=True)
class Verb:
    """A command on a recipe."""

    scope: Scope
    """The part of the recipe that it does."""
    stages: Callable[[Context], list[Stage]]
    """Returns its stages: from the recipe alone, or from the prepared inputs."""
    checks: Sequence[Callable[[Run], object]] = ()
    """Raise what forbids it once the inputs are prepared."""
    settings: Sequence[Setting] = ()
    """The settings of a baseline that trains."""
    files: Sequence[str] = _FILES
    """The files that it writes beside the folders of its stages."""
    publishes: bool = False
    """True if it ends with sending the model where the recipe says."""

    def check(self, run: Run) -> None:
        """Raise what forbids the command, before any work: its own checks, then the memory of its stages."""
        for check in self.checks:
            check(run)
        try:
            facts = facts_of_run(run)
        except FormatError as error:  # a config in words that we do not know
            logger.debug("the memory is not predicted: %s", error)
            return

        def build(recipe: Recipe) -> list[Stage]:
            return self.stages(Context(recipe, run.scope))

        remedies = partial(find_remedies, run.recipe, build, facts)
        left = [stage for stage in build(run.recipe) if stage.folder and not stage.folder.exists()]
        check_memory(left, facts, run.crew.ranks.count, remedies, run.scope.force)


def find_verb(
    command: CommandName,
    recipe: Recipe,
    method: str = "msa",
    accept: bool = False,
    force: bool = False,
) -> Verb:
    """Return what a command does with a recipe. Raise UsageError for a recipe that it cannot be used on.

    method: of `baseline`. accept, force: as of `run`.
    """
    if command == "baseline":
        scope, settings = baseline_scope(method, recipe)
        scope = replace(scope, force=force)
        if settings:
            return Verb(
                scope,
                lambda context: Trials(context, settings).stages(),
                [lambda run: Trials(Context.of(run), settings).check(), _check_attacks, check_evidence],
                settings,
                _ALL_FILES,
            )
        checks = [check_fits, _check_attacks, check_evidence, check_licence]
        return Verb(scope, msa_stages, checks, files=_ALL_FILES)
    scope = replace(msa_scope(recipe), force=force)
    if command == "probe":
        if not recipe.has_prior:
            raise UsageError("prior: the recipe names none, so there is nothing to probe; name one, or a history")
        return Verb(probe_scope(recipe), probe_stages, [check_probe])
    if command == "vector":
        return Verb(scope, fit_stages, [check_fits])
    if command == "moments":
        if recipe.filter_place is None:
            raise UsageError("moments need rows to keep, or holdout rows; give retain.data, or evaluate.holdout")
        return Verb(scope, lambda context: [moments_stage(context)])
    if command == "sweep":
        if not recipe.has_choice:
            raise UsageError(
                "forget.alpha, retain.beta: one point, so there is nothing to sweep; give a list of values, or auto"
            )
        return Verb(scope, sweep_stages, [check_fits])
    checks = [check_fits, _check_attacks, check_evidence, check_licence]
    return Verb(scope, lambda context: msa_stages(context, accept), checks, files=_ALL_FILES, publishes=True)


def facts_of_run(run: Run) -> Facts:
    """Return what a plan of a prepared run is made of: its models by their headers, its rows as they are learnt."""
    checkpoints = {name: load_checkpoint(checkpoint_folder(source.folder)) for name, source in run.sources.items()}
    shapes = {name: read_shape(checkpoint, run.sources[name].name) for name, checkpoint in checkpoints.items()}
    rows = {name: RowFacts.of(examples) for name, examples in run.examples.items()}
    return Facts(shapes, rows)


def _check_attacks(run: Run) -> None:
    """Raise what forbids the attacks that a recipe ends its run with, before there is an unlearned model."""
    if run.recipe.attack.attacks:
        open_attacks(run, None)
