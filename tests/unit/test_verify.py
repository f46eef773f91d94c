"""`msa-lite verify`: the stages of a run, the signature of its record (by a throw-away key), and rows of a file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from msa_lite.cli.handing_on import verify_command
from msa_lite.errors import MismatchError, OutputError, UsageError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.record.check import check_downloaded, check_record
from msa_lite.record.facts import hashed_revision, resealed
from msa_lite.record.seal import (
    KEY_FILE,
    RECORD_FILE,
    SIGNATURE_FILE,
    check_signature,
    load_record,
    signing_command,
    store_record,
)
from msa_lite.report.run.stages import ListedStage, StageList, write_stages
from tests.support.places import NO_FILES
from tests.support.runs import make_removal, make_stages, put_tiny_model
from tests.tools.blocks.read import read_blocks

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
    line = signing_command(run / RECORD_FILE).replace("~/.ssh/id_ed25519", f"'{tmp_path / 'alice'}'")
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
    assert done.stdout.splitlines() == [
        *(f"{stages / name}: every file has its manifest's hash" for name in sorted(STAGES)),
        f"note: {stages}: nothing here has the hash of: model.previous/manifest.json, sweep.partial/manifest.json.",
    ]


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
    open_ended = check_signature(signed / RECORD_FILE)
    assert open_ended.startswith('Good "msa-lite" signature with ED25519 key SHA256:')
    assert "--allowed-signers FILE checks whose key that is" in open_ended
    named = check_signature(signed / RECORD_FILE, signers(tmp_path, "bob", "alice"))
    assert named.startswith('Good "msa-lite" signature for alice@example.org with ED25519 key SHA256:')
    done = verify(signed, "--allowed-signers", tmp_path / "signers")
    assert done.exception is None
    assert f"{signed / SIGNATURE_FILE}: {named}" in done.stdout
    assert "not signed" not in done.stdout
    shutil.copy(signed / RECORD_FILE, tmp_path / "mine.json")
    shutil.copy(signed / SIGNATURE_FILE, tmp_path / "mine.json.sig")
    arguments = [signed / "model", "--record", tmp_path / "mine.json", "--allowed-signers", tmp_path / "signers"]
    assert f"mine.json.sig: {named}" in verify(*arguments).stdout
    assert any(
        "no key of the allowed signers" in fault
        for fault in refused(*arguments[:-1], signers(tmp_path, "bob"))[1]["faults"]
    )
    several = tmp_path / "several"
    several.write_text(f"alice@example.org,ada@example.org {(tmp_path / 'alice.pub').read_text()}")
    assert "for alice@example.org with" in check_signature(signed / RECORD_FILE, several)
    with pytest.raises(MismatchError, match="made with no key of the allowed signers"):
        check_signature(signed / RECORD_FILE, signers(tmp_path, "bob"))
    with pytest.raises(UsageError, match="give a file of allowed signers"):
        check_signature(signed / RECORD_FILE, tmp_path / "missing")


@needs_openssh
def test_the_line_of_the_page_checks_the_signature_without_us(signed: Path, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/reference/removal-record.md"
    (block,) = [block.text for block in read_blocks(page.read_text(), page.name) if "-Y verify" in block.text]
    (tmp_path / "runs").mkdir()
    signed.rename(tmp_path / "runs/my-request")
    shutil.copytree(tmp_path / "runs/my-request", tmp_path / "received")
    for names, code in ((["alice"], 0), (["bob"], 255)):
        text = signers(tmp_path, *names).read_text().replace("bob@", "alice@")
        (tmp_path / "signers").write_text(text)
        assert subprocess.run(["bash", "-c", block], cwd=tmp_path, capture_output=True, check=False).returncode == code
    signers(tmp_path, "alice")
    (tmp_path / "received" / RECORD_FILE).write_text("{}")
    assert subprocess.run(["bash", "-c", block], cwd=tmp_path, capture_output=True, check=False).returncode


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


_SPECIAL_PLACES = (
    SIGNATURE_FILE, RECORD_FILE, KEY_FILE, "recipe.yaml", "model/manifest.json", "model/model.safetensors", "signers",
)  # fmt: skip


@needs_openssh
@pytest.mark.parametrize("kind", [kind for kind in NO_FILES if kind != "link to nothing"])
def test_what_is_no_stored_file_is_refused_at_once(kind: str, signed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(signed)  # a socket's name has room for 100 characters
    signers(signed.parent, "alice").rename("signers")
    for name in _SPECIAL_PLACES:
        place = Path(name)
        place.rename("stored")
        NO_FILES[kind](place)
        done = verify(".", "--allowed-signers", "signers")
        is_link_key = name == KEY_FILE and kind == "link to itself"  # as if it were not there
        assert getattr(done.exception, "exit_code", 0) == (0 if is_link_key else 2 if name == "signers" else 3), name
        assert is_link_key or name in str(done.exception)
        assert "gave no answer" not in str(done.exception)
        place.unlink()
        Path("stored").rename(place)
    os.mkfifo("pipe")
    assert isinstance(verify("pipe").exception, UsageError)


@needs_openssh
def test_a_signature_for_another_purpose_does_not_count(signed: Path, tmp_path: Path) -> None:
    (signed / SIGNATURE_FILE).unlink()
    line = ["ssh-keygen", "-Y", "sign", "-n", "file", "-f", str(tmp_path / "alice"), str(signed / RECORD_FILE)]
    subprocess.run(line, check=True, capture_output=True)
    assert any("does not fit" in fault for fault in check_record(signed).faults)


def test_an_unsigned_record_is_told_and_a_fault_only_where_signers_are_named(run: Path, tmp_path: Path) -> None:
    done = verify(run)
    assert done.exception is None
    assert f"note: {run / RECORD_FILE}: not signed, so nobody vouches for it; to sign it: ssh-keygen" in done.stdout
    assert f"'{run / RECORD_FILE}'" in done.stdout  # a blank is in it
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
        in done.stdout
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


# One byte that is not as recorded, and all that verify says of it: stdout, JSON, the error and its exit code.


def flip(name: str) -> Callable[[Path], None]:
    """Change one bit in the middle of a file."""

    def change(model: Path) -> None:
        raw = bytearray((model / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (model / name).write_bytes(raw)

    return change


def swap(model: Path) -> None:
    one, two = model / "model.safetensors", model / "model-2.safetensors"
    assert one.stat().st_size == two.stat().st_size
    one.rename(model / "third")
    two.rename(one)
    (model / "third").rename(two)


def link(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("generation.json")
    (model / "generation.json").write_text('{"a": 2}')


def put_folder(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").mkdir()


def save_again(model: Path) -> None:
    value = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(value, indent=2))


TAMPERINGS: dict[str, tuple[Callable[[Path], object], dict[str, str]]] = {
    **{f"a bit of {name}": (flip(name), {name: "differs"}) for name in (
        "model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "model.safetensors.index.json",
    )},
    "shards in each other's place": (swap, dict.fromkeys(("model.safetensors", "model-2.safetensors"), "differs")),
    "cut": (lambda model: os.truncate(model / "model-2.safetensors", 5), {"model-2.safetensors": "differs"}),
    "emptied": (lambda model: os.truncate(model / "tokenizer.json", 0), {"tokenizer.json": "differs"}),
    "renamed": (
        lambda model: (model / "model-2.safetensors").rename(model / "model-3.safetensors"),
        {"model-2.safetensors": "missing", "model-3.safetensors": "unnamed"},
    ),
    "removed": (lambda model: (model / "tokenizer.json").unlink(), {"tokenizer.json": "missing"}),
    "a link to other bytes": (link, {"config.json": "differs"}),
    "a folder": (put_folder, {"tokenizer.json": "unreadable"}),
    "the same values in other bytes": (save_again, {"config.json": "differs"}),
    "other line ends": (
        lambda model: (model / "config.json").write_bytes(b'{"a": 1}\r\n'), {"config.json": "differs"}
    ),
    "an adapter beside it": (
        lambda model: (model / "adapter_config.json").write_text("{}"), {"adapter_config.json": "unnamed"}
    ),
    "a chat template beside it": (
        lambda model: (model / "chat_template.jinja").write_text("x"), {"chat_template.jinja": "unnamed"}
    ),
    "the target in its place": (
        lambda model: put_tiny_model(model, "target"),
        dict.fromkeys(("model.safetensors", "model-2.safetensors"), "differs"),
    ),
}  # fmt: skip


def refused(*arguments: object) -> tuple[str, dict[str, Any]]:
    """Return what verify prints and its JSON; the exit code is 3 both times, and nothing is said to agree."""
    done, machine = verify(*arguments), verify(*arguments, "--json")
    assert isinstance(done.exception, MismatchError)
    assert (done.exception.exit_code, machine.return_value) == (3, 3)
    value = json.loads(machine.stdout)
    assert "agrees" not in done.stdout + json.dumps(value)
    assert all(fault in str(done.exception) for fault in value["faults"])
    return done.stdout, value


@pytest.mark.parametrize("name", TAMPERINGS)
def test_whatever_differs_is_named_everywhere_and_nothing_is_said_to_agree(name: str, run: Path) -> None:
    change, states = TAMPERINGS[name]
    assert "agrees" in verify(run).stdout
    assert "agrees" in verify(run / "model", "--record", run / RECORD_FILE).stdout
    change(run / "model")
    for prefix, arguments in {"model/": [run], "": [run / "model", "--record", run / RECORD_FILE]}.items():
        shown, value = refused(*arguments)
        files = value["records"]["."]["files"] if prefix else value["files"]
        told = {file: files[prefix + file] for file in states}
        assert told == states
        others = {state for file, state in files.items() if file.removeprefix(prefix) not in states}
        assert others <= {"same", "not in the record"}
        assert all(file in shown and any(prefix + file in fault for fault in value["faults"]) for file in states)
        is_target = f"{run / 'model'}: is the target of the record, not the unlearned model"
        assert (is_target in value["faults"] and is_target in shown) is ("target" in name)


def test_files_that_no_loader_reads_may_be_others_and_are_named(run: Path, tmp_path: Path) -> None:
    model, record = tmp_path / "downloaded", run / RECORD_FILE
    shutil.copytree(run / "model", model)
    assert json.loads(verify(model, "--record", record, "--json").stdout)["files"]["manifest.json"] == "same"
    (model / "config.json").rename(tmp_path / "blob")
    (model / "config.json").symlink_to(tmp_path / "blob")  # as in the Hub's cache
    (model / ".cache/huggingface").mkdir(parents=True)
    strange = (".cache/huggingface/x.metadata", ".gitattributes", "README.md", "manifest.json", "notes.txt")
    for name in strange:
        (model / name).write_text("another")
    done = verify(model, "--record", record, "--json")
    assert done.return_value == 0
    files = json.loads(done.stdout)["files"]
    assert {name for name, state in files.items() if state == "not in the record"} == set(strange)
    assert {state for name, state in files.items() if name not in strange} == {"same"}
    (model / "manifest.json").unlink()
    assert "agrees" in verify(model, "--record", record).stdout
    with pytest.raises(UsageError, match="holds no model itself; give"):
        check_downloaded(run, record)
    with pytest.raises(UsageError, match="no such file"):
        check_downloaded(model, tmp_path / "missing.json")


def test_a_config_as_it_is_published_is_known_and_no_other_is(run: Path, tmp_path: Path) -> None:
    record = load_record(run / RECORD_FILE)
    sent = b'{"sent": 1}'
    published = {"config.json": hashlib.sha256(sent).hexdigest()}
    result = record.result.model_copy(update={"published": published})
    store_record(record.model_copy(update={"result": result}), tmp_path / "mine.json")
    (run / "model/config.json").write_bytes(sent)
    done = verify(run / "model", "--record", tmp_path / "mine.json")
    assert done.exception is None
    assert re.search("config.json +as published\n", done.stdout)
    (run / "model/tokenizer.json").write_bytes(sent)
    (run / "model/config.json").write_bytes(sent + b" ")
    files = refused(run / "model", "--record", tmp_path / "mine.json")[1]["files"]
    assert (files["tokenizer.json"], files["config.json"]) == ("differs", "differs")


# What goes with a record: in the run's folder, and beside the record that a recipient of the model has.


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def write(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(change((run / name).read_bytes() if (run / name).exists() else b""))

    return write


HANDED_ON = (
    "report.html", "report.json", "verdict.json", "recipe.yaml", "attacks/report.json", "attacks/prompt/report.json",
)  # fmt: skip
LATER = "attacks/relearn/report.json"
EDITS: dict[str, tuple[Callable[[Path], object], dict[str, str]]] = {
    **{f"a word of {name}": (edit(name, lambda raw: raw.replace(b"FAIL", b"PASS")), {name: "differs"})
       for name in HANDED_ON},
    "another line end": (edit("verdict.json", lambda raw: raw.replace(b"\n", b"\r\n")), {"verdict.json": "differs"}),
    "a file that was not there": (edit(LATER, lambda raw: b"{}"), {LATER: "unsealed"}),
    "a pipe": (
        lambda run: [(run / "report.html").unlink(), os.mkfifo(run / "report.html")], {"report.html": "unreadable"}
    ),
    "a file without end": (lambda run: os.truncate(run / "report.json", 1 << 42), {"report.json": "differs"}),
}  # fmt: skip


@pytest.fixture
def sealed(run: Path) -> Path:
    """A run whose record has the hashes of all that goes with it."""
    for name in HANDED_ON:
        if name != "recipe.yaml" and name != "verdict.json":
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text("{}\n<p>FAIL</p>\n")
    (run / "verdict.json").write_text((run / "verdict.json").read_text().replace('"outcome"', '"FAIL": 1,\n"outcome"'))
    make_removal(run, request="FAIL")
    with resealed(run, {name: hash_file(run / name) for name in HANDED_ON if name.startswith("attacks")}):
        return run


@pytest.mark.parametrize("name", EDITS)
def test_each_changed_file_that_goes_with_a_record_is_named_everywhere(name: str, sealed: Path, tmp_path: Path) -> None:
    received = tmp_path / "received"
    received.mkdir()
    shutil.copytree(sealed / "model", tmp_path / "model")
    for part in (*HANDED_ON, RECORD_FILE):
        (received / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sealed / part, received / part)
    whole = tmp_path / "model", "--record", received / RECORD_FILE
    done = verify(*whole)
    assert (done.exception, verify(sealed).exception) == (None, None)
    assert all(f"{received}/{part}" in done.stdout.splitlines()[-3] for part in HANDED_ON)
    change, states = EDITS[name]
    for place, start, arguments in ((sealed, "", [sealed]), (received, f"{received}/", [*whole])):
        change(place)
        shown, value = refused(*arguments)
        files = value["files"] if start else value["records"]["."]["files"]
        assert {file.removeprefix(start): state for file, state in files.items() if state in TOLD} == states
        assert [file for file in states if not any(f"{place / file}: " in fault for fault in value["faults"])] == []
        assert len(value["faults"]) == len(states)
        assert all(file in shown for file in states)


TOLD = {"differs", "missing", "unreadable", "unnamed", "unsealed"}


def forged(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Change a record's text and give it a new seal, as somebody may who has no key to sign it."""

    def forge(file: Path) -> None:
        text = change(re.sub('"record_sha256": "[0-9a-f]+"', '"record_sha256": ""', file.read_text()))
        seal = hashlib.sha256(text.encode()).hexdigest()
        file.write_text(text.replace('"record_sha256": ""', f'"record_sha256": "{seal}"'))

    return forge


