"""Give reasons to doubt a choice, and say what to try instead, from the scores of the candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msa_lite.choose.evidence import Metrics
from msa_lite.choose.rules import LeastExtraction, Rank
from msa_lite.choose.shares import extractable_share
from msa_lite.choose.validation import Validation
from msa_lite.evals.benchmark import Benchmark
from msa_lite.report import load_report

FEW = 10  # rows of a set, of which a tenth is one row
WHOLE = "all"  # the split of rows that are not divided
_INSTEAD = "Try vector.mode full, a prior that answers such questions better, or more retain rows"
_NOTHING = 0.9  # an extractable share above which a vector has removed next to nothing


def doubts_of(
    validation: Validation,
    target: Metrics,
    candidates: Sequence[Mapping[str, Any]],
    ranks: Sequence[Rank | str],
    best: int,
) -> list[str]:
    """Return the reasons to doubt the choice of candidate number `best`; empty if there is none.

    target: the target's metrics. candidates: their values, in the order of the ranks.
    """
    rule, benchmark, rank = validation.rule, validation.benchmark, ranks[best]
    assert isinstance(rank, Rank), "a broken candidate is never chosen"
    doubts = [] if rank.met else [rule.unmet(rank)]
    if not {"rouge_l_r", "probability_r", *benchmark.vital} & target.keys():
        doubts.append(
            "there are no retain rows, so nothing shows what was lost beside the forget set; add rows that have to "
            "stay (retain.data, or evaluate.retain)"
        )
    prior = load_report(validation.prior).values() if validation.prior else {}
    if isinstance(rule, LeastExtraction) and extractable_share(target, target, prior) == 0:
        doubts.append(
            "the target knows no more of the forget set than "
            + ("the prior, or than of rows it never saw" if prior else "of rows it never saw")
            + ", so there is nothing to choose by"
        )
    if coarse := benchmark.resolution(rule.needs()):
        doubts.append(coarse)
    return [*doubts, *few_rows(benchmark), *strength_advice(candidates, ranks, best), *rule.notes(target)]


def few_rows(benchmark: Benchmark) -> list[str]:
    """Say which sets have few rows, and whether the choice and the final scores share them."""
    few = [f"{name}: {len(part.items)}" for name, part in benchmark.sets.items() if len(part.items) < FEW]
    if benchmark.split == WHOLE:
        counts = ", ".join(f"{name}: {len(part.items)}" for name, part in benchmark.sets.items())
        return [
            f"there are too few rows to divide ({counts}), so the final scores are on the same rows as the choice; "
            "add rows, or other questions about them (evaluate.forget)"
        ]
    return [f"it rests on few validation rows ({', '.join(few)}); raise select.validation"] if few else []


def strength_advice(candidates: Sequence[Mapping[str, Any]], ranks: Sequence[Rank | str], best: int) -> list[str]:
    """Say in which direction a better point may lie that was not tried; nothing if the best is good enough.

    candidates: their values, in the order of the ranks. `Rank.aim` gives the direction, if the rule can tell; if it
    cannot, every edge of the grid may hide a better point.
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
    more = [f"beta {values['beta']:g} is the largest tried; a larger one may keep more"] * ("beta" in largest)
    if rank.aim == "gentler":
        alone = tried["alpha"][0] == values["alpha"] > 0
        between = any(isinstance(other, Rank) and other.aim == "stronger" for other in ranks)
        return (
            [f"no alpha below {values['alpha']:g} was tried; a smaller one may keep more"] * alone
            + [f"gentler points forget too little. {_INSTEAD}"] * between
            + more
        )
    assert rank.left is not None, "only a rule that knows what is left aims at less"
    left = f"{rank.left:.0%} of what can be extracted"
    beyond = [other for other, its in zip(ranks, candidates, strict=True) if its["alpha"] > values["alpha"]]
    if any(isinstance(other, str) or other.aim == "gentler" for other in beyond):
        return [
            f"the chosen point leaves {left}, and stronger ones lose too much. {_INSTEAD}",
            *more,
        ]
    if rank.left >= _NOTHING:
        return [
            f"no point forgets, up to alpha {tried['alpha'][-1]:g}, and all of them keep enough. The forget vector may "
            "have learnt too little, see its loss: fit it longer (vector.epochs), at a higher vector.learning_rate, or "
            "try larger alphas"
        ]
    return [f"the chosen point leaves {left}; an alpha larger than {tried['alpha'][-1]:g} may forget more"]
