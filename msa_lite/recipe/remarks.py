"""Say of a recipe, before the work, what of its method is not in the paper, and what a given α turns off."""

from __future__ import annotations

from msa_lite.recipe.schema import AUTO, Recipe


def filter_notice(recipe: Recipe) -> str | None:
    """Return the sentence that tells of the filter and the hold; None where there is nothing to tell."""
    strengths = " and ".join(f"{strength:g}" for strength in recipe.filters if strength)
    parts = [f"the filter λ = {strengths}"] if strengths else []
    parts += [f"the hold h = {recipe.hold:g}"] if recipe.hold else []
    told = [f"not of the paper: {', '.join(parts)} (merge.filter, vector.hold)"] if parts else []
    return "; ".join([*told, *lost_filter(recipe)]) or None


def lost_filter(recipe: Recipe) -> list[str]:
    """Return the sentence that a given α turns off the filter that a search would have; else nothing."""
    is_auto = recipe.merge.filter == AUTO and recipe.filter_place
    if not is_auto or not any(recipe.alphas or []):
        return []
    filtered = recipe.model_copy(update={"merge": recipe.merge.model_copy(update={"filter": 1.0})})
    both = ", and the hold with it" if filtered.hold > recipe.hold else ""
    return [f"no filter, because forget.alpha is given; merge.filter=1 turns it on{both}"]
