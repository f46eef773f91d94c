"""Which records of a run's folder its verdict rests on, and what the manifests of its vectors say of their fits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msa_lite.evals.benchmark import benchmark_class
from msa_lite.evals.records import write_records
from msa_lite.pipeline.verdict import NOTHING_SCORED, judge_run
from msa_lite.report.verdict import Verdict
from tests.muse_data import make_prompter
from tests.own_records import known, unknown


def empty(name: str) -> Any:
    """A benchmark without any item."""
    return benchmark_class(name)("all", {}, make_prompter())


def make_job(folder: Path, validation: str | None = "qa", test: str | None = "qa") -> Any:
    """What `judge_run` looks at of a job with an ideal."""
    return SimpleNamespace(
        folder=folder,
        plan=SimpleNamespace(start="prior"),
        recipe=SimpleNamespace(evaluate=test and {}, seed=0, folder=folder),
        sources={"ideal": None},
        validation=validation and empty(validation),
        test=test and empty(test),
        vector_names=["forget"],
        vector_folder=lambda name: folder / "vectors" / name,
    )


def write(folder: Path, name: str, first: int, **sets: list[dict[str, Any]]) -> None:
    """The records of one evaluation; rows are numbered from `first`."""
    place = folder / "evaluation" / name
    place.mkdir(parents=True)
    for key, records in sets.items():
        write_records(place / f"{key}.jsonl", [r | {"index": first + at} for at, r in enumerate(records)])


def write_parts(folder: Path) -> None:
    for ending, first in (("_validation", 0), ("", 8)):  # rows 8 and 9 are in both
        write(folder, f"target{ending}", first, forget=known(10), retain=known(10))
        write(folder, f"ideal{ending}", first, forget=unknown(10), retain=known(10))
        write(folder, f"unlearned{ending}", first, forget=unknown(10), retain=known(10))


def test_rows_of_both_parts_count_once(tmp_path: Path) -> None:
    write_parts(tmp_path)
    findings = judge_run(make_job(tmp_path), lambda *step: None)
    assert isinstance(findings.verdict, Verdict)
    assert findings.verdict.outcome == "PASS"
    assert (findings.verdict.forgotten.rows, findings.verdict.kept and findings.verdict.kept.rows) == (18, 18)
    assert len(findings.examples) == 10
    assert set(findings.examples[0].answers) == {"target", "unlearned", "ideal"}
    assert json.loads((tmp_path / "verdict.json").read_text())["forgotten"]["rows"] == 18


def test_validation_rows_of_another_benchmark_do_not_count(tmp_path: Path) -> None:
    write_parts(tmp_path)
    verdict = judge_run(make_job(tmp_path, test="tofu"), lambda *step: None).verdict
    assert isinstance(verdict, Verdict)
    assert verdict.forgotten.rows == 10


def test_the_verdict_tells_of_a_fit_that_fell_short(tmp_path: Path) -> None:
    write_parts(tmp_path)
    place = tmp_path / "vectors/forget"
    place.mkdir(parents=True)
    for tuned, told in ((1.9, True), (0.3, False)):
        made = {"made_by": "msa-lite", "kind": "vector", "inputs": {}, "files": {}}
        facts = {**made, "fit": {"loss": {"prior": 2.5, "target": 0.2, "tuned": tuned}}}
        (place / "manifest.json").write_text(json.dumps(facts))
        verdict = judge_run(make_job(tmp_path), lambda *step: None).verdict
        assert isinstance(verdict, Verdict)
        assert verdict.outcome == "PASS"  # it tells, and decides nothing
        assert any("fell from 2.5 to 1.9, and the target's is 0.2" in reason for reason in verdict.reasons) == told


def test_nothing_scored_gives_no_verdict(tmp_path: Path) -> None:
    findings = judge_run(make_job(tmp_path, None, None), lambda *step: None)
    assert (findings.verdict, findings.examples) == (NOTHING_SCORED, [])
