"""The manifest's seal, and all that a folder may hold beside the files that its manifest names."""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from msa_lite.errors import FormatError, OutputError
from msa_lite.io.files.cache import Cache
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.manifest import check_free, is_finished, stage_folder
from msa_lite.io.finished.seal import (
    MANIFEST,
    WORKING,
    add_files,
    check_written,
    load_manifest,
    sealed_json,
    verify_folder,
    write_manifest,
)
from tests.support.places import NO_FILES, link

INPUTS: dict[str, Any] = {"seed": 1, "name": "naïve → β"}
BROKEN = f"{MANIFEST}: not as msa-lite wrote it, or of another program"


@pytest.fixture(autouse=True)
def _in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing wait for the disk."""
    monkeypatch.setattr("msa_lite.io.finished.manifest.sync", lambda path: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished folder with a folder in it, which is a stage of its own."""
    with stage_folder(tmp_path / "out", "model", INPUTS, {"change": {"notes": []}}) as partial:
        (partial / "a.txt").write_text("a")
        (partial / "sub").mkdir()
        (partial / "sub" / "b.txt").write_text("b")
        with stage_folder(partial / "ideal", "evaluation", {}) as inner:
            (inner / "c.txt").write_text("c")
    return tmp_path / "out"


def test_a_flipped_bit_in_any_byte_of_the_manifest_is_seen(folder: Path) -> None:
    content = (folder / MANIFEST).read_bytes()
    assert verify_folder(folder) == []
    for place, byte in enumerate(content):
        flipped = bytes([byte ^ 1 << place % 8])
        (folder / MANIFEST).write_bytes(content[:place] + flipped + content[place + 1 :])
        assert load_manifest(folder) is None, place
        with pytest.raises(FormatError, match=MANIFEST):
            check_written(folder, ["a.txt"])
    assert verify_folder(folder) == [BROKEN]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + "\n",
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text[:-1],
        lambda text: "",
        lambda text: text.replace('"seed": 1', '"seed": 2'),
        lambda text: text.replace("manifest_sha256", "manifest_sha512"),
        lambda text: text.replace('"format": 2', '"format": 1'),
        lambda text: re.sub(r',\n  "format": .*,\n  "manifest_sha256": .*', "", text),  # without a seal
        lambda text: '{"made_by": "someone else"}',
    ],
)
def test_every_other_change_is_seen_and_such_a_folder_is_neither_taken_up_nor_replaced(
    folder: Path, change: Callable[[str], str]
) -> None:
    (folder / MANIFEST).write_bytes(change((folder / MANIFEST).read_text("utf-8")).encode())
    assert verify_folder(folder) == [BROKEN]
    assert not is_finished(folder, INPUTS)
    with pytest.raises(OutputError, match=r"did not make, or whose manifest\.json is damaged"):
        check_free(folder, "model")


SHAPES: list[Any] = [
    {},
    *(
        {"made_by": "msa-lite", "kind": "model", "inputs": {}, "files": {}} | change
        for change in (
            {"kind": None}, {"inputs": []}, {"files": None}, {"files": {"a": None}}, {"files": {"a": {"bytes": 1}}},
            {"files": {"a": {"bytes": 1.5, "sha256": ""}}}, {"files": {"a": {"bytes": 1, "sha256": 5}}},
            {"made_by": ["msa-lite"]},
        )
    ),
]  # fmt: skip


BYTES = [b"\xff\xfe", b"[" * 100_000, b'{"a": "\\ud800"}', b"\x00" * 10, b"9" * 5000]


def test_a_manifest_of_another_shape_is_none_even_with_a_seal(folder: Path) -> None:
    sealed = [sealed_json({**value, "format": 2}, "manifest_sha256") for value in SHAPES if isinstance(value, dict)]
    for content in [*(text.encode() for text in sealed), b"null", b"[]", *BYTES]:
        (folder / MANIFEST).write_bytes(content)
        assert load_manifest(folder) is None, content[:99]
        assert not is_finished(folder, {}), content[:99]
        assert verify_folder(folder) == [BROKEN], content[:99]


PUT: dict[str, Callable[[Path], Any]] = NO_FILES | {
    "file": Path.touch,
    "link to a file of the folder": link("a.txt"),
    "link to a folder": link("sub"),
}


ADDED = [
    *((".hidden", kind) for kind in PUT),
    *((name, "file") for name in (*WORKING, ".replaced", "sub/manifest.json")),
]


