"""Models stored as codes and scales: read, merged and stored again, against float64 and the tools that wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes import functional
from safetensors.torch import load_file

from msa_lite.attacks.quantise import QUANTISATIONS
from msa_lite.errors import FormatError
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.blocks import Files, read_part, read_rows
from msa_lite.io.weights.checkpoint import TensorEntry, load_checkpoint
from msa_lite.io.weights.quantised import dequantised, name_form, packed_weights
from msa_lite.io.weights.quantised_forms import Scaled
from msa_lite.merger import merge, merge_adapters
from msa_lite.merger.checks import memory
from tests.support import codes
from tests.support.merges import Adapter

STACKS = ("mxfp4 gpt-oss",)
FORGET = 0.75


def is_chosen(name: str) -> bool:
    return "proj" in name


def plain_weights(layout: str, seed: int = 0) -> codes.Tensors:
    """Weights of odd sizes, where the layout allows: blocks that are cut short at the edges."""
    generator = torch.Generator().manual_seed(seed)
    stacked = layout in STACKS
    sides = (3, 64, 96) if stacked else (600, 160)
    names = [f"model.layers.{layer}.mlp.{part}" for layer in range(2) for part in ("up_proj", "down_proj")]
    weights = {
        name + ("" if stacked else ".weight"): torch.randn(sides, generator=generator) * 0.02 * (1 + number)
        for number, name in enumerate(names)
    }
    weights["model.layers.0.norm.weight"] = torch.randn(160, generator=generator)
    return weights


def move(weights: codes.Tensors, seed: int, size: float = 0.002) -> codes.Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: value + torch.randn(value.shape, generator=generator) * size for name, value in weights.items()}


def as_plain(tensors: codes.Tensors, layout: Any, names: list[str]) -> codes.Tensors:
    return {name: layout.weights(tensors, name) if is_chosen(name) else tensors[name].double() for name in names}


@pytest.mark.parametrize("kind", codes.LAYOUTS)
def test_merges_are_stored_as_dequantising_adding_and_requantising_store_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "BLOCK", 1 << 14)  # several blocks a tensor
    layout, weights = codes.LAYOUTS[kind], plain_weights(kind)
    moved, names = move(weights, 1), [*weights]
    target = codes.write(tmp_path / "target", weights, layout, is_chosen)
    prior = codes.write(tmp_path / "prior", weights, layout, lambda _: False)
    tuned = codes.write(tmp_path / "tuned", moved, layout, lambda _: False)
    (target / "hf_quant_config.json").write_text("{}")
    inputs = {"forget": str(tuned), "alpha": FORGET, "prior": str(prior)}

    before = codes.read(target)
    seen = as_plain(before, layout, names)
    wanted = {name: seen[name] - FORGET * (moved[name] - weights[name]).double() for name in names}

    merge(str(target), tmp_path / "same", **inputs)
    after = codes.read(tmp_path / "same")
    assert after.keys() == before.keys()
    for name in names:
        expected = layout.store(name, wanted[name], before) if is_chosen(name) else {name: wanted[name].float()}
        for part, value in expected.items():
            # fp32 may fall on the other side of a tie, or of the next power of two
            assert codes.differing(after[part], value) < 2e-3, part
        first = next(iter(expected))
        assert codes.differing(after[first], before[first]) > 0.05  # of the update
    kept = {
        name: float(((as_plain(after, layout, [name])[name] - seen[name]) * (wanted[name] - seen[name])).sum())
        / float((wanted[name] - seen[name]).square().sum())
        for name in names
    }
    manifest = load_manifest(tmp_path / "same") or {}
    assert {n: item["kept"] for n, item in manifest["fidelity"]["tensors"].items()} == pytest.approx(kept, rel=1e-3)
    assert manifest["forms"]["target"] == kind.split()[0]

    merge(str(target), tmp_path / "plain", dtype="float32", **inputs)
    merged = codes.read(tmp_path / "plain")
    assert merged.keys() == weights.keys()
    for name in names:
        assert (merged[name].double() - wanted[name]).abs().max() < 1e-6 * wanted[name].abs().max()
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()
    places = json.loads((tmp_path / "plain" / codes.INDEX).read_text())["weight_map"]
    files = (tmp_path / "plain").glob("*.safetensors")
    assert places == {name: file.name for file in files for name in load_file(file)}


@pytest.mark.parametrize("kind", codes.LAYOUTS)
def test_codes_that_nothing_changes_are_stored_as_they_were(kind: str, tmp_path: Path) -> None:
    layout, weights = codes.LAYOUTS[kind], plain_weights(kind)
    target = codes.write(tmp_path / "target", weights, layout, is_chosen)
    before, read = codes.read(target), partial(read_part, Files())
    packed = packed_weights(dequantised(load_checkpoint(target), stored=True)).values()
    assert len(packed) == 4
    for entry in packed:
        form = entry.form
        assert isinstance(form, Scaled)
        rows = form.rows(read, 0, entry.matrix_shape[0])
        scales = form.new_scales(form.peaks(rows, 0))
        stored = form.read_scales(read, 0, len(scales))
        np.testing.assert_allclose(form.values(form.encode(rows, scales, 0), scales, 0), rows, rtol=2e-7)
        assert form.encode(rows, stored, 0).tobytes() == codes.as_bytes(before[form.codes.name]).numpy().tobytes()


def test_codes_by_hand() -> None:
    entry = TensorEntry("w", Path(), "U8", (1, 16), 0, 16)
    form = Scaled(entry, entry, (1, 32), 1, 32, is_power=True)
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, 7.0]  # between two codes: the even one
    rows = np.array([[*ties, *[0.0] * 21]], np.float32)
    scale = np.array([[127]], np.uint8)  # 2^0
    expected = [0, 1, 1, 2, 2, 4, 4, 6, 0, -4, 6]
    assert form.values(form.encode(rows, scale, 0), scale, 0)[0, : len(ties)].tolist() == expected
    # The smallest power of two with which the peak fits below 6; 1 for a block of zeros.
    peaks = np.array([[6.0, 6.01, 3.0, 0.75, 0.0]])
    assert (form.new_scales(peaks).astype(int) - 127).tolist() == [[0, 1, -1, -3, 0]]


@pytest.mark.parametrize("kind", ["fp8 blocks", "nvfp4 ModelOpt", "mxfp4 gpt-oss"])
def test_stochastic_rounding_keeps_the_mean(kind: str, tmp_path: Path) -> None:
    layout, weights = codes.LAYOUTS[kind], plain_weights(kind)
    moved, names = move(weights, 1, 1e-4), [*weights]  # far below a step of the codes
    target = codes.write(tmp_path / "target", weights, layout, is_chosen)
    prior = codes.write(tmp_path / "prior", weights, layout, lambda _: False)
    tuned = codes.write(tmp_path / "tuned", moved, layout, lambda _: False)
    seen = as_plain(codes.read(target), layout, names)
    mean = dict.fromkeys(names, 0.0)
    for seed in range(20):
        out = tmp_path / f"{seed}"
        merge(str(target), out, forget=str(tuned), prior=str(prior), rounding="stochastic", seed=seed)
        for name, value in as_plain(codes.read(out), layout, names).items():
            mean[name] = mean[name] + (value - seen[name]) / 20
    for name in filter(is_chosen, names):
        wanted = (weights[name] - moved[name]).double()
        assert abs(float((mean[name] * wanted).sum() / wanted.square().sum()) - 1) < 0.25, name


@pytest.mark.parametrize("kind", codes.LAYOUTS)
def test_priors_and_tuned_models_are_read_by_dequantising(kind: str, tmp_path: Path) -> None:
    layout, weights = codes.LAYOUTS[kind], plain_weights(kind)
    moved, names = move(weights, 1, 0.02), [*weights]
    target = codes.write(tmp_path / "target", weights, layout, lambda _: False)
    prior = codes.write(tmp_path / "prior", weights, layout, is_chosen)
    tuned = codes.write(tmp_path / "tuned", moved, layout, is_chosen)
    merge(str(target), tmp_path / "out", forget=str(tuned), prior=str(prior))
    old, new = (as_plain(codes.read(folder), layout, names) for folder in (prior, tuned))
    for name, value in codes.read(tmp_path / "out").items():
        wanted = weights[name].double() - (new[name] - old[name])
        assert (value.double() - wanted).abs().max() < 1e-6 * wanted.abs().max()
    manifest = load_manifest(tmp_path / "out") or {}
    assert manifest["forms"].keys() == {"prior", "forget"}


def bitsandbytes_model(base: Path, out: Path, **how: Any) -> Any:
    """A model as transformers and bitsandbytes store it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=BitsAndBytesConfig(**how), dtype=torch.float32
    )
    model.save_pretrained(out)
    return model


