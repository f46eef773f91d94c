"""Several requests as one merge: the same bytes in any order and after any is dropped; mistakes are refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.errors import UsageError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import MANIFEST, MERGEKIT_FILE, load_manifest, verify_folder, write_manifest
from msa_lite.io.weights.hub import fetch
from msa_lite.merger import hash_vector, merge, merge_adapters, mergekit_recipe, open_merge
from msa_lite.merger.checks.checked import Precision, msa_terms
from msa_lite.merger.formula import Term, named_strengths, number_terms
from msa_lite.merger.mergekit.reader import read_recipe
from msa_lite.pipeline.prepare.earlier import is_merged_at
from tests.support.merges import KINDS, Adapter, Arrays, edit_adapter, gap, read_checkpoint, write_checkpoint

SHAPES = {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in (0, 1)
    for name, shape in (("q", (24, 16)), ("o", (16, 24)))
}


@dataclass(frozen=True)
class Vector:
    """A vector on the disk, and its deltas in fp64."""

    folder: Path
    deltas: Arrays


@dataclass(frozen=True)
class Request:
    """A forget vector and perhaps a retain vector, with their strengths."""

    forget: Vector
    alpha: float
    retain: Vector | None = None
    beta: float = 0.0

    def moved_to(self, folder: Path) -> Request:
        """The same request with copies of its vectors under other names."""
        copies = [
            v and Vector(shutil.copytree(v.folder, folder / v.folder.name), v.deltas)
            for v in (self.forget, self.retain)
        ]
        assert copies[0] is not None
        return Request(copies[0], self.alpha, copies[1], self.beta)


def arguments(requests: Sequence[Request]) -> dict[str, Any]:
    """The arguments of `merge` for a ledger, in its order."""
    back = [request for request in requests if request.retain]
    return {
        "forget": [str(request.forget.folder) for request in requests],
        "alpha": [request.alpha for request in requests],
        "retain": [str(request.retain.folder) for request in back if request.retain],
        "beta": [request.beta for request in back],
    }


def write_lora(folder: Path, random: np.random.Generator) -> Vector:
    """An adapter of random rank on some of the tensors."""
    names, rank = random.choice(sorted(SHAPES), size=random.integers(1, 5), replace=False), int(random.integers(1, 6))
    factors = {}
    for name in names:
        rows, columns = SHAPES[name]
        halves = (random.normal(0, 0.1, shape).astype(np.float32) for shape in ((rank, columns), (rows, rank)))
        factors[name.removesuffix(".weight")] = tuple(halves)
    adapter = Adapter(factors, lora_alpha=float(random.choice([1, 8, 16])))  # type: ignore[arg-type]
    return Vector(adapter.write(folder), {name: adapter.delta(name.removesuffix(".weight")) for name in names})


def write_full(folder: Path, random: np.random.Generator, prior: Arrays) -> Vector:
    """A checkpoint near the prior."""
    tuned = {name: (array + random.normal(0, 0.02, array.shape)).astype(np.float32) for name, array in prior.items()}
    deltas = {name: tuned[name].astype(np.float64) - prior[name] for name in prior}
    return Vector(write_checkpoint(folder, tuned), deltas)


def make_ledger(folder: Path, random: np.random.Generator, prior: Arrays) -> list[Request]:
    """Up to five requests: LoRA, sometimes one full vector; some with a retain vector, which two may share."""
    requests: list[Request] = []
    full = int(random.integers(0, 8))
    for number in range(int(random.integers(1, 6))):
        place = folder / f"f{number}"
        forget = write_full(place, random, prior) if number == full else write_lora(place, random)
        retain = write_lora(folder / f"r{number}", random) if random.random() < 0.5 else None
        shared = [request.retain for request in requests if request.retain]
        if retain and shared and random.random() < 0.4:
            shutil.rmtree(retain.folder)
            retain = Vector(shutil.copytree(shared[0].folder, retain.folder), shared[0].deltas)
        alpha, beta = (float(random.choice(values)) for values in ([0.25, 0.7, 1.0, 1.3], [0.1, 0.2, 0.45]))
        requests.append(Request(forget, alpha, retain, beta))
    return requests


def model_files(folder: Path, names_folders: bool = False) -> dict[str, str]:
    """The hashes of a model's files, without those that name the folders of its vectors."""
    skip = {MANIFEST} if names_folders else {MANIFEST, MERGEKIT_FILE}
    return {path.name: hash_file(path) for path in folder.iterdir() if path.name not in skip}


