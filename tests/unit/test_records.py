"""Records are the same in batches of any size, in any order, and after any stop; nothing is asked twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from msa_lite.data import IGNORE, Example, Row
from msa_lite.evals.benchmarks.benchmark import Benchmark, Record
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine.models import Runner, load_model
from msa_lite.evals.scores import records as records_module
from msa_lite.evals.scores.records import (
    ANSWERS_FILE,
    collect_records,
    open_answers,
    read_records,
    run_items,
    write_records,
)
from msa_lite.io.launch.crew import Ranks, stand_alone
from msa_lite.io.weights.hub import Source, fetch
from tests.support.benchmark_data import make_prompter
from tests.support.plain import WIDE, WINDOW, Crowded, plain_answer, plain_tokens, wide_model
from tests.support.records import differences

ROWS = [
    *(Row(i, "Where is it? " * (1 + i % 3), f"It is over there at {i}." * (1 + i % 2)) for i in range(5)),
    Row(5, "Which sign ends a line?", "This one: \u2028 or this: \u0085 or \r\n"),
]

DISTINCT = 6 + 4  # texts and prompts: some prompts are equal, and the rows to keep are among those to forget


@pytest.fixture(scope="module")
def source(make_checkpoint: Callable[..., Path]) -> Source:
    return fetch(str(make_checkpoint("llama", max_position_embeddings=512, **WIDE)))


@pytest.fixture(scope="module")
def qa() -> Benchmark:
    return load_qa({"forget": ROWS, "retain": ROWS[:2]}, make_prompter(), 6)


@pytest.mark.parametrize("about", ["", "Ada"])
def test_a_record_says_whom_it_is_about(source: Source, about: str, tmp_path: Path) -> None:
    rows = [replace(ROWS[0], about=about), Row(7, text="A text of some words.", about=about)]
    before = [replace(row, about="") for row in rows]
    old, new = (load_qa({"forget": part}, make_prompter(), 2) for part in (before, rows))
    records = collect_records(source, new, open_answers(tmp_path))["forget"]
    assert [record.get("subject", "") for record in records] == [about, about]
    assert (old.describe() == new.describe()) == (about == "")
    assert old.sets["forget"].digest() == new.sets["forget"].digest()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the answers of an undisturbed run."""
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def wanted(source: Source, qa: Benchmark, kept: Path) -> dict[str, list[Record]]:
    return collect_records(source, qa, open_answers(kept))


