"""The report of a run: at its end, and by `msa-lite report` on a folder that is there, whole or not, sound or not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from fnmatch import translate
from pathlib import Path
from typing import Any

import pytest

import msa_lite
from msa_lite.evals.scores.records import read_records
from msa_lite.io.finished.seal import LOCK, MANIFEST
from msa_lite.pipeline.purge.purge import purge
from tests.e2e.conftest import CallCli, tiny_recipe
from tests.support.pages import page_text
from tests.tools.pages.files import FACTS, KEYS, RUN

FORMS = ("report.html", "report.json")


@pytest.fixture
def run(chosen: tuple[dict[str, Any], Path], tmp_path: Path) -> Path:
    """The run's folder, to be changed."""
    shutil.copytree(chosen[1], tmp_path / "run")
    return tmp_path / "run"


def forms(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in FORMS}


def texts_of(run: Path) -> set[str]:
    """Every question and answer of the data, and what the models said."""
    records = [record for path in run.glob("evaluation/*/*.jsonl") for record in read_records(path)]
    return {record[key].strip() for record in records for key in ("question", "answer") if record.get(key)}


@pytest.mark.pictures
def test_a_run_and_the_command_write_the_same_bytes(run: Path, call_cli: CallCli) -> None:
    before = forms(run)
    status, stdout, stderr = call_cli("report", run)
    assert status == 0, stderr
    assert forms(run) == before
    values = json.loads(before["report.json"])
    lines = stdout.splitlines()
    assert lines[0] == f"{values['outcome']}  {values['sentence']}"
    assert values["sentence"] in page_text(run)
    assert lines[1:] == [f"report: {run / name}" for name in FORMS]
    assert (values["kind"], values["missing"], values["strengths"].keys()) == ("run", [], {"alpha", "beta"})
    assert set(values["metrics"]["accuracy_f"]["models"]) == {"target", "unlearned", "ideal"}
    assert len(values["choice"]["points"]) == 4
    status, stdout, _ = call_cli("report", run, "--json")
    assert (status, json.loads(stdout)) == (0, values)
    # A copy of the folder tells the same, and `verify` takes the report for no strange file.
    assert call_cli("verify", run)[0] == 0


@pytest.mark.pictures
def test_no_row_of_the_data_is_in_it_unless_somebody_asks(run: Path, call_cli: CallCli) -> None:
    texts = texts_of(run)
    assert len(texts) > 20
    assert not [text for text in texts for form in forms(run).values() if text.encode() in form]
    assert call_cli("report", run, "--show-examples")[0] == 0
    shown = json.loads((run / "report.json").read_text())["examples"]
    assert len(shown) == 10
    assert {example["set_name"] for example in shown} == {"forget", "retain"}
    assert set(shown[0]["answers"]) == {"target", "unlearned", "ideal"}
    for form in forms(run).values():
        assert any(example["question"].encode() in form for example in shown)
    assert call_cli("report", run)[0] == 0
    assert not [text for text in texts for form in forms(run).values() if text.encode() in form]


def test_an_unfinished_run_says_what_is_missing(run: Path, call_cli: CallCli) -> None:
    shutil.rmtree(run / "evaluation/unlearned")
    (run / "evaluation/unlearned.partial").mkdir()
    for name in ("verdict.json", *FORMS):
        (run / name).unlink()
    status, stdout, stderr = call_cli("report", run)
    assert status == 0, stderr
    assert stdout.startswith("This run is not finished")
    assert "missing: evaluation/unlearned: the unlearned model is not scored yet\n" in stdout
    assert "missing: verdict.json: there is no verdict yet\n" in stdout
    text = page_text(run)
    assert "extraction strength" in text
    assert "target | ideal |" in text


@pytest.mark.parametrize("name", ["evaluation/target/forget.jsonl", "sweep/choice.json"])
def test_a_changed_folder_has_no_report(name: str, run: Path, call_cli: CallCli) -> None:
    for form in FORMS:
        (run / form).unlink()
    (run / name).write_text((run / name).read_text() + " ")
    status, stdout, stderr = call_cli("report", run)
    assert (status, stdout) == (3, ""), stderr
    assert re.search(rf"{re.escape(str(run))}: differs from its manifest \(1 of \d+ folders\):\n  {name}: ", stderr)
    assert not [form for form in FORMS if (run / form).exists()]
    verified = [line for line in call_cli("verify", run)[2].splitlines() if not line.startswith("note: ")]
    assert verified[:2] == stderr.splitlines()[:2], "it is verify's own message"