def forget_files(file: Path) -> None:
    record = load_record(file)
    result = record.result.model_copy(update={"files": {}, "revision": hashed_revision({})})
    store_record(record.model_copy(update={"result": result}), file)


RECORDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a digit": (lambda file: file.write_text(file.read_text().replace('"bytes": 8', '"bytes": 9')), "changed since"),
    "other line ends": (lambda file: file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n")), "changed since"),
    "a key twice": (forged(lambda text: text.replace("{", '{"method": "x",', 1)), "stands twice"),
    "no files": (forget_files, "no weights"),
    "another run's": (lambda file: shutil.copy(file.parents[1] / "other" / RECORD_FILE, file), "has the hash of"),
    "a file outside": (
        forged(lambda text: text.replace('"model.safetensors": {', '"../model/model.safetensors": {')), "is missing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_not_of_this_model_is_told_everywhere(name: str, run: Path) -> None:
    make_stages(run.parent / "other", alpha=0.5)
    make_removal(run.parent / "other")
    change, reason = RECORDS[name]
    change(run / RECORD_FILE)
    for arguments in ([run], [run / "model", "--record", run / RECORD_FILE]):
        assert any(reason in fault for fault in refused(*arguments)[1]["faults"])


def test_what_is_absent_or_without_a_hash_is_named(run: Path) -> None:
    (run / "notes.txt").write_text("mine")
    (run / "rows.lock").write_text("mine")
    (run / ".target.lock").touch()
    (run / "verdict.json").unlink()
    (run / "model").rename(run.parent / "elsewhere")
    done = verify(run)
    assert done.exception is None
    assert f"note: {run}: verdict.json, model/manifest.json, model/: not here, so not compared" in done.stdout
    assert "nothing here has the hash of: notes.txt, rows.lock, target/config.json" in done.stdout
    assert "notes.txt" in json.loads(verify(run, "--json").stdout)["unsealed"]
    (run / "model").symlink_to(run.parent / "elsewhere")  # as on another disk
    assert f"{run / 'model'}: every file has its manifest's hash" in verify(run).stdout


def test_a_stage_whose_manifest_is_gone_does_not_hold(stages: Path) -> None:
    listed = [ListedStage(name, "", name) for name in STAGES]
    write_stages(StageList(tuple(listed), None, False, {}, (), False), stages)
    assert verify(stages).exception is None
    (stages / "model/manifest.json").unlink()
    shown, value = refused(stages)
    assert f"{stages / 'model'}: differs from its manifest (manifest.json)" in shown
    assert value["faults"] == ["model/manifest.json: missing"]


def test_each_file_is_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Counter[Any]()

    class Kept(dict[Any, str]):
        def __setitem__(self, mark: Any, sha256: str) -> None:
            reads[mark] += 1
            super().__setitem__(mark, sha256)

    monkeypatch.setattr("msa_lite.io.files.writing._hashes", kept := Kept())
    monkeypatch.setattr("msa_lite.io.files.writing._SETTLED", -(10**18))  # files of just now are remembered, too
    flip("config.json")(run / "model")  # so that the target is looked for, too
    refused(run / "model", "--record", run / RECORD_FILE)
    refused(run)
    assert hash_file(run / "model/model.safetensors") in kept.values()
    assert {*reads.values()} == {1}, "with --json and without"


def test_the_records_of_baselines_are_checked_too(run: Path) -> None:
    make_removal(run / "baselines/npo", method="npo")
    assert f"{run / 'baselines/npo' / RECORD_FILE}: has its own hash, and agrees with " in verify(run).stdout
    (run / "baselines/npo" / RECORD_FILE).write_text("{}")
    assert isinstance(verify(run).exception, MismatchError)
