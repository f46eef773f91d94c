"""A run's verdict: which records it rests on, what fits and earlier requests add, and the sentence that tells it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msa_lite.data import Row
from msa_lite.evals.benchmarks.benchmark import find_benchmark
from msa_lite.evals.benchmarks.qa import QA
from msa_lite.evals.scores.records import write_records
from msa_lite.io.finished.seal import write_manifest
from msa_lite.pipeline.run.msa import learnt_rows
from msa_lite.pipeline.run.verdict import NOTHING_SCORED, _count_back, _dataset, judge_run
from msa_lite.report.verdict.figures import Bound, EarlierFacts, Forgotten, Kept, counts_basis, counts_sentence
from msa_lite.report.verdict.verdict import NoVerdict, Verdict, make_verdict
from msa_lite.settings import Margins
from msa_lite.strengths import Strengths
from tests.support.benchmark_data import make_prompter
from tests.support.records import known, make_forgotten, text, unknown


def empty(name: str) -> Any:
    """A benchmark without any item."""
    return find_benchmark(name).over("all", {}, make_prompter())


def make_job(folder: Path, validation: str | None = "qa", test: str | None = "qa") -> Any:
    """What `judge_run` looks at of a job with an ideal."""
    return SimpleNamespace(
        folder=folder,
        scope=SimpleNamespace(start="prior", folder=folder),
        recipe=SimpleNamespace(evaluate=test and {}, seed=0, folder=folder, margins=Margins(), vector_names=["forget"]),
        sources={"ideal": None},
        validation=validation and empty(validation),
        test=test and empty(test),
        removed=None,
        vector_folder=lambda name: folder / "vectors" / name,
    )


@pytest.mark.parametrize("data", ["locuslab/TOFU@01", "/eve/TOFU", "eve/TOFU@01", "muse-bench/MUSE-News@01", None])
@pytest.mark.parametrize("split", ["tofu forget10", "muse news", "muse books", "restor a0", "qa "])
def test_a_card_names_a_data_set_only_where_the_scores_are_of_that(split: str, data: str | None) -> None:
    recipe: Any = SimpleNamespace(evaluate=SimpleNamespace(benchmark=split.split()[0], split=split[5:], data=data))
    is_named = f"{split}, {data}" in ("tofu forget10, locuslab/TOFU@01", "muse news, muse-bench/MUSE-News@01")
    assert _dataset(recipe) == ({"dataset": data} if is_named else {})


def write(folder: Path, name: str, first: int, **sets: list[dict[str, Any]]) -> None:
    """The records of one evaluation; rows are numbered from `first`."""
    place = folder / "evaluation" / name
    place.mkdir(parents=True)
    for key, records in sets.items():
        write_records(place / f"{key}.jsonl", [r | {"index": first + at} for at, r in enumerate(records)])


def write_parts(folder: Path) -> None:
    for ending, first in (("_validation", 0), ("", 18)):  # rows 18 and 19 are in both
        write(folder, f"target{ending}", first, forget=known(20), retain=known(20))
        write(folder, f"ideal{ending}", first, forget=unknown(20), retain=known(20))
        write(folder, f"unlearned{ending}", first, forget=unknown(20), retain=known(20))


def test_rows_of_both_parts_count_once(tmp_path: Path) -> None:
    write_parts(tmp_path)
    findings = judge_run(make_job(tmp_path), ())
    assert isinstance(findings.verdict, Verdict)
    assert findings.verdict.outcome == "PASS"
    assert (findings.verdict.forgotten.rows, findings.verdict.kept and findings.verdict.kept.rows) == (38, 38)
    assert len(findings.examples) == 10
    assert set(findings.examples[0].answers) == {"target", "unlearned", "ideal"}
    assert json.loads((tmp_path / "verdict.json").read_text())["forgotten"]["rows"] == 38


def test_the_verdict_tells_of_a_fit_that_fell_short(tmp_path: Path) -> None:
    write_parts(tmp_path)
    place = tmp_path / "vectors/forget"
    place.mkdir(parents=True)
    for tuned, told in ((1.9, True), (0.3, False)):
        made = {"made_by": "msa-lite", "kind": "vector", "inputs": {}, "files": {}}
        facts = {**made, "fit": {"loss": {"prior": 2.5, "target": 0.2, "tuned": tuned}}}
        write_manifest(place, facts)
        verdict = judge_run(make_job(tmp_path), ()).verdict
        assert isinstance(verdict, Verdict)
        assert verdict.outcome == "PASS"  # it tells, and decides nothing
        assert any("fell from 2.5 to 1.9, and the target's is 0.2" in reason for reason in verdict.reasons) == told


def test_nothing_scored_gives_no_verdict(tmp_path: Path) -> None:
    findings = judge_run(make_job(tmp_path, None, None), ())
    assert (findings.verdict, findings.examples) == (NoVerdict(NOTHING_SCORED), [])


def named(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with a question of their own each."""
    return [record | {"question": f"{at}?"} for at, record in enumerate(records)]