@pytest.mark.parametrize(("name", "kind"), ADDED)
def test_whatever_was_added_is_named_and_nothing_hangs(folder: Path, name: str, kind: str) -> None:
    PUT[kind](folder / name)
    assert verify_folder(folder) == [f"{name}: not in the manifest"]
    is_finished(folder, INPUTS)
    assert os.path.lexists(folder / name)  # it is none of ours to remove


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("sub/b.txt", kind) for kind in PUT if kind != "file"),
        ("ideal/manifest.json", "pipe"),
        *((MANIFEST, kind) for kind in ("pipe", "link to itself", "device")),
    ],
)
def test_whatever_stands_in_the_place_of_a_file_is_a_fault(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink()
    PUT[kind](folder / name)
    (fault,) = verify_folder(folder)
    assert fault.startswith(f"{name}: ")
    assert not is_finished(folder, INPUTS)


def test_a_link_with_the_right_content_is_as_good_as_the_file(folder: Path, tmp_path: Path) -> None:
    os.rename(folder / "a.txt", tmp_path / "blob")  # as the Hub's cache keeps files
    (folder / "a.txt").symlink_to(tmp_path / "blob")
    assert verify_folder(folder) == []


def test_a_linked_folder_is_not_looked_into(folder: Path, tmp_path: Path) -> None:
    os.rename(folder / "sub", tmp_path / "elsewhere")
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    assert verify_folder(folder) == ["sub/b.txt: missing", "sub: not in the manifest"]


def test_a_name_that_leads_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("secret")
    manifest = load_manifest(folder) or {}
    names = ["../outside.txt", str(tmp_path / "outside.txt")]
    manifest["files"] |= {name: {"bytes": 6, "sha256": "0" * 64} for name in names}
    write_manifest(folder, manifest)
    assert verify_folder(folder) == [f"{name}: missing" for name in names]
    assert not is_finished(folder, INPUTS)


def test_names_of_any_bytes_are_recorded_and_found_again(tmp_path: Path) -> None:
    raw = b"b\xff \xc3\xa4.txt"
    with stage_folder(tmp_path / "out", "model", INPUTS, {"sources": {"target": os.fsdecode(raw)}}) as partial:
        (partial / os.fsdecode(raw)).write_text("b")
    manifest = load_manifest(tmp_path / "out") or {}
    assert list(manifest["files"]) == ["b\\xff ä.txt"]
    assert manifest["sources"] == {"target": "b\\xff ä.txt"}
    assert verify_folder(tmp_path / "out") == []
    assert is_finished(tmp_path / "out", INPUTS)
    (tmp_path / "out" / os.fsdecode(raw)).write_text("c")
    assert verify_folder(tmp_path / "out") == ["b\\xff ä.txt: content changed"]
    (tmp_path / "out" / os.fsdecode(raw)).write_text("cc")
    assert verify_folder(tmp_path / "out") == ["b\\xff ä.txt: 2 bytes, recorded were 1"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda folder: None, None),
        (lambda folder: (folder / "README.md").write_text("notes"), None),  # is not asked for
        (lambda folder: (folder / "a.txt").write_text("z"), "a.txt: content changed"),
        (lambda folder: (folder / "a.txt").unlink(), "a.txt: missing"),
        (lambda folder: (folder / MANIFEST).write_text("{}"), None),  # of another program
        (lambda folder: (folder / MANIFEST).unlink(), None),
    ],
)
def test_what_is_about_to_be_used_is_as_it_was_written(folder: Path, change: Any, fault: str | None) -> None:
    os.utime(folder / "a.txt", (0, 0))
    change(folder)
    with pytest.raises(FormatError, match=fault) if fault else nullcontext():
        check_written(folder, ["a.txt"])


def test_a_hash_is_kept_only_while_nobody_writes_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msa_lite.io.files.writing._SETTLED", 0)
    path, hashes = tmp_path / "a", []
    for content in ("one", "two"):
        path.write_text(content)
        os.utime(path, (0, 0))
        time.sleep(0.05)  # more than the steps of the system's clock
        hashes.append(hash_file(path))
    assert hashes == [hashlib.sha256(content).hexdigest() for content in (b"one", b"two")]
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", None)
        assert hash_file(path) == hashes[-1]  # it is not read again


def test_a_file_that_was_just_written_is_hashed_again_however_long_the_first_time_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("one")
    times = [(tmp_path / "a").stat().st_ctime_ns]
    whole = hashlib.sha256
    monkeypatch.setattr(time, "time_ns", lambda: times[-1])
    monkeypatch.setattr(hashlib, "sha256", lambda: times.append(times[-1] + 10**10) or whole())
    assert [hash_file(tmp_path / "a") for _ in range(2)] == [whole(b"one").hexdigest()] * 2
    assert len(times) == 3


def test_a_kept_value_that_is_not_as_it_was_written_counts_as_missing(tmp_path: Path) -> None:
    kept = Cache(tmp_path / "kept.sqlite", "remove it")
    kept.keep({"a": "one", "b": "two", "c": "drei"})
    with closing(sqlite3.connect(kept.path)) as database, database:
        database.execute("UPDATE kept SET value = replace(value, 'two', 'twx') WHERE key = 'b'")
        database.execute("UPDATE kept SET value = CAST(CAST(value AS BLOB) || x'ff' AS TEXT) WHERE key = 'c'")
    assert kept.read("abc") == {"a": "one"}


def test_files_that_are_added_are_sealed_in(folder: Path) -> None:
    (folder / "picture.png").write_text("png")
    with pytest.raises(FormatError, match=r"picture\.png: not in the manifest"):
        check_written(folder, ["picture.png"])
    add_files(folder, ["picture.png"], {"pictures": True})
    assert verify_folder(folder) == []
    manifest = load_manifest(folder) or {}
    assert (manifest["pictures"], is_finished(folder, INPUTS)) == (True, True)
