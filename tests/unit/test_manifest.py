"""Stage folders: whole or not there, resumable on request, checked afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.errors import BusyError, OutputError, StageError, discarded
from msa_lite.io.files.writing import check_space
from msa_lite.io.finished import manifest, seal
from msa_lite.io.finished.manifest import check_free, is_finished, stage_folder
from msa_lite.io.finished.seal import JOURNAL, MANIFEST, in_use, load_manifest, verify_folder

INPUTS = {"seed": 1, "source": {"revision": "sha256:0"}}


def build(folder: Path, inputs: dict[str, Any] = INPUTS, text: str = "weights", **options: Any) -> Path:
    with stage_folder(folder, "model", inputs, **options) as partial:
        (partial / "sub").mkdir(exist_ok=True)
        (partial / "sub" / "a.txt").write_text(text)
        (partial / "b.txt").write_text("b")
    return folder


def fail(folder: Path, error: BaseException, inputs: dict[str, Any] = INPUTS, resumable: bool = False) -> None:
    def run() -> None:
        with stage_folder(folder, "model", inputs, resumable=resumable) as partial:
            (partial / "half.txt").write_text("half")
            raise error

    with pytest.raises(type(error)):
        run()


def leftovers(folder: Path) -> list[str]:
    """What a stage has left where `folder` is to be: names beside it and inside its partial folder."""
    return sorted(str(path.relative_to(folder.parent)) for path in folder.parent.rglob("*"))


def test_a_finished_folder_has_its_manifest_and_no_partial(tmp_path: Path) -> None:
    facts: dict[str, Any] = {}
    with stage_folder(tmp_path / "out", "model", INPUTS, facts) as partial:
        assert partial == tmp_path / "out.partial"
        (partial / "a.txt").write_text("a")
        (partial / JOURNAL).write_text("shard 1")  # which is no part of the result
        facts["change"] = 3
        assert not (partial / MANIFEST).exists()
        assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path / "out") == ["out", "out/a.txt", f"out/{MANIFEST}"]
    found = load_manifest(tmp_path / "out") or {}
    assert (found["kind"], found["inputs"], found["change"]) == ("model", INPUTS, 3)
    assert list(found["files"]) == ["a.txt"]
    assert found["versions"]["numpy"]


@pytest.mark.parametrize(
    ("error", "resumable"),
    [
        *((error, False) for error in (StageError("no"), KeyboardInterrupt(), OSError(28, "full"))),
        (discarded(StageError("diverged")), True),
    ],
)
def test_a_raising_stage_leaves_nothing(tmp_path: Path, error: BaseException, resumable: bool) -> None:
    fail(tmp_path / "out", error, resumable=resumable)
    assert leftovers(tmp_path / "out") == []


def test_a_resumable_stage_gets_its_partial_folder_back_for_the_same_inputs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fail(tmp_path / "out", StageError("no"), resumable=True)
    with stage_folder(tmp_path / "out", "model", dict(reversed(INPUTS.items())), resumable=True) as partial:
        assert (partial / "half.txt").read_text() == "half"
    assert verify_folder(tmp_path / "out") == []
    assert caplog.messages == []


@pytest.mark.parametrize(("kind", "inputs"), [("model", {"seed": 2}), ("vector", INPUTS)])
def test_a_resumable_stage_starts_afresh_for_other_inputs(
    tmp_path: Path, kind: str, inputs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    fail(tmp_path / "out", StageError("no"), resumable=True)
    with stage_folder(tmp_path / "out", kind, inputs, resumable=True) as partial:
        assert not (partial / "half.txt").exists()
    assert caplog.messages == [f"{partial}: was begun from other inputs or settings, so it is made anew"]


@pytest.mark.parametrize("other", [True, False])
def test_what_a_kill_leaves_of_a_folder_that_is_emptied_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    """other: it is emptied for other inputs; else because the stage's error says so."""
    out = tmp_path / "out"
    fail(out, StageError("no"), resumable=True)
    (tmp_path / "out.partial/another.txt").write_text("another")
    unlink, error = os.unlink, StageError("killed")

    def killing(path: Any, **options: Any) -> None:
        unlink(path, **options)
        if str(path).endswith(".txt"):
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killing)
        fail(out, error if other else discarded(error), {"seed": 2} if other else INPUTS, resumable=True)
    assert len([*tmp_path.glob("out.partial/*.txt")]) == 1
    with stage_folder(out, "model", INPUTS, resumable=True) as partial:
        assert not [*partial.glob("*.txt")]


