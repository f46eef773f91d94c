"""The prediction of memory: by hand, against loaded models and the memory model, which counts what a step holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile
from transformers import MptConfig

from msa_lite.budget import speed as machine
from msa_lite.budget.needs import (
    CONTEXT,
    FitCase,
    Need,
    cache_bytes,
    fit_need,
    fit_rungs,
    score_need,
    static_bytes,
    stream_layers,
)
from msa_lite.budget.plan import Plan, Remedy, StageCost, disk_of, sum_seconds
from msa_lite.budget.shape import Shape, read_shape, shape_of_config
from msa_lite.budget.speed import Device, Machine, speed_of
from msa_lite.data import Example
from msa_lite.errors import FormatError
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.train.memory.rungs import Rung, ladder
from tests.support.models import save_checkpoint, tiny_model
from tests.tools import memory_model
from tests.tools.memory_model import GB, SHAPES, make_rows, peak

# Few layers, and widths of real models, so that a count takes a second.
SMALL = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
SMALL |= {"num_key_value_heads": 3, "num_hidden_layers": 2, "tie_word_embeddings": True}
LARGE = SHAPES["8B"] | {"num_hidden_layers": 3}
MIDDLE = SHAPES["1B"] | {"num_hidden_layers": 4}


def shape_of(sizes: dict[str, Any]) -> Shape:
    return shape_of_config({"model_type": "llama", "tie_word_embeddings": False, **sizes}, "model")


def test_the_sizes_of_published_models() -> None:
    assert shape_of(SHAPES["1B"]).weights == 1_235_814_400
    assert shape_of(SHAPES["8B"]).weights == 8_030_261_248
    assert shape_of(SHAPES["70B"]).weights == 70_553_706_496
    assert shape_of(SHAPES["8B"]).in_linear == 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "olmo2", "gpt2"])
def test_headers_tell_the_weights_and_adapters_of_a_loaded_model(kind: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model(kind)
    weights = model.num_parameters()
    shape = read_shape(load_checkpoint(save_checkpoint(tmp_path / kind, model)), kind)
    assert shape.weights == weights
    adapter = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained, _ = adapter.get_nb_trainable_parameters()
    assert sum(linear.adapter(4) for linear in shape.adapted("all-linear")) == trained
    assert (shape.rough is None) == (kind != "gpt2")


def test_modules_are_chosen_by_name_or_pattern() -> None:
    shape = shape_of(SMALL)
    assert [linear.name for linear in shape.adapted(["q_proj", "mlp.up_proj"])] == ["q_proj", "up_proj"]
    assert [linear.name for linear in shape.adapted(r".*\.(k_proj|v_proj)")] == ["k_proj", "v_proj"]


def test_what_the_config_lacks_is_told() -> None:
    with pytest.raises(FormatError, match="no num_hidden_layers"):
        shape_of_config({"hidden_size": 8, "vocab_size": 10}, "model")
    mpt = MptConfig(d_model=8, n_layers=2, n_heads=4, vocab_size=10)
    shape = shape_of_config(mpt.to_dict(), "model")
    assert (shape.hidden, shape.layers, shape.heads) == (8, 2, 4), "MPT has other words for them"


def test_static_bytes_by_hand() -> None:
    shape, trained = shape_of(SHAPES["8B"]), 83_886_080  # of rank 32 on all linear layers
    full = static_bytes(shape, FitCase("full", 512), Rung(1))
    assert (full["weights"], full["gradients"], full["optimizer"]) == tuple(n * shape.weights for n in (4, 4, 8))
    lora = static_bytes(shape, FitCase("lora", 512), Rung(1))
    assert (lora["weights"], lora["adapters"], lora["optimizer"]) == (2 * shape.weights, 4 * trained, 8 * trained)
    qlora = static_bytes(shape, FitCase("qlora", 512, eight_bit=True), Rung(1))
    assert qlora["optimizer"] == pytest.approx(2.03 * trained, rel=1e-2)
    assert qlora["weights"] == pytest.approx(4.127 / 8 * shape.in_linear + 2 * (shape.embedding + shape.head), rel=1e-3)
    halved = static_bytes(shape, FitCase("full", 512, shards=2), Rung(1))
    assert 2 * halved["optimizer"] == full["optimizer"]
    alone, shared = (fit_need(shape, FitCase("full", 512, shards=n), Rung(1, True)).nbytes for n in (1, 4))
    assert alone > 128e9
    assert shared < 80e9


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_more_rows_tokens_and_ranks_need_more_and_each_rung_less(mode: Any) -> None:
    shape, case = shape_of(LARGE), FitCase(mode, 512)
    sizes = [fit_need(shape, case, Rung(micro)).nbytes for micro in (1, 2, 4, 8)]
    lengths = [fit_need(shape, replace(case, longest=n), Rung(4)).nbytes for n in (64, 128, 512, 2048)]
    ranks = [fit_need(shape, replace(case, rank=rank), Rung(4)).nbytes for rank in (4, 32, 128)]
    assert sizes == sorted(set(sizes))
    assert lengths == sorted(set(lengths))
    assert (ranks == sorted(set(ranks))) == (mode != "full")
    steps = dict[tuple[bool, bool], list[int]]()
    for rung in fit_rungs(shape, case, [8, 4, 2, 1]):
        steps.setdefault((rung.layers_streamed, rung.head_streamed), []).append(fit_need(shape, case, rung).nbytes)
    assert all(needs == sorted(needs, reverse=True) and needs[-1] < needs[0] for needs in steps.values())
    lowest = [needs[-1] for needs in steps.values()]
    assert lowest == sorted(lowest, reverse=True)
    assert len(lowest) == (1 if mode == "full" else 3)


@pytest.mark.parametrize(("kind", "mode"), [("llama", "lora"), ("qwen2", "lora"), ("qwen2", "full")])
def test_the_rungs_are_those_of_the_fit(kind: str, mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind)
    for parameter in model.parameters():
        parameter.requires_grad_(mode == "full")
    shape = read_shape(load_checkpoint(save_checkpoint(tmp_path / kind, model)), kind)
    monkeypatch.setattr("msa_lite.train.memory.rungs.free_bytes", lambda: 1 << 40)
    assert fit_rungs(shape, FitCase(mode, 8), [4, 2, 1]) == ladder(model, [4, 2, 1])


def error_of(sizes: dict[str, Any], mode: Any, rung: Rung, tokens: int, passes: int = 2) -> float:
    """The error of a prediction: by how much it is above the memory model's count, as a share."""
    rows = [
        Example(i, [3 + i] * tokens, [3 + i] * tokens) for i in range(passes * rung.micro)
    ]  # they share no beginning
    case = FitCase(mode, tokens, eight_bit=mode == "qlora")
    predicted = fit_need(shape_of(sizes), case, rung, accumulates=passes > 1).nbytes - CONTEXT
    return predicted / peak(sizes, mode, rows, rung=rung).total - 1


