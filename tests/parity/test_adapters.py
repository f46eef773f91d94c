"""Every kind of PEFT adapter: T − α (PEFT(P) − P) + β (PEFT(P) − P) in fp64, where P is the prior it was tuned from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from msa_lite.errors import UsageError
from msa_lite.io.weights.adapter import ADAPTER_FILE
from msa_lite.merger import merge
from msa_lite.merger.checks import memory
from tests.support.merges import Adapter, write_checkpoint

Make = Callable[..., Path]
Arrays = dict[str, np.ndarray]
ALPHA, BETA = 0.7, 0.3
PREFIX = "base_model.model."
UNTIED = {"tie_word_embeddings": False}
ATTENTION = ["q_proj", "k_proj", "v_proj"]

# name: (model, changes of its config, LoraConfig, whether the prior is needed)
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "plain": ("llama", {}, {}, False),
    "rslora": ("llama", {}, {"use_rslora": True, "lora_alpha": 3}, False),
    "patterns": (
        "qwen2",
        {},
        {
            "use_rslora": True,
            # The first key counts, in the order of the saved file, which PEFT sorts.
            "rank_pattern": {"(q|v)_proj": 3, "layers.1.*k_proj": 6, "up_proj": 2, "v_proj": 5},
            "alpha_pattern": {"(up|down)_proj": 5, "k_proj": 30, "layers.0.self_attn.(k|v)_proj": 1},
        },
        False,
    ),
    "Conv1D": ("gpt2", {}, {"rank_pattern": {"c_proj": 2}, "alpha_pattern": {"mlp.c_fc": 5}}, False),
    "square Conv1D alone": ("gpt2", {}, {"target_modules": r".*attn\.c_proj"}, False),
    "square Conv1D and a linear head": ("gpt2", UNTIED, {"target_modules": ["attn.c_proj", "lm_head"]}, False),
    "embeddings": ("llama", UNTIED, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, False),
    "lora_bias": ("qwen2", {}, {"target_modules": ATTENTION, "lora_bias": True, "lora_alpha": 3}, False),
    "Conv1D lora_bias": ("gpt2", {}, {"lora_bias": True}, False),
    "modules_to_save": ("qwen2", {}, {"modules_to_save": ["norm", "lm_head", "embed_tokens"]}, True),
    "a whole block saved": ("llama", {}, {"target_modules": ATTENTION, "modules_to_save": ["layers.1.mlp"]}, True),
    "bias all": ("qwen2", {}, {"bias": "all"}, True),
    "bias lora_only": ("qwen2", {}, {"target_modules": ["q_proj", "up_proj"], "bias": "lora_only"}, True),
    "Conv1D bias all": ("gpt2", {}, {"bias": "all"}, True),
    "DoRA": ("llama", {}, {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}}, True),
    "tokens": ("qwen2", {}, {"trainable_token_indices": [250, 3, 7]}, True),
    "tokens of a tied model": ("llama", {}, {"trainable_token_indices": [250, 3, 7]}, True),
    "tokens of a tied model, twice": (
        "llama",
        {},
        {"trainable_token_indices": {"embed_tokens": [9, 8], "lm_head": [9, 8]}},
        True,
    ),
    "tokens of each": ("qwen2", {}, {"trainable_token_indices": {"embed_tokens": [9, 8], "lm_head": [5]}}, True),
    "all at once": (
        "qwen2",
        {},
        {
            "use_dora": True,
            "bias": "all",
            "modules_to_save": ["norm", "lm_head"],
            "trainable_token_indices": [0, 299],
        },
        True,
    ),
}


def load_weights(folder: Path) -> Arrays:
    """All tensors of a checkpoint in fp64."""
    paths = sorted(folder.glob("*.safetensors"))
    return {name: t.double().numpy() for path in paths for name, t in load_file(path).items()}


@cache
def peft_delta(prior: Path, adapter: Path) -> Arrays:
    """PEFT's merge into the prior minus the prior, all of it in fp64."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(prior, dtype=torch.float64)
    peft = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).double()
    merged = peft.merge_and_unload().state_dict()
    return {name: merged[name].numpy() - old for name, old in load_weights(prior).items()}


