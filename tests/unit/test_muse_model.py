"""MUSE-Books with a model: all metrics from one evaluation, equal to a plain loop over one text at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import IGNORE, Example
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings
from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.evals.engine.models import load_model
from msa_lite.evals.scores.evaluation import evaluate_benchmark
from msa_lite.evals.scores.records import read_records
from msa_lite.io.weights.hub import fetch
from tests.support.benchmark_data import MUSE_METRICS, ROWS, make_prompter, write_data
from tests.support.models import save_checkpoint, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("books"))


@pytest.fixture(scope="module")
def muse(data: str) -> Benchmark:
    return MUSE.load(make_prompter(), BenchmarkSettings(data))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target, ideal): a model that has learnt the forget texts in part, and itself before."""
    import torch

    folder = tmp_path_factory.mktemp("models")
    model = tiny_model("llama", max_position_embeddings=4096)
    ideal = save_checkpoint(folder / "ideal", model)
    tokenizer = tiny_tokenizer()
    texts = [f"{row['prompt']} {row['gt']}" for row in ROWS["verbmem", "forget"]]
    texts += [row["text"] for row in ROWS["privleak", "forget"]]
    batch = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(8):
        for ids in batch:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return save_checkpoint(folder / "target", model), ideal


@pytest.fixture(scope="module")
def evaluation(checkpoints: tuple[Path, Path], muse: Benchmark, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluations") / "target"
    target, ideal = (fetch(str(folder)) for folder in checkpoints)
    evaluate_benchmark(target, muse, out, ideal=ideal)
    return out


def test_all_metrics_are_given_with_an_ideal(evaluation: Path) -> None:
    report = json.loads((evaluation / "report.json").read_text())
    assert (report["benchmark"], report["split"], set(report["metrics"])) == ("muse", "books", MUSE_METRICS)
    values = {name: metric["value"] for name, metric in report["metrics"].items()}
    assert all(value is not None for value in values.values())
    assert values["min_k"] == 1.0  # it was trained on one side
    ideal = json.loads((evaluation / "ideal/report.json").read_text())["metrics"]["min_k"]["value"]
    assert values["privleak"] == pytest.approx(100 * ((1 - 1.0) - (1 - ideal)) / (1 - ideal) if ideal < 1 else 0.0)
    assert report["metrics"]["knowmem_f"]["skipped"] == 1
    before = json.loads((evaluation / "ideal/report.json").read_text())["metrics"]
    assert before["privleak"]["value"] == before["min_k_gap"]["value"] == 0.0  # its own ideal
    assert before["exact_memorization"]["value"] < values["exact_memorization"]


def plain_scores(model: Any, text: Example) -> dict[str, Any]:
    """The scores of a text by loops over one row, in float64."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([text.ids])).logits[0]
    right, log_probs, z = [], [], []
    for t in range(1, len(text.ids)):
        if text.labels[t] == IGNORE:
            continue
        row = torch.log_softmax(logits[t - 1], -1).tolist()
        mean = sum(math.exp(v) * v for v in row)
        variance = sum(math.exp(v) * v * v for v in row) - mean * mean
        log_probs.append(row[text.ids[t]])
        z.append((row[text.ids[t]] - mean) / math.sqrt(max(variance, 1e-6)))
        right.append(max(range(len(row)), key=row.__getitem__) == text.ids[t])
    suffix = 0
    while suffix < len(right) and right[-1 - suffix]:
        suffix += 1
    count = max(1, int(0.4 * len(right)))
    return {
        "extraction_strength": suffix / len(right),
        "exact_memorization": sum(right) / len(right),
        "min_k": -sum(sorted(log_probs)[:count]) / count,
        "min_k_pp": -sum(sorted(z)[:count]) / count,
    }


def test_scores_equal_a_plain_loop(checkpoints: tuple[Path, Path], muse: Benchmark, evaluation: Path) -> None:
    model = load_model(checkpoints[0]).double()
    found = {}
    for name, part in muse.sets.items():
        if name.startswith("knowmem"):
            continue
        keys = ("min_k", "min_k_pp") if part.with_z else ("extraction_strength", "exact_memorization", "min_k")
        for item, record in zip(part.items, read_records(evaluation / f"{name}.jsonl"), strict=True):
            wanted = plain_scores(model, item.texts["text"][0])
            assert {key: record[key] for key in keys} == pytest.approx(
                {key: wanted[key] for key in keys}, abs=1e-4, rel=1e-4
            )
            found[name, item.index] = record["exact_memorization"]
    assert any(0 < value < 1 for value in found.values())  # learnt in part, so that the comparison means something
