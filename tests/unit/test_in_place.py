"""A loaded model is tuned, looked at on the way, and put back bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msa_lite.errors import StageError, UsageError
from msa_lite.io.models import ends, streaming, transit
from msa_lite.io.models.heads import note_precision
from msa_lite.io.models.loading import attach_adapter
from msa_lite.io.models.transit import Transit
from msa_lite.train import FitSettings, check_tunable, fit_vector, roomy_mode, tune
from msa_lite.train.memory.model import load_trainable
from msa_lite.train.memory.rungs import Rung, can_stream
from msa_lite.train.objectives.held import HeldLoss
from tests.support.families import tiny_family
from tests.support.fits import PAD, ROWS, SETTINGS, assert_same_bits, compute_in_bf16, steps_at, weights
from tests.support.models import save_adapter, save_checkpoint, tiny_model, tiny_tokenizer

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


# Layers that wait in RAM: a fit's losses and gradients are those of weights that are on the device, bit for bit.


# Five layers: a step meets them upwards twice and downwards twice.
DEEP: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5, "tie_word_embeddings": False},
    "qwen2": {"num_hidden_layers": 5},
    "gpt2": {"n_layer": 5},
}


@pytest.fixture(scope="module")
def priors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("priors")
    made = {kind: save_checkpoint(folder / kind, tiny_model(kind, **sizes)) for kind, sizes in DEEP.items()}
    return made | {kind: save_checkpoint(folder / kind, tiny_family(kind)) for kind in ("qwen2_moe", "mamba")}


def load_aligned(folder: Path, settings: Any) -> Any:
    """A resident model whose weights lie as a device's allocator places them, which files do not. Sums depend on it."""
    model = load_trainable(folder, settings)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize(
    ("kind", "mode", "checkpointing"),
    [
        ("llama", "lora", False),
        ("llama", "lora", True),
        ("llama", "qlora", False),
        ("llama", "qlora", True),
        ("qwen2", "qlora", True),
        ("gpt2", "lora", True),
        ("gpt2", "qlora", True),
        ("qwen2_moe", "lora", True),
        ("mamba", "lora", True),
    ],
)
def test_losses_and_gradients_are_those_of_resident_layers(
    kind: str, mode: Any, checkpointing: bool, priors: dict[str, Path], tmp_path: Path
) -> None:
    settings, rung = replace(SETTINGS, mode=mode), Rung(2, checkpointing)
    streamed = replace(rung, layers_streamed=True)
    wanted = steps_at(load_aligned(priors[kind], settings), rung)
    assert_same_bits(steps_at(load_trainable(priors[kind], settings), streamed), wanted)
    assert_same_bits(steps_at(load_trainable(priors[kind], settings, spill=tmp_path), streamed), wanted)


@pytest.mark.parametrize(
    ("mode", "targets"), [("lora", "all-linear"), ("qlora", ("q_proj",)), ("qlora", ("gate_proj", "down_proj"))]
)
def test_a_held_fit_and_few_adapters_are_the_same_too(mode: Any, targets: Any, priors: dict[str, Path]) -> None:
    """The reference runs without gradients in between; without an adapter behind it, a 4-bit layer saves nothing."""
    settings = replace(SETTINGS, mode=mode, lora_targets=targets)
    both = [
        steps_at(load_aligned(priors["llama"], settings), rung, HeldLoss(ROWS, ROWS[::-1], 2.0, 0, 0))
        for rung in (Rung(2, True), Rung(2, True, layers_streamed=True))
    ]
    assert_same_bits(both[1], both[0])


