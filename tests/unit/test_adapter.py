"""PEFT adapters: scales as PEFT has them, and every kind that is no plain product of factors refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from msa_lite.errors import FormatError, MismatchError, UsageError
from msa_lite.io.adapter import ADAPTER_CONFIG, ADAPTER_FILE, load_adapter, load_factor, match_names
from msa_lite.io.checkpoint import load_checkpoint

Make = Callable[..., Path]
Q = "model.layers.0.self_attn.q_proj"


def edit(folder: Path, out: Path, tensors: Callable[[dict[str, np.ndarray]], Any] | None = None, **config: Any) -> Path:
    """A copy of an adapter with other config fields, and its tensors changed in place by a function."""
    shutil.copytree(folder, out)
    content = json.loads((out / ADAPTER_CONFIG).read_text()) | config
    (out / ADAPTER_CONFIG).write_text(json.dumps(content))
    if tensors:
        arrays = load_file(out / ADAPTER_FILE)
        tensors(arrays)
        save_file(arrays, out / ADAPTER_FILE)
    return out


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"lora_alpha": 3, "use_rslora": True},
        {
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.*": 6},
            "alpha_pattern": {"layers.1": 9, "v_proj": 1, "model.layers.0.*_proj": 5},
        },
        {"rank_pattern": {".*0.*k_proj": 3, "[^k]_proj": 7, "k_proj": 5}, "use_rslora": True},
        {"alpha_pattern": {"layers.(0|1).mlp.up_proj": 32, "up_proj": 2}},
    ],
    ids=["plain", "rslora", "patterns", "order", "regex"],
)
def test_ranks_and_scales_are_pefts(make_checkpoint: Make, make_adapter: Make, config: dict[str, Any]) -> None:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    folder = make_adapter("llama", **config)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(make_checkpoint("llama")), folder)
    wanted = {
        name.removeprefix("base_model.model."): (module.r["default"], pytest.approx(module.scaling["default"]))
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert len(wanted) == 14
    assert {m: (f.a.shape[0], f.scale) for m, f in load_adapter(folder).modules.items()} == wanted


@pytest.mark.parametrize(
    ("kind", "config", "says"),
    [
        ("llama", {"use_dora": True}, "use_dora: True, DoRA is not linear"),
        (
            "llama",
            {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
            r"modules_to_save: \['norm'\], full new",
        ),
        ("qwen2", {"bias": "all"}, "bias: 'all', full new bias values"),
        ("qwen2", {"bias": "lora_only"}, "bias: 'lora_only', full new bias values"),
        ("qwen2", {"target_modules": ["q_proj"], "lora_bias": True}, "lora_bias: True, a bias delta"),
        (
            "llama",
            {"target_modules": ["embed_tokens", "q_proj"]},
            r"embed_tokens\.lora_embedding_A: an adapter on an emb",
        ),
        (
            "llama",
            {"target_modules": ["q_proj"], "trainable_token_indices": [5]},
            r"trainable_token_indices: \[5\], not",
        ),
    ],
)
def test_kinds_that_are_no_plain_product_are_refused(
    make_adapter: Make, kind: str, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(FormatError, match=says):
        load_adapter(make_adapter(kind, **config))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "ADALORA"}, "peft_type: 'ADALORA', only 'LORA' is read"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' changes the model it starts from"),
        ({"init_lora_weights": "olora"}, "init_lora_weights: 'olora' changes"),
        ({"layer_replication": [[0, 2]]}, r"layer_replication: \[\[0, 2\]\], replicated layers"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters: .* bare parameters"),
        ({"use_warp_drive": 3}, "use_warp_drive: 3, not known to msa-lite"),
        ({"r": 5}, rf"{Q}: A is \(4, 32\), B is \(32, 4\), the config says rank 5"),
        ({"rank_pattern": {"q_proj": 9}}, rf"{Q}: .* the config says rank 9"),
    ],
)
def test_a_config_field_that_may_change_the_delta_is_refused(
    make_adapter: Make, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(FormatError, match=says):
        load_adapter(edit(make_adapter("llama"), tmp_path / "a", **config))


def test_fields_without_effect_and_unset_new_ones_are_accepted(make_adapter: Make, tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "x/y", "lora_dropout": 0.5, "use_warp_drive": False, "warp_config": None}
    assert len(load_adapter(edit(make_adapter("llama"), tmp_path / "a", **config)).modules) == 14


PREFIX = "base_model.model."
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"
VECTOR = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(A), rf"{Q}: only lora_B is there"),
        (lambda t: t.pop(B), rf"{Q}: only lora_A is there"),
        (
            lambda t: t.update({f"{PREFIX}lm_head.weight": VECTOR}),
            r"lm_head\.weight: not a LoRA factor \(modules_to_save",
        ),
        (
            lambda t: t.update({f"{PREFIX}{Q}.lora_magnitude_vector": VECTOR}),
            "lora_magnitude_vector: DoRA is not linear",
        ),
        (lambda t: t.update({f"{PREFIX}{Q}.base_layer.bias": VECTOR}), r"base_layer\.bias: a full copy"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_B.bias": VECTOR}), r"lora_B\.bias: a bias delta"),
        (lambda t: t.update({f"{PREFIX}{Q}.lora_E": VECTOR}), "lora_E: AdaLoRA"),
        (lambda t: t.update({A: VECTOR}), rf"{Q}\.lora_A\.weight: F32 of shape \(3,\), expected a matrix"),
        (lambda t: t.update({A: t[A].astype(np.int8)}), rf"{Q}\.lora_A\.weight: I8 of shape"),
        (lambda t: t.update({A: t[A][:2].copy()}), rf"{Q}: A is \(2, 32\), B is \(32, 4\)"),
    ],
)
def test_every_tensor_is_accounted_for(make_adapter: Make, tmp_path: Path, change: Any, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        load_adapter(edit(make_adapter("llama"), tmp_path / "a", change))


def test_older_names_with_the_adapters_name_are_read(make_adapter: Make, tmp_path: Path) -> None:
    def older(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name)

    folder = make_adapter("llama")
    assert load_adapter(edit(folder, tmp_path / "a", older)).modules.keys() == load_adapter(folder).modules.keys()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_factor_that_is_not_finite_is_named(make_adapter: Make, tmp_path: Path, value: float) -> None:
    folder = edit(make_adapter("llama"), tmp_path / "a", lambda t: t[B].__setitem__((0, 0), value))
    factors = load_adapter(folder).modules[Q]
    handle = os.open(folder / ADAPTER_FILE, os.O_RDONLY)
    try:
        assert load_factor(handle, factors.a).shape == (4, 32)
        with pytest.raises(FormatError, match=rf"'{B}' holds NaN or infinite"):
            load_factor(handle, factors.b)
    finally:
        os.close(handle)


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (lambda f: (f / ADAPTER_CONFIG).unlink(), UsageError, "not a PEFT adapter folder"),
        (lambda f: (f / ADAPTER_CONFIG).write_text("{"), FormatError, "not JSON"),
        (lambda f: (f / ADAPTER_CONFIG).write_text("[]"), FormatError, "not a JSON object"),
        (lambda f: (f / ADAPTER_FILE).rename(f / "adapter_model.bin"), FormatError, "pickled adapters are not read"),
    ],
)
def test_a_folder_that_is_no_adapter_is_refused(
    make_adapter: Make, tmp_path: Path, spoil: Any, error: type, says: str
) -> None:
    folder = edit(make_adapter("llama"), tmp_path / "a")
    spoil(folder)
    with pytest.raises(error, match=says):
        load_adapter(folder)


def test_an_adapter_for_another_architecture_lists_its_modules(make_checkpoint: Make, make_adapter: Make) -> None:
    with pytest.raises(MismatchError, match=rf"{Q}: the target has no tensor '{Q}\.weight'") as caught:
        match_names(load_adapter(make_adapter("llama")), load_checkpoint(make_checkpoint("gpt2")).tensors)
    assert str(caught.value).count("the target has no tensor") == 10
    assert "… and 4 more" in str(caught.value)


def test_an_adapter_for_another_size_lists_its_modules_with_both_shapes(
    make_checkpoint: Make, make_adapter: Make
) -> None:
    target = load_checkpoint(make_checkpoint("llama", hidden_size=64)).tensors
    with pytest.raises(MismatchError, match=rf"{Q}: the delta is \(32, 32\), the target's tensor is \(64, 64\)"):
        match_names(load_adapter(make_adapter("llama")), target)


def test_an_adapter_without_factors_is_refused(make_checkpoint: Make, make_adapter: Make, tmp_path: Path) -> None:
    folder = edit(make_adapter("llama"), tmp_path / "a", lambda tensors: tensors.clear())
    with pytest.raises(MismatchError, match="no LoRA factors at all"):
        match_names(load_adapter(folder), load_checkpoint(make_checkpoint("llama")).tensors)


def test_names_without_the_wrapper_are_found(make_checkpoint: Make, make_adapter: Make) -> None:
    tensors = load_checkpoint(make_checkpoint("gpt2")).tensors
    bare = {name.removeprefix("transformer."): entry for name, entry in tensors.items()}
    matched = match_names(load_adapter(make_adapter("gpt2")), bare)
    assert "h.0.attn.c_attn.weight" in matched
    assert all(bare[name].shape == factors.shape and factors.transposed for name, factors in matched.items())


@pytest.mark.parametrize("saved", [True, False])
def test_square_weights_follow_the_others_whatever_the_config_says(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, saved: bool
) -> None:
    # PEFT decides layer by layer and saves the value of the last one, which may be a plain linear layer.
    for kind, transposed in (("gpt2", True), ("llama", False)):
        adapter = load_adapter(edit(make_adapter(kind), tmp_path / kind, fan_in_fan_out=saved))
        matched = match_names(adapter, load_checkpoint(make_checkpoint(kind)).tensors)
        assert {factors.transposed for factors in matched.values()} == {transposed}


def test_square_weights_alone_follow_the_config(make_checkpoint: Make, make_adapter: Make, tmp_path: Path) -> None:
    tensors = load_checkpoint(make_checkpoint("llama")).tensors
    folder = make_adapter("llama", target_modules=["q_proj"])
    for saved in (True, False):
        adapter = load_adapter(edit(folder, tmp_path / str(saved), fan_in_fan_out=saved))
        assert {factors.transposed for factors in match_names(adapter, tensors).values()} == {saved}


def test_square_weights_among_both_orientations_are_refused(make_checkpoint: Make, make_adapter: Make) -> None:
    tensors = load_checkpoint(make_checkpoint("llama")).tensors
    up = "model.layers.0.mlp.up_proj.weight"
    mixed = tensors | {up: replace(tensors[up], shape=tensors[up].shape[::-1])}
    with pytest.raises(MismatchError, match=rf"{Q}: square, among both"):
        match_names(load_adapter(make_adapter("llama")), mixed)
