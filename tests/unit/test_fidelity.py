"""What a merge says about its own rounding, against fp64 numpy; and what it says of NaN, infinities and overflow."""

from __future__ import annotations

import json
import math
import tempfile
import warnings as python_warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.errors import FormatError, MismatchError
from msa_lite.io.files.writing import json_form
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.merger import Term, merge
from msa_lite.merger.checks import memory
from msa_lite.merger.fidelity import (
    Change,
    fidelity_report,
    measure,
    measure_carefully,
    measure_deltas,
    measure_factors,
    total,
    warnings,
)
from tests.support.merges import KINDS, Adapter, Arrays, gap, nearest, read_checkpoint, write_checkpoint

NAME = "layers.0.weight"
ROWS, COLUMNS = 24, 16


def expected(before: np.ndarray, wanted: np.ndarray, stored: np.ndarray) -> Change:
    """The sums in fp64, from the definitions."""
    old, update, new = (values.astype(np.float64) for values in (before, wanted, stored))
    lost = update - (new - old)
    squares = [float(np.sum(values**2)) for values in (old, update, new - old, lost)]
    return Change(before.size, int(np.sum(new != old)), *squares)


def terms(*vectors: Any) -> list[Term[Any]]:
    """A forget vector, perhaps with a retain vector."""
    return [Term(name, vector, 1.0) for name, vector in zip(("forget", "retain"), vectors, strict=False)]


def sums(change: Change) -> dict[str, float]:
    """The sums of a change, those of its vectors by their names."""
    values = asdict(change)
    return values | values.pop("vectors")


@pytest.mark.parametrize("work", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_a_block_is_measured_as_fp64_would(dtype: str, work: type, size: float) -> None:
    random = np.random.default_rng(0)
    before = random.normal(size=(700, 300)).astype(KINDS[dtype]).astype(work)
    wanted = (random.normal(size=(700, 300)) * size).astype(work)
    stored = (before + wanted).astype(KINDS[dtype]).astype(work)
    asked = expected(before, wanted, stored)
    change = measure(before, wanted, stored.copy(), np.empty(before.shape, bool))
    assert (change.weights, change.changed) == (asked.weights, asked.changed)
    assert sums(change) == pytest.approx(sums(asked), rel=1e-4, abs=1e-12 * asked.wanted)
    product = float(np.sum(wanted.astype(np.float64) * (stored.astype(np.float64) - before)))
    if asked.stored:
        cosine = product / math.sqrt(asked.wanted * asked.stored)
        assert change.update_cosine == pytest.approx(cosine, abs=1e-3, rel=1e-3)
    assert change.rounding_loss == pytest.approx(math.sqrt(asked.lost / asked.wanted), rel=1e-4, abs=1e-7)


def test_figures_of_nothing_are_none_or_zero() -> None:
    figures = json_form(Change())
    assert figures["update_cosine"] is figures["vector_cosine"] is figures["relative_size"] is None
    assert (figures["rounding_loss"], figures["changed_share"]) == (0, 0)
    assert json_form(Change(wanted=4.0, lost=4.0))["rounding_loss"] == 1  # all lost: nothing moved
    assert Change(wanted=4.0, lost=4.0).update_cosine is None


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=7, max_size=7), max_size=5))
def test_sums_add_up_and_survive_json(parts: list[list[float]]) -> None:
    changes = {
        f"t{number}": Change(number, 1, *values[:5], dict(zip(("forget", "retain"), values[5:], strict=True)))
        for number, values in enumerate(parts)
    }
    whole = total(changes.values())
    assert whole.weights == sum(range(len(parts)))
    assert list(sums(whole).values())[2:] == pytest.approx([sum(v[i] for v in parts) for i in range(7 if parts else 5)])
    again = {name: Change(**json.loads(json.dumps(asdict(change)))) for name, change in changes.items()}
    assert again == changes
    report = fidelity_report(changes)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert list(report["tensors"]) == sorted(changes)


