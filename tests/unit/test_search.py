"""The search for α and β, on models that are formulas: what it finds, in how many points, and what it never does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.choose import search as searches
from msa_lite.choose.rules import LeastExtraction, Metrics, PaperScore, Rank
from msa_lite.choose.search import LARGEST, SMALLEST, StrengthSearch
from msa_lite.evals.verdict.outcome import Standing
from msa_lite.strengths import Strengths
from tests.support.records import make_forgotten

Point = tuple[float, float]
Scored = dict[Point, Rank | str]
Model = Callable[[float, float], Rank | str]
TARGET = {"rouge_l_f": 1.0, "extraction_strength": 1.0, "rouge_l_r": 1.0, "model_utility": 1.0}
KEEP, FORGOTTEN = 0.95, 0.1
FORGOTTEN_ROWS = make_forgotten()


def responds(forgets: float, keeps: float, helps: float = 0.0, noise: float = 0.0, seed: int = 0) -> Model:
    """A model that knows as little as its control from α = `forgets` on, and keeps 95 % up to α = `keeps`.

    helps: by how much of `keeps` β = α moves that further up, or, where it is negative, down. Far beyond, it is broken.
    """
    chance = random.Random(seed)

    def rank(alpha: float, beta: float) -> Rank | str:
        left = FORGOTTEN ** ((alpha / forgets) ** 2)  # the control is at `FORGOTTEN` / 2, and its bound at `FORGOTTEN`
        reach = keeps * (1 + helps * beta / alpha)
        kept = 0.95 ** ((alpha / reach) ** 2) + chance.gauss(0, noise)
        if kept < 0.05:
            return "nothing is left"
        left = min(1.0, max(0.0, left + chance.gauss(0, noise)))
        inside = left <= FORGOTTEN + 1e-9
        distance = (abs(left - FORGOTTEN / 2) + abs(1 - kept)) / 2
        standing = Standing(inside, [] if inside else ["too much is known"], kept, distance, FORGOTTEN_ROWS)
        return LeastExtraction(KEEP).rank({}, {}, standing)

    return rank


def run(search: StrengthSearch, model: Model) -> Scored:
    """All points of a search, in the order in which they are tried."""
    scored: dict[Strengths, Rank | str] = {}
    while new := search.next_points(scored):
        assert not scored.keys() & set(new)
        assert len(new) == len(set(new))
        scored |= {point: model(point.alpha, point.beta) for point in new}
    return {(point.alpha, point.beta): rank for point, rank in scored.items()}


def best_point(scored: Scored) -> Point | None:
    best = searches.best_point({Strengths(*point): rank for point, rank in scored.items()})
    return best and (best.alpha, best.beta)


def found(scored: Scored) -> tuple[Point, Rank]:
    best = best_point(scored)
    assert best is not None
    rank = scored[best]
    assert isinstance(rank, Rank)
    return best, rank


ALONE, WITH_BETA = StrengthSearch(betas=(0.0,)), StrengthSearch()
KEEPS = [(0.3, 1.0), (0.3, 2.0), (1.0, 2.0), (1.0, 5.0), (5.0, 7.9), (0.1, 0.2)]


@pytest.mark.parametrize(
    ("search", "forgets", "keeps", "largest", "most"),
    [
        # Without retain rows, the gentlest α that forgets is taken.
        *((ALONE, forgets, math.inf, 1.25 * forgets, 8) for forgets in (0.1, 0.8, 1.0, 2.5, 5.0)),
        *((WITH_BETA, forgets, keeps, keeps, 12) for forgets, keeps in KEEPS),
    ],
)
def test_what_forgets_and_keeps_is_found(
    search: StrengthSearch, forgets: float, keeps: float, largest: float, most: int
) -> None:
    scored = run(search, responds(forgets, keeps))
    (alpha, beta), rank = found(scored)
    assert rank.aim == "enough"
    assert forgets <= alpha <= largest
    assert beta == 0  # no other keeps more
    assert len(scored) <= most


@pytest.mark.parametrize("keeps", [0.15, 0.2, 0.4, 1.1, 2.0])
@pytest.mark.parametrize("ratio", [1.5, 3.0])
def test_where_none_does_both_the_nearest_is_taken(keeps: float, ratio: float) -> None:
    model = responds(ratio * keeps, keeps)
    scored = run(StrengthSearch(betas=(0.0,)), model)
    _, rank = found(scored)
    ranks = [model(SMALLEST * 1.02**step, 0.0) for step in range(245)]
    nearest = max(one.value for one in ranks if isinstance(one, Rank))
    assert not rank.met
    assert nearest - 0.02 <= rank.value <= nearest + 1e-3
    assert len(scored) <= 8


@pytest.mark.parametrize("keeps", [0.2, 0.5, 0.9])
def test_beta_lets_a_stronger_alpha_keep_enough(keeps: float) -> None:
    alone = found(run(StrengthSearch(betas=(0.0,)), responds(2 * keeps, keeps)))
    scored = run(StrengthSearch(), responds(2 * keeps, keeps, helps=2.0))
    (alpha, beta), rank = found(scored)
    assert alone[1].aim != "enough"
    assert rank.aim == "enough"
    assert beta > 0
    assert alpha >= 2 * keeps
    assert len(scored) <= 12


def test_a_beta_that_hurts_is_left_out() -> None:
    (_, beta), rank = found(run(StrengthSearch(), responds(0.8, 1.2, helps=-0.8)))
    assert (beta, rank.aim) == (0.0, "enough")


def test_nothing_that_forgets_ends_at_the_largest_and_nothing_that_keeps_at_the_smallest() -> None:
    weak = run(StrengthSearch(betas=(0.0,)), responds(100.0, math.inf))
    assert [alpha for alpha, _ in weak] == [1, 2, 4, 8]
    assert max(alpha for alpha, _ in weak) == LARGEST
    deaf = run(StrengthSearch(), lambda alpha, beta: Rank(True, 0.0, 1.0, "stronger"))  # all alike: none is gentler
    assert max(alpha for alpha, _ in deaf) == LARGEST
    harmful = run(StrengthSearch(betas=(0.0,)), responds(0.5, 0.01))
    assert min(alpha for alpha, _ in harmful) == SMALLEST
    assert found(harmful)[0] == (SMALLEST, 0.0)
    broken = run(StrengthSearch(), lambda alpha, beta: "no numbers")
    assert best_point(broken) is None
    assert min(alpha for alpha, _ in broken) == SMALLEST


@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0])
def test_a_rule_that_only_orders_points_is_climbed(scale: float) -> None:
    target: Metrics = TARGET | {"model_utility": 0.8}

    def model(alpha: float, beta: float) -> Rank | str:
        left, kept = 0.05 ** (alpha / scale), 0.95 ** ((alpha / scale) ** 3)
        return PaperScore("tofu").rank({"extraction_strength": left, "model_utility": 0.8 * kept}, target)

    scored = run(StrengthSearch(betas=(0.0,)), model)
    (alpha, _), rank = found(scored)
    near = [model(alpha * step, 0.0) for step in (0.5, 1.5)]
    assert all(isinstance(other, Rank) and rank >= other for other in near)
    assert len(scored) <= 8


@settings(max_examples=60)
@given(st.floats(0.03, 20), st.floats(0.03, 20), st.floats(-0.9, 3), st.floats(0, 0.2), st.integers(0, 9))
def test_a_search_ends_whatever_the_noise_and_what_it_finds_is_the_best_it_saw(
    forgets: float, keeps: float, helps: float, noise: float, seed: int
) -> None:
    for search in (StrengthSearch(), StrengthSearch(betas=(0.0, 0.5)), StrengthSearch(betas=(0.0,))):
        scored = run(search, responds(forgets, keeps, helps, noise, seed=seed))
        assert len(scored) <= search.most <= 12
        assert all(SMALLEST <= alpha <= LARGEST and 0 <= beta <= LARGEST for alpha, beta in scored)
        best = best_point(scored)
        if best is not None and any(isinstance(rank, Rank) and rank.met for rank in scored.values()):
            assert found(scored)[1].met


def test_where_no_point_is_good_the_other_betas_of_the_nearest_are_tried() -> None:
    weak, lost = (Rank(False, -0.044, aim="stronger"), Rank(False, -0.072, aim="neither"))
    column = {Strengths(1.0, 0.5): Rank(False, -0.076, aim="stronger"), Strengths(1.4, 0.7): weak}
    others = {Strengths(1.0, beta): Rank(False, -0.09, aim="stronger") for beta in (0.0, 1.0)}
    ends = {Strengths(1.7, beta): lost for beta in (0.85, 0.0, 1.7)}
    points = StrengthSearch().next_points(column | others | ends)
    assert points == [Strengths(1.4, 0.0), Strengths(1.4, 1.4)]


def test_of_equals_the_gentlest_is_the_best() -> None:
    same = Rank(True, 1.0, 0.99, "enough")
    points: Scored = {(1.0, 0.5): same, (0.5, 0.5): same, (0.5, 0.25): same, (2.0, 0.0): same}
    assert best_point(points) == (0.5, 0.25)
    assert best_point(points | {(4.0, 0.0): Rank(True, 1.0, 1.0)}) == (4.0, 0.0)  # what keeps more goes before


def test_given_alphas_are_tried_with_betas_around_the_best() -> None:
    scored = run(StrengthSearch(alphas=(0.5, 1.0)), responds(0.8, 0.8, helps=2.0))
    assert [*scored][:6] == [(0.5, 0.0), (0.5, 0.25), (0.5, 0.5), (1.0, 0.0), (1.0, 0.5), (1.0, 1.0)]
    (alpha, _), rank = found(scored)
    assert (alpha, rank.aim) == (1.0, "enough")
    assert {*[*scored][6:]} <= {(1.0, 0.25), (1.0, 0.75), (1.0, 1.25)}
    assert [*run(StrengthSearch(alphas=(0.0,)), lambda alpha, beta: Rank(True, 0.0))] == [(0.0, 0.0)]


def test_given_betas_are_tried_as_they_are() -> None:
    scored = run(StrengthSearch(betas=(0.0, 0.3)), responds(0.6, 0.5, helps=2.0))
    assert {beta for _, beta in scored} == {0.0, 0.3}
    (_, beta), rank = found(scored)
    assert (beta, rank.aim) == (0.3, "enough")


def test_it_is_told_by_what_was_asked_and_not_by_what_was_found() -> None:
    assert StrengthSearch().describe() == {"alpha": "auto", "beta": "auto"}
    assert StrengthSearch(betas=(0.0, 1.0)).describe() == {"alpha": "auto", "beta": [0.0, 1.0]}
    assert StrengthSearch(alphas=(1.0,)).describe() == {"alpha": [1.0], "beta": "auto"}
