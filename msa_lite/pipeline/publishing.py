"""Send a run's model to the Hub at its end, as the recipe's `publish:` says; check before any work that this can be."""

from __future__ import annotations

from pathlib import Path

from msa_lite.errors import MsaError, UsageError
from msa_lite.io.progress import Progress, notices
from msa_lite.pipeline.prepare import Run
from msa_lite.publish.contents import PublishOptions, make_contents
from msa_lite.publish.destination import find_destination
from msa_lite.publish.upload import Published, push
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

    folder: the model's or adapter's. The recipe is the user's consent; nobody is asked. Raise what `make_contents`,
    `find_destination` and `push` raise; the run itself is finished then, and a rerun only publishes.
    """
    from huggingface_hub.utils import disable_progress_bars

    wishes, accept = recipe.publish, accept or not recipe.verdict
    if wishes.repo is None:
        return None
    if verdict is not None and verdict.outcome == "FAIL" and not accept:
        notices.warning(
            "not published: the verdict is FAIL; `msa-lite publish %s … --accept` sends it all the same", folder
        )
        return None
    try:
        to = find_destination(wishes.repo, wishes.private)
        options = PublishOptions(
            repo=to.repo,
            public=not wishes.private,
            name_models=wishes.name_models,
            accept=accept,
            license=wishes.license,
            gated=wishes.gated,
        )
        contents = make_contents(folder, options)
        with disable_progress_bars():
            return push(contents, to, gated=wishes.gated, progress=progress)
    except MsaError as error:
        raise type(error)(f"the run is finished, but not published: {error}") from None
