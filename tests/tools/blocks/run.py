"""Do what a page says: write its recipes, run its commands and its Python, block by block, in a prepared folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.processes import fork_cli, fork_script
from tests.tools.arrows import ROOT
from tests.tools.blocks.check import logical_lines, simple_commands
from tests.tools.blocks.folder import at_test_size
from tests.tools.blocks.programs import adapted, is_run
from tests.tools.blocks.read import Block

# What a shell keeps from line to line; a block that needs it is one script.
_STATE = re.compile(r"^\s*(cd|export|source|\.|set|for|if|while|\w+=\S*$|\w+\(\))(\s|$)|<<|`|\$\(")
_MODULE = """
import sys, types
module = types.ModuleType("__main__")
sys.modules["__main__"] = module
exec(compile(open("block.py", encoding="utf-8").read(), "block.py", "exec"), module.__dict__)
"""


class BlockFailedError(AssertionError):
    """A block that did not do what its page says."""


def run_page(blocks: Sequence[Block], folder: Path, home: Path) -> int:
    """Run the blocks of a page in their order, and return how many ran. Raise BlockFailedError at the first fault.

    home: a folder for the home directory, the programs that are replaced, and caches.
    """
    environment = make_environment(home)
    ran = [block for block in blocks if block.is_run]
    for block in ran:
        text = at_test_size(block.text)
        if block.language == "yaml":
            (folder / str(block.file)).write_text(text)
        elif block.language == "python":
            (folder / "block.py").write_text(text)
            _check(block, "this Python", fork_script(_MODULE, cwd=folder, env=environment))
        else:
            _run_script(block, text, folder, environment)
    return len(ran)


def make_environment(home: Path) -> dict[str, str]:
    """Make a home, and programs that stand for the real ones; return the environment that has both."""
    programs = home / "bin"
    programs.mkdir(parents=True)
    for name in ("msa-lite", "pip"):
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.tools.blocks.programs {name} "$@"\n')
        path.chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    if shutil.which("ssh-keygen"):  # a reader has a key of their own
        (home / ".ssh").mkdir()
        make_key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / ".ssh/id_ed25519")]
        subprocess.run(make_key, check=True, stdin=subprocess.DEVNULL)
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "MSA_LITE_CACHE": str(home / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _run_script(block: Block, text: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a script: calls of msa-lite alone in forks of this process, other lines, or a whole script, in a shell."""
    lines = logical_lines(text)
    if any(_STATE.search(line) for line in lines):
        lines = [text]
    for line in lines:
        words = _lone_call(line)
        if words is not None:
            done = fork_cli(*adapted(words), cwd=folder, env=environment)
            if done.returncode == 1 and is_run(words):
                continue
        else:
            command = ["bash", "-euo", "pipefail", "-c", line]
            done = subprocess.run(
                command,
                cwd=folder,
                env=dict(environment),
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
        _check(block, line.strip(), done)


def _lone_call(line: str) -> list[str] | None:
    """Return the arguments of a line that is one call of msa-lite and nothing else; None for any other line."""
    if "\n" in line.strip() or re.search(r"[|><;&*?$~]", re.sub(r"'[^']*'|\"[^\"$]*\"|#.*$", "", line)):
        return None
    calls = simple_commands(line)
    return calls[0][1:] if len(calls) == 1 and calls[0][0] == "msa-lite" else None


def _check(block: Block, what: str, done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        tail = "\n".join([*done.stdout.splitlines()[-5:], *done.stderr.splitlines()[-15:]])
        raise BlockFailedError(f"{block.place}: `{what}` ended with {done.returncode}:\n{tail}")
