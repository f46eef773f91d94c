"""Any merge against fp64 arithmetic: all shapes, dtypes, shards, vectors, strengths, blocks and threads."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.io.finished.seal import verify_folder
from msa_lite.merger import merge
from msa_lite.merger.checks import memory
from tests.support.merges import KINDS, Adapter, Arrays, gap, nearest, read_checkpoint, write_checkpoint

SHAPES = [(), (1,), (37,), (1, 1), (4, 9), (9, 4), (8, 8), (3, 1), (1, 50), (2, 3, 4), (0,), (0, 4), (3, 0), (2, 0, 3)]
kinds = st.sampled_from(sorted(KINDS))


@dataclass
class Case:
    """A merge and what it must give, tensor by tensor, in fp64; size: the magnitudes that rounding errors go by."""

    folder: Path
    options: dict[str, Any]
    dtypes: dict[str, np.dtype[Any]]
    touched: set[str]
    wanted: Arrays
    size: Arrays
    block: int

    def merge(self, name: str, **options: Any) -> Arrays:
        """Merge to a new folder of this name, in the case's blocks; the tensors as they are stored."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "BLOCK", self.block)
            out = merge(str(self.folder / "target"), self.folder / name, **(self.options | options)).folder
        assert verify_folder(out) == []
        return read_checkpoint(out)


def draw_arrays(draw: Any, what: str, shapes: dict[str, tuple[int, ...]], scale: float) -> Arrays:
    """Normal numbers of these shapes, each tensor in a dtype of its own; others for each `what`."""
    random = np.random.default_rng([*what.encode(), draw(st.integers(0, 2**32))])
    return {name: np.asarray(random.normal(0, scale, s)).astype(KINDS[draw(kinds)]) for name, s in shapes.items()}


def draw_adapter(draw: Any, what: str, shapes: dict[str, tuple[int, ...]], turned: bool) -> Adapter:
    """Factors for some of the matrices; turned: the target stores them as (in, out)."""
    modules = sorted(name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2 and min(shape))
    modules = ["m0", *draw(st.lists(st.sampled_from(modules), unique=True))]
    halves = {}
    for module in dict.fromkeys(modules):
        rows, columns = shapes[f"{module}.weight"][:: -1 if turned else 1]
        rank = draw(st.integers(1, 5))
        halves |= {f"{module}.A": (rank, columns), f"{module}.B": (rows, rank)}
    arrays = draw_arrays(draw, what, halves, 0.3)
    factors = {module: (arrays[f"{module}.A"], arrays[f"{module}.B"]) for module in dict.fromkeys(modules)}
    alphas = {module: draw(st.sampled_from([0.5, 3, 16])) for module in factors if draw(st.booleans())}
    return Adapter(factors, draw(st.sampled_from([1, 8, 7.5])), draw(st.booleans()), turned, alphas)


def write_vector(
    draw: Any, folder: Path, kind: str, shapes: dict[str, tuple[int, ...]], prior: Arrays, turned: bool
) -> tuple[Arrays, Arrays]:
    """Write an adapter or a checkpoint; its deltas in fp64, and the magnitudes of what they are computed from."""
    if kind == "lora":
        adapter = draw_adapter(draw, folder.name, shapes, turned)
        adapter.write(folder)
        deltas = {f"{module}.weight": adapter.delta(module) for module in adapter.factors}
        return deltas, {f"{module}.weight": adapter.size(module) for module in adapter.factors}
    tuned = draw_arrays(draw, folder.name, shapes, 0.3)
    write_checkpoint(folder, tuned | {"counts": np.array([5, 6])})
    old, new = ({name: arrays[name].astype(np.float64) for name in shapes} for arrays in (prior, tuned))
    return {n: new[n] - old[n] for n in shapes}, {n: np.abs(new[n]) + np.abs(old[n]) for n in shapes}


