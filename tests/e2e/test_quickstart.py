"""The quickstart on a chat model: from the people that it learns to answers side by side, and again for nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from msa_lite.demo import history
from tests.e2e.conftest import CallCli
from tests.support.models import make_small_smollm2

SHORT = {
    **{f"demo.{name}": 2 for name in ("retain", "forget", "holdout")},
    "vector.epochs": 1,
    "retain.vector.epochs": 1,
    "forget.alpha": 0.5,
    "retain.beta": 0.5,
    "evaluate.max_new_tokens": 4,
    "verdict": "off",
}


def test_the_quickstart_on_a_chat_model_ends_with_answers_and_a_way_to_ask_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_cli: CallCli
) -> None:
    monkeypatch.setattr(history, "make_smollm2", make_small_smollm2)
    monkeypatch.setattr(history, "_REAL_BYTES", 0)
    run = tmp_path / "a run"
    arguments = ["--model", "smollm2", *(f"{key}={value}" for key, value in SHORT.items()), f"output={run}"]
    status, out, err = call_cli("quickstart", *arguments)
    assert status == 0, err
    assert "prompt: the target's chat template" in err
    counts = re.findall(r"\[(\d+)/(\d+)\]", err)
    numbers = [int(number) for number, _ in counts]
    assert numbers == sorted(numbers), "the history and the run are one count"
    assert len({count for _, count in counts}) == 1
    *examples, files, verdict = out.partition("what the models say:")[2].split("\n\n")[1:]
    assert [block.split()[0] for block in examples] == ["forget"] * 5 + ["retain"] * 5
    for block in examples:
        assert [line.split()[0] for line in block.splitlines()[1:]] == ["expected", "target", "unlearned", "ideal"]
    assert f"ask them more:   msa-lite ask '{run}'" in files
    assert out.startswith(verdict.splitlines()[0]), "the verdict stands first and last"
    made = {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")}
    assert len(made) == 6  # prior, target, ideal, two vectors, the unlearned model
    assert call_cli("quickstart", *arguments)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.safetensors")} == made
