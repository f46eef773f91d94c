"""The story of a run, read from the files of its folder: whole, in part, of an earlier recipe, and damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite.errors import FormatError, UsageError
from msa_lite.io.files.writing import hash_file
from msa_lite.io.finished.seal import add_files, write_manifest
from msa_lite.report import Metric, load_report, write_report
from msa_lite.report.page.run_files import make_page, run_json
from msa_lite.report.run.provenance import PAGE_FILE
from msa_lite.report.run.story import Story, load_story
from msa_lite.report.run.update import place_of
from tests.support.pages import page_text
from tests.support.runs import CHOSEN, MODELS, SECRET, make_run_folder, put_model, put_scores, put_stages

DOCS = Path(__file__).parents[2] / "docs/reference/report.md"


def text_of(story: Story, folder: Path) -> str:
    """The text of a story's page, written into a folder."""
    (folder / PAGE_FILE).write_text(make_page(story), "utf-8")
    return page_text(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_folder(tmp_path_factory.mktemp("story") / "run")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run, to be changed."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_run_tells_everything(finished: Path) -> None:
    story = load_story(finished)
    assert story.sentence.startswith("It still answers 1 of the 12 questions it was to forget (before: 12; ")
    assert (story.outcome, story.missing) == ("PASS", ())
    assert (story.method, story.strengths) == ("msa", CHOSEN)
    assert list(story.reports) == list(MODELS)
    assert (story.benchmark, story.split, dict(story.rows)) == ("qa", "test", {"forget": 6, "retain": 6})
    assert story.main_metrics == ("accuracy_f", "extraction_strength", "accuracy_r")
    assert story.names == {"target": "models/target", "prior": "models/prior", "ideal": "models/ideal"}
    choice = story.choice
    assert choice is not None
    assert (choice.rule, choice.keys, choice.doubts) == ("extraction", ("alpha", "beta"), ["few rows"])
    assert [choice.is_chosen(candidate) for candidate in choice.candidates] == [False, True, False]
    assert story.written_gap == pytest.approx(0.15)
    forget = story.fits["forget"]
    assert (forget.rows, forget.steps, forget.epochs, len(forget.curve)) == (12, 4, 2.0, 4)
    assert forget.closed == pytest.approx(0.96)
    assert story.probe is not None
    assert story.probe.models[0].intervals == {"loss_auc": (0.4, 0.6)}
    assert story.probe.models[0].verdict == "cannot tell", "12 rows are too few"
    assert story.warnings == ("a note of the merge", "few rows")
    assert (story.provenance.seed, story.provenance.rows) == (7, {"forget": "sha256:dd"})
    assert story.provenance.revisions["ideal"] == "sha256:cc"
    assert set(story.provenance.files) == {"model.safetensors", "config.json"}
    assert story.basis is not None
    assert "Of the 12 rows to keep, 6 are among those by which models are chosen" in story.basis


def test_its_forms_say_the_same_and_hold_no_row(finished: Path, tmp_path: Path) -> None:
    story = load_story(finished)
    text, values = text_of(story, tmp_path), run_json(story)
    assert f"\nPASS Forgotten, as far as these tests can show; an approximation, no proof.\n{story.sentence}\n" in text
    assert values["sentence"] == story.sentence
    assert values["metrics"]["accuracy_f"]["models"]["unlearned"]["value"] == 0.1
    assert values["choice"]["written_gap"] == story.written_gap
    parts = ("A remark", "12 rows on a side", "Doubt: few rows", "A note of the merge", "θ_u = ", "test rows")
    assert [part for part in (*parts, "0.100 ± 0.100") if part not in text] == []
    assert SECRET not in text + json.dumps(values)
    assert make_page(story) == make_page(load_story(finished)), "the same files give the same bytes"
    rows = [line.split("|")[1].strip(" `") for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert rows == list(values)


def test_the_page_opens_with_model_day_and_request_and_no_path(run: Path) -> None:
    os.utime(run / "recipe.yaml", (0, 1767225599))  # a second before 2026 in UTC
    assert load_story(run).provenance.day == "2025-12-31"
    assert "request without a name" in text_of(load_story(run), run)
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe |= {"target": "/home/me/models/mine", "output": "/home/me/runs/first", "request": "GDPR-17"}
    lines = [line for line in (run / "recipe.yaml").read_text().splitlines() if line.startswith("#")]
    (run / "recipe.yaml").write_text("\n".join(lines) + "\n" + yaml.safe_dump(recipe))
    for sha, day in ((hash_file(run / "recipe.yaml"), "2026-02-01"), ("other", "2025-12-31")):
        os.utime(run / "recipe.yaml", (0, 1767225599))
        record = {"started": "2026-02-01T23:59:59Z", "files": {"recipe.yaml": sha}}
        (run / "record.json").write_text(json.dumps(record))
        story = load_story(run)
        head = text_of(story, run).partition("PASS")[0]
        words = ("report: first", "model mine ·", day, "request GDPR-17")  # a copy has the record's day
        assert [word for word in words if word not in head] == []
        assert "/" not in head
    hub = replace(story.provenance, revisions={"target": "0a1b"})
    assert "model org/name ·" in text_of(replace(story, names={"target": "org/name@0a1b"}, provenance=hub), run)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("vectors/forget", "vectors/forget: the forget vector is not fitted yet"),
        ("sweep", "sweep: alpha and beta are not chosen yet"),
        ("model", "model: the unlearned model is not merged yet"),
        ("evaluation/unlearned", "evaluation/unlearned: the unlearned model is not scored yet"),
        ("evaluation/ideal", "evaluation/ideal: the ideal is not scored yet"),
        ("verdict.json", "verdict.json: there is no verdict yet"),
        ("probe", None),
        ("vectors/forget/train_log.jsonl", None),
        ("sweep/table.md", None),
        ("evaluation/unlearned_validation", None),
    ],
)
def test_what_is_missing_is_told_and_the_rest_is_made(part: str, line: str | None, run: Path) -> None:
    shutil.rmtree(run / part) if (run / part).is_dir() else (run / part).unlink()
    story = load_story(run)
    assert line is None or line in story.missing
    assert (line is not None) == bool(story.missing)
    assert line is None or line in text_of(story, run)
    assert json.loads(json.dumps(run_json(story)))["missing"] == list(story.missing)


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({"models": ()}, {"reports", "validation"}),
        ({"models": ("target", "unlearned")}, {"ideal"}),
        ({"vectors": ("forget",)}, {"retain"}),
        ({"vectors": ("forget",), "chooses": False}, {"choice", "retain"}),
    ],
)
def test_what_an_earlier_recipe_has_left_is_not_told(changes: dict[str, Any], gone: set[str], run: Path) -> None:
    put_stages(run, **changes)
    story = load_story(run)
    absent = {name for name in ("reports", "validation", "choice") if not getattr(story, name)}
    absent |= {"retain"} - story.fits.keys()
    absent |= {"ideal"} - story.reports.keys() if story.reports else set()
    assert absent - {"validation"} == gone - {"validation"}
    assert not story.missing