def wanted_weights(target: Path, prior: Path, forget: Path, retain: Path) -> Arrays:
    minus, plus = peft_delta(prior, forget), peft_delta(prior, retain)
    return {name: w - ALPHA * minus[name] + BETA * plus[name] for name, w in load_weights(target).items()}


def assert_rounded(ours: Arrays, wanted: Arrays, stored: str, exact: bool) -> None:
    """Assert that each value is the nearest one of its dtype, or within some fp32 roundings of that.

    Half a unit in the last place, plus 1e-14 for the order of fp64 sums, or 16 fp32 roundings at the size of 0.1.
    """
    assert ours.keys() == wanted.keys()
    digits = {"float32": 24, "bfloat16": 8}[stored]
    for name, value in wanted.items():
        half = 2.0 ** (np.frexp(value)[1] - digits - 1)
        slack = 1e-14 if exact else 16 * 2.0**-24 * np.maximum(np.abs(value), 0.1)
        assert (np.abs(ours[name] - value) <= half + slack).all(), name


@pytest.mark.parametrize(("stored", "exact"), [("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize("name", KINDS)
def test_forget_and_retain_are_what_peft_changes_in_the_prior(
    make_checkpoint: Make,
    make_adapter: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    adapter_warnings: list[str],
    name: str,
    stored: str,
    exact: bool,
) -> None:
    monkeypatch.setattr(memory, "BLOCK", 1000)  # several blocks of rows even for these small tensors
    kind, changes, config, _ = KINDS[name]
    target, prior = make_checkpoint(kind, 1, stored, **changes), make_checkpoint(kind, 0, **changes)
    forget, retain = (make_adapter(kind, seed, model=changes, **config) for seed in (1, 2))
    options = {"forget": str(forget), "alpha": ALPHA, "retain": str(retain), "beta": BETA}
    merged = merge(str(target), tmp_path / "out", **options, prior=str(prior), exact=exact)
    before, ours = load_weights(target), load_weights(tmp_path / "out")
    assert_rounded(ours, wanted_weights(target, prior, forget, retain), stored, exact)
    moved = {n for n, change in peft_delta(prior, forget).items() if change.any()}
    assert {n for n in before if (ours[n] != before[n]).any()} == moved
    assert merged.tensors_touched == len(moved)
    assert not adapter_warnings  # of parts that are named and missing


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fp32"])
@pytest.mark.parametrize(
    ("kind", "changes", "forget", "retain"),
    [
        ("qwen2", {}, KINDS["all at once"][2], KINDS["patterns"][2]),
        ("qwen2", {}, KINDS["lora_bias"][2], KINDS["bias all"][2]),
        ("llama", UNTIED, KINDS["embeddings"][2], {"modules_to_save": ["embed_tokens", "lm_head"]}),
        ("llama", UNTIED, {"trainable_token_indices": [299, 4]}, KINDS["embeddings"][2]),
        ("gpt2", {}, KINDS["Conv1D"][2], {"target_modules": ["c_attn"], "modules_to_save": ["mlp"]}),
    ],
)
def test_a_tensor_may_be_changed_by_one_kind_in_each_vector(
    make_checkpoint: Make,
    make_adapter: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    changes: dict[str, Any],
    forget: dict[str, Any],
    retain: dict[str, Any],
    exact: bool,
) -> None:
    monkeypatch.setattr(memory, "BLOCK", 1000)
    target, prior = make_checkpoint(kind, 1, **changes), make_checkpoint(kind, 0, **changes)
    folders = [make_adapter(kind, seed, model=changes, **config) for seed, config in ((1, forget), (2, retain))]
    options = {"forget": str(folders[0]), "alpha": ALPHA, "retain": str(folders[1]), "beta": BETA}
    merge(str(target), tmp_path / "out", **options, prior=str(prior), exact=exact)
    assert_rounded(load_weights(tmp_path / "out"), wanted_weights(target, prior, *folders), "float32", exact)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind[3]])
def test_products_and_shifts_of_them_need_no_prior(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, name: str
) -> None:
    kind, changes, config, _ = KINDS[name]
    target = make_checkpoint(kind, **changes)
    forget, retain = (make_adapter(kind, seed, model=changes, **config) for seed in (1, 2))
    options = {"forget": str(forget), "alpha": ALPHA, "retain": str(retain), "beta": BETA, "exact": True}
    merge(str(target), tmp_path / "out", **options)
    assert_rounded(load_weights(tmp_path / "out"), wanted_weights(target, target, forget, retain), "float32", True)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("modules_to_save", [r"model\.norm\.weight: a full new value", r"lm_head\.weight: a full new value"]),
        ("bias lora_only", [r"model\.layers\.1\.self_attn\.q_proj\.bias: a full new value"]),
        ("Conv1D bias all", [r"transformer\.h\.0\.attn\.c_attn\.bias: a full", r"… and 3 more"]),
        ("DoRA", [r"model\.layers\.0\.self_attn\.q_proj\.weight: DoRA"]),
        ("tokens", [r"model\.embed_tokens\.weight: new token rows"]),
    ],
)
def test_what_only_the_prior_explains_is_listed_where_it_is_missing(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, name: str, says: list[str]
) -> None:
    kind, changes, config, _ = KINDS[name]
    target, adapter = make_checkpoint(kind, **changes), make_adapter(kind, model=changes, **config)
    with pytest.raises(UsageError, match=r"can only be computed with the prior .*--prior") as caught:
        merge(str(target), tmp_path / "out", forget=str(adapter))
    for line in says:
        assert caught.match(line)
    assert list(tmp_path.iterdir()) == []


