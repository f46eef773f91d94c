"""The filter of a forget vector: its formula against float64 oracles, and filtered adapters and checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from msa_lite.data import Example, hash_ids
from msa_lite.errors import FormatError, MismatchError, OutputError, UsageError
from msa_lite.evals.engine.models import load_model
from msa_lite.io.console.progress import silent
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.io.finished.seal import describe_file, load_manifest, write_manifest
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import fetch
from msa_lite.merger.filtering import filter_vector, filter_vectors
from msa_lite.merger.formula import FORGET_RIDGE, RETAIN_RIDGE, Filter
from msa_lite.merger.moments import Moments, load_moments
from msa_lite.merger.unseen import Unseen, unseen_sentence
from msa_lite.train.moments import write_moments
from tests.support.fits import Killed
from tests.support.models import save_adapter
from tests.tools import moments_attack as attack

INPUTS = 24


def second_moment(root: np.ndarray, ridge: float) -> np.ndarray:
    """C of the formula, by its definition."""
    moment = root.T @ root
    return moment / np.trace(moment) + ridge / len(moment) * np.eye(len(moment))


def wanted(delta: np.ndarray, forget: np.ndarray, retain: np.ndarray, strength: float) -> np.ndarray:
    """D C_f (C_f + λ C_r)⁻¹, by its definition."""
    keep, drop = second_moment(forget, FORGET_RIDGE), second_moment(retain, RETAIN_RIDGE)
    product: np.ndarray = delta @ keep @ np.linalg.inv(keep + strength * drop)
    return product


def filtered(delta: np.ndarray, forget: np.ndarray, retain: np.ndarray, strength: float) -> np.ndarray:
    return next(Filter(forget, retain).apply(delta, [strength]))


def wanted_scale(layers: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], strength: float) -> float:
    """s by its definition, of (D, forget, retain) of each layer."""
    before = after = 0.0
    for delta, forget, retain in layers:
        moment, change = second_moment(forget, 0.0), wanted(delta, forget, retain, strength)
        before, after = before + np.trace(delta @ moment @ delta.T), after + np.trace(change @ moment @ change.T)
    return float(np.sqrt(before / after))


@pytest.mark.parametrize(("forget_rows", "retain_rows"), [(5, 7), (5, 40), (60, 7), (60, 70)])
@pytest.mark.parametrize("strength", [0.1, 1.0, 50.0])
def test_the_filter_is_its_definition_however_many_rows_there_are(
    forget_rows: int, retain_rows: int, strength: float
) -> None:
    draw = np.random.default_rng(0)
    delta, forget = draw.normal(size=(9, INPUTS)), draw.normal(size=(forget_rows, INPUTS))
    retain = draw.normal(size=(retain_rows, INPUTS)) * np.geomspace(1, 1e-3, INPUTS)
    oracle = wanted(delta, forget, retain, strength)
    np.testing.assert_allclose(filtered(delta, forget, retain, strength), oracle, rtol=1e-9, atol=1e-10)
    scaled = filtered(delta, 1e4 * forget, 1e-4 * retain, strength)
    np.testing.assert_allclose(scaled, oracle, rtol=1e-9, atol=1e-10)
    energy = np.sum(Filter(forget, retain).outputs(delta) ** 2)
    np.testing.assert_allclose(energy, np.trace(delta @ second_moment(forget, 0.0) @ delta.T), rtol=1e-12)


def test_without_strength_it_is_the_identity_and_a_layer_that_gets_nothing_does_no_harm() -> None:
    draw = np.random.default_rng(1)
    delta, forget, retain = (draw.normal(size=(rows, INPUTS)) for rows in (9, 6, 6))
    assert np.array_equal(filtered(delta, forget, retain, 0.0), delta)
    zeros = np.zeros((4, INPUTS))
    assert np.isfinite(filtered(delta, forget, zeros, 1.0)).all()
    assert np.isfinite(filtered(delta, zeros, retain, 1.0)).all()


def left_without(
    delta: np.ndarray, forget: np.ndarray, retain: np.ndarray, strength: float, groups: np.ndarray
) -> list[float]:
    """Σ |D′x|² over retain rows, of the filter by all of them and by all but x's group; their trace stays."""
    keep, size = second_moment(forget, FORGET_RIDGE), np.sum(retain**2)
    sums = []
    for hidden in (lambda group: groups < 0, lambda group: groups == group):
        energies = []
        for group in np.unique(groups):
            seen = retain[~hidden(group)]
            drop = seen.T @ seen / size + RETAIN_RIDGE / keep.shape[0] * np.eye(len(keep))
            change = delta @ keep @ np.linalg.inv(keep + strength * drop)
            energies.append(np.sum((retain[groups == group] @ change.T) ** 2) / size)
        sums.append(float(sum(energies)))
    return sums