def test_scores_of_another_model_are_not_told(run: Path) -> None:
    """A run that was stopped after it merged another model has the scores of the one before."""
    shutil.rmtree(run / "evaluation/unlearned")
    put_scores(run / "evaluation/unlearned", "unlearned", "test", "sha256:another")
    story = load_story(run)
    assert "unlearned" not in story.reports
    assert story.missing == ("evaluation/unlearned: the unlearned model is not scored yet",)


@pytest.mark.parametrize(
    ("command", "start", "formula"),
    [
        ("msa-lite baseline npo", "target", "trained further"),
        ("msa-lite baseline npo", "prior", "scale (θ_1 − θ_0)"),
        ("msa-lite baseline task_vector", "target", "(θ_1 − θ_D)"),
    ],
)
def test_a_baseline_has_a_story(command: str, start: str, formula: str, tmp_path: Path) -> None:
    run = make_run_folder(tmp_path / "run", command, baseline={"start": start})
    story = load_story(run)
    assert (story.method, story.missing) == (command.split()[-1], ())
    assert formula in story.formula
    assert "Unlearning report: " in text_of(story, run)


def test_an_adapter_has_a_story(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path / "run", merge={"as": "adapter"})
    assert (run / "model").is_dir(), "of an earlier recipe"
    assert load_story(run).missing[0] == "adapter: the unlearned model is not merged yet"
    put_model(run / "adapter", change={"modules": 6, "rank": 4, "truncation_loss": 0.02}, fidelity=None)
    story = load_story(run)
    assert story.update is not None
    assert (story.update.form, story.update.tensors) == ("adapter", ())
    assert re.search(r"Modules.* \| 6 \|", text_of(story, run))


