"""A fresh process that asks the loopback Hub and nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from tests.hub_server import HubServer


@dataclass
class Hub:
    """A server and a fresh process's way to it; `home` is the cache, which the processes of one test share."""

    server: HubServer
    home: Path

    def start(self, *command: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
        """Run Python with `command`; whatever it asks of another host ends at the server, as its proxy."""
        kept = {k: v for k, v in os.environ.items() if not k.lower().startswith("hf_") and "proxy" not in k.lower()}
        variables = {
            "HF_ENDPOINT": self.server.url,
            "HF_HOME": str(self.home),
            "HF_HUB_OFFLINE": str(int(offline)),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "http_proxy": self.server.url,
            "https_proxy": self.server.url,
            "no_proxy": "127.0.0.1",
        }
        return subprocess.run(
            [sys.executable, *command],
            env=kept | variables,
            cwd=self.home.parent,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def python(self, code: str, offline: bool = False) -> Any:
        """Run `code` and read what it leaves in `result`; an MsaError becomes [class, message]."""
        guarded = f"import json\nfrom msa_lite.errors import MsaError\ntry:\n{indent(code, '    ')}\n"
        guarded += "except MsaError as error:\n    result = [type(error).__name__, str(error)]\n"
        guarded += "print(json.dumps(result))"
        done = self.start("-c", guarded, offline=offline)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def fetch(self, name: str, offline: bool = False) -> Any:
        """[folder, revision, pinned name] of `msa_lite.io.weights.hub.fetch`."""
        code = f"from msa_lite.io.weights.hub import fetch\ns = fetch({name!r})\n"
        code += "result = [str(s.folder), s.revision, s.pinned()]"
        return self.python(code, offline)
