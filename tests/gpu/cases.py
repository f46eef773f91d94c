"""The bodies of the GPU tests, written for any device: unit tests run them on the CPU, so that they are not untried."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import msa_lite
from msa_lite.data import Example
from msa_lite.evals.engine.forward import score_bundles
from msa_lite.evals.engine.generate import Decoding, generate
from msa_lite.evals.engine.models import Runner
from msa_lite.evals.judge import open_judge
from msa_lite.evals.judge.prompts import Ask
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.models import heads as precision
from msa_lite.io.weights.hub import fetch
from msa_lite.settings import JudgeSettings
from msa_lite.train import FitSettings, VectorFit, run_fit
from msa_lite.train.memory import model as train_model
from tests.e2e.conftest import sweep_recipe
from tests.support.fits import ROWS, SETTINGS, Killed, assert_close, kill_at_disk, weights
from tests.support.models import tiny_tokenizer

ROOT = Path(__file__).parents[2]
MODES = ("lora", "qlora", "full")


@dataclass(frozen=True)
class Measured:
    """A fit, measured."""

    losses: list[float]
    """Of each step."""
    micro: int
    """Rows of one forward pass."""
    peak: int
    """Bytes of the GPU that tensors took at most; 0 on a CPU."""
    tokens_per_second: float
    """Between the first and the last step."""
    loads: int
    """How often the model was loaded."""


@dataclass
class Clock:
    """A Progress that notes when steps ended."""

    times: list[float] = field(default_factory=list)

    def __call__(self, label: str, done: int, total: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def losses_of(folder: Path) -> list[float]:
    """Return the losses of a vector's log."""
    return [json.loads(line)["loss"] for line in (folder / "train_log.jsonl").read_text().splitlines()]


def measure_fit(prior: Path, rows: Sequence[Example], out: Path, settings: FitSettings, **changes: Any) -> Measured:
    """Fit and measure."""
    clock, load = Clock(), train_model.load_whole
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with mock.patch.object(train_model, "load_whole", side_effect=load) as loader:
        run_fit(VectorFit(fetch(str(prior)), rows, tiny_tokenizer(), settings, **changes), out, clock)
    manifest = load_manifest(out)
    assert manifest is not None
    tokens = settings.epochs * sum(len(row.ids) for row in rows)
    steps, seconds = len(clock.times), clock.times[-1] - clock.times[0]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    speed = tokens * (steps - 1) / steps / seconds if steps > 1 else 0.0
    return Measured(losses_of(out), manifest["micro_batch_size"], peak, speed, loader.call_count)


def fit_losses(prior: str, out: str, mode: str) -> list[float]:
    """Fit the tiny rows; return the losses."""
    settings = FitSettings(**{**SETTINGS.__dict__, "mode": mode})
    return measure_fit(Path(prior), ROWS, Path(out), settings).losses


def on_cpu(name: str, *arguments: Any) -> Any:
    """Call a function of this module in a process that sees no GPU; return its result, which is JSON."""
    code = "import json, sys; from tests.gpu import cases; a = json.loads(sys.argv[2])"
    code += "; print('\\n' + json.dumps(getattr(cases, sys.argv[1])(*a)))"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, name, json.dumps(arguments, default=str)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_resumes(prior: Path, folder: Path, mode: str, atol: float = 0.0) -> None:
    """Kill a fit before its second save; the rerun's weights are those of an undisturbed fit."""
    settings = FitSettings(**{**SETTINGS.__dict__, "mode": mode})
    calm = measure_fit(prior, ROWS, folder / "calm", settings)
    with pytest.MonkeyPatch.context() as patch:
        kill_at_disk(patch, "save", (4,))
        with pytest.raises(Killed):
            measure_fit(prior, ROWS, folder / "killed", settings)
    assert not (folder / "killed").exists()
    again = measure_fit(prior, ROWS, folder / "killed", settings)
    assert again.losses == pytest.approx(calm.losses, rel=max(atol, 1e-6))
    assert_close(weights(folder / "killed"), weights(folder / "calm"), atol)


def model_peak(sizes: dict[str, Any], mode: str, rows: int, tokens: int) -> tuple[int, int]:
    """Return (the bytes of a fit's step by the memory model, those of its logits); in a process without a GPU."""
    from tests.tools.memory_model import make_rows, peak

    memory = peak(sizes, mode, make_rows([tokens] * rows))
    return memory.total, memory.parts.get("logits", 0)