STEPS = {
    "before the marker": ("write_json", 0),
    "before the manifest": ("write_manifest", 0),
    "before the marker tells that all is done": ("write_json", 1),
    "before the old folder is moved": ("sync", 0),
    "between the renames": ("rename", 1),
    "before the new folder is read back": ("verify_folder", 0),
    "before the former folder is removed": ("_remove_previous", 0),
    "before the folder is cleared of what made it": ("_sweep", 0),
}
OF_TWO_FOLDERS = ("before the new folder is read back", "before the former folder is removed")
KILLED = """
import os, signal, sys
from pathlib import Path
from msa_lite.io.finished import manifest, seal

step, count, out, text = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
owner = os if step == "rename" else manifest
real = getattr(owner, step)
calls = []

def killing(*args):
    calls.append(args)
    if len(calls) > count:
        if step == "write_json":  # killed within it: the temporary file is there
            args[0].with_name(args[0].name + ".tmp").write_text("{")
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)

setattr(owner, step, killing)
with manifest.stage_folder(out, "model", {"text": text}) as partial:
    (partial / "a.txt").write_text(text)
"""


@pytest.mark.parametrize(
    ("step", "old"), [(step, old) for step in STEPS for old in (False, True) if old or step not in OF_TWO_FOLDERS]
)
def test_a_kill_at_any_step_leaves_the_old_folder_or_the_new_and_the_next_run_gets_through(
    tmp_path: Path, step: str, old: bool
) -> None:
    out = tmp_path / "out"
    if old:
        with stage_folder(out, "model", {"text": "old"}) as partial:
            (partial / "a.txt").write_text("old")
    name, count = STEPS[step]
    count -= name == "rename" and not old  # then there is only one rename
    done = subprocess.run([sys.executable, "-c", KILLED, name, str(count), str(out), "new"], check=False)
    assert done.returncode == -signal.SIGKILL
    if out.exists():
        assert verify_folder(out) == []
        late = name in ("verify_folder", "_remove_previous", "_sweep")
        assert (out / "a.txt").read_text() == ("new" if late else "old")
    else:
        assert not old or step == "between the renames"
    if step == "between the renames" and old:
        assert (tmp_path / "out.previous" / "a.txt").read_text() == "old"
    if name in ("verify_folder", "_remove_previous", "_sweep"):
        assert is_finished(out, {"text": "new"})
        assert leftovers(out) == ["out", "out/a.txt", f"out/{MANIFEST}"]
    with stage_folder(out, "model", {"text": "newer"}) as partial:
        assert out.exists() == (old or name == "_sweep")  # also what was moved aside is back
        assert not (partial / "a.txt").exists()
        (partial / "a.txt").write_text("newer")
    assert verify_folder(out) == []
    assert leftovers(out) == ["out", "out/a.txt", f"out/{MANIFEST}"]


def test_a_new_folder_that_was_never_read_back_is_read_before_the_former_one_goes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with stage_folder(out, "model", {"text": "old"}) as partial:
        (partial / "a.txt").write_text("old")
    subprocess.run([sys.executable, "-c", KILLED, "verify_folder", "0", str(out), "new"], check=False)
    (out / "a.txt").write_text("bad")  # as long as what was written
    assert not is_finished(out, {"text": "new"})
    assert (tmp_path / "out.previous/a.txt").read_text() == "old"


@pytest.mark.parametrize("name", [MANIFEST, "report.json"])
def test_what_a_kill_left_of_a_half_written_file_does_not_get_into_the_manifest(tmp_path: Path, name: str) -> None:
    fail(tmp_path / "out", StageError("as if it was killed"), resumable=True)
    (tmp_path / "out.partial" / f"{name}.tmp").write_text("{")
    build(tmp_path / "out", resumable=True)
    assert verify_folder(tmp_path / "out") == []
    assert is_finished(tmp_path / "out", INPUTS)
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_a_lock_is_held_while_a_folder_is_built(tmp_path: Path) -> None:
    with stage_folder(tmp_path / "out", "model", INPUTS) as partial:
        (partial / "a.txt").write_text("mine")
        for inputs in (INPUTS, {"seed": 2}):  # those of another do not clear it away
            with pytest.raises(OutputError, match=r"out\.partial: another msa-lite is working in it"):
                build(tmp_path / "out", inputs)
    assert leftovers(tmp_path / "out") == ["out", "out/a.txt", f"out/{MANIFEST}"]


def test_many_may_read_a_folder_and_only_one_that_is_alone_may_clear_it(tmp_path: Path) -> None:
    readers, working = rf"is open \(process {os.getpid()}, {os.getpid()}\)", "another msa-lite is working"
    with in_use(tmp_path), in_use(tmp_path), pytest.raises(BusyError, match=readers), in_use(tmp_path, alone=True):
        pass
    with in_use(tmp_path, alone=True), pytest.raises(BusyError, match=working), in_use(tmp_path):
        pass
    with in_use(tmp_path, alone=True), in_use(tmp_path / "nowhere"):
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", [True, False])
def test_a_link_leads_to_where_it_points(tmp_path: Path, there: bool) -> None:
    (tmp_path / "disk").mkdir()
    if there:
        (tmp_path / "disk" / "model").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "model")
    for seed in (1, 2):
        with stage_folder(tmp_path / "out", "model", {"seed": seed}) as partial:
            assert partial == tmp_path / "disk" / "model.partial"
            (partial / "a.txt").write_text(str(seed))
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "model" / "a.txt").read_text() == "2"
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["model"]
    assert is_finished(tmp_path / "out", {"seed": 2})


