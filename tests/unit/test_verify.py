"""`msa-lite verify` on one stage and on a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from msa_lite.cli.handing_on import verify_command
from msa_lite.errors import MismatchError, OutputError
from msa_lite.io.finished.manifest import stage_folder

STAGES = ("vectors/forget", "model", "evaluation/target", "baselines/npo/model")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with some stages, one that is being made, and one that a kill has left."""
    for name in (*STAGES, "sweep.partial", "model.previous"):
        with stage_folder(tmp_path / "run" / name, "stage", {}) as partial:
            (partial / "a.txt").write_text("a")
    (tmp_path / "run/sweep.partial/a.txt").unlink()
    (tmp_path / "run/model.previous/a.txt").unlink()
    return tmp_path / "run"


def verify(*arguments: object) -> tuple[int, str]:
    """(exit status, stdout); raises what the command raises."""
    done = CliRunner().invoke(verify_command, [*map(str, arguments)], standalone_mode=False, catch_exceptions=False)
    return done.return_value or 0, done.stdout


def test_a_run_is_verified_stage_by_stage(run: Path) -> None:
    status, out = verify(run)
    assert status == 0
    assert sorted(out.splitlines()) == sorted(f"{run / name}: every file is as it was written" for name in STAGES)


def test_all_that_differs_in_a_run_is_told_at_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "vectors/forget/a.txt").write_text("b")
    (run / "model/a.txt").unlink()
    (run / "evaluation/target/manifest.json").write_text("{")
    with pytest.raises(MismatchError) as caught:
        verify(run)
    assert str(caught.value).splitlines() == [
        f"{run}: differs from its manifest (3 of 4 folders):",
        "  evaluation/target/manifest.json: not as msa-lite wrote it, or of another program",
        "  model/a.txt: missing",
        "  vectors/forget/a.txt: content changed",
    ]
    assert caught.value.exit_code == 3


def test_json_has_the_faults_of_each_stage(run: Path) -> None:
    (run / "model/a.txt").unlink()
    status, out = verify(run, "--json")
    assert status == 3
    said = json.loads(out)
    assert said["faults"] == ["model/a.txt: missing"]
    assert said["stages"] == {name: ["a.txt: missing"] if name == "model" else [] for name in sorted(STAGES)}
    assert json.loads(verify(run / "vectors/forget", "--json")[1])["faults"] == []


def test_a_folder_without_any_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"no manifest\.json of msa-lite in there, nor in a folder below it"):
        verify(tmp_path)