@pytest.mark.parametrize(
    ("sizes", "mode", "rung"),
    [(MIDDLE, "lora", Rung(2)), (SMALL, "qlora", Rung(4, True)), (SMALL, "full", Rung(2, True))],
    ids=["lora", "qlora", "full"],
)
def test_a_prediction_is_near_the_memory_model(sizes: dict[str, Any], mode: Any, rung: Rung) -> None:
    assert abs(error_of(sizes, mode, rung, 256)) < 0.03


@pytest.mark.slow
def test_twenty_predictions_are_near_the_memory_model() -> None:
    cases = [
        (sizes, mode, Rung(micro, checkpointing), tokens)
        for sizes in (SMALL, MIDDLE, LARGE)
        for mode in ("lora", "qlora", "full")
        for checkpointing, micro, tokens in ((False, 4, 128), (True, 4, 512), (True, 1, 1024))
    ]
    errors = [abs(error_of(*case)) for case in cases]
    assert len(errors) >= 20
    assert sum(errors) / len(errors) < 0.03
    assert max(errors) < 0.06


def test_scores_need_the_weights_and_a_cache() -> None:
    shape = shape_of(SHAPES["8B"])
    assert cache_bytes(shape, 2) == 2 * 32 * 8 * 128 * 2
    plain = score_need(shape, 1000, 2.0, on_gpu=True)
    assert plain.parts["weights"] == 2 * shape.weights
    assert plain.parts["cache"] == 1000 * 131072
    assert score_need(shape, 1000, 2.0, on_gpu=True, four_bit=True).nbytes < plain.nbytes / 2


