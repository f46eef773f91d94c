"""A run collects evidence beside its scores; report, record and comparison show it, and a purge takes its rows."""

from __future__ import annotations

import csv
import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import msa_lite
from msa_lite.catalogue import ANSWER_KINDS, EVIDENCE
from msa_lite.choose.search import StrengthSearch
from msa_lite.errors import MismatchError, RecipeError, UsageError
from msa_lite.evidence.evidence import Scene
from msa_lite.evidence.nearer import Nearer
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.io.weights.hub import fetch
from msa_lite.merger.filtering import filter_vector
from msa_lite.recipe.schema import AUTO_FILTERS
from msa_lite.strengths import filtered_folder
from tests.e2e.conftest import CallCli, prepared, times, tiny_recipe
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
    run = prepared(recipe)
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


# A run whose forget vector is filtered: from the recipe to report, record and mergekit, and by hand.


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_filtered_run_is_the_merge_of_its_filtered_vector(
    mode: str, recipe: dict[str, Any], tmp_path: Path, call_cli: CallCli
) -> None:
    recipe["merge"], recipe["vector"]["mode"], recipe["vector"]["learning_rate"] = {"filter": 1.5}, mode, 1e-3
    result = msa_lite.run(recipe)
    folder = result.folder
    filtered = folder / "vectors/forget-filter-1.5"
    assert (load_manifest(filtered) or {})["filter"]["layers"] == 7
    assert not (folder / "moments").exists(), "nothing needs them any more"
    before, states = times(folder), states_of(recipe)
    assert states["moments"] == states["filtered forget vector, λ = 1.5"] == states["merge"] == "done"
    msa_lite.run(recipe)
    assert times(folder) == before, "nothing is made anew"
    states = states_of(recipe, "merge.filter=2")
    assert [states[name] for name in ("moments", "forget vector", "merge")] == ["to do", "done", "anew"]
    assert states["filtered forget vector, λ = 2"] == "to do"
    by_hand = tmp_path / "by-hand"
    msa_lite.run_moments(recipe)
    private = [path for place in (folder / "moments", filtered) for path in (place, *place.iterdir())]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in private} == {0}
    models = ("--target", recipe["target"], "--forget", folder / "vectors/forget", "--prior", recipe["prior"])
    models += ("--retain", folder / "vectors/retain", "--beta", 0.5)
    moments = ("--filter", folder / "moments", "--filter-strength", 1.5)
    status, _, errors = call_cli("merge", *models, *moments, "--out", by_hand)
    assert status == 0, errors
    merged, alike = (load_file(place / "model.safetensors") for place in (folder / "model", by_hand))
    assert all(np.array_equal(merged[name], alike[name]) for name in merged)
    status, _, errors = call_cli("merge", *models, *moments[:-1], 65, "--out", tmp_path / "far")
    assert (status, "beyond the search" in errors) == (0, True), errors
    story = json.loads((folder / "report.json").read_text())
    assert story["strengths"] == {"alpha": 1.0, "beta": 0.5, "filter": 1.5}
    assert "C_f" in story["formula"]
    assert any("filter" in limit for limit in story["limits"])
    assert any("has not seen" in limit for limit in story["limits"]), "the forecast"
    status, config, _ = call_cli("mergekit", folder / "recipe.yaml")
    assert status == 0
    assert str(filtered) in config
    held = {holding.name for holding in msa_lite.purge(folder).holdings}
    assert {"moments", "vectors/forget-filter-1.5"} <= held
    card = (folder / "model/README.md").read_text()
    assert "(θ_1 − θ_0) F" in card
    assert "λ = 1.5" in card
    assert "lambda 1.5" in config
    assert "lambda 1.5" in (folder / "model/mergekit_config.yml").read_text()
    (folder / "moments/manifest.json").touch()
    (folder / "moments/moments-00001.safetensors").unlink()  # as a kill while they were removed leaves them
    msa_lite.run(recipe)
    assert times(folder) == before
    msa_lite.run(recipe, ["merge.filter=2", "merge.keep_moments=true"])
    after = times(folder)
    assert after["vectors/forget/manifest.json"] == before["vectors/forget/manifest.json"]
    assert verify_folder(folder / "moments") == []


def states_of(recipe: dict[str, Any], *overrides: str) -> dict[str, str]:
    return {state.name: state.state for state in msa_lite.dry_run(recipe, overrides=overrides).stages}


