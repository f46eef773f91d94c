"""How vectors of several requests interfere: against fp64 numpy and cases worked by hand, and what is told of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.io.weights.hub import fetch
from msa_lite.merger.checked import CheckedMerge, Precision, check_merge
from msa_lite.merger.formula import Term, number_terms
from msa_lite.merger.interference import Interference, column_basis, layer_of, measure_interference, tell_interference
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


def oracle(one: Arrays, other: Arrays) -> tuple[float, float]:
    """Cosine and overlap of deltas by tensor, by whole matrices and their singular vectors in fp64."""
    names = one.keys() | other.keys()
    parts = [[deltas.get(name, np.zeros((ROWS, COLUMNS))) for name in sorted(names)] for deltas in (one, other)]
    flat = [np.concatenate([delta.ravel() for delta in deltas]) for deltas in parts]
    shared = ranks = 0.0
    for a, b in zip(*parts, strict=True):
        if a.any() and b.any():
            bases = []
            for delta in (a, b):
                u, sizes, _ = np.linalg.svd(delta)
                bases.append(u[:, : int(np.sum(sizes > 1e-5 * sizes[0]))])
            shared += np.linalg.norm(bases[0].T @ bases[1]) ** 2
            ranks += min(base.shape[1] for base in bases)
    return float(flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])), shared / ranks


def deltas_of(factors: Factors) -> Arrays:
    return {name: b.astype(np.float64) @ a.astype(np.float64) for name, (a, b) in factors.items()}


def test_cosine_and_overlap_are_those_of_the_whole_matrices(tmp_path: Path) -> None:
    one, other = random_factors(1, 3), random_factors(2, 5, MODULES[:3])
    mixed = {name: (a, one[name][1] @ np.ones((3, 5), np.float32) + b) for name, (a, b) in other.items()}
    (pair,) = measure_interference(plan_of(tmp_path, one, mixed))
    deltas = deltas_of(one), deltas_of(mixed)
    assert (pair.total.cosine, pair.total.overlap) == pytest.approx(oracle(*deltas), rel=1e-4)
    assert sorted(pair.layers) == ["model.layers.0", "model.layers.1"]  # the other does not touch the head
    for layer, likeness in pair.layers.items():
        parts = [{name: delta for name, delta in d.items() if name.startswith(layer)} for d in deltas]
        assert (likeness.cosine, likeness.overlap) == pytest.approx(oracle(*parts), rel=1e-4)


def test_equal_vectors_have_one_opposite_ones_minus_one_and_orthogonal_ones_zero(tmp_path: Path) -> None:
    one = random_factors(1, 3)
    half = {name: (0.5 * a, b) for name, (a, b) in one.items()}
    turned = {name: (-a, b) for name, (a, b) in one.items()}
    upper = {name: (a, np.where(np.arange(ROWS)[:, None] < ROWS // 2, b, 0)) for name, (a, b) in one.items()}
    lower = {name: (a, np.where(np.arange(ROWS)[:, None] < ROWS // 2, 0, b)) for name, (a, b) in one.items()}
    pairs = {
        (pair.one, pair.other): pair
        for pair in measure_interference(plan_of(tmp_path, one, half, turned, upper, lower))
    }
    same, opposite, apart = (
        pairs[pair] for pair in (("forget 1", "forget 2"), ("forget 1", "forget 3"), ("forget 4", "forget 5"))
    )
    for pair, cosine, overlap in ((same, 1, 1), (opposite, -1, 1), (apart, 0, 0)):
        for likeness in (pair.total, *pair.layers.values()):
            assert (likeness.cosine, likeness.overlap) == pytest.approx((cosine, overlap), abs=1e-6, rel=1e-6)
    assert len(pairs) == 10


def test_a_space_in_a_larger_one_overlaps_wholly_and_ranks_that_are_not_there_do_not_count(tmp_path: Path) -> None:
    axes = np.eye(ROWS, dtype=np.float32)
    right = np.random.default_rng(0).normal(size=(4, COLUMNS)).astype(np.float32)
    one = {"head": (right[:2], axes[:, :2])}  # axes 0 and 1
    larger = {"head": (right, axes[:, [1, 0, 2, 3]])}
    half = {"head": (right[:2], axes[:, [1, 5]])}
    # Rank 3 as stored; two columns of B are equal and a row of A is zero, so that only axis 0 is left.
    thin = {"head": (np.stack([right[0], right[1], 0 * right[2]]), axes[:, [0, 0, 1]])}
    plan = plan_of(tmp_path, one, larger, half, thin)
    overlaps = {(pair.one[-1], pair.other[-1]): pair.total.overlap for pair in measure_interference(plan)}
    assert overlaps == pytest.approx(
        {("1", "2"): 1, ("1", "3"): 0.5, ("1", "4"): 1, ("2", "3"): 0.5, ("2", "4"): 1, ("3", "4"): 0},
        abs=1e-6,
        rel=1e-6,
    )
    assert column_basis(np.zeros((5, 2)), np.ones((2, 3))).shape == (5, 0)


def test_full_vectors_have_cosines_and_no_overlap(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    full: Arrays = {
        f"{module}.weight": random.normal(size=(ROWS, COLUMNS)).astype(np.float32) for module in MODULES[:2]
    }
    one = random_factors(1, 3)
    (pair,) = measure_interference(plan_of(tmp_path, one, full))
    deltas = deltas_of(one), {name.removesuffix(".weight"): delta.astype(np.float64) for name, delta in full.items()}
    assert pair.total.cosine == pytest.approx(oracle(*deltas)[0], rel=1e-3)
    assert pair.total.overlap is None
    assert list(pair.layers) == ["model.layers.0"]  # elsewhere the tuned checkpoint is the prior
    assert "overlap" not in str(pair.total)


def test_vectors_that_are_named_are_compared_with_all_others_and_these_not_among_themselves(
    tmp_path: Path,
) -> None:
    plan = plan_of(tmp_path, *(random_factors(seed, 2) for seed in range(4)))
    own = [term for term in plan.terms if term.vector.folder.name == "vector-2"]
    whole = {(pair.one, pair.other): pair for pair in measure_interference(plan)}
    some = {(pair.one, pair.other): pair for pair in measure_interference(plan, [own[0].vector.folder])}
    assert len(whole) == 6
    assert some == {names: pair for names, pair in whole.items() if own[0].name in names}
    assert len(some) == 3


def test_of_many_pairs_the_most_alike_are_kept(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *(random_factors(seed, 2, MODULES[:1]) for seed in range(8)))
    whole, kept = measure_interference(plan), tell_interference(plan, "512MB")
    assert len(whole) == 28
    assert kept == whole[:20]


def test_layers_are_named_by_their_number() -> None:
    names = {
        "model.layers.11.self_attn.q_proj.weight": "model.layers.11",
        "transformer.h.0.attn.c_attn.weight": "transformer.h.0",
        "model.layers.3.mlp.experts.7.up_proj.weight": "model.layers.3",
        "layers.4.weight": "layers.4",
        "lm_head.weight": "lm_head",
        "model.embed_tokens.weight": "model.embed_tokens",
    }
    assert {name: layer_of(name) for name in names} == names


def told(plan: CheckedMerge, caplog: pytest.LogCaptureFixture) -> tuple[list[Interference], list[str], list[str]]:
    """The pairs, and the lines and warnings that were logged."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "msa_lite"):
        pairs = tell_interference(plan, "512MB")
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    return pairs, lines, [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("sides", "sign", "says"),
    [
        ("ff", 1, "do much the same, so together they may go too far"),
        ("ff", -1, "undo much of each other"),
        ("ffr", 1, "are much alike, so one puts back what the other removes"),
        ("ffr", -1, "push the same way"),
        ("frr", 1, None),
    ],
)
def test_vectors_that_are_much_alike_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sides: str, sign: int, says: str | None
) -> None:
    one, far, other = random_factors(1, 3), random_factors(9, 2), random_factors(2, 3)
    near = {name: (sign * (a + 0.2 * other[name][0]), b) for name, (a, b) in one.items()}
    vectors = [one, near] if len(sides) == 2 else [far, one, near] if says is None else [one, far, near]
    pairs, lines, warned = told(plan_of(tmp_path, *vectors, sides=sides), caplog)
    assert len(pairs) == len(lines) - 1 == len(vectors) * (len(vectors) - 1) / 2
    assert "vector-0" in lines[0]
    assert "; most in " in lines[1]
    assert len(warned) == (says is not None)
    for text in warned:
        assert str(says) in text
        assert f"vector-{len(vectors) - 1}" in text


def test_one_request_is_not_compared_and_little_memory_is_said(tmp_path: Path, caplog: Any) -> None:
    assert told(plan_of(tmp_path / "one", random_factors(1, 3), random_factors(2, 3), sides="fr"), caplog) == (
        [],
        [],
        [],
    )
    plan = plan_of(tmp_path / "two", random_factors(1, 3), random_factors(2, 3))
    assert tell_interference(plan, "100MB") == []
    assert "was not measured: that takes" in caplog.text