def test_layers_without_room_on_the_gpu_stream_from_memory() -> None:
    shape = shape_of(SHAPES["8B"])
    need = score_need(shape, 512, 2.0, on_gpu=True)
    small = Device("a GPU", 8_000_000_000)
    left, waiting = stream_layers(shape, need, small)
    layer, end = 2 * shape.in_linear // shape.layers, 2 * shape.head
    assert waiting % layer == 0
    assert left.nbytes == need.nbytes - waiting + 2 * layer  # one computes, the next one comes
    assert left.nbytes < small.nbytes
    tiny, both = stream_layers(shape, need, Device("a GPU", 3_000_000_000))
    assert (both - 2 * end) % layer == 0  # embedding and head wait as well
    assert tiny.nbytes < 3_000_000_000
    in_4_bits = score_need(shape, 512, 2.0, on_gpu=True, four_bit=True)
    assert stream_layers(shape, in_4_bits, Device("a GPU", 4_000_000_000), four_bit=True)[0].nbytes < 4_000_000_000
    for device in (
        Device("a GPU", 1_000_000_000),  # two layers find no room
        Device("a GPU", 24_000_000_000),
        Device("CPU", 8_000_000_000, is_gpu=False),
    ):
        assert stream_layers(shape, need, device) == (need, 0)


def seconds(name: str, *, is_gpu: bool = True, **work: float) -> float:
    """The seconds of work on a small model, beside those of a stage without any."""
    device = Device(name, 1, is_gpu=is_gpu)
    at = Machine(device, speed=speed_of(device)).seconds
    whole, empty = at(shape_of(SMALL), **work), at(shape_of(SMALL))  # type: ignore[arg-type]
    assert whole is not None
    assert empty is not None
    return whole - empty


def test_time_follows_work_and_device() -> None:
    assert seconds("NVIDIA H100", operations=2e15) == pytest.approx(2 * seconds("NVIDIA H100", operations=1e15))
    assert seconds("NVIDIA H100", operations=1e15) < seconds("Some GPU", operations=1e15) / 20
    assert seconds("NVIDIA H100", passes=5) > 0 == seconds("CPU", is_gpu=False, passes=5)
    assert seconds("Some GPU", bus=1e12) == seconds("NVIDIA H100", bus=1e12) > 60
    assert Machine(Device("NVIDIA H100", 1)).seconds(shape_of(SMALL)) is None, "only memory is wanted"
    assert sum_seconds(1.0, 2.0) == 3.0
    assert sum_seconds(1.0, None) is None


def test_the_speed_of_a_cpu_is_measured() -> None:
    cpu = Device("CPU", 1, is_gpu=False)
    assert 1e8 < speed_of(cpu) < speed_of(Device("NVIDIA H100", 1)) / 10
    assert speed_of(cpu) == speed_of(cpu), "once a process"


class Driver:
    """The driver of an RTX 2080 with 8 GB, as ctypes calls it. fault: what each call returns."""

    def __init__(self, fault: int = 0) -> None:
        self.fault = fault

    def cuInit(self, *arguments: Any) -> int:
        return self.fault

    cuDeviceGet = cuInit

    def cuDeviceGetName(self, name: Any, length: int, handle: Any) -> int:
        name.value = b"NVIDIA GeForce RTX 2080"
        return self.fault

    def cuDeviceTotalMem_v2(self, size: Any, handle: Any) -> int:
        size._obj.value = 8_589_934_592
        return self.fault

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:
        value._obj.value = 7 if attribute == 75 else 0
        return self.fault


