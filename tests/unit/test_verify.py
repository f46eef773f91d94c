"""`msa-lite verify`: the stages of a run, the signature of its record (by a throw-away key), and rows of a file."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from msa_lite.cli.handing_on import verify_command
from msa_lite.errors import MismatchError, OutputError, UsageError
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.record.check import check_record
from msa_lite.record.seal import KEY_FILE, RECORD_FILE, SIGNATURE_FILE, check_signature, signing_command
from tests.support.runs import make_removal

STAGES = ("vectors/forget", "model", "evaluation/target", "baselines/npo/model")
needs_openssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH is not installed")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_removal(tmp_path / "my run")
    return tmp_path / "my run"


@pytest.fixture
def signed(run: Path, tmp_path: Path) -> Path:
    """A run whose record is signed by the command that verify prints."""
    for name in ("alice", "bob"):
        line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(tmp_path / name)]
        subprocess.run(line, check=True)
    line = signing_command(run).replace("~/.ssh/id_ed25519", f"'{tmp_path / 'alice'}'")
    subprocess.run(line, shell=True, check=True, capture_output=True)
    return run


def signers(folder: Path, *names: str) -> Path:
    lines = [f"{name}@example.org {(folder / f'{name}.pub').read_text()}" for name in names]
    (folder / "signers").write_text("".join(lines))
    return folder / "signers"


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(verify_command, [*map(str, arguments)], standalone_mode=False)


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    """A run's folder with some stages, one that is being made, and one that a kill has left."""
    for name in (*STAGES, "sweep.partial", "model.previous"):
        with stage_folder(tmp_path / "run" / name, "stage", {}) as partial:
            (partial / "a.txt").write_text("a")
    (tmp_path / "run/sweep.partial/a.txt").unlink()
    (tmp_path / "run/model.previous/a.txt").unlink()
    return tmp_path / "run"


def test_a_run_is_verified_stage_by_stage(stages: Path) -> None:
    done = verify(stages)
    assert done.exception is None
    assert sorted(done.stdout.splitlines()) == sorted(
        f"{stages / name}: every file is as it was written" for name in STAGES
    )


def test_all_that_differs_in_a_run_is_told_at_once(stages: Path) -> None:
    (stages / "vectors/forget/a.txt").write_text("b")
    (stages / "model/a.txt").unlink()
    (stages / "evaluation/target/manifest.json").write_text("{")
    fault = verify(stages).exception
    assert isinstance(fault, MismatchError)
    assert str(fault).splitlines() == [
        f"{stages}: differs from its manifest (3 of 4 folders):",
        "  evaluation/target/manifest.json: not as msa-lite wrote it, or of another program",
        "  model/a.txt: missing",
        "  vectors/forget/a.txt: content changed",
    ]
    assert fault.exit_code == 3


def test_json_has_the_faults_of_each_stage(stages: Path) -> None:
    (stages / "model/a.txt").unlink()
    done = verify(stages, "--json")
    assert done.return_value == 3
    said = json.loads(done.stdout)
    assert said["faults"] == ["model/a.txt: missing"]
    assert said["stages"] == {name: ["a.txt: missing"] if name == "model" else [] for name in sorted(STAGES)}
    assert json.loads(verify(stages / "vectors/forget", "--json").stdout)["faults"] == []


def test_a_folder_without_any_stage_is_refused(tmp_path: Path) -> None:
    fault = verify(tmp_path).exception
    assert isinstance(fault, OutputError)
    assert "no manifest.json of msa-lite in there, nor in a folder below it" in str(fault)


@needs_openssh
def test_a_signature_is_checked_with_and_without_the_signers(signed: Path, tmp_path: Path) -> None:
    assert (signed / SIGNATURE_FILE).is_file()
    open_ended = check_signature(signed)
    assert open_ended.startswith('Good "msa-lite" signature with ED25519 key SHA256:')
    assert "--allowed-signers FILE checks whose key that is" in open_ended
    named = check_signature(signed, signers(tmp_path, "bob", "alice"))
    assert named.startswith('Good "msa-lite" signature for alice@example.org with ED25519 key SHA256:')
    done = verify(signed, "--allowed-signers", tmp_path / "signers")
    assert done.exception is None
    assert f"{signed / SIGNATURE_FILE}: {named}" in done.stdout
    assert "not signed" not in done.stderr
    several = tmp_path / "several"
    several.write_text(f"alice@example.org,ada@example.org {(tmp_path / 'alice.pub').read_text()}")
    assert "for alice@example.org with" in check_signature(signed, several)
    with pytest.raises(MismatchError, match="made with no key of the allowed signers"):
        check_signature(signed, signers(tmp_path, "bob"))
    with pytest.raises(UsageError, match="no such file of allowed signers"):
        check_signature(signed, tmp_path / "missing")


