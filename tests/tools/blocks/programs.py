"""The programs that stand for real ones while a page runs: msa-lite itself, at the smallest size, and pip.

`run` puts them first into PATH. Nothing heavy is imported here.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import metadata

_DEMO = "demo.prior=6 demo.retain=6 demo.forget=3 demo.holdout=2"
_SHORT = ("forget.alpha=1.0", "retain.beta=0.0", "vector.epochs=2", "verdict=off")


def is_run(words: Sequence[str]) -> bool:
    """Check whether a call runs a recipe. Its exit code 1 means a verdict of FAIL, which models this small may get."""
    return bool(words) and (words[0] in ("run", "quickstart") or words[0].endswith((".yaml", ".yml")))


def adapted(words: Sequence[str]) -> list[str]:
    """Return the arguments of msa-lite; the quickstart gets the smallest models."""
    return [*words, *_DEMO.split(), *_SHORT] if words[:1] == ["quickstart"] else list(words)


def stand_in(program: str, words: Sequence[str]) -> int:
    """Do what a program does that a page calls in a shell; return its exit status."""
    if program == "pip":
        return check_install(words)
    done = subprocess.run([sys.executable, "-m", "msa_lite", *adapted(words)], check=False)
    return 0 if done.returncode == 1 and is_run(words) else done.returncode


def check_install(words: Sequence[str]) -> int:
    """Install nothing. Return 1, with a message, for an extra that msa-lite does not have."""
    known = set(metadata("msa-lite").get_all("Provides-Extra") or ())
    wanted = {extra for word in words for group in re.findall(r"\[([\w,-]+)\]", word) for extra in group.split(",")}
    if unknown := sorted(wanted - known):
        sys.stderr.write(f"no such extra: {', '.join(unknown)} ({shlex.join(words)})\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(stand_in(sys.argv[1], sys.argv[2:]))
