"""How vectors of several requests interfere: against fp64 numpy and cases worked by hand, and what is told of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.io.weights.hub import fetch
from msa_lite.merger.checks.checked import CheckedMerge, Precision, check_merge
from msa_lite.merger.checks.interference import measure_interference, tell_interference
from msa_lite.merger.formula import Term, number_terms
from tests.support.merges import KINDS, Adapter, Arrays, write_checkpoint

ROWS, COLUMNS = 30, 20
MODULES = ("model.layers.0.q", "model.layers.0.o", "model.layers.1.q", "head")
Factors = dict[str, tuple[np.ndarray, np.ndarray]]


def random_factors(seed: int, rank: int, modules: tuple[str, ...] = MODULES) -> Factors:
    """A and B by module."""
    random = np.random.default_rng(seed)
    halves = ((rank, COLUMNS), (ROWS, rank))
    return {module: tuple(random.normal(size=shape).astype(np.float32) for shape in halves) for module in modules}  # type: ignore[misc]


def plan_of(folder: Path, *vectors: Factors | Arrays, sides: str = "") -> CheckedMerge:
    """The plan of a merge of these vectors: factors by module, or weights of a full checkpoint; sides: "f" or "r"."""
    random = np.random.default_rng(0)
    arrays = {f"{module}.weight": random.normal(size=(ROWS, COLUMNS)).astype(np.float32) for module in MODULES}
    target = write_checkpoint(
        folder / "target", {name: array.astype(KINDS["bfloat16"]) for name, array in arrays.items()}
    )
    prior = write_checkpoint(folder / "prior", arrays)
    terms = []
    for number, vector in enumerate(vectors):
        place = folder / f"vector-{number}"
        if isinstance(next(iter(vector.values())), tuple):
            whole = {name: tuple(map(np.ascontiguousarray, pair)) for name, pair in vector.items()}
            Adapter(whole, lora_alpha=4.0 + number).write(place)  # type: ignore[arg-type]
        else:
            write_checkpoint(place, arrays | {name: arrays[name] + delta for name, delta in vector.items()})  # type: ignore[operator]
        side = "retain" if sides[number : number + 1] == "r" else "forget"
        terms.append(Term(side, fetch(str(place)), 1.0 if side == "retain" else -1.0))
    return check_merge(fetch(str(target)), number_terms(terms), fetch(str(prior)), Precision())


def oracle(one: Arrays, other: Arrays) -> float:
    """The cosine of deltas by tensor, of whole matrices in fp64."""
    zeros = np.zeros((ROWS, COLUMNS))
    names = sorted(one.keys() | other.keys())
    flat = [np.concatenate([deltas.get(name, zeros).ravel() for name in names]) for deltas in (one, other)]
    return float(flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1]))


def deltas_of(factors: Factors) -> Arrays:
    return {f"{name}.weight": b.astype(np.float64) @ a.astype(np.float64) for name, (a, b) in factors.items()}


def cosines(plan: CheckedMerge, folders: Any = None) -> dict[str, float | None]:
    """The cosines by the numbers of their vectors: {"12": 0.3}."""
    return {one[-1] + other[-1]: value for (one, other), value in measure_interference(plan, folders).items()}


def test_cosines_are_those_of_the_whole_matrices(tmp_path: Path) -> None:
    one, other = random_factors(1, 3), random_factors(2, 5, MODULES[:3])
    mixed = {name: (a, one[name][1] @ np.ones((3, 5), np.float32) + b) for name, (a, b) in other.items()}
    random = np.random.default_rng(3)
    full = {f"{module}.weight": random.normal(size=(ROWS, COLUMNS)).astype(np.float32) for module in MODULES[:2]}
    low, dense = cosines(plan_of(tmp_path / "a", one, mixed)), cosines(plan_of(tmp_path / "b", one, full))
    assert low["12"] == pytest.approx(oracle(deltas_of(one), deltas_of(mixed)), rel=1e-4)
    assert dense["12"] == pytest.approx(oracle(deltas_of(one), full), rel=1e-3)


def test_equal_vectors_have_one_opposite_ones_minus_one_and_orthogonal_ones_zero(tmp_path: Path) -> None:
    one = random_factors(1, 3)
    half = {name: (0.5 * a, b) for name, (a, b) in one.items()}
    turned = {name: (-a, b) for name, (a, b) in one.items()}
    upper = {name: (a, np.where(np.arange(ROWS)[:, None] < ROWS // 2, b, 0)) for name, (a, b) in one.items()}
    lower = {name: (a, np.where(np.arange(ROWS)[:, None] < ROWS // 2, 0, b)) for name, (a, b) in one.items()}
    pairs = cosines(plan_of(tmp_path, one, half, turned, upper, lower))
    assert [pairs[names] for names in ("12", "13", "45")] == pytest.approx([1, -1, 0], abs=1e-6, rel=1e-6)
    assert len(pairs) == 10


def test_vectors_that_are_named_are_compared_with_all_others_and_the_most_alike_are_kept(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *(random_factors(seed, 2, MODULES[:1]) for seed in range(8)))
    whole = measure_interference(plan)
    assert len(whole) == 28
    kept = [(pair["one"], pair["other"], pair["cosine"]) for pair in tell_interference(plan)]
    assert kept == [(*names, value) for names, value in whole.items()][:20]
    sizes = [abs(pair[2]) for pair in kept]
    assert sizes == sorted(sizes, reverse=True)
    some = cosines(plan, [term.vector.folder for term in plan.terms if term.name == "forget 3"])
    assert some == {names: cosine for names, cosine in cosines(plan).items() if "3" in names}


def told(plan: CheckedMerge, caplog: pytest.LogCaptureFixture) -> tuple[list[Any], list[str], list[str]]:
    """The pairs, and the lines and warnings that were logged."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "msa_lite"):
        pairs = tell_interference(plan)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    return pairs, lines, [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("sides", "sign", "is_warned"), [("ff", 1, True), ("ff", -1, True), ("ffr", 1, True), ("frr", 1, False)]
)
def test_vectors_that_are_much_alike_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sides: str, sign: int, is_warned: bool
) -> None:
    one, far, other = random_factors(1, 3), random_factors(9, 2), random_factors(2, 3)
    near = {name: (sign * (a + 0.2 * other[name][0]), b) for name, (a, b) in one.items()}
    vectors = [one, near] if len(sides) == 2 else [one, far, near] if is_warned else [far, one, near]
    pairs, lines, warned = told(plan_of(tmp_path, *vectors, sides=sides), caplog)
    assert len(pairs) == len(lines) - 1 == len(vectors) * (len(vectors) - 1) / 2
    assert "vector-0" in lines[0]
    assert ": cosine " in lines[1]
    assert len(warned) == is_warned
    for text in warned:
        assert f"are much alike (cosine {'-' * (sign < 0)}0." in text
        assert f"vector-{len(vectors) - 1}" in text


def test_one_request_is_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of(tmp_path, random_factors(1, 3), random_factors(2, 3), sides="fr")
    assert told(plan, caplog) == ([], [], [])
