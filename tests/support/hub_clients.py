"""Other processes, and this one, that ask the Hub on loopback and nobody else; and contents to send there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any
from unittest.mock import patch

from msa_lite.publish.contents import Contents, SentFile
from msa_lite.publish.upload import Published, find_destination, push
from tests.support.hub import WRITER, HubServer

# Forks a child for each line of its input, with the libraries loaded and the variables read: [code, arguments, streams,
# folder]. It says how each child ended.
_SERVE = """
import json, os, sys, traceback
import datasets, msa_lite.cli.merge, msa_lite.data, msa_lite.merger
from tests.support.processes import run_code

for line in sys.stdin:
    code, arguments, streams, folder = json.loads(line)
    if (pid := os.fork()) == 0:
        status = 0
        try:
            run_code(code, arguments, streams, folder, dict(os.environ), None)
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class HubPythons:
    """Two Pythons, one of them offline, that know the address of the Hub and nobody else's; their children run code.

    Whatever a child asks of another host ends at the server, as its proxy. home: the cache, empty at each test's start.
    """

    def __init__(self, folder: Path) -> None:
        self.home = folder / "cache"
        with HubServer() as server:
            self.port = server.port
        self._processes: dict[bool, subprocess.Popen[str]] = {}

    def run(self, code: str, arguments: Sequence[str], offline: bool) -> subprocess.CompletedProcess[str]:
        if offline not in self._processes:
            self._processes[offline] = self._start(offline)
        process = self._processes[offline]
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder, name) for name in ("stdout", "stderr")]
            for path in streams:
                path.touch()
            process.stdin.write(json.dumps([code, arguments, [*map(str, streams)], str(self.home.parent)]) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
            return subprocess.CompletedProcess([*arguments], status, *(path.read_text() for path in streams))

    def _start(self, offline: bool) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if not k.lower().startswith("hf_") and "proxy" not in k.lower()}
        url = f"http://127.0.0.1:{self.port}"
        variables = {
            "HF_ENDPOINT": url,
            "HF_HOME": str(self.home),
            "HF_HUB_OFFLINE": str(int(offline)),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "http_proxy": url,
            "https_proxy": url,
            "no_proxy": "127.0.0.1",
        }
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", _SERVE], env=kept | variables, **pipes)

    def close(self) -> None:
        for process in self._processes.values():
            process.communicate()


@dataclass
class Hub:
    """A server and the way of other processes to it."""

    server: HubServer
    pythons: HubPythons

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run msa-lite with arguments."""
        return self.pythons.run("from msa_lite.cli import main\nmain()", arguments, offline=False)

    def python(self, code: str, offline: bool = False) -> Any:
        """Run `code` and read what it leaves in `result`; an MsaError becomes [class, message]."""
        guarded = f"import json\nfrom msa_lite.errors import MsaError\ntry:\n{indent(code, '    ')}\n"
        guarded += "except MsaError as error:\n    result = [type(error).__name__, str(error)]\n"
        guarded += "print(json.dumps(result))"
        done = self.pythons.run(guarded, (), offline)
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
    contents: dict[str, Path | bytes] = {name: folder / name for name in files} | {"README.md": card.encode()}
    files["README.md"] = card.encode()
    items = [
        SentFile(name, contents[name], hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()
    ]
    return Contents(folder, "model", tuple(items), card, ())


def wanted(contents: Contents) -> dict[str, bytes]:
    """The files that are to be on main."""
    return {item.name: item.read() for item in contents.files}


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


def publish(contents: Contents, private: bool = True) -> Published:
    """Send contents to the repository of the tests."""
    return push(contents, find_destination(REPO, private))