@pytest.mark.parametrize(
    "how",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_8bit": True},
    ],
    ids=["nf4", "nf4, scales in 8 bits", "fp4", "int8"],
)
def test_weights_of_bitsandbytes_are_those_that_it_computes_with(
    how: dict[str, Any], make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from bitsandbytes.functional import dequantize_4bit

    base = make_checkpoint("llama", hidden_size=128, intermediate_size=192)
    model = bitsandbytes_model(base, tmp_path / "coded", **how)
    tensors, files, count = dequantised(load_checkpoint(tmp_path / "coded")).tensors, Files(), 0
    for name, module in model.named_modules():
        if "_proj" not in name or not hasattr(module, "weight"):
            continue
        entry, weight, count = tensors[f"{name}.weight"], module.weight, count + 1
        if "load_in_8bit" in how:
            state = weight if weight.SCB is not None else module.state
            expected = state.CB.float() * state.SCB[:, None] / 127
        else:
            expected = dequantize_4bit(weight.data, weight.quant_state).float()
        rows = read_rows(files, entry, 0, entry.shape[0])
        np.testing.assert_allclose(rows, expected.numpy(), rtol=1e-6)
        np.testing.assert_array_equal(read_rows(files, entry, 3, 7), rows[3:7])
    assert count == 14


def test_a_target_of_bitsandbytes_is_written_plain_or_left_with_an_adapter(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    base = make_checkpoint("llama", hidden_size=128, intermediate_size=192)
    coded = tmp_path / "coded"
    bitsandbytes_model(base, coded, load_in_4bit=True)
    entries = dequantised(load_checkpoint(coded)).tensors
    generator = np.random.default_rng(0)
    names = [name.removesuffix(".weight") for name in entries if "q_proj" in name]
    factors = {
        name: tuple(generator.normal(0, 0.05, shape).astype(np.float32) for shape in ((4, 128), (128, 4)))
        for name in names
    }
    adapter = Adapter(factors)  # type: ignore[arg-type]
    vector = adapter.write(tmp_path / "vector")
    with pytest.raises(FormatError, match="--dtype bfloat16"):
        merge(str(coded), tmp_path / "out", forget=str(vector))
    assert not (tmp_path / "out").exists()
    merge(str(coded), tmp_path / "out", forget=str(vector), dtype="float32")
    after = codes.read(tmp_path / "out")
    for name, entry in entries.items():
        before = read_rows(Files(), entry, 0, entry.matrix_shape[0]).reshape(entry.shape).astype(np.float64)
        delta = adapter.delta(name.removesuffix(".weight")) if name.removesuffix(".weight") in factors else 0.0
        np.testing.assert_allclose(after[name].numpy(), before - delta, atol=1e-6)
    assert merge_adapters(str(coded), tmp_path / "adapter", forget=str(vector)).modules == len(names)


def test_codes_without_a_known_form_are_refused_by_their_method(tmp_path: Path) -> None:
    layout, weights = codes.LAYOUTS["fp8 rows"], plain_weights("fp8 rows")
    target = codes.write(tmp_path / "target", weights, layout, lambda _: False)
    tensors = {name + ("_q" if is_chosen(name) else ""): value for name, value in weights.items()}
    packed = {name: value.to(torch.int32) if name.endswith("_q") else value for name, value in tensors.items()}
    codes.save(target, packed)
    (target / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}')
    assert name_form(load_checkpoint(target)) is None
    with pytest.raises(FormatError, match="gptq"):
        merge(str(target), tmp_path / "out", alpha=0)


@pytest.mark.parametrize(
    "shape",
    [(7, 2), (7,), (600, 11), (5, 0)],
)
def test_scales_that_fit_no_blocks_are_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    layout, weights = codes.LAYOUTS["fp8 blocks"], plain_weights("fp8 blocks")
    target = codes.write(tmp_path / "target", weights, layout, is_chosen)
    tensors = codes.read(target)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    codes.save(target, tensors | {name: torch.ones(shape)})
    with pytest.raises(FormatError, match=r"up_proj\.weight_scale_inv"):
        merge(str(target), tmp_path / "out", alpha=0)


def test_an_adapter_on_experts_of_mxfp4_changes_what_peft_changes(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    from tests.support.models import load, save_adapter

    base, layout = make_checkpoint("gpt_oss", hidden_size=32, intermediate_size=64), codes.GptOss()
    plain = codes.read(base)
    stacks = [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(stacks) == 4
    target = codes.write(tmp_path / "target", plain, layout, stacks.__contains__, base)
    stored = codes.read(target)
    vector, parameters = tmp_path / "vector", ["gate_up_proj", "down_proj"]
    save_adapter(vector, load(base)[0], r=3, lora_alpha=6, target_parameters=parameters)

    model = load(base)[0].double()
    before = {name: layout.weights(stored, name) if name in stacks else plain[name].double() for name in plain}
    model.load_state_dict(before)
    merged = PeftModel.from_pretrained(model, vector).double().merge_and_unload().state_dict()
    wanted = {name: 2 * before[name] - merged[name] for name in before}  # α = 1

    merge(str(target), tmp_path / "same", forget=str(vector))
    after = codes.read(tmp_path / "same")
    for name in stacks:
        for part, value in layout.store(name, wanted[name]).items():
            assert codes.differing(after[part], value) < 2e-3, part
    merge(str(target), tmp_path / "plain", forget=str(vector), dtype="float32")
    for name, value in codes.read(tmp_path / "plain").items():
        assert (value.double() - wanted[name]).abs().max() < 1e-6 * wanted[name].abs().max(), name


# Rounded weights beside those of bitsandbytes, and plain absmax beside fp64 arithmetic.


SHAPES = [(96, 64), (50, 100), (7, 34), (3, 200), (1, 6), (64, 576)]  # rows of an odd length cost seconds in theirs
KINDS = ["normal", "heavy", "zeros", "equal"]


def make_weights(shape: tuple[int, int], kind: str) -> np.ndarray:
    """Return fp32 weights that fp16 and bf16 hold, too."""
    random = np.random.default_rng(shape[1])
    weights = random.normal(0, 0.02, shape) if kind == "normal" else random.standard_t(2, shape)
    weights = np.full(shape, 0.25) if kind == "equal" else weights
    coarse: np.ndarray = np.round(weights * 1024).astype(np.float32) / 1024
    if kind == "zeros":
        coarse.reshape(-1)[: coarse.size // 2] = 0
        coarse[0] = 0
    return coarse


def rounded(form: str, weights: np.ndarray) -> np.ndarray:
    """Return weights, rounded by us."""
    result: np.ndarray = QUANTISATIONS[form].round(torch.from_numpy(weights)).numpy()
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_is_that_of_bitsandbytes(shape: tuple[int, int], kind: str) -> None:
    weights = make_weights(shape, kind)
    packed, state = functional.quantize_4bit(torch.from_numpy(weights), blocksize=64, quant_type="nf4")
    theirs = functional.dequantize_4bit(packed, state).numpy()
    midpoints: Any = (state.code[1:] + state.code[:-1]).numpy() / 2
    scales = np.repeat(state.absmax.numpy(), 64)[: weights.size].reshape(shape)
    is_tie = (np.abs((weights / np.maximum(scales, 1e-30))[..., None] - midpoints) < 1e-6).any(-1)
    assert np.allclose(rounded("nf4", weights)[~is_tie], theirs[~is_tie], rtol=1e-6, atol=0)
    assert is_tie.mean() < 0.01


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_that_of_bitsandbytes(shape: tuple[int, int]) -> None:
    weights = make_weights(shape, "normal")
    codes, scales, _ = functional.int8_vectorwise_quant(torch.from_numpy(weights).half())
    scaled = weights.astype(np.float64) * 127 / scales.numpy()[:, None]
    is_tie = np.abs(np.abs(scaled - np.trunc(scaled)) - 0.5) < 1e-4
    theirs = functional.int8_vectorwise_dequant(codes, scales).numpy()
    assert np.allclose(rounded("int8", weights)[~is_tie], theirs[~is_tie], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_int4_is_plain_absmax_by_groups_of_a_row(shape: tuple[int, int], kind: str) -> None:
    weights = make_weights(shape, kind)
    wanted = np.zeros(shape)
    for row in range(shape[0]):
        for start in range(0, shape[1], 128):
            group = weights[row, start : start + 128].astype(np.float64)
            step = np.abs(group).max() / 7
            if step:
                wanted[row, start : start + 128] = np.round(group / step) * step
    ours = rounded("int4", weights)
    is_tie = ~np.isclose(ours, wanted, rtol=1e-6, atol=0)  # then both neighbours are half a step away
    assert np.allclose(np.abs(weights - ours)[is_tie], np.abs(weights - wanted)[is_tie], rtol=1e-5, atol=0)


def test_weights_that_are_rounded_already_stay() -> None:
    for form in QUANTISATIONS:
        once = rounded(form, make_weights((64, 576), "normal"))
        assert np.allclose(rounded(form, once), once, rtol=1e-6, atol=0), form
