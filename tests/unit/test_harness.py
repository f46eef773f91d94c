"""Tasks of lm-evaluation-harness: its numbers against plain loops, and what is kept, refused and left alone."""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from msa_lite.errors import DataError, StageError, UsageError
from msa_lite.evals.harness import RESULTS_FILE, aggregate, check_tasks, evaluate_harness
from msa_lite.io.finished.seal import verify_folder
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.report import Metric, load_report
from tests.support.merges import edit_adapter
from tests.support.models import tiny_tokenizer

Make = Callable[..., Path]
QUESTIONS = [f"Where is it{' now' * (i % 3)}, {i}?" for i in range(9)]
CHOICES = ["over there", "it is here at home", "Where", "is it at all over there"]
NEW_TOKENS = 6


def prompt(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def plain_likelihood(model: Any, context: str, continuation: str) -> float:
    """Summed log p of a continuation's tokens, one after another, float64."""
    import torch

    tokenizer = tiny_tokenizer()
    start, ids = len(tokenizer(context).input_ids), tokenizer(context + continuation).input_ids
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].double()
    return sum(float(torch.log_softmax(logits[t - 1], -1)[ids[t]]) for t in range(start, len(ids)))


def plain_answer(model: Any, context: str) -> str:
    """The greedy answer, one token at a time, up to its first line break."""
    import torch

    tokenizer = tiny_tokenizer()
    ids = tokenizer(context).input_ids
    new: list[int] = []
    with torch.inference_mode():
        while len(new) < NEW_TOKENS and tokenizer.eos_token_id not in new:
            new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return str(tokenizer.decode(new, skip_special_tokens=True)).split("\n")[0]


def plain_choices(model: Any) -> tuple[list[bool], list[bool]]:
    """Whether the likeliest choice is the right one, row by row; as it is and by characters."""
    right, right_by_length = [], []
    for i, question in enumerate(QUESTIONS):
        scores = [plain_likelihood(model, prompt(question), f" {choice}") for choice in CHOICES]
        by_length = [score / len(choice) for score, choice in zip(scores, CHOICES, strict=True)]
        right.append(scores.index(max(scores)) == i % 4)
        right_by_length.append(by_length.index(max(by_length)) == i % 4)
    return right, right_by_length


def load_plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


@pytest.fixture(scope="module")
def source(make_checkpoint: Make) -> Source:
    return fetch(str(make_checkpoint("llama")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path)


def write_tasks(place: Path, answers: list[str] | None = None) -> Path:
    """Tasks over local files: `places` and `few_places` (choices), `copies` (answers), and a group in a group."""
    folder = place / "tasks"
    folder.mkdir()
    rows = [{"question": q, "choices": CHOICES, "label": i % 4} for i, q in enumerate(QUESTIONS)]
    texts = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, answers or QUESTIONS, strict=True)]
    for name, items in (("places", rows), ("few_places", rows[:3]), ("copies", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        files = {"test": str(folder / f"{name}.jsonl")}
        task: dict[str, Any] = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files, "cache_dir": str(place / "cache")},
            "test_split": "test",
            "fewshot_split": "test",
            "doc_to_text": prompt("{{question}}"),
            "metadata": {"version": 3},
        }
        if name == "copies":
            task |= {
                "output_type": "generate_until",
                "doc_to_target": "{{answer}}",
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW_TOKENS},
                "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            }
        else:
            task |= {"output_type": "multiple_choice", "doc_to_target": "{{label}}", "doc_to_choice": "{{choices}}"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    for group, members in (("inner", ["few_places"]), ("outer", ["inner", "places"])):
        mean = [{"metric": "acc", "weight_by_size": True}]
        (folder / f"{group}.yaml").write_text(
            yaml.safe_dump({"group": group, "task": members, "aggregate_metric_list": mean})
        )
    return folder


def read_samples(out: Path, task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"samples_{task}.jsonl").read_text().split("\n")[:-1]]


