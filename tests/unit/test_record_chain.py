"""The records of several requests: each names the one before, and a change of an earlier one shows."""

from __future__ import annotations

import hashlib
from pathlib import Path

from msa_lite.record.check import check_record, find_rows
from msa_lite.record.seal import RECORD_FILE, record_hash, store_record
from tests.support.runs import ROWS, make_removal


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


def test_a_chain_whose_earlier_record_changed_does_not_hold(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    make_removal(one, request="A")
    make_removal(two, earlier=[one], request="B")
    make_removal(one, request="A, corrected")
    check = check_record(two)
    assert check.faults == [
        f"{one / RECORD_FILE}: is not as a later record names it; if the change is right, run the later recipe again",
    ]
    (one / RECORD_FILE).write_text("{}")
    assert any("no record of msa-lite" in fault for fault in check_record(two).faults)


def test_an_earlier_request_that_was_renamed_in_the_record_shows(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    make_removal(one, request="A")
    record = make_removal(two, earlier=[one], request="B")
    renamed = record.earlier[0].model_copy(update={"request": "Z"})
    store_record(record.model_copy(update={"earlier": [renamed]}), two / RECORD_FILE)
    assert check_record(two).faults == [
        f"{two / RECORD_FILE}: earlier: names the request Z, whose record says A",
    ]


def test_earlier_runs_out_of_reach_or_without_record_are_told(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    make_removal(one, request="A")
    make_removal(two, earlier=[one], request="B")
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
