"""The command line, and scripts, in processes of their own that have torch and its kin loaded from the start.

A new Python needs seconds to load them. Here a server loads them once and does nothing else; it forks a child for each
call, so nothing of a test's own process is in it but arguments and environment. What a fork cannot show goes through
`tests.command.run_cli`: the entry point, what is loaded when, variables that are read while modules are imported.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CLI = "from msa_lite.cli import main\nmain()"
_LIMIT = 300.0  # seconds after which a child is taken for one that hangs

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "tests.forks",
        "msa_lite.cli.run",
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


@dataclass(frozen=True)
class Forked:
    """A child that runs, and may be sent signals. streams: the files of its stdout and stderr."""

    process: Any
    arguments: tuple[str, ...]
    streams: tuple[Path, Path]

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Return its exit status, negative where a signal ended it, and what it printed."""
        self.process.join(_LIMIT)
        if hangs := self.process.is_alive():
            self.process.kill()
            self.process.join()
        out, err = (path.read_text(encoding="utf-8") for path in self.streams)
        shutil.rmtree(self.streams[0].parent)
        assert not hangs, f"not done after {_LIMIT:g} seconds\n{err}"
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, out, err)


def start_script(
    code: str, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, limit: int | None = None
) -> Forked:
    """Start Python code with arguments, as `python -c` would. limit: bytes that a file may have, as on a full disk."""
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    streams = (folder / "stdout", folder / "stderr")
    for path in streams:
        path.touch()
    given = (code, arguments, tuple(map(str, streams)), str(cwd or Path.cwd()), dict(env or os.environ), limit)
    process = _context.Process(target=_run, args=given)
    process.start()
    return Forked(process, arguments, streams)


def fork_script(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code to its end; arguments and options as for `start_script`."""
    return start_script(code, *arguments, **options).wait()


def fork_cli(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run msa-lite with arguments; options as for `start_script`."""
    return fork_script(_CLI, *arguments, **options)


def _run(
    code: str,
    arguments: tuple[str, ...],
    streams: tuple[str, str],
    cwd: str,
    env: dict[str, str],
    limit: int | None,
) -> None:
    """Run the code in the child."""
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