def test_choices_are_those_of_a_plain_loop_and_everything_is_kept(source: Source, folder: Path, tmp_path: Path) -> None:
    report = evaluate_harness(source, ["places"], tmp_path / "out", task_folder=folder)
    assert (report.benchmark, report.split) == ("lm-eval", "places")
    assert report.settings["tasks"] == {"places": 3}
    expected = dict(zip(("places/acc", "places/acc_norm"), plain_choices(load_plain(source.folder)), strict=True))
    assert set(report.metrics) == set(expected)
    for name, right in expected.items():
        metric = report.metrics[name]
        assert (metric.n, metric.skipped, metric.higher_is_better) == (len(QUESTIONS), 0, True)
        assert metric.value == pytest.approx(statistics.mean(right))
        assert metric.stderr == pytest.approx(statistics.stdev(map(float, right)) / math.sqrt(len(right)))
    assert verify_folder(tmp_path / "out") == []
    assert json.loads((tmp_path / "out" / RESULTS_FILE).read_text())["results"]["places"]["sample_len"] == 9
    samples = read_samples(tmp_path / "out", "places")
    assert [sample["acc"] for sample in samples] == expected["places/acc"]
    model = load_plain(source.folder)
    likelihoods = [plain_likelihood(model, prompt(QUESTIONS[0]), f" {choice}") for choice in CHOICES]
    assert [float(pair[0]) for pair in samples[0]["filtered_resps"]] == pytest.approx(likelihoods, abs=1e-4, rel=1e-4)


