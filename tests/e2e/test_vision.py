"""Vision-language models: their text model unlearns, and all else stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import msa_lite
from tests.support.models import save_checkpoint, tiny_tokenizer, tiny_vision_model

NAMES = ("heron", "siskin", "plover", "merlin")


def make_recipe(kind: str, folder: Path, mode: str) -> dict[str, Any]:
    """A recipe on a prior and a target whose every weight has moved a little; no rows choose or judge."""
    for name, seed in (("prior", 0), ("target", 1)):
        model = tiny_vision_model(kind)
        torch.manual_seed(seed)
        for parameter in model.parameters() if seed else ():
            parameter.data += 0.01 * torch.randn_like(parameter)
        save_checkpoint(folder / name, model)
    for number, name in enumerate(("forget", "retain")):
        rows = [{"question": f"Where is the {bird} {number}?", "answer": f"At the mill of {bird}."} for bird in NAMES]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "target": str(folder / "target"), "prior": str(folder / "prior"),
        "forget": {"data": {"path": str(folder / "forget.jsonl")}, "alpha": 1.0},
        "retain": {"data": {"path": str(folder / "retain.jsonl")}, "beta": 0.5},
        "vector": {"mode": mode, "epochs": 1, "learning_rate": 5e-3, "batch_size": 2},
        "evaluate": {"max_new_tokens": 4}, "verdict": False, "prompt": "plain", "output": str(folder / "run"),
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("kind", ["qwen3_5", "mistral3"])
def test_a_run_changes_the_text_model_alone(kind: str, mode: str, tmp_path: Path) -> None:
    recipe = make_recipe(kind, tmp_path, mode)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    msa_lite.run(str(tmp_path / "recipe.yaml"), accept=True)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("target", "run/model"))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert before.keys() == after.keys()
    assert len(changed) >= 14
    assert not [name for name in changed if "vis" in name or "projector" in name]
    if mode == "lora":
        assert not [
            name for name in load_file(tmp_path / "run/vectors/forget/adapter_model.safetensors") if "vis" in name
        ]
    record = json.loads((tmp_path / "run/evaluation/target/forget.jsonl").read_text().splitlines()[0])
    assert record["probability"] == pytest.approx(probability(tmp_path / "target", recipe), rel=1e-4)


def probability(folder: Path, recipe: dict[str, Any]) -> float:
    """The geometric mean of the probabilities of the first answer's tokens, by plain transformers."""
    from transformers import AutoModelForImageTextToText

    row = json.loads(Path(recipe["forget"]["data"]["path"]).read_text().splitlines()[0])
    tokenizer, model = tiny_tokenizer(), AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    start = tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"]
    ids = [*start, *tokenizer(f" {row['answer']}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return float(logits[range(len(start) - 1, len(ids) - 1), ids[len(start) :]].mean().exp())
