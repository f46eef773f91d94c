"""Time and memory of a step of every baseline beside plain fine-tuning of the same rows.

    python tests/benchmarks/bench_baselines.py [--full] [--text] [--checkpointing] [--methods NAME ...]
        [--hidden 512] [--layers 8] [--vocabulary 32768] [--rank 32] [--batch 4] [--micro 4] [--threads 1] [--repeats 3]

The model is a Llama with random weights: heads of 64, a fourth as many for keys and values, an inner width of 4 times
the hidden one, input and output embeddings tied. With --vocabulary 16384 its logits weigh as much beside its layers as
in Llama 3.2 1B; by default twice as much, with 4096 as in Llama 3.1 8B. LoRA of all linear layers, or --full.

Rows are as long as TOFU's as chats: prompts of 40 to 60 tokens, answers of 20 to 50 (only they are labels), 6 to 10 in
their place for DPO. With --text every token is a label, the most logits that there can be (and DPO, which is of
questions, is left out). Retain rows are as long as the forget rows, in another order; all are padded to the longest of
their micro-batch.

Plain fine-tuning is forward and backward with transformers' own loss. Time: a step, forward and backward, of a method
against two plain passes, one of the forget rows and one of the retain rows that the step draws; the optimiser, the same
for both, is left out. RMU works on the layer in the middle. "grad_diff, kl" has the retain term with a reference. What
is paid once and not in every step stands apart: log-probabilities of a reference, or with --full a copy of the model.
Both sides take turns in one process, a fresh one for each repeat, and ratios are medians over repeats of the ratio
within a repeat. CPU seconds are disturbed less by other processes than wall time is.

Memory: the most bytes that tensors hold at once in a step, weights and copies of them included, without an optimiser's
state, against the same in a plain pass of the forget rows (and, in brackets, of forget and retain rows). On a CPU it is
summed up from PyTorch's own record of what it allocates and frees, after a check of that on a sum worked out by hand;
on a GPU it is `max_memory_allocated`. There, weights are bf16 and activations are checkpointed, as in training. DPO,
UNDIAL and KL terms take half a micro-batch at once, which of one row there is not: --micro 1 is beyond what is claimed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from msa_lite.baselines.methods import METHODS, settings_grid
from msa_lite.baselines.objective import BaselineObjective, ReferenceCache
from msa_lite.cli.output import quieten_libraries
from msa_lite.data import IGNORE, Example
from msa_lite.io.models.heads import autocast, has_bf16
from msa_lite.io.weights.hub import Source
from msa_lite.train.model import load_trainable
from msa_lite.train.reference import in_chunks, make_batch
from msa_lite.train.settings import FitSettings

KL = "grad_diff, kl"
NAMES = (*METHODS, KL)
Results = dict[str, dict[str, list[float]]]
TIME, MEMORY = 1.3, dict.fromkeys(("npo", "dpo", "rmu", "undial"), 1.05)  # what is claimed, the latter for LoRA
PAD = 0


def make_rows(options: argparse.Namespace) -> dict[str, list[Example]]:
    """Forget rows, retain rows, and what is to be said in the place of the forget rows."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(1, options.vocabulary) for _ in range(count)]

    def example(index: int, prompt: list[int], answer: list[int]) -> Example:
        known = prompt if options.text else [IGNORE] * len(prompt)
        return Example(index, prompt + answer, known + answer)

    sizes = [(draw.randint(40, 60), draw.randint(20, 50)) for _ in range(options.batch)]
    prompts = [tokens(prompt) for prompt, _ in sizes]
    forget = [example(i, prompts[i], tokens(answer)) for i, (_, answer) in enumerate(sizes)]
    short = [example(i, prompts[i], tokens(draw.randint(6, 10))) for i in range(options.batch)]
    others = sizes[1:] + sizes[:1]
    retain = [example(i, tokens(prompt), tokens(answer)) for i, (prompt, answer) in enumerate(others)]
    return {"forget": forget, "retain": retain, "alternatives": short}


