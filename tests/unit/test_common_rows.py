"""Reports on other rows of the same data, computed anew on those that all share, with nothing but their records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.comparison.compare import FORMATS, Comparison, compare
from msa_lite.data import DataSource
from msa_lite.errors import MismatchError
from msa_lite.evals.benchmark import Benchmark, Record, Records
from msa_lite.evals.evaluation import ideal_identity
from msa_lite.evals.qa import Qa
from msa_lite.evals.records import read_records, write_records
from msa_lite.evals.restor import Restor
from msa_lite.evals.tofu import Tofu
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.manifest import stage_folder
from msa_lite.report import Metric, Report, write_report
from tests.support.records import JUDGE, made_by

NOTE = "computed anew from the records, on the rows that all models were scored on; rows left aside: "
WHOLE = (0, 1, 2, 3)
TEST = (1, 3)


def put(
    folder: Path,
    kind: type[Benchmark],
    records: Records,
    split: str = "all",
    ideal: Any = None,
    model: str | None = None,
    **settings: Any,
) -> Path:
    """A finished evaluation of these records, whose report says what they do not. ideal: "itself", or a folder."""
    how = settings.get("max_new_tokens")
    shas = {name: digest([how, *([r["index"], r["question"]] for r in found)]) for name, found in records.items()}
    asked = {
        "benchmark": kind.name,
        "split": split,
        "prompt": {"kind": "plain"},
        "sets": {name: {"rows": len(found), "sha256": shas[name]} for name, found in records.items()},
        "compat": [],
    }
    inputs = {"model": model or str(folder), "questions": asked, "ideal": ideal_identity(ideal)}
    with stage_folder(folder, "evaluation", inputs) as partial:
        for name, found in records.items():
            write_records(partial / f"{name}.jsonl", found)
        write_report(Report(kind.name, split, {"rouge_l_f": Metric(0.125, 9, None, False)}, asked | settings), partial)
    return folder


def qa(values: Mapping[int, float], sets: Sequence[str] = ("forget",), **more: Any) -> dict[str, list[Record]]:
    """Records with a ROUGE-L recall by row, the same in every set."""
    texts = {"answer": [{"n_tokens": 4}]}
    row: dict[str, Any] = {"answer": "There.", "scores": texts, "extraction_strength": 0.5} | more
    items = [{"index": i, "question": f"Where is {i}?", **row, "rouge_l": value} for i, value in values.items()]
    return dict.fromkeys(sets, items)


def put_run(folder: Path, **options: Any) -> Path:
    """MSA scored on all four rows, NPO on the second and the last; whatever is left aside would change every value."""
    for home, rows, split in ((folder, WHOLE, "all"), (folder / "baselines/npo", TEST, "test")):
        place = home / "evaluation"
        common: dict[str, Any] = {"split": split} | options
        for name, values in {"ideal": (1, 0.3, 1, 0.5), "target": (0, 0.9, 0, 0.7)}.items():
            ideal = "itself" if name == "ideal" else place / "ideal"
            put(place / name, Qa, qa({i: values[i] for i in rows}), ideal=ideal, model=name, **common)
        method, scores = ("npo", (0, 0.8, 0, 0.4)) if home != folder else ("msa", (0, 0.2, 0, 0.6))
        records = qa({i: scores[i] for i in rows})
        put(place / "unlearned", Qa, records, ideal=place / "ideal", **common, **made_by(method))
    return folder


def approx(*values: float) -> Any:
    return pytest.approx(values)


def cells(comparison: Comparison, metric: str) -> dict[str, tuple[float | None, float | None, int | None]]:
    """A column: (value, standard error, n) by row."""
    return {row.label: (c.value, c.stderr, c.n) for row in comparison.rows for c in [row.cells[metric]]}


def test_a_run_without_a_choice_stands_beside_a_baseline_with_one(tmp_path: Path) -> None:
    run = put_run(tmp_path / "run")
    found = compare(run)
    # Rows 1 and 3. The standard error of two values is half their distance.
    assert cells(found, "rouge_l_f") == {
        "Target": approx(0.8, 0.1, 2), "Ideal": approx(0.4, 0.1, 2),
        "MSA": approx(0.4, 0.2, 2), "NPO": approx(0.6, 0.2, 2),
    }  # fmt: skip
    ratios = [str(row.cells["rouge_l_f"].ratio) for row in found.rows[2:]]
    assert ratios == ["+100%", "66.7%"]  # 0.4 / 0.6
    assert found.title == "qa, rows in common: 2 forget"
    assert f"{NOTE}2 forget (Target, Ideal, MSA)" in found.notes
    assert "runs that chose settings or epochs are not scored on the rows of that choice" in found.notes


def test_the_order_of_what_is_given_does_not_matter(tmp_path: Path) -> None:
    run = put_run(tmp_path / "run")
    paths = [*run.glob("**/unlearned"), *run.glob("evaluation/*")]
    one, other = compare(paths), compare(paths[::-1])
    assert len(one.rows) == 4
    assert cells(one, "rouge_l_f") == cells(other, "rouge_l_f") == cells(compare(run), "rouge_l_f")
    assert one.split == other.split


def test_a_target_whose_batches_were_others_is_one_row_with_the_first_values(tmp_path: Path) -> None:
    for name, values in {"a": {0: 0.5, 1: 0.5}, "b": {1: 0.5001}}.items():
        put(tmp_path / name / "evaluation/target", Qa, qa(values), model="sha256:1")
        put(tmp_path / name / "evaluation/unlearned", Qa, qa(values), **made_by("msa"))
    targets = compare([tmp_path / name / "evaluation/target" for name in "ba"])
    assert "computed anew from the records, on the rows that all models were scored on" in targets.notes
    found = cells(compare([tmp_path / "a", tmp_path / "b"]), "rouge_l_f")
    assert {label: value[0] for label, value in found.items()} == {"Target": 0.5, "MSA (a)": 0.5, "MSA (b)": 0.5001}
    put(tmp_path / "c/evaluation/target", Qa, qa({1: 0.6}), model="sha256:2")
    with pytest.raises(MismatchError, match=r"differ in rouge_l_f \(0\.5, 0\.6\)"):
        compare([tmp_path / "a", tmp_path / "c"])


def test_samples_of_other_sizes_are_cut_to_what_they_share(tmp_path: Path) -> None:
    for name, rows in {"a": (0, 1, 2), "b": (1, 2, 3), "c": (2, 1, 4)}.items():
        put(tmp_path / name, Qa, qa({row: row / 10 for row in rows}))
    found = compare([tmp_path / name for name in "abc"])
    assert list(cells(found, "rouge_l_f").values()) == [approx(0.15, 0.05, 2)] * 3  # rows 1 and 2
    assert f"{NOTE}1 forget (a, b, c)" in found.notes
    assert not any("chose" in note for note in found.notes)


def test_a_set_that_only_some_have_is_cut_among_these(tmp_path: Path) -> None:
    put(tmp_path / "a", Qa, qa({0: 0.1, 1: 0.2, 2: 0.3}) | qa({5: 0.5, 6: 0.7}, ["holdout"]))
    put(tmp_path / "b", Qa, qa({1: 0.4}) | qa({6: 0.9, 7: 0.1}, ["holdout"]))
    put(tmp_path / "c", Qa, qa({1: 0.6, 2: 0.1}))
    found = compare([tmp_path / name for name in "abc"])
    assert found.title == "qa, rows in common: 1 forget, 1 holdout"
    assert [value for value, _, _ in cells(found, "rouge_l_f").values()] == [0.2, 0.4, 0.6]
    assert [value for value, _, _ in cells(found, "rouge_l_h").values()] == [0.7, 0.9, None]
    assert f"{NOTE}2 forget, 1 holdout (a); 1 holdout (b); 1 forget (c)" in found.notes


def tofu(rows: Sequence[int], ratios: Mapping[int, float], **verdicts: float) -> dict[str, list[Record]]:
    """TOFU's records of these forget and retain rows: all scores are ½, on rows 0 and 2 nothing."""
    found: dict[str, list[Record]] = {}
    for name in ("forget", "retain", "real_authors", "world_facts"):
        found[name] = []
        for i in rows if name in ("forget", "retain") else (0, 1):
            half = 0.5 if i % 2 or name not in ("forget", "retain") else 0.0
            record: Record = {"index": i, "question": f"{name} {i}?", "answer": "There.", "perturbed_answer": ["Here."]}
            scores = {"probability": half, "choice_probability": half, "rouge_l": half, "truth_ratio": 1 - half}
            if name == "forget":
                scores["truth_ratio"] = ratios[i]
            if verdicts and name in ("forget", "retain"):
                record["judge"] = {"valid": i != 3, **{key: value * half for key, value in verdicts.items()}}
            found[name].append(record | scores)
    return found


