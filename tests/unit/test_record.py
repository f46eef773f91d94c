"""The removal record: keyed hashes that nobody can guess, its form, what shows a change, the chain of requests."""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
import stat
import subprocess
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msa_lite.errors import FormatError, MismatchError, UsageError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.weights.hub import Source
from msa_lite.pipeline.run.report import _model as named_model
from msa_lite.record.check import check_record, find_rows
from msa_lite.record.facts import read_vectors, resealed, utc
from msa_lite.record.seal import (
    KEY_FILE,
    RECORD_FILE,
    RecordKey,
    canonical,
    load_key,
    load_record,
    make_key,
    record_hash,
    store_record,
)
from tests.support.runs import ROWS, make_removal
from tests.tools.blocks.read import read_blocks

KEY = RecordKey(bytes(range(32)))
PAGE = Path(__file__).parents[2] / "docs/reference/removal-record.md"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with its record."""
    make_removal(tmp_path / "run", request="GDPR 17")
    return tmp_path / "run"


def by_hand(message: str) -> str:
    return hmac.new(bytes(range(32)), message.encode(), hashlib.sha256).hexdigest()


def test_hashes_are_the_hmac_of_lines_as_the_schema_says() -> None:
    keyed = KEY.hash_rows(ROWS)
    assert keyed == KEY.hash_rows([*reversed(ROWS), ROWS[0]])  # their order and repetition tell nothing
    assert keyed.check == by_hand("check")
    lines = ["row\nWhere does Ada live?\nIn Yarheath.", "row\nWhat does Ada play?\nThe flute."]
    assert keyed.rows == sorted(map(by_hand, [*lines, "text\nAda was born in Yarheath. She plays the flute."]))
    assert keyed.questions == sorted(map(by_hand, ["question\nWhere does Ada live?", "question\nWhat does Ada play?"]))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_command_of_the_page_gives_the_hash(tmp_path: Path) -> None:
    (command,) = [block.text for block in read_blocks(PAGE.read_text(), PAGE.name) if "openssl dgst" in block.text]
    (tmp_path / "runs/my-request").mkdir(parents=True)
    (tmp_path / "runs/my-request" / KEY_FILE).write_text(KEY.secret.hex() + "\n")
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == by_hand("row\nWhere does Ada live?\nIn Yarheath.")


ZOE = "Où est Zoé ?"
SPELLINGS = [
    "Où est Zoé\u00a0?", "\tOù est\r\nZoé ? ", unicodedata.normalize("NFD", ZOE), "Où est Zoé ?\u200b",
    "Où est \u200bZo\u00adé ?", "\u202aOù est Zoé ?\u202c",
]  # fmt: skip
OTHERS = ["où est Zoé ?", "Où est Zoe ?", "Où est Zoé", "Où est Zoé ??", "Oùest Zoé ?", "Où est Z\u200doé ?"]


@pytest.mark.parametrize("text", SPELLINGS + OTHERS)
def test_spelling_of_blanks_and_accents_does_not_matter_and_what_people_see_as_another_row_is_one(text: str) -> None:
    is_same = text in SPELLINGS
    assert (canonical(text) == ZOE) is is_same
    assert KEY.find([(text, "Ici.", "")], KEY.hash_rows([(ZOE, "Ici.", "")])) == ["row" if is_same else "none"]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (ROWS[0], "row"),
        (ROWS[2], "row"),
        (("Where does Ada live?", "In Paris.", ""), "question"),
        (("where does Ada live?", "In Yarheath.", ""), "none"),
        (("In Yarheath.", "Where does Ada live?", ""), "none"),
        (("", "", "Ada was born in Yarheath."), "none"),
        # What moves from one line to another is another row.
        (("Where does Ada live? In", "Yarheath.", ""), "none"),
        (("", "", "row\nWhere does Ada live?\nIn Yarheath."), "none"),
    ],
)
def test_a_row_is_among_them_or_not(row: tuple[str, str, str], match: str) -> None:
    assert KEY.find([row], KEY.hash_rows(ROWS)) == [match]


def test_the_key_is_random_and_stays_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE
    key = make_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(key.secret) == 32
    assert make_key(path) == load_key(path) == key != make_key(tmp_path / "other")
    assert [place.name for place in sorted(tmp_path.iterdir())] == ["other", KEY_FILE]


@pytest.mark.parametrize("text", ["", "abc", "0" * 63, "0" * 65, "g" * 64])
def test_a_damaged_key_is_never_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / KEY_FILE).write_text(text)
    with pytest.raises(FormatError, match="put a copy of the right one there"):
        make_key(tmp_path / KEY_FILE)
    assert (tmp_path / KEY_FILE).read_text() == text


def test_a_record_holds_no_text_and_no_plain_hash_and_no_path(run: Path) -> None:
    text = (run / RECORD_FILE).read_text()
    plain = [
        hashlib.sha256("\n".join(lines).encode()).hexdigest() for row in ROWS for lines in (row, ("row", *row[:2]))
    ]
    plain += [hashlib.sha256(part.encode()).hexdigest() for row in ROWS for part in row if part]
    plain += [hashlib.sha256(b"hashes").hexdigest()]  # of rows.jsonl, which may hold a single row's
    assert [part for part in [*plain, "Ada", "Yarheath", "flute", str(run), run.parent.name] if part in text] == []
    assert "GDPR 17" in text


def test_the_record_of_a_whole_run_holds(run: Path) -> None:
    check = check_record(run)
    assert check.faults == []
    assert check.statements == [
        f"{run / RECORD_FILE}: has its own hash, and agrees with recipe.yaml, verdict.json, model/manifest.json, "
        "6 files of model/",
    ]
    assert [note.split(":")[1] for note in check.notes] == [" not signed, so nobody vouches for it; to sign it"]


def test_writing_again_what_did_not_change_leaves_every_byte(run: Path) -> None:
    before = (run / RECORD_FILE).read_bytes()
    for path in run.rglob("*"):
        path.touch()
    make_removal(run, request="GDPR 17", started=utc(2e9), finished=utc(3e9))
    assert (run / RECORD_FILE).read_bytes() == before
    make_removal(run, request="GDPR 18")
    assert (run / RECORD_FILE).read_bytes() != before


def changes(value: Any) -> Iterator[Any]:
    """Yield a copy for each value within, which has another one of the same kind there."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            for other in changes(inner):
                copy = value.copy()
                copy[key] = other
                yield copy
    elif isinstance(value, bool) or value is None:
        yield "x" if value is None else not value
    else:
        yield ("1" if value[0] != "1" else "2") + value[1:] if isinstance(value, str) else value + 1


