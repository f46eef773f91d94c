"""The filter of a forget vector: its formula against float64 oracles, and filtered adapters and checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
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
from msa_lite.merger.filtering import filter_vector, load_moments
from msa_lite.merger.formula import FORGET_RIDGE, RETAIN_RIDGE, layer_filter
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
    return layer_filter(forget, retain, strength).apply(delta)


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
    solved = layer_filter(forget, retain, strength).solved().apply(delta)
    np.testing.assert_allclose(solved, oracle, rtol=1e-9, atol=1e-10)


def test_without_strength_it_is_the_identity_and_a_layer_that_gets_nothing_does_no_harm() -> None:
    draw = np.random.default_rng(1)
    delta, forget, retain = (draw.normal(size=(rows, INPUTS)) for rows in (9, 6, 6))
    assert np.array_equal(filtered(delta, forget, retain, 0.0), delta)
    zeros = np.zeros((4, INPUTS))
    assert np.isfinite(filtered(delta, forget, zeros, 1.0)).all()
    assert np.isfinite(filtered(delta, zeros, retain, 1.0)).all()


ROWS = {
    "forget": [Example(0, [5, 6, 7, 8, 9, 10], [-100, -100, 7, 8, 9, 10]), Example(1, [5, 11, 12], [-100, -100, 12])],
    "retain": [Example(n, [20 + n, 21, 22, 23 + n, 24], [-100, 21, -100, 23 + n, 24]) for n in range(12)],
}
LINEAR = {"gpt2": ("c_attn", "c_proj", "c_fc")}  # of llama and its relatives: all that end so
ENDINGS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def layers_of(model: Any, kind: str) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if name.endswith(LINEAR.get(kind, ENDINGS))}


def plain_inputs(model: Any, kind: str, rows: list[Example]) -> dict[str, np.ndarray]:
    """The inputs of each layer at the positions before labels, of one row at a time, without padding."""
    inputs: dict[str, list[Any]] = {name: [] for name in layers_of(model, kind)}
    hooks = [
        layer.register_forward_hook(lambda _m, given, _out, name=name: inputs[name].append(given[0][0]))
        for name, layer in layers_of(model, kind).items()
    ]
    for row in rows:
        with torch.no_grad():
            model(torch.tensor([row.ids]))
        places = [at - 1 for at, label in enumerate(row.labels) if at and label >= 0]
        for states in inputs.values():
            states[-1] = states[-1][places]
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(states).double().numpy() for name, states in inputs.items()}


@pytest.fixture(params=["llama", "qwen2", "olmo2", "gpt2"])
def measured(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    """A target, its moments, and the inputs of its layers as plain transformers gives them."""
    from transformers import AutoModelForCausalLM

    kind, folder = request.param, make_checkpoint(request.param)
    target, model = fetch(str(folder)), AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = {"target": target.identity(), "forget": hash_ids(ROWS["forget"])}
    write_moments(tmp_path / "moments", inputs, lambda: model, load_checkpoint(folder).tensors, ROWS, pad=2)
    plain = {side: plain_inputs(model, kind, rows) for side, rows in ROWS.items()}
    return {"kind": kind, "target": target, "model": model, "moments": tmp_path / "moments", "plain": plain}


def test_moments_are_those_of_rows_run_one_by_one(measured: dict[str, Any]) -> None:
    moments = load_moments(measured["moments"])
    names = layers_of(measured["model"], measured["kind"])
    assert moments.layers.keys() == {f"{name}.weight" for name in names}
    assert len({layer.roots for layer in moments.layers.values()}) < len(names) or measured["kind"] == "gpt2"
    files = {k: v for path in measured["moments"].glob("*.safetensors") for k, v in load_file(path).items()}
    for side, plain in measured["plain"].items():
        for name, rows in plain.items():
            root = files[f"{side}.{moments.layers[f'{name}.weight'].roots[0]}"].astype(np.float64)
            assert len(root) == min(rows.shape)
            oracle = rows.T @ rows
            np.testing.assert_allclose(root.T @ root, oracle, rtol=1e-4, atol=1e-5 * np.abs(oracle).max())


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
    every = plain_inputs(model, "llama", ROWS["retain"])[name]  # 36 positions
    root = files[f"retain.{name}.weight"]
    np.testing.assert_allclose(root.T @ root, every[::4].T @ every[::4], atol=1e-5)
    assert [len(files[f"{side}.{name}.weight"]) for side in ROWS] == [5, 9]


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


def test_a_filtered_adapter_is_the_definition_and_keeps_its_rank(
    measured: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = save_adapter(tmp_path / "adapter", measured["model"])
    out = filter_vector(fetch(str(adapter)), measured["moments"], 2.0, measured["target"], None, tmp_path / "out")
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, out))
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    norms = [
        sum(np.sum((w[f"{key}.lora_B.weight"].astype(np.float64) @ w[f"{key}.lora_A.weight"]) ** 2) for key in keys)
        for w in (before, after)
        for keys in [{name.partition(".lora_")[0] for name in w}]
    ]
    growth = (load_manifest(out) or {})["filter"]["growth"]
    np.testing.assert_allclose(growth, np.sqrt(norms[1] / norms[0]), rtol=1e-4)
    assert ("times as large" in caplog.text) == (growth > 3)
    for name in layers_of(measured["model"], measured["kind"]):
        key = f"base_model.model.{name}.lora_{{}}.weight"
        roots = [measured["plain"][side][name] for side in ("forget", "retain")]
        oracle = wanted(before[key.format("A")].astype(np.float64), *roots, 2.0)
        np.testing.assert_allclose(after[key.format("A")], oracle, rtol=1e-3, atol=1e-4 * np.abs(oracle).max())
        assert np.array_equal(after[key.format("B")], before[key.format("B")])


def test_a_filtered_checkpoint_changes_only_measured_layers(
    measured: dict[str, Any], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    prior, tuned = make_checkpoint(measured["kind"], seed=3), make_checkpoint(measured["kind"], seed=4)
    sources = [fetch(str(folder)) for folder in (tuned, prior)]
    out = filter_vector(sources[0], measured["moments"], 2.0, measured["target"], sources[1], tmp_path / "out")
    old, new, result = (load_file(folder / "model.safetensors") for folder in (prior, tuned, out))
    layers = {f"{name}.weight": name for name in layers_of(measured["model"], measured["kind"])}
    for name, value in result.items():
        if name not in layers:
            assert np.array_equal(value, old[name])
            continue
        delta = new[name].astype(np.float64) - old[name]
        roots = [measured["plain"][side][layers[name]] for side in ("forget", "retain")]
        oracle = wanted(delta.T, *roots, 2.0).T if measured["kind"] == "gpt2" else wanted(delta, *roots, 2.0)
        np.testing.assert_allclose(value - old[name], oracle, rtol=1e-3, atol=1e-4 * np.abs(oracle).max())


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