def test_a_sweep_that_merges_another_model_leaves_no_report_of_the_one_before(
    chosen: tuple[dict[str, Any], Path], run: Path
) -> None:
    recipe = chosen[0] | {"output": str(run)}
    msa_lite.sweep(recipe)
    assert (run / "report.json").is_file(), "the model is the same"
    msa_lite.sweep(recipe, ["forget.alpha=[0.25,0.75]"])
    assert not [name for name in ("verdict.json", *FORMS) if (run / name).exists()]
    story = msa_lite.report_run(run)
    assert story.sentence.startswith("This run is not finished")
    assert "unlearned" not in story.reports, "they are of the model before"
    assert "unlearned" in story.validation


@pytest.mark.pictures
def test_what_goes_by_mail_names_paths_as_the_recipe_has_them(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = "models: #1"  # YAML has to quote it
    (tmp_path / models).symlink_to(history)
    monkeypatch.chdir(tmp_path)
    for recipe in (tiny_recipe(Path(models), Path("run")), Path("run/recipe.yaml")):
        assert msa_lite.run(recipe) is not None
        texts = {
            name: Path("run", name).read_text()
            for name in ("report.html", "report.json", "record.json", "verdict.json", "model/README.md")
        }
        assert [name for name, text in texts.items() if str(tmp_path) in text or str(history) in text] == []
        assert f"'{models}/target'" in page_text(Path("run"))
        assert f"{tmp_path}/{models}/target" in Path("run/recipe.yaml").read_text(), "a rerun works from anywhere"


# docs/reference/files.md describes the folder of a run: every file, what holds the data, every manifest key.


# Kinds of files that this run does not make, and why.
ABSENT = {
    "record.json.sig": "nobody signed it",
    "moments/*": "merge.filter",
    "vectors/start/*": "vector.start: retain",
    "vectors/*-filter-*/*": "merge.filter",
    "prompt.json": "prompt: auto",
    "purged.json": "msa-lite purge",
    "evaluation/{target,prior,ideal,unlearned}/judge_prompts.yaml": "evaluate.judge.prompts",
    "epochs/*/**/report.json": "baseline.start: prior",
    "epochs/**/*.jsonl": "baseline.start: prior",
    "evaluation/earlier/*/report.json": "earlier",
    "evaluation/earlier/*/*.jsonl": "earlier",
    "adapter/*": "merge.as: adapter",
    "history/": "demo",
    "{target,prior}/": "an adapter as target",
    "tracking/": "track",
    "baselines/METHOD/": "msa-lite baseline",
    "attacks/": "msa-lite attack",
}


def expanded(pattern: str) -> Iterator[str]:
    """The patterns without {a,b}; a folder stands for all that is in it, METHOD for any name."""
    match = re.search(r"\{([^}]*)\}", pattern)
    if match is None:
        yield pattern.replace("METHOD", "*") + ("*" if pattern.endswith("/") else "")
        return
    for choice in match[1].split(","):
        yield from expanded(pattern[: match.start()] + choice + pattern[match.end() :])


def describe(path: str) -> bool | None:
    """Whether a file holds the data, by the page; None for one that the page does not have."""
    found = [holds for pattern, (holds, _) in RUN.items() for p in expanded(pattern) if re.match(translate(p), path)]
    return any(found) if found else None


def files(run: Path) -> list[str]:
    names = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    return [name.replace("_validation/", "/") for name in names if Path(name).name not in (LOCK, MANIFEST)]


def test_the_page_has_every_file_of_a_run_and_says_which_ones_hold_the_data(finished: Path) -> None:
    names = files(finished)
    assert len(names) > 20
    assert [name for name in names if describe(name) is None] == []
    survey = purge(finished)
    inside = [item.name for item in survey.holdings if not item.name.startswith("/")]  # the others are caches
    held = [name.replace("_validation", "").rstrip("/") for name in inside]
    assert [name for name in held if not any(describe(f) for f in names if f.startswith(name))] == []
    kept = [name for name in names if not any(name == h or name.startswith(f"{h}/") for h in held)]
    assert [name for name in kept if describe(name) and not name.startswith("baselines/")] == []


def test_the_page_has_no_pattern_that_nothing_matches(finished: Path) -> None:
    names = files(finished)
    idle = [p for p in RUN if not any(re.match(translate(e), name) for e in expanded(p) for name in names)]
    assert "report.html" not in idle
    assert [pattern for pattern in idle if pattern not in ABSENT] == []


def test_the_page_has_every_key_of_the_manifests(finished: Path) -> None:
    manifests = [json.loads(path.read_text()) for path in finished.rglob(MANIFEST)]
    assert {manifest["kind"] for manifest in manifests} >= {"model", "vector", "evaluation"}
    assert [key for manifest in manifests for key in KEYS if key not in manifest] == []
    extra = {(m["kind"], key) for m in manifests for key in m if key not in KEYS and key not in FACTS}
    assert extra == set()


def test_a_file_that_the_page_does_not_have_is_noticed() -> None:
    assert describe("vectors/forget/rows.jsonl") is True
    assert describe("report.html") is False
    assert describe("notes.txt") is None
