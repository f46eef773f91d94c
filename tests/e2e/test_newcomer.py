"""The README's stories: a deletion request with no setting known or changed, and the quickstart on a chat model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from msa_lite.demo import history
from tests.e2e.conftest import CallCli, read_lines, times, write_recipe
from tests.support.models import make_small_smollm2
from tests.support.newcomer import Rows, make_pair

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


@pytest.mark.slow  # the pair of models takes a minute
def test_a_deletion_request_ends_in_a_true_verdict(pair: Path, tmp_path: Path, call_cli: CallCli) -> None:
    delete, keep, unseen = (read_lines(pair / f"{name}.jsonl") for name in ("delete", "keep", "never-seen"))
    before, others = recited(pair / "finetuned", delete), recited(pair / "finetuned", unseen)
    assert before >= 20
    assert recited(pair / "base", delete) == 0
    for mode in ("lora", "full"):
        folder = tmp_path / mode
        recipe = write_recipe(request(pair, folder, vector={"mode": mode}), tmp_path)
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


# The quickstart on a chat model: from the people that it learns to answers side by side, and again for nothing.


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
    made = times(run, "*.safetensors")
    assert len(made) == 6  # prior, target, ideal, two vectors, the unlearned model
    assert call_cli("quickstart", *arguments)[0] == 0
    assert times(run, "*.safetensors") == made
