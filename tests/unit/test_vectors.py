"""The deltas that the parts of an adapter or checkpoint become, and what a vector checks when it is opened."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from msa_lite.errors import FormatError, MismatchError, UsageError
from msa_lite.io.weights.adapter import is_adapter
from msa_lite.io.weights.blocks import Files, Scratch
from msa_lite.io.weights.checkpoint import Checkpoint, TensorEntry, load_checkpoint, read_shard
from msa_lite.io.weights.factors import LowRank
from msa_lite.io.weights.hub import fetch
from msa_lite.merger.checks.checked import CheckedMerge, Precision, check_merge
from msa_lite.merger.checks.interference import measure_interference, tell_interference
from msa_lite.merger.formula import Term, number_terms
from msa_lite.merger.vectors.deltas import Difference, Dora, Product, Shift, TokenRows
from msa_lite.merger.vectors.vector import compare_checkpoints, load_vector, ties_head
from tests.support.merges import KINDS, Adapter, Arrays, make_adapter, write_checkpoint

Store = Callable[..., dict[str, TensorEntry]]
RNG = np.random.default_rng(0)


def random(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """store(name=array, …) → entries of these arrays in a file."""

    def make(**arrays: np.ndarray) -> dict[str, TensorEntry]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        save_file(arrays, path)
        return {entry.name: entry for entry in read_shard(path).tensors}

    return make


def make_checkpoint(folder: Path, tensors: Arrays, **config: Any) -> Checkpoint:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return load_checkpoint(folder)


def test_deltas_that_are_not_finite_are_named(store: Store) -> None:
    zeros = np.zeros((2, 4), np.float32)
    of_dora = store(a=random(1, 4), b=zeros[:, :1], m=random(2), w=zeros)  # a row of zeros has no direction
    low = LowRank("x", of_dora["a"], of_dora["b"], 1.0, False, magnitude=of_dora["m"])
    entries = store(new=np.full((1, 4), np.inf, np.float32), old=zeros, bias=np.array([1, np.nan], np.float32))
    deltas = {
        "m": Dora(low, of_dora["m"], of_dora["w"]),
        "bias": Shift(entries["bias"], 1.0),
        "new": TokenRows(entries["new"], (1,), entries["old"]),
    }
    for name, delta in deltas.items():
        with pytest.raises(FormatError, match=f"'{name}' gives a delta that is not finite"):
            delta.rows(Files(), 0, 2, np.float32, Scratch())


FACTORS = {"q.lora_A.weight": random(2, 6), "q.lora_B.weight": random(6, 2)}
EMBEDDING = {"embed.lora_embedding_A": random(2, 9), "embed.lora_embedding_B": random(6, 2)}
WEIGHTS = {"q.weight": random(6, 6), "q.bias": random(6), "embed.weight": random(9, 6), "norm.weight": random(6)}
HEAD = {"lm_head.weight": random(9, 6)}


@pytest.fixture
def target(tmp_path: Path) -> Checkpoint:
    return make_checkpoint(tmp_path / "target", WEIGHTS | HEAD, vocab_size=9)


@pytest.fixture
def prior(tmp_path: Path) -> Checkpoint:
    tensors = {name: tensor + np.float32(0.5) for name, tensor in (WEIGHTS | HEAD).items()}
    return make_checkpoint(tmp_path / "prior", tensors, vocab_size=9)


def test_every_part_of_an_adapter_becomes_a_delta(tmp_path: Path, target: Checkpoint, prior: Checkpoint) -> None:
    parts = {
        **FACTORS,
        "q.lora_B.bias": random(6),
        "norm.weight": random(6),
        "embed.token_adapter.trainable_tokens_delta": random(2, 6),
    }
    config = {"trainable_token_indices": [4, 1], "lora_bias": True}
    vector = load_vector(make_adapter(tmp_path / "a", parts, **config), target, prior)
    kinds = {name: type(delta) for name, delta in vector.deltas.items()}
    wanted = {"q.weight": Product, "q.bias": Shift, "norm.weight": Difference, "embed.weight": TokenRows}
    assert kinds == wanted
    assert (vector.is_adapter, vector.needs_prior) == (True, True)


def test_products_alone_need_no_prior(tmp_path: Path, target: Checkpoint, prior: Checkpoint) -> None:
    folder = make_adapter(tmp_path / "a", FACTORS)
    for given in (None, prior):
        vector = load_vector(folder, target, given)
        assert (list(vector.deltas), vector.needs_prior) == (["q.weight"], False)
    assert (is_adapter(folder), is_adapter(target.folder)) == (True, False)


def test_a_tensor_that_is_changed_in_two_ways_is_refused(tmp_path: Path, target: Checkpoint, prior: Checkpoint) -> None:
    twice = FACTORS | {"q.weight": random(6, 6), "q.lora_B.bias": random(6), "q.bias": random(6)}
    folder = make_adapter(tmp_path / "a", twice, lora_bias=True, bias="all")
    with pytest.raises(MismatchError, match=r"q\.weight: changed in two ways at once") as caught:
        load_vector(folder, target, prior)
    assert "q.bias: changed in two ways at once" in str(caught.value)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"norm.weight": random(7)}, r"norm\.weight: a full new value, the target's is \(6,\), it is F32 \(7,\) there"),
        ({"norm.weight": np.ones(6, np.int8)}, r"norm\.weight: a full new value, .*, it is I8 \(6,\) there"),
        ({}, r"norm\.weight: a full new value, the target's is \(6,\), the prior has no such tensor"),
    ],
)
def test_a_prior_that_does_not_fit_what_needs_it_is_refused(
    tmp_path: Path, target: Checkpoint, other: Arrays, says: str
) -> None:
    prior = make_checkpoint(tmp_path / "other", {"q.weight": WEIGHTS["q.weight"], **other})
    folder = make_adapter(tmp_path / "a", FACTORS | {"norm.weight": random(6)})
    with pytest.raises(MismatchError, match=says):
        load_vector(folder, target, prior)
    with pytest.raises(UsageError, match=r"--prior.*\n  norm\.weight: a full new value"):
        load_vector(folder, target, None)


@pytest.mark.parametrize(
    ("copy", "is_known"),
    [
        (WEIGHTS["embed.weight"], "target"),
        (WEIGHTS["embed.weight"] + np.float32(0.5), "prior"),
        (WEIGHTS["embed.weight"].astype(ml_dtypes.bfloat16), "target"),
        (WEIGHTS["embed.weight"].astype(np.float64), "target"),
        (WEIGHTS["embed.weight"] + np.float32(0.1), False),
        (WEIGHTS["embed.weight"] * np.where(np.arange(54) == 53, np.nan, 1).reshape(9, 6).astype(np.float32), False),
    ],
)
def test_copies_are_the_priors_or_the_targets_values_as_their_dtype_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Checkpoint, prior: Checkpoint, copy: Any, is_known: Any
) -> None:
    monkeypatch.setattr("msa_lite.io.weights.blocks._COMPARED", 12)  # two rows at a time
    folder = make_adapter(tmp_path / "a", EMBEDDING | {"embed.base_layer.weight": copy})
    if is_known:
        vector = load_vector(folder, target, prior)
        assert (list(vector.deltas), vector.needs_prior) == (["embed.weight"], is_known == "prior")
    else:
        with pytest.raises(MismatchError, match=r"embed\.base_layer\.weight: a full copy of neither the target's"):
            load_vector(folder, target, prior)
        with pytest.raises(MismatchError, match=r"give --prior"):
            load_vector(folder, target, None)


def test_copies_are_not_compared_where_only_headers_are_there(tmp_path: Path, target: Checkpoint) -> None:
    folder = make_adapter(tmp_path / "a", EMBEDDING | {"embed.base_layer.weight": np.zeros((9, 6), np.float32)})
    heads = Checkpoint(target.folder, target.config, (), target.tensors)
    assert list(load_vector(folder, heads, None).deltas) == ["embed.weight"]
    with pytest.raises(MismatchError, match="if it is the prior's, give --prior"):
        load_vector(folder, target, None)


@pytest.mark.parametrize(
    ("config", "head", "tied"),
    [
        ({"tie_word_embeddings": True, "vocab_size": 9}, {}, True),
        ({"tie_word_embeddings": True, "vocab_size": 9}, HEAD, False),
        ({"tie_word_embeddings": False, "vocab_size": 9}, {}, False),
        ({"vocab_size": 9}, {}, True),
        ({"text_config": {"vocab_size": 9}}, {}, True),
        ({"vocab_size": 9}, HEAD, False),
        ({"vocab_size": 9}, {"language_model.lm_head.weight": HEAD["lm_head.weight"]}, False),
    ],
)
def test_a_tied_matrix_is_left_alone(tmp_path: Path, config: dict[str, Any], head: Arrays, tied: bool) -> None:
    target = make_checkpoint(tmp_path / "target", WEIGHTS | head, **config)
    assert ties_head(target) is tied
    folder = make_adapter(tmp_path / "a", EMBEDDING | FACTORS)
    value = make_adapter(tmp_path / "b", FACTORS | {"embed.weight": random(9, 6)})
    tokens = {"embed.token_adapter.trainable_tokens_delta": random(1, 6)}
    rows = make_adapter(tmp_path / "c", FACTORS | tokens, trainable_token_indices=[8])
    if tied:
        for one in (folder, value):
            with pytest.raises(MismatchError, match=r"embed\.weight: the target ties embedding and head"):
                load_vector(one, target, target)
    else:
        for one in (folder, value):
            assert load_vector(one, target, target).deltas.keys() == {"embed.weight", "q.weight"}
    assert load_vector(rows, target, target).deltas.keys() == {"embed.weight", "q.weight"}


def test_a_head_that_is_never_read_may_be_missing(tmp_path: Path) -> None:
    said = make_checkpoint(tmp_path / "said", WEIGHTS, tie_word_embeddings=True)
    silent = make_checkpoint(tmp_path / "silent", WEIGHTS)
    untied = make_checkpoint(tmp_path / "untied", WEIGHTS | HEAD)
    names = ("one", "other")
    assert compare_checkpoints(said, untied, names) == compare_checkpoints(silent, untied, names) == []
    assert compare_checkpoints(untied, silent, names) == ["lm_head.weight: in the one, not in the other"]


@pytest.mark.parametrize("half", ["A", "B"])
def test_a_vector_of_zeros_is_refused_before_the_merge(tmp_path: Path, target: Checkpoint, half: str) -> None:
    zero = {n: t * np.float32(0) if f"lora_{half}" in n else t for n, t in FACTORS.items()}
    with pytest.raises(MismatchError, match="the vector is all zeros and changes nothing"):
        load_vector(make_adapter(tmp_path / "a", zero), target, None).check_factors()
    other = EMBEDDING | {"embed.lora_embedding_B": random(6, 2)}
    load_vector(make_adapter(tmp_path / "b", zero | other), target, None).check_factors()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_factors_that_are_not_finite_are_named_before_the_merge(
    tmp_path: Path, target: Checkpoint, prior: Checkpoint, value: float
) -> None:
    broken = {n: t.copy() for n, t in FACTORS.items()}
    broken["q.lora_B.weight"][5, 1] = value
    vector = load_vector(make_adapter(tmp_path / "a", broken | {"norm.weight": random(6)}), target, prior)
    with pytest.raises(FormatError, match=r"q\.lora_B\.weight' holds NaN or infinite"):
        vector.check_factors()


# How vectors of several requests interfere: against fp64 numpy and cases worked by hand, and what is told of it.


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
        assert f"are much alike, or opposed (cosine {'-' * (sign < 0)}0." in text
        assert f"vector-{len(vectors) - 1}" in text


def test_one_request_is_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of(tmp_path, random_factors(1, 3), random_factors(2, 3), sides="fr")
    assert told(plan, caplog) == ([], [], [])
