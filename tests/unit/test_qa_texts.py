"""Texts of one's own in the qa benchmark: what is measured of them, beside questions and alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from msa_lite.data import Row
from msa_lite.evals.benchmarks.benchmark import Benchmark
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine.models import Runner, load_model
from msa_lite.evals.scores.records import run_items
from tests.support.benchmark_data import make_prompter

TEXTS = [Row(i, text=f"There was a cat, and {i} dogs sat over there.") for i in (4, 2)]
QUESTIONS = [Row(i, f"Where is {i}?", f"It is over there at {i}.") for i in (1, 3)]


@pytest.fixture(scope="module")
def runner(make_checkpoint: Callable[..., Path]) -> Runner:
    return Runner(load_model(make_checkpoint("llama")))


def test_sets_of_texts_have_what_needs_no_answer(runner: Runner) -> None:
    import torch

    qa = load_qa({"forget": TEXTS, "retain": QUESTIONS}, make_prompter(), 4)
    records = {name: run_items(runner, qa, name) for name in qa.sets}
    metrics = qa.metrics(records, None)
    assert [*metrics] == [
        "probability_f", "extraction_strength", "exact_memorization",
        "accuracy_r", "probability_r", "rouge_l_r", "extraction_strength_r", "exact_memorization_r",
    ]  # fmt: skip
    assert all(metric.n == 2 and metric.skipped == 0 for metric in metrics.values())
    assert all("generated" not in record for record in records["forget"])
    # The same by hand: each token from those before it, the beginning-of-sequence token first.
    chances, hits = [], []
    for row in TEXTS:
        ids = torch.tensor([qa.tokenizer(row.text)["input_ids"]])
        with torch.inference_mode():
            logits = runner.model(ids).logits[0, :-1].float()
        chances.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).mean().exp().item())
        hits.append((logits.argmax(-1) == ids[0, 1:]).float().mean().item())
    assert [record["index"] for record in records["forget"]] == [4, 2]
    assert [record["probability"] for record in records["forget"]] == pytest.approx(chances, rel=1e-4)
    assert metrics["probability_f"].value == pytest.approx(sum(chances) / 2, rel=1e-4)
    assert metrics["exact_memorization"].value == pytest.approx(sum(hits) / 2)


def test_texts_and_questions_may_share_a_set(runner: Runner) -> None:
    mixed = load_qa({"retain": [TEXTS[0], QUESTIONS[0], TEXTS[1], QUESTIONS[1]]}, make_prompter(), 4)
    records = run_items(runner, mixed, "retain")
    assert [("text" in record, record["index"]) for record in records] == [(True, 4), (False, 1), (True, 2), (False, 3)]
    found = mixed.metrics({"retain": records}, None)
    # Answers alone have ROUGE-L and accuracy, and texts are not counted as left out of them.
    assert {name: (metric.n, metric.skipped) for name, metric in found.items()} == {
        "accuracy_r": (2, 0), "probability_r": (4, 0), "rouge_l_r": (2, 0), "extraction_strength_r": (4, 0),
        "exact_memorization_r": (4, 0),
    }  # fmt: skip
    apart = load_qa({"retain": QUESTIONS}, make_prompter(), 4)
    answered = run_items(runner, apart, "retain")
    for record, other in zip([record for record in records if "text" not in record], answered, strict=True):
        assert record["generated"] == other["generated"]
        for score in ("probability", "extraction_strength", "exact_memorization", "rouge_l", "accuracy"):
            assert record[score] == pytest.approx(other[score], rel=1e-4)


def test_a_changed_text_is_another_question() -> None:
    def asked(text: str) -> Benchmark:
        return load_qa({"forget": [Row(0, text=text)]}, make_prompter())

    assert asked("It is here.").describe() == asked("It is here.").describe()
    assert asked("It is here.").describe() != asked("It is there.").describe()
    assert asked("It is here.").describe()["max_new_tokens"] is None
    assert "answer_rule" not in asked("It is here.").describe()  # no rule decides what is right
