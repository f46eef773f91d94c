"""Send a run's model to the Hub at its end, as the recipe's `publish:` says; check before any work that this can be."""

from __future__ import annotations

from pathlib import Path

from msa_lite.errors import MsaError, UsageError
from msa_lite.io.progress import Progress, notices
from msa_lite.pipeline.prepare import Run
from msa_lite.publish.contents import PublishOptions
from msa_lite.publish.destination import find_destination
from msa_lite.publish.folder import push_folder
from msa_lite.publish.upload import Published
from msa_lite.recipe import Recipe
from msa_lite.report.front_matter import read_target_card
from msa_lite.report.verdict import Verdict


def check_publishing(recipe: Recipe) -> None:
    """Raise before any work if the recipe names a repository that nothing could be sent to."""
    if recipe.publish.repo is not None:
        find_destination(recipe.publish.repo, recipe.publish.private)


def check_licence(run: Run) -> None:
    """Raise UsageError before any work if the run's model is to be public, and nobody says under which licence."""
    wishes = run.recipe.publish
    if wishes.repo is None or wishes.private or wishes.license or run.plan.method != "msa":
        return
    if "license" not in read_target_card(run.sources["target"].folder):
        raise UsageError(
            "publish.license: the card of the target names no licence, and a public model needs one; give the "
            "identifier of the one that holds, such as apache-2.0"
        )


def publish_model(
    recipe: Recipe, folder: Path, verdict: Verdict | None, accept: bool, progress: Progress
) -> Published | None:
    """Send a run's model or adapter where the recipe says; return None where it says nothing, or the verdict is FAIL.

    folder: the model's or adapter's. The recipe is the user's consent; nobody is asked. Raise as `push_folder`; the run
    itself is finished then, and a rerun only publishes.
    """
    wishes, accept = recipe.publish, accept or not recipe.verdict
    if wishes.repo is None:
        return None
    if verdict is not None and verdict.outcome == "FAIL" and not accept:
        notices.warning(
            "not published: the verdict is FAIL; `msa-lite publish %s … --accept` sends it all the same", folder
        )
        return None
    options = PublishOptions(
        public=not wishes.private,
        name_models=wishes.name_models,
        accept=accept,
        license=wishes.license,
        gated=wishes.gated,
    )
    try:
        return push_folder(folder, wishes.repo, options, progress)
    except MsaError as error:
        raise type(error)(f"the run is finished, but not published: {error}") from None
