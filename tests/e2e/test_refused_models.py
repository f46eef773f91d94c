"""Models that are not whole are refused by every command that would load them, before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import CallCli

Make = Callable[..., Path]
WEIGHTS = "model.safetensors"


def without_a_norm(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def larger_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: n + 5000 * (n >= 260) for word, n in vocabulary.items()}
    path.write_text(json.dumps(tokenizer))


def endless_template(folder: Path) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)


FAULTS: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "without a norm": (without_a_norm, "model.norm.weight", 3),
    "pickled": (pickled, "pickled", 3),
    "more tokens": (larger_tokenizer, "token 5|tokens, the model", 3),
    "a template without end": (endless_template, "took more than", 2),
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"question": f"Where is it, {i}?", "answer": f"It is over there, {i}."}) for i in range(4)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(params=FAULTS)
def broken(request: pytest.FixtureRequest, make_checkpoint: Make, tmp_path: Path) -> tuple[Path, str, int]:
    """(a broken model, what is told of it, the exit code)"""
    breaks, told, code = FAULTS[request.param]
    folder = shutil.copytree(make_checkpoint("qwen2", chat=True), tmp_path / "broken")
    breaks(folder)
    return folder, told, code


def listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def assert_refused(call: CallCli, arguments: list[str], broken: tuple[Path, str, int], tmp_path: Path) -> None:
    before = listed(tmp_path)
    code, said, err = call(*arguments)
    assert "Traceback" not in err
    assert any(word in err for word in broken[1].split("|")), err
    assert (code, said) == (broken[2], "")
    assert listed(tmp_path) == before


def test_evaluate_refuses_it(broken: tuple[Path, str, int], rows: Path, call_cli: CallCli, tmp_path: Path) -> None:
    asked = ["evaluate", str(broken[0]), "--forget", str(rows), "--out", str(tmp_path / "out")]
    assert_refused(call_cli, asked, broken, tmp_path)


@pytest.mark.parametrize("key", ["target", "prior"])
def test_vector_refuses_it(
    key: str, broken: tuple[Path, str, int], rows: Path, call_cli: CallCli, tmp_path: Path, make_checkpoint: Make
) -> None:
    if key == "prior" and broken[1] != "pickled" and "norm" not in broken[1]:
        pytest.skip("the target's tokenizer is used")
    recipe = {
        "target": str(make_checkpoint("qwen2")),
        "prior": str(make_checkpoint("qwen2", seed=1)),
        "forget": {"data": {"path": str(rows)}, "alpha": 1.0},
        "vector": {"epochs": 1, "batch_size": 2, "learning_rate": 1e-3},
        "output": str(tmp_path / "run"),
        key: str(broken[0]),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert_refused(call_cli, ["vector", str(tmp_path / "recipe.yaml")], broken, tmp_path)


def test_a_null_among_the_rows_is_told_with_its_number(
    make_checkpoint: Make, rows: Path, call_cli: CallCli, tmp_path: Path
) -> None:
    rows.write_text("null\n" + rows.read_text())
    asked = ["evaluate", str(make_checkpoint("qwen2")), "--forget", str(rows), "--out", str(tmp_path / "out")]
    code, _, err = call_cli(*asked)
    assert code == 3
    assert "rows.jsonl: row 0: null is no row" in err
    assert not (tmp_path / "out").exists()
