"""Give reasons to doubt a choice, and say what to try instead, from the scores of the candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msa_lite.choose.division import WHOLE
from msa_lite.choose.evidence import Metrics
from msa_lite.choose.rules import Rank
from msa_lite.choose.validation import Validation
from msa_lite.evals.benchmark import Benchmark

FEW = 12  # rows of a set, of which each is almost a tenth
_UNTOUCHED = 0.98  # a kept share above which a vector has changed next to nothing


def doubts_of(
    validation: Validation,
    target: Metrics,
    candidates: Sequence[Mapping[str, Any]],
    ranks: Sequence[Rank | str],
    best: int,
    remedies: Sequence[str] = (),
) -> list[str]:
    """Return the reasons to doubt the choice of candidate number `best`; empty if there is none.

    target: the target's metrics. candidates: their values, in the order of the ranks. remedies: what this run can try
    where no candidate both forgets and keeps.
    """
    rule, benchmark, rank = validation.rule, validation.benchmark, ranks[best]
    assert isinstance(rank, Rank), "a broken candidate is never chosen"
    doubts = [] if rank.met else [rule.unmet(rank)]
    if not {"rouge_l_r", "probability_r", *benchmark.vital} & target.keys():
        doubts.append(
            "there are no retain rows, so nothing shows what was lost beside the forget set; add rows that have to "
            "stay (retain.data, or evaluate.retain)"
        )
    if coarse := benchmark.resolution(rule.needs()):
        doubts.append(coarse)
    return [*doubts, *few_rows(benchmark), *strength_advice(candidates, ranks, best, remedies), *rule.notes(target)]


def few_rows(benchmark: Benchmark) -> list[str]:
    """Say which sets have few rows, and whether choice and final scores share the retain rows."""
    few = [f"{name}: {len(part.items)}" for name, part in benchmark.sets.items() if len(part.items) < FEW]
    doubts = [f"it rests on few rows ({', '.join(few)})"] if few else []
    if benchmark.split == WHOLE and (retain := benchmark.sets.get("retain")):
        doubts.append(
            f"there are too few retain rows to divide ({len(retain.items)}), so the final scores are on the same rows "
            "as the choice; add rows (evaluate.retain)"
        )
    return doubts


def strength_advice(
    candidates: Sequence[Mapping[str, Any]], ranks: Sequence[Rank | str], best: int, remedies: Sequence[str] = ()
) -> list[str]:
    """Say in which direction a better point may lie that was not tried; nothing if the best is good enough.

    candidates: their values, in the order of the ranks. `Rank.aim` gives the direction, if the rule can tell; if it
    cannot, every edge of the grid may hide a better point. remedies: as of `doubts_of`.
    """
    rank, values = ranks[best], candidates[best]
    assert isinstance(rank, Rank), "a broken candidate is never chosen"
    if "alpha" not in values:
        hint = "try gentler ones: a lower baseline.learning_rate, or fewer epochs"
        return [hint] if rank.aim == "gentler" else []
    tried = {key: sorted({float(c[key]) for c in candidates if key in c}) for key in ("alpha", "beta")}
    several = {key for key, numbers in tried.items() if len(numbers) > 1}
    largest = {key for key in several if values[key] == tried[key][-1]}
    smallest = {key for key in several if values[key] == tried[key][0] > 0}
    if rank.aim is None:
        edges = [f"{key} {values[key]:g} is the largest tried; a larger one may be better" for key in largest]
        edges += [f"{key} {values[key]:g} is the smallest tried; a smaller one may be better" for key in smallest]
        return sorted(edges)
    if rank.aim == "enough":
        return []
    aims = {other.aim if isinstance(other, Rank) else "gentler" for other in ranks}
    if "neither" in aims or aims >= {"stronger", "gentler"}:
        instead = f". Try {', or '.join(remedies)}" if remedies else ""
        more = ["beta"] if "beta" in largest else []
        return [
            f"gentler points know too much, stronger ones lose too much{instead}",
            *(f"{key} {values[key]:g} is the largest tried; a larger one may keep more" for key in more),
        ]
    if rank.aim == "gentler":
        return [f"no alpha below {tried['alpha'][0]:g} was tried; a smaller one may keep more"]
    if rank.kept > _UNTOUCHED:
        return [
            f"no point forgets, up to alpha {tried['alpha'][-1]:g}, and all of them keep enough. The forget vector may "
            "have learnt too little, see its loss: fit it longer (vector.epochs), at a higher vector.learning_rate, or "
            "try larger alphas"
        ]
    return [f"an alpha larger than {tried['alpha'][-1]:g} may forget more"]