LOW, HIGH = {0: 9.0, 1: 0.1, 2: 9.0, 3: 0.2}, {0: 8.0, 1: 0.7, 2: 8.0, 3: 0.8}


def put_tofus(folder: Path) -> tuple[Path, Path]:
    """(on all rows, on the test part), each with its ideal beside it, judged."""
    homes = folder / "one", folder / "other"
    for home, rows, split in ((homes[0], WHOLE, "forget01"), (homes[1], TEST, "forget01 test")):
        said = {"acc_forget": 1.0, "acc_recover": 0.5, "acc_retain": 0.25}
        place = home / "evaluation"
        ideal = put(place / "ideal", Tofu, tofu(rows, HIGH, **said), split, "itself", "ideal", judge=JUDGE)
        put(place / "unlearned", Tofu, tofu(rows, LOW, **said), split, ideal, judge=JUDGE)
    return homes


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(put_tofus(tmp_path_factory.mktemp("tofus")), "tofu-forget01-llama-3.2-1b")


def test_what_needs_the_ideal_has_its_records_of_the_same_rows(compared: Comparison) -> None:
    found = replace(compared, rows=compared.rows[:3])
    assert found.split == "forget01, rows in common: 2 forget, 2 retain, 2 real authors, 2 world facts"
    # Two truth ratios below the ideal's two: 2 / C(4, 2). On all rows it would be something else.
    expected = {"Ideal": 1.0, "one": pytest.approx(1 / 3), "other": pytest.approx(1 / 3)}
    assert {label: value for label, (value, _, _) in cells(found, "forget_quality").items()} == expected
    # All nine parts are ½ on rows 1 and 3.
    assert cells(found, "model_utility")["one"] == approx(0.5, 0, 6)
    assert f"{NOTE}2 forget, 2 retain (Ideal, one)" in found.notes


