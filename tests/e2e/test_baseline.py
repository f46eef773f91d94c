"""From a recipe to the report of a method that MSA is compared with, by Python and by the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import msa_lite
from msa_lite.baselines.methods import METHODS, TASK_VECTOR
from msa_lite.choose.choice import load_choice
from msa_lite.comparison.compare import compare
from msa_lite.errors import FormatError, MismatchError, StageError, UsageError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import load_manifest, verify_folder
from msa_lite.io.weights.hub import fetch
from msa_lite.pipeline.baseline.entered import entered_name
from msa_lite.pipeline.purge.holdings import run_folders
from msa_lite.pipeline.run.folder import open_run
from msa_lite.pipeline.verbs.run import RunResult
from msa_lite.publish.contents import PublishOptions, make_contents
from msa_lite.record.check import verify
from msa_lite.report import load_report
from msa_lite.report.run.choice import candidate_name
from msa_lite.report.run.story import load_story
from tests.e2e.conftest import CallCli, read_lines, times, tiny_recipe
from tests.support.pages import page_text

TRAINED = list(METHODS)
USUAL = ("grad_diff", "npo", "rmu")
"""Methods with rows to keep, with log-probabilities of a reference, and with activations; the others are slow tests."""
BY_METHOD = [pytest.param(method, marks=() if method in USUAL else pytest.mark.slow) for method in TRAINED]


@dataclass
class Runs:
    """Runs of one recipe into one folder: MSA's, then a baseline's for each method, and what each of them worked on."""

    recipe: Mapping[str, Any]
    folder: Path
    results: dict[str, RunResult] = field(default_factory=dict)
    labels: dict[str, set[str]] = field(default_factory=dict)

    def start(self, method: str, *overrides: str, name: str | None = None) -> RunResult:
        """Run a method, and keep the labels of its progress."""
        labels: set[str] = set()
        self.labels[name or method] = labels
        return msa_lite.run_baseline(
            method, self.recipe, overrides, lambda label, done, total: total > 1 and labels.add(label)
        )

    def result(self, method: str) -> RunResult:
        """Return the run of a method as the recipe has it, made once."""
        if method not in self.results:
            self.results[method] = self.start(method)
        return self.results[method]


def short_recipe(knowing: Path, output: Path) -> dict[str, Any]:
    """A recipe whose baselines take about a second each; its target knows its rows, so that there is a best epoch."""
    recipe = tiny_recipe(knowing, output)
    recipe["forget"]["alpha"] = [0.5, 1.0]
    recipe["vector"] |= {"learning_rate": 2e-2, "warmup_epochs": 0}
    recipe["evaluate"] = {"ideal": str(knowing / "ideal"), "max_new_tokens": 12, "limit": 8}
    baseline = {"methods": {"rmu": {"layer": 0}}}
    return recipe | {"select": {"validation": 0.25}, "baseline": baseline}


@pytest.fixture(scope="module")
def runs(knowing: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("baselines") / "run"
    made = Runs(short_recipe(knowing, folder), folder)
    msa_lite.run(made.recipe)
    return made


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a model, or of a checkpoint's folder."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def tuned(start: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The weights of a model with an adapter folded in by PEFT."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    return tensors(PeftModel.from_pretrained(model, str(adapter)).merge_and_unload())


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-6, rtol=1e-5, msg=name)


def indices(path: Path) -> set[int]:
    return {row["index"] for row in read_lines(path)}


@pytest.mark.parametrize("method", [*BY_METHOD, TASK_VECTOR])
def test_a_method_goes_from_a_recipe_to_a_report(method: str, runs: Runs) -> None:
    result = runs.result(method)
    run = runs.folder / "baselines" / method
    assert result.folder == run
    vectors = {"forget", "retain"} if method == TASK_VECTOR else {method}
    assert {path.name for path in (run / "vectors").iterdir()} == vectors
    stages = {"sweep", "model", *(f"evaluation/{name}" for name in ("target", "ideal", "unlearned"))}
    made = {str(path.parent.relative_to(run)) for path in run.rglob("manifest.json")}
    assert made >= stages | {f"vectors/{name}" for name in vectors}
    for stage in made:
        assert verify_folder(run / stage) == [], stage
    assert json.loads((run / "report.json").read_text())["method"] == method
    named = "by Task Vector" if method == TASK_VECTOR else f"the baseline {method}"
    assert named in (run / "model/README.md").read_text()
    assert not list(run.rglob("*.partial"))
    assert not (run / "candidate").exists()

    choice = load_choice(run / "sweep")
    scored = [row for row in choice.scores if row["score"] is not None]
    best = max((row["met"], row["score"]) for row in scored)
    assert (choice.met, choice.score) == best
    own = next(row for row in scored if choice.values.items() <= row.items())
    assert (own["met"], own["score"]) == best
    assert choice.values.items() <= result.chosen.items()
    for row in choice.scores:
        name = candidate_name({key: row[key] for key in choice.values})
        assert (run / "sweep" / name / "report.json").is_file()

    assert (method == TASK_VECTOR) or result.chosen["learning_rate"] == runs.recipe["vector"]["learning_rate"]
    settings = json.loads((run / "evaluation/unlearned/report.json").read_text())["settings"]
    assert settings["model"] == (load_manifest(run / "evaluation/unlearned") or {})["inputs"]["model"]
    assert settings["method"] == {
        "name": method,
        "mode": "lora",
        "start": "target",
        "parameters": dict(result.chosen) | ({} if method == TASK_VECTOR else {"epochs": 2}),
    }


def test_rows_to_keep_that_chose_an_epoch_are_not_scored_on(runs: Runs) -> None:
    for method in USUAL:
        runs.result(method)
        run = runs.folder / "baselines" / method
        tried = indices(run / "sweep/epoch-1/retain.jsonl")
        tested = indices(run / "evaluation/unlearned/retain.jsonl")
        assert (len(tried), len(tested), tried & tested) == (2, 6, set())
        for name in ("forget", "retain"):
            ours = indices(run / f"evaluation/unlearned/{name}.jsonl")
            assert ours == indices(runs.folder / f"evaluation/unlearned/{name}.jsonl")  # of MSA
        assert indices(run / "sweep/epoch-1/forget.jsonl") == indices(run / "evaluation/unlearned/forget.jsonl")
        assert {report.split for report in runs.result(method).reports.values()} == {"test"}


def test_what_msa_asked_target_and_ideal_is_not_asked_again(runs: Runs) -> None:
    asked = {"scores: target", "scores: ideal", "validation: target"}
    for method in USUAL:
        runs.result(method)
        assert not asked & runs.labels[method]
        assert "scores: unlearned" in runs.labels[method]
    for name in ("target", "ideal"):
        ours = runs.folder / "baselines/npo/evaluation" / name
        assert hash_file(ours / "forget.jsonl") == hash_file(runs.folder / "evaluation" / name / "forget.jsonl")


@pytest.mark.parametrize("method", BY_METHOD)
def test_the_model_is_the_target_with_the_chosen_epochs_adapter(method: str, runs: Runs, knowing: Path) -> None:
    result = runs.result(method)
    vector = result.folder / "vectors" / method
    epoch = result.chosen["epoch"]
    assert [path.name for path in vector.glob("epoch-*")] == [f"epoch-{epoch}"]  # the others are gone
    found = tensors(result.merged.folder)
    assert_same(found, tuned(knowing / "target", vector / f"epoch-{epoch}"))
    before = tensors(knowing / "target")
    assert any(not torch.equal(found[name], before[name]) for name in found)


@pytest.mark.parametrize("method", ["npo", "rmu"])  # the reference: log-probabilities of rows, or a copy of layers
def test_in_full_mode_the_model_is_the_chosen_epochs(method: str, runs: Runs, tmp_path: Path) -> None:
    overrides = ["vector.mode=full", f"output={tmp_path}", "baseline.learning_rate=1e-4", "evaluate.ideal=null"]
    result = runs.start(method, *overrides, name=f"full {method}")
    epoch = tmp_path / "baselines" / method / "vectors" / method / f"epoch-{result.chosen['epoch']}"
    assert_same(tensors(result.merged.folder), tensors(epoch))
    assert verify_folder(epoch.parent) == []
    assert result.reports["unlearned"].settings["method"]["mode"] == "full"


def test_from_the_prior_the_change_is_added_to_the_target(runs: Runs, knowing: Path, tmp_path: Path) -> None:
    result = runs.start("npo", "baseline.start=prior", "baseline.scale=[0.5,2.0]", name="prior")
    assert result.folder == runs.folder / "baselines/npo-prior"
    vector = result.folder / "vectors/npo"
    assert [path.name for path in vector.glob("epoch-*")] == [f"epoch-{result.chosen['epoch']}"]
    candidates = {path.name for path in (result.folder / "sweep").iterdir() if path.is_dir()}
    assert candidates == {
        "target",
        "ideal",
        *(f"epoch-{epoch}_scale-{scale}" for epoch in (1, 2) for scale in ("0.5", "2")),
    }
    target, prior = tensors(knowing / "target"), tensors(knowing / "prior")
    after = tuned(knowing / "prior", vector / f"epoch-{result.chosen['epoch']}")
    scale = float(result.chosen["scale"])
    assert_same(tensors(result.merged.folder), {n: target[n] + scale * (after[n] - prior[n]) for n in target})
    settings = result.reports["unlearned"].settings["method"]
    assert (settings["start"], settings["parameters"]) == ("prior", {**result.chosen, "epochs": 2})
    assert "θ_u = θ_D + scale (θ_1 − θ_0)" in page_text(result.folder)
    assert not list((result.folder / "sweep").rglob("*.safetensors"))

    # The recipe that it left, by the command in its first line.
    path = result.folder / "recipe.yaml"
    command = re.search(r"`msa-lite baseline (\w+)` on this file repeats the run", path.read_text())
    assert command is not None
    again = msa_lite.run_baseline(command[1], path, [f"output={tmp_path}/again", "evaluate.ideal=null"])
    assert (again.chosen, again.folder.name) == (result.chosen, result.folder.name)
    for shard in result.merged.folder.glob("*.safetensors"):
        assert hash_file(again.merged.folder / shard.name) == hash_file(shard)


def test_the_task_vector_is_a_plain_merge_of_vectors_from_the_target(runs: Runs, knowing: Path, tmp_path: Path) -> None:
    result = runs.result(TASK_VECTOR)
    target, vectors = str(knowing / "target"), result.folder / "vectors"
    assert set(result.chosen) == {"alpha", "beta"}
    plain = msa_lite.merge(
        target,
        tmp_path / "plain",
        forget=str(vectors / "forget"),
        alpha=float(result.chosen["alpha"]),
        retain=str(vectors / "retain"),
        beta=float(result.chosen["beta"]),
    )
    assert hash_file(plain.folder / "model.safetensors") == hash_file(result.merged.folder / "model.safetensors")
    for name in ("forget", "retain"):
        tuned = load_manifest(vectors / name)
        assert tuned is not None
        assert tuned["inputs"]["prior"] == fetch(target).identity()
    own = {**runs.recipe, "prior": target, "output": str(tmp_path / "own")}
    with pytest.raises(MismatchError, match="prior"):  # what it comes to, a run refuses
        msa_lite.run(own)


def test_a_second_run_does_nothing_and_a_changed_one_only_what_depends_on_it(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs.folder, tmp_path / "run")
    run, output = tmp_path / "run/baselines/npo", f"output={tmp_path}/run"
    before = times(run)
    again = runs.start("npo", output, name="again")
    assert runs.labels["again"] == set()
    assert again.reports == runs.result("npo").reports
    assert times(run) == before
    runs.start("npo", output, "baseline.methods.npo.beta=0.5", name="beta")
    assert runs.labels["beta"] == {"npo", "choosing the epoch", "merge", "scores: unlearned"}
    kept = {name for name, time in times(run).items() if before[name] == time}
    evaluations = ("target", "ideal", "target_validation", "ideal_validation")
    assert kept == {f"evaluation/{name}/manifest.json" for name in evaluations}


def test_an_epoch_that_breaks_the_model_ends_the_training(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = ["vector.epochs=4", "baseline.learning_rate=0.3", "evaluate.ideal=null", f"output={tmp_path}/run"]
    with caplog.at_level("WARNING", logger="msa_lite"), pytest.raises(StageError, match="every candidate is broken"):
        runs.start("grad_ascent", *overrides, name="broken")
    found = re.search(r"epoch (\d) is broken \(.* is left of the target's .*\); training ends there", caplog.text)
    assert found is not None
    last = int(found[1])
    assert last < 4
    vector = tmp_path / "run/baselines/grad_ascent/vectors/grad_ascent"
    assert {path.name for path in (vector / "scores").iterdir()} == {f"epoch-{n}" for n in range(1, last + 1)}
    log = (vector / "train_log.jsonl").read_text().splitlines()
    assert len(log) == 3 * last


@pytest.fixture(scope="module")
def entered(runs: Runs) -> RunResult:
    """MSA's own model, entered as the result of another method."""
    result = msa_lite.run_baseline(None, runs.recipe, model=str(runs.folder / "model"))
    assert result is not None
    return result


