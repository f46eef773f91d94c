"""Rows with the answers of models: all rows to forget, failures first, and a few questions side by side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from msa_lite.cli.output import print_rows
from msa_lite.errors import UsageError
from msa_lite.evals.benchmarks.benchmark import find_benchmark
from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.evals.benchmarks.qa import QA
from msa_lite.evals.benchmarks.restor import RESTOR
from msa_lite.evals.scores.records import list_rows, pick_examples, write_records
from msa_lite.io.files.writing import json_form
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.pipeline.run.report import forget_rows, report_run
from msa_lite.report.run.provenance import PURGED_FILE
from msa_lite.report.run.rows import RowList, row_lines
from msa_lite.report.verdict.verdict import make_verdict, write_verdict
from tests.support.records import known, make_forgotten, make_kept, question, text, unknown
from tests.support.runs import make_run_folder


def numbered(records: list[dict[str, Any]], name: str = "question") -> list[dict[str, Any]]:
    return [record | {"index": at, name: f"{name} {at}"} for at, record in enumerate(records)]


def listed(benchmark: str, **models: Any) -> RowList:
    return list_rows(find_benchmark(benchmark), models)


def order(rows: RowList) -> list[int]:
    return [row.index for row in rows.rows]


def test_questions_that_are_still_recited_come_first() -> None:
    unasked = question("Yes", "", 0, 0) | {"generated": None, "accuracy": None}
    rows = listed(
        "qa",
        target={"forget": numbered(known(4))},
        unlearned={"forget": numbered([*unknown(1), *known(1), unasked, *known(1)])},
        ideal={"forget": numbered(unknown(4))},
    )
    assert order(rows) == [1, 3, 2, 0]
    assert (rows.count(), rows.count("target"), rows.count("ideal")) == (2, 4, 0)
    assert rows.headline.startswith("2 of 4 rows are still recited; these come first (target: 4; ideal: 0)")
    assert any("could not be scored" in remark for remark in rows.remarks)


def test_texts_are_recited_from_nine_tenths_on_and_the_share_orders_them() -> None:
    shares = (0.2, 0.95, 0.899, 0.9)
    texts = {"forget": numbered([text(share) for share in shares], "text")}
    rows = listed("qa", target={"forget": numbered([text(1.0)] * 4, "text")}, unlearned=texts)
    assert order(rows) == [1, 3, 2, 0]
    assert rows.count() == 2
    shown = {name: said for name, _, said in row_lines(rows.rows[2])}
    assert "89 %" in shown["unlearned"], "rounded down: 90 % would read as recited"


def test_tofu_muse_and_restor_are_listed_by_their_own_checks() -> None:
    bare = [{k: v for k, v in record.items() if k != "accuracy"} for record in (*unknown(1), *known(1))]
    assert order(listed("tofu", unlearned={"forget": numbered(bare)})) == [1, 0]
    passages = [{"prompt": "p", "gt": "g", "generated": "g", "rouge_l_f1": share} for share in (0.5, 0.95, None)]
    muse = listed("muse", unlearned={"verbmem": numbered(passages, "prompt")})
    assert (order(muse), muse.count()) == ([1, 2, 0], 1)
    facts = [
        {"question": "q", "answers": ["a", "b"], "corrupted": spoilt, "containment": right, "generated": "x"}
        for spoilt, right in ((True, 1.0), (True, 0.0), (False, 0.0))
    ]
    restor = listed("restor", unlearned={"questions": numbered(facts)})
    assert order(restor) == [1, 0], "only facts that documents spoilt, wrong answers first"
    assert "answered wrongly" in restor.headline
    assert restor.rows[0].expected == "a / b"


def restored(right: bool) -> dict[str, Any]:
    return {"question": "q", "answers": ["a"], "corrupted": False, "containment": float(right), "generated": "x"}


UNASKED = question("Yes", "", 0, 0) | {"generated": None, "accuracy": None}
ANSWERS = [{"question": "q", "answer": "a", "generated": "a", "rouge_l_f1": share} for share in (0.95, 0.9, 0.89)]
LOST: dict[str, tuple[str, list[Any], list[Any], tuple[list[int], int]]] = {
    "questions": ("qa", [*known(4), *unknown(1)], [*unknown(1), *known(1), *unknown(1), *known(2)], ([0, 2], 4)),
    "texts": ("qa", [text(0.95), text(0.9), text(0.8)], [text(0.89), text(0.9), text(0.1)], ([0], 2)),
    "not asked": ("tofu", [*known(1), UNASKED], [UNASKED, *unknown(1)], ([], 1)),
    "restor": ("restor", [restored(True)] * 2 + [restored(False)], [restored(False), *[restored(True)] * 2], ([0], 2)),
    "muse": ("muse", ANSWERS, ANSWERS[::-1], ([0], 2)),
}


@pytest.mark.parametrize("case", LOST)
def test_rows_to_keep_are_lost_where_the_target_knows_them_and_the_model_does_not(case: str) -> None:
    benchmark, before, now, expected = LOST[case]
    name = {"restor": "questions", "muse": "knowmem_retain"}.get(benchmark, "retain")
    rows = listed(benchmark, **{model: {name: numbered(r)} for model, r in (("target", before), ("unlearned", now))})
    assert ([row.index for row in rows.lost], rows.known) == expected
    assert all(row.failed == {"target": False, "unlearned": True} for row in rows.lost)
    alone = listed(benchmark, unlearned={name: numbered(now)})
    assert (alone.lost, alone.known) == ([], 0), "nothing shows what was known before"


def test_no_text_steers_a_terminal() -> None:
    hostile = "\x1b[31mred\x1b[0m\r\nnext\u202eline ```"
    rows = listed("qa", unlearned={"forget": numbered([question(hostile, hostile, 1.0, 1.0)])})
    said = " ".join(line for _, _, line in row_lines(rows.rows[0]))
    assert said.isprintable()


def test_lost_rows_are_printed_after_those_to_forget(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"question": "Where?", "answer": "Here", "generated": "There", "accuracy": 0.0, "index": 7}
    right = row | {"generated": "Here", "accuracy": 1.0}
    rows = listed("qa", target={"forget": [right], "retain": [right]}, unlearned={"forget": [row], "retain": [row]})
    print_rows(rows)
    text = capsys.readouterr().out
    assert "has lost: 1 of 1." in text
    first, last = text.split("\nrow 7")[1:]
    assert (first.split(), last.split()) == (
        ["question", "Where?", "expected", "Here", "target", "recited", "Here", "unlearned", "There"],
        ["to", "keep", "question", "Where?", "expected", "Here", "target", "Here", "unlearned", "lost", "There"],
    )
    assert json_form(rows)["lost"] == [json_form(row) for row in rows.lost]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of twelve rows, of which the unlearned model still recites one."""
    folder = make_run_folder(tmp_path / "run")
    for part in ("", "_validation"):
        for model, records in {
            "target": known(12),
            "unlearned": [*unknown(11), *known(1)],
            "ideal": unknown(12),
        }.items():
            kept = numbered(unknown(3) if model == "unlearned" else known(3))
            kept = [record | {"question": f"kept {at}"} for at, record in enumerate(kept)]
            place = folder / "evaluation" / f"{model}{part}"
            report = (place / "report.json").read_bytes()
            inputs = json.loads((place / "manifest.json").read_text())["inputs"]
            with stage_folder(place, "evaluation", inputs) as partial:
                (partial / "report.json").write_bytes(report)
                write_records(partial / "forget.jsonl", numbered(records))
                write_records(partial / "retain.jsonl", kept)
    return folder


