"""Merged folders as transformers loads them, against PEFT's own merge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from msa_lite.io.finished.seal import verify_folder
from msa_lite.merger import merge
from tests.support.models import load_weights

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
