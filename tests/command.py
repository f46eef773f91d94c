"""The command line in a process of its own."""

from __future__ import annotations

import resource
import subprocess
import sys


def run_cli(*arguments: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run msa-lite with arguments; limit: bytes that a file may have, so that a disk seems full."""

    def lower() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "msa_lite", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=lower)