def test_msas_own_model_entered_as_another_methods_gets_its_verdict_and_figures(
    entered: RunResult, runs: Runs, call_cli: CallCli
) -> None:
    own, run = runs.folder, entered.folder
    assert (run, entered.method, entered.chosen) == (own / "baselines/run-model", "run-model", {})
    assert json.loads((run / "verdict.json").read_text()) == json.loads((own / "verdict.json").read_text())
    for name in ("target", "ideal", "unlearned", "unlearned_validation"):
        ours, theirs = (load_report(folder / "evaluation" / name) for folder in (own, run))
        assert (theirs.metrics, theirs.settings["sets"]) == (ours.metrics, ours.settings["sets"])
    assert not (run / "vectors").exists()
    assert not (run / "sweep").exists()

    record = json.loads((run / "record.json").read_text())
    assert (record["vectors"], record["strengths"]) == ([], {})
    assert record["models"]["checkpoint"] == {
        "name": "local folder",
        "revision": fetch(str(own / "model")).revision,
    } | {"tokenizer": None}
    places = [record["formula"], page_text(run), (run / "model/README.md").read_text()]
    assert ["not made by msa-lite" in text for text in places] == [True] * 3
    assert str(own / "model") not in "".join([*places, (run / "record.json").read_text()])
    story = load_story(run)
    assert (story.missing, story.formula) == ((), record["formula"])

    weights = [folder / "model/model.safetensors" for folder in (own, run)]
    assert os.path.samefile(*weights)
    assert verify(run).faults == []
    own_row, their_row = (
        next(row for row in compare(own).rows if row.source == str(folder / "evaluation/unlearned/report.json"))
        for folder in (own, run)
    )
    assert (their_row.section, their_row.label) == ("baselines", "run-model")
    values = [{name: cell.value for name, cell in row.cells.items()} for row in (own_row, their_row)]
    assert values[0] == values[1]

    before = times(own)
    status, out, _ = call_cli("baseline", "--model", own / "model", own / "recipe.yaml", "--json")
    assert (status, json.loads(out)["method"]) == (0, "run-model")
    assert times(own) == before
    status, out, err = call_cli("attack", run, "--attacks", "prompt", "attack.rows=4", "--json")
    assert status == 0, err
    assert json.loads(out)["attacks"][0]["name"] == "prompt"
    assert make_contents(run, PublishOptions(accept=True, public=True, license="mit")).kind == "model"
    assert [place.name for place in run_folders(open_run(own))].count("run-model") == 1


