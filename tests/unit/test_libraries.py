"""The command that a message gives for a missing package installs it from where msa-lite came."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from msa_lite.errors import UsageError
from msa_lite.io.console import libraries

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHEEL = "msa_lite-0.1.0-py3-none-any.whl"


def message(monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None) -> list[str]:
    """Return the words after "pip install" for an installation with this direct_url.json."""
    record = json.dumps(origin) if origin else None
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: record))
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        libraries.require("train")
    _, _, command = str(caught.value).partition(": pip install ")
    return shlex.split(command)


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (None, ["msa-lite[train]"]),
        ({"url": "file:///home/me/msa-lite", "dir_info": {"editable": True}}, ["-e", "/home/me/msa-lite[train]"]),
        ({"url": "file:///home/me/my%20clone", "dir_info": {}}, ["/home/me/my clone[train]"]),
        ({"url": f"file:///tmp/it's/{WHEEL}", "archive_info": {}}, [f"/tmp/it's/{WHEEL}[train]"]),
    ],
)
def test_an_extra_is_installed_from_where_msa_lite_came(
    origin: dict[str, Any] | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message(monkeypatch, origin) == words


@pytest.mark.parametrize(
    ("origin", "url"),
    [
        ({"url": f"https://host/{WHEEL}", "archive_info": {}}, f"https://host/{WHEEL}"),
        (
            {"url": "https://host/a/b.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"git+https://host/a/b.git@{COMMIT}",
        ),
        (
            {"url": "file:///home/me/b", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"git+file:///home/me/b@{COMMIT}",
        ),
    ],
)
def test_from_an_address_or_a_repository_it_is_one_requirement(
    origin: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (word,) = message(monkeypatch, origin)
    requirement = Requirement(word)
    assert (requirement.name, requirement.extras, requirement.url) == ("msa-lite", {"train"}, url)