def stop(source: Source, benchmark: Benchmark, folder: Path, after: int) -> None:
    """Collect records until so many answers are there, in batches of one."""

    def progress(label: str, done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msa_lite.evals.engine.models._START_TOKENS", {"cpu": 1, "cuda": 1})
        with pytest.raises(KeyboardInterrupt):
            collect_records(source, benchmark, open_answers(folder), progress=progress)


def count_asked(source: Source, benchmark: Benchmark, folder: Path) -> tuple[int, dict[str, list[Record]]]:
    """Return how many answers a model had still to give, and the records."""
    steps = [0]
    records = collect_records(source, benchmark, open_answers(folder), progress=lambda *step: steps.append(step[2]))
    return steps[-1], records


def assert_same(found: Mapping[str, Sequence[Record]], wanted: Mapping[str, Sequence[Record]]) -> None:
    """Equal to 1e-5, whatever numbers stand in the records."""
    assert differences(found, wanted, 1e-5) == set()


def test_a_record_repeats_its_item_and_says_what_the_model_said(wanted: dict[str, list[Record]]) -> None:
    assert {name: [record["index"] for record in records] for name, records in wanted.items()} == {
        "forget": [0, 1, 2, 3, 4, 5], "retain": [0, 1],
    }  # fmt: skip
    for record, row in zip(wanted["forget"], ROWS, strict=True):
        assert (record["question"], record["answer"]) == (row.question, row.answer)
        assert record["scores"]["answer"][0]["probability"] == record["probability"]
        assert isinstance(record["generated"], str)


@pytest.mark.parametrize("tokens", [1, 64, 10**6])
def test_batches_and_order_leave_no_trace(
    tokens: int, source: Source, qa: Benchmark, wanted: dict[str, list[Record]], tmp_path: Path
) -> None:
    runner = Runner(load_model(source.folder), tokens)
    assert_same({name: run_items(runner, qa, name) for name in qa.sets}, wanted)
    turned = {name: replace(items, items=list(items.items)[::-1]) for name, items in qa.sets.items()}
    backwards = {name: run_items(runner, replace(qa, sets=turned), name)[::-1] for name in qa.sets}
    assert_same(backwards, wanted)


def test_what_a_model_recites_is_not_generated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompter = wide_model("llama"), make_prompter()
    # Its own answers as those of the rows, of one only the beginning: random letters are not read as they were said.
    items = load_qa({"forget": ROWS[:3]}, prompter, 6).sets["forget"].items
    recited = []
    for item, count in zip(items, (6, 6, 3), strict=True):
        assert item.prompt
        ids = item.prompt + plain_tokens(model, item.prompt, 6)[:count]
        text = Example(item.index, ids, [IGNORE] * len(item.prompt) + ids[len(item.prompt) :])
        recited.append(replace(item, texts={"answer": (text,)}))
    qa = load_qa({"forget": ROWS[:3]}, prompter, 6)
    qa = replace(qa, sets={"forget": replace(qa.sets["forget"], items=recited)})
    with Crowded(model) as seen:
        found = run_items(Runner(model, batched=True), qa, "forget")
    steps = [shape for shape in seen.shapes if shape[1] == 1]
    assert steps == [(1, 1)] * 2  # of the three new tokens of one row, the first follows from reading it
    monkeypatch.setattr(records_module, "known_beginning", lambda *pair: [])
    with Crowded(model) as seen:
        assert run_items(Runner(model, batched=True), qa, "forget") == found
    assert len([shape for shape in seen.shapes if shape[1] == 1]) == 5


def test_records_survive_being_written(wanted: dict[str, list[Record]], tmp_path: Path) -> None:
    records = [*wanted["forget"], {"index": 9, "generated": "\u2028 \u0085 \r\n \x0b 😀"}]
    write_records(tmp_path / "a.jsonl", records)
    assert read_records(tmp_path / "a.jsonl") == records


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_stopped_run_goes_on_with_the_answers_that_are_missing(
    after: int, source: Source, qa: Benchmark, wanted: dict[str, list[Record]], tmp_path: Path
) -> None:
    stop(source, qa, tmp_path, after)
    asked, found = count_asked(source, qa, tmp_path)
    assert asked == DISTINCT - after
    assert_same(found, wanted)


def test_a_kill_while_an_answer_is_written_leaves_none_of_it(
    source: Source, qa: Benchmark, wanted: dict[str, list[Record]], tmp_path: Path
) -> None:
    code = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA cache_size = 1")  # so that the file itself is written before the end
database.execute("BEGIN")
database.execute("DELETE FROM kept")
database.executemany("INSERT INTO kept VALUES (?, ?)", [(str(n), "{" * 9999) for n in range(99)])
os._exit(9)
"""
    stop(source, qa, tmp_path, 7)
    before = (tmp_path / ANSWERS_FILE).read_bytes()
    subprocess.run([sys.executable, "-c", code, str(tmp_path / ANSWERS_FILE)], check=False)
    assert (tmp_path / ANSWERS_FILE).read_bytes() != before
    asked, found = count_asked(source, qa, tmp_path)
    assert asked == DISTINCT - 7
    assert_same(found, wanted)


def test_processes_share_the_work_and_each_sees_what_the_others_have(
    source: Source, qa: Benchmark, wanted: dict[str, list[Record]], tmp_path: Path
) -> None:
    met: list[int] = []
    helper = Ranks(1, 2, lambda: met.append(1))
    assert collect_records(source, qa, open_answers(tmp_path), helper) == {}
    assert len(met) == 2
    asked, found = count_asked(source, qa, tmp_path)
    assert asked == DISTINCT / 2
    assert_same(found, wanted)


def test_what_is_there_needs_no_model(
    source: Source, qa: Benchmark, wanted: dict[str, list[Record]], kept: Path, tmp_path: Path
) -> None:
    assert collect_records(replace(source, folder=tmp_path / "nowhere"), qa, open_answers(kept)) == wanted


def test_rows_that_were_asked_elsewhere_are_not_asked_again(
    source: Source, wanted: dict[str, list[Record]], kept: Path, tmp_path: Path
) -> None:
    part = load_qa({"others": [replace(ROWS[4], index=9), Row(8, "New?", "Yes."), ROWS[1]]}, make_prompter(), 6, "part")
    shutil.copy(kept / ANSWERS_FILE, tmp_path)
    asked, found = count_asked(source, part, tmp_path)
    assert asked == 2
    assert found["others"][0] == wanted["forget"][4] | {"index": 9}
    assert_same(found, collect_records(source, part, open_answers(tmp_path / "fresh")))


@pytest.mark.parametrize(
    ("change", "asked"),
    [("answer", 1), ("system", 2), ("length", 1), ("z", 1), ("es_floor", 1), ("hidden", 2), ("model", 2)],
)
def test_rows_that_were_asked_otherwise_are_asked_again(
    change: str, asked: int, source: Source, wanted: dict[str, list[Record]], kept: Path, tmp_path: Path
) -> None:
    row = {"answer": replace(ROWS[0], answer="Another."), "system": replace(ROWS[0], system="Be brief.")}
    qa = load_qa({"forget": [row.get(change, ROWS[0])]}, make_prompter(), 7 if change == "length" else 6)
    if change == "z":
        qa = replace(qa, sets={"forget": replace(qa.sets["forget"], with_z=True)})
    switches = {"es_floor": {"es_floor"}, "hidden": {"mask_eq_pad"}}
    qa = replace(qa, compat=frozenset(switches.get(change, ())))
    model = replace(source, revision="sha256:0") if change == "model" else source
    model = replace(model, seen={}) if change == "model" else model
    shutil.copy(kept / ANSWERS_FILE, tmp_path)
    assert count_asked(model, qa, tmp_path)[0] == asked


@pytest.mark.parametrize("kind", ["olmo2", "gpt2"])
def test_a_prompt_that_fills_the_window_is_skipped_and_one_token_less_is_answered(kind: str, qa: Benchmark) -> None:
    items = qa.sets["retain"].items
    prompts = [
        ((item.prompt or []) * WINDOW)[:length] for item, length in zip(items, (WINDOW, WINDOW - 1), strict=True)
    ]
    models = (wide_model(kind, seed) for seed in range(9))
    model = next(model for model in models if plain_answer(model, qa.tokenizer, prompts[1], 1))
    asked = [replace(item, texts={}, prompt=prompt) for item, prompt in zip(items, prompts, strict=True)]
    filled = replace(qa, sets={"retain": replace(qa.sets["retain"], items=asked)})
    whole, less = run_items(Runner(model), filled, "retain")
    assert (whole["generated"], "longer than the 512 tokens" in whole["skipped"]) == (None, True)
    assert less["generated"] == plain_answer(model, qa.tokenizer, prompts[1], 1)
    assert less["generated"] != ""
    assert "skipped" not in less


@pytest.mark.parametrize(
    ("visible", "count", "wanted"),
    [
        (None, 4, "3"),
        (None, 2, "1"),  # two processes a GPU, none on one that is not there
        (None, 0, None),
        ("4,GPU-7", 2, "GPU-7"),
        ("", 0, ""),  # the user has switched GPUs off
        ("-1", 0, "-1"),
    ],
)
def test_a_process_that_stands_alone_takes_a_gpu_that_is_there(
    visible: str | None, count: int, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = {"RANK": "7", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    group |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert stand_alone() == Ranks(7, 8)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == wanted
    assert group.keys() & os.environ.keys() == {"LOCAL_WORLD_SIZE"}  # with how many it shares the RAM
    assert stand_alone() == Ranks()  # and again: nothing left to leave
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == wanted


# Texts of one's own in the qa benchmark: what is measured of them, beside questions and alone.


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