def in_memory(target: Path, prior: Path, requests: Sequence[Request], kept: set[int]) -> Arrays:
    """The weights that a merge in memory puts into a loaded target, for some of the requests."""
    vectors, weights = {}, {}
    for number, request in enumerate(requests, 1):
        vectors[f"forget {number}"], weights[f"forget {number}"] = request.forget, -request.alpha * (number in kept)
        if request.retain:
            vectors[f"retain {number}"], weights[f"retain {number}"] = request.retain, request.beta * (number in kept)
    opened = open_merge(
        fetch(str(target)), {name: fetch(str(v.folder)) for name, v in vectors.items()}, fetch(str(prior)), Precision()
    )
    arrays = read_checkpoint(target)

    def put(name: str, rows: slice, values: np.ndarray) -> None:
        arrays[name][rows] = values

    opened.fill(weights, put)
    return arrays


def wanted_arrays(target: Path, requests: Sequence[Request]) -> tuple[Arrays, Arrays]:
    """The merge in fp64, and the magnitudes that its rounding errors go by."""
    wanted = {name: array.astype(np.float64) for name, array in read_checkpoint(target).items()}
    size = {name: np.abs(array) for name, array in wanted.items()}
    for request in requests:
        for vector, weight in ((request.forget, -request.alpha), (request.retain, request.beta)):
            for name, delta in (vector.deltas if vector else {}).items():
                wanted[name] += weight * delta
                size[name] += abs(weight) * np.abs(delta)
    return wanted, size


@pytest.mark.parametrize("seed", range(20))
def test_a_ledger_dropped_and_reordered_is_the_merge_of_the_rest_from_nothing(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    stored = KINDS["bfloat16" if seed % 2 else "float32"]
    target = write_checkpoint(tmp_path / "target", {n: random.normal(size=s).astype(stored) for n, s in SHAPES.items()})
    prior_arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    prior = write_checkpoint(tmp_path / "prior", prior_arrays)
    requests = make_ledger(tmp_path / "vectors", random, prior_arrays)
    options: dict[str, Any] = {"prior": str(prior), "dtype": "same"} | (
        {"rounding": "stochastic"} if seed % 5 == 4 else {}
    )

    out = merge(str(target), tmp_path / "out", **arguments(requests), **options).folder
    assert verify_folder(out) == []
    everything = model_files(out, names_folders=True)
    shuffled = [requests[number] for number in random.permutation(len(requests))]
    again = merge(str(target), tmp_path / "again", **arguments(shuffled), **options).folder
    assert model_files(again, names_folders=True) == everything
    assert load_manifest(again) == load_manifest(out)

    # Some are dropped, in the folder of the whole ledger; from nothing, the rest comes from copies in another order.
    rest = [r for r in shuffled if random.random() < 0.6] or shuffled[:1]
    merge(str(target), out, **arguments(rest), **options, replace=True)
    copies = [rest[number].moved_to(tmp_path / f"copy-{number}") for number in random.permutation(len(rest))]
    fresh = merge(str(target), tmp_path / "fresh", **arguments(copies), **options).folder
    assert model_files(out) == model_files(fresh)
    assert (model_files(out) == model_files(again)) == (len(rest) == len(requests))

    merged, (wanted, size) = read_checkpoint(fresh), wanted_arrays(target, rest)
    steps = 1.0 if "rounding" in options else 0.5  # of the stored dtype: stochastic rounding takes either neighbour
    for name, value in merged.items():
        work = 64 * 2.0**-24 * size[name]
        assert np.all(
            np.abs(value.astype(np.float64) - wanted[name]) <= steps * gap(np.abs(wanted[name]) + work, stored) + work
        )
    if "rounding" not in options:
        kept = {number for number, request in enumerate(requests, 1) if request in rest}
        loaded = in_memory(target, prior, requests, kept)
        assert [name for name in merged if merged[name].tobytes() != loaded[name].tobytes()] == []


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Request]]:
    """A target in bfloat16 and three requests with LoRA, two of them with retain vectors."""
    folder, random = tmp_path_factory.mktemp("ledger"), np.random.default_rng(7)
    arrays = {name: random.normal(size=shape).astype(KINDS["bfloat16"]) for name, shape in SHAPES.items()}
    vectors = [write_lora(folder / name, random) for name in ("a", "b", "c", "ra", "rb")]
    alphas = (1.0, 0.8, 0.3)
    requests = [Request(vectors[n], alphas[n], *((vectors[3 + n], 0.5) if n < 2 else ())) for n in range(3)]
    return str(write_checkpoint(folder / "target", arrays)), requests


