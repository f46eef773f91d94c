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

from msa_lite.errors import MismatchError, UsageError
from msa_lite.io.weights.adapter import ADAPTER_FILE
from msa_lite.io.weights.blocks import Files
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.merger import merge, merge_adapters
from msa_lite.merger.checks import memory
from msa_lite.merger.vectors.vector import load_vector
from tests.support.merges import Adapter, write_checkpoint
from tests.support.models import load, save_adapter

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


# Merged folders as transformers loads them, against PEFT's own merge.


def load_model(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def merge_with_peft(model: Any, adapter: Path, strength: float, scratch: Path) -> Any:
    """PEFT's own fp32 merge of an adapter whose B is multiplied by `strength`."""
    from peft import PeftModel

    shutil.copytree(adapter, scratch)
    factors = load_file(adapter / "adapter_model.safetensors")
    scaled = {name: t * strength if "lora_B" in name else t for name, t in factors.items()}
    save_file(scaled, scratch / "adapter_model.safetensors", {"format": "pt"})
    return PeftModel.from_pretrained(model, scratch).merge_and_unload()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None]).logits


def test_a_tied_model_stays_tied_and_answers_as_pefts_does(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    target, adapter = make_checkpoint("llama", shard="40KB"), make_adapter("llama")
    merge(str(target), tmp_path / "out", forget=str(adapter))
    assert "lm_head.weight" not in load_weights(tmp_path / "out")
    ours = load_model(tmp_path / "out")
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    peft = merge_with_peft(load_model(target), adapter, -1.0, tmp_path / "scaled")
    assert torch.allclose(logits(ours), logits(peft), atol=1e-5)
    assert not torch.allclose(logits(ours), logits(load_model(target)), atol=1e-2)


# Adapters on stacked experts, as PEFT writes them: merged, and written as one adapter, against PEFT in float64.


STACKS = ["gate_up_proj", "down_proj"]
OTHERS = ["deepseek_v3", "glm4_moe", "qwen3_next", "olmoe", "minimax", "minimax_m2", "ernie4_5_moe", "jamba"]
FAMILIES = [
    "mixtral", "qwen3_moe", "gpt_oss", "llama4", "granitemoe", "phimoe",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS),
]  # fmt: skip
FORGET, RETAIN = 0.75, 0.5


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t.double() for file in folder.glob("model*.safetensors") for n, t in load_file(file).items()}


def adapt(base: Path, out: Path, seed: int, rank: int, **config: Any) -> Path:
    """An adapter of random factors on all linear layers and all experts; beside it the model that PEFT merges."""
    from peft import PeftModel

    save_adapter(out, load(base)[0], seed, r=rank, lora_alpha=3 * rank, target_parameters=STACKS, **config)
    model = PeftModel.from_pretrained(load(base)[0], out).double()
    model.merge_and_unload().save_pretrained(out.with_suffix(".merged"))
    return out


@pytest.mark.parametrize("kind", FAMILIES)
def test_adapters_on_experts_change_what_peft_changes(
    kind: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    base = make_checkpoint(kind)
    before, strengths = read(base), {"forget": -FORGET, "retain": RETAIN}
    expected = {name: value.clone() for name, value in before.items()}
    for seed, (name, weight) in enumerate(strengths.items()):
        adapt(base, tmp_path / name, seed, rank=4 - seed, use_rslora=bool(seed))
        for key, value in read(tmp_path / f"{name}.merged").items():
            expected[key] += weight * (value - before[key])
    experts = [name for name in expected if "expert" in name or "_linear" in name]
    assert experts
    assert not any(
        expected[name].equal(before[name]) for name in experts if "bias" not in name and "shared" not in name
    )
    vectors = {"forget": str(tmp_path / "forget"), "retain": str(tmp_path / "retain")}
    merge(str(base), tmp_path / "model", **vectors, alpha=FORGET, beta=RETAIN, dtype="float32")
    merged = read(tmp_path / "model")
    merge_adapters(str(base), tmp_path / "adapter", **vectors, alpha=FORGET, beta=RETAIN)
    model = PeftModel.from_pretrained(load(base)[0], tmp_path / "adapter").double()
    model.merge_and_unload().save_pretrained(tmp_path / "both")
    by_adapter = read(tmp_path / "both")
    for name, value in expected.items():
        assert torch.allclose(merged[name], value, rtol=2e-7, atol=3e-8), name
        assert torch.allclose(by_adapter[name], value, rtol=1e-6, atol=1e-8), name


def test_a_rank_for_the_merged_adapter_cuts_each_expert_on_its_own(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    base = make_checkpoint("qwen3_moe")
    adapt(base, tmp_path / "forget", 0, rank=4)
    merged = merge_adapters(str(base), tmp_path / "adapter", forget=str(tmp_path / "forget"), max_rank=2)
    assert 0 < merged.truncation_loss < 1
    target = load_checkpoint(base)
    whole, cut = (load_vector(tmp_path / name, target, None).deltas for name in ("forget", "adapter"))
    lost = total = 0.0
    for name, delta in whole.items():
        loaded = [d.load(Files(), np.float64) for d in (delta, cut[name])]
        full, kept = (part.left @ part.right for part in loaded)  # type: ignore[attr-defined]
        lost += float(((full + kept) ** 2).sum())
        total += float((full**2).sum())
    assert merged.truncation_loss == pytest.approx((lost / total) ** 0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_local_experts": 3}, r"experts.gate_up_proj: A is \(32, 32\), B is \(96, 32\), expected \(24, 32\)"),
        ({"intermediate_size": 40}, r"experts.down_proj: A is \(16, 48\), B is \(32, 16\), expected \(16, 40\)"),
    ],
)
def test_an_adapter_on_other_experts_is_refused(
    change: dict[str, int], says: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    adapter = adapt(make_checkpoint("mixtral"), tmp_path / "forget", 0, rank=4)
    with pytest.raises(MismatchError, match=says):
        merge(str(make_checkpoint("mixtral", **change)), tmp_path / "out", forget=str(adapter))
    assert not (tmp_path / "out").exists()


def test_half_the_factors_of_a_layer_are_refused(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    base = make_checkpoint("qwen3_moe")
    adapter = adapt(base, tmp_path / "forget", 0, rank=4)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "base_layer" not in name}, file)
    with pytest.raises(MismatchError, match="experts: 1 pairs of factors, for 2 parameters"):
        merge(str(base), tmp_path / "out", forget=str(adapter))