def test_sums_that_overflow_fp32_are_taken_in_fp64() -> None:
    before, wanted = np.full((4, 4), 1e30, np.float32), np.full((4, 4), 1e29, np.float32)
    change = measure_carefully(before, wanted, before + wanted)
    assert change.weight == pytest.approx(16e60)
    assert json_form(change)["relative_size"] == pytest.approx(0.1)


@pytest.mark.parametrize("work", [np.float32, np.float64])
@pytest.mark.parametrize("rank", [3, 200])  # low, and above the sides of the weight
def test_norms_and_products_of_vectors_are_the_same_from_factors_and_from_deltas(work: type, rank: int) -> None:
    random = np.random.default_rng(0)

    def factors(rank: int) -> tuple[np.ndarray, np.ndarray]:
        return random.normal(size=(60, rank)).astype(work), random.normal(size=(rank, 50)).astype(work)

    forget, retain = factors(rank), factors(rank + 2)
    one, other = (left.astype(np.float64) @ right.astype(np.float64) for left, right in (forget, retain))
    norms = {"forget": float(np.sum(one**2)), "retain": float(np.sum(other**2))}
    wanted = Change(cross=float(np.sum(one * other)), vectors=norms)
    for change in (measure_factors(terms(forget, retain)), measure_deltas(terms(one.astype(work), other.astype(work)))):
        assert sums(change) == pytest.approx(sums(wanted), rel=1e-4)
        cosine = np.sum(one * other) / np.linalg.norm(one) / np.linalg.norm(other)
        assert change.vector_cosine == pytest.approx(cosine, abs=1e-5, rel=1e-5)
    for change in (measure_factors(terms(forget)), measure_deltas(terms(one.astype(work)))):
        assert ([*change.vectors], change.cross, change.vector_cosine) == (["forget"], 0, None)
    same = measure_factors(terms(forget, forget))
    assert same.vector_cosine == pytest.approx(1)
    assert measure_factors(terms(forget, (-forget[0], forget[1]))).vector_cosine == pytest.approx(-1)


@pytest.mark.parametrize(("loss", "warned"), [(0.05, False), (0.0999, False), (0.11, True), (0.9, True)])
def test_a_warning_says_how_much_was_lost_and_what_keeps_it(loss: float, warned: bool) -> None:
    notes = warnings(Change(wanted=1.0, lost=loss**2), "bfloat16", False)
    assert len(notes) == warned
    for note in notes:
        assert f"rounding to bfloat16 lost {loss:.0%} of the update" in note
        assert all(way in note for way in ("--dtype float32", "--as adapter", "--rounding stochastic"))


# What follows is the same, seen from a whole merge.


def write_inputs(folder: Path, target: Arrays, scale: float = 1.0) -> tuple[dict[str, Any], Adapter, Adapter]:
    """A target with one matrix that two adapters change; arguments for `merge` and the adapters."""
    random = np.random.default_rng(1)

    def adapter(rank: int) -> Adapter:
        return Adapter({"layers.0": tuple(random.normal(0, scale, s) for s in ((rank, COLUMNS), (ROWS, rank)))})  # type: ignore[dict-item]

    forget, retain = adapter(2), adapter(3)
    options = {
        "target": str(write_checkpoint(folder / "target", target)),
        "forget": str(forget.write(folder / "forget")),
        "alpha": 0.5,
        "retain": str(retain.write(folder / "retain")),
        "beta": 0.25,
    }
    return options, forget, retain


def weights(dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)).astype(KINDS[dtype])


