"""Reasons to doubt a choice, and what to try instead, by what the candidates scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msa_lite.choose.rules import Rank
from msa_lite.evals.benchmark import Benchmark

FEW = 10  # rows of a set, of which a tenth is one row
WHOLE = "all"  # the split of rows that are not divided
_NOTHING = 0.9  # an exposure beyond which a vector has taken away nothing to speak of


def few_rows(benchmark: Benchmark) -> list[str]:
    """Say which sets have few rows, and whether the choice and the final scores share them."""
    few = [f"{name}: {len(part.items)}" for name, part in benchmark.sets.items() if len(part.items) < FEW]
    if benchmark.split == WHOLE:
        counts = ", ".join(f"{name}: {len(part.items)}" for name, part in benchmark.sets.items())
        return [
            f"there are too few rows to divide ({counts}), so the choice saw the rows that the final scores are on; "
            "give more rows, or other questions about them (evaluate.forget)"
        ]
    return [f"it rests on few validation rows ({', '.join(few)}); raise select.validation"] if few else []


def strength_advice(candidates: Sequence[Mapping[str, Any]], ranks: Sequence[Rank | str], best: int) -> list[str]:
    """Say in which direction a better point may lie, where nobody has looked; nothing where the best will do.

    candidates: their values, in the order of the ranks. A rule that tells what a point calls for (`Rank.aim`) decides
    the direction; of another, every edge of the grid may hide something better.
    """
    rank, values = ranks[best], candidates[best]
    assert isinstance(rank, Rank), "what is broken is never chosen"
    if "alpha" not in values:
        hint = "try gentler ones: a lower baseline.learning_rate, or fewer epochs"
        return [hint] if rank.aim == "gentler" else []
    tried = {key: sorted({float(c[key]) for c in candidates if key in c}) for key in ("alpha", "beta")}
    several = {key for key, numbers in tried.items() if len(numbers) > 1}
    largest = {key for key in several if values[key] == tried[key][-1]}
    smallest = {key for key in several if values[key] == tried[key][0] > 0}
    if rank.aim is None:
        found = [f"{key} {values[key]:g} is the largest tried; a larger one may be better" for key in largest]
        found += [f"{key} {values[key]:g} is the smallest tried; a smaller one may be better" for key in smallest]
        return sorted(found)
    if rank.aim == "enough":
        return []
    more = [f"beta {values['beta']:g} is the largest tried; a larger one may keep more"] * ("beta" in largest)
    if rank.aim == "gentler":
        alone = tried["alpha"][0] == values["alpha"] > 0
        return [f"no alpha below {values['alpha']:g} was tried; a smaller one may keep more"] * alone + more
    left = f"{1.0 - rank.value:.0%} of what can be drawn out"
    beyond = [other for other, its in zip(ranks, candidates, strict=True) if its["alpha"] > values["alpha"]]
    if any(isinstance(other, str) or not other.met for other in beyond):
        return [
            f"the chosen point leaves {left}, and stronger ones lose too much. Try vector.mode full, a prior that "
            "answers such questions better, or more retain rows",
            *more,
        ]
    if 1.0 - rank.value >= _NOTHING:
        return [
            f"nothing that was tried forgets, up to alpha {tried['alpha'][-1]:g}, and all of it keeps enough: the "
            "forget vector may have learnt too little, see its loss; fit it longer (vector.epochs) or at a higher "
            "vector.learning_rate, or try larger alphas"
        ]
    return [f"the chosen point leaves {left}; an alpha larger than {tried['alpha'][-1]:g} may forget more"]
