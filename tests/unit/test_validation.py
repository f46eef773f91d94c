"""Scores on validation rows: what is asked and told, what a stop leaves, and what a merged model scores otherwise."""

from __future__ import annotations

import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState

from msa_lite.choose import validation as module
from msa_lite.choose.choice import TARGET, Candidates, Values, choose
from msa_lite.choose.rules import LeastExtraction, PaperScore, Rank, Rule
from msa_lite.choose.validation import Validation
from msa_lite.data import Row
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine import models
from msa_lite.evals.engine.models import load_model
from msa_lite.pipeline.run import choice as strengths
from msa_lite.report import load_report
from msa_lite.report.run.choice import Candidate, Choice, candidate_name
from msa_lite.settings import JudgeSettings
from tests.support.benchmark_data import make_prompter
from tests.support.models import tiny_model

SETS = ("forget", "retain", "holdout")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama").eval()


@pytest.fixture(scope="module")
def validation() -> Validation:
    """Two questions a set."""
    rows = {name: [Row(i, f"Where is {name} {i}?", f"At {i}.") for i in range(2)] for name in SETS}
    prompter = make_prompter()
    return Validation(load_qa(rows, prompter, max_new_tokens=3, split="validation"), LeastExtraction(0.95))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sets that a model was run over."""
    names: list[str] = []
    run_items = module.run_items

    def counted(runner: Any, benchmark: Any, name: str) -> Any:
        names.append(name)
        return run_items(runner, benchmark, name)

    monkeypatch.setattr(module, "run_items", counted)
    return names


@pytest.mark.parametrize(
    ("rule", "asked"),
    [(LeastExtraction(0.95), SETS[:2]), (PaperScore("tofu"), SETS[:2]), (PaperScore("muse"), SETS)],
    ids=["extraction", "score", "score with an auc"],
)
def test_candidates_are_asked_holdout_rows_where_the_rule_goes_by_them(
    rule: Rule, asked: tuple[str, ...], validation: Validation, model: Any, ran: list[str], tmp_path: Path
) -> None:
    validation = replace(validation, rule=rule)
    report = validation.score_into(tmp_path / "candidate", lambda: model)
    assert ran == [*asked]
    assert ("rouge_l_h" in report.metrics) == ("holdout" in asked)
    assert validation.describe()["sets"] == [*asked]  # or scores would serve a rule that they lack a set for


def test_reports_tell_what_was_asked_and_of_which_candidate(validation: Validation, model: Any, tmp_path: Path) -> None:
    points: list[Values] = [{"alpha": 1.0}, {"alpha": 2.0}]
    out = tmp_path / "sweep"
    choose(Candidates(points, lambda values: model, "one model"), validation, out, "choosing")
    for name, candidate in {TARGET: TARGET, **{candidate_name(values): values for values in points}}.items():
        settings = load_report(out / name).settings
        assert settings["candidate"] == candidate
        assert settings["prompt"] == validation.benchmark.prompter.describe()
        assert {key: part["rows"] for key, part in settings["sets"].items()} == dict.fromkeys(SETS, 2)
        assert (out / name / "holdout.jsonl").exists() == (name == TARGET)  # it says what unseen data scores


def test_records_that_a_stop_has_left_are_not_made_again(
    validation: Validation, model: Any, ran: list[str], tmp_path: Path
) -> None:
    whole = validation.score_into(tmp_path / "whole", lambda: model, {"epoch": 1})
    (tmp_path / "stopped").mkdir()
    shutil.copy(tmp_path / "whole/forget.jsonl", tmp_path / "stopped")
    ran.clear()
    assert validation.score_into(tmp_path / "stopped", lambda: model, {"epoch": 1}) == whole
    assert ran == ["retain"]
    for name in ("report.json", "forget.jsonl", "retain.jsonl"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(("kind", "freed"), [("local", 1), ("openai", 0)])
def test_a_local_judge_gets_the_memory_of_the_model_that_it_judges(
    validation: Validation, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, freed: int
) -> None:
    order: list[str] = []
    monkeypatch.setattr(module, "write_scores", lambda *_: order.append("judged"))
    judged = replace(validation, judge=JudgeSettings(kind, "a model"))
    judged.score_into(tmp_path / "candidate", lambda: model, release=lambda: order.append("freed"))
    assert order == ["freed"] * freed + ["judged"]


@pytest.mark.parametrize(
    ("stored", "four_bit", "dtype", "has_bf16", "wanted"),
    [
        ("bfloat16", False, None, True, "auto"),
        ("bfloat16", False, None, False, torch.float16),  # a GPU such as a T4
        ("float32", False, None, False, "auto"),
        ("float32", False, "bfloat16", True, torch.bfloat16),
        ("float32", False, "bfloat16", False, torch.float16),
        ("float32", False, "float32", False, torch.float32),
        ("float32", True, None, True, torch.bfloat16),
        ("float32", True, None, False, torch.float16),
    ],
)
def test_scoring_on_a_gpu_takes_16_bits_where_it_loses_nothing(
    make_checkpoint: Any,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    four_bit: bool,
    dtype: str | None,
    has_bf16: bool,
    wanted: Any,
) -> None:
    calls: list[dict[str, Any]] = []

    def load(folder: Path, **how: Any) -> Any:
        calls.append(how)
        return torch.nn.Linear(1, 1)

    PartialState()  # which looks for the device once
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(models, "free_bytes", lambda: 1 << 40)
    monkeypatch.setattr(models, "has_bf16", lambda: has_bf16)
    monkeypatch.setattr(models, "nf4", lambda: "NF4")
    monkeypatch.setattr(models, "load_whole", load)
    load_model(make_checkpoint("llama", dtype=stored), four_bit, dtype)
    assert calls[0]["dtype"] == wanted
    assert ("quantization_config" in calls[0]) == four_bit
    assert "device_map" in calls[0]


def test_another_dtype_than_the_stored_one_is_for_gpus_alone(make_checkpoint: Any) -> None:
    """In a half precision, CPUs are slow and say other things."""
    loaded = load_model(make_checkpoint("llama"), dtype="bfloat16")
    assert loaded.dtype == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"])
def test_the_memory_of_a_batch_that_failed_is_free_for_the_next(model: Any, words: str) -> None:
    references: list[weakref.ref[Any]] = []

    def fail() -> None:
        logits = torch.zeros(8)
        references.append(weakref.ref(logits))
        raise RuntimeError(words)

    runner = models.Runner(model, 64)
    with pytest.raises(RuntimeError) as caught:
        fail()
    assert references[0]() is not None
    assert runner.lower_budget(caught.value, 32)
    assert references[0]() is None
    assert runner.budget == 16
    assert not runner.lower_budget(RuntimeError("shapes cannot be multiplied"), 8)


# What is told of the chosen point where it scores otherwise as a merged model than it did in memory.


@pytest.mark.parametrize(
    ("after", "warned"),
    [
        (Rank(True, 0.5), False),
        (Rank(True, 0.519), False),
        (Rank(True, 0.481), False),
        (Rank(True, 0.521), True),
        (Rank(True, 0.479), True),
        (Rank(False, 0.5), True),
        ("nothing is left", True),
    ],
)
def test_a_difference_of_more_than_a_fiftieth_is_warned_of(
    after: Rank | str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, line = rescored(after, monkeypatch)
    assert "the chosen point in memory: 0.5000; as merged model: " in line
    assert bool(told) is warned


def rescored(after: Rank | str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """The warnings, and the line on a choice that scores 0.5 whose merged model ranks as `after`."""
    told: list[str] = []
    monkeypatch.setattr(strengths.logger, "warning", lambda text, *values: told.append(text % values))
    values = {"alpha": 1.0, "beta": 0.5}
    choice = Choice("tofu", values, [Candidate(values, {}, 0.5, True)], [], {}, None, "validation", "tofu")
    monkeypatch.setattr(strengths, "score_model", lambda *given: None)
    monkeypatch.setattr(strengths, "load_choice", lambda folder: choice)
    monkeypatch.setattr(strengths, "validation_of", lambda run: SimpleNamespace(rank=lambda *folders: after))
    scope = SimpleNamespace(folder=Path("run"))
    run: Any = SimpleNamespace(folder=Path("run"), scope=scope)
    (line,) = strengths._rescore(run, lambda *step: None)
    return told, line