def test_only_two_layers_are_on_the_device_and_nothing_of_an_earlier_one_is_left(
    priors: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer is spoilt before each copy; what is still computed with the former layer would be no number."""
    model, made = load_trainable(priors["llama"], SETTINGS), list[Any]()
    empty_bytes, copy = transit.empty_bytes, Transit._copy
    weights = {name: p.clone() for name, p in model.named_parameters() if ".layers." in name and not p.requires_grad}

    def noted(nbytes: int, *device: Any) -> Any:
        made.append(empty_bytes(nbytes, *device))
        return made[-1]

    def spoilt(self: Any, number: int) -> None:
        buffer = self._buffers[number % 2]
        buffer.fill_(255)  # NaN, whatever the dtype
        copy(self, number)
        order.append(number)

    order: list[int] = []
    monkeypatch.setattr(transit, "empty_bytes", noted)
    monkeypatch.setattr(Transit, "_copy", spoilt)
    losses, _ = steps_at(model, Rung(2, True, layers_streamed=True))
    assert all(loss == loss for loss in losses)
    *homes, first, second = made
    assert len(homes) == 5
    places = {
        name: next(i for i, buffer in enumerate((first, second)) if _is_within(p, buffer))
        for name, p in model.named_parameters()
        if name in weights
    }
    assert {int(name.split(".layers.")[1][0]) % 2 == place for name, place in places.items()} == {True}
    assert {0, 1, 2, 3, 4} == {*order}


def _is_within(tensor: Any, buffer: Any) -> bool:
    return 0 <= tensor.data_ptr() - buffer.data_ptr() < len(buffer)


def test_layers_beyond_ram_wait_in_files_that_leave_nothing(
    priors: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = steps_at(load_aligned(priors["llama"], SETTINGS), Rung(2))
    monkeypatch.setattr(streaming, "free_ram", lambda: 60_000)
    monkeypatch.setattr(transit, "_file_system", lambda folder: "ext4")
    places: list[Any] = []
    file_memory = transit.file_memory
    monkeypatch.setattr(transit, "file_memory", lambda *given: (places.append(given), file_memory(*given))[1])
    ours = steps_at(load_trainable(priors["llama"], SETTINGS, spill=tmp_path), Rung(2, layers_streamed=True))
    assert 0 < len(places) < 5
    assert_same_bits(ours, wanted)
    assert not [*tmp_path.iterdir()]


def test_a_disk_that_fills_up_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transit.os, "posix_fallocate", full)
    with pytest.raises(StageError, match=r"no room for layers .*No space left"):
        transit.file_memory(1000, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_head_in_blocks_of_rows_differs_by_rounding_alone(
    priors: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = steps_at(load_trainable(priors["llama"], SETTINGS), Rung(2, layers_streamed=True))
    monkeypatch.setattr(ends, "HEAD_BLOCK", 32 * 4 * 7)  # seven rows of 32 weights; the vocabulary is no multiple
    rows = ends.PassingRows(torch.randn(150, 32), torch.device("cpu"))
    assert torch.equal(torch.cat([block.clone() for _, block in rows.each()]), rows.matrix)
    losses, gradients = steps_at(
        load_trainable(priors["llama"], SETTINGS), Rung(2, layers_streamed=True, head_streamed=True)
    )
    assert losses == pytest.approx(wanted[0], rel=1e-6)
    for name, gradient in wanted[1].items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max())), name


@pytest.mark.parametrize(("change", "streams"), [("none", True), ("trained", False), ("shared", False)])
def test_layers_that_are_trained_or_share_weights_do_not_stream(change: str, streams: bool) -> None:
    model = tiny_model("llama", num_hidden_layers=3).requires_grad_(change == "trained")
    if change == "shared":
        model.model.layers[2].mlp = model.model.layers[0].mlp
    assert can_stream(model) is streams


@pytest.mark.parametrize(("results", "locked"), [([0, 0, 0], 3), ([0, 1], 1)])
def test_memory_is_locked_in_place_as_far_as_the_system_lets(
    results: Sequence[int], locked: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: Iterator[int] = iter(results)
    freed: list[int] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: next(answers), cudaHostUnregister=freed.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffers = [torch.empty(64, dtype=torch.uint8) for _ in range(3)]
    pinned = transit.pin(buffers)
    assert [each.data_ptr() for each in pinned] == [each.data_ptr() for each in buffers[:locked]]
    assert ("cannot be locked" in caplog.text) is (locked < 3)
    transit.unpin(pinned)
    assert freed == [each.data_ptr() for each in pinned]
