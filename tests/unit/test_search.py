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
from msa_lite.recipe.schema import AUTO_FILTERS
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
    points = tried(search, lambda point: model(point.alpha, point.beta))
    return {(point.alpha, point.beta): rank for point, rank in points.items()}


def tried(search: StrengthSearch, model: Callable[[Strengths], Rank | str]) -> dict[Strengths, Rank | str]:
    scored: dict[Strengths, Rank | str] = {}
    while new := search.next_points(scored):
        assert not scored.keys() & set(new)
        assert len(new) == len(set(new))
        scored |= {point: model(point) for point in new}
    return scored


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
WITH_FILTER = StrengthSearch(betas=(0.0,), filters=AUTO_FILTERS)
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
    assert [alpha for alpha, _ in weak][:4] == [1, 2, 4, 8]
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
    for search in (StrengthSearch(), StrengthSearch(betas=(0.0, 0.5)), ALONE, WITH_FILTER):
        model = responds(forgets, keeps, helps, noise, seed=seed)
        scored = tried(search, lambda point, model=model: model(point.alpha, point.beta))
        assert len(scored) <= search.most <= 12
        assert all(SMALLEST <= point.alpha <= LARGEST and 0 <= point.beta <= LARGEST for point in scored)
        best = searches.best_point(scored)
        whole = [rank for rank in scored.values() if isinstance(rank, Rank)]
        assert (scored[best] == max(whole)) if best else not whole


@pytest.mark.parametrize(("below", "above", "wanted"), [(-0.076, -0.072, 1.8), (-0.072, -0.076, 1.2)])
def test_the_side_of_the_better_neighbour_is_looked_at_first(below: float, above: float, wanted: float) -> None:
    values = {1.0: below, 1.4: -0.044, 2.2: above}
    ladder = {alpha: Rank(False, value, aim="neither") for alpha, value in values.items()}
    points = StrengthSearch(betas=(0.0,)).next_points({Strengths(alpha): rank for alpha, rank in ladder.items()})
    assert points == [Strengths(wanted)]


def by_filter(**models: tuple[float, float]) -> Callable[[Strengths], Rank | str]:
    """Models by λ that know too much below one α, and keep 95 % up to another."""
    respond = {float(name[1:]): responds(*strengths) for name, strengths in models.items()}
    return lambda point: respond.get(point.filter, responds(2.2, 1.0))(point.alpha, point.beta)


@pytest.mark.parametrize(
    ("models", "best", "most"),
    [
        # None can be better than what keeps all: the others are not tried, nor the gentlest α looked for.
        ({"l1": (2.2, 900.0), "l4": (2.2, 900.0), "l16": (2.2, 900.0)}, 4.0, 5),
        ({"l1": (2.2, 3.0), "l4": (2.2, 4.0), "l16": (2.2, 7.0)}, 16.0, 11),
        ({"l1": (2.2, 3.0), "l4": (2.2, 4.0), "l16": (4.2, 12.0)}, 16.0, 12),  # beyond the α at which λ were tried
        ({"l1": (2.2, 3.0), "l4": (2.2, 4.0), "l16": (2.2, 5.5), "l64": (2.2, 7.0)}, 64.0, 12),
        ({"l1": (2.2, 3.0), "l4": (2.2, 1.5), "l16": (2.2, 1.0), "l64": (2.2, 9.0)}, 1.0, 12),  # 64 is not tried
        ({"l1": (2.2, 6.0), "l4": (2.2, 4.0), "l16": (2.2, 3.0)}, 1.0, 11),
        ({"l1": (2.2, 4.0), "l4": (2.2, 4.0), "l16": (2.2, 4.0)}, 1.0, 12),  # of equals the least
        ({"l1": (2.2, 1.0), "l4": (2.2, 1.4), "l16": (2.2, 1.9)}, 16.0, 12),  # none meets the rule
        ({"l1": (0.2, 0.4), "l4": (0.2, 0.3), "l16": (0.2, 0.21)}, 1.0, 12),
    ],
)  # fmt: skip
def test_a_filter_is_taken_where_it_is_better_and_then_its_alpha(
    models: dict[str, tuple[float, float]], best: float, most: int
) -> None:
    model = by_filter(**models)
    scored = tried(WITH_FILTER, model)
    point = searches.best_point(scored)
    assert point is not None
    assert point.filter == best
    rank = scored[point]
    dense = [
        model(Strengths(1.02**step, 0.0, strength))
        for step in range(-140, 105)
        for strength in {point.filter for point in scored}
    ]
    highest = max(one for one in dense if isinstance(one, Rank))
    assert isinstance(rank, Rank)
    assert rank.met == highest.met
    assert rank.value > highest.value - 0.02
    assert len(scored) <= most <= 12
    assert best >= 16 or all(point.filter < 64 for point in scored)


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_three_filters_are_climbed_by_a_rule_that_only_orders(scale: float) -> None:
    far = {1.0: 0.05, 4.0: 0.02, 16.0: 0.0, 64.0: 0.01}

    def model(point: Strengths) -> Rank:
        return Rank(True, 1 - far[point.filter] - abs(math.log(point.alpha / scale)) / 4)

    scored = tried(WITH_FILTER, model)
    best = searches.best_point(scored)
    assert best is not None
    assert best.filter == 16
    assert scale / 1.25 < best.alpha < scale * 1.25
    assert len(scored) <= 12


