"""Tell from the recipe and its data alone what a run will not be able to show, and what to give for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msa_lite.benchmarks import OWN
from msa_lite.choose.division import FEWEST, MOST_PASSAGES, PASSAGE
from msa_lite.data import Row
from msa_lite.evals.bounds import difference_of_shares
from msa_lite.pipeline.prepare_apart import count_repeated, each_once
from msa_lite.pipeline.prepare_questions import SETS
from msa_lite.pipeline.prepare_retain import divide_retain
from msa_lite.recipe import Recipe

_FEW = 12  # forget rows; with fewer, each of them is 8 points and more
_MOST = 10_000  # rows that anybody would be told to give


def limits_of_evidence(recipe: Recipe, rows: Mapping[str, list[Row]], fits_retain: bool = True) -> list[str]:
    """Return a sentence for each thing that the scores of a run cannot show, with what to give.

    rows: by their places in the recipe, after `separate_sets`. fits_retain: False if no retain vector is fitted.
    Published benchmarks have questions of their own; of a recipe with one, only repeated rows are told.
    """
    if recipe.evaluate is None:
        return []
    sets = scored_sets(rows)
    notes = count_repeated(sets)
    if recipe.evaluate.benchmark != OWN or "forget" not in sets:
        return notes
    if recipe.retain and fits_retain:
        learnt = divide_retain(recipe, rows)
        sets["retain"] = rows.get("evaluate.retain") or learnt.scored
        if recipe.betas is None or any(recipe.betas):
            notes += _learnt_notes(learnt.sample, sets["retain"])
    sizes = {name: _count(recipe, part) for name, part in sets.items()}
    forget = sizes["forget"]
    control, size = "the ideal", forget
    if not recipe.evaluate.ideal:
        control, size = ("holdout", sizes["holdout"]) if "holdout" in sizes else ("the prior", forget)
    if forget < _FEW:
        notes.append(
            f"few forget rows ({forget}): each is {100 / forget:.0f} points of every share, so that hardly anything "
            f"can be shown; give {_FEW} or more"
        )
    if control == "the prior":
        notes.append(
            "no holdout rows and no ideal: the prior on the forget rows is the control then, which is weaker, since it "
            "has not learnt how such rows are answered; give evaluate.holdout, similar rows that no model has learnt"
        )
    margin = recipe.margins.recited
    if (bound := least_bound(forget, size)) > margin:
        numbers = (n for n in range(1, _MOST) if least_bound(max(n, forget), max(n, size)) <= margin)
        enough = next(numbers, _MOST)
        notes.append(
            f"PASS cannot be reached with {forget} forget rows and {size} of the control ({control}): even if none is "
            f"recited, {100 * bound:.1f} points of difference are possible, and {100 * margin:g} are allowed; give "
            f"{enough} or more of each"
        )
    return notes


def scored_sets(rows: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """Return the rows to score by set: those that `evaluate` names, else the training sets."""
    places = {name: f"evaluate.{name}" if f"evaluate.{name}" in rows else name for name in SETS}
    return {name: rows[place] for name, place in places.items() if place in rows}


def least_bound(forget: int, control: int) -> float:
    """Return the upper 95 % bound (Agresti and Caffo, 2000) of the difference of two shares that are both 0."""
    return difference_of_shares((0.0, forget), (0.0, control)).high


def _learnt_notes(learnt: Sequence[Row], scored: Sequence[Row]) -> list[str]:
    """Return a sentence where all or most of the retain rows that are scored are learnt by the retain vector."""
    threads = {row.thread for row in learnt}
    apart = sum(row.thread not in threads for row in scored)
    advice = "give evaluate.retain, or more retain rows with retain.data.sample: match_forget"
    if not apart:
        return [f"kept cannot be shown: every retain row that is scored is learnt by the retain vector, too; {advice}"]
    if apart < len(scored) / 2:
        return [
            f"what is kept will look better than it is: {len(scored) - apart} of the {len(scored)} retain rows that "
            f"are scored are learnt by the retain vector, too; {advice}"
        ]
    return []


def _count(recipe: Recipe, rows: Sequence[Row]) -> int:
    """Return the number of rows that are scored; of a few texts that a choice divides, the passages."""
    assert recipe.evaluate is not None, "the rows are scored"
    rows, limit = each_once(rows), recipe.evaluate.limit
    are_cut = recipe.has_choice and recipe.select.validation == "auto" and len(rows) < FEWEST
    if are_cut and all(row.text for row in rows):
        passages = sum(max(1, round(len(row.text.split()) / PASSAGE)) for row in rows)
        return min(passages, limit or MOST_PASSAGES)
    return min(len(rows), limit or len(rows))