@pytest.mark.parametrize(("learnt", "rows", "fitted"), [((), 40, False), (range(15), 25, False), (range(40), 40, True)])
def test_rows_to_keep_that_were_learnt_do_not_count_where_there_are_others(
    learnt: Sequence[int], rows: int, fitted: bool, tmp_path: Path
) -> None:
    """Rows that a vector was fitted to are all kept, and of the others ten are lost."""
    before, after = known(40), [*known(15), *unknown(10), *known(15)]
    write(tmp_path, "target", 0, forget=known(40), retain=named(before))
    write(tmp_path, "ideal", 0, forget=unknown(40), retain=named(before))
    write(tmp_path, "unlearned", 0, forget=unknown(40), retain=named(after))
    fits = [Row(index, f"{index}?", "Yes sir") for index in learnt]
    verdict = judge_run(make_job(tmp_path, validation=None), fits).verdict
    assert isinstance(verdict, Verdict)
    assert verdict.kept is not None
    assert (verdict.kept.rows, verdict.kept.fitted) == (rows, fitted)
    assert verdict.kept.recited == {"target": rows, "unlearned": rows - 10}
    assert verdict.outcome == "PARTLY"
    assert any("used every row to keep" in reason for reason in verdict.reasons) == fitted


@pytest.mark.parametrize(
    ("test", "recited", "rows", "outcome"),
    [("qa", 0.10, 38, "PASS"), ("qa", 0.01, 38, "PARTLY"), ("tofu", 0.10, 20, "PARTLY")],
)
def test_margins_are_the_recipes_and_validation_rows_of_another_benchmark_do_not_count(
    test: str, recited: float, rows: int, outcome: str, tmp_path: Path
) -> None:
    write_parts(tmp_path)
    job = make_job(tmp_path, test=test)
    job.recipe.margins = Margins(recited=recited)
    verdict = judge_run(job, ()).verdict
    assert isinstance(verdict, Verdict)
    assert (verdict.forgotten.rows, verdict.outcome, verdict.margins.recited) == (rows, outcome, recited)


@pytest.mark.parametrize(
    ("strengths", "hold", "rows"),
    [
        ((1.0, 0.5), 0.0, "r"),
        ((1.0, 0.0), 0.0, ""),
        ((1.0, 0.0), 1.0, "r"),
        ((1.0, 0.0, 4.0), 0.0, "v"),
        ((1.0, 0.0, 4.0), 1.0, "rv"),
    ],
    ids=["a retain vector", "nothing", "a hold", "a filter", "a filter of a sample and a hold"],
)
def test_rows_to_keep_count_as_learnt_where_they_have_a_part_in_the_merge(
    strengths: tuple[float, ...], hold: float, rows: str
) -> None:
    run: Any = SimpleNamespace(rows={"retain": ["r"]}, spared=["v"], recipe=SimpleNamespace(hold=hold))
    assert list(learnt_rows(run, Strengths(*strengths))) == list(rows)


# Rows of earlier requests: which of them come back, and how that is told


ROW = {"index": 0, "question": "Where does Ada live?", "answer": "In Yarheath."}
TOLD, SILENT = ROW | {"generated": "In Yarheath."}, ROW | {"generated": "In Oslo."}


