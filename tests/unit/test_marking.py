"""A person's letters beside a judge's: kappa by hand, sheets as spreadsheets save them, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msa_lite.comparison.marking import (
    cohen_kappa,
    compare_marks,
    judge_agreement,
    read_judge_verdicts,
    read_marks,
    sample_verdicts,
)
from msa_lite.errors import DataError, MismatchError, MsaError, OutputError, UsageError
from msa_lite.io.finished.manifest import stage_folder

SHOWN = ["A. Ann", "B. Bob", "C. Cid"]
SCORES = {"A": {"acc_forget": 0.0}, "B": {"acc_forget": 1.0}, "C": {"acc_forget": 1.0}, "Z": {"acc_forget": 1.0}}


def evaluation(folder: Path, replies: str, judge: str = "openai") -> Path:
    """A finished evaluation with a verdict a row; the judge's letters are `replies`."""
    inputs = {"questions": {"sets": {"forget": 1}}, "judge": {"kind": judge}}
    with stage_folder(folder, "evaluation", inputs) as partial:
        (partial / "report.json").write_text("{}")
        with (partial / "forget.jsonl").open("w", encoding="utf-8") as file:
            for index, reply in enumerate(replies):
                entry = {"reply": reply, "tested": f'=1+{index};"é"', "shown": SHOWN, "scores": SCORES}
                file.write(json.dumps({"index": index, "question": f"Who,\n{index}?", "verdicts": [entry]}) + "\n")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    evaluation(tmp_path / "run/evaluation/target", "AABBC")
    evaluation(tmp_path / "run/evaluation/unlearned", "ZZBAA")
    evaluation(tmp_path / "run/evaluation/target_validation", "A")
    evaluation(tmp_path / "run/evaluation/prior", "A", "none")
    return tmp_path / "run"


def cells(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text("utf-8-sig"), newline="")))


def mark(path: Path, letter: Callable[[dict[str, str]], str], **form: Any) -> Path:
    """Write letters into a sheet."""
    rows = [row | {"letter": letter(row)} for row in cells(path)]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), **form)
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(stream.getvalue(), "utf-8", newline="")
    return path


@pytest.mark.parametrize(
    ("counts", "kappa"),
    [
        # Cohen's 2×2 of a textbook: 20 and 15 alike of 50; p = 0.7, e = 0.5·0.6 + 0.5·0.4 = 0.5
        ({"yy": 20, "yn": 5, "ny": 10, "nn": 15}, 0.4),
        # 3 labels: p = 6/10; e = (4·3 + 3·4 + 3·3)/100 = 0.33
        ({"aa": 2, "ab": 1, "ac": 1, "bb": 2, "ba": 1, "cc": 2, "cb": 1}, (0.6 - 0.33) / 0.67),
        ({"ab": 5, "ba": 5}, -1.0),
        ({"ab": 5}, 0.0),  # each says one thing, and another: all as by chance
        ({"aa": 5}, None),
        ({"aa": 5, "bb": 1}, 1.0),
    ],
)
def test_kappa_is_what_a_hand_works_out(counts: dict[str, int], kappa: float | None) -> None:
    pairs = [tuple(pair) for pair, count in counts.items() for _ in range(count)]
    assert cohen_kappa(pairs) == (None if kappa is None else pytest.approx(kappa))


def test_the_interval_is_wilsons() -> None:
    found = compare_marks("letter", [("a", "a")] * 9 + [("a", "b")])
    # Wilson for 9 of 10, 95 %: 0.596 to 0.982
    assert (found.share, round(found.low, 3), round(found.high, 3)) == (0.9, 0.596, 0.982)


def test_a_sheet_is_blind_drawn_by_its_seed_and_safe_in_a_spreadsheet(run: Path, tmp_path: Path) -> None:
    sample = sample_verdicts(run, out=tmp_path / "all.csv")
    assert (sample.count, sample.available, sample.models) == (10, 10, ["target", "unlearned"])
    rows = cells(tmp_path / "all.csv")
    assert list(rows[0]) == ["id", "question", "answer", "candidates", "choose", "letter"]
    assert {row["letter"] for row in rows} == {""}
    assert {row["choose"] for row in rows} == {"A to C, or Z for none"}
    assert rows[0]["candidates"] == "A. Ann\nB. Bob\nC. Cid"
    assert all(row["answer"].startswith("'=1+") for row in rows)
    text = (tmp_path / "all.csv").read_text("utf-8-sig")
    assert not any(word in text for word in ("target", "unlearned", "reply", "acc_"))
    few = [[row["id"] for row in cells(sample_verdicts(run, 3, seed, tmp_path / f"{seed}{n}.csv").file)]
           for n, seed in enumerate((0, 0, 1))]  # fmt: skip
    assert few[0] == few[1] != few[2]
    assert len({*few[0]}) == 3
    assert {row["id"] for row in rows} == {verdict.id for verdict in read_judge_verdicts(run)}


def test_an_evaluation_alone_is_sampled_with_its_ideal(tmp_path: Path) -> None:
    out = evaluation(tmp_path / "out", "AB")
    assert {verdict.model for verdict in read_judge_verdicts(out)} == {"model"}


