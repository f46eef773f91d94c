"""What others put where a stage writes: it is neither replaced nor removed, and the stage's work is not lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from msa_lite.errors import OutputError, StageError
from msa_lite.io.finished import manifest
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.finished.seal import LOCK, MANIFEST, MARKER, verify_folder

OLD, NEW = {"seed": 1}, {"seed": 2}


def build(out: Path, inputs: dict[str, Any] = NEW, during: Callable[[], Any] | None = None, text: str = "new") -> None:
    """Make a folder of one file; during: called while that is done."""
    with stage_folder(out, "model", inputs, resumable=True) as partial:
        (partial / "a.txt").write_text(text)
        if during:
            during()


def write_theirs(out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")


def write_another_model(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    with stage_folder(out.with_name("another"), "model", {"seed": 3}) as partial:
        (partial / "b.txt").write_text("another")
    os.rename(out.with_name("another"), out)


def write_file(out: Path) -> None:
    out.write_text("years of work")


def write_link(out: Path) -> None:
    write_theirs(out.with_name("theirs"))
    out.symlink_to(out.with_name("theirs"))


def look(folder: Path) -> dict[str, bytes | str]:
    """Content of all files below a folder, or of a file, and where links lead."""
    if folder.is_symlink():
        return {"": os.readlink(folder)}
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("write", [write_theirs, write_another_model, write_file, write_link])
@pytest.mark.parametrize("moment", ["during the work", "before the rename"])
def test_what_has_come_while_a_stage_worked_stays_and_so_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], moment: str
) -> None:
    out, seen = tmp_path / "out", {}

    def put() -> None:
        write(out)
        seen.update(look(out))

    if moment == "before the rename":
        real = os.rename

        def rename(source: Path, place: Path) -> None:
            if place == out and not seen:
                monkeypatch.setattr(os, "rename", real)
                put()
            real(source, place)

        monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OutputError, match=r"something there meanwhile; move it elsewhere.*out\.partial") as caught:
        build(out, during=put if moment == "during the work" else None)
    assert caught.value.exit_code == 3
    assert look(out) == seen
    assert (tmp_path / "out.partial" / "a.txt").read_text() == "new"
    os.rename(out, tmp_path / "moved")
    with stage_folder(out, "model", NEW, resumable=True) as partial:
        assert (partial / "a.txt").read_text() == "new"  # nothing is done twice
    assert verify_folder(out) == []
    assert sorted(look(out)) == ["a.txt", MANIFEST]


@pytest.mark.parametrize("write", [write_theirs, write_another_model, write_file, write_link])
def test_what_has_taken_the_place_of_a_folder_that_was_to_be_replaced_is_put_back(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    out, seen = tmp_path / "out", {}
    build(out, OLD, text="old")

    def swap() -> None:
        shutil.rmtree(out)
        write(out)
        seen.update(look(out))

    with pytest.raises(OutputError, match="somebody else has written it meanwhile"):
        build(out, during=swap)
    assert look(out) == seen
    assert (tmp_path / "out.partial" / "a.txt").read_text() == "new"
    assert not (tmp_path / "out.previous").exists()


def test_a_folder_that_was_removed_meanwhile_is_made_all_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(out, OLD)
    build(out, during=lambda: shutil.rmtree(out))
    assert is_finished(out, NEW)
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_an_empty_folder_that_has_come_meanwhile_is_used(tmp_path: Path) -> None:
    build(tmp_path / "out", during=(tmp_path / "out").mkdir)
    assert verify_folder(tmp_path / "out") == []


@pytest.mark.parametrize("name", ["thesis.txt", "sub/thesis.txt", ".lock", ".journal.jsonl"])
def test_files_in_a_folder_that_is_replaced_are_kept_beside_it(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    build(out, OLD, text="old")
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("years of work")
    with caplog.at_level("WARNING", "msa_lite"):
        manifest.logger.propagate = True
        build(out)
    assert look(out).keys() == {"a.txt", MANIFEST}
    assert look(tmp_path / "out.previous") == {name: b"years of work"}
    with pytest.raises(OutputError, match=r"out\.previous: is in the way, as out is to be replaced; move it elsewhere"):
        build(out, {"seed": 3})
    assert look(tmp_path / "out.previous") == {name: b"years of work"}
    assert verify_folder(out) == []


def test_something_that_has_the_name_of_the_former_by_now_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(out, OLD, text="old")
    with pytest.raises(OutputError, match=r"out\.previous: is in the way"):
        build(out, during=lambda: write_theirs(tmp_path / "out.previous"))
    assert look(tmp_path / "out.previous") == {"thesis.txt": b"years of work"}
    assert (out / "a.txt").read_text() == "old"


@pytest.mark.parametrize("write", [write_theirs, write_another_model, write_file, write_link])
@pytest.mark.parametrize("moment", ["before", "during"])
def test_where_nothing_is_replaced_what_is_called_as_a_former_one_stays(
    tmp_path: Path, write: Callable[[Path], None], moment: str
) -> None:
    out, previous = tmp_path / "out", tmp_path / "out.previous"
    if moment == "before":
        write(previous)
    build(out, during=(lambda: write(previous)) if moment == "during" else None)
    before = look(previous)
    assert before
    assert verify_folder(out) == []
    assert sorted(look(out)) == ["a.txt", MANIFEST]
    assert is_finished(out, NEW)
    assert look(previous) == before


def test_a_file_that_comes_while_a_new_folder_is_read_back_survives_a_bad_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    build(out, OLD, text="old")
    real = manifest.verify_folder

    def spoiled(folder: Path) -> list[str]:
        (folder / "a.txt").write_text("bits fell over")
        (folder / "thesis.txt").write_text("years of work")
        return real(folder)

    monkeypatch.setattr(manifest, "verify_folder", spoiled)
    with pytest.raises(OutputError, match="holds what msa-lite does not know; the former one is"):
        build(out)
    assert (out / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "out.previous/a.txt").read_text() == "old"


@pytest.mark.parametrize("name", [LOCK, MARKER])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_odd_things_in_a_partial_folder_are_not_written_through(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "theirs.txt").write_text("years of work")
    build(tmp_path / "first")
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / name).symlink_to(tmp_path / "theirs.txt") if kind == "link" else None
    os.mkfifo(partial / name) if kind == "pipe" else None
    (partial / name).mkdir() if kind == "folder" else None
    with suppress(OutputError):
        build(tmp_path / "out")
        assert verify_folder(tmp_path / "out") == []
    assert (tmp_path / "theirs.txt").read_text() == "years of work"


def test_a_partial_folder_that_is_a_link_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "out.partial").symlink_to(tmp_path / "theirs")
    with pytest.raises(OutputError, match=r"out\.partial: a file is in the way"):
        build(tmp_path / "out")
    assert list((tmp_path / "theirs").iterdir()) == []


def test_links_in_a_partial_folder_that_is_taken_up_do_not_get_into_the_result(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop() -> None:
        raise StageError("as if it was killed")

    with pytest.raises(StageError):
        build(out, during=stop)
    (tmp_path / "theirs.txt").write_text("new")
    (tmp_path / "out.partial/a.txt").unlink()
    (tmp_path / "out.partial/a.txt").symlink_to(tmp_path / "theirs.txt")
    os.mkfifo(tmp_path / "out.partial/pipe")
    build(out)
    assert not (out / "a.txt").is_symlink()
    assert sorted(path.name for path in out.iterdir()) == ["a.txt", MANIFEST]


@pytest.mark.parametrize("place", ["x" * 300, "x" * 250, "file/out", "loop", "loop/out", "zero\0byte"])
def test_names_that_no_folder_can_have_are_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match="cannot be written"):
        build(tmp_path / place)
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]


def test_a_relative_name_in_a_working_folder_that_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(OutputError, match="out: cannot be written"):
        build(Path("out"))
    build(tmp_path / "out")
    assert verify_folder(tmp_path / "out") == []


def test_a_parent_that_cannot_be_written_to_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(*args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(OutputError, match=r"cannot be written.*read-only"):
        build(tmp_path / "out")