def test_experts_that_are_stored_one_by_one_are_merged_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "BLOCK", 1000)
    rng = np.random.default_rng(0)
    block, sizes = "model.layers.0.block_sparse_moe", {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)}
    shapes = {f"{block}.experts.{number}.{w}": size for number in range(3) for w, size in sizes.items()}
    shapes |= {"model.layers.0.self_attn.q_proj": (32, 32), f"{block}.gate": (3, 32)}
    weights = {f"{m}.weight": rng.normal(0, 0.2, s).astype(np.float32) for m, s in shapes.items()}
    target = write_checkpoint(tmp_path / "target", weights)
    (target / "config.json").write_text(json.dumps({"model_type": "mixtral", **UNTIED}))
    factors = {}
    for number, (module, (out, into)) in enumerate(shapes.items()):
        rank = 2 + number % 2
        a, b = (rng.normal(0, 0.1, s).astype(np.float32) for s in ((rank, into), (out, rank)))
        factors[module] = a, b
    adapter = Adapter(factors, lora_alpha=6)
    wanted = {f"{m}.weight": weights[f"{m}.weight"].astype(np.float64) - ALPHA * adapter.delta(m) for m in shapes}
    merge(str(target), tmp_path / "out", forget=str(adapter.write(tmp_path / "adapter")), alpha=ALPHA, exact=True)
    assert_rounded(load_weights(tmp_path / "out"), wanted, "float32", True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_an_adapter_stored_in_another_dtype_counts_with_its_stored_values(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path, dtype: str
) -> None:
    kind, changes, config, _ = KINDS["all at once"]
    target, prior = make_checkpoint(kind, 1, **changes), make_checkpoint(kind, 0, **changes)
    adapter = tmp_path / "adapter"
    shutil.copytree(make_adapter(kind, model=changes, **config), adapter)
    tensors = load_file(adapter / ADAPTER_FILE)
    save_file({n: t.to(getattr(torch, dtype)) for n, t in tensors.items()}, adapter / ADAPTER_FILE)
    merge(str(target), tmp_path / "out", forget=str(adapter), prior=str(prior), exact=True)
    delta = peft_delta(prior, adapter)
    wanted = {name: w - delta[name] for name, w in load_weights(target).items()}
    assert_rounded(load_weights(tmp_path / "out"), wanted, "float32", exact=True)