@pytest.mark.parametrize("exact", [False, True])
def test_the_manifest_reports_every_tensor_and_the_total(tmp_path: Path, exact: bool) -> None:
    options, forget, retain = write_inputs(tmp_path, {NAME: weights("bfloat16"), "norm": weights("float32")}, 0.03)
    merged = merge(**options, out=tmp_path / "out", exact=exact)
    report = (load_manifest(tmp_path / "out") or {})["fidelity"]
    assert list(report["tensors"]) == [NAME]
    assert report["total"] == pytest.approx(report["tensors"][NAME])
    one, other = (adapter.delta("layers.0") for adapter in (forget, retain))
    update = -0.5 * one + 0.25 * other
    new = read_checkpoint(tmp_path / "out")[NAME]
    wanted = expected(weights("bfloat16"), update, new)
    wanted.vectors = {"forget": float(np.sum(one * one)), "retain": float(np.sum(other * other))}
    wanted.cross = float(np.sum(one * other))
    assert report["total"] == pytest.approx(json_form(wanted), rel=1e-4)
    assert (merged.weights_touched, merged.weights_changed) == (wanted.weights, wanted.changed)
    assert merged.rounding_loss == report["total"]["rounding_loss"]
    assert merged.vector_cosine == report["total"]["vector_cosine"]


def test_a_small_update_is_warned_about_and_says_the_same_when_it_is_there_already(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options, _, _ = write_inputs(tmp_path, {NAME: weights("bfloat16")}, 0.003)
    merged = merge(**options, out=tmp_path / "out")
    assert merged.rounding_loss > 0.1
    assert merged.notes[0] in caplog.text
    assert merge(**options, out=tmp_path / "out") == merged
    fine = merge(**options, out=tmp_path / "fine", dtype="float32")
    assert fine.notes == ()
    assert fine.rounding_loss < 1e-2


@pytest.mark.parametrize("exact", [False, True])
def test_nan_and_infinities_of_the_target_stay_where_they_are(tmp_path: Path, exact: bool) -> None:
    values = weights("bfloat16")
    values[3, :3] = [np.nan, np.inf, -np.inf]
    options, _, _ = write_inputs(tmp_path, {NAME: values}, 0.3)
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("error")  # nor is anything said about them
        merged = merge(**options, out=tmp_path / "out", exact=exact)
    new = read_checkpoint(tmp_path / "out")[NAME].astype(np.float64)
    assert np.array_equal(np.argwhere(~np.isfinite(new)), [[3, 0], [3, 1], [3, 2]])
    assert np.array_equal(new[3, :3], [np.nan, np.inf, -np.inf], equal_nan=True)
    assert merged.weights_touched == ROWS * COLUMNS
    assert 0 < merged.weights_changed <= ROWS * COLUMNS - 3
    assert 0 < merged.rounding_loss < 0.1


@pytest.mark.parametrize("exact", [False, True])
def test_an_update_that_does_not_fit_fp16_names_its_tensor(tmp_path: Path, exact: bool) -> None:
    options, _, _ = write_inputs(tmp_path, {NAME: weights("float16")}, 500.0)
    with pytest.raises(MismatchError, match=f"{NAME}: merged values do not fit float16"):
        merge(**options, out=tmp_path / "out", exact=exact)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("out")]


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_a_vector_with_nan_is_told_as_such_and_not_as_an_overflow(tmp_path: Path, special: float) -> None:
    tuned = weights("float32", 1)
    tuned[2, 2] = special
    options = {
        "target": str(write_checkpoint(tmp_path / "target", {NAME: weights("bfloat16")})),
        "forget": str(write_checkpoint(tmp_path / "tuned", {NAME: tuned})),
        "prior": str(write_checkpoint(tmp_path / "prior", {NAME: weights("float16", 2)})),
    }
    with pytest.raises(FormatError, match=f"{NAME}: .*not finite; is there NaN in a checkpoint"):
        merge(**options, out=tmp_path / "out")
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("out")]


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_cast_that_overflows_names_its_tensor_touched_or_not(tmp_path: Path, alpha: float) -> None:
    large = np.full((4, 4), 7e4, np.float32)
    options, _, _ = write_inputs(tmp_path, {NAME: weights("float32"), "norm": large}, 0.1)
    options |= {"alpha": alpha, "beta": alpha}
    with pytest.raises(MismatchError, match="norm: its values do not fit float16"):
        merge(**options, out=tmp_path / "out", dtype="float16")
    assert merge(**options, out=tmp_path / "out", dtype="bfloat16").tensors_touched == (alpha > 0)


# Any merge against fp64 arithmetic: all shapes, dtypes, shards, vectors, strengths, blocks and threads.


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
