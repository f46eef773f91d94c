"""The command line, and scripts, in processes of their own that have torch and its kin loaded from the start.

A new Python needs seconds to load them. Here a server loads them once and does nothing else; it forks a child for each
call, so nothing of a test's own process is in it but arguments and environment. What a fork cannot show goes through
`run_cli`: the entry point, what is loaded when, variables that are read while modules are imported.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from msa_lite.report.run.choice import load_choice
from tests.support.walls import standing_walls

_CLI = "from msa_lite.cli import main\nmain()"
_LIMIT = 300.0  # seconds after which a child is taken for one that hangs

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "tests.support.processes",
        "msa_lite.cli.runs",
        "msa_lite.pipeline",
        "datasets",
        "matplotlib.pyplot",
        "peft",
        "pytest",
        "rouge_score.rouge_scorer",
        "scipy.stats",
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
    ]
)


def fork_script(
    code: str, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, limit: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python code with arguments to its end, as `python -c` would; the status is negative where a signal ended it.

    limit: bytes that a file may have, as on a full disk.
    """
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        streams = (Path(folder, "stdout"), Path(folder, "stderr"))
        for path in streams:
            path.touch()
        given = (code, arguments, tuple(map(str, streams)), str(cwd or Path.cwd()), dict(env or os.environ), limit)
        process = _context.Process(target=run_code, args=given)
        process.start()
        process.join(_LIMIT)
        if hangs := process.is_alive():
            process.kill()
            process.join()
        out, err = (path.read_text(encoding="utf-8") for path in streams)
    assert not hangs, f"not done after {_LIMIT:g} seconds\n{err}"
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, out, err)


def fork_cli(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run msa-lite with arguments; options as for `fork_script`."""
    return fork_script(_CLI, *arguments, **options)


def run_code(
    code: str,
    arguments: Sequence[str],
    streams: Sequence[str],
    cwd: str,
    env: dict[str, str],
    limit: int | None,
) -> None:
    """Run Python code in a child that was forked for it; its streams are files."""
    if walls := standing_walls():
        walls.watch()
    gc.freeze()  # a collection would go through all that is loaded, and a fit has several
    for number, path in enumerate(streams, 1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv[:] = ["-c", *arguments]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run msa-lite with arguments in a new Python."""
    return subprocess.run([sys.executable, "-m", "msa_lite", *arguments], capture_output=True, text=True, check=False)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

# The command line, after some code that may do otherwise in one process than in the other. `rank` is its number.
_CHANGED = """
import os, sys
rank = int(os.environ["RANK"])
exec(sys.argv.pop(1))
from msa_lite.cli import main
main()
"""


def changed(folder: Path, code: str) -> list[str]:
    """Return what to launch in the place of `-m msa_lite`, to run some code first."""
    script = folder / "changed.py"
    script.write_text(_CHANGED)
    return [str(script), code]


def launch(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a command; when it takes too long, end all that it started."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    with subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True, **options) as process:
        try:
            out, err = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def assert_same_scores(run: Path, alone: Path) -> None:
    """Two sweeps have the same table, but for the noise of fp32: processes may have other numbers of threads."""
    mine, other = (load_choice(one / "sweep") for one in (run, alone))
    assert len(mine.candidates) > 0
    for one, same in zip(mine.candidates, other.candidates, strict=True):
        assert (one.values, one.met, one.metrics.keys()) == (same.values, same.met, same.metrics.keys())
        assert one.score == pytest.approx(same.score, rel=1e-5)
        for name, metric in one.metrics.items():
            expected = same.metrics[name]
            assert [metric.value, metric.stderr] == pytest.approx([expected.value, expected.stderr], rel=1e-5), name


_GROUP_LIMIT = 120.0  # seconds after which a process is taken for one that hangs


class Ended(NamedTuple):
    """How one of the processes ended."""

    error: str
    """The name of the class of its error; empty where it had none, "killed" where it was."""
    value: Any
    """What the task returned, or the error's message."""


def run_together(task: Callable[..., Any], *arguments: Any, count: int = 2) -> list[Ended]:
    """Run task(rank, *arguments) in `count` processes of one torch.distributed group; return how each ended."""
    answers = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        processes = [
            _context.Process(target=_work, args=(task, rank, count, meeting, answers, arguments))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_GROUP_LIMIT)
        hangs = [process for process in processes if process.is_alive()]
        for process in hangs:
            process.kill()
    assert not hangs, "a process did not end"
    ended = {}
    while not answers.empty():
        rank, outcome = answers.get()
        ended[rank] = outcome
    return [ended.get(rank, Ended("killed", None)) for rank in range(count)]


def _work(task: Callable[..., Any], rank: int, count: int, meeting: str, answers: Any, arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    try:
        outcome = Ended("", task(rank, *arguments))
    except Exception as error:
        outcome = Ended(type(error).__name__, str(error))
    answers.put((rank, outcome))
    answers.close()
    answers.join_thread()
    if not outcome.error:
        dist.barrier()
