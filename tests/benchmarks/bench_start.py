"""Time until a command tells a fault that needs no model, beside another revision of the repository.

    python tests/benchmarks/bench_start.py [--against REVISION] [--repeats 5]

Each command is a fresh process on a folder with two tiny checkpoints, a data file, recipes, and a run that another
process works in. Bytecode is compiled before the first measurement, as it is after an installation. Revisions take
turns. Figures are medians: CPU seconds (user and system) do not depend on other processes as wall seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import yaml
from filelock import FileLock
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.merges import write_checkpoint  # noqa: E402
from tests.support.runs import make_run_folder  # noqa: E402

ON_RECIPES = ("run", "sweep", "vector", "baseline npo", "probe")
FAULTS = {"a wrong key": "forget.alhpa=1", "no target": "target=./no", "no data": "forget.data.path=./no.jsonl"}
CASES = {
    **{
        (command, fault): f"{command} recipe.yaml {change}"
        for command in ON_RECIPES
        for fault, change in FAULTS.items()
    },
    **{(command, "a run in use"): f"{command} recipe.yaml output=run" for command in ("run", "sweep", "vector")},
    ("train", "a wrong key"): "train training.yaml stages.0.epoks=1",
    ("train", "no data"): "train training.yaml stages.0.data.path=./no.jsonl",
    ("plan", "a wrong key"): "plan recipe.yaml forget.alhpa=1",
    ("attack", "a run in use"): "attack run",
    ("attack", "no such attack"): "attack run --attacks relaern",
    ("evaluate", "no model"): "evaluate ./no --forget rows.jsonl --out out",
    ("evaluate", "no data"): "evaluate target --forget ./no.jsonl --out out",
    ("ask", "no run"): "ask target Who?",
    ("purge", "a run in use"): "purge run --yes",
    ("report", "a run in use"): "report run --show-examples",
    ("merge", "no target"): "merge --target ./no --forget prior --out out",
}


def make_inputs(folder: Path) -> None:
    """Write what the commands are given."""
    for name in ("target", "prior"):
        write_checkpoint(folder / name, {"layers.0.weight": np.ones((8, 6), np.float32)})
    rows = [{"question": f"Who is {n}?", "answer": f"Number {n}."} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data": {"path": "rows.jsonl"}}
    recipe = {"target": "target", "prior": "prior", "forget": data | {"alpha": [0.5, 1.0]}, "output": "out"}
    training = {"model": "target", "stages": [data | {"name": "all"}], "output": "out"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "training.yaml").write_text(yaml.safe_dump(training))
    make_run_folder(folder / "run", output="run")


def measure(line: str, source: Path, folder: Path) -> tuple[float, float]:
    """Run a command that has to be refused; return its CPU and wall seconds."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    command = [sys.executable, "-m", "msa_lite", *line.split()]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (2, 3), line
    return used.ru_utime + used.ru_stime, time.perf_counter() - start


def main() -> None:
    """Parse, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REVISION", help="a commit to measure, too")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sources, work = {"here": ROOT}, Path(name) / "work"
        if options.against:
            sources = {options.against: Path(name) / "against", **sources}
            tree = subprocess.run(["git", "-C", ROOT, "archive", options.against], capture_output=True, check=True)
            sources[options.against].mkdir()
            subprocess.run(["tar", "-x", "-C", sources[options.against]], input=tree.stdout, check=True)
        for source in sources.values():
            subprocess.run([sys.executable, "-m", "compileall", "-q", source / "msa_lite"], check=True)
        work.mkdir()
        make_inputs(work)
        table = Table("command", "fault", *(f"{name}: {unit} s" for name in sources for unit in ("CPU", "wall")))
        with FileLock(work / "run/.lock"):
            for (command, fault), line in CASES.items():
                runs = [[measure(line, source, work) for source in sources.values()] for _ in range(options.repeats)]
                figures = [median(times) for source in zip(*runs, strict=True) for times in zip(*source, strict=True)]
                table.add_row(command, fault, *(f"{figure:.2f}" for figure in figures))
        Console(width=max(110, Console().width)).print(table)


if __name__ == "__main__":
    main()
