"""vLLM itself as the engine, on a GPU or by its build for CPUs: equal records, and processes that end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from msa_lite.data import Row
from msa_lite.errors import MsaError
from msa_lite.evals import engine
from msa_lite.evals.engine import ENGINE_FILE, check_architecture, check_engine
from msa_lite.evals.evaluation import evaluate_benchmark
from msa_lite.evals.models import load_model
from msa_lite.evals.qa import Qa, load_qa
from msa_lite.evals.records import read_records
from msa_lite.io.weights.hub import Source, fetch
from tests.support.benchmark_data import make_prompter
from tests.support.plain import WIDE

pytest.importorskip("vllm", reason="needs vLLM")
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 64
ROWS = [Row(i, "Where is it? " * (1 + i % 3), f"It is over there at {i}." * (1 + i % 2)) for i in range(12)]


@pytest.fixture(autouse=True)
def _works_here() -> None:
    try:
        check_engine("vllm")
    except MsaError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["float32", "bfloat16"])
def source(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Source:
    folder = make_checkpoint("llama", dtype=request.param, max_position_embeddings=512, **WIDE, **SIZES)
    return fetch(str(folder))


@pytest.fixture(scope="module")
def qa() -> Qa:
    return load_qa({"forget": [*ROWS, Row(12, text="A text of some words.")], "retain": ROWS[:2]}, make_prompter(), 16)


def facts_of(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / ENGINE_FILE).read_text())
    return facts


def assert_no_processes() -> None:
    """None of vLLM's processes is left, a little later."""
    for _ in range(100):
        left = [p for p in psutil.Process().children(recursive=True) if "resource_tracker" not in " ".join(p.cmdline())]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(left)


def test_vllm_and_transformers_make_the_same_records(source: Source, qa: Qa, tmp_path: Path) -> None:
    check_architecture("vllm", source)
    for name in ("vllm", "transformers"):
        evaluate_benchmark(source, qa, tmp_path / name, engine=name)  # type: ignore[arg-type]
        assert_no_processes()
    facts = facts_of(tmp_path / "vllm")
    assert facts["why_not"] is None
    fine = facts["dtype"] == "float32"
    for name in qa.sets:
        mine, other = (read_records(tmp_path / engine / f"{name}.jsonl") for engine in ("vllm", "transformers"))
        pairs = list(zip(mine, other, strict=True))
        losses = [[record["scores"][key][0]["loss"] for record in pair for key in record["scores"]] for pair in pairs]
        assert all(max(pair) - min(pair) < (1e-3 if fine else 0.25) for pair in losses)
        if fine:
            assert [one.get("generated") for one, _ in pairs] == [two.get("generated") for _, two in pairs]


def test_another_model_in_vllm_is_noticed_and_its_processes_end(
    source: Source, qa: Qa, make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_checkpoint("llama", 1, max_position_embeddings=512, **WIDE, **SIZES)
    monkeypatch.setattr(engine, "load_model", lambda folder: load_model(other))
    evaluate_benchmark(source, qa, tmp_path / "out", engine="vllm")
    assert "differ" in facts_of(tmp_path / "out")["why_not"]
    assert_no_processes()


def test_vllms_processes_end_when_the_work_is_interrupted(source: Source, qa: Qa, tmp_path: Path) -> None:
    def stop(label: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_benchmark(source, qa, tmp_path / "out", engine="vllm", progress=stop)
    assert_no_processes()
    assert facts_of(tmp_path / "out.partial")["why_not"] is None
