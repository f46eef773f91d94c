"""Models that are larger than the GPU: what stays, what streams, and that nothing of a score shows it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from msa_lite.data import Row
from msa_lite.errors import StageError
from msa_lite.evals.engine import models
from msa_lite.evals.engine.forward import score_bundles
from msa_lite.evals.engine.generate import Decoding, generate
from msa_lite.evals.engine.models import Runner, load_model, streams
from msa_lite.io.models import streaming, transit
from msa_lite.io.models.loading import attach_adapter
from msa_lite.io.models.streaming import Sizes, fits, is_streamed, loaded_bytes, place, read_sizes, stream
from msa_lite.io.models.transit import check_room
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import fetch
from msa_lite.io.weights.vocabulary import AddedRows, find_added_rows
from tests.support.benchmark_data import make_prompter
from tests.support.models import save_checkpoint, tiny_model
from tests.support.plain import set_small_gpu

GB = 10**9
Make = Callable[..., Path]
# Llama 3.1 8B in bf16.
ENDS = ("model.embed_tokens", "lm_head")
LLAMA = Sizes({f"model.layers.{i}": 436_000_000 for i in range(32)}, dict.fromkeys(ENDS, GB), ENDS)
PROMPTER = make_prompter()
ASKED = ["Where is it?", "Who was it that stood over there?", "Why?"]


@pytest.mark.parametrize(
    ("free", "layers", "ends"),
    [(7.2, 5, ()), (14, 17, ()), (4, 0, ()), (3.3, 1, ENDS[:1]), (2.2, 1, ENDS), (1.2, 0, ENDS)],
)
def test_as_many_layers_stay_as_leave_room_for_batches(free: float, layers: int, ends: tuple[str, ...]) -> None:
    placement = place(LLAMA, int(free * GB))
    staying = tuple(name for name in ENDS if name not in ends)
    assert placement.resident == (*staying, *list(LLAMA.layers)[:layers])
    assert placement.resident[len(staying) :] + placement.streamed == tuple(LLAMA.layers)
    assert placement.ends == ends
    assert placement.waiting == 436_000_000 * (32 - layers) + GB * len(ends)
    places = placement.device_map("cuda:1")
    assert [places[name] for name in (*ENDS, "model.layers.31")] == [
        *("cpu" if name in ends else "cuda:1" for name in ENDS),
        "cpu",
    ]


def test_a_gpu_without_room_for_two_layers_is_refused() -> None:
    with pytest.raises(StageError, match=r"take 16\.0 GB, and the GPU has 1\.0 GB free: too little for two layers"):
        place(LLAMA, GB)
    with pytest.raises(StageError, match="too little for two layers"):
        place(Sizes({}, {"all": 8 * GB}), 4 * GB)


def test_layers_beyond_ram_wait_in_a_file_where_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_room(9 * GB, 10 * GB, tmp_path) == 0
    monkeypatch.setattr(transit, "_file_system", lambda folder: "ext4")
    monkeypatch.setattr(transit.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * GB))
    assert check_room(12 * GB, 10 * GB, tmp_path) == 3 * GB  # some RAM is left to the rest of the machine
    with pytest.raises(StageError, match=r"layers of 14 GB would wait in RAM, of which 10 GB are free, and the disk"):
        check_room(14 * GB, 10 * GB, tmp_path)
    monkeypatch.setattr(transit, "_file_system", lambda folder: "tmpfs")
    with pytest.raises(StageError, match="take RAM, too: set TMPDIR"):
        check_room(12 * GB, 10 * GB, tmp_path)


def test_a_model_fits_with_room_for_one_item() -> None:
    assert fits(16 * GB, 17 * GB)
    assert not fits(16 * GB, 16_400_000_000)


def test_sizes_are_those_of_the_model_as_it_is_loaded(tmp_path: Path, make_checkpoint: Make) -> None:
    tied, untied = make_checkpoint("llama"), make_checkpoint("qwen2", 0, "bfloat16")
    for folder, width in ((tied, 4), (untied, 2)):
        count = sum(weight.numel() for weight in load_model(folder).parameters())
        assert loaded_bytes(load_checkpoint(folder), "auto") == width * count
        assert loaded_bytes(load_checkpoint(folder), torch.float32) == 4 * count
        sizes = read_sizes(folder, torch.float16)
        assert sizes is not None
        assert sizes.total == pytest.approx(2 * count, rel=0.001)  # with buffers
        assert list(sizes.layers) == ["model.layers.0", "model.layers.1"]
        assert sizes.ends == (() if width == 4 else ENDS)
    assert sizes.others.keys() == {"model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"}
    in_4_bits = read_sizes(folder, torch.float16, four_bit=True)
    assert in_4_bits is not None
    assert sum(in_4_bits.layers.values()) < 0.3 * sum(sizes.layers.values())  # biases and norms are 16 bits wide


def results(model: Any) -> tuple[list[np.ndarray], list[list[str]]]:
    """Log-probabilities of answers; greedy and sampled answers."""
    runner = Runner(model)
    bundles = [[PROMPTER.example(Row(0, about, answer)) for answer in ("Here.", "Nowhere.")] for about in ASKED]
    scores = dict(pair for batch in score_bundles(runner, bundles) for pair in batch)
    prompts = [PROMPTER.prompt(Row(0, about)) for about in ASKED]
    texts = []
    for decoding in (Decoding(8), Decoding(8, samples=2, seed=1)):
        answers = dict(p for batch in generate(runner, PROMPTER.tokenizer, prompts, decoding) for p in batch)
        texts += [answers[i] for i in range(len(prompts))]
    return [one.log_probs for i in range(len(bundles)) for one in scores[i]], texts


def assert_same(ours: Any, wanted: Any) -> None:
    assert ours[1] == wanted[1]
    assert all(np.array_equal(mine, other) for mine, other in zip(ours[0], wanted[0], strict=True))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_scores_and_answers_are_those_of_the_whole_model(
    make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    folder = make_checkpoint(kind)
    wanted = results(load_model(folder))
    assert not streams(fetch(str(folder)))
    set_small_gpu(monkeypatch, folder)
    models._tell.cache_clear()  # another test of this process may have streamed the same model
    with caplog.at_level(logging.WARNING, logger="msa_lite"):
        model = load_model(folder)
        assert is_streamed(model)
        assert streams(fetch(str(folder)))  # by its headers alone
        assert "does not fit into the GPU's free memory" in caplog.text
        assert "1 of 2 layers stream from RAM, which is slower" in caplog.text
        caplog.clear()
        load_model(folder)
        assert "msa_lite" not in caplog.text  # told once
    assert not hasattr(model, "hf_device_map")
    assert not any(weight.is_meta for weight in model.parameters())
    assert Runner(model).halves.body is not None
    assert_same(results(model), wanted)


def test_an_adapter_goes_on_a_streamed_model(
    make_checkpoint: Make, make_adapter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, adapter = make_checkpoint("llama"), make_adapter("llama", 1)
    plain = load_model(folder)
    before = results(plain)
    wanted = results(attach_adapter(plain, adapter).eval())
    assert before[0][0].tolist() != wanted[0][0].tolist()
    set_small_gpu(monkeypatch, folder)
    tuned = attach_adapter(load_model(folder), adapter).eval()
    assert is_streamed(tuned)
    assert_same(results(tuned), wanted)


def test_rows_of_added_tokens_are_set(tmp_path: Path, make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    prior = make_checkpoint("llama")
    target = save_checkpoint(tmp_path / "target", tiny_model("llama", vocab_size=304))
    added = find_added_rows(load_checkpoint(target), load_checkpoint(prior))
    assert isinstance(added, AddedRows)
    ids = torch.tensor([[5, 302, 7, 301]])
    with torch.inference_mode():
        wanted = load_model(prior, added=added)(ids).logits
        set_small_gpu(monkeypatch, prior)
        model = load_model(prior, added=added)
        assert is_streamed(model)
        assert torch.equal(model(ids).logits, wanted)


def test_layers_go_through_the_device_and_come_home_whatever_happens() -> None:
    """The CPU stands in the place of a device, of which some machines have only one."""
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())])
    seen: list[int] = []
    model[1][0].register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.data_ptr()))
    stream(model, ("1",), "cpu")
    before = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    with torch.inference_mode():
        model[1](torch.zeros(1, 3))
    assert len({*seen, *before.values()}) == 5  # it computed from a buffer

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model[1][1].register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        model[1](torch.zeros(1, 3))
    assert len(seen) == 2
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == before
    with torch.no_grad():
        model[1][0].weight.copy_(torch.full((3, 3), 2.0))  # as a sweep sets it
        model[1][1]._forward_pre_hooks.clear()
        assert model[1](torch.ones(1, 3)).min() > 0.98


def test_a_model_that_runs_out_of_memory_while_it_loads_streams(
    make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama")
    wanted = results(load_model(folder))
    set_small_gpu(monkeypatch, folder, layers=0)
    small, tries = models.free_bytes(), []
    load = models.load_whole

    def crowded(*args: Any, **how: Any) -> Any:
        tries.append(how["device_map"])
        if len(tries) == 1:
            monkeypatch.setattr(models, "free_bytes", lambda: small)  # another process took the rest
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return load(*args, **how)

    monkeypatch.setattr(models, "free_bytes", lambda: 10 * GB)
    monkeypatch.setattr(models, "load_whole", crowded)
    monkeypatch.setattr(streaming, "load_whole", crowded)
    model = load_model(folder)
    assert [len(device_map) for device_map in tries] == [1, 6]
    assert_same(results(model), wanted)
    monkeypatch.setattr(streaming, "free_ram", lambda: 1000)
    monkeypatch.setattr(transit, "_file_system", lambda folder: "tmpfs")
    with pytest.raises(StageError, match="would wait in RAM"):
        load_model(folder)


def test_weights_beyond_memory_of_the_cpu_halve_a_batch(make_checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy and Python have an error of their own for it."""
    model = load_model(make_checkpoint("llama"))
    wanted = results(model)
    failures = [MemoryError("too little")]

    def fail_once(*_: Any) -> None:
        if failures:
            raise failures.pop()

    runner = Runner(model)
    assert runner.halves.body is not None
    model.base_model.register_forward_pre_hook(fail_once)
    bundle = [PROMPTER.example(Row(0, ASKED[0], answer)) for answer in ("Here.", "Nowhere.")]
    scores = [pair for batch in score_bundles(runner, [bundle]) for pair in batch]
    assert failures == []
    assert runner.budget < 2048
    for mine, other in zip(scores[0][1], wanted[0], strict=False):
        assert mine.log_probs == pytest.approx(other, rel=1e-5)