@pytest.mark.parametrize(("forget_rows", "retain_rows"), [(5, 8), (60, 40)])
def test_what_a_filter_leaves_on_rows_that_it_never_saw_needs_no_other_filter(
    forget_rows: int, retain_rows: int
) -> None:
    draw = np.random.default_rng(2)
    delta, forget, retain = (draw.normal(size=(rows, INPUTS)) for rows in (9, forget_rows, retain_rows))
    groups = draw.permutation(np.repeat([3, 1, 7, 9], retain_rows // 4))
    left = Filter(forget, retain).left_out(delta, [1.0, 16.0], groups)
    for strength, (seen, unseen) in zip([1.0, 16.0], left, strict=True):
        np.testing.assert_allclose([seen, unseen], left_without(delta, forget, retain, strength, groups), rtol=1e-9)


def test_the_forecast_is_told_with_what_more_rows_would_bring() -> None:
    told = unseen_sentence({"rows": 50, "unit": "rows", "ratios": {"1": 1.8, "4": 2.6}})
    assert "these 50 rows" in told
    assert "1.8, 2.6 times" in told
    assert "200 would bring it to about 1.2, 1.4" in told
    assert "would bring" not in unseen_sentence({"rows": 200, "unit": "rows", "ratios": {"1": 1.2}})
    told = unseen_sentence({"rows": 50, "unit": "passages", "ratios": {"1": 1.8}})
    assert "these 50 passages" in told
    assert "left on passages" in told
    assert "would bring" not in told, "tokens decide"


ROWS = {
    "forget": [
        Example(0, [5, 6, 7, 8, 9, 10], [-100, -100, 7, 8, 9, 10]),
        Example(1, [5, 11, 12], [-100, -100, 12]),
        Example(2, [30, 31, 32, 33], [30, 31, 32, 33]),  # a text
    ],
    "retain": [
        *(Example(n, [20 + n, 21, 22, 23 + n, 24], [-100, 21, -100, 23 + n, 24]) for n in range(12)),
        Example(12, [5, 6], [-100, 6]),  # only the first token predicts a label
    ],
}
LINEAR = {"gpt2": ("c_attn", "c_proj", "c_fc")}  # of llama and its relatives: all that end so
ENDINGS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def layers_of(model: Any, kind: str) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if name.endswith(LINEAR.get(kind, ENDINGS))}


def plain_inputs(model: Any, kind: str, rows: list[Example]) -> dict[str, np.ndarray]:
    """The inputs of each layer at the positions before labels but the first, of one row at a time, without padding."""
    inputs: dict[str, list[Any]] = {name: [] for name in layers_of(model, kind)}
    hooks = [
        layer.register_forward_hook(lambda _m, given, _out, name=name: inputs[name].append(given[0][0]))
        for name, layer in layers_of(model, kind).items()
    ]
    for row in rows:
        with torch.no_grad():
            model(torch.tensor([row.ids]))
        places = [at - 1 for at, label in enumerate(row.labels) if at > 1 and label >= 0]
        for states in inputs.values():
            states[-1] = states[-1][places]
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(states).double().numpy() for name, states in inputs.items()}


