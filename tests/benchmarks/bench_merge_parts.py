"""Where the time of a merge goes, beside its limit: reading, hashing and writing all bytes once, and nothing else.

    python tests/benchmarks/bench_merge_parts.py [--shape 400m] [--repeats 5] [--folder DIR] [--threads N]

Linux only. The target and its two adapters are those of bench_merge.py. Three tools take turns, each a fresh process
with the inputs in the page cache: `cp` with a sync of the copy; the limit, which reads 4 MB at a time, hashes them, and
has a second thread write them, with a sync at the end; the merge. Ratios are of medians.

Parts are seconds summed over all threads of the merge, so that together they may be more than its wall time. CPU: what
a thread computed; busy: by the clock, with what it waited for the disk, for a core, and for the interpreter's lock.
What no part holds is Python between blocks, start-up, and the check of the finished file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
from bench_merge import (
    BLOCK,
    SHAPES,
    Tool,
    describe_machine,
    model_bytes,
    settle,
    time_tool,
    write_adapter,
    write_checkpoint,
)
from rich.console import Console
from rich.table import Table

LIMIT = """
import hashlib, os, queue, sys, threading
source, out = sys.argv[1:]
os.mkdir(out)
for name in os.listdir(source):
    reading, writing = os.open(f"{source}/{name}", os.O_RDONLY), os.open(f"{out}/{name}", os.O_WRONLY | os.O_CREAT)
    sha256, position, blocks = hashlib.sha256(), 0, queue.Queue(2)

    def write():
        at = 0
        while block := blocks.get():
            at += os.pwrite(writing, block, at)

    writer = threading.Thread(target=write)
    writer.start()
    while block := os.pread(reading, 4 << 20, position):
        sha256.update(block)
        blocks.put(block)
        position += len(block)
    blocks.put(b"")
    writer.join()
    os.fsync(writing)
"""
# The merge, with a clock around the functions that do each part. A part inside another one is taken off that.
PARTS = """
import atexit, collections, functools, hashlib, json, os, sys, threading, time
import numpy as np
spent, inner, lock = collections.defaultdict(lambda: [0.0, 0.0]), threading.local(), threading.Lock()

def timed(part, function):
    @functools.wraps(function)
    def call(*arguments, **options):
        above = getattr(inner, "taken", (0.0, 0.0))
        inner.taken = (0.0, 0.0)
        cpu, wall = time.thread_time(), time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            used = time.thread_time() - cpu, time.perf_counter() - wall
            with lock:
                for place in (0, 1):
                    spent[part][place] += used[place] - inner.taken[place]
            inner.taken = above[0] + used[0], above[1] + used[1]
    return call

from msa_lite.io.weights import blocks, writer
from msa_lite.merger import block, stream

class Hash:
    def __init__(self):
        self.sha256 = hashlib.sha256()
        self.update, self.hexdigest = timed("hashing", self.sha256.update), self.sha256.hexdigest

class Library:
    sha256 = Hash

writer.hashlib = Library
writer.pread_into = blocks.pread_into = timed("reading", blocks.pread_into)
writer.write_all = timed("writing", writer.write_all)
writer.reserve = timed("reserving disk", writer.reserve)
writer.Sink.append = timed("copying to write", writer.Sink.append)
block.merge_rows = timed("arithmetic", block.merge_rows)
block.round_rows = timed("rounding", block.round_rows)
block.measure = timed("measuring the change", block.measure)
stream.Stream._load = timed("loading factors", stream.Stream._load)
os.fsync, os.fdatasync = timed("sync", os.fsync), timed("sync", os.fdatasync)
from msa_lite.cli import main
place = sys.argv.pop(1)
atexit.register(lambda: json.dump(spent, open(place, "w")))
main()
"""


def make_inputs(work: Path, shape: str) -> None:
    """Write the target and its vectors, unless an earlier run kept them."""
    if (work / "retain").exists():
        return
    noise = np.random.default_rng(0).normal(0, 0.02, BLOCK)
    write_checkpoint(work / "target", shape, noise.astype(ml_dtypes.bfloat16))
    for seed, name in enumerate(("forget", "retain"), 1):
        write_adapter(work / name, shape, seed)


def measure(work: Path, shape: str, options: argparse.Namespace) -> tuple[dict[str, list[dict[str, Any]]], list[Any]]:
    """Run the tools in turn; return their runs by name, and the parts of each merge."""
    size, runs, parts = model_bytes(shape), dict[str, list[dict[str, Any]]](), []
    target, out = str(work / "target"), str(work / "out")
    merge = [sys.executable, "-c", PARTS, str(work / "parts.json"), "merge", "--target", target, "--out", out]
    merge += ["--forget", str(work / "forget"), "--retain", str(work / "retain"), "--alpha", "1", "--beta", "0.5"]
    merge += ["--threads", str(options.threads)] if options.threads else []
    copy = ["sh", "-c", 'cp -r "$1" "$0" && sync "$0"/*', out, target]
    tools = [Tool("cp, sync", copy, 1e8, size), Tool("limit", [sys.executable, "-c", LIMIT, target, out], 1e8, size)]
    tools.append(Tool("merge", merge, 1e9, size))
    for repeat in range(options.repeats + 1):
        for tool in tools:
            settle(work)
            run = time_tool(tool, work)
            if repeat:  # the first one warms up
                runs.setdefault(tool.name, []).append(run)
                parts += [json.loads((work / "parts.json").read_text())] if tool.name == "merge" else []
    settle(work)
    return runs, parts


def main() -> None:
    """Parse, measure, print, clean up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="400m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the merge")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to put some GB")
    parser.add_argument("--keep", action="store_true", help="leave the inputs there, and reuse them the next time")
    options = parser.parse_args()
    work = options.folder.resolve() / f"bench-merge-parts-{options.shape}"
    work.mkdir(parents=True, exist_ok=True)
    console = Console(width=max(110, Console().width), highlight=False)
    console.print(describe_machine(work))
    try:
        make_inputs(work, options.shape)
        runs, parts = measure(work, options.shape, options)
    finally:
        if not options.keep:
            shutil.rmtree(work)
    walls = {name: median(run["wall"] for run in tool) for name, tool in runs.items()}
    table = Table("tool", "wall s", "÷ cp, sync", "÷ limit", "CPU s", "others' cores")
    for name, wall in walls.items():
        used = [f"{median(run[key] for run in runs[name]):.2f}" for key in ("cpu", "others")]
        table.add_row(name, f"{wall:.2f}", f"{wall / walls['cp, sync']:.2f}", f"{wall / walls['limit']:.2f}", *used)
    console.print(table)
    table = Table("part of the merge", "CPU s", "busy s", "busy ÷ wall")
    medians = {part: [median(run.get(part, (0, 0))[at] for run in parts) for at in (0, 1)] for part in parts[0]}
    for part, (cpu, busy) in sorted(medians.items(), key=lambda item: -item[1][0]):
        table.add_row(part, f"{cpu:.2f}", f"{busy:.2f}", f"{busy / walls['merge']:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