def test_what_a_judge_said_is_kept(compared: Comparison) -> None:
    found = replace(compared, rows=compared.rows[:3])
    for metric, value in {"acc_forget": 0.5, "acc_recover": 0.25, "acc_retain": 0.125}.items():
        assert set(cells(found, metric).values()) == {(value, 0.0, 2)}
    assert any("1 replies of the judge were invalid" in note for note in found.notes)
    assert any("gpt-4o" in note for note in found.notes)


def test_an_ideal_is_found_beside_a_report_and_its_absence_is_a_reason(tmp_path: Path) -> None:
    tofus = put_tofus(tmp_path)
    alone = [home / "evaluation/unlearned" for home in tofus]
    found = compare(alone)
    assert [value for value, _, _ in cells(found, "forget_quality").values()] == approx(1 / 3, 1 / 3)
    for home in tofus:
        (home / "evaluation/ideal").rename(home / "elsewhere")
    missing = compare(alone[::-1])
    assert cells(missing, "model_utility")["one"] == approx(0.5, 0, 6)
    assert any(note.startswith("forget quality left out: needs the ideal") for note in missing.notes)
    put(tofus[0] / "evaluation/alone", Tofu, tofu(WHOLE, LOW), "forget01", "a model")
    put(tofus[0] / "evaluation/alone/ideal", Tofu, tofu(WHOLE, HIGH), "forget01", "itself", "a model")
    within = compare([alone[1], tofus[0] / "evaluation/alone/report.json"])
    assert cells(within, "forget_quality")["alone"][0] == pytest.approx(1 / 3)
    named = compare([*alone, f"Ideal={tofus[0]}/elsewhere"])  # of which only one of the two was beside
    assert cells(named, "forget_quality")["one"][0] == pytest.approx(1 / 3)
    assert cells(named, "forget_quality")["other"][0] is None


