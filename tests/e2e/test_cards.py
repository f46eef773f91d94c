"""The card of a run's model: complete when the run ends, the same after a rerun, and without the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import msa_lite
from msa_lite.io.finished.seal import CARD_FILE, MANIFEST, add_files, load_manifest, verify_folder, write_manifest
from msa_lite.pipeline.run import verdict as cards
from msa_lite.publish.contents import PublishOptions, make_contents
from msa_lite.report.page.card import model_card
from tests.e2e.conftest import sweep_recipe


@pytest.fixture(scope="module")
def recipe(history: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe of which a run is there, with a choice among four points."""
    recipe = sweep_recipe(history, tmp_path_factory.mktemp("cards") / "run")
    recipe["retain"]["beta"] = [0.5, 1.0]
    msa_lite.run(recipe)
    return recipe


@pytest.fixture
def run(recipe: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The recipe of a copy of that run, which a test may change."""
    shutil.copytree(recipe["output"], tmp_path / "run")
    return recipe | {"output": str(tmp_path / "run")}


def model_of(recipe: dict[str, Any]) -> Path:
    return Path(recipe["output"]) / "model"


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_run_completes_the_card_of_its_model(recipe: dict[str, Any], history: Path) -> None:
    model = model_of(recipe)
    manifest, card = load_manifest(model), (model / CARD_FILE).read_text()
    assert manifest is not None
    assert verify_folder(model) == []
    assert card == model_card(manifest)
    outcome = manifest["outcome"]
    report = json.loads((model.parent / "evaluation/unlearned/report.json").read_text())
    figures = {name: {k: v for k, v in m.items() if k in outcome["metrics"][name]["unlearned"]}
               for name, m in report["metrics"].items()}  # fmt: skip
    assert figures == {name: models["unlearned"] for name, models in outcome["metrics"].items()}
    assert set(outcome["metrics"]["extraction_strength"]) == {"target", "unlearned", "ideal"}
    assert outcome["rows"] == {"forget": 18, "retain": 18}
    assert len(outcome["sweep"]["points"]) == 4
    assert "before | unlearned | ideal" in card
    results = {result.metric_type: result.metric_value for result in ModelCard(card).data.eval_results}
    assert f"{results['accuracy_r']:.3f}" == f"{report['metrics']['accuracy_r']['value']:.3f}"
    assert_no_data([card, json.dumps(manifest["outcome"])], history, Path(recipe["output"]))


def assert_no_data(texts: list[str], history: Path, output: Path) -> None:
    """No row, no name of a person, no path and no file of the data stands in the texts."""
    rows = [json.loads(line) for path in (history / "data").glob("*.jsonl") for line in path.read_text().splitlines()]
    private = {row[key] for row in rows for key in ("question", "answer")}
    private |= {" ".join(row["answer"].split()[:2]) for row in rows}
    private |= {str(history), str(output), "forget.jsonl", "retain.jsonl"}
    assert rows
    assert [part for part in private for text in texts if part in text] == []


def test_what_is_published_of_it_holds_no_data(recipe: dict[str, Any], history: Path) -> None:
    sent = make_contents(Path(recipe["output"]), PublishOptions(accept=True), lambda repo: False)
    assert sent.files
    texts = [file.read().decode("latin-1") for file in sent.files]
    assert_no_data(texts, history, Path(recipe["output"]))


def test_a_kill_between_card_and_manifest_is_made_good(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(run)
    whole = {name: content for name, (content, _) in state(model).items()}
    manifest = load_manifest(model)
    assert manifest is not None
    first = {key: value for key, value in manifest.items() if key != "outcome"}
    (model / CARD_FILE).write_text(model_card(first))
    write_manifest(model, first)
    add_files(model, [CARD_FILE], {})

    def kill(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cards, "add_files", kill)
        with pytest.raises(KeyboardInterrupt):
            msa_lite.run(run)
    assert (model / CARD_FILE).read_bytes() == whole[CARD_FILE]
    assert (model / MANIFEST).read_bytes() != whole[MANIFEST]
    labels: list[str] = []
    msa_lite.run(run, progress=lambda label, done, total: labels.append(label))
    assert labels == []
    assert verify_folder(model) == []
    assert load_manifest(model) == json.loads(whole[MANIFEST])
