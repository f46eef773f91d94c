"""MUSE-Books with a model: all metrics from one evaluation, equal to a plain loop over one text at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import IGNORE, Example
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Record
from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.evals.engine.models import Runner, load_model
from msa_lite.evals.scores.evaluation import evaluate_benchmark
from msa_lite.evals.scores.records import read_records, run_items
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


def test_the_last_token_is_left_out_on_request(checkpoints: tuple[Path, Path], data: str) -> None:
    muse = MUSE.load(make_prompter(), BenchmarkSettings(data, compat=frozenset({"drop_last_token"})))
    runner = Runner(load_model(checkpoints[0]))
    item = muse.sets["verbmem"].items[0]
    record = run_items(runner, muse, "verbmem")[0]
    text = item.texts["text"][0]
    kept = Example(0, text.ids[:-1], text.labels[:-1])
    assert record["min_k"] == pytest.approx(plain_scores(runner.model, kept)["min_k"], abs=1e-4, rel=1e-4)


def test_what_the_window_has_no_room_for_is_skipped(
    make_checkpoint: Callable[..., Path], muse: Benchmark, tmp_path: Path
) -> None:
    folder = make_checkpoint("llama")  # made for 256 tokens; ten examples are longer
    records = run_items(Runner(load_model(folder)), muse, "knowmem_forget")
    assert [record["generated"] for record in records] == [None, None]
    assert all("longer than the 256 tokens" in record["skipped"] for record in records)
    others: dict[str, list[Record]] = {name: [] for name in muse.sets}
    found = muse.metrics(others | {"knowmem_forget": records}, None)["knowmem_f"]
    assert (found.value, found.n, found.skipped) == (None, 0, 2)
    # A text's last token is predicted and not read, so that there is room for one more.
    rows: dict[tuple[str, str], Any] = dict(ROWS)
    rows["privleak", "forget"] = [{"text": "z" * count} for count in (256, 257)]
    long = MUSE.load(make_prompter(), BenchmarkSettings(write_data(tmp_path, rows)))
    records = run_items(Runner(load_model(folder)), long, "privleak_forget")
    assert [record["min_k"] is None for record in records] == [False, True]