LOST_HERE = (3, ["kept 0", "kept 1", "kept 2"])


@pytest.mark.pictures
def test_the_report_holds_rows_only_where_they_are_asked_for(run: Path) -> None:
    for examples, rows, holds in ((False, False, False), (False, True, False), (True, True, True)):
        story = report_run(run, examples, rows)
        listed_rows = story.forget_rows
        assert (listed_rows is not None) == rows
        assert listed_rows is None or (len(listed_rows.rows), listed_rows.rows[0].index) == (12, 11)
        assert listed_rows is None or (listed_rows.known, [row.question for row in listed_rows.lost]) == LOST_HERE
        texts = [(run / name).read_text() for name in ("report.html", "report.json")]
        assert [word in text for text in texts for word in ("question 11", "kept 2")] == [holds] * 4
    for kept, learnt in ((make_kept(rows=2), 1), (make_kept(rows=3), 0), (None, 0)):  # three rows were scored
        write_verdict(make_verdict(make_forgotten(12), kept), run)
        assert forget_rows(run).learnt == learnt


def test_what_is_missing_for_a_list_is_named(run: Path) -> None:
    (run / PURGED_FILE).write_text(json.dumps({"began": "2026-01-02T00:00:00+00:00", "removed": []}))
    with pytest.raises(UsageError, match="purged on 2026-01-02"):
        report_run(run, rows=True)
    (run / PURGED_FILE).unlink()
    shutil.rmtree(run / "evaluation/unlearned")
    with pytest.raises(UsageError, match="not scored yet"):
        report_run(run, rows=True)


def asked(count: int, answer: str | None = "yes") -> list[dict[str, Any]]:
    return [{"question": f"q{i}", "answer": "a", "generated": answer} for i in range(count)]


@pytest.mark.parametrize(
    ("forget", "retain", "counts"), [(20, 20, (5, 5)), (2, 20, (2, 8)), (20, 0, (10, 0)), (3, 3, (3, 3))]
)
def test_ten_questions_half_of_them_to_be_forgotten(forget: int, retain: int, counts: tuple[int, int]) -> None:
    models = {name: {"forget": asked(forget), "retain": asked(retain), "holdout": asked(9)} for name in ("target", "x")}
    models["unlearned"] = {"forget": asked(forget, "no"), "retain": asked(retain)}
    examples = pick_examples(QA, models, seed=0)
    names = [example.set_name for example in examples]
    assert (names.count("forget"), names.count("retain")) == counts
    assert len({(example.set_name, example.question) for example in examples}) == len(examples)
    assert examples == pick_examples(QA, models, seed=0)
    assert dict(examples[0].answers) == {"target": "yes", "unlearned": "no"}


def test_texts_are_left_out_and_other_benchmarks_sets_are_found() -> None:
    texts = {"forget": [{"text": "t"}], "retain": asked(1, None)}
    assert pick_examples(QA, {"target": texts, "unlearned": texts}, 0) == []
    muse = {"verbmem": [{"prompt": "p", "gt": "g", "generated": "x"}], "knowmem_forget": asked(1)}
    assert [example.set_name for example in pick_examples(MUSE, {"target": muse, "unlearned": muse}, 0)] == ["forget"]
    rows = [{"question": "q", "answers": ["a", "b"], "generated": ["x", "y"], "corrupted": c} for c in (True, False)]
    restor = {"questions": rows}
    (forget, retain) = pick_examples(RESTOR, {"target": restor, "unlearned": restor}, 0)
    assert (forget.set_name, retain.set_name, forget.expected) == ("forget", "retain", "a / b")
    assert forget.answers == {"target": "x", "unlearned": "x"}