def write_model(options: argparse.Namespace) -> None:
    """Random weights, in bf16 where they will be computed with in it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(4, options.hidden // 64)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16 if has_bf16() else torch.float32).save_pretrained(options.model)


class Bench:
    """One process's model and rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Load them."""
        import torch

        torch.set_num_threads(options.threads)
        self.options, self.rows, self.cuda = options, make_rows(options), torch.cuda.is_available()
        settings = FitSettings("full" if options.full else "lora", lora_rank=options.rank)
        self.model = load_trainable(options.model, settings).to("cuda" if self.cuda else "cpu").train()
        if self.cuda or options.checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.folder = tempfile.TemporaryDirectory()

    def objective(self, name: str) -> BaselineObjective:
        """A method with the parameters that it has by default."""
        method = name.partition(",")[0]
        chosen = {"layer": self.options.layers // 2 - 1} if method == "rmu" else {}
        cached = {key: self.rows[key] for key in ("forget", *(["alternatives"] if method == "dpo" else []))}
        source = Source(str(self.options.model), self.options.model, "sha256:0")
        cache = ReferenceCache(Path(self.folder.name) / method, source, False, cached)
        return BaselineObjective(
            method,
            settings_grid(method, chosen | ({"retain_loss": "kl"} if name == KL else {}))[0],
            self.rows["forget"],
            self.rows["retain"],
            PAD,
            seed=0,
            alternatives=self.rows["alternatives"],
            cache=cache if METHODS[method].reference == "log_probs" else None,
            full=self.options.full,
        )

    def step(self, objective: BaselineObjective) -> None:
        """Forward and backward of one step of a method."""
        with autocast(self.model):
            objective.step(self.model, range(self.options.batch), 0, self.options.micro, lambda loss: loss.backward())

    def plain(self, *sets: Sequence[Example]) -> None:
        """The same of a plain pass of each set of rows."""
        for rows in sets:
            for chunk in in_chunks(rows, self.options.micro):
                batch = make_batch(chunk, PAD, self.model.device)
                with autocast(self.model):
                    loss = self.model(input_ids=batch.ids, attention_mask=batch.mask, labels=batch.labels).loss
                (loss * (len(chunk) / len(rows))).backward()

    def measure_time(self) -> Results:
        """For each method [wall, CPU] seconds of two plain passes, a step, and what is paid once."""
        found: Results = {}
        self.plain(self.rows["forget"])  # not counted
        for name in self.options.methods:
            objective = self.objective(name)
            drawn = [self.rows["retain"][i] for i in objective.draw(0)]
            once = self.clock(partial(objective.prepare, self.model))
            plain = self.clock(partial(self.plain, self.rows["forget"], drawn))
            found[name] = {"plain": plain, "step": self.clock(partial(self.step, objective)), "once": once}
        return found

    def clock(self, work: Callable[[], object]) -> list[float]:
        """[wall, CPU] seconds."""
        import torch

        self.model.zero_grad(set_to_none=True)
        start, before = time.perf_counter(), time.process_time()
        work()
        if self.cuda:
            torch.cuda.synchronize()
        return [time.perf_counter() - start, time.process_time() - before]

    def measure_memory(self) -> Results:
        """For each method the peak in bytes of its step, of a plain pass of the forget rows and of both passes."""
        check_peak()
        found: Results = {}
        for name in self.options.methods:
            objective = self.objective(name)
            drawn = [self.rows["retain"][i] for i in objective.draw(0)]
            plain = [self.peak(partial(self.plain, self.rows["forget"], *more)) for more in ([], [drawn])]
            copies = allocated(partial(objective.prepare, self.model))[1]
            found[name] = {"plain": plain, "step": [self.peak(partial(self.step, objective), copies)]}
        return found

    def peak(self, work: Callable[[], object], copies: int = 0) -> float:
        """Most bytes at once, the model's weights included; copies: bytes of what else was there before."""
        import torch

        self.model.zero_grad(set_to_none=True)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            work()
            return torch.cuda.max_memory_allocated()
        weights = sum(tensor.nbytes for tensor in {*self.model.parameters(), *self.model.buffers()})
        return weights + copies + allocated(work)[0]


def allocated(work: Callable[[], object]) -> tuple[int, int]:
    """(most bytes at once, bytes left at the end) of what `work` allocates on the CPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept = work()
    events = record.profiler.kineto_results.events()
    changes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    del kept
    held = np.cumsum([0, *changes])
    return int(held.max()), int(held[-1])


def check_peak() -> None:
    """A step whose peak is known: product and its exponential (kept for backward), then two gradients of the latter."""
    import torch

    factor, weights = torch.ones(500, 500), torch.zeros(500, 500, requires_grad=True)

    def work() -> torch.Tensor:
        product = factor @ weights
        power = product.exp()
        (power * power).sum().backward()
        return product

    peak, left = allocated(work)
    assert 4_000_000 <= peak <= 4_000_100, peak  # four matrices of 1 MB, and the sum with its gradient
    assert 2_000_000 <= left <= 2_000_100, left  # the product and the gradient of the weights


def measured(kind: str, options: argparse.Namespace) -> Results:
    """What a fresh process measures."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", kind, "--model", str(options.model)]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "KINETO_LOG_LEVEL": "99"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results: Results = json.loads(done.stdout.splitlines()[-1])
    return results