def test_a_place_that_nothing_can_be_renamed_to_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is where a disk is mounted; choose a folder inside it"):
        check_free(Path("/"), "model")
    check_free(tmp_path / "out", "model")
    assert list(tmp_path.iterdir()) == []


def test_hashes_that_are_known_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    whole = seal.hash_file
    monkeypatch.setattr(seal, "hash_file", lambda path: hashed.append(path.name) or whole(path))
    known = {"b.txt": whole(build(tmp_path / "other") / "b.txt")}
    hashed.clear()
    folder = build(tmp_path / "out", hashes=known)
    assert [name for name in hashed if name != MANIFEST] == ["a.txt"]
    assert verify_folder(folder) == []


@pytest.mark.parametrize("place", ["out/thesis.txt", "out.partial/thesis.txt", "out"])
def test_a_foreign_folder_or_file_in_the_way_is_refused_and_left_alone(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("years of work")
    before = leftovers(tmp_path / "out")
    with pytest.raises(OutputError, match="a file is in the way" if place == "out" else "msa-lite"):
        build(tmp_path / "out")
    assert leftovers(tmp_path / "out") == before
    assert (tmp_path / place).read_text() == "years of work"


def test_a_folder_of_ours_is_replaced_whole_and_an_empty_one_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    build(tmp_path / "out")
    with stage_folder(tmp_path / "out", "model", {"seed": 2}) as partial:
        (partial / "new.txt").touch()
        assert (tmp_path / "out" / "b.txt").exists()  # the old one stays until the new one is complete
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [MANIFEST, "new.txt"]


def test_a_folder_is_finished_for_its_own_inputs_and_sizes_only(tmp_path: Path) -> None:
    assert not is_finished(tmp_path / "out", INPUTS)
    build(tmp_path / "out")
    assert is_finished(tmp_path / "out", dict(reversed(INPUTS.items())))
    assert not is_finished(tmp_path / "out", INPUTS | {"seed": 2})
    (tmp_path / "out" / "b.txt").write_text("longer")
    assert not is_finished(tmp_path / "out", INPUTS)


def test_space_is_asked_of_the_disk_that_will_hold_the_folder(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(OutputError, match=r"out: 1e\+09 TB are needed, .* are free"):
        check_space(tmp_path / "out", 10**21)


def test_a_folder_without_a_manifest_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=MANIFEST):
        verify_folder(tmp_path)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_follow_the_umask_even_of_files_that_were_made_private(
    tmp_path: Path, mask: int, mode: int
) -> None:
    before = os.umask(mask)
    try:
        with stage_folder(tmp_path / "out", "model", INPUTS) as partial:
            (partial / "a").touch()
            (partial / "a").chmod(0o600)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {
        "a": mode,
        MANIFEST: mode,
    }


def test_the_former_folder_stays_until_the_new_one_was_read_back_and_is_put_back_where_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = build(tmp_path / "out", text="old")
    real, during = manifest.verify_folder, []

    def spoiled(folder: Path) -> list[str]:
        during.append(sorted(path.name for path in tmp_path.iterdir()))
        assert (tmp_path / "out.previous/sub/a.txt").read_text() == "old"
        (folder / "sub/a.txt").write_text("bits fell over")
        return real(folder)

    monkeypatch.setattr(manifest, "verify_folder", spoiled)
    with pytest.raises(StageError, match=r"read back is not what was written; the former folder stays.*\n  sub/a.txt"):
        build(out, {"seed": 2}, text="new")
    assert during == [["out", "out.previous"]]
    assert (out / "sub/a.txt").read_text() == "old"
    monkeypatch.undo()
    assert verify_folder(out) == []
    assert is_finished(out, INPUTS)
    assert leftovers(out) == ["out", "out/b.txt", f"out/{MANIFEST}", "out/sub", "out/sub/a.txt"]
    build(out, {"seed": 2}, text="new")
    assert (out / "sub/a.txt").read_text() == "new"
    assert not (tmp_path / "out.previous").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file/out", "is a file"), ("closed/out", "is read-only for you"), ("nothing/out", "is no place for files"),
     ("x" * 300, "File name too long")],
)  # fmt: skip
def test_a_place_that_takes_nothing_is_told_as_such_and_not_as_a_full_disk(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder in ("closed", "nothing"):
        (tmp_path / folder).mkdir()
    may, usage, empty = os.access, os.statvfs(tmp_path), SimpleNamespace(f_blocks=0)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and may(path, mode))
    monkeypatch.setattr(os, "statvfs", lambda path: empty if Path(path).name == "nothing" else usage)
    with pytest.raises(OutputError, match=rf"cannot be written \(.*{reason}\)"):
        check_space(tmp_path / name, 1)