def test_the_manifest_names_each_vector_with_its_strength(ledger: Any, tmp_path: Path) -> None:
    target, requests = ledger
    merge(target, tmp_path / "out", **arguments(requests))
    manifest = load_manifest(tmp_path / "out") or {}
    inputs, sources = manifest["inputs"], manifest["sources"]
    by_folder = {Path(sources[name]).name: strength for name, strength in inputs["strengths"].items()}
    assert by_folder == {"a": 1.0, "b": 0.8, "c": 0.3, "ra": 0.5, "rb": 0.5}
    assert set(inputs["strengths"]) == {"forget 1", "forget 2", "forget 3", "retain 1", "retain 2"} < set(inputs)
    assert not {"alpha", "beta"} & set(inputs)
    signs = {"forget": -1, "retain": 1}
    assert [(term["name"], term["weight"]) for term in manifest["terms"]] == [
        (name, signs[name.split()[0]] * strength) for name, strength in inputs["strengths"].items()
    ]
    pairs = {(pair["one"], pair["other"]) for pair in manifest["interference"]}
    assert len(pairs) == 10
    assert set(manifest["fidelity"]["total"]) >= {"rounding_loss", "vector_cosine"}


def test_a_run_among_others_knows_whether_its_vector_is_in_the_model_at_its_strength(
    ledger: Any, tmp_path: Path
) -> None:
    first, second = (request.forget.folder for request in ledger[1][:2])
    known = [{"revision": fetch(str(folder)).revision} for folder in (first, second)]
    numbered = {"strengths": {"forget 1": 1.0, "forget 2": 0.8, "retain 1": 1.5}}
    several = {**numbered, "forget 1": known[1], "forget 2": known[0], "retain 1": {"revision": "of both requests"}}
    alone = {"alpha": 0.8, "beta": 0.5, "forget": known[0], "retain": {"revision": "its own"}}
    assert is_merged_at(several, {"forget": -0.8, "retain": 0.5}, first)
    assert is_merged_at(several, {"forget": -1.0}, second)
    assert is_merged_at(alone, {"forget": -0.8, "retain": 0.5}, first)
    for inputs, weights, folder in (
        (several, {"forget": -1.0}, first),
        (several, {"forget": -0.8}, tmp_path),  # another vector
        (alone, {"forget": -0.8, "retain": 0.4}, first),
        (alone, {"forget": -0.8, "retain": 0.5}, second),
        (alone, {"forget": -0.8, "retain": 0.5}, tmp_path / "gone"),
    ):
        assert not is_merged_at(inputs, weights, folder)


def test_one_request_has_the_inputs_of_always_and_is_still_finished(ledger: Any, tmp_path: Path) -> None:
    target, requests = ledger
    one = {name: values[0] for name, values in arguments(requests[:1]).items()}
    merge(target, tmp_path / "out", **one)
    manifest = load_manifest(tmp_path / "out") or {}
    assert list(manifest["inputs"]) == ["target", "forget", "retain", "alpha", "beta", "dtype"]
    assert manifest["terms"] == [{"name": "forget", "weight": -1.0}, {"name": "retain", "weight": 0.5}]
    assert "interference" not in manifest
    written = (tmp_path / "out" / MANIFEST).stat().st_mtime_ns
    lists = {name: [value] for name, value in one.items()}
    assert merge(target, tmp_path / "out", **lists) == merge(target, tmp_path / "out", **one)
    assert (tmp_path / "out" / MANIFEST).stat().st_mtime_ns == written


def test_a_request_of_strength_zero_is_as_if_it_were_not_there(ledger: Any, tmp_path: Path) -> None:
    target, requests = ledger
    a, b = (str(request.forget.folder) for request in requests[:2])
    merge(target, tmp_path / "with", forget=["not/there", a, b], alpha=[0, 1, 0.5], retain=["nor/this"], beta=[0.0])
    merge(target, tmp_path / "one", forget=["not/there", a], alpha=[0, 1])
    merge(target, tmp_path / "without", forget=[b, a], alpha=[0.5, 1])
    merge(target, tmp_path / "single", forget=a, alpha=1)
    assert load_manifest(tmp_path / "with") == load_manifest(tmp_path / "without")
    assert load_manifest(tmp_path / "one") == load_manifest(tmp_path / "single")


def test_an_adapter_does_not_depend_on_the_order_either(ledger: Any, tmp_path: Path) -> None:
    target, requests = ledger
    merge_adapters(target, tmp_path / "one", **arguments(requests))
    merge_adapters(target, tmp_path / "other", **arguments(requests[::-1]))
    assert model_files(tmp_path / "one") == model_files(tmp_path / "other")
    # Put on the target, it is the merge.
    merge(target, tmp_path / "merged", **arguments(requests), dtype="float32")
    merge(target, tmp_path / "applied", retain=str(tmp_path / "one"), beta=1.0, alpha=0, dtype="float32")
    merged, applied = read_checkpoint(tmp_path / "merged"), read_checkpoint(tmp_path / "applied")
    for name, value in merged.items():
        np.testing.assert_allclose(applied[name], value, rtol=1e-5, atol=1e-5)


