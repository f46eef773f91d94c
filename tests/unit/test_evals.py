"""Scores of a model against a plain computation, whatever the batches, the order, and the padding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msa_lite.data import IGNORE, Prompter, Row, Template, encode_qa
from msa_lite.evals import generate, qa
from msa_lite.evals.points import load_with_adapters, set_strengths
from msa_lite.io.hub import fetch
from msa_lite.report import Metric, Report, load_report, markdown_table
from tests.conftest import tiny_tokenizer

Make = Callable[..., Path]
KINDS = ["llama", "qwen2", "olmo2", "gpt2"]
ROWS = [Row(i, "Where is it? " * (1 + i % 3), f"It is over there at {i}." * (1 + i % 2)) for i in range(7)]


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter.build(tiny_tokenizer(), "auto", Template())


def plain_scores(model: Any, ids: list[int], labels: list[int]) -> tuple[list[float], list[bool]]:
    """One row at a time, one token at a time, float64."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].double()
    positions = [t for t in range(1, len(ids)) if labels[t] != IGNORE]
    log_probs = [float(torch.log_softmax(logits[t - 1], -1)[ids[t]]) for t in positions]
    return log_probs, [int(logits[t - 1].argmax()) == ids[t] for t in positions]


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forced_scores_equal_a_plain_loop(kind: str, make_checkpoint: Make, prompter: Prompter) -> None:
    model = generate.load_model(make_checkpoint(kind))
    examples = encode_qa(ROWS, prompter)
    for example, scores in zip(examples, generate.score_tokens(model, examples), strict=True):
        log_probs, matches = plain_scores(model, example.ids, example.labels)
        assert scores.log_probs == pytest.approx(log_probs, abs=1e-5)
        assert scores.matches.tolist() == matches


@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_batches_or_padding(
    kind: str, make_checkpoint: Make, prompter: Prompter, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = generate.load_model(make_checkpoint(kind))
    prompts = [prompter.prompt(row.question) for row in ROWS]
    together = generate.generate_answers(model, prompter.tokenizer, prompts, max_new_tokens=12)
    monkeypatch.setattr(generate, "_GENERATE_TOKENS", 1)
    alone = generate.generate_answers(model, prompter.tokenizer, prompts, max_new_tokens=12)
    assert together == alone
    assert generate.generate_answers(model, prompter.tokenizer, prompts[::-1], max_new_tokens=12) == alone[::-1]


def test_records_do_not_depend_on_order_or_batch_size(
    make_checkpoint: Make, prompter: Prompter, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = generate.load_model(make_checkpoint("llama"))
    settings = qa.QaSettings(max_new_tokens=8)
    records = qa.score_rows(model, prompter, ROWS, settings)
    monkeypatch.setattr(generate, "_LOGIT_BYTES", 1)
    backwards = qa.score_rows(model, prompter, ROWS[::-1], settings)[::-1]
    for one, other in zip(records, backwards, strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)
        assert {k: v for k, v in one.items() if k != "probability"} == {
            k: v for k, v in other.items() if k != "probability"
        }


def test_an_evaluation_can_be_recomputed_from_its_records_and_resumed_by_set(
    make_checkpoint: Make, prompter: Prompter, tmp_path: Path
) -> None:
    source = fetch(str(make_checkpoint("llama")))
    sets = {"forget": ROWS[:3], "retain": ROWS[3:]}
    settings = qa.QaSettings(max_new_tokens=4)

    def stop(label: str, done: int, total: int) -> None:
        if done > 2 * len(sets["forget"]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qa.evaluate_qa(source, prompter, sets, tmp_path / "out", settings, progress=stop)
    kept = tmp_path / "out.partial" / "forget.jsonl"
    kept.write_text(kept.read_text().replace('"accuracy": 0.0', '"accuracy": 1.0'))  # a mark that it is not made anew
    report = qa.evaluate_qa(source, prompter, sets, tmp_path / "out", settings)
    assert report.metrics["accuracy_f"].value == 1.0
    records = {
        name: [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]
        for name in sets
    }
    assert qa.aggregate(records) == report == load_report(tmp_path / "out")
    probability = [item["probability"] for item in records["retain"]]
    metric = report.metrics["probability_r"]
    assert metric.value == pytest.approx(np.mean(probability))
    assert metric.stderr == pytest.approx(np.std(probability, ddof=1) / 2)  # n = 4
    assert (metric.n, metric.skipped, metric.higher_is_better) == (4, 0, True)


def test_rescaled_adapters_give_the_merged_models_logits(
    make_checkpoint: Make, make_adapter: Make, prompter: Prompter, tmp_path: Path
) -> None:
    import torch

    from msa_lite import merge

    target, forget, retain = make_checkpoint("llama"), make_adapter("llama", 1), make_adapter("llama", 2, r=8)
    model = load_with_adapters(target, {"forget": forget, "retain": retain})
    ids = torch.tensor([prompter.prompt("Where is it?")])
    for alpha, beta in ((0.75, 0.5), (0.0, 1.0), (1.5, 0.0)):
        set_strengths(model, {"forget": -alpha, "retain": beta})
        out = merge(
            str(target), tmp_path / f"{alpha}", forget=str(forget), alpha=alpha, retain=str(retain), beta=beta
        ).folder
        with torch.inference_mode():
            assert torch.allclose(model(ids).logits, generate.load_model(out)(ids).logits, atol=1e-5)


def test_a_table_shows_models_side_by_side_and_a_dash_for_what_is_not_there() -> None:
    known = Report("qa", "all", {"accuracy_f": Metric(0.5, 4, 0.25, False), "rouge_l_r": Metric(1.0, 2, None, True)})
    empty = Report("qa", "all", {"accuracy_f": Metric(None, 0, None, False, 4, "no item")})
    lines = markdown_table({"target": known, "unlearned": empty}).splitlines()
    assert lines[0] == "| set | metric | n | target | unlearned |"
    assert lines[2:] == [
        "| forget set | accuracy ↓ | 4 | 0.500 ± 0.250 | – |",
        "| retain set | ROUGE-L recall ↑ | 2 | 1.000 | – |",
    ]