def test_the_update_is_told_by_layer_and_by_kind_of_module(finished: Path) -> None:
    update = load_story(finished).update
    assert update is not None
    assert [(one.name, one.norm, one.relative_size) for one in update.layers] == [
        ("0", 3.0, 0.5), ("1", 3.0, 0.5), ("other", 3.0, 0.5),
    ]  # fmt: skip
    kind = update.kinds[0]
    assert (kind.name, kind.tensors, kind.norm) == ("mlp.up_proj", 2, pytest.approx(18**0.5))
    assert kind.relative_size == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("tensor", "place"),
    [
        ("model.layers.3.mlp.down_proj.weight", (3, "mlp.down_proj")),
        ("transformer.h.11.attn.c_attn.bias", (11, "attn.c_attn.bias")),
        ("model.layers.0.mlp.experts.7.up_proj.weight", (0, "mlp.experts.up_proj")),
        ("model.embed_tokens.weight", (None, "embed_tokens")),
        ("lm_head.weight", (None, "lm_head")),
    ],
)
def test_a_tensor_has_a_layer_and_a_kind(tensor: str, place: tuple[int | None, str]) -> None:
    assert place_of(tensor) == place


def test_the_report_says_that_rows_of_earlier_requests_were_not_scored_again(run: Path) -> None:
    assert not any("earlier requests" in limit for limit in load_story(run).limits)
    path = run / "model/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["inputs"]["strengths"] = {"forget 1": 1.0, "forget 2": 0.5}
    manifest["sources"] = {"forget 1": "runs/first/vectors/forget", "forget 2": str(run / "vectors/forget")}
    write_manifest(path.parent, manifest)
    story = load_story(run)
    assert story.earlier == {"runs/first": {"alpha": 1.0}}
    (limit,) = (limit for limit in story.limits if "earlier requests" in limit)
    assert limit.endswith("`--recipe RUN/recipe.yaml` scores this model on those of a run: runs/first.")


# Folders that somebody has damaged

JSON = [
    "verdict.json",
    "sweep/choice.json",
    "sweep/alpha-1_beta-0/report.json",
    "evaluation/target/report.json",
    "probe/cheap/prior/report.json",
    "vectors/forget/manifest.json",
    "vectors/forget/train_log.jsonl",
    "model/manifest.json",
]


@pytest.mark.parametrize("path", JSON)
def test_a_broken_file_is_named(path: str, run: Path) -> None:
    of_objects = ("[]", '{"outcome": 5}', "") if path.endswith(".json") else ()  # a log without a loss is a log
    for content in ("{", "null", '"\\ud800"', "[" * 200, *of_objects):
        (run / path).write_text(content)
        with pytest.raises(FormatError, match=path.rpartition("/")[2].replace(".", r"\.")):
            load_story(run)


def test_values_of_another_kind_are_named(run: Path) -> None:
    verdict, report = "verdict.json", "evaluation/target/report.json"
    for path, keys, value in (
        (verdict, ("forgotten", "recited"), {"target": "many"}),
        (verdict, ("forgotten", "left", "probability", "high"), float("nan")),
        (verdict, ("kept", "share"), [1]),
        ("sweep/choice.json", ("scores",), [{"alpha": [], "score": 1, "met": True}]),
        (report, ("metrics", "accuracy_f", "value"), "high"),
        (report, ("benchmark",), {}),
        ("probe/cheap/prior/report.json", ("settings", "intervals"), {"loss_auc": 1}),
    ):
        text = (run / path).read_text()
        content = place = json.loads(text)
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        (run / path).write_text(json.dumps(content))
        with pytest.raises(FormatError, match=path.rpartition("/")[2]):
            load_story(run)
        (run / path).write_text(text)


def test_texts_have_the_main_metrics_of_texts(run: Path) -> None:
    names = ("extraction_strength", "probability_f", "extraction_strength_r", "probability_r")
    metrics = {name: Metric(0.5, 6, 0.1, None) for name in names} | {"accuracy_f": Metric(None, 0, None, True)}
    for model in MODELS:
        path = run / "evaluation" / model
        write_report(replace(load_report(path), metrics=metrics), path)
        add_files(path, ["report.json"], {})
    assert load_story(run).main_metrics == names
    path = run / "evaluation/target"
    write_report(replace(load_report(path), metrics=metrics | {"accuracy_f": Metric(0.5, 6, 0.1, True)}), path)
    add_files(path, ["report.json"], {})
    assert load_story(run).main_metrics == ("accuracy_f", "extraction_strength")


@pytest.mark.parametrize("text", ["", "a: 1\n", "# A training of msa-lite: …\na: 1\n"])
def test_another_folder_is_no_run(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"no run of msa-lite|is a training's folder"):
        load_story(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        load_story(tmp_path / "no")


def test_a_damaged_recipe_is_named(run: Path) -> None:
    first = (run / "recipe.yaml").read_text().split("\n")[0]
    for text in ("- a\n", "target: [\n"):
        (run / "recipe.yaml").write_text(f"{first}\n{text}")
        with pytest.raises(FormatError, match=r"recipe\.yaml"):
            load_story(run)