def test_the_driver_tells_the_gpu_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    found = machine.find_gpu()
    assert found == Device("NVIDIA GeForce RTX 2080", 8_589_934_592, has_bf16=False)
    assert str(found) == "8.6 GB (NVIDIA GeForce RTX 2080)"
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver(fault=100))  # no device
    assert machine.find_gpu() is None
    shape = shape_of(LARGE)
    assert (
        fit_need(shape, FitCase("lora", 512, wide=True), Rung(4)).nbytes
        > fit_need(shape, FitCase("lora", 512), Rung(4)).nbytes
    )


def make_plan(nbytes: int, device: int, rough: str | None = None, is_gpu: bool = True) -> Plan:
    half = nbytes // 2
    need = Need({"weights": half, "activations": nbytes - half}, rough)
    stages = [StageCost("the fit of the forget vector", "fit", need, 60.0)]
    return Plan(Device("GPU", device, is_gpu), stages, None, {}, 0)


def test_only_what_cannot_fit_is_hopeless() -> None:
    assert make_plan(90, 100).fits
    assert not make_plan(102, 100).fits
    assert not make_plan(102, 100).is_hopeless  # within the error of a prediction
    assert make_plan(120, 100).is_hopeless
    assert not make_plan(120, 100, rough="a family").is_hopeless
    assert make_plan(240, 100, rough="a family").is_hopeless  # the weights alone are too large
    assert not make_plan(120, 100, is_gpu=False).is_hopeless
    assert make_plan(240, 100, is_gpu=False).is_hopeless


def test_the_verdict_names_the_peak_and_the_first_remedy_that_fits() -> None:
    plan = make_plan(12_000_000_000, 8_000_000_000)
    remedies = [
        Remedy(("vector.max_length=256",), "longer rows are cut", 9_000_000_000, False),
        Remedy(("vector.mode=qlora",), "the prior is in 4 bits", 6_000_000_000, True),
        Remedy(("vector.lora.rank=1",), "the vector is of lower rank", 5_000_000_000, True),
    ]
    assert "vector.mode=qlora (6.0 GB; the prior is in 4 bits)" in replace(plan, remedies=remedies).verdict
    fits = make_plan(6_800_000_000, 8_000_000_000).verdict
    assert fits == "Fits on 8 GB (GPU): yes, peak 6.8 GB in the fit of the forget vector"


def test_of_what_stages_remove_again_only_the_most_at_a_time_takes_disk() -> None:
    sizes = {"first": 30, "second": 20}
    costs = [
        StageCost(name, "fit", Need({}), disk={"vectors": 5}, while_running={"checkpoints": size})
        for name, size in sizes.items()
    ]
    assert disk_of(costs) == {"vectors": 10, "checkpoints": 30}


# The memory model counts what a step really holds, and fits of real sizes stay under their bounds.


TINY: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EMBEDDING, LAYER = 1000 * 64, 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
WEIGHTS = 2 * EMBEDDING + 2 * LAYER + 64
SIDES = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)  # of a layer's q, o; k, v; gate, up, down
ROWS = make_rows([30, 17, 9, 30], labelled=0.5)
FULL = make_rows([512] * 4)