@pytest.mark.parametrize(
    ("betas", "filters", "start", "most"),
    [((0.0, 0.1, 0.2, 0.3, 0.4), (0.0,), (1.0, 0.2, 0.0), 16), ((0.0, 0.5), AUTO_FILTERS, (1.0, 0.5, 4.0), 18)],
)
def test_a_list_of_betas_is_begun_in_the_middle_and_has_points_for_each(
    betas: tuple[float, ...], filters: tuple[float, ...], start: tuple[float, ...], most: int
) -> None:
    search = StrengthSearch(None, betas, filters)
    assert search.next_points({}) == [Strengths(*start)]
    assert search.most == most


class Endless(StrengthSearch):
    most = 1000


def monotone(seed: int) -> Callable[[Strengths], Rank | str]:
    """Columns of which more α never forgets less and never keeps more, by steps and plateaus."""
    chance = random.Random(seed)
    losses = {s: sorted((chance.uniform(0.05, 9), chance.choice([0.0, 1e-4, 0.02, 0.1])) for _ in range(9))
              for s in WITH_FILTER.filters}  # fmt: skip
    forgets = {s: chance.uniform(0.05, 7) for s in losses}

    def rank(point: Strengths) -> Rank | str:
        kept = 1 - sum(loss for alpha, loss in losses[point.filter] if alpha <= point.alpha)
        inside = point.alpha >= forgets[point.filter]
        distance = abs(point.alpha - forgets[point.filter]) / 20 + (1 - kept) / 2
        return LeastExtraction(0.9).rank({}, {}, Standing(inside, [], kept, distance, FORGOTTEN_ROWS))

    return rank


def test_what_is_left_out_could_not_have_won(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = Endless(betas=(0.0,), filters=WITH_FILTER.filters)
    short = [tried(searched, monotone(seed)) for seed in range(300)]
    monkeypatch.setattr(searches, "_can_win", lambda kept, best: True)
    long = [tried(searched, monotone(seed)) for seed in range(300)]
    for seed, (some, more) in enumerate(zip(short, long, strict=True)):
        best, other = (scored[point] for scored in (some, more) if (point := searches.best_point(scored)))
        assert best == other, seed
    assert sum(map(len, short)) < 0.8 * sum(map(len, long))


def test_a_column_is_searched_until_nothing_beyond_its_resolution_is_better() -> None:
    for seed in range(100):
        model, column = monotone(seed), Endless(betas=(0.0,), filters=(4.0,))
        scored = tried(column, model)
        dense = {alpha: model(Strengths(alpha, 0.0, 4.0)) for alpha in (SMALLEST * 1.01**step for step in range(488))}
        gentlest = next((alpha for alpha, rank in dense.items() if isinstance(rank, Rank) and rank.met), None)
        best = max(rank for rank in scored.values() if isinstance(rank, Rank))
        assert best.met == (gentlest is not None) or (gentlest or 1.0) > LARGEST / 1.03, seed
        if gentlest and best.met:
            later = model(Strengths(1.04 * gentlest, 0.0, 4.0))
            assert isinstance(later, Rank)
            assert best >= later, seed


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