@pytest.fixture(params=["llama", "qwen2", "olmo2", "gpt2"])
def measured(
    request: pytest.FixtureRequest,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """A target, its moments, and the inputs of its layers as plain transformers gives them."""
    from transformers import AutoModelForCausalLM

    kind, folder = request.param, make_checkpoint(request.param)
    target, model = fetch(str(folder)), AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = {"target": target.identity(), "forget": hash_ids(ROWS["forget"])}
    names, unseen = load_checkpoint(folder).tensors, Unseen([1.0, 4.0])
    monkeypatch.setattr("msa_lite.train.moments._TOKENS", 20)  # several batches
    write_moments(tmp_path / "moments", inputs, lambda: model, names, ROWS, pad=2, watch=unseen)
    plain = {side: plain_inputs(model, kind, rows) for side, rows in ROWS.items()}
    return {"kind": kind, "target": target, "model": model, "moments": tmp_path / "moments", "plain": plain}


def test_the_forecast_is_that_of_filters_which_never_saw_a_row(measured: dict[str, Any]) -> None:
    moments, plain = load_moments(measured["moments"]), measured["plain"]
    roots = dict.fromkeys(root for layer in moments.layers.values() for root in layer.roots)
    shares = []
    for root in roots:
        forget, retain = (plain[side][root.removesuffix(".weight")] for side in ROWS)
        change = np.random.default_rng(0).standard_normal((32, retain.shape[1]))
        whole, groups = (
            np.sum((retain @ change.T) ** 2) / np.sum(retain**2),
            np.repeat(np.arange(12), len(retain) // 12),
        )
        shares.append([np.array(left_without(change, forget, retain, s, groups)) / whole for s in (1.0, 4.0)])
    ratios = [1 + (unseen / seen - 1) * 11 / 12 for seen, unseen in np.mean(shares, axis=0)]
    assert moments.unseen["rows"] == 12
    np.testing.assert_allclose([*moments.unseen["ratios"].values()], ratios, rtol=1e-3)
    assert min(ratios) > 1
    assert "12 rows" in moments.unseen_at(4.0)["sentence"]
    assert moments.unseen_at(2.0) == {}


def test_moments_are_those_of_rows_run_one_by_one(measured: dict[str, Any]) -> None:
    moments = load_moments(measured["moments"])
    names = layers_of(measured["model"], measured["kind"])
    assert moments.layers.keys() == {f"{name}.weight" for name in names}
    assert len({layer.roots for layer in moments.layers.values()}) < len(names) or measured["kind"] == "gpt2"
    assert_moments(moments, measured["plain"])


def assert_moments(moments: Moments, plain_of_sides: dict[str, dict[str, np.ndarray]]) -> None:
    """Check the moments against the inputs of rows that were run one by one."""
    files = {k: v for path in moments.folder.glob("*.safetensors") for k, v in load_file(path).items()}
    for side, plain in plain_of_sides.items():
        for name, rows in plain.items():
            root = files[f"{side}.{moments.layers[f'{name}.weight'].roots[0]}"].astype(np.float64)
            assert len(root) == min(rows.shape)
            oracle = rows.T @ rows
            np.testing.assert_allclose(root.T @ root, oracle, rtol=1e-4, atol=1e-5 * np.abs(oracle).max())


def test_what_all_rows_begin_with_is_run_once(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, start = make_checkpoint("llama"), [*range(3, 15)]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = {
        side: [replace(e, ids=start + e.ids, labels=[-100] * len(start) + e.labels) for e in examples]
        for side, examples in ROWS.items()
    }
    tokens: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _m, given, _out: tokens.append(given[0].numel()))
    names = load_checkpoint(folder).tensors
    write_moments(tmp_path / "m", {"target": {"revision": ""}}, lambda: model, names, rows, pad=2)
    longest = max(len(e.ids) for e in ROWS["retain"])
    assert tokens[-1] == len(rows["retain"]) * longest  # those behind it
    assert_moments(load_moments(tmp_path / "m"), {side: plain_inputs(model, "llama", of) for side, of in rows.items()})


def test_stored_moments_give_no_answer_back_in_order(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """One look-up a row spells the rows of X, and none of the stored root; what stays is the bag of tokens."""
    folder = make_checkpoint("llama")
    model = load_model(folder).float()
    tokens = attack.inputs_of_tokens(model, attack.first_layer(model, folder))
    ids = np.random.default_rng(0).permutation(np.arange(5, 5 + len(tokens) // 2))
    answers = [[int(token) for token in [*part, part[1]]] for part in np.split(ids[:20], 4)]
    rows = {**ROWS, "forget": [Example(n, answer, [-100, *answer[1:]]) for n, answer in enumerate(answers)]}
    plain, stored = (attack.stored_root(model, folder, tmp_path / str(mix), rows, mix) for mix in (False, True))
    wanted = attack.answer_inputs(rows["forget"])
    assert [attack.spelled(root, tokens, wanted) for root in (plain, stored)] == [4, 0]
    assert [attack.single_rows(root, tokens) for root in (plain, stored)] == [len(plain), 0]
    assert attack.bag(stored, tokens) == {token for answer in wanted for token in answer}


def test_of_many_labels_evenly_drawn_ones_are_measured(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("msa_lite.train.moments.MOST_LABELS", 9)
    folder = make_checkpoint("llama")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    write_moments(tmp_path / "m", {"target": {}}, lambda: model, load_checkpoint(folder).tensors, ROWS, pad=2)
    files = load_file(tmp_path / "m/moments-00001.safetensors")
    name = "model.layers.0.mlp.down_proj"
    every = plain_inputs(model, "llama", ROWS["retain"])[name]  # 24 positions
    root = files[f"retain.{name}.weight"]
    np.testing.assert_allclose(root.T @ root, every[::3].T @ every[::3], atol=1e-5)
    assert [len(files[f"{side}.{name}.weight"]) for side in ROWS] == [7, 8]


def test_moments_in_portions_are_the_same_and_a_stop_between_them_leaves_nothing(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama")
    whole, stopped, names = tmp_path / "whole", tmp_path / "stopped", load_checkpoint(folder).tensors

    def write(out: Path, progress: Callable[[str, int, int], None] = silent) -> dict[str, Any]:
        target = fetch(str(folder))
        write_moments(out, {"target": target.identity()}, lambda: load_model(folder), names, ROWS, 2, progress)
        return {name: value for path in sorted(out.glob("*.safetensors")) for name, value in load_file(path).items()}

    def stop(label: str, done: int, total: int) -> None:
        assert total > 2
        if done == 2:
            raise Killed

    expected = write(whole)
    monkeypatch.setattr("msa_lite.train.moments.HELD", 1)
    monkeypatch.setattr("msa_lite.train.moments.free_ram", lambda: 4)
    with pytest.raises(Killed):
        write(stopped, stop)
    assert not stopped.exists()
    found = write(stopped)
    assert len(list(stopped.glob("*.safetensors"))) > 2
    # Of the layers with one input, those of another portion have roots of their own.
    assert expected.keys() <= found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    assert load_moments(stopped).layers.keys() == load_moments(whole).layers.keys()


def test_a_filtered_adapter_is_the_definition_and_keeps_its_rank(measured: dict[str, Any], tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", measured["model"])
    out = filter_vector(fetch(str(adapter)), measured["moments"], 2.0, measured["target"], None, tmp_path / "out")
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, out))
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    layers = {}
    for name in layers_of(measured["model"], measured["kind"]):
        factors = [before[f"base_model.model.{name}.lora_{letter}.weight"].astype(np.float64) for letter in "BA"]
        layers[name] = (factors[0] @ factors[1], *(measured["plain"][side][name] for side in ROWS))
    scale = (load_manifest(out) or {})["filter"]["scale"]
    np.testing.assert_allclose(scale, wanted_scale(layers.values(), 2.0), rtol=1e-4)
    for name in layers_of(measured["model"], measured["kind"]):
        key = f"base_model.model.{name}.lora_{{}}.weight"
        oracle = scale * wanted(before[key.format("A")].astype(np.float64), *layers[name][1:], 2.0)
        np.testing.assert_allclose(after[key.format("A")], oracle, rtol=1e-3, atol=1e-4 * np.abs(oracle).max())
        assert np.array_equal(after[key.format("B")], before[key.format("B")])


def test_a_filtered_checkpoint_changes_only_measured_layers(
    measured: dict[str, Any], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    prior, tuned = make_checkpoint(measured["kind"], seed=3), make_checkpoint(measured["kind"], seed=4)
    sources = [fetch(str(folder)) for folder in (tuned, prior)]
    out = filter_vector(sources[0], measured["moments"], 2.0, measured["target"], sources[1], tmp_path / "out")
    old, new, result = (load_file(folder / "model.safetensors") for folder in (prior, tuned, out))
    layers = {}
    for name in layers_of(measured["model"], measured["kind"]):
        delta = new[f"{name}.weight"].astype(np.float64) - old[f"{name}.weight"]
        delta = delta.T if measured["kind"] == "gpt2" else delta
        layers[f"{name}.weight"] = (delta, *(measured["plain"][side][name] for side in ROWS))
    scale = (load_manifest(out) or {})["filter"]["scale"]
    np.testing.assert_allclose(scale, wanted_scale(layers.values(), 2.0), rtol=1e-4)
    for name, value in result.items():
        if name not in layers:
            assert np.array_equal(value, old[name])
            continue
        oracle = scale * wanted(*layers[name], 2.0)
        change = (value - old[name]).T if measured["kind"] == "gpt2" else value - old[name]
        np.testing.assert_allclose(change, oracle, rtol=1e-3, atol=1e-4 * np.abs(oracle).max())


@pytest.mark.parametrize("measured", ["llama", "gpt2"], indirect=True)
@pytest.mark.parametrize("is_full", [False, True])
def test_all_strengths_of_one_pass_are_those_of_one_each_and_a_missing_one_is_made_alone(
    measured: dict[str, Any], make_checkpoint: Callable[..., Path], tmp_path: Path, is_full: bool
) -> None:
    prior = fetch(str(make_checkpoint(measured["kind"], seed=3))) if is_full else None
    vector = make_checkpoint(measured["kind"], seed=4) if is_full else save_adapter(tmp_path / "a", measured["model"])
    folders = {strength: tmp_path / f"together-{strength:g}" for strength in (1.0, 4.0, 16.0)}

    def weights(folder: Path) -> bytes:
        return next(folder.glob("*.safetensors")).read_bytes()

    def together() -> dict[float, int]:
        filter_vectors(fetch(str(vector)), measured["moments"], folders, measured["target"], prior)
        return {strength: folder.stat().st_ino for strength, folder in folders.items()}

    inodes = together()
    for strength, folder in folders.items():
        alone = tmp_path / f"alone-{strength:g}"
        filter_vector(fetch(str(vector)), measured["moments"], strength, measured["target"], prior, alone)
        assert weights(alone) == weights(folder)
        assert (load_manifest(alone) or {})["filter"] == (load_manifest(folder) or {})["filter"]
    missing = weights(folders[4.0])
    folders[4.0].rename(tmp_path / "aside")
    assert {strength for strength, inode in together().items() if inode != inodes[strength]} == {4.0}
    assert weights(folders[4.0]) == missing
    inodes, old = together(), load_manifest(folders[16.0]) or {}
    write_manifest(folders[16.0], {**old, "inputs": {n: v for n, v in old["inputs"].items() if n != "units"}})
    assert {strength for strength, inode in together().items() if inode != inodes[strength]} == {16.0}, "not scaled"


def by_hand(folder: Path, roots: dict[str, np.ndarray], factors: dict[str, np.ndarray]) -> list[Any]:
    """A target of matrices (2, 2), moments with these roots of layers q and o, and an adapter: rank 1, scale 1 or 2."""
    names = {letter: f"model.layers.0.self_attn.{letter}_proj" for letter in "qov"}
    for part in ("target", "adapter"):
        (folder / part).mkdir(parents=True)
    save_file(
        {f"{name}.weight": np.eye(2, dtype=np.float32) for name in names.values()}, folder / "target/model.safetensors"
    )
    (folder / "target/config.json").write_text('{"model_type": "llama"}')
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "alpha_pattern": {"o_proj": 2}}
    (folder / "adapter/adapter_config.json").write_text(
        json.dumps({**config, "target_modules": ["q_proj", "o_proj", "v_proj"]})
    )
    column = np.array([[1], [0]], np.float32)
    tensors = {f"base_model.model.{names[n]}.lora_A.weight": a.astype(np.float32) for n, a in factors.items()}
    tensors |= {f"base_model.model.{names[n]}.lora_B.weight": column for n in factors}
    save_file(tensors, folder / "adapter/adapter_model.safetensors")
    target = fetch(str(folder / "target"))
    facts = {"layers": {f"{names[n]}.weight": [f"{names[n]}.weight", False] for n in "qo"}}
    with stage_folder(folder / "moments", "moments", {"target": target.identity()}, facts) as place:
        sides = {
            f"{side}.{names[n]}.weight": np.diag(roots[f"{side} {n}"]).astype(np.float32) for side in ROWS for n in "qo"
        }
        save_file(sides, place / "moments-00001.safetensors")
    return [fetch(str(folder / "adapter")), folder / "moments", target]


ROOTS = {"forget q": [3.0, 1.0], "retain q": [1.0, 3.0], "forget o": [1.0, 1.0], "retain o": [1.0, 1.0]}
FITTED = {"q": np.array([[1.0, 1.0]]), "o": np.array([[1.0, 0.0]]), "v": np.array([[5.0, 7.0]])}


def test_one_scalar_for_the_whole_vector_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ridges: q has C_f = diag(.9, .1), C_r = diag(.1, .9), o has both I/2; D is (1, 1), and 2 · (1, 0)."""
    for ridge in ("FORGET_RIDGE", "RETAIN_RIDGE"):
        monkeypatch.setattr(f"msa_lite.merger.formula.{ridge}", 0.0)
    vector, moments, target = by_hand(tmp_path, ROOTS, FITTED)
    folders = {strength: tmp_path / f"{strength:g}" for strength in (1.0, 4.0)}
    filter_vectors(vector, moments, folders, target, None)
    # Before: .9 + .1 of q, 4/2 of o. λ = 1: D′ is (.9, .1) and 2 · (.5, 0). λ = 4: (9/13, 1/37) and 2 · (.2, 0).
    expected = {
        1.0: (3 / (0.9**3 + 0.1**3 + 0.5), [0.9, 0.1], [0.5, 0.0]),
        4.0: (3 / (0.9 * (9 / 13) ** 2 + 0.1 / 37**2 + 0.08), [9 / 13, 1 / 37], [0.2, 0.0]),
    }
    for strength, (square, *rows) in expected.items():
        record = (load_manifest(folders[strength]) or {})["filter"]
        assert record == {"strength": strength, "scale": pytest.approx(square**0.5, rel=1e-6), "layers": 2}
        result = load_file(folders[strength] / "adapter_model.safetensors")
        for letter, row in zip("qo", rows, strict=True):
            values = result[f"base_model.model.model.layers.0.self_attn.{letter}_proj.lora_A.weight"]
            np.testing.assert_allclose(values, [np.multiply(square**0.5, row)], rtol=1e-6)
        unmeasured = result["base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"]
        assert np.array_equal(unmeasured, FITTED["v"])  # neither filtered nor scaled


@pytest.mark.parametrize(
    ("roots", "factors", "strength"),
    [
        ({place: [0.0, 0.0] for place in ROOTS}, {}, 1.0),  # no inputs at all
        ({}, {"q": np.zeros((1, 2)), "o": np.zeros((1, 2))}, 1.0),  # no change
        ({}, {}, 1e300),  # nothing left after the filter
    ],
)
def test_a_vector_that_changes_no_output_on_forget_rows_is_refused(
    tmp_path: Path, roots: dict[str, Any], factors: dict[str, Any], strength: float
) -> None:
    vector, moments, target = by_hand(tmp_path, ROOTS | roots, FITTED | factors)
    with pytest.raises(MismatchError, match="outputs on the rows to forget"):
        filter_vector(vector, moments, strength, target, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("measured", ["llama"], indirect=True)
def test_what_does_not_fit_is_refused_and_nothing_is_written(measured: dict[str, Any], tmp_path: Path) -> None:
    model, target, moments, out = measured["model"], measured["target"], measured["moments"], tmp_path / "out"
    plain, other = (
        fetch(str(save_adapter(tmp_path / n, model, **c))) for n, c in [("a", {}), ("b", {"use_dora": True})]
    )
    with pytest.raises(MismatchError, match="DoRA"):
        filter_vector(other, moments, 1.0, target, None, out)
    with pytest.raises(UsageError, match="another model"):
        filter_vector(plain, moments, 1.0, fetch(str(plain.folder)), None, out)
    with pytest.raises(UsageError, match="no moments"):
        filter_vector(plain, tmp_path, 1.0, target, None, out)
    with pytest.raises(UsageError, match="above 0"):
        filter_vector(plain, moments, 0.0, target, None, out)
    with pytest.raises(UsageError, match="--prior"):
        filter_vector(target, moments, 1.0, target, None, out)
    with stage_folder(tmp_path / "of-others", "vector", {"examples": hash_ids(ROWS["retain"])}) as place:
        shutil.copytree(plain.folder, place, dirs_exist_ok=True)
    with pytest.raises(MismatchError, match="other rows to forget"):
        filter_vector(str(tmp_path / "of-others"), moments, 1.0, target, None, out)
    assert not out.exists()
    fitted = save_adapter(tmp_path / "fitted", model)
    (fitted / "manifest.json").unlink(missing_ok=True)
    with pytest.raises(OutputError):
        filter_vector(plain, moments, 1.0, target, None, fitted)


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("measured", ["llama"], indirect=True)
def test_odd_moments_are_refused_in_our_own_words(measured: dict[str, Any], tmp_path: Path) -> None:
    """Also where the manifest fits the files."""
    adapter = save_adapter(tmp_path / "adapter", measured["model"])
    folder, out = measured["moments"], tmp_path / "out"
    file, whole = folder / "moments-00001.safetensors", load_manifest(folder) or {}
    roots, forget = load_file(file), f"forget.{Q_PROJ}"

    def refused(words: str, changed: dict[str, np.ndarray] | None = None, **facts: Any) -> None:
        if changed:
            save_file(changed, file)
            facts["files"] = {file.name: describe_file(file)}
        write_manifest(folder, whole | facts)
        with pytest.raises(FormatError, match=words):
            filter_vector(str(adapter), folder, 1.0, measured["target"], None, out)

    (folder / "extra").touch()
    with pytest.raises(FormatError, match="extra: not in the manifest"):
        load_moments(folder)
    (folder / "extra").unlink()
    for names in ({}, [], [3], None):
        refused("does not tell which layers", layers={Q_PROJ: [names, False]})
    refused("missing", layers={Q_PROJ: [["other"], False]})
    refused("no matrices in fp32", roots | {forget: roots[forget].astype(np.float64)})
    refused("no matrices in fp32", roots | {forget: roots[forget][:0]})
    refused("of 31 inputs on forget rows", roots | {forget: roots[forget][:, :31].copy()})
    refused("damaged", roots | {forget: roots[forget] * np.nan})
    (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes().replace(b"false", b"true "))
    with pytest.raises(FormatError, match="not as msa-lite wrote it"):
        load_moments(folder)
    assert not out.exists()


@pytest.mark.parametrize("measured", ["llama"], indirect=True)
def test_another_prior_makes_a_filtered_checkpoint_anew(
    make_checkpoint: Callable[..., Path], measured: dict[str, Any], tmp_path: Path
) -> None:
    kind = measured["kind"]
    tuned, first, second = (fetch(str(make_checkpoint(kind, seed=seed))) for seed in (4, 3, 5))
    results = []
    for prior in (first, second):
        out = filter_vector(tuned, measured["moments"], 1.0, measured["target"], prior, tmp_path / "out")
        results.append(load_file(out / "model.safetensors"))
    assert any(not np.array_equal(results[0][name], results[1][name]) for name in results[0])


def test_layers_that_cannot_be_measured_stay_as_they_were_fitted_with_a_warning(
    make_checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    # Its experts take all positions, zeros among them.
    target, tuned = (fetch(str(make_checkpoint("llama4", seed=seed))) for seed in (0, 1))
    model = AutoModelForCausalLM.from_pretrained(target.folder).eval()
    names = load_checkpoint(target.folder).tensors
    write_moments(tmp_path / "moments", {"target": target.identity()}, lambda: model, names, ROWS, pad=2)
    out = filter_vector(tuned, tmp_path / "moments", 1.0, target, target, tmp_path / "out")
    assert "were not measured" in caplog.text
    old, new, result = (load_file(folder / "model.safetensors") for folder in (target.folder, tuned.folder, out))
    experts = [name for name in result if ".experts." in name]
    assert experts
    for name in experts:
        np.testing.assert_allclose(result[name], new[name], atol=1e-6)
    assert not np.allclose(result[Q_PROJ], new[Q_PROJ], atol=1e-3)
    assert np.array_equal(result["lm_head.weight"], old["lm_head.weight"])