def test_fake_tensors_take_the_memory_of_real_ones_and_of_a_hand_count() -> None:
    lora, real = (peak(TINY, "lora", ROWS, rank=8, fake=fake) for fake in (True, False))
    assert lora == real
    full, real = (peak(TINY, "full", ROWS, Rung(2, checkpointing=True), fake=fake) for fake in (True, False))
    assert full == real
    assert full.parts["weights"] == pytest.approx(4 * WEIGHTS, rel=0.01)  # and buffers
    assert full.parts["optimizer"] == pytest.approx(8 * WEIGHTS, rel=0.01)
    assert lora.parts["weights"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert lora.parts["adapters"] == 4 * 2 * 8 * SIDES
    assert lora.total == sum(lora.parts.values())


@pytest.mark.parametrize(("mode", "rung"), [("lora", Rung(4)), ("full", Rung(2, checkpointing=True))])
def test_real_steps_take_what_the_allocator_notes(monkeypatch: pytest.MonkeyPatch, mode: str, rung: Rung) -> None:
    """PyTorch's profiler sees each block of memory that is taken and given back."""
    noted: list[int] = []
    run = memory_model._one_step

    def profiled(trainer: Any, inputs: Any, ledger: Any) -> Any:
        step = trainer.training_step

        def training_step(*arguments: Any) -> Any:
            taken = [sum(ledger.live.values())]
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                loss = step(*arguments)
            events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
            for event in sorted(events, key=lambda event: event.start_ns()):
                taken.append(taken[-1] + event.nbytes())
            noted.append(max(taken))
            return loss

        trainer.training_step = training_step
        return run(trainer, inputs, ledger)

    monkeypatch.setattr(memory_model, "_one_step", profiled)
    real = peak(TINY | {"hidden_size": 128}, mode, make_rows([128] * 4), rung, fake=False)
    assert noted == [pytest.approx(real.total, rel=0.01)]


def test_qlora_holds_4_bits_and_leaves_what_a_rung_leaves() -> None:
    sizes = TINY | {"vocab_size": 5000, "hidden_size": 256, "intermediate_size": 512}
    embedding, linear = 5000 * 256, 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512)
    here, there = (peak(sizes, "qlora", ROWS, Rung(4, True, embedding_on_cpu=left)) for left in (False, True))
    by_hand = (0.5 + 1 / 64 + 4 / 64 / 256) * linear + 2 * 2 * embedding + 4 * 5 * 256
    assert here.parts["weights"] == pytest.approx(by_hand, rel=0.01)
    assert here.parts["weights"] - there.parts["weights"] == 2 * embedding
    trained = here.parts["adapters"] / 4
    # Two states of 8 bits, beside small maps that a process may have made before.
    assert here.parts["optimizer"] == pytest.approx(2 * trained, rel=0.15)


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_two_of_the_streamed_layers_are_on_the_device(mode: Any) -> None:
    sizes = TINY | {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512}
    rung = Rung(4, True, True)
    here, there = (peak(sizes, mode, ROWS, replace(rung, layers_streamed=streamed)) for streamed in (False, True))
    ends = peak(sizes | {"num_hidden_layers": 1}, mode, ROWS, rung).parts["weights"]
    layer = (here.parts["weights"] - ends) / 5
    assert there.parts["weights"] == pytest.approx(ends + layer, rel=0.02)
    assert there.total == pytest.approx(here.total - 4 * layer, rel=0.02)


def test_logits_of_all_tokens_never_exist() -> None:
    """Where they do, as in the Trainer's own loss, the model counts them."""
    sizes, rows = TINY | {"vocab_size": 100_000}, make_rows([512] * 2)
    all_logits = 2 * 512 * 100_000 * 4
    ours, peer = (peak(sizes, "lora", rows, Rung(2), peer=peer) for peer in (False, True))
    assert ours.parts["logits"] < all_logits
    assert peer.parts["logits"] > 2 * all_logits


STREAMED = Rung(4, True, True, True, layers_streamed=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "mode", "rung", "bound"),
    [
        ("8B", "qlora", Rung(4, checkpointing=True, embedding_on_cpu=True), 7 * GB),
        ("8B", "qlora", STREAMED, 4 * GB),
        ("1B", "lora", Rung(4, checkpointing=True), 4 * GB),
        ("1B", "full", Rung(4, checkpointing=True), 20 * 2**30),  # 16 bytes a weight are 19.8 GB already
    ],
)
def test_4_rows_of_512_tokens_fit(shape: str, mode: str, rung: Rung, bound: float) -> None:
    assert peak(shape, mode, FULL, rung).total + memory_model.CONTEXT <= bound


@pytest.mark.slow
def test_the_trainer_with_peft_takes_twice_as_much() -> None:
    """The bound can fail."""
    assert peak("8B", "qlora", FULL, Rung(4, checkpointing=True), peer=True).total + memory_model.CONTEXT > 14 * GB
