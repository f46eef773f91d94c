"""Wall time, memory and disk of a merge beside `cp -r`, PEFT and mergekit, on a checkpoint made on the spot.

    python -m tests.benchmarks.bench_merge --shape 400m|1b|3b|8b [--only cp,msa-lite,peft,mergekit] [--repeats 3]
                                           [--full] [--folder DIR] [--keep]

Linux only. The checkpoint has the Llama shapes of the named size, bf16, in shards of 5 GB, filled from a reused pool of
noise. The vectors are two rank-16 fp32 adapters on all seven projections, each delta 2e-2 of the weight's norm;
with --full, a prior and two tuned checkpoints at the same ratio. Every tool computes T − 1·forget + 0.5·retain.

Tools take turns (cp, msa-lite, ..., cp, ...), each as a fresh process with the inputs just read into the page cache
and earlier output deleted and written back. "÷ cp" is the median over repeats of the ratio within one repeat. msa-lite
fsyncs its output, and cp, PEFT and mergekit do not: "cp, fsync" copies, then fsyncs every file. With --full the place
of cp is taken by reading the four checkpoints and writing one, 4 MB at a time. In a VM, memory is slow at first use.

CPU seconds and peak RSS are of the whole process tree (peak: its largest process) and hold mapped files, which are most
of mergekit's: 6 of 15 GB at 1b are its own. Peaks below the launcher's 10 MiB read as that. "extra" is what a tool left
beside its output (mergekit: the merged adapters). "differ" counts weights that are not the float64 result rounded
once: of all touched tensors if they hold at most 1.3e9 weights (1b), else of a seeded sample of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.benchmarks.paired import machine, print_table

ALPHA, BETA, RANK, LORA_ALPHA = 1.0, 0.5, 16, 32
SHARD_BYTES, BLOCK = 5 * 10**9, 1 << 22
TOOLS = ("cp", "msa-lite", "peft", "mergekit")
SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary; only 8b has a head of its own
    "tiny": (64, 128, 2, 4, 2, 320),
    "400m": (2048, 8192, 5, 32, 8, 32000),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "3b": (3072, 8192, 28, 24, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
# The RSS of the process that starts a child counts as the child's, so it must not be this one, which holds numpy.
LAUNCHER = """
import json, os, sys, time
start = time.perf_counter()
pid = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, used = os.wait4(pid, 0)
wall, cpu = time.perf_counter() - start, used.ru_utime + used.ru_stime
run = {"wall": wall, "cpu": cpu, "peak": used.ru_maxrss / 1024}
with open(sys.argv[1], "w") as file:
    json.dump(run | {"exit": os.waitstatus_to_exitcode(status)}, file)
"""
READ_FOUR = """
import os, sys
*folders, out = sys.argv[1:]
os.mkdir(out)
for name in os.listdir(folders[0]):
    files = [os.open(os.path.join(folder, name), os.O_RDONLY) for folder in folders]
    output, position = os.open(os.path.join(out, name), os.O_WRONLY | os.O_CREAT), 0
    while block := [os.pread(file, 4 << 20, position) for file in files][0]:
        position += os.pwrite(output, block, position)
