"""Models that are not whole are refused by every command that would load them, before anything is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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


def assert_refused(call: CallCli, command: str, fault: str, tmp_path: Path, *arguments: str) -> None:
    _, told, status = FAULTS[fault]
    before = sorted(tmp_path.rglob("*"))
    code, said, err = call(command, *arguments)
    assert "Traceback" not in err
    assert any(word in err for word in told.split("|")), err
    assert (code, said) == (status, "")
    assert sorted(tmp_path.rglob("*")) == before


def broken(fault: str, make_checkpoint: Make, tmp_path: Path) -> str:
    folder = shutil.copytree(make_checkpoint("qwen2", chat=True), tmp_path / "broken")
    FAULTS[fault][0](folder)
    return str(folder)


@pytest.mark.parametrize("fault", FAULTS)
def test_evaluate_refuses_it(fault: str, make_checkpoint: Make, rows: Path, call_cli: CallCli, tmp_path: Path) -> None:
    model = broken(fault, make_checkpoint, tmp_path)
    assert_refused(call_cli, "evaluate", fault, tmp_path, model, "--forget", str(rows), "--out", str(tmp_path / "out"))
