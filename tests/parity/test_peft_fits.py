"""Whole fits: the losses are those of PEFT's forward passes over padded rows, step by step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from msa_lite.data import IGNORE, Example
from msa_lite.demo import make_smollm2
from msa_lite.errors import UsageError
from msa_lite.train import FitSettings, fit_vector
from msa_lite.train.memory import adapted, model
from msa_lite.train.objectives import plain
from tests.support.fits import SETTINGS, ragged_rows
from tests.support.models import tiny_tokenizer

ROWS = Path(__file__).parents[3] / "shared" / "data" / "tofu" / "forget01.json"


def losses(prior: Path, rows: Sequence[Example], out: Path, tokenizer: Any, settings: FitSettings) -> list[float]:
    folder = fit_vector(prior, rows, out, tokenizer=tokenizer, settings=settings)
    return [json.loads(line)["loss"] for line in (folder / "train_log.jsonl").read_text().splitlines()]


def both_ways(monkeypatch: pytest.MonkeyPatch, fit: Callable[[str], list[float]]) -> tuple[list[float], list[float]]:
    """Return the losses of our fit, and of the same with PEFT's layers and padded rows."""
    calls: list[str] = []
    function, _ = adapted._classes()
    apply = function.apply
    with monkeypatch.context() as patch:
        patch.setattr(function, "apply", lambda *values: (calls.append(""), apply(*values))[1])
        ours = fit("ours")
    assert calls
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(model, "speed_up", lambda value: value)
        patch.setattr(plain, "can_pack", lambda *values: False)
        patch.setattr(function, "apply", lambda *values: pytest.fail("PEFT's layers were replaced"))
        return ours, fit("theirs")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_fit_has_the_losses_of_pefts_layers(
    kind: str, make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    prior, rows, tokenizer = make_checkpoint(kind, **changes), ragged_rows(8, seed=1), tiny_tokenizer()
    targets = "all-linear" if kind != "gpt2" else ("lm_head", "c_attn")
    settings = replace(SETTINGS, lora_targets=targets)
    ours, theirs = both_ways(monkeypatch, lambda name: losses(prior, rows, tmp_path / name, tokenizer, settings))
    assert len(ours) == 6
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < ours[0]


@pytest.mark.slow
@pytest.mark.skipif(not ROWS.is_file(), reason="the rows of TOFU are not beside the repository")
def test_a_fit_of_a_real_model_has_the_losses_of_pefts_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        make_smollm2(tmp_path / "model")
    except UsageError as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = [_encode(json.loads(line), tokenizer) for line in ROWS.read_text("utf-8").splitlines()[:16]]
    settings = FitSettings(lora_rank=8, lora_alpha=16, epochs=2, warmup_steps=1, batch_size=8)
    ours, theirs = both_ways(
        monkeypatch, lambda name: losses(tmp_path / "model", rows, tmp_path / name, tokenizer, settings)
    )
    assert len(ours) == 4
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < ours[0]


def _encode(row: dict[str, str], tokenizer: Any) -> Example:
    start = tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"]
    answer = tokenizer(f" {row['answer']}{tokenizer.eos_token}")["input_ids"]
    return Example(0, start + answer, [IGNORE] * len(start) + answer)