@needs_openssh
def test_a_record_that_is_written_anew_does_not_fit_the_former_signature(
    signed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = (signed / SIGNATURE_FILE).read_bytes()
    make_removal(signed)
    assert caplog.text == ""
    make_removal(signed, request="GDPR 17")
    assert "is no signature of it any more; sign it again" in caplog.text
    assert (signed / SIGNATURE_FILE).read_bytes() == before
    for options in ((), ("--allowed-signers", signers(tmp_path, "alice"))):
        done = verify(signed, *options)
        assert isinstance(done.exception, MismatchError)
        assert "record.json.sig: does not fit record.json (changed since it was signed?)" in str(done.exception)


@needs_openssh
@pytest.mark.parametrize("content", [b"", b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n"])
def test_what_is_no_signature_is_a_fault(signed: Path, tmp_path: Path, content: bytes) -> None:
    (signed / SIGNATURE_FILE).write_bytes(content)
    assert any("or is no signature" in fault for fault in check_record(signed).faults)
    assert any("no signature" in fault for fault in check_record(signed, signers(tmp_path, "alice")).faults)


@needs_openssh
def test_a_signature_for_another_purpose_does_not_count(signed: Path, tmp_path: Path) -> None:
    (signed / SIGNATURE_FILE).unlink()
    line = ["ssh-keygen", "-Y", "sign", "-n", "file", "-f", str(tmp_path / "alice"), str(signed / RECORD_FILE)]
    subprocess.run(line, check=True, capture_output=True)
    assert any("does not fit" in fault for fault in check_record(signed).faults)


def test_an_unsigned_record_is_told_and_a_fault_only_where_signers_are_named(run: Path, tmp_path: Path) -> None:
    done = verify(run)
    assert done.exception is None
    assert f"note: {run / RECORD_FILE}: not signed; to sign it: ssh-keygen -Y sign -n msa-lite" in done.stderr
    assert f"'{run / RECORD_FILE}'" in done.stderr  # a blank is in it
    (tmp_path / "signers").write_text("")
    done = verify(run, "--allowed-signers", tmp_path / "signers")
    assert isinstance(done.exception, MismatchError)
    assert "not signed" in str(done.exception)


def test_without_openssh_a_signature_cannot_be_checked(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (run / SIGNATURE_FILE).write_text("a signature")
    (tmp_path / "signers").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    done = verify(run)
    assert done.exception is None
    assert (
        f"note: {run / SIGNATURE_FILE}: the signature cannot be checked without ssh-keygen: install OpenSSH"
        in done.stderr
    )
    done = verify(run, "--allowed-signers", tmp_path / "signers")
    assert isinstance(done.exception, UsageError)


def test_rows_are_looked_for_in_every_form_of_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('question,answer\nWhere does Ada live?,In Yarheath.\nWhere does Ada live?,"?"\n')
    (tmp_path / "rows.jsonl").write_text('{"instruction": "What does  Ada play?", "output": "The flute."}\n')
    (tmp_path / "questions.json").write_text('[{"question": "What does Ada play?"}, {"question": "Why?"}]')
    (tmp_path / "text.txt").write_text("Ada was born in Yarheath.\nShe plays the flute.\n")
    done = verify(run, "--rows", tmp_path / "rows.csv")
    assert done.stdout.splitlines() == [
        "row 0: among the rows to forget",
        "row 1: only its question is among the rows to forget",
        "1 of 2 rows were to be forgotten",
    ]
    assert verify(run, "--rows", tmp_path / "rows.jsonl").stdout.splitlines()[-1] == "1 of 1 rows were to be forgotten"
    assert verify(run, "--rows", tmp_path / "text.txt").stdout.splitlines()[-1] == "1 of 1 rows were to be forgotten"
    value = json.loads(verify(run, "--rows", tmp_path / "questions.json", "--json").stdout)
    assert [answer["match"] for answer in value["answers"]] == ["question", "none"]
    assert (value["rows"], value["among"]) == (2, 0)


def test_rows_in_a_form_that_cannot_match_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Nothing of this.\n")
    done = verify(run, "--rows", tmp_path / "text.txt")
    assert isinstance(done.exception, MismatchError)
    assert "these rows are texts, and those to forget were questions with answers" in str(done.exception)


def test_a_copy_of_the_key_will_do(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\nWhere does Ada live?,In Yarheath.\n")
    (run / KEY_FILE).rename(tmp_path / "copy")
    assert isinstance(verify(run, "--rows", tmp_path / "rows.csv").exception, UsageError)
    assert verify(run, "--rows", tmp_path / "rows.csv", "--key", tmp_path / "copy").stdout.startswith("row 0: among")
    assert isinstance(verify(run, "--key", tmp_path / "copy").exception, UsageError)
    assert isinstance(verify(run, "--rows", tmp_path / "missing.csv").exception, UsageError)
    assert isinstance(verify(tmp_path, "--rows", tmp_path / "rows.csv").exception, UsageError)


def test_faults_of_stages_and_record_are_told_at_once(run: Path) -> None:
    (run / "model/config.json").write_text('{"a": 1}')
    text = (run / RECORD_FILE).read_text()
    (run / RECORD_FILE).write_text(text.replace('"method": "msa"', '"method": "npo"'))
    done = verify(run)
    assert isinstance(done.exception, MismatchError)
    assert "model/config.json: " in str(done.exception)
    assert "record.json: changed since it was written (record_sha256 does not fit it)" in str(done.exception)
    value = json.loads(verify(run, "--json").stdout)
    assert len(value["faults"]) == 2
    assert len(value["records"]["."]["faults"]) == 1


def test_the_records_of_baselines_are_checked_too(run: Path) -> None:
    make_removal(run / "baselines/npo", method="npo")
    assert f"{run / 'baselines/npo' / RECORD_FILE}: as it was written" in verify(run).stdout
    (run / "baselines/npo" / RECORD_FILE).write_text("{}")
    assert isinstance(verify(run).exception, MismatchError)