"""
# The two adapters are stacked and merged at once. This is PEFT's better form: one after the other, each sum is rounded
# (of the weights of `tiny`, 25 % differ instead of 4.6 %).
PEFT = """
import sys
from peft import PeftModel
from transformers import AutoModelForCausalLM
target, forget, retain, alpha, beta, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(target, dtype="bfloat16", low_cpu_mem_usage=True)
model = PeftModel.from_pretrained(model, forget, adapter_name="forget")
model.load_adapter(retain, adapter_name="retain")
model.add_weighted_adapter(["forget", "retain"], [-float(alpha), float(beta)], "both", combination_type="cat")
model.merge_and_unload(adapter_names=["both"]).save_pretrained(out)
"""


@dataclass(frozen=True)
class Tool:
    """A command that writes a folder, and generous estimates of the bytes of RAM and of disk that it needs."""

    name: str
    command: list[str]
    ram: float
    disk: float


def tensor_shapes(shape: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama of the named size."""
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    rows = {"q": hidden, "k": hidden // heads * kv_heads, "v": hidden // heads * kv_heads, "o": hidden}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": (count, hidden) for name, count in rows.items()}
    layer |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes = {f"model.layers.{i}.{name}.weight": size for i in range(layers) for name, size in layer.items()}
    head = {"lm_head.weight": (vocabulary, hidden)} if shape == "8b" else {}
    return {"model.embed_tokens.weight": (vocabulary, hidden), **shapes, "model.norm.weight": (hidden,), **head}


def model_bytes(shape: str) -> int:
    """Bytes of the weights in bf16."""
    return 2 * sum(math.prod(size) for size in tensor_shapes(shape).values())


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], pool: np.ndarray, first: int) -> None:
    """One safetensors file; tensor `i` of the checkpoint is the pool, repeated, from an offset of its own."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in shapes.items():
        start, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, size in enumerate(shapes.values(), first):
            left, start = math.prod(size), number * 104_729 % len(pool)
            while left:
                piece = pool[start : start + left]
                file.write(piece.view(np.uint8).data)
                left, start = left - len(piece), 0


def write_checkpoint(folder: Path, shape: str, pool: np.ndarray) -> None:
    """A folder in Hugging Face layout."""
    folder.mkdir()
    shards: dict[int, dict[str, tuple[int, ...]]] = {}
    end = 0
    for name, size in tensor_shapes(shape).items():
        end += 2 * math.prod(size)
        shards.setdefault(end // SHARD_BYTES, {})[name] = size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards.values(), 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(folder / name, shard, pool, len(weight_map))
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": end}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config |= dict(zip((*names, "vocab_size"), SHAPES[shape], strict=True)) | {"tie_word_embeddings": shape != "8b"}
    (folder / "config.json").write_text(json.dumps(config))


def write_adapter(folder: Path, shape: str, seed: int) -> None:
    """A PEFT adapter; deltas have entries of 2 · √16 · 0.02 · 0.0025 = 4e-4, beside weights of 0.02."""
    noise = np.random.default_rng(seed)
    tensors = {}
    for name, size in tensor_shapes(shape).items():
        if "proj" in name:
            module = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = noise.normal(0, 0.02, (RANK, size[1])).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = noise.normal(0, 0.0025, (size[0], RANK)).astype(np.float32)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": LORA_ALPHA, "bias": "none"}
    config["target_modules"] = sorted({name.split(".")[-3] for name in tensors})
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def make_inputs(work: Path, shape: str, full: bool) -> None:
    """Write the target and its vectors, unless an earlier run kept them."""
    if (work / "complete").exists():
        return
    shutil.rmtree(work)
    work.mkdir()
    needed, free = model_bytes(shape) * (5 if full else 2), shutil.disk_usage(work).free
    if needed > free:
        sys.exit(f"the inputs take about {needed / 1e9:.0f} GB of disk, {free / 1e9:.0f} GB are free")
    noise = np.random.default_rng(0)
    prior = noise.normal(0, 0.02, BLOCK)
    forget, retain = noise.normal(0, 4e-4, (2, BLOCK))
    pools = {"target": prior + forget + retain, "prior": prior, "forget": prior + forget, "retain": prior + retain}
    for name in pools if full else ["target"]:
        write_checkpoint(work / name, shape, pools[name].astype(ml_dtypes.bfloat16))
    for seed, name in enumerate(() if full else ("forget", "retain"), 1):
        write_adapter(work / name, shape, seed)
    (work / "complete").touch()


def mergekit_recipe(work: Path, full: bool) -> dict:
    """The same merge in mergekit's terms: fp32 arithmetic, one rounding. Full checkpoints start from the prior."""
    prior, target, forget, retain = ({"path": str(work / name)} for name in ("prior", "target", "forget", "retain"))
    weights = [({"model": target}, 1.0)] if full else []
    for vector, weight in ((forget, -ALPHA), (retain, BETA)):
        weights.append(({"model": vector} if full else {"model": target, "lora": vector}, weight))
    models = [{"model": model, "parameters": {"weight": weight}} for model, weight in weights]
    head = {"merge_method": "task_arithmetic", "base_model": {"model": prior if full else target}, "models": models}
    return head | {"parameters": {"normalize": False}, "dtype": "float32", "out_dtype": "bfloat16"}