def test_one_verdict_among_many_makes_questions_judged(tmp_path: Path) -> None:
    def records(rows: Sequence[int], right: float) -> dict[str, list[Record]]:
        data = {"question": "Who?", "answers": ["You"], "generated": "You", "containment": 1.0}
        verdict = {"judge": {"valid": True, "correct": right}}
        return {"questions": [{"index": i, **data, "corrupted": i > 1, **(verdict if i else {})} for i in rows]}

    put(tmp_path / "a", Restor, records(WHOLE, 0.0), "a0", judge=JUDGE)
    put(tmp_path / "b", Restor, records(WHOLE[:3], 1.0), "a0", judge=JUDGE)
    # Row 0 has no verdict, which counts as wrong: 0 of 3, and 2 of 3; of the corrupted only row 2 is left.
    found = compare([tmp_path / "a", tmp_path / "b"], metrics=["accuracy", "accuracy_corrupted"])
    assert [value for value, _, _ in cells(found, "accuracy").values()] == approx(0, 2 / 3)
    assert set(cells(found, "accuracy_corrupted").values()) == {(0.0, None, 1), (1.0, None, 1)}


def test_reports_on_the_same_rows_do_without_records(tmp_path: Path) -> None:
    run = put_run(tmp_path / "run", split="all")
    whole, part = run / "evaluation", run / "baselines/npo/evaluation"
    for path in run.glob("**/*.jsonl"):
        path.unlink()
    found = compare(whole)
    assert set(cells(found, "rouge_l_f").values()) == {(0.125, None, 9)}
    assert found.title == "qa, all"
    assert not any("anew" in note for note in found.notes)
    assert compare([part]).split == "all"
    with pytest.raises(MismatchError) as told:
        compare([whole, part])
    text = str(told.value)
    assert "on different rows, and cannot be computed anew" in text
    assert text.count("forget.jsonl: missing, or not as written; evaluate that model again") == 6


def test_records_that_are_not_there_or_were_changed_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "a", Qa, qa({0: 0.5, 1: 0.5}))
    put(tmp_path / "b", Qa, qa({1: 0.5}))
    bare, named = tmp_path / "bare/report.json", tmp_path / "b/mine.json"
    bare.parent.mkdir()
    for path in (bare, named):
        path.write_text((tmp_path / "b/report.json").read_text())
    with open(tmp_path / "a/forget.jsonl", "a") as stream:
        stream.write("\n")
    with pytest.raises(MismatchError) as told:
        compare([tmp_path / "a", bare, named])
    lines = [line.strip() for line in str(told.value).splitlines()[1:]]
    assert lines == [
        f"{tmp_path}/a: forget.jsonl: missing, or not as written; evaluate that model again",
        f"{tmp_path}/bare: not the folder of an evaluation; a report needs its records beside it",
        f"{tmp_path}/b/mine.json: not the report.json of an evaluation's folder, with the records beside it",
    ]


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (qa({1: 0.5}, answer="Here."), "forget, row 1 has another answer"),
        (qa({1: 0.5}, scores={"answer": [{"n_tokens": 5}]}), "forget, row 1 has another number of tokens"),
        (qa({7: 0.5}), "forget: there is no row that all were scored on"),
    ],
)
def test_other_data_is_refused(records: Records, told: str, tmp_path: Path) -> None:
    put(tmp_path / "a", Qa, qa({0: 0.5, 1: 0.5}))
    put(tmp_path / "b", Qa, records)
    for order in (1, -1):
        with pytest.raises(MismatchError) as error:
            compare([tmp_path / "a", tmp_path / "b"][::order])
        assert told in str(error.value)