def test_the_same_forget_vector_twice_is_refused_with_both_names(ledger: Any, tmp_path: Path) -> None:
    target, requests = ledger
    folder = requests[0].forget.folder
    moved = edit_adapter(folder, tmp_path / "moved", base_model_name_or_path="elsewhere", target_modules=["q", "o"])
    assert hash_vector(moved) == hash_vector(folder)  # what does not decide the delta may differ
    for twin in (folder, shutil.copytree(folder, tmp_path / "copy"), moved):
        with pytest.raises(UsageError, match=rf"same forget vector is given twice: .*{twin.name}.*larger alpha"):
            merge(target, tmp_path / "out", forget=[str(folder), str(twin)])
    assert not (tmp_path / "out").exists()
    other = edit_adapter(folder, tmp_path / "other", lora_alpha=3)
    assert hash_vector(other) != hash_vector(folder)
    merge(target, tmp_path / "out", forget=[str(folder), str(other)])


def test_a_shared_retain_vector_counts_with_the_sum_of_its_betas(ledger: Any, tmp_path: Path) -> None:
    target, requests = ledger
    forget, retain = str(requests[0].forget.folder), str(requests[0].retain.folder)
    merge(target, tmp_path / "twice", forget=forget, retain=[retain, retain, retain], beta=[0.1, 0.2, 0.4])
    merge(target, tmp_path / "once", forget=forget, retain=retain, beta=0.7)
    twice, once = (load_manifest(tmp_path / name) or {} for name in ("twice", "once"))
    shares = twice.pop("shared")
    assert shares == {"retain": [{"source": retain, "weight": weight} for weight in (0.1, 0.2, 0.4)]}
    assert {**twice, "manifest_sha256": None} == {**once, "manifest_sha256": None}


def test_a_vector_is_known_by_its_bytes_and_not_by_what_a_manifest_says_of_them(ledger: Any, tmp_path: Path) -> None:
    _, requests = ledger
    folder = shutil.copytree(requests[0].forget.folder, tmp_path / "vector")
    weights, plain = folder / "adapter_model.safetensors", hash_vector(folder)
    item = {"sha256": "0" * 64, "bytes": weights.stat().st_size}
    write_manifest(folder, {"made_by": "msa-lite", "kind": "vector", "inputs": {}, "files": {weights.name: item}})
    os.utime(weights, (0, 0))
    assert hash_vector(folder) == plain


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"forget": ["a", "b"], "alpha": [1.0]}, r"forget vectors: 2, alpha: 1; .*or none: then each is 1\.0"),
        ({"forget": "a", "alpha": [1.0, 2.0]}, "forget vectors: 1, alpha: 2"),
        ({"forget": "a", "alpha": []}, "there is a forget vector, but no alpha"),
        ({"forget": "a", "alpha": 1.0, "retain": ["r", "s"]}, "retain vectors: 2, beta: 0"),
        ({"forget": ["a", "b"], "alpha": [1.0, -1.0]}, "alpha is -1.0; it must be a number ≥ 0"),
        ({"alpha": 0.0, "beta": [0.0, 0.5]}, "beta is 0.5, but there is no retain vector"),
    ],
)
def test_strengths_that_do_not_belong_to_a_vector_are_refused(values: dict[str, Any], says: str) -> None:
    keys = {"forget": None, "alpha": None, "retain": None, "beta": None} | values
    with pytest.raises(UsageError, match=says):
        msa_terms(**keys)


def test_several_forget_vectors_without_an_alpha_have_one_each() -> None:
    terms: list[Term[str]] = msa_terms(["a", "b"], 1.0, None, None)
    assert [(term.name, term.vector, term.weight) for term in terms] == [
        ("forget 1", "a", -1.0),
        ("forget 2", "b", -1.0),
    ]
    assert named_strengths(terms) == {"strengths": {"forget 1": 1.0, "forget 2": 1.0}}
    assert named_strengths(number_terms(terms[:1])) == {"alpha": 1.0, "beta": 0.0}
    assert named_strengths([Term("npo", "a", 0.5)]) == {"scale": 0.5}


def test_mergekit_gets_all_vectors_and_they_are_read_back(ledger: Any, tmp_path: Path) -> None:
    target, requests = ledger
    path = tmp_path / "recipe.yml"
    path.write_text(mergekit_recipe(target, **arguments(requests)), encoding="utf-8")
    request = read_recipe(path)
    weights = {Path(term.vector.path).name: term.weight for term in request.terms}
    assert weights == {"a": -1.0, "b": -0.8, "c": -0.3, "ra": 0.5, "rb": 0.5}
    assert sorted(term.side for term in request.terms) == ["forget"] * 3 + ["retain"] * 2
    beside = merge(target, tmp_path / "out", **arguments(requests)).folder / MERGEKIT_FILE
    assert {term.vector: term.weight for term in read_recipe(beside).terms} == {
        t.vector: t.weight for t in request.terms
    }