def print_table(times: list[Results], memory: Results, options: argparse.Namespace) -> None:
    """A line a method, and what is claimed of it."""
    print(
        f"{'method':16}{'plain s':>9}{'step s':>8}{'wall ÷':>8}{'CPU ÷':>7}{'once s':>8}"
        f"{'plain MB':>10}{'step MB':>9}{'÷':>7}{'(both)':>8}  claim"
    )
    for name in options.methods:
        plain, step, once = (np.array([run[name][key] for run in times]) for key in ("plain", "step", "once"))
        wall, cpu = np.median(step / plain, axis=0)
        seconds = [np.median(values[:, 0]) for values in (plain, step, once)]
        forget, both = memory[name]["plain"]
        peak = memory[name]["step"][0]
        bounds = {
            "time": (cpu, TIME),
            "memory": (peak / forget, math.inf if options.full else MEMORY.get(name, math.inf)),
        }
        missed = [what for what, (value, bound) in bounds.items() if value > bound]
        print(
            f"{name:16}{seconds[0]:9.2f}{seconds[1]:8.2f}{wall:8.2f}{cpu:7.2f}{seconds[2]:8.2f}"
            f"{forget / 1e6:10.0f}{peak / 1e6:9.0f}{peak / forget:7.3f}{peak / both:8.3f}"
            f"  {'misses ' + ' and '.join(missed) if missed else 'holds'}"
        )


def main() -> None:
    """Parse, make the model, measure in fresh processes, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all weights are trained, not an adapter")
    parser.add_argument("--text", action="store_true", help="every token is a label")
    parser.add_argument("--checkpointing", action="store_true", help="of activations; always on a GPU")
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    for name, value in {"hidden": 512, "layers": 8, "vocabulary": 32768, "rank": 32, "batch": 4, "micro": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", choices=("time", "memory"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.methods = [name for name in options.methods if not (options.text and name == "dpo")]
    quieten_libraries(verbose=False)
    if options.measure:
        bench = Bench(options)
        print(json.dumps(bench.measure_time() if options.measure == "time" else bench.measure_memory()))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.model = Path(folder)
        write_model(options)
        memory, times = measured("memory", options), []
        for repeat in range(options.repeats):
            times.append(measured("time", options))
            print(f"repeat {repeat}: load average {os.getloadavg()[0]:.2f}", flush=True)
    lengths = [[len(example.ids) for example in rows] for rows in make_rows(options).values()]
    print(f"tokens of forget rows, retain rows, alternatives: {', '.join(map(str, lengths))}")
    print_table(times, memory, options)


if __name__ == "__main__":
    main()
