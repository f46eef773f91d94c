"""Uploads to a Hub on loopback: what is sent, in which order, and what faults leave on main and on the branch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from msa_lite.errors import FormatError, MsaError, OutputError, StageError, UsageError
from msa_lite.publish.destination import Destination, find_destination
from msa_lite.publish.upload import Published, push
from tests.hub_uploads import READER, STRANGER, WRITER, Fault, UploadHub

REPO = "alice/forgotten"
CARD = "---\nlicense: mit\n---\n# A model\n"


@dataclass(frozen=True)
class Item:
    name: str
    path: Path | None
    content: bytes | None
    sha256: str
    nbytes: int


@dataclass(frozen=True)
class Contents:
    folder: Path
    kind: str
    files: tuple[Item, ...]
    card: str
    cautions: tuple[str, ...] = ()


def make_contents(folder: Path, seed: int = 0, shards: int = 2, card: str = CARD) -> Any:
    """A model of this many shards, of 100,000 bytes each."""
    folder.mkdir(exist_ok=True)
    files = {
        f"model-{i + 1:05}-of-{shards:05}.safetensors": hashlib.shake_128(bytes([seed, i])).digest(100_000)
        for i in range(shards)
    }
    files["model.safetensors.index.json"] = json.dumps({"weight_map": sorted(files)}).encode()
    files["config.json"] = json.dumps({"model_type": "llama", "seed": seed}).encode()
    files["tokenizer.json"] = b"{}"
    items = []
    for name, data in files.items():
        (folder / name).write_bytes(data)
        items.append(Item(name, folder / name, None, hashlib.sha256(data).hexdigest(), len(data)))
    raw = card.encode()
    items.append(Item("README.md", None, raw, hashlib.sha256(raw).hexdigest(), len(raw)))
    return Contents(folder, "model", tuple(items), card)


def wanted(contents: Any) -> dict[str, bytes]:
    return {i.name: i.content if i.content is not None else i.path.read_bytes() for i in contents.files}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[UploadHub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with UploadHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server


def publish(contents: Any, private: bool = True, gated: bool = False) -> Published:
    return push(contents, find_destination(REPO, private), gated=gated)


def test_it(hub, tmp_path):
    contents = make_contents(tmp_path / "m")
    result = publish(contents)
    print(result)
    for r in hub.requests: print(*r)
    assert hub.on(REPO) == wanted(contents)
    assert hub.branch_names(REPO) == ["main"]
    hub.requests.clear()
    print(publish(contents))
    for r in hub.requests: print(*r)
    publish(make_contents(tmp_path/"m2", 1, 1))
    print(hub.titles, sorted(hub.on(REPO)))