def test_a_change_of_any_value_shows(run: Path) -> None:
    changed = list(changes(json.loads((run / RECORD_FILE).read_text())))
    assert len(changed) > 30
    for value in changed:
        (run / RECORD_FILE).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        faults = check_record(run).faults
        assert faults, value
        assert all(RECORD_FILE in fault for fault in faults), faults


def test_a_rerun_seals_no_edited_findings_of_attacks(run: Path) -> None:
    path = run / "attacks/report.json"
    path.parent.mkdir()
    path.write_text("findings")
    with resealed(run, {"attacks/report.json": hash_file(path)}):
        pass
    make_removal(run, request="another")
    assert check_record(run).faults == []
    path.write_text("others")
    make_removal(run, request="GDPR 17")
    (fault,) = check_record(run).faults
    assert "has the hash of; `msa-lite attack RUN` writes it anew" in fault


def test_a_new_report_vouches_for_itself_alone_and_no_edited_file_is_sealed(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def seal(text: str) -> None:
        with resealed(run, {"report.json": hashlib.sha256(text.encode()).hexdigest()}):
            (run / "report.json").write_text(text)

    seal("{}")
    assert check_record(run).faults == []
    (run / "report.json").write_text("edited")
    (fault,) = check_record(run).faults
    assert fault.startswith(
        f"{run / 'report.json'}: is not the file that record.json has the hash of; `msa-lite report"
    )
    (run / "record.json.sig").touch()
    seal("new")
    said = ("is signed; it is sealed anew", "is no signature of it any more")
    assert [any(words in line for words in said) for line in caplog.messages] == [True] * 2, "before and after"
    caplog.clear()
    seal("new")
    assert caplog.messages == []
    (run / "record.json.sig").unlink()
    assert check_record(run).faults == []
    before = (run / RECORD_FILE).read_bytes()
    for name in ("recipe.yaml", "verdict.json", "model/manifest.json", "report.html", "attacks/report.json"):
        path = run / name
        raw = path.read_bytes() if path.exists() else b""
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw + b" ")
        assert any(f"{path}: is not " in fault for fault in check_record(run).faults)
        with pytest.raises(MismatchError, match=f"{name}: not the file that record.json has the hash of"):
            seal("other")
        path.write_bytes(raw) if raw else path.unlink()
    assert (run / RECORD_FILE).read_bytes() == before
    assert (run / "report.json").read_text() == "new"
    (run / "verdict.json").unlink()  # as while a run is made again
    (run / "recipe.yaml").write_text("another")
    seal("of an unfinished run")
    assert (run / RECORD_FILE).read_bytes() == before
    assert "the run is not finished" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.pop("result"), "result: Field required"),
        (lambda value: value.update(format=2), "format: Input should be 1"),
        (
            lambda value: value["forget_rows"]["rows"].append("Where does Ada live?"),
            "forget_rows.rows.3: String should",
        ),
        (lambda value: value["models"]["target"].update(revision="main"), "models.target.revision: String should"),
    ],
)
def test_a_record_of_another_form_is_refused(run: Path, change: Any, message: str) -> None:
    value = json.loads((run / RECORD_FILE).read_text())
    change(value)
    (run / RECORD_FILE).write_text(json.dumps(value))
    with pytest.raises(FormatError, match=message):
        load_record(run / RECORD_FILE)