def test_a_model_without_room_for_a_text_was_asked_the_same(tmp_path: Path) -> None:
    put(tmp_path / "a", Qa, qa({0: 0.5, 1: 0.5}))
    put(tmp_path / "b", Qa, qa({1: 0.5}, scores={}, skipped="too long"))
    assert len(compare([tmp_path / "a", tmp_path / "b"]).rows) == 2


def test_answers_of_other_lengths_and_other_prompts_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "a", Qa, qa({0: 0.5, 1: 0.5}), max_new_tokens=16)
    put(tmp_path / "b", Qa, qa({1: 0.5}), max_new_tokens=200)
    with pytest.raises(MismatchError, match="answers of at most 16 and 200 tokens"):
        compare([tmp_path / "a", tmp_path / "b"])
    # An older report does not say how long its answers are, but rows that are the same have the same hash.
    put(tmp_path / "old", Qa, qa({0: 0.5, 1: 0.5}) | qa({1: 0.5}, ["retain"]))
    put(tmp_path / "new", Qa, qa({1: 0.5}, ["forget", "retain"]), max_new_tokens=16)
    with pytest.raises(MismatchError, match="retain has the same rows, but other tokens or lengths of answers"):
        compare([tmp_path / "old", tmp_path / "new"])
    put(tmp_path / "c", Qa, qa({1: 0.5}), prompt={"kind": "chat"})
    with pytest.raises(MismatchError, match=r"cannot stand side by side:\n.*\n.*: other prompt$"):
        compare([tmp_path / "a", tmp_path / "c"])


def test_every_form_says_what_the_numbers_are_on_also_beside_published_figures(compared: Comparison) -> None:
    assert [row.section for row in compared.rows[:4]] == ["references", "others", "others", "published"]
    for form in ("md", "tex", "html"):
        assert f"{NOTE}2 forget, 2 retain (Ideal, one)." in FORMATS[form](compared)
    assert "<caption>tofu, forget01, rows in common: 2 forget, 2 retain" in FORMATS["html"](compared)
    assert ",0.5,0.0,6," in FORMATS["csv"](compared).partition("others,one,")[2].splitlines()[0]


def test_real_samples_are_worth_what_their_common_rows_are_alone(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model, data = str(make_checkpoint("llama")), tmp_path / "data.jsonl"
    lines = [json.dumps({"question": f"Where is {i}?", "answer": f"{i} is at {i * i}."}) for i in range(9)]
    data.write_text("\n".join(lines))
    questions = msa_lite.OwnQuestions(DataSource(str(data)), max_new_tokens=4)
    for name, limit in {"five": 5, "seven": 7}.items():
        msa_lite.evaluate(model, tmp_path / name, questions, limit=limit)
    folders = [tmp_path / "five", tmp_path / "seven"]
    rows = [{record["index"] for record in read_records(folder / "forget.jsonl")} for folder in folders]
    shared = sorted(rows[0] & rows[1])
    data.write_text("\n".join(lines[i] for i in shared))
    alone = msa_lite.evaluate(model, tmp_path / "alone", questions)["model"]
    names = ["probability_f", "extraction_strength", "exact_memorization"]
    found = compare(folders, metrics=names)
    assert f"rows in common: {len(shared)} forget" in found.title
    assert 0 < len(shared) < 7
    for name in names:
        metric = alone.metrics[name]
        for value, stderr, n in cells(found, name).values():
            assert (value, stderr, n) == (pytest.approx(metric.value), pytest.approx(metric.stderr), metric.n)
    again = msa_lite.evaluate(model, tmp_path / "longer", replace(questions, max_new_tokens=5), limit=2)["model"]
    assert again.settings["max_new_tokens"] == 5