def make_tools(work: Path, shape: str, full: bool) -> list[Tool]:
    """All tools of this mode, in order."""
    size, largest = model_bytes(shape), 2 * max(math.prod(size) for size in tensor_shapes(shape).values())
    target, prior, forget, retain, out = (str(work / n) for n in ("target", "prior", "forget", "retain", "out"))
    copy = [sys.executable, "-c", READ_FOUR, target, prior, forget, retain, out] if full else ["cp", "-r", target, out]
    merge = [sys.executable, "-m", "msa_lite", "merge", "--target", target, "--forget", forget, "--retain", retain]
    merge += ["--alpha", str(ALPHA), "--beta", str(BETA), "--out", out, *(("--prior", prior) if full else ())]
    tools = [Tool("cp", copy, 1e8, size), Tool("msa-lite", merge, 1e9, size)]
    tools.insert(1, Tool("cp, fsync", ["sh", "-c", '"$@" && sync "$0"/*', out, *copy], 1e8, size))
    if not full:
        command = [sys.executable, "-c", PEFT, target, forget, retain, str(ALPHA), str(BETA), out]
        tools += [Tool("peft", command, 1.2 * size + 1e9, size)]
    (work / "mergekit.json").write_text(json.dumps(mergekit_recipe(work, full)))
    command = ["mergekit-yaml", str(work / "mergekit.json"), out, "--no-copy-tokenizer"]
    command += [] if full else ["--lora-merge-cache", str(work / "extra"), "--lora-merge-dtype", "float32"]
    ram = max(0 if full else 2 * size + 2e9, (20 if full else 12) * largest + min(size, SHARD_BYTES) + 1e9)
    return [*tools, Tool("mergekit", command, ram, size if full else 5 * size)]


def settle(work: Path) -> None:
    """Delete what the last tool wrote, read the inputs into the page cache, wait until nothing is left to write."""
    for path in [*work.glob("out*"), work / "extra"]:
        shutil.rmtree(path, ignore_errors=True)
    subprocess.run(["sh", "-c", 'cat "$0"/*/*.safetensors > /dev/null', work], check=True)
    os.sync()


def time_tool(tool: Tool, work: Path) -> dict[str, Any]:
    """Run a tool once: wall and CPU seconds, MiB of peak RSS, MB of output and extra.

    RuntimeError if it is not installed, is expected not to fit into what is free, or fails.
    """
    if not shutil.which(tool.command[0]):
        raise RuntimeError(f"{tool.command[0]} is not installed")
    for what, need, free in (("RAM", tool.ram, free_ram()), ("disk", tool.disk, shutil.disk_usage(work).free)):
        if need > free:
            raise RuntimeError(f"takes about {need / 1e9:.0f} GB of {what}, {free / 1e9:.0f} GB are free")
    result, log = work / "result.json", work / "log"
    launch = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(result), *tool.command]
    with log.open("w") as file:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        subprocess.run(launch, stdout=file, stderr=subprocess.STDOUT, env=environment, check=True)
    run = json.loads(result.read_text())
    if run["exit"]:
        raise RuntimeError(f"exit {run['exit']}: {log.read_text()[-600:]}")
    for name in ("out", "extra"):
        run[name] = sum(path.stat().st_size for path in (work / name).rglob("*") if path.is_file()) / 1e6
    return run


def free_ram() -> int:
    """Bytes that the kernel says can be had without swapping."""
    return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024


def measure(work: Path, options: argparse.Namespace) -> None:
    """Make the inputs, run the tools in turn and print."""
    make_inputs(work, options.shape, options.full)
    if 2 * model_bytes(options.shape) > free_ram():
        print("Input and output do not both fit into the page cache: these are times of the disk, too.")
    tools = make_tools(work, options.shape, options.full)
    settle(work)
    time_tool(tools[0], work)  # not counted: a virtual machine is slow to hand out memory that it has not used yet
    tools = [tool for tool in tools if tool.name.split(",")[0] in options.only]
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.repeats):
        for tool in list(tools):
            settle(work)
            try:
                runs.setdefault(tool.name, []).append(time_tool(tool, work))
            except RuntimeError as error:
                print(f"{tool.name} is left out: {error}")
                tools.remove(tool)
                runs.pop(tool.name, None)
    for reference in ("cp", "cp, fsync"):
        if reference in runs:
            print_table(runs, reference, "wall", ("wall", "cpu", "peak", "out", "extra"))


def main() -> None:
    """Parse, check the disk, measure, clean up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, metavar="400m|1b|3b|8b", required=True)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(TOOLS), help=f"of {','.join(TOOLS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="full checkpoints and a prior instead of adapters")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to put some GB")
    parser.add_argument("--keep", action="store_true", help="leave the inputs there, and reuse them the next time")
    options = parser.parse_args()
    if unknown := set(options.only) - set(TOOLS):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; choose of {', '.join(TOOLS)}")
    work = options.folder.resolve() / f"bench-merge-{options.shape}{'-full' if options.full else ''}"
    work.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}; {free_ram() / 1e9:.1f} GB of RAM free")
    try:
        measure(work, options)
    finally:
        if not options.keep:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