def baseline_losses(prior: str, out: str, names: Sequence[str], modes: Sequence[str]) -> dict[str, list[float]]:
    """Run baselines over the tiny rows, two epochs each; return their losses by "NAME MODE"."""
    from tests.unit import test_baseline_objective as made

    losses = {}
    for name in names:
        for mode in modes:
            folder = Path(out) / f"{name}-{mode}"
            objective = made.objective_of(made.point(name), name, mode == "full")
            settings = FitSettings(mode=mode, lora_rank=4, lora_alpha=8, epochs=2, learning_rate=1e-3, batch_size=4)  # type: ignore[arg-type]
            fit = measure_fit(Path(prior), made.FORGET, folder / "vector", settings, objective=objective)
            losses[f"{name} {mode}"] = fit.losses
    return losses


def models_alive() -> list[str]:
    """Return the classes of all loaded models."""
    from transformers import PreTrainedModel

    gc.collect()
    return [type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, PreTrainedModel)]


def resident() -> int:
    """Return the bytes that tensors take on the GPU once what is dead has been freed; 0 on a CPU."""
    from msa_lite.io.models.devices import free_memory

    free_memory()
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


@contextmanager
def limited(size: float) -> Iterator[None]:
    """Let this process take only so many bytes of the GPU, as if it were a small one."""
    assert torch.cuda.is_available()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def score_all(model: Any, rows: Sequence[Example], budget: int = 0) -> tuple[list[list[float]], int]:
    """Score rows; return (log-probabilities of each, the budget of a batch at the end)."""
    runner = Runner(model, budget)
    pairs = [pair for batch in score_bundles(runner, [[row] for row in rows]) for pair in batch]
    return [scores[0].log_probs.tolist() for _, scores in sorted(pairs, key=lambda pair: pair[0])], runner.budget


def answer_all(model: Any, prompts: Sequence[list[int]], tokens: int, budget: int = 0) -> tuple[list[str], int]:
    """Answer prompts; return (the answers, the budget of a batch at the end)."""
    runner = Runner(model, budget)
    batches = generate(runner, tiny_tokenizer(), prompts, Decoding(tokens))
    return [texts[0] for _, texts in sorted(pair for batch in batches for pair in batch)], runner.budget


def assert_quantised(model: Any) -> None:
    """Check that linear layers are NF4, quantised twice."""
    from bitsandbytes.nn import Linear4bit

    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert layers
    for layer in layers:
        state = layer.weight.quant_state
        assert (state.quant_type, state.nested, layer.weight.dtype) == ("nf4", True, torch.uint8)


def assert_qlora(prior: Path) -> None:
    """Check a model that qlora trains: 4-bit linear layers; norms and adapters in fp32, embedding and head in 16 bits.

    On a CPU, which computes in fp32, these are in fp32 as well.
    """
    model = train_model.load_trainable(prior, FitSettings("qlora", lora_rank=4))
    assert_quantised(model)
    for name, parameter in model.named_parameters():
        wide = parameter.ndim == 1 or "lora_" in name or not torch.cuda.is_available()
        if parameter.is_floating_point():
            assert parameter.dtype == (torch.float32 if wide else precision.dtype_of(precision.choose_precision())), (
                name
            )
        assert parameter.requires_grad == ("lora_" in name), name


def run_everything(history: Path, output: Path) -> int:
    """Run a sweep with a rescored choice, its evaluation and a judge; return the bytes left on the GPU."""
    assert msa_lite.run(sweep_recipe(history, output)) is not None
    judge = open_judge(JudgeSettings(kind="local", model=str(history / "target")), output / "judge")
    assert judge is not None
    judge.ask([Ask("Judge.", "Which one?", "AB")])
    return resident()


def write_checkpoint(
    folder: Path, sizes: dict[str, Any], dtype: Any = torch.bfloat16, shard: int = 2_000_000_000
) -> Path:
    """Write a Llama of random weights, file by file, so that it never lies in memory."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.tools.memory_model import LLAMA

    config = LlamaConfig(**LLAMA, **sizes, architectures=["LlamaForCausalLM"], dtype=dtype)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in AutoModelForCausalLM.from_config(config).named_parameters()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    places: dict[str, str] = {}
    part: dict[str, Any] = {}
    noise = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)

    def flush() -> None:
        name = f"model-{len(set(places.values())):05d}.safetensors"
        places.update(dict.fromkeys(part, name))
        save_file(part, folder / name, metadata={"format": "pt"})
        part.clear()

    for name, shape in shapes.items():
        count = shape.numel()
        repeated = noise.repeat(-(-count // len(noise)))[:count] if len(shape) > 1 else torch.ones(count, dtype=dtype)
        part[name] = repeated.view(shape).clone()
        if sum(weight.nbytes for weight in part.values()) > shard:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
