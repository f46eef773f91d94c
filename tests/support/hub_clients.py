"""A fresh process that asks the loopback Hub and nobody else."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any
from unittest.mock import patch

from msa_lite.publish.contents import Contents, SentFile
from msa_lite.publish.destination import find_destination
from msa_lite.publish.upload import Published, push
from tests.support.hub import WRITER, HubServer


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


REPO = "alice/forgotten"
CARD = "---\nlicense: mit\n---\n# A model\n"
SHARD = 100_000  # bytes


def make_upload(folder: Path, seed: int = 0, shards: int = 2, card: str = CARD) -> Contents:
    """A model of this many shards, its bytes random by `seed`."""
    folder.mkdir(exist_ok=True)
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    files = {name: hashlib.shake_128(bytes([seed, i])).digest(SHARD) for i, name in enumerate(names)}
    files["config.json"] = json.dumps({"model_type": "llama", "seed": seed}).encode()
    files["tokenizer.json"] = b"{}"
    files["model.safetensors.index.json"] = json.dumps({"weight_map": names}).encode()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    items = [
        SentFile(name, folder / name, None, hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()
    ]
    raw = card.encode()
    items.append(SentFile("README.md", None, raw, hashlib.sha256(raw).hexdigest(), len(raw)))
    return Contents(folder, "model", tuple(items), card, ())


def wanted(contents: Contents) -> dict[str, bytes]:
    """The files that are to be on main."""
    return {item.name: item.content or (contents.folder / item.name).read_bytes() for item in contents.files}


@contextmanager
def client_of(hub: HubServer, token: str | None = WRITER) -> Iterator[list[float]]:
    """Lead this process's huggingface_hub to the server, without Xet and bars; yield the seconds of its waits."""
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import disable_progress_bars

    waits: list[float] = []
    environment = {} if token is None else {"HF_TOKEN": token}
    settings: dict[str, Any] = {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": "/nowhere/token"}
    settings |= {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    }
    with ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(patch.object(constants, name, value))
        stack.enter_context(patch.object(hf_api.api, "endpoint", hub.url))  # that of the module's own functions
        stack.enter_context(patch.dict("os.environ", environment))
        stack.enter_context(patch("time.sleep", waits.append))
        stack.enter_context(disable_progress_bars())
        yield waits


def publish(contents: Contents, private: bool = True, gated: bool = False) -> Published:
    """Send contents to the repository of the tests."""
    return push(contents, find_destination(REPO, private), gated=gated)
