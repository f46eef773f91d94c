"""Fits beside PEFT: adapted layers compute what PEFT's compute, and whole fits have the losses of its passes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from transformers import AutoTokenizer

from msa_lite.data import IGNORE, Example
from msa_lite.demo import make_smollm2
from msa_lite.errors import UsageError
from msa_lite.train import FitSettings, fit_vector
from msa_lite.train.memory import adapted, model
from msa_lite.train.memory.adapted import speed_up
from msa_lite.train.memory.rungs import checkpoint_layers
from msa_lite.train.objectives import plain
from tests.support.families import tiny_family
from tests.support.fits import SETTINGS, ragged_rows, with_adapter
from tests.support.models import tiny_model, tiny_tokenizer

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


# Adapted linear layers as one function: they compute what PEFT's compute, and leave to PEFT what they do not.


IDS = torch.arange(36).view(3, 12) * 7 % 140 + 3


def run(model: Any) -> dict[str, torch.Tensor]:
    """Return the loss of a pass over some tokens, and all gradients."""
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return {"": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def farthest(values: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a tensor to the wanted one, relative to its size."""
    assert values.keys() == wanted.keys()
    return max(float((values[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Note the dtype of each layer that runs as one function."""
    noted: list[torch.dtype] = []
    function, _ = adapted._classes()
    apply = function.apply

    def noting(x: Any, *others: Any) -> Any:
        noted.append(x.dtype)
        return apply(x, *others)

    monkeypatch.setattr(function, "apply", noting)
    return noted


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2", "mixtral", "gpt2"])
def test_loss_and_gradients_are_those_of_peft(kind: str, checkpointing: bool, products: list[torch.dtype]) -> None:
    """qwen2 has biases, mixtral experts; gpt2's layers are convolutions, which PEFT runs, all but the head."""
    model = tiny_family(kind) if kind == "mixtral" else tiny_model("llama" if kind == "tied" else kind)
    if kind == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
    if kind == "mixtral":
        model.config._experts_implementation = "eager"  # the grouped products of others have no float64
    model = with_adapter(model, moved=True).train()
    for dropout in (m for m in model.modules() if isinstance(m, torch.nn.Dropout)):
        dropout.p = 0.0
    if checkpointing:
        checkpoint_layers(model)
    ours = speed_up(copy.deepcopy(model))
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        assert farthest(run(ours.to(dtype)), run(model.to(dtype))) < tolerance
        assert (dtype in products) == (kind != "gpt2")


def _biased(layer: Any) -> None:
    layer.lora_B["default"].bias = torch.nn.Parameter(torch.ones(layer.out_features))


def _hooked(layer: Any) -> None:
    layer.base_layer.register_forward_hook(lambda module, inputs, states: 2 * states)


def _dropping(layer: Any) -> None:
    layer.lora_dropout["default"] = torch.nn.Dropout(0.5)


CHANGES: dict[str, Callable[[Any], None]] = {
    "a bias": _biased,
    "a hook": _hooked,
    "dropout": _dropping,
    "disabled": lambda layer: layer.enable_adapters(False),
    "merged": lambda layer: layer.merge(),
    "two adapters": lambda layer: layer.set_adapter(["default", "second"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_layers_run_as_peft_runs_them(change: str, products: list[torch.dtype]) -> None:
    model = with_adapter(tiny_model("llama"), moved=True).train()
    config = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", init_lora_weights=False)
    model.add_adapter("second", config)
    model.set_adapter("default")
    layer = next(module for module in model.modules() if type(module) is Linear)
    CHANGES[change](layer)
    x = torch.randn(5, layer.in_features)
    torch.manual_seed(1)
    expected = layer(x)
    speed_up(model)
    torch.manual_seed(1)
    assert torch.equal(layer(x), expected)
    assert products == []


@pytest.mark.parametrize(
    ("of_inputs", "context"),
    [(torch.float64, nullcontext()), (torch.float32, torch.autocast("cpu", torch.bfloat16))],
    ids=["inputs of another dtype", "autocast"],
)
def test_casts_are_left_to_peft(
    of_inputs: torch.dtype, context: AbstractContextManager[Any], products: list[torch.dtype]
) -> None:
    model = with_adapter(tiny_model("llama"), moved=True)
    layer = next(module for module in speed_up(model).modules() if isinstance(module, Linear))
    with context:
        if of_inputs == torch.float64:
            layer.base_layer.double()
        assert layer(torch.randn(5, layer.in_features, dtype=of_inputs)).dtype in (torch.float64, torch.bfloat16)
    assert products == []


def test_dora_is_left_to_peft(products: list[torch.dtype]) -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", use_dora=True)
    model = get_peft_model(tiny_model("llama"), config)
    expected = run(model)
    assert farthest(run(speed_up(model)), expected) == 0
    assert products == []


def test_weights_may_move_between_the_passes_of_checkpointed_layers(products: list[torch.dtype]) -> None:
    """A weight's data is swapped in for each forward pass, that of the backward pass too, and is zero otherwise."""
    model = checkpointed = with_adapter(tiny_model("llama"), moved=True).train()
    checkpoint_layers(checkpointed)
    expected = run(model)
    for layer in speed_up(model).get_base_model().model.layers:
        frozen = [(p, p.data) for p in layer.parameters() if not p.requires_grad]

        def bring(module: Any, inputs: Any, frozen: Any = frozen) -> None:
            for parameter, value in frozen:
                parameter.data = value.clone()

        layer.register_forward_pre_hook(bring)
    assert farthest(run(model), expected) < 1e-6
    assert products