def test_a_finished_folder_is_read_and_one_of_other_inputs_is_made_again(
    source: Source, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = evaluate_harness(source, ["few_places"], out, task_folder=folder, limit=2)
    assert {metric.n for metric in first.metrics.values()} == {2}
    written = (out / RESULTS_FILE).stat().st_mtime_ns
    again = evaluate_harness(source, ["few_places"], out, task_folder=folder, limit=2)
    assert again == load_report(out) == first
    assert (out / RESULTS_FILE).stat().st_mtime_ns == written
    rows = (folder / "few_places.jsonl").read_text().splitlines()
    (folder / "few_places.jsonl").write_text(rows[0] + "\n")
    fewer = evaluate_harness(source, ["few_places"], out, task_folder=folder, limit=2)
    assert {metric.n for metric in fewer.metrics.values()} == {1}
    assert {metric.stderr for metric in fewer.metrics.values()} == {None}


def test_answers_are_greedy_and_nothing_but_progress_is_told(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_plain(source.folder)
    answers = [plain_answer(model, prompt(question)) if i % 3 else "?" for i, question in enumerate(QUESTIONS)]
    folder, told = write_tasks(tmp_path, answers), list[Any]()
    loggers = [logging.getLogger(name) for name in ("", "lm_eval", "transformers", "datasets", "msa_lite")]
    before = [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers]

    def tell(*step: Any) -> None:
        told.append(step)
        sys.stdout.write(f"{step[0]}\n")

    report = evaluate_harness(source, ["copies"], tmp_path / "out", task_folder=folder, progress=tell)
    assert report.metrics["copies/exact_match"].value == pytest.approx(6 / 9)  # three of nine are "?"
    assert capsys.readouterr().out.splitlines() == [label for label, _, _ in told]
    assert [step for step in told if step[0] == "lm-eval: tasks"] == [("lm-eval: tasks", i, 1) for i in (0, 1)]
    assert [step for step in told if step[0] == "lm-eval: answers"] == [
        ("lm-eval: answers", i + 1, 9) for i in range(9)
    ]
    assert [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers] == before


def test_groups_come_before_their_members_with_the_direction_of_these(
    source: Source, folder: Path, tmp_path: Path
) -> None:
    report = evaluate_harness(source, ["outer", "copies"], tmp_path / "out", task_folder=folder, limit=5)
    order = list(dict.fromkeys(name.partition("/")[0] for name in report.metrics))
    assert order == ["outer", "copies", "inner", "places", "few_places"]
    outer, inner, few, many = (report.metrics[f"{n}/acc"] for n in ("outer", "inner", "few_places", "places"))
    assert (few.n, many.n, outer.n, outer.higher_is_better) == (3, 5, 8, True)
    assert inner.value == few.value is not None
    assert many.value is not None
    assert outer.value == pytest.approx((3 * few.value + 5 * many.value) / 8)


def test_an_adapter_is_scored_on_its_model_with_the_tokenizer_of_that(
    source: Source, folder: Path, make_adapter: Make, tmp_path: Path
) -> None:
    from peft import PeftModel

    made = edit_adapter(
        make_adapter("llama", scale=0.3), tmp_path / "adapter", base_model_name_or_path=str(source.folder)
    )
    report = evaluate_harness(fetch(str(made)), ["places"], tmp_path / "out", task_folder=folder)
    right, _ = plain_choices(PeftModel.from_pretrained(load_plain(source.folder), str(made)).eval())
    assert report.metrics["places/acc"].value == pytest.approx(statistics.mean(right))


def test_metrics_that_are_no_numbers_or_leave_rows_out_say_so() -> None:
    rows = [{"filter": "none", "metrics": ["f1"]}, {"filter": "none", "metrics": []}]
    rows += [{"filter": "strict", "metrics": ["f1"]}] * 2
    scores = {"name": "t", "alias": "t", "sample_len": 2, "f1,none": float("nan"), "f1_stderr,none": "N/A"}
    results = {
        "results": {"t": scores | {"f1,strict": 0.25, "f1_stderr,strict": 0.1}},
        "group_subtasks": {},
        "samples": {"t": rows},
        "higher_is_better": {"t": {"f1": None}},
    }
    assert aggregate(results, ["t"]) == {
        "t/f1": Metric(None, 1, None, None, skipped=1, note="lm_eval gave nan"),
        "t/f1,strict": Metric(0.25, 2, 0.1, None),
    }


@pytest.mark.parametrize(
    ("change", "tasks", "error", "message"),
    [
        ({"generation_kwargs": {"max_gen_toks": 400}}, ["copies"], StageError, "must be less than model's maximum"),
        (
            {"dataset_kwargs": {"data_files": "absent.jsonl"}},
            ["copies"],
            DataError,
            "copies: lm_eval cannot load .*abs",
        ),
        ({"unsafe_code": True}, ["copies"], UsageError, "copies: would run programs"),
        ({}, ["outer", "places"], UsageError, "found in both 'outer' and 'places'"),
    ],
)
def test_what_fails_leaves_no_folder(
    source: Source, folder: Path, tmp_path: Path, change: dict[str, Any], tasks: list[str],
    error: type[Exception], message: str,
) -> None:  # fmt: skip
    path = folder / "copies.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(error, match=message):
        evaluate_harness(source, tasks, tmp_path / "out", task_folder=folder)
    assert not list(tmp_path.glob("out*"))


def test_every_setting_reaches_the_harness(
    source: Source, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def evaluate(**settings: Any) -> None:
        given.update(settings)
        raise RuntimeError("that will do")

    monkeypatch.setattr("lm_eval.simple_evaluate", evaluate)
    options = {"limit": 5, "few_shot": 2, "seed": 11}
    with pytest.raises(StageError, match="that will do"):
        evaluate_harness(source, ["places"], tmp_path / "out", task_folder=folder, **options)
    seeds = {key: value for key, value in given.items() if key.endswith("_seed")}
    assert seeds == dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), 11)
    assert (given["limit"], given["num_fewshot"]) == (5, 2)
    assert [task.config.task for task in given["tasks"]] == ["places"]


def test_several_processes_are_refused(
    source: Source, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="lm-eval runs in one process; start it without"):
        evaluate_harness(source, ["few_places"], tmp_path / "out", task_folder=folder, limit=1)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_names_are_looked_up_before_anything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tasks(["places", "outer"], folder)
    check_tasks(["mmlu", "hellaswag", "places"], folder)
    with pytest.raises(UsageError, match=r"helaswag .did you mean 'hellaswag'") as caught:
        check_tasks(["helaswag", "hellaswag", "plces"], folder)
    assert "plces (did you mean 'places'?)" in str(caught.value)
    with pytest.raises(UsageError, match="no tasks"):
        check_tasks([])
    with pytest.raises(UsageError, match="no such folder of tasks"):
        check_tasks(["places"], folder / "elsewhere")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match=r"pip install .*\[lm-eval\]"):
        check_tasks(["places"], folder)