def test_the_weights_of_several_requests_are_read_from_the_manifest() -> None:
    one = {"revision": f"sha256:{'0' * 64}"}
    inputs = {"target": one, "forget 1": one, "forget 2": one, "retain": one, "prior": one}
    weights = {"forget 1": -1.0, "forget 2": -0.5, "retain": 0.25}
    terms = [{"name": name, "weight": weight} for name, weight in weights.items()]
    vectors = read_vectors({"inputs": inputs, "terms": terms, "sources": {}})
    assert {vector.name: vector.weight for vector in vectors} == weights


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"format": 1}', "{}" * 3])
def test_a_broken_record_is_one_fault_and_is_written_anew_by_a_rerun(run: Path, text: str) -> None:
    (run / RECORD_FILE).write_text(text)
    check = check_record(run)
    assert check.record is None
    assert len(check.faults) == 1
    make_removal(run, request="GDPR 17")
    assert check_record(run).faults == []


@pytest.mark.parametrize("name", ["verdict.json", "recipe.yaml", KEY_FILE])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_broken_files_beside_the_record_are_faults(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)
    assert any(name in fault for fault in check_record(run).faults)


def test_what_is_gone_is_told_and_no_fault(run: Path) -> None:
    shutil.rmtree(run / "vectors")  # as after a purge
    assert check_record(run).faults == []
    (run / "verdict.json").unlink()
    check = check_record(run)
    assert check.faults == []
    assert f"{run}: verdict.json: not here, so not compared with the record" in check.notes


def test_the_record_alone_can_be_checked(run: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / RECORD_FILE).write_bytes((run / RECORD_FILE).read_bytes())
    check = check_record(tmp_path / "copy")
    assert check.faults == []
    assert check.statements[0].endswith("there is nothing to compare it with")
    assert any("record.key: not there" in note for note in check.notes)


