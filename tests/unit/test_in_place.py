"""A loaded model is tuned, looked at on the way, and put back bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msa_lite.errors import StageError, UsageError
from msa_lite.io.models.heads import note_precision
from msa_lite.io.models.loading import attach_adapter
from msa_lite.train import FitSettings, check_tunable, fit_vector, roomy_mode, tune
from tests.support.fits import PAD, ROWS, SETTINGS, compute_in_bf16, weights
from tests.support.models import save_adapter, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("quick_fits")
FULL = replace(SETTINGS, mode="full", learning_rate=1e-3)


def traces(model: Any) -> dict[str, Any]:
    """All that a model is made of: weights by name with their flags, and the attributes of its modules."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {
        "weights": {name: (value.detach().clone(), value.requires_grad) for name, value in named.items()},
        "gradients": [name for name, value in model.named_parameters() if value.grad is not None],
        "modules": {(name, key) for name, module in model.named_modules() for key in vars(module)},
        "kinds": [type(module) for module in model.modules()],
        "training": model.training,
        "cache": model.config.use_cache,
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "checkpointing": any(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
        "adapters": model.active_adapters if hasattr(model, "peft_config") else None,
    }


@contextmanager
def without_a_trace(model: Any) -> Iterator[None]:
    before = traces(model)
    yield
    after = traces(model)
    stored, now = before.pop("weights"), after.pop("weights")
    assert after.pop("modules") ^ before.pop("modules") == set()
    assert after == before
    assert now.keys() == stored.keys()
    for name, (value, flag) in stored.items():
        assert now[name][0].dtype == value.dtype
        assert torch.equal(now[name][0], value), name
        assert now[name][1] == flag, name


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 15)[None]).logits.clone()


def curve(model: Any, settings: FitSettings, steps: tuple[int, ...] = (2, 4), **changes: Any) -> list[torch.Tensor]:
    """The logits at some steps of a tuning."""
    seen: list[torch.Tensor] = []

    def look(step: int) -> None:
        assert step == steps[len(seen)]
        assert not model.training
        seen.append(logits(model))

    tune(model, ROWS, look, pad=PAD, settings=settings, steps=steps, **changes)
    return seen


def adapted(folder: Path) -> Any:
    """A model under an adapter of two of its seven kinds of linear layers."""
    save_adapter(folder, tiny_model("llama"), target_modules=["q_proj", "down_proj"])
    return attach_adapter(tiny_model("llama"), folder).eval()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama", FULL), ("gpt2", SETTINGS), ("adapted", SETTINGS), ("adapted", FULL), ("bf16", SETTINGS), ("bf16", FULL)],
)
def test_a_model_is_tuned_and_put_back(kind: str, settings: FitSettings, tmp_path: Path) -> None:
    model = adapted(tmp_path) if kind == "adapted" else tiny_model("llama" if kind == "bf16" else kind).eval()
    if kind == "bf16":
        model.to(torch.bfloat16)
    start = logits(model)
    with without_a_trace(model):
        first, last = curve(model, settings)
    assert not torch.equal(first, start)
    assert not torch.equal(last, first)
    assert torch.equal(logits(model), start)


@pytest.mark.parametrize("settings", [SETTINGS, FULL], ids=["lora", "full"])
def test_the_same_tuning_gives_the_same_curve_and_another_seed_another(settings: FitSettings) -> None:
    model = tiny_model("llama").eval()
    first, again = curve(model, settings), curve(model, settings)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(curve(model, replace(settings, seed=1))[-1], first[-1])
    alone = curve(model, settings, (4,))  # whoever looks on the way changes nothing
    assert torch.equal(alone[0], first[-1])


@pytest.mark.parametrize("settings", [replace(SETTINGS, epochs=2), replace(FULL, epochs=2)], ids=["lora", "full"])
def test_a_loaded_model_learns_what_a_fit_of_its_checkpoint_learns(
    settings: FitSettings, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    prior = make_checkpoint("llama")
    out = fit_vector(str(prior), ROWS, tmp_path / "out", tokenizer=tiny_tokenizer(), settings=settings)
    fitted, tuned, model = weights(out), {}, tiny_model("llama").eval()

    def look(step: int) -> None:
        tuned.update({name: value.detach().clone() for name, value in model.named_parameters()})

    tune(model, ROWS, look, pad=PAD, settings=settings, steps=(4,))
    for name, value in fitted.items():
        own = name.removeprefix("base_model.model.").replace(".weight", ".tuned.weight") if "lora_" in name else name
        assert torch.equal(tuned[own], value), name


@pytest.mark.parametrize(("where", "settings"), [("look", SETTINGS), ("step", FULL), ("memory", SETTINGS)])
def test_a_model_is_put_back_whatever_is_raised(
    where: str, settings: FitSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama").eval()
    fault = {"look": KeyboardInterrupt(), "step": ValueError(), "memory": RuntimeError("CUDA out of memory.")}[where]

    def fail(*args: Any, **keywords: Any) -> None:
        raise fault

    if where != "look":
        monkeypatch.setattr("msa_lite.train.objectives.plain.PlainLoss.step", fail)
    expected = StageError if where == "memory" else type(fault)
    with without_a_trace(model), pytest.raises(expected, match="more of it" if where == "memory" else None):
        tune(model, ROWS, fail, pad=PAD, settings=settings, steps=(1,))


def test_in_bf16_nothing_of_the_trainers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_bf16(monkeypatch)
    for settings in (SETTINGS, FULL):
        model = note_precision(tiny_model("llama").to(torch.bfloat16).eval(), "bf16")
        with without_a_trace(model):
            first, last = curve(model, settings)
        assert not torch.equal(last, first)


@pytest.mark.parametrize(
    ("compute", "dtype", "mode"),
    [("bf16", torch.bfloat16, "lora"), ("bf16", torch.bfloat16, "full"), ("fp32", torch.float32, "lora")],
)
def test_the_precision_reaches_the_products(
    compute: Any, dtype: torch.dtype, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msa_lite.io.models.heads._cpu_has_bf16", lambda: True)
    model, seen = tiny_model("llama").eval(), set[torch.dtype]()
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    tune(model, ROWS, lambda step: None, pad=PAD, settings=replace(SETTINGS, mode=mode, compute=compute), steps=(1,))
    hook.remove()
    assert seen == {dtype}


def test_checkpointing_is_switched_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from msa_lite.train.fit import in_place

    seen: list[bool] = []
    faults = iter(["out of memory", None])  # the first rung does not fit
    monkeypatch.setattr(in_place, "step_fault", lambda *args: next(faults))
    model = tiny_model("llama").eval()
    with without_a_trace(model):
        tune(
            model, ROWS, lambda step: seen.append(model.model.layers[0].gradient_checkpointing), pad=PAD,
            settings=SETTINGS, steps=(1,),
        )  # fmt: skip
    assert seen == [True]


def test_models_that_cannot_be_tuned_are_refused() -> None:
    with pytest.raises(UsageError, match="stored quantised"):
        check_tunable(SimpleNamespace(is_quantized=True))
    with pytest.raises(UsageError, match="does not fit into the GPU's memory"):
        check_tunable(SimpleNamespace(msa_lite_streams=True))


@pytest.mark.parametrize(("gigabytes", "mode"), [(1, "lora"), (100, "full")])
def test_all_weights_are_tuned_where_there_is_room(gigabytes: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msa_lite.train.fit.in_place.free_ram", lambda: gigabytes * 10**9)
    assert roomy_mode(10**8) == mode  # 2 GB with gradients and states
