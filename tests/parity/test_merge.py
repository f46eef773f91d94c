"""Merged values against PEFT's merge and against exact arithmetic; merged folders against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from msa_lite.io.finished.seal import verify_folder
from msa_lite.merger import merge
from msa_lite.merger.checks import memory
from tests.support.merges import nearest

Make = Callable[..., Path]


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as they are stored."""
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


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


def save_model(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_weights(folder)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None]).logits


def assert_near(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], roundings: int) -> None:
    """Equal up to some fp32 roundings at the size of the larger of the weight and 0.1."""
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        unit = value.abs().clamp(min=0.1) * 2.0**-23
        assert ((ours[name] - value).abs() <= roundings * unit).all(), name


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float32", "same"), ("bfloat16", "same"), ("float16", "same"), ("bfloat16", "float32"), ("float32", "bfloat16")],
)
def test_full_checkpoints_are_fp64_arithmetic_rounded_once(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, dtype: str
) -> None:
    kind = "qwen2"
    monkeypatch.setattr(memory, "BLOCK", 125)
    target, prior = make_checkpoint(kind, 0, stored), make_checkpoint(kind, 1, "bfloat16")
    forget, retain = make_checkpoint(kind, 2), make_checkpoint(kind, 3, "float16")
    options = {
        "forget": str(forget),
        "alpha": 0.7,
        "retain": str(retain),
        "beta": 0.3,
        "prior": str(prior),
        "exact": True,
    }
    merge(str(target), tmp_path / "out", **options, dtype=dtype)
    w, w0, w1, w2 = (
        {n: t.double().numpy() for n, t in load_weights(f).items()} for f in (target, prior, forget, retain)
    )
    kinds = {"float32": np.dtype("f4"), "float16": np.dtype("f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
    out_kind = kinds[stored if dtype == "same" else dtype]
    ours = load_weights(tmp_path / "out")
    assert ours.keys() == w.keys()
    for name, t in ours.items():
        exact = w[name] - 0.7 * (w1[name] - w0[name]) + 0.3 * (w2[name] - w0[name])
        bits = t.view(torch.int16 if out_kind.itemsize == 2 else torch.int32).numpy()
        assert np.array_equal(bits.view(f"u{out_kind.itemsize}"), nearest(exact, out_kind)), name


def test_a_forget_adapter_and_a_full_retain_checkpoint_go_together(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    target, prior, tuned = (make_checkpoint("llama", seed) for seed in (0, 1, 2))
    adapter = make_adapter("llama")
    options = {"forget": str(adapter), "alpha": 1.0, "retain": str(tuned), "beta": 0.25, "prior": str(prior)}
    merge(str(target), tmp_path / "out", **options)
    peft = save_model(merge_with_peft(load_model(target), adapter, -1.0, tmp_path / "scaled"), tmp_path / "peft")
    old, new = load_weights(prior), load_weights(tuned)
    wanted = {name: w + 0.25 * (new[name] - old[name]) for name, w in peft.items()}
    assert_near(load_weights(tmp_path / "out"), wanted, roundings=4)


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


def test_a_bfloat16_target_written_in_float32_is_loaded_in_float32(
    make_checkpoint: Make, make_adapter: Make, tmp_path: Path
) -> None:
    target, adapter = make_checkpoint("llama", dtype="bfloat16", shard="40KB"), make_adapter("llama")
    merge(str(target), tmp_path / "out", forget=str(adapter), dtype="float32")
    out = load_weights(tmp_path / "out")
    assert {t.dtype for t in out.values()} == {torch.float32}
    old, new = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (target, tmp_path / "out"))
    assert new["metadata"]["total_size"] == sum(t.nbytes for t in out.values())
    assert new["weight_map"] == old["weight_map"]
    ours = load_model(tmp_path / "out")
    assert ours.dtype == torch.float32
    peft = merge_with_peft(load_model(target, dtype="float32"), adapter, -1.0, tmp_path / "scaled")
    assert torch.allclose(logits(ours), logits(peft), atol=1e-5)
    assert verify_folder(tmp_path / "out") == []
