"""A command in a forked process with limits, and what became of it."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tools.fuzz.states import Recorder

SECONDS = 10  # after which a command hangs
_FILE = 1 << 30  # bytes that a file may grow to


@dataclass(frozen=True)
class Outcome:
    """The end of a command."""

    status: int
    """Exit status, or minus the number of the signal that ended it."""
    out: str
    err: str
    grown: int
    """Bytes that its memory grew by over that of the process it was forked from."""
    hung: bool


def run(
    arguments: Sequence[str],
    folder: Path,
    seconds: float = SECONDS,
    kill: tuple[float, int] | None = None,
    recorder: Recorder | None = None,
) -> Outcome:
    """Run msa-lite with arguments in a folder, in a forked process, which is killed after so many seconds.

    kill: (seconds, signal): send a signal to it after that time. recorder: keeps the states of the folder.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    before = _resident()
    out, err = folder / ".stdout", folder / ".stderr"
    child = os.fork()
    if child == 0:
        _command(arguments, folder, out, err, recorder)
    started, sent, hung = time.monotonic(), kill is None, False
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        gone = time.monotonic() - started
        if not sent and kill and gone >= kill[0]:
            _signal(child, kill[1])
            sent = True
        if gone > seconds:
            hung = True
            _signal(child, signal.SIGKILL)
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # children of its own that it left
        os.killpg(child, signal.SIGKILL)
    texts = [path.read_text("utf-8", "replace") if path.exists() else "" for path in (out, err)]
    for path in (out, err):
        path.unlink(missing_ok=True)
    return Outcome(os.waitstatus_to_exitcode(status), *texts, usage.ru_maxrss * 1024 - before, hung)


def _signal(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _command(arguments: Sequence[str], folder: Path, out: Path, err: Path, recorder: Recorder | None) -> None:
    """In the child: run the command as the console script does, and leave without what the parent has at its exit."""
    status, begun = 70, False
    try:
        os.setpgid(0, 0)
        gc.callbacks.clear()  # of hypothesis, which would swallow an interrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(handle, number)
        sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", errors="backslashreplace") for n in (1, 2))  # noqa: SIM115
        os.chdir(folder)
        os.environ["HOME"] = os.environ["HF_HOME"] = str(folder / "home")
        sys.argv = ["msa-lite", *arguments]
        from msa_lite.cli import main

        try:
            begun = True
            if recorder:
                recorder.begin()
            main()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if recorder:
            recorder.end()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        import traceback

        if isinstance(error, KeyboardInterrupt) and not begun:  # as Python itself would end
            os._exit(130)
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)