def test_the_target_itself_entered_fails_and_its_change_in_place_is_told(
    runs: Runs, knowing: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = edited(knowing / "target", tmp_path / "same")
    (place / "model.safetensors").chmod(0o600)
    set_config(place, transformers_version="4.50.0", use_cache=False, attention_dropout=0.1, _name_or_path="elsewhere")
    shutil.copyfile(knowing / "data/forget.jsonl", place / "samples.json")
    all_learnt = {**runs.recipe["retain"], "data": {"path": str(knowing / "data/retain.jsonl")}}
    recipe = {**runs.recipe, "retain": all_learnt, "output": str(tmp_path / "run"), "merge": {"as": "adapter"}}
    result = msa_lite.run_baseline(None, recipe, model=str(place))
    assert result.verdict.kept.fitted  # MSA learns all rows to keep, so the other method may have, too
    assert (result.verdict.outcome, result.merged.weights_changed) == ("FAIL", 0)
    assert "every weight is the target's own" in caplog.text
    assert (place / "model.safetensors").stat().st_mode & 0o777 == 0o600
    assert not [*result.folder.rglob("*samples*")]  # they hold the rows, and no purge would find them
    with pytest.raises(UsageError, match="this is the target"):
        make_contents(result.folder, PublishOptions(accept=True))

    with open(place / "model.safetensors", "r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(b"\1\1\1\1")
    with pytest.raises(FormatError, match="not as it was written"):
        msa_lite.ask(result.folder, "Who?")
    again = msa_lite.run_baseline(None, recipe, model=str(place))
    assert again.merged.weights_changed in (1, 2)
    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match="same name"):
        msa_lite.run_baseline(None, recipe, model=str(shutil.copytree(place, tmp_path / "other/same")))


def edited(folder: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda weights: None) -> Path:
    """A copy of a model as another program writes one, with other weights."""
    weights = load_file(shutil.copytree(folder, out, ignore=lambda *_: ["manifest.json"]) / "model.safetensors")
    change(weights)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def set_config(folder: Path, **values: Any) -> Path:
    """Change keys of a model's config."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def deeper(folder: Path, out: Path) -> Path:
    """A model like another, with a layer more."""
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers += 1
    AutoModelForCausalLM.from_config(config).save_pretrained(out)
    return out


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("adapter", "whole model is needed"), ("lacks a tensor", "norm.weight: missing"),
        ("another size", r"layers\.1\..*: in the checkpoint, not in the target"), ("nan", "NaN"),
        ("computes otherwise", r"(?s)hidden_act: .*relu.*\n  rms_norm_eps.*\n  rope_parameters: .*77"),
        ("both", "either"), ("neither", "either"),
        ("no name", "empty name"), ("missing", "no such folder"),
    ],
)  # fmt: skip
def test_what_is_no_result_of_another_method_is_refused(
    fault: str, error: str, runs: Runs, knowing: Path, tmp_path: Path
) -> None:
    target, norm = knowing / "target", "model.norm.weight"
    places: dict[str, Callable[[], Path | str]] = {
        "adapter": lambda: runs.folder / "vectors/forget",
        "lacks a tensor": lambda: edited(target, tmp_path / "it", lambda weights: weights.pop(norm)),
        "another size": lambda: deeper(target, tmp_path / "it"),
        "nan": lambda: edited(target, tmp_path / "it", lambda w: w[norm].fill_(float("nan"))),
        "computes otherwise": lambda: set_config(
            edited(target, tmp_path / "it"), hidden_act="relu", rms_norm_eps=0.5, rope_parameters={"rope_theta": 77.0}
        ),
        "both": lambda: target,
        "no name": lambda: "",
        "missing": lambda: tmp_path / "nowhere",
    }
    model = str(places[fault]()) if fault in places else None
    with pytest.raises((UsageError, MismatchError, FormatError), match=error):
        msa_lite.run_baseline("npo" if fault == "both" else None, runs.recipe, model=model)
    assert not (runs.folder / "baselines/it").exists()


def test_another_method_is_named_after_its_checkpoint(tmp_path: Path) -> None:
    names = {
        "ga": "ga", "run/model": "run-model", "trl/checkpoint-500": "trl-checkpoint-500", "npo": "npo-checkpoint",
        "npo-prior": "npo-prior-checkpoint", "my model (2)": "my-model-2", "x.partial": "x-partial",
        "ideal": "ideal-checkpoint", "Target": "Target-checkpoint", "SimNPO": "SimNPO-checkpoint",
    }  # fmt: skip
    for place, name in names.items():
        (tmp_path / place).mkdir(parents=True)
        assert entered_name(str(tmp_path / place)) == name
    assert entered_name("org/Llama-3.2-1B-npo@main") == "Llama-3.2-1B-npo"
    assert entered_name("https://huggingface.co/org/unlearned") == "org-unlearned"