def test_moments_that_cannot_go_are_named(recipe: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    recipe["merge"] = {"filter": 1.5, "keep_moments": True}
    folder = msa_lite.run(recipe).folder
    (folder / "moments/manifest.json").write_text("7")
    msa_lite.run(recipe, ["merge.keep_moments=false"])
    told = caplog.text
    assert f"{folder / 'moments'}: holds" in told, "unknown files are not removed, and not left without a word"
    assert "keep_moments" not in told, "it decides nothing about the model"


def test_lambda_is_chosen_with_alpha_and_moments_are_measured_once(recipe: dict[str, Any], call_cli: CallCli) -> None:
    recipe["forget"]["alpha"], recipe["merge"] = "auto", {"filter": "auto"}
    recipe["retain"]["beta"] = 0.0
    begun: list[str] = []
    result = msa_lite.sweep(recipe, progress=lambda label, done, total: done or begun.append(label))
    assert {*AUTO_FILTERS} >= {candidate.values["filter"] for candidate in result.choice.candidates}
    assert all(filtered_folder(result.folder, strength).is_dir() for strength in AUTO_FILTERS)
    assert len(result.choice.scores) <= StrengthSearch(None, (0.0,), AUTO_FILTERS).most == 12
    assert begun.count("moments") == 1


def test_a_filter_without_rows_to_keep_is_refused_before_any_work(recipe: dict[str, Any], call_cli: CallCli) -> None:
    del recipe["retain"], recipe["evaluate"]["holdout"]
    with pytest.raises(RecipeError, match="retain"):
        msa_lite.run(recipe | {"merge": {"filter": 1.0}})
    with pytest.raises(UsageError, match="retain"):
        msa_lite.run_moments(recipe)
    with pytest.raises(RecipeError, match=r"merge\.filter"):
        msa_lite.run(recipe | {"merge": {"filter": 0}})
    for options in (("--filter", "m"), ("--filter-strength", "1")):
        status, _, errors = call_cli("merge", "--target", "t", "--forget", "f", *options, "--out", "o")
        assert status == 2
        assert "--filter needs --filter-strength" in errors


@pytest.mark.parametrize(("start", "mode"), [("prior", "full")])
def test_a_baselines_chosen_change_is_filtered_before_it_is_merged(
    start: str, mode: str, recipe: dict[str, Any], tmp_path: Path, call_cli: CallCli
) -> None:
    recipe["merge"], recipe["baseline"], recipe["select"] = {"filter": 1.5}, {"start": start}, {"validation": 0.25}
    recipe["merge"]["keep_moments"] = True
    recipe["vector"] |= {"mode": mode, "learning_rate": 1e-3, "warmup_epochs": 0}
    result = msa_lite.run_baseline("npo", recipe)
    assert result is not None
    folder, chosen = result.folder, result.chosen
    assert chosen["filter"] == 1.5
    by_hand, models = tmp_path / "by-hand", {"target": recipe["target"], "prior": recipe[start]}
    moments, epoch = folder / "moments", folder / f"vectors/npo/epoch-{chosen['epoch']}"
    filter_vector(str(epoch), moments, 1.5, **models, out=by_hand / "filtered")
    options = ("--target", models["target"], "--alpha", 0, "--prior", models["prior"])
    options += ("--retain", by_hand / "filtered", "--beta", 1.0)
    status, _, errors = call_cli("merge", *options, "--out", by_hand / "model")
    assert status == 0, errors
    merged, alike = (load_file(place / "model/model.safetensors") for place in (folder, by_hand))
    assert all(np.array_equal(merged[name], alike[name]) for name in merged)
    plain = load_file(Path(recipe["target"]) / "model.safetensors")
    assert any(not np.array_equal(merged[name], plain[name]) for name in merged)
    story = json.loads((folder / "report.json").read_text())
    assert (story["strengths"]["filter"], list(story["fits"])) == (1.5, ["npo"])
    assert "C_f" in story["formula"]
    status, table, errors = call_cli("compare", folder)
    assert status == 0, errors
    assert "filtered" in table
    before = times(folder)
    msa_lite.run_baseline("npo", recipe | {"merge": {"filter": 1.5}})
    assert before.pop("moments/manifest.json")
    assert times(folder) == before  # nothing is made anew
