"""The README's story: a chat fine-tune of one's own, a deletion request, and no setting known or changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import CallCli
from tests.support.newcomer import Rows, make_pair

pytestmark = pytest.mark.slow  # the pair of models takes a minute
FLOOR = 0.85  # of the keep rows' ROUGE-L that has to stay, unless the verdict is FAIL


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, its chat fine-tune, and the rows keep, delete and never-seen."""
    folder = tmp_path_factory.mktemp("newcomer")
    make_pair(folder)
    return folder


def request(pair: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """The README's recipe with the paths filled in."""
    return {
        "target": str(pair / "finetuned"),
        "prior": str(pair / "base"),
        "forget": {"data": {"path": str(pair / "delete.jsonl")}},
        "retain": {"data": {"path": str(pair / "keep.jsonl"), "sample": "match_forget"}},
        "evaluate": {"holdout": {"path": str(pair / "never-seen.jsonl")}},
        "output": str(output),
    } | changes


def write(recipe: dict[str, Any], folder: Path) -> str:
    path = folder / "my-request.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def answers(model: Path, rows: Rows) -> list[str]:
    """What a model says to each question in its own chat template, greedily: plain transformers again."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    said = []
    for start in range(0, len(rows), 24):
        questions = [[{"role": "user", "content": row["question"]}] for row in rows[start : start + 24]]
        batch = tokenizer.apply_chat_template(
            questions, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        ids, mask = batch["input_ids"], batch["attention_mask"]
        out = lm.generate(input_ids=ids, attention_mask=mask, max_new_tokens=32, do_sample=False)
        said += tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return said


def recited(model: Path, rows: Rows) -> int:
    return sum(row["answer"] in said for row, said in zip(rows, answers(model, rows), strict=True))


def rouge(model: Path, rows: Rows) -> float:
    """Mean ROUGE-L recall of the model's answers."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    scores = [
        scorer.score(row["answer"], said)["rougeL"].recall for row, said in zip(rows, answers(model, rows), strict=True)
    ]
    return sum(scores) / len(scores)


def load_rows(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_deletion_request_ends_in_a_true_verdict(pair: Path, tmp_path: Path, call_cli: CallCli) -> None:
    delete, keep, unseen = (load_rows(pair / f"{name}.jsonl") for name in ("delete", "keep", "never-seen"))
    before, others = recited(pair / "finetuned", delete), recited(pair / "finetuned", unseen)
    assert before >= 20
    assert recited(pair / "base", delete) == 0
    for mode in ("lora", "full"):
        folder = tmp_path / mode
        recipe = write(request(pair, folder, vector={"mode": mode}), tmp_path)
        status, stdout, stderr = call_cli(recipe)
        verdict = json.loads((folder / "verdict.json").read_text())
        # So weak a prior ends near a line between two outcomes, on either side: that depends on the machine.
        assert stdout.split()[0] == verdict["outcome"]
        assert status == (1 if verdict["outcome"] == "FAIL" else 0), stderr
        after = recited(folder / "model", delete)
        assert verdict["forgotten"]["recited"] == {"target": before, "unlearned": after, "holdout": others, "prior": 0}
        assert verdict["sentence"].startswith(f"It still answers {after} of the {len(delete)} questions ")
        assert after < before
        stays = rouge(folder / "model", keep) / rouge(pair / "finetuned", keep)
        assert stays >= FLOOR or verdict["outcome"] == "FAIL"
        assert_kept(verdict["kept"], folder, pair / "finetuned", keep)
        assert_outcome(verdict)
        choice = json.loads((folder / "sweep/choice.json").read_text())
        assert ("no candidate is shown to forget like a model that never saw the rows" in stderr) != choice["met"]
        if mode == "lora" and "stronger ones lose too much" in stderr:
            assert "Try vector.mode full" in stderr


def assert_kept(kept: dict[str, Any], folder: Path, target: Path, keep: Rows) -> None:
    """The rows to keep that count are asked once more; those that a vector learnt are not among them."""
    assert kept["rows"] < len(keep)
    assert not kept["fitted"]
    counts = [recited(model, keep) for model in (target, folder / "model")]
    learnt = len(keep) - kept["rows"]
    for name, count in zip(("target", "unlearned"), counts, strict=True):
        assert count - learnt <= kept["recited"][name] <= count


def assert_outcome(verdict: dict[str, Any]) -> None:
    """The outcome is that of the bounds, and whatever is no PASS has its reason."""
    forgotten, kept, margins = verdict["forgotten"], verdict["kept"], verdict["margins"]
    bounds = [(forgotten["excess"]["high"], margins["recited"])]
    bounds += [(gap["high"], margins["left"]) for gap in forgotten["left"].values()]
    shown = all(high <= margin for high, margin in bounds) and kept["share"]["low"] >= margins["kept"]
    assert (verdict["outcome"] == "PASS") == shown
    if verdict["outcome"] == "FAIL":
        assert forgotten["excess"]["low"] > margins["recited"] or kept["share"]["high"] < 0.70
    assert shown or verdict["reasons"]