def test_a_key_of_another_run_is_a_fault(run: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    (run / KEY_FILE).write_text((tmp_path / "other").read_text())
    assert check_record(run).faults == [
        f"{run / KEY_FILE}: is not the key that the record was made with",
    ]
    with pytest.raises(MismatchError, match="not the one"):
        find_rows(run, ROWS)


def test_a_key_that_is_gone_is_made_anew_with_a_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    former = load_record(run / RECORD_FILE)
    (run / KEY_FILE).unlink()
    with pytest.raises(UsageError, match="no such key"):
        find_rows(run, ROWS)
    record = make_removal(run, request="GDPR 17")
    assert "record.key has been replaced" in caplog.text
    assert set(record.forget_rows.rows).isdisjoint(former.forget_rows.rows)
    assert [answer.match for answer in find_rows(run, ROWS)] == ["row"] * 3


def test_a_repository_is_named_with_its_commit_and_a_folder_is_not(tmp_path: Path) -> None:
    commit, content = "0" * 40, f"sha256:{'0' * 64}"
    tokenizer = Source("org/tokenizer", tmp_path, "1" * 40)
    remote = named_model(Source("org/model@main", tmp_path, commit, tokenizer))
    assert (remote.name, remote.revision, remote.tokenizer) == (f"org/model@{commit}", commit, "1" * 40)
    local = named_model(Source(str(tmp_path), tmp_path, content))
    assert (local.name, local.revision, local.tokenizer) == ("local folder", content, None)


def test_records_chain(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    assert make_removal(one, request="A").previous_sha256 is None
    make_removal(two, earlier=[one], request="B", forget_rows=ROWS[:1])
    record = make_removal(three, earlier=[one, two], request="C", forget_rows=ROWS[1:2])
    assert [(item.request, item.record_sha256) for item in record.earlier] == [
        ("A", record_hash(one)),
        ("B", record_hash(two)),
    ]
    assert record.previous_sha256 == record_hash(two) == hashlib.sha256((two / RECORD_FILE).read_bytes()).hexdigest()
    check = check_record(three)
    assert check.faults == []
    assert [line for line in check.statements if "earlier request" in line] == [
        f"{one / RECORD_FILE}: the earlier request A, as {three / RECORD_FILE} names it",
        f"{two / RECORD_FILE}: the earlier request B, as {three / RECORD_FILE} names it",
        f"{one / RECORD_FILE}: the earlier request A, as {two / RECORD_FILE} names it",
    ]
    found = find_rows(three, [ROWS[1], ROWS[0], ("Where does Ada live?", "?", ""), ("x", "y", "")])
    assert [(answer.match, answer.folder) for answer in found] == [
        ("row", three),
        ("row", one),
        ("question", one),
        ("none", three),
    ]


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs, of the requests A and B."""
    one, two = tmp_path / "one", tmp_path / "two"
    make_removal(one, request="A")
    make_removal(two, earlier=[one], request="B")
    return one, two


def test_a_chain_whose_earlier_record_changed_does_not_hold(chain: tuple[Path, Path]) -> None:
    one, two = chain
    make_removal(one, request="A, corrected")
    assert check_record(two).faults == [
        f"{one / RECORD_FILE}: is not as a later record names it; if the change is right, run the later recipe again",
    ]
    (one / RECORD_FILE).write_text("{}")
    assert any("no record of msa-lite" in fault for fault in check_record(two).faults)


def test_an_earlier_request_that_was_renamed_in_the_record_shows(chain: tuple[Path, Path]) -> None:
    path = chain[1] / RECORD_FILE
    record = load_record(path)
    renamed = record.earlier[0].model_copy(update={"request": "Z"})
    store_record(record.model_copy(update={"earlier": [renamed]}), path)
    assert check_record(chain[1]).faults == [f"{path}: earlier: names the request Z, whose record says A"]


def test_earlier_runs_out_of_reach_or_without_record_are_told(chain: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = chain
    one.rename(tmp_path / "moved")
    check = check_record(two)
    assert check.faults == []
    assert f"{two / RECORD_FILE}: the earlier request A is out of reach: no run here has it" in check.notes
    (tmp_path / "moved").rename(one)
    (one / RECORD_FILE).unlink()
    record = make_removal(two, earlier=[one], request="B")
    assert (record.earlier[0].request, record.previous_sha256) == (None, None)
    check = check_record(two)
    assert check.faults == []
    assert f"{two / RECORD_FILE}: an earlier request has no record" in check.notes
