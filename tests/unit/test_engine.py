"""vLLM as `evaluate.engine`, by a stand-in: equal records, what is refused, and when transformers takes over."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from msa_lite.data import Row
from msa_lite.errors import MismatchError, MsaError, StageError, UsageError
from msa_lite.evals import engine
from msa_lite.evals.benchmark import Benchmark
from msa_lite.evals.engine import ENGINE_FILE, check_architecture, check_engine, engine_of, why_not
from msa_lite.evals.evaluation import evaluate_benchmark, evaluation_inputs
from msa_lite.evals.forward import TokenScores
from msa_lite.evals.generate import Decoding, generate
from msa_lite.evals.models import Runner, load_model
from msa_lite.evals.qa import Qa, load_qa
from msa_lite.evals.records import read_records
from msa_lite.evals.suite import HarnessTasks, evaluate
from msa_lite.evals.vllm_model import VllmModel
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.report import Report
from msa_lite.report.reports import notes
from tests.support.benchmark_data import make_prompter
from tests.support.models import make_lora
from tests.support.plain import WIDE
from tests.support.vllm_stand_in import StandIn, install

ROWS = [Row(i, "Where is it? " * (1 + i % 3), f"It is over there at {i}." * (1 + i % 2)) for i in range(12)]
TEXT = Row(12, text="A text of some words, which is scored and not answered.")
WINDOW = 512


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return install(monkeypatch)


@pytest.fixture(scope="module")
def source(make_checkpoint: Callable[..., Path]) -> Source:
    return fetch(str(make_checkpoint("llama", max_position_embeddings=WINDOW, **WIDE)))


@pytest.fixture(scope="module")
def qa() -> Qa:
    return load_qa({"forget": [*ROWS, TEXT], "retain": ROWS[:2]}, make_prompter(), 6)


def scored(source: Source, benchmark: Benchmark, out: Path, engine: Any = "vllm", **options: Any) -> Report:
    report = evaluate_benchmark(source, benchmark, out, engine=engine, **options)
    assert report is not None
    return report


def records_of(benchmark: Benchmark, folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: read_records(folder / f"{name}.jsonl") for name in benchmark.sets}


def facts_of(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / ENGINE_FILE).read_text())
    return facts


def assert_close(one: Any, other: Any) -> None:
    """Records are equal but for the rounding of their floats."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key])
    elif isinstance(one, list):
        for pair in zip(one, other, strict=True):
            assert_close(*pair)
    else:
        assert one == (pytest.approx(other, rel=1e-4) if isinstance(one, float) else other)


def sharpen(model: Any) -> None:
    """Change a model as a wrong kernel would: its logits are half as large again."""
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)


