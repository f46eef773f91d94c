"""Merged folders as transformers loads them, against PEFT's own merge."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from msa_lite.errors import MismatchError
from msa_lite.io.weights.blocks import Files
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.merger import merge, merge_adapters
from msa_lite.merger.vectors.vector import load_vector
from tests.support.models import load, load_weights, save_adapter

Make = Callable[..., Path]


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