def test_a_row_comes_back_only_if_its_own_request_is_known_to_have_removed_it(tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("forgot", "never", "unscored")}
    for name, record in (("forgot", SILENT), ("never", TOLD)):
        for model in ("target", "unlearned"):
            folder = runs[name] / "evaluation" / model
            folder.mkdir(parents=True)
            write_records(folder / "forget.jsonl", [record])
    counts = {name: sum(_count_back([run], {"unlearned": [TOLD]}).values()) for name, run in runs.items()}
    assert counts == {"forgot": 1, "never": 0, "unscored": 0}
    assert _count_back([runs["forgot"]], {"unlearned": [TOLD], "ideal": [TOLD]}) == {}, "the ideal says it, too"


def test_the_count_of_holdout_rows_stands_behind_the_holdout() -> None:
    scored = replace(
        make_forgotten(40), recited={"target": 8, "unlearned": 0, "holdout": 1, "prior": 2}, control="holdout",
        control_rows=24,
    )  # fmt: skip
    headline = EarlierFacts(2, 40, scored).headline
    assert "unseen rows: 1 of 24" in headline
    assert "prior: 2)" in headline


# The first sentence of a report: counts first, true for every outcome, and plain.


FORGOTTEN = Forgotten(48, {"target": 48, "unlearned": 2, "ideal": 1, "holdout": 3, "prior": 0}, "ideal", 48, changed=47)
KEPT = Kept(Bound(0.93, 0.9, 0.96), 120, {}, {"target": 118, "unlearned": 115})
START = "It still answers 2 of the 48 questions it was to forget"
KEEPS = "Of 120 questions it was to keep, it answered 118 before and 115 now."

CASES: dict[str, tuple[Forgotten, Kept | None, str]] = {
    "an ideal": (FORGOTTEN, KEPT, f"{START} (before: 48; a model that was never trained on them: 1). {KEEPS}"),
    "holdout rows": (
        replace(FORGOTTEN, control="holdout", control_rows=40), KEPT,
        f"{START} (before: 48; of 40 questions that it never saw, it answered 3). {KEEPS}",
    ),
    "nothing to keep": (
        replace(FORGOTTEN, control=None), None, f"{START} (before: 48). Nothing shows what it has lost of the rest.",
    ),
    "nothing has changed": (
        replace(FORGOTTEN, control=None, recited={"target": 48, "unlearned": 48}, changed=0), KEPT,
        "It still answers 48 of the 48 questions it was to forget (before: 48). Nothing has changed: its output is the "
        f"same as before on each of them. {KEEPS}",
    ),
    "a share of passages and answers": (
        replace(FORGOTTEN, unit="passages"), replace(KEPT, recited={}),
        "It still continues word for word 2 of the 48 passages it was to forget (before: 48; a model that was never "
        "trained on them: 1). Of what it knew of the 120 questions it was to keep, 93 % remains.",
    ),
    "facts": (
        replace(FORGOTTEN, unit="facts"), KEPT,
        "It still answers wrong 2 of the 48 questions on what false documents cost it (before: 48; a model that was "
        f"never trained on them: 1). {KEEPS}",
    ),
    "rows to keep that were learnt": (
        replace(FORGOTTEN, control=None), replace(KEPT, fitted=True),
        f"{START} (before: 48). Of 120 questions it was to keep, which its vector was fitted to, it answered 118 "
        "before and 115 now.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_sentence_counts(name: str) -> None:
    forgotten, kept, sentence = CASES[name]
    assert counts_sentence(forgotten, kept) == sentence == make_verdict(forgotten, kept).sentence


def test_texts_and_questions_together_are_rows() -> None:
    texts = {name: {"forget": [text(share)] * 12} for name, share in (("target", 1.0), ("unlearned", 0.1))}
    mixed = {name: {"forget": [*sets["forget"], *known(1)]} for name, sets in texts.items()}
    units = [weighed[0].unit for weighed in map(QA.weigh, (texts, mixed)) if not isinstance(weighed, str)]
    assert units == ["texts", "rows"]


def test_the_basis_tells_rows_that_the_choice_has_seen() -> None:
    told = counts_basis(FORGOTTEN, KEPT, {"forget": 48, "retain": 90})
    assert "Of the 120 rows to keep, 30 are among those by which models are chosen" in told
    assert "chosen" not in counts_basis(FORGOTTEN, KEPT, {})