def test_both_engines_make_the_same_records_and_the_report_says_which(
    source: Source, qa: Qa, vllm: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scored(source, qa, tmp_path / "plain", "transformers")
    assert vllm.kwargs == []
    report = scored(source, qa, tmp_path / "vllm")
    assert_close(records_of(qa, tmp_path / "vllm"), records_of(qa, tmp_path / "plain"))
    assert caplog.messages == []
    facts = facts_of(tmp_path / "vllm")
    assert report.settings["engine"] == facts
    assert "run by vLLM 0.32.0" in " ".join(notes({"unlearned": report}))
    assert facts["ran"] == {"answers": ["forget", "retain"], "texts": ["forget", "retain"]}
    assert (facts["version"], facts["dtype"], facts["why_not"]) == ("0.32.0", "float32", None)
    sample = facts["sample"]
    assert (sample["texts"], sample["prompts"], sample["ties"], sample["fault"]) == (8, 8, 0, None)
    assert 0 < sample["largest"] < 1e-4
    assert not (tmp_path / "plain" / ENGINE_FILE).exists()
    assert vllm.running == 0
    [started] = vllm.kwargs
    assert (started["dtype"], started["load_format"]) == ("float32", "safetensors")
    longest = max(len(text.ids) + 1 for item in qa.sets["forget"].items for (text,) in item.texts.values())
    answered = max(len(item.prompt) + 6 for item in qa.sets["forget"].answered if item.prompt)
    assert started["max_model_len"] == max(longest, answered) < WINDOW
    # All texts and prompts ran by vLLM, beside the sample's.
    assert len(vllm.params) == 16 + sum(len(part.scored) + len(part.answered) for part in qa.sets.values())


def test_a_model_that_differs_in_vllm_is_run_by_transformers_with_a_warning(
    source: Source, qa: Qa, vllm: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.change = sharpen
    report = scored(source, qa, tmp_path / "vllm")
    assert len(vllm.params) == 16
    assert vllm.running == 0
    assert "log-probabilities differ" in caplog.text
    assert "log-probabilities differ" in report.settings["engine"]["why_not"]
    assert "run by transformers" in " ".join(notes({"unlearned": report}))
    assert facts_of(tmp_path / "vllm")["ran"] == {"answers": [], "texts": []}
    scored(source, qa, tmp_path / "plain", "transformers")
    assert records_of(qa, tmp_path / "vllm") == records_of(qa, tmp_path / "plain")


def reference(gap: float, scores: float = -1.0, dtype: str = "float32") -> Any:
    """One text of three tokens, and one prompt with the answer 5, 6, where 6 leads by a gap."""
    own = TokenScores(np.full(3, scores, np.float32), np.ones(3, bool))
    gaps = {(0, 0): 9.0, (0, 1): gap, (0, 2): 9.0}
    return engine._Reference([None], [own], [[1]], [8], [[5, 6]], gaps, [0], 99, dtype)  # type: ignore[list-item]


def vllm_model(answer: list[int], *log_probs: float) -> Any:
    scores = TokenScores(np.array(log_probs or (-1.0,) * 3, np.float32), np.ones(3, bool))
    return SimpleNamespace(score=lambda texts: [scores], extend=lambda prompts, room: [answer])


@pytest.mark.parametrize(
    ("answer", "gap", "dtype", "fits"),
    [
        ([5, 6], 9.0, "float32", True),
        ([5, 7, 8], 5e-4, "float32", True),
        ([5, 7, 8], 5e-2, "float32", False),
        ([5, 7, 8], 5e-2, "bfloat16", True),
        ([5, 7, 8], 0.5, "bfloat16", False),
        ([7, 6], 5e-4, "float32", False),
        ([5], 5e-4, "float32", True),  # it ended there
        ([5, 6, 7], 5e-4, "float32", False),
    ],
)
def test_answers_may_differ_from_a_near_tie_on(answer: list[int], gap: float, dtype: str, fits: bool) -> None:
    agreement = engine._compare(reference(gap, dtype=dtype), vllm_model(answer))
    assert (agreement.fault is None) == fits
    assert agreement.ties == (fits and answer != [5, 6])


@pytest.mark.parametrize(
    ("log_probs", "dtype", "fits"),
    [
        ((-1.0, -1.0, -1.0005), "float32", True),
        ((-1.0, -1.0, -1.002), "float32", False),
        ((-1.0003, -1.0003, -1.0003), "float32", False),  # small, but all of them
        ((-1.0, -1.0, -1.2), "bfloat16", True),
        ((-1.0, -1.0, -2.1), "bfloat16", False),
        ((-1.2, -1.2, -1.2), "bfloat16", False),
    ],
)
def test_log_probabilities_agree_within_the_tolerance(log_probs: tuple[float, ...], dtype: str, fits: bool) -> None:
    agreement = engine._compare(reference(9.0, dtype=dtype), vllm_model([5, 6], *log_probs))
    assert (agreement.fault is None) == fits


@pytest.mark.parametrize(("count", "fits"), [(0, True), (1, False), (3, False)])
def test_the_likeliest_tokens_agree(count: int, fits: bool) -> None:
    model = vllm_model([5, 6])
    [scores] = model.score([])
    scores.matches[:count] = False
    agreement = engine._compare(reference(9.0), model)
    assert (agreement.fault is None, agreement.ranks) == (fits, count)


def test_vllm_that_does_not_start_leaves_everything_to_transformers(
    source: Source, qa: Qa, vllm: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.fails_at = 0
    scored(source, qa, tmp_path / "vllm")
    assert "Engine core initialization failed." in facts_of(tmp_path / "vllm")["why_not"]
    assert "transformers runs all items" in caplog.text
    assert all(record["generated"] for record in records_of(qa, tmp_path / "vllm")["retain"])


def test_vllm_that_stops_in_the_middle_ends_and_a_rerun_goes_on(
    source: Source, qa: Qa, vllm: StandIn, tmp_path: Path
) -> None:
    vllm.fails_at = 16 + len(qa.sets["forget"].scored) + 2  # its texts are written, its answers are not
    with pytest.raises(StageError, match="vLLM stopped"):
        scored(source, qa, tmp_path / "out")
    assert vllm.running == 0
    before, vllm.fails_at = len(vllm.params), None
    scored(source, qa, tmp_path / "out")
    asked = sum(len(part.scored) + len(part.answered) for part in qa.sets.values())
    assert len(vllm.params) - before == 16 + asked - len(qa.sets["forget"].scored)


KILLED = """
import os, subprocess, sys, time
from msa_lite.evals.vllm_model import _start_watch
other = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
_start_watch()
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
print(other.pid, child.pid, flush=True)
time.sleep(3)
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_started_for_vllm_ends_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False)
    other, child = (psutil.Process(int(pid)) for pid in done.stdout.split())
    try:
        for _ in range(200):
            if not child.is_running() or child.status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("it still runs")
        assert other.is_running()
    finally:
        other.kill()


def test_what_vllm_has_run_before_it_stopped_agreeing_is_run_again(
    source: Source, qa: Qa, vllm: StandIn, tmp_path: Path
) -> None:
    vllm.fails_at = 16 + len(qa.sets["forget"].scored) + 2
    with pytest.raises(StageError):
        scored(source, qa, tmp_path / "out")
    [part] = (tmp_path / "out.partial").glob("forget.*.part")
    part.write_text(part.read_text().replace('"loss": ', '"loss": 1'))
    vllm.fails_at, vllm.change = None, sharpen
    scored(source, qa, tmp_path / "out")
    scored(source, qa, tmp_path / "plain", "transformers")
    assert records_of(qa, tmp_path / "out") == records_of(qa, tmp_path / "plain")


def test_a_stop_after_the_warning_leaves_the_rest_to_transformers(
    source: Source, qa: Qa, vllm: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(label: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    vllm.change = sharpen
    with pytest.raises(KeyboardInterrupt):
        scored(source, qa, tmp_path / "out", progress=stop)
    vllm.change = lambda model: None
    scored(source, qa, tmp_path / "out")
    assert len(vllm.params) == 16, "vLLM is not tried again"
    assert facts_of(tmp_path / "out")["why_not"]


def test_records_of_another_engine_are_not_taken_up(source: Source, qa: Qa, vllm: StandIn, tmp_path: Path) -> None:
    plain = evaluation_inputs(source, qa)
    assert "engine" not in plain
    assert evaluation_inputs(source, qa, engine="vllm") == plain | {"engine": "vllm"}
    scored(source, qa, tmp_path / "plain", "transformers")
    labels: list[str] = []

    def scores(out: str, engine: str, *earlier: str) -> bool:
        labels.clear()
        folders = [tmp_path / name for name in earlier]
        scored(source, qa, tmp_path / out, engine, earlier=folders, progress=lambda label, *_: labels.append(label))
        return bool(labels)

    assert scores("vllm", "vllm", "plain")
    assert not scores("vllm", "vllm")
    assert not scores("other", "vllm", "plain", "vllm")
    assert facts_of(tmp_path / "other") == facts_of(tmp_path / "vllm")
    assert scores("third", "transformers", "vllm")
    assert scores("vllm", "transformers", "vllm")
    assert not (tmp_path / "vllm" / ENGINE_FILE).exists()
    few = replace(qa, sets={"forget": replace(qa.sets["forget"], items=qa.sets["forget"].items[:3])})
    scored(source, few, tmp_path / "few", earlier=[tmp_path / "other"])
    before = len(vllm.params)
    scored(source, few, tmp_path / "few again", earlier=[tmp_path / "plain"])
    assert len(vllm.params) > before


def test_items_that_need_all_probabilities_stay_with_transformers_in_the_same_evaluation(
    source: Source, qa: Qa, vllm: StandIn, tmp_path: Path
) -> None:
    sets = {"forget": replace(qa.sets["forget"], with_z=True), "retain": qa.sets["retain"]}
    mixed = replace(qa, sets=sets)
    scored(source, mixed, tmp_path / "vllm")
    scored(source, mixed, tmp_path / "plain", "transformers")
    assert_close(records_of(mixed, tmp_path / "vllm"), records_of(mixed, tmp_path / "plain"))
    assert facts_of(tmp_path / "vllm")["ran"] == {"answers": ["forget", "retain"], "texts": ["retain"]}
    [record, *_] = records_of(mixed, tmp_path / "vllm")["forget"]
    assert "min_k_pp" in next(iter(record["scores"].values()))[0]


def test_items_beyond_the_window_are_the_same_by_both(
    make_checkpoint: Callable[..., Path], vllm: StandIn, tmp_path: Path
) -> None:
    small = fetch(str(make_checkpoint("llama", max_position_embeddings=64, **WIDE)))
    rows = [Row(i, "Where?", "x" * n) for i, n in enumerate((3, 25, *range(28, 34), 45, 55, 58, *range(59, 64)))]
    qa = load_qa({"forget": rows}, make_prompter(), 40)
    scored(small, qa, tmp_path / "vllm")
    scored(small, qa, tmp_path / "plain", "transformers")
    assert_close(records_of(qa, tmp_path / "vllm"), records_of(qa, tmp_path / "plain"))
    skipped = [record for record in records_of(qa, tmp_path / "vllm")["forget"] if "skipped" in record]
    assert 0 < len(skipped) < len(rows)


@pytest.mark.parametrize("stop", [(), ("e",), ("there", "zz")])
def test_answers_end_where_those_of_transformers_end(source: Source, vllm: StandIn, stop: tuple[str, ...]) -> None:
    runner, prompter = Runner(load_model(source.folder)), make_prompter()
    prompts = [prompter.prompt(f"Where is it {'now ' * i}?") for i in range(6)]
    ends = range(1, 12)
    runner.model.generation_config.eos_token_id = [*ends]
    decoding = Decoding(80, stop)
    wanted = dict(pair for batch in generate(runner, prompter.tokenizer, prompts, decoding) for pair in batch)
    model = VllmModel.start(source.folder, "float32", ends, WINDOW, WINDOW)
    assert dict(pair for batch in model.generate(prompter.tokenizer, prompts, decoding) for pair in batch) == wanted
    assert len({len(answer) for (answer,) in wanted.values()}) > 1
    assert {(*(p.stop_token_ids or ()), p.ignore_eos, p.temperature) for p in vllm.params} == {(*ends, True, 0.0)}
    model.stop()


def test_adapters_and_hidden_tokens_and_samples_stay_with_transformers(
    source: Source, qa: Qa, vllm: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = make_lora(source.folder, tmp_path / "adapter")
    sampled = replace(qa.sets["forget"], with_z=True, decoding=Decoding(4, samples=2))
    cases = [
        (fetch(str(adapter)), qa),
        (source, replace(qa, compat=frozenset({"mask_eq_pad"}))),
        (source, replace(qa, sets={"forget": sampled})),
    ]
    for model_source, benchmark in cases:
        assert why_not(model_source, benchmark)
        assert engine_of("vllm", model_source, benchmark) == "transformers"
        assert evaluation_inputs(model_source, benchmark, engine="vllm") == evaluation_inputs(model_source, benchmark)
    assert why_not(source, qa) is None
    scored(cases[0][0], qa, tmp_path / "out")
    assert "LoRA adapter" in caplog.text
    assert vllm.kwargs == []


def refused(**options: Any) -> str:
    with pytest.raises(MsaError) as caught:
        evaluate(**{"model": "nowhere", "out": "out", "engine": "vllm", **options})
    assert isinstance(caught.value, UsageError)
    return str(caught.value)


def test_what_cannot_work_is_refused_before_a_model_is_looked_for(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    questions = engine_questions(tmp_path)
    assert "did you mean 'vllm'" in refused(questions=questions, engine="vlm")
    assert "lm-eval" in refused(questions=HarnessTasks(["hellaswag"]))
    vllm.device = "none"
    assert "no GPU" in refused(questions=questions)
    vllm.device = "cuda"
    assert "nowhere" in refused(questions=questions)  # the engine is no fault any more
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one process" in refused(questions=questions)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)  # an import that fails
    assert "cannot be loaded" in refused(questions=questions)
    monkeypatch.delitem(sys.modules, "vllm")
    if find_spec("vllm") is None:
        assert "pip install vllm" in refused(questions=questions)
    check_engine("transformers")


def engine_questions(folder: Path) -> Any:
    from msa_lite.data import DataSource
    from msa_lite.evals.suite import OwnQuestions

    path = folder / "forget.jsonl"
    path.write_text('{"question": "Where?", "answer": "There."}\n')
    return OwnQuestions(forget=DataSource(str(path)))


def test_an_architecture_that_vllm_does_not_know_is_refused(
    source: Source, make_checkpoint: Callable[..., Path], vllm: StandIn, tmp_path: Path
) -> None:
    check_architecture("vllm", source)
    other = make_checkpoint("olmo2")
    with pytest.raises(MismatchError, match="Olmo2ForCausalLM"):
        evaluate(str(other), tmp_path / "out", engine_questions(tmp_path), engine="vllm")
    assert not (tmp_path / "out").exists()
    check_architecture("transformers", fetch(str(other)))