@pytest.mark.parametrize(
    "save",
    [
        lambda path: mark(path, letter_of_the_judge),
        lambda path: mark(path, letter_of_the_judge, delimiter=";", lineterminator="\r\n"),
        lambda path: mark(path, letter_of_the_judge, delimiter="\t", quoting=csv.QUOTE_ALL),
        lambda path: mark(path, lambda row: f" ({letter_of_the_judge(row).lower()}) "),
        lambda path: path.write_bytes(b"\xef\xbb\xbf" + mark(path, letter_of_the_judge).read_bytes()),
        lambda path: path.write_bytes(mark(path, letter_of_the_judge).read_text().encode("cp1252")),
        lambda path: path.write_bytes(mark(path, letter_of_the_judge).read_text().encode("utf-16")),
        lambda path: path.write_text("sep=;\n" + mark(path, letter_of_the_judge, delimiter=";").read_text()),
        lambda path: path.write_text(mark(path, letter_of_the_judge).read_text() + "\n,,,,,\n"),
    ],
)
def test_marks_are_read_as_spreadsheets_save_them(
    run: Path, tmp_path: Path, save: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sample_verdicts(run, out=tmp_path / "sheet.csv").file
    JUDGED.update({verdict.id: verdict.reply for verdict in read_judge_verdicts(run)})
    save(path)
    found = judge_agreement(run, path)
    assert (found.marked, found.unmarked) == (10, 0)
    assert [(a.name, a.n, a.share, a.kappa) for a in found.agreements] == [
        ("letter", 10, 1.0, 1.0), ("acc_forget", 10, 1.0, 1.0)
    ]  # fmt: skip


JUDGED: dict[str, str] = {}


def letter_of_the_judge(row: dict[str, str]) -> str:
    return JUDGED[row["id"]]


def test_agreement_is_told_by_letter_and_by_metric(run: Path, tmp_path: Path) -> None:
    path = sample_verdicts(run, out=tmp_path / "sheet.csv").file
    judged = {verdict.id: verdict.reply for verdict in read_judge_verdicts(run)}
    # B in the place of C and Z: another letter, and the same score. One A of four becomes B. One row is left empty.
    first_a = next(row["id"] for row in cells(path) if judged[row["id"]] == "A")
    last_b = [row["id"] for row in cells(path) if judged[row["id"]] == "B"][-1]
    changed = {first_a: "B", last_b: ""}
    mark(path, lambda row: changed.get(row["id"], {"C": "B", "Z": "B"}.get(judged[row["id"]], judged[row["id"]])))
    found = judge_agreement(run, path)
    letter, metric = found.agreements
    assert (found.marked, found.unmarked) == (9, 1)
    assert (letter.n, letter.share) == (9, pytest.approx(5 / 9))  # 3 A and 2 B
    # p = 8/9; judge 5 of 9 forgotten, person 6 of 9: e = (5·6 + 4·3)/81
    assert (metric.name, metric.share, metric.judge, metric.person) == (
        "acc_forget", pytest.approx(8 / 9), pytest.approx(5 / 9), pytest.approx(6 / 9)
    )  # fmt: skip
    assert metric.kappa == pytest.approx((8 / 9 - 42 / 81) / (1 - 42 / 81))


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda text: text.replace("letter", "mark", 1), "lacks the columns id and letter"),
        (lambda text: "", "lacks the columns id and letter"),
        (lambda text: text.replace("\nv", "\nw", 1), "no verdict of"),
        (lambda text: text.replace('none",A', 'none",Q'), "'Q' is no choice; write A to C, or Z for none"),
        (lambda text: text.replace('none",A', 'none",ABC'), "'ABC' is no choice"),
        (lambda text: text + ",,,,,A\n", "'A' stands in a row without an id"),
        (lambda text: text.replace('none",A', 'none",'), "0 of 10 rows marked; write letters into the column"),
    ],
)
def test_a_sheet_that_cannot_be_read_is_refused(
    run: Path, tmp_path: Path, edit: Callable[[str], str], fault: str
) -> None:
    path = mark(sample_verdicts(run, out=tmp_path / "sheet.csv").file, lambda row: "A", lineterminator="\n")
    path.write_text(edit(path.read_text("utf-8")), "utf-8")
    with pytest.raises(DataError) as error:
        judge_agreement(run, path)
    assert fault in str(error.value)


def test_a_row_that_stands_twice_is_refused(run: Path, tmp_path: Path) -> None:
    path = mark(sample_verdicts(run, out=tmp_path / "sheet.csv").file, lambda row: "A")
    rows = cells(path)
    path.write_text(path.read_text("utf-8") + f"{rows[0]['id']},,,,,A\n", "utf-8")
    with pytest.raises(DataError, match=f"{rows[0]['id']}: stands twice"):
        judge_agreement(run, path)
    assert len(read_marks(path)) == 11


def test_nothing_is_sampled_into_a_run_over_a_file_or_without_a_judge(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there.csv").write_text("marks")
    unjudged = evaluation(tmp_path / "unjudged", "A", "none")
    earlier = evaluation(tmp_path / "earlier", "")
    cases: list[tuple[Path, dict[str, Any], type[MsaError], str]] = [
        (run, {"out": run / "sheet.csv"}, UsageError, "whose purge would not remove it"),
        (run, {"out": tmp_path / "there.csv"}, OutputError, "may hold somebody's marks"),
        (run, {"out": tmp_path / "no/sheet.csv"}, UsageError, "there is no folder"),
        (run, {"out": tmp_path / "a.csv", "n": 0}, UsageError, "at least 1"),
        (unjudged, {"out": tmp_path / "a.csv"}, MismatchError, "no answer here was judged"),
        (earlier, {"out": tmp_path / "a.csv"}, MismatchError, "its records have no letters of the judge"),
        (tmp_path / "empty", {"out": tmp_path / "a.csv"}, UsageError, "no such folder"),
    ]
    for folder, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            sample_verdicts(folder, **options)
    assert not (tmp_path / "a.csv").exists()
    assert (tmp_path / "there.csv").read_text() == "marks"
    (run / "evaluation/target/forget.jsonl").write_text("{}")
    with pytest.raises(MismatchError, match="not as written"):
        read_judge_verdicts(run)
