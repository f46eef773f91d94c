"""What is written and found in files: JSON of any value, texts at any place, and disks that are full."""

from __future__ import annotations

import errno
import json
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from inspect import getmembers, isclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from msa_lite.errors import MismatchError, MsaError, StageError
from msa_lite.io.files import search
from msa_lite.io.files.search import SHORTEST, TextSearch
from msa_lite.io.files.writing import disk_fault, indented_json, json_form, write_text
from msa_lite.io.finished.manifest import partial_folder, stage_folder
from msa_lite.record.seal import make_key
from tests.tools.arrows import module_of, sources


@dataclass(frozen=True)
class Pair:
    """Two values of different kinds."""

    place: Path
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class Keyed:
    """A value that chooses its keys."""

    pair: Pair | None
    figures: dict[str, Any]
    notes: tuple[str, ...] = ()
    json_keys: ClassVar = {"out": "pair.place", "**": "figures", "pair": "pair", "size": "size", "notes?": "notes"}

    @property
    def size(self) -> int:
        return len(self.figures)


@dataclass(frozen=True)
class Named:
    """A value that shows some of its attributes, in an order of its own."""

    first: int
    second: int
    hidden: int
    json_keys: ClassVar = ("second", "first")


PAIR = Pair(Path("a/b"), (1.0, 2.0))


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (PAIR, {"place": "a/b", "numbers": [1.0, 2.0]}),
        (Keyed(PAIR, {"x": (PAIR,)}), {
            "out": "a/b", "x": [{"place": "a/b", "numbers": [1.0, 2.0]}],
            "pair": {"place": "a/b", "numbers": [1.0, 2.0]}, "size": 1,
        }),
        (Keyed(None, {}, ("seen",)), {"out": None, "pair": None, "size": 0, "notes": ["seen"]}),
        (Named(1, 2, 3), {"second": 2, "first": 1}),
        ({"a": [Path("x"), None, True, "text"]}, {"a": ["x", None, True, "text"]}),
    ],
)  # fmt: skip
def test_values_become_json(value: object, form: object) -> None:
    assert json_form(value) == form
    assert list(json_form(value)) == list(form)  # type: ignore[call-overload]
    assert json.loads(indented_json(value)) == form


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError):
        indented_json({"a": {1, 2}})
    with pytest.raises(TypeError):
        indented_json(Pair)  # the class, not a value


def keyed_classes() -> Iterator[type]:
    for path in sources():
        if "json_keys" in path.read_text():
            module = import_module(module_of(path))
            for _, kind in getmembers(module, isclass):
                if kind.__module__ == module.__name__ and "json_keys" in vars(kind):
                    yield kind


def test_every_key_shows_an_attribute() -> None:
    kinds = list(keyed_classes())
    assert len(kinds) > 8
    for kind in kinds:
        assert is_dataclass(kind), kind
        keys: Any = vars(kind)["json_keys"]
        attributes = {field.name for field in fields(kind)} | set(dir(kind))
        paths = keys.values() if isinstance(keys, dict) else keys
        assert {path.partition(".")[0] for path in paths} <= attributes, kind


TEXTS = st.text(st.sampled_from('ab é\n"東'), min_size=12, max_size=20).map(str.strip)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(TEXTS, max_size=4), content=st.text(st.sampled_from('ab é\n"東'), max_size=90), data=st.data())
def test_a_file_is_found_if_a_text_stands_in_it(
    texts: list[str], content: str, data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_BLOCK", data.draw(st.integers(1, 50)))
    if texts and data.draw(st.booleans()):
        content += data.draw(
            st.sampled_from([texts[0], json.dumps(texts[0]), json.dumps(texts[0], ensure_ascii=False)])
        )
    (tmp_path / "a").write_text(content + data.draw(st.sampled_from(["", "x"])))
    raw = (tmp_path / "a").read_bytes()
    forms = [f for t in texts for f in (t, json.dumps(t)[1:-1], json.dumps(t, ensure_ascii=False)[1:-1])]
    expected = any(form.encode() in raw for form in forms if len(form.encode()) >= SHORTEST)
    assert TextSearch(texts).is_in(tmp_path / "a") is expected


def test_short_texts_are_not_looked_for(tmp_path: Path) -> None:
    assert not TextSearch(["yes", " " * 20, "elevenbytes"])
    assert TextSearch(["twelve bytes"])


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 100 kB, which libraries meet as they meet a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def by_safetensors(folder: Path) -> None:
    (folder / "begun").touch()
    save_file({"a": np.zeros(10**6, np.float32)}, folder / "a.safetensors")


def by_torch(folder: Path) -> None:
    torch.save({"a": torch.zeros(10**6)}, folder / "a.pt")


@pytest.mark.parametrize("write", [by_safetensors, by_torch])
@pytest.mark.parametrize("resumable", [False, True])
def test_a_stage_tells_a_librarys_error_of_a_full_disk_in_its_own_words(
    write: Callable[[Path], None], resumable: bool, small_files: None, tmp_path: Path
) -> None:
    folder = tmp_path / "vector"
    with (
        pytest.raises(StageError, match=r"vector: the disk is full \(.* free\); make room and run") as raised,
        stage_folder(folder, "vector", {}, resumable=resumable) as partial,
    ):
        write(partial)
    assert not isinstance(raised.value.__cause__, OSError | MsaError)
    assert not folder.exists()
    assert partial_folder(folder).exists() == resumable


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (Exception("Disk quota exceeded (os error 122)"), True),
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device"), True),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"), True),
        (raised_from(ValueError("cannot be read"), OSError(errno.ENOSPC, "full")), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (ValueError("device 28"), False),
    ],
)
def test_a_full_disk_is_known_by_number_and_by_words(error: Exception, is_full: bool) -> None:
    assert (disk_fault(error) is not None) == is_full


@pytest.mark.parametrize("error", [MismatchError("no space left on device"), OSError(errno.ENOSPC, "full")])
def test_what_says_enough_stays_as_it_is(error: Any, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised, stage_folder(tmp_path / "vector", "vector", {}):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("write", [lambda path: write_text(path, "x" * 200_000), make_key])
def test_a_full_disk_leaves_the_former_file_and_no_half_one(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)  # of the key
    monkeypatch.setattr("os.replace", fail)  # of the text
    (tmp_path / "other").write_text("former")
    path = tmp_path / ("key" if write is make_key else "other")
    with pytest.raises(OSError, match="No space"):
        write(path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"other": "former"}
