"""A run collects evidence beside its scores; report, record and comparison show it, and a purge takes its rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.errors import MismatchError
from msa_lite.evidence.evidence import Scene
from msa_lite.evidence.nearer import Nearer
from msa_lite.evidence_names import ANSWER_KINDS, EVIDENCE
from msa_lite.io.weights.hub import fetch
from msa_lite.pipeline.prepare.run import msa_scope, prepare
from msa_lite.recipe import load_recipe
from tests.e2e.conftest import CallCli, tiny_recipe
from tests.support.pages import page_text

DEFAULT = [*EVIDENCE]


def test_report_record_and_comparison_show_what_was_found(finished: Path, call_cli: CallCli) -> None:
    report = json.loads((finished / "report.json").read_text())
    found = {finding["kind"]: finding for finding in report["evidence"]}
    assert found.keys() == {*DEFAULT}
    says = found["says"]["figures"]["unlearned"]
    assert sum(figure["value"] for figure in says.values()) == pytest.approx(1)
    assert "What does it say instead?" in page_text(finished)
    code, out, _ = call_cli("compare", finished, "--format", "csv")
    assert code == 0
    rows = list(csv.DictReader(out.splitlines()))
    shown = [f"says_{kind}" for kind in ANSWER_KINDS if f"says_{kind}" in rows[0]]
    assert shown
    assert all(row[name] for row in rows for name in shown), "target and ideal stand beside both methods"
    assert len(rows) == 4
    assert call_cli("verify", finished)[0] == 0


def test_a_rerun_collects_nothing_again_and_another_model_all(
    finished: Path, monkeypatch: pytest.MonkeyPatch, call_cli: CallCli
) -> None:
    before = (finished / "record.json").read_bytes()
    ahead = json.loads(call_cli("run", finished / "recipe.yaml", "--dry-run", "--json")[1])
    states = {stage["stage"]: stage["state"] for stage in ahead["stages"]}
    assert {kind: states[f"evidence: {kind}"] for kind in DEFAULT} == dict.fromkeys(DEFAULT, "done")
    with monkeypatch.context() as patch:
        patch.setattr("msa_lite.evidence.says.Says.find", None)
        patch.setattr("msa_lite.evidence.nearer.Nearer.find", None)
        assert call_cli("run", finished / "recipe.yaml")[0] == 0
    assert (finished / "record.json").read_bytes() == before
    changed = json.loads(call_cli("run", finished / "recipe.yaml", "--dry-run", "--json", "forget.alpha=0.25")[1])
    states = {stage["stage"]: stage["state"] for stage in changed["stages"]}
    assert states["evidence: says"] == "anew"


@pytest.mark.parametrize("is_like", ["target", "ideal"])
def test_on_trained_models_the_target_and_the_ideal_are_found(knowing: Path, tmp_path: Path, is_like: str) -> None:
    recipe = tiny_recipe(knowing, tmp_path / "run")
    recipe["evaluate"]["limit"] = None
    run = prepare(loaded := load_recipe(recipe), msa_scope(loaded))
    assert run.test is not None
    sources = {name: fetch(str(knowing / name)) for name in ("target", "ideal")}
    scene = Scene(run.test, sources | {"unlearned": sources[is_like]})
    assert Nearer().lacking(scene) == ""
    finding, _ = Nearer().find(scene)
    assert finding.outcome == f"nearer to the {is_like}"
    sign = 1 if is_like == "ideal" else -1
    values = [figure.value for figure in finding.figures["unlearned"].values()]
    assert values == pytest.approx([sign])


def test_evidence_that_fails_costs_no_run_its_verdict_and_a_rerun_tries_again(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe["evidence"] = {"collect": ["says"]}

    def fail(*arguments: Any) -> None:
        raise MismatchError("the models have other shapes")

    with monkeypatch.context() as patch:
        patch.setattr("msa_lite.evidence.says.Says.find", fail)
        result = msa_lite.run(recipe)
    assert result is not None
    assert [finding.outcome for finding in result.evidence] == ["undecided"]
    assert "the models have other shapes" in caplog.text
    assert (tmp_path / "run/report.html").is_file()
    assert not (tmp_path / "run/evidence/says").exists()
    again = msa_lite.run(recipe)
    assert again is not None
    assert [finding.outcome for finding in again.evidence] != ["undecided"]
