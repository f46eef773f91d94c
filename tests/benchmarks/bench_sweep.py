"""What a sweep over α and β costs in time, memory and writing, beside merging, saving and loading a model a point.

    python tests/benchmarks/bench_sweep.py [--full] [--data TOFU_FOLDER] [--grid 5] [--every 4] [--questions 30]
        [--tokens 32] [--hidden 512] [--layers 8] [--vocabulary 8192] [--rank 32] [--threads 1] [--repeats 1]

Linux only. The target is a Llama with random weights in bf16: heads of 64, a fourth as many for keys and values, an
inner width of 4 times the hidden one. Vectors are two fp32 adapters on all linear layers; with --full, two tuned fp32
checkpoints and their prior. Of the forget and of the retain set so many --questions each are asked, made-up people or
TOFU rows: their answers are scored, and answers generated, of --tokens each: random weights hardly ever end one before.

Time: the choice as the pipeline makes it, with the target's own scores, reports, choice, tables and pictures.
Its clock stands still after each point, or each fourth, while the point is made in other ways and scored alike:
    merge    msa-lite's merge to the disk, loaded from there; the scoring here is "one evaluation of a plain model"
    peft     target and adapters loaded anew, add_weighted_adapter, merge_and_unload, save_pretrained, and loaded
             from there (not with --full)
"÷ plain" is the median, over points and repeats, of the ratio to that evaluation; the sweep as a whole is held against
points × its mean + one load. CPU seconds, user and system, are disturbed less by other processes than wall time is.
The process, the merge's threads included, keeps to as many cores as --threads says.

Memory: the most that a fresh process holds while it scores the target five times, or the target and four points. What
the first holds besides the target's fp32 weights (Python, torch, forward passes) is subtracted from the second. Sampled
every 2 ms; "anonymous" is without pages of files, which the system takes back when it has to. The pictures come after
that. Forward passes may leave some 10 MB more or less, so a target of 500 MB or more says most (--repeats 0
--hidden 1024).

Written: bytes that the process wrote, by the system's count.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from msa_lite.choose.rules import Metrics
from msa_lite.cli.output import quieten_libraries
from msa_lite.data import DataSource, Template, load_rows
from msa_lite.demo import make_groups
from msa_lite.evals.engine.models import load_model
from msa_lite.merger import merge
from msa_lite.pipeline.prepare.run import Context, Run, msa_scope, prepare
from msa_lite.pipeline.run.choice import choice_stages
from msa_lite.pipeline.run.scores import validation_of
from msa_lite.pipeline.stages.stage import execute
from msa_lite.recipe import Recipe
from msa_lite.report import load_report
from msa_lite.report.run.choice import candidate_name
from msa_lite.train.model import make_config, texts_of, train_tokenizer

VECTORS = ("forget", "retain")
CHOOSING = "choosing alpha and beta"  # the label of the sweep's progress
DISTANCE = 4e-4  # of full checkpoints' weights from one another; they are 2e-2 large
Costs = np.ndarray
"""[wall seconds, CPU seconds, bytes written]"""


def write_inputs(options: argparse.Namespace) -> None:
    """Rows, target, prior, vectors."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    work = options.work
    if options.data:
        for name, file in zip(VECTORS, ("forget10.json", "retain90.json"), strict=True):
            shutil.copy(options.data / file, work / f"{name}.jsonl")
    else:
        for name, facts in make_groups(dict.fromkeys(VECTORS, -(-2 * options.questions // 6)), 0).items():
            lines = (json.dumps({"question": fact.question, "answer": fact.answer}) for fact in facts)
            (work / f"{name}.jsonl").write_text("\n".join(lines))
    rows = [row for name in VECTORS for row in load_rows(DataSource(str(work / f"{name}.jsonl")))]
    tokenizer = train_tokenizer(texts_of(rows, Template()), options.vocabulary)
    heads = max(4, options.hidden // 64)
    shape = {"vocab_size": options.vocabulary, "hidden_size": options.hidden, "num_hidden_layers": options.layers}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": heads // 4, "intermediate_size": 4 * options.hidden}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config({"model_type": "llama", **shape}, tokenizer))
    folders = {"target": work / "target"} | {name: work / "run" / "vectors" / name for name in VECTORS}
    folders["prior"] = work / "prior"
    for name, folder in folders.items():
        stored = model.to(torch.bfloat16) if name in ("target", "prior") else model.float()
        if name in VECTORS and not options.full:
            adapter = LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules="all-linear")
            stored = get_peft_model(model, adapter)
            for key, factor in stored.named_parameters():
                if "lora_B" in key:
                    torch.nn.init.normal_(factor, std=3e-3)  # so that deltas are about as large
        stored.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if options.full or name == "target":
            for weight in model.parameters():
                weight.data += DISTANCE * torch.randn_like(weight)
        elif name in VECTORS:
            model = stored.unload()


def load_job(options: argparse.Namespace, grid: int) -> Run:
    """The sweep of grid × grid points as a recipe says it, prepared; half of its rows are for the choice."""
    work = options.work
    strengths = [round((i + 1) / grid, 3) for i in range(grid)]
    recipe = {
        "verdict": False,
        "target": str(work / "target"),
        "prior": str(work / "prior"),
        "forget": {"data": {"path": str(work / "forget.jsonl")}, "alpha": strengths},
        "retain": {"data": {"path": str(work / "retain.jsonl")}, "beta": strengths},
        "vector": {"mode": "full" if options.full else "lora"},
        "evaluate": {"limit": 2 * options.questions, "max_new_tokens": options.tokens},
        "select": {"validation": 0.5},
        "output": str(work / "run"),
    }
    loaded = Recipe.model_validate(recipe)
    return prepare(loaded, msa_scope(loaded))


class Bench:
    """One process's sweep, and the other ways to make its points."""

    def __init__(self, options: argparse.Namespace, grid: int) -> None:
        """Prepare it, from nothing."""
        import torch

        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
        torch.set_num_threads(options.threads)
        self.options, self.out = options, options.work / "out"
        shutil.rmtree(options.work / "run" / "sweep", ignore_errors=True)
        self.job = load_job(options, grid)
        self.validation = validation_of(self.job)
        self.target = self.job.sources["target"].folder
        self.vectors = {name: self.job.vector_folder(name) for name in VECTORS}

    def score(self, model: Any) -> Metrics:
        """What a model scores, written down as in the sweep."""
        folder = self.options.work / "scores"
        shutil.rmtree(folder, ignore_errors=True)
        return self.validation.score_into(folder, lambda: model).values()

    def measure_time(self) -> dict[str, Any]:
        """Costs of the sweep up to each report, and after the last; of the other ways' steps, point by point."""
        ways: dict[str, list[list[Costs]]] = {"merge": []} if self.options.full else {"merge": [], "peft": []}
        self.score(load_model(self.target))  # not counted: imports
        laps: list[Costs] = []
        values: dict[str, Metrics] = {}
        started = costs()

        def turn(label: str, done: int, total: int) -> None:
            nonlocal started
            if label != CHOOSING:  # the prior is scored first
                started = costs()
                return
            if done <= len(laps):  # told twice
                return
            laps.append(costs() - started)
            if done > 1 and (done - 2) % self.options.every == 0:
                point = self.job.recipe.points[done - 2]
                for name, steps in ways.items():
                    took, found = self.take(name, point.alpha, point.beta)
                    steps.append(took)
                    if name == "merge":
                        values[candidate_name(point.values)] = found
            started = costs()

        execute(choice_stages(Context.of(self.job), ()), turn)
        laps.append(costs() - started)
        same = sum(load_report(self.job.folder / "sweep" / name).values() == found for name, found in values.items())
        return {
            "laps": np.array(laps).tolist(),
            "ways": {name: np.array(steps).tolist() for name, steps in ways.items()},
            "same": same,
        }

    def take(self, way: str, alpha: float, beta: float) -> tuple[list[Costs], Metrics]:
        """Costs of making a point in another way, of loading it and of scoring it; and the scores."""
        before = costs()
        if way == "peft":
            self.merge_by_peft(alpha, beta)
        else:
            forget, retain = map(str, self.vectors.values())
            prior = self.job.sources["prior"]
            merge(str(self.target), self.out, forget=forget, alpha=alpha, retain=retain, beta=beta, prior=prior)
        made = costs()
        model = load_model(self.out)
        loaded = costs()
        found = self.score(model)
        scored = costs()
        shutil.rmtree(self.out, ignore_errors=True)
        return [made - before, loaded - made, scored - loaded], found

    def merge_by_peft(self, alpha: float, beta: float) -> None:
        """A merge as PEFT's manual has it, in the stored dtype."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.target)
        model = PeftModel.from_pretrained(model, str(self.vectors["forget"]), adapter_name="forget")
        model.load_adapter(str(self.vectors["retain"]), adapter_name="retain")
        model.add_weighted_adapter(["forget", "retain"], [-alpha, beta], "both", combination_type="cat")
        model.merge_and_unload(adapter_names=["both"]).save_pretrained(self.out)

    def measure_memory(self, side: str) -> dict[str, int]:
        """The most bytes held, "anonymous" and "resident", while the target alone or points are scored."""
        most: dict[str, int] = {}
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(0.002):
                status = Path("/proc/self/status").read_text()
                for name, key in (("anonymous", "RssAnon:"), ("resident", "VmRSS:")):
                    held = int(status.partition(key)[2].split()[0]) * 1024
                    most[name] = max(held, most.get(name, 0))

        def turn(label: str, done: int, total: int) -> None:
            if label == CHOOSING and done == total:
                ended.set()

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        if side == "plain":
            model = load_model(self.target)
            for _ in range(1 + len(self.job.recipe.points)):  # the heap of one evaluation is not yet that of several
                self.score(model)
            ended.set()
        else:
            execute(choice_stages(Context.of(self.job), ()), turn)
        sampler.join()
        return most


def costs() -> Costs:
    """What this process has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    written = int(Path("/proc/self/io").read_text().partition("wchar:")[2].split()[0])
    return np.array([time.perf_counter(), used.ru_utime + used.ru_stime, written])


def print_time(runs: list[dict[str, Any]], every: int, weights: int) -> None:
    """A line a way, then the sweep as a whole."""
    laps = np.array([run["laps"] for run in runs])  # (repeats, target + points + end, costs)
    ways = {name: np.array([run["ways"][name] for run in runs]) for name in runs[0]["ways"]}
    plain = ways["merge"][:, :, 2]
    points = laps.shape[1] - 2
    own = laps[:, 1:-1][:, ::every]
    heads = ("make s", "load s", "score s", "wall ÷ plain", "CPU ÷ plain", "written MB")
    print(f"{'a point':10}" + "".join(f"{head:>14}" for head in heads))
    for name, steps in {"sweep": own[:, :, None], **ways}.items():
        whole = steps.sum(axis=2)
        wall, cpu = np.median((whole / plain)[..., :2], axis=(0, 1))
        seconds = [f"{value:.2f}" for value in np.median(steps[..., 0], axis=(0, 1))]
        cells = [*[""] * (3 - len(seconds)), *seconds, f"{wall:.3f}", f"{cpu:.3f}"]
        print(f"{name:10}" + "".join(f"{cell:>14}" for cell in [*cells, f"{np.median(whole[..., 2]) / 1e6:.2f}"]))
    one, load = plain.mean(axis=1)[:, :2], np.median(ways["merge"][:, :, 1], axis=1)[:, :2]
    for count, what in ((points, f"{points} points"), (points + 1, f"{points} points and the target")):
        for until, end in ((-1, "the last score"), (None, "the end, with tables and pictures")):
            wall, cpu = np.median(laps[:, :until, :2].sum(axis=1) / (count * one + load), axis=0)
            print(f"up to {end}, ÷ (evaluations of {what} + one load): wall {wall:.3f}, CPU {cpu:.3f}")
    same, asked = sum(run["same"] for run in runs), plain[..., 0].size
    print(f"scores equal to the last bit to those of merged models on disk: {same} of {asked} points")
    print(f"written by the sweep: {laps[..., 2].sum(axis=1).max() / 1e6:.2f} MB; the target has {weights / 1e6:.0f} MB")


def print_memory(plain: dict[str, int], sweep: dict[str, int], target: int, adapters: int) -> None:
    """A line a kind of memory. target: bytes in fp32."""
    for kind, held in plain.items():
        rest = held - target
        parts = [f"{value / 1e6:.0f}" for value in (held, sweep[kind], rest, target, adapters)]
        formula = "plain {}, sweep {}; (sweep - {}) ÷ (target {} + adapters {})".format(*parts)
        print(f"{kind} MB: {formula} = {(sweep[kind] - rest) / (target + adapters):.3f}")


def measured(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a fresh process measures."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", kind, "--work", str(options.work)]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Parse, make the inputs, measure in fresh processes, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="vectors are full checkpoints, not adapters")
    parser.add_argument("--data", type=Path, help="TOFU as a folder in Hub layout; default: made-up people")
    sizes = {"grid": 5, "every": 4, "questions": 30, "tokens": 32, "hidden": 512, "layers": 8, "vocabulary": 8192}
    for name, value in (sizes | {"rank": 32, "threads": 1, "repeats": 1}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--measure", choices=("time", "plain", "sweep"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    quieten_libraries(verbose=False)
    logging.getLogger("msa_lite").setLevel(logging.ERROR)  # doubts about a choice among random weights
    if options.measure:
        time_it = options.measure == "time"
        bench = Bench(options, options.grid if time_it else 2)
        print(json.dumps(bench.measure_time() if time_it else bench.measure_memory(options.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.work = Path(folder)
        write_inputs(options)
        stored = (options.work / "target" / "model.safetensors").stat().st_size
        adapters = sum(path.stat().st_size for path in options.work.glob("run/vectors/*/adapter_model.safetensors"))
        runs = []
        for repeat in range(options.repeats):
            runs.append(measured("time", options))
            print(f"repeat {repeat}: load average {os.getloadavg()[0]:.2f}", flush=True)
        if runs:
            print_time(runs, options.every, stored)
        print_memory(measured("plain", options), measured("sweep", options), 2 * stored, adapters)


if __name__ == "__main__":
    main()