@st.composite
def cases(draw: Any, **fixed: Any) -> Case:
    """Everything that a merge may meet; strengths of 0 included, for which the vector is not there."""
    folder = Path(tempfile.mkdtemp(dir=draw(st.just(fixed["folder"]))))
    shapes = {"m0.weight": draw(st.sampled_from([(6, 7), (7, 6), (8, 8), (13, 2)]))}
    drawn = draw(st.lists(st.sampled_from(SHAPES), max_size=4))
    shapes |= {f"m{number}.weight": shape for number, shape in enumerate(drawn, 1)}
    target = draw_arrays(draw, "target", shapes, draw(st.sampled_from([1e-3, 1.0, 50.0])))
    prior = draw_arrays(draw, "prior", shapes, 0.3)
    everything = target | {"counts": np.array([7, 8])}
    places = {name: draw(st.integers(1, 3)) for name in everything} if draw(st.booleans()) else None
    write_checkpoint(folder / "target", everything, places)
    write_checkpoint(folder / "prior", prior | {"counts": np.array([3, 4])})
    alpha, beta = draw(st.sampled_from([(1.0, 0.0), (0.25, 1.0), (1.7, 0.6), (0.0, 1.3), (0.0, 0.0)]))
    turned = draw(st.booleans())
    options: dict[str, Any] = {"alpha": alpha, "beta": beta, "prior": str(folder / "prior")}
    wanted = {name: array.astype(np.float64) for name, array in target.items()}
    size = {name: np.abs(array) for name, array in wanted.items()}
    touched: set[str] = set()
    for name, strength, signed in (("forget", alpha, -alpha), ("retain", beta, beta)):
        if strength:
            kind = draw(st.sampled_from(["lora", "full"]))
            deltas, sizes = write_vector(draw, folder / name, kind, shapes, prior, turned)
            options[name] = str(folder / name)
            for tensor, delta in deltas.items():
                wanted[tensor] = wanted[tensor] + signed * delta
                size[tensor] = size[tensor] + strength * sizes[tensor]
            touched |= {tensor for tensor in deltas if target[tensor].size}
    options["dtype"] = draw(st.sampled_from(["same", "same", "bfloat16", "float16", "float32"]))
    options["threads"] = draw(st.integers(1, 3))
    stored = {name: KINDS.get(options["dtype"], array.dtype) for name, array in target.items()}
    return Case(folder, options, stored, touched, wanted, size, draw(st.sampled_from([1, 5, 16, 1 << 19])))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all cases of a test go."""
    return tmp_path_factory.mktemp("cases")


@settings(max_examples=40)
@given(st.data())
def test_a_merge_is_fp64_arithmetic_rounded_once_and_by_default_some_fp32_arithmetic_from_it(
    place: Path, data: Any
) -> None:
    case = data.draw(cases(folder=place))
    merged, default = case.merge("exact", exact=True), case.merge("default")
    for arrays in (merged, default):  # nothing but values can be wrong
        assert {n: (a.shape, a.dtype) for n, a in arrays.items() if n != "counts"} == {
            n: (a.shape, case.dtypes[n]) for n, a in case.wanted.items()
        }
        assert arrays["counts"].tolist() == [7, 8]
    for name, wanted in case.wanted.items():
        if case.dtypes[name] == np.float64:  # where there is no rounding left, the order of a sum shows
            assert np.all(np.abs(merged[name] - wanted) <= 16 * 2.0**-53 * case.size[name]), name
        else:
            bits = merged[name].view(f"u{merged[name].dtype.itemsize}")
            assert np.array_equal(bits, nearest(wanted, case.dtypes[name])), name
        # At most 5 ranks a vector, and roundings of inputs, scales and sums: 16 of them, each half a unit of 2⁻²³.
        work = 16 * 2.0**-24 * case.size[name]
        if name not in case.touched:
            work = np.zeros_like(work)
        error = np.abs(default[name].astype(np.float64) - wanted)
        assert np.all(error <= gap(np.abs(wanted) + work, case.dtypes[name]) / 2 + work), name


@settings(max_examples=15)
@given(st.data(), st.booleans(), st.booleans())
def test_neither_threads_nor_memory_change_a_bit(place: Path, data: Any, exact: bool, stochastic: bool) -> None:
    case = data.draw(cases(folder=place))
    options = {"exact": exact, "rounding": "stochastic" if stochastic else "nearest", "seed": 3}
    first = case.merge("one", **options, threads=1, max_memory="200MB")
    second = case.merge("two", **options, threads=3, max_memory="2GB")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name].tobytes() != second[name].tobytes()] == []


@settings(max_examples=15)
@given(st.data(), st.integers(0, 2**40))
def test_a_stochastic_merge_gives_neighbours_and_repeats_by_its_seed(place: Path, data: Any, seed: int) -> None:
    case = data.draw(cases(folder=place))
    options = {"rounding": "stochastic", "exact": True}
    merged, again = (case.merge(name, **options, seed=seed) for name in ("first", "again"))
    assert [name for name in merged if merged[name].tobytes() != again[name].tobytes()] == []
    for name in case.touched:
        tolerance = 16 * 2.0**-53 * case.size[name]
        error = np.abs(merged[name].astype(np.float64) - case.wanted[name])
        assert np.all(error < gap(case.wanted[name], case.dtypes[name]) + tolerance), name
