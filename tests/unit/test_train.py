"""Fitting vectors: what is learnt, what is written, and what happens when it is cut short or goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import Example, Prompter, Row, Template, encode_qa
from msa_lite.errors import StageError, UsageError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.io.weights.adapter import load_adapter
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.train import FitSettings, fit_vector
from tests.support.fits import Killed, kill_at, read_log
from tests.support.models import tiny_tokenizer

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("quick_fits")
SETTINGS = FitSettings(lora_rank=4, lora_alpha=8, epochs=3, learning_rate=5e-3, batch_size=4, seed=0)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    rows = [Row(i, f"Where is {i}?", f"At {i * 7}.") for i in range(8)]
    return encode_qa(rows, Prompter.build(tiny_tokenizer(), "plain", Template()))


def fit_rows(prior: Path, rows: list[Example], out: Path, settings: FitSettings = SETTINGS, **more: Any) -> Path:
    return fit_vector(prior, rows, out, tokenizer=tiny_tokenizer(), settings=settings, **more)


@pytest.fixture(scope="module")
def whole(make_checkpoint: Make, examples: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fit that nothing disturbed. No test changes its files."""
    return fit_rows(make_checkpoint("llama"), examples, tmp_path_factory.mktemp("whole") / "v")


@pytest.mark.parametrize(
    ("kind", "mode"),
    # not GPT-2's Conv1D layers in 4 bits: bitsandbytes does not replace them
    [("llama", "lora"), ("llama", "qlora"), ("llama", "full"), ("gpt2", "lora"), ("gpt2", "full")],
)
def test_each_mode_learns_and_writes_a_complete_folder(
    mode: Any, kind: str, make_checkpoint: Make, examples: list[Example], tmp_path: Path
) -> None:
    settings = replace(SETTINGS, mode=mode)
    folder = fit_rows(make_checkpoint(kind), examples, tmp_path / "v", settings)
    log = read_log(folder)
    assert [line["step"] for line in log] == list(range(1, 7))
    assert log[-1]["loss"] < log[0]["loss"]
    assert verify_folder(folder) == []
    assert not (tmp_path / "v.partial").exists()
    if mode == "full":
        tensors = load_checkpoint(folder).tensors
        assert {entry.dtype for entry in tensors.values()} == {"F32"}
        assert tensors.keys() == load_checkpoint(make_checkpoint(kind)).tensors.keys()
    else:
        adapter = load_adapter(folder)
        assert {(m.a.dtype, m.b.dtype) for m in adapter.modules.values()} == {("F32", "F32")}
        assert len(adapter.modules) == {"llama": 14, "gpt2": 8}[kind]


def test_after_a_warm_up_counted_in_epochs_the_rate_falls_to_zero_or_is_constant(
    make_checkpoint: Make, examples: list[Example], whole: Path, tmp_path: Path
) -> None:
    # 8 rows in batches of 4: 2 steps an epoch, 1 warm-up epoch, 3 epochs. The rate of a step is logged after it.
    constant = fit_rows(make_checkpoint("llama"), examples, tmp_path / "v", replace(SETTINGS, schedule="constant"))
    rates = [[line["learning_rate"] / SETTINGS.learning_rate for line in read_log(f)] for f in (whole, constant)]
    assert rates == [pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25]), pytest.approx([0, 0.5, 1, 1, 1, 1])]
    recorded = [(load_manifest(folder) or {})["inputs"]["settings"] for folder in (whole, constant)]
    assert recorded[0] | {"schedule": "constant"} == recorded[1]


def test_an_adapters_vector_is_what_the_forward_pass_saw(
    make_checkpoint: Make, examples: list[Example], whole: Path, tmp_path: Path
) -> None:
    """Target + LoRA as PEFT runs it equals the merge with α subtracted from a target that is the prior."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from msa_lite import merge

    prior = make_checkpoint("llama")
    merged = merge(prior, tmp_path / "out", retain=str(whole), beta=1.0, alpha=0.0)
    ids = torch.tensor([examples[0].ids])
    with torch.inference_mode():
        ours = AutoModelForCausalLM.from_pretrained(merged.folder)(ids).logits
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(prior), whole)(ids).logits
        before = AutoModelForCausalLM.from_pretrained(prior)(ids).logits
    assert torch.allclose(ours, peft, atol=1e-5)
    assert not torch.allclose(ours, before, atol=1e-2)


def test_the_same_inputs_give_the_same_bytes_and_are_not_trained_twice(
    make_checkpoint: Make, examples: list[Example], whole: Path, tmp_path: Path
) -> None:
    calls: list[int] = []

    def fit(settings: FitSettings = SETTINGS) -> Path:
        calls.clear()
        options: dict[str, Any] = {"progress": lambda label, done, total: calls.append(done)}
        return fit_rows(make_checkpoint("llama"), examples, tmp_path / "v", settings, **options)

    fit()
    assert calls[-1] == 6
    for name in ("adapter_model.safetensors", "adapter_config.json", "train_log.jsonl", "manifest.json"):
        assert hash_file(tmp_path / "v" / name) == hash_file(whole / name)
    fit()
    assert calls == []
    fit(replace(SETTINGS, seed=1))
    assert calls[-1] == 6
    assert hash_file(tmp_path / "v/adapter_model.safetensors") != hash_file(whole / "adapter_model.safetensors")


@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(
    step: int, make_checkpoint: Make, examples: list[Example], whole: Path, tmp_path: Path
) -> None:
    prior, out = make_checkpoint("llama"), tmp_path / "cut"
    with pytest.raises(Killed):
        fit_rows(prior, examples, out, progress=kill_at(step))
    assert not out.exists()
    resumed = fit_rows(prior, examples, out)
    for name in ("adapter_model.safetensors", "train_log.jsonl"):
        assert hash_file(whole / name) == hash_file(resumed / name)


def test_unknown_target_modules_are_refused(make_checkpoint: Make, examples: list[Example], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"vector.lora.targets: .*no_such_layer"):
        fit_rows(make_checkpoint("llama"), examples, tmp_path / "v", replace(SETTINGS, lora_targets=("no_such_layer",)))


def test_a_single_row_that_does_not_fit_says_so(
    make_checkpoint: Make, examples: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import LlamaForCausalLM

    def no_memory(self: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(LlamaForCausalLM, "forward", no_memory)
    with pytest.raises(StageError, match="even with one row at a time"):
        fit_rows(make_checkpoint("llama"), examples, tmp_path / "v")
