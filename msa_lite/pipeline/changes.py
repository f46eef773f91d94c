"""Changes of a recipe since the last run into the same folder, reported before the run replaces anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from msa_lite.errors import MsaError, RecipeError
from msa_lite.io.finished import leaves
from msa_lite.io.reading import parse_yaml, read_text
from msa_lite.io.seal import MANIFEST
from msa_lite.recipe.load import dump_recipe, load_any
from msa_lite.report.provenance import RECIPE_FILE, recorded_revisions

logger = logging.getLogger(__name__)

_MOST = 5
_IDLE = ("publish.", "request", "track", "attack")  # these decide nothing about the model


def warn_of_changes(folder: Path, recipe: str) -> None:
    """Warn if a run with this recipe (the text of recipe.yaml) may replace the model in its folder."""
    made = [name for name in ("model", "adapter") if (folder / name / MANIFEST).is_file()]
    if not made or not (folder / RECIPE_FILE).is_file():
        return
    try:
        changes = list(_changes(read_text(folder / RECIPE_FILE), recipe))
    except MsaError as error:
        logger.warning("%s; so the changes since the last run are unknown", error)
        return
    if changes:
        more = [f"… and {len(changes) - _MOST} more"] if len(changes) > _MOST else []
        logger.warning(
            "%s: changed since the last run: %s. The run makes anew what depends on it, and replaces %s/ if its "
            "weights change; the former one stays until the new one is verified",
            folder,
            ", ".join([*changes[:_MOST], *more]),
            made[0],
        )


def _changes(before: str, after: str) -> Iterator[str]:
    """Yield `forget.alpha: 1.0 → 1.25` for each key that two recipes differ in, and the data whose content changed."""
    filled = _filled(before.replace("score: exposure", "score: extraction"))  # the rule's former name
    old, new = (dict(leaves(parse_yaml(text, RECIPE_FILE))) for text in (filled, after))
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key) and not key.startswith(_IDLE):
            yield f"{key}: {_shown(old.get(key))} → {_shown(new.get(key))}"
    contents, now = recorded_revisions(before), recorded_revisions(after)
    yield from (f"content of {name}" for name, value in now.items() if _differ(contents.get(name), value))


def _filled(recipe: str) -> str:
    """Give keys that an earlier version lacked their defaults. A recipe that this version refuses stays as it is."""
    try:
        return dump_recipe(load_any(parse_yaml(recipe, RECIPE_FILE)))
    except RecipeError:
        return recipe


def _differ(before: str | None, now: str) -> bool:
    """Compare two hashes; none, or one of another kind, as earlier versions wrote them, tells nothing."""
    return before is not None and before.partition(":")[0] == now.partition(":")[0] and before != now


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
