"""Records are the same in batches of any size, in any order, and after any number of stops; nothing is run twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.data import IGNORE, Example, Row
from msa_lite.evals import records as records_module
from msa_lite.evals.benchmark import Benchmark, Record
from msa_lite.evals.models import Runner, load_model
from msa_lite.evals.qa import Qa, load_qa
from msa_lite.evals.records import collect_records, read_records, run_items, take_rows, write_records
from msa_lite.io.launch.crew import Ranks, stand_alone
from msa_lite.io.weights.hub import Source, fetch
from tests.support.benchmark_data import make_prompter
from tests.support.plain import WIDE, WINDOW, Crowded, plain_answer, plain_tokens, wide_model

ROWS = [
    *(Row(i, "Where is it? " * (1 + i % 3), f"It is over there at {i}." * (1 + i % 2)) for i in range(5)),
    Row(5, "Which sign ends a line?", "This one: \u2028 or this: \u0085 or \r\n"),
]


@pytest.fixture(scope="module")
def source(make_checkpoint: Callable[..., Path]) -> Source:
    return fetch(str(make_checkpoint("llama", max_position_embeddings=512, **WIDE)))


@pytest.fixture(scope="module")
def qa() -> Qa:
    return load_qa({"forget": ROWS, "retain": ROWS[:2]}, make_prompter(), 6)


@pytest.mark.parametrize("about", ["", "Ada"])
def test_a_record_says_whom_it_is_about(source: Source, about: str, tmp_path: Path) -> None:
    rows = [replace(ROWS[0], about=about), Row(7, text="A text of some words.", about=about)]
    before = [replace(row, about="") for row in rows]
    old, new = (load_qa({"forget": part}, make_prompter(), 2) for part in (before, rows))
    records = collect_records(source, new, tmp_path)["forget"]
    assert [record.get("subject", "") for record in records] == [about, about]
    assert (old.describe() == new.describe()) == (about == "")
    assert old.sets["forget"].digest() == new.sets["forget"].digest()


@pytest.fixture(scope="module")
def wanted(source: Source, qa: Qa, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Record]]:
    return collect_records(source, qa, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def part(source: Source, qa: Qa, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The part file of the forget set when all but its last line is there."""
    folder = tmp_path_factory.mktemp("stopped")
    stop(source, qa, folder, after=11)
    return (folder / "forget.0.part").read_bytes()


def stop(source: Source, benchmark: Benchmark, folder: Path, after: int) -> None:
    """Collect records until so many items are done, in batches of one."""

    def progress(label: str, done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msa_lite.evals.models._START_TOKENS", {"cpu": 1, "cuda": 1})
        with pytest.raises(KeyboardInterrupt):
            collect_records(source, benchmark, folder, progress=progress)


def assert_same(found: Mapping[str, Sequence[Record]], wanted: Mapping[str, Sequence[Record]]) -> None:
    """Equal to 1e-5, whatever numbers stand in the records."""
    assert list(found) == list(wanted)
    for name, records in wanted.items():
        for one, other in zip(found[name], records, strict=True):
            assert_close(one, other)


def assert_close(one: Any, other: Any) -> None:
    if isinstance(other, Mapping):
        assert list(one) == list(other)
        for key, value in other.items():
            assert_close(one[key], value)
    elif isinstance(other, list):
        for a, b in zip(one, other, strict=True):
            assert_close(a, b)
    else:
        assert one == (pytest.approx(other, abs=1e-5, rel=1e-5) if isinstance(other, float) else other)


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
    tokens: int, source: Source, qa: Qa, wanted: dict[str, list[Record]], tmp_path: Path
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


@settings(max_examples=12)
@given(place=st.floats(0, 1))
def test_a_kill_at_any_byte_of_a_part_file_costs_what_was_not_written(
    place: float,
    part: bytes,
    source: Source,
    qa: Qa,
    wanted: dict[str, list[Record]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    cut = round(place * len(part))
    folder = tmp_path_factory.mktemp("killed")
    (folder / "forget.0.part").write_bytes(part[:cut])
    whole = [line for line in part[:cut].split(b"\n") if line.endswith(b"}") and b'"index"' in line and is_json(line)]
    steps: list[tuple[int, int]] = []
    found = collect_records(source, qa, folder, progress=lambda label, done, total: steps.append((done, total)))
    assert_same(found, wanted)
    assert steps[-1] == (2 * 6 + 2 * 2 - len(whole),) * 2
    assert sorted(path.name for path in folder.iterdir()) == ["forget.jsonl", "retain.jsonl"]


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("after", [1, 7, 13])
def test_a_stopped_run_goes_on_with_the_items_that_are_missing(
    after: int, source: Source, qa: Qa, wanted: dict[str, list[Record]], tmp_path: Path
) -> None:
    stop(source, qa, tmp_path, after)
    # A mark in what is there, to see that it is not made anew.
    for path in tmp_path.glob("*.part"):
        lines = [json.loads(line) for line in path.read_text().split("\n") if line]
        marked = [line | {"mark": True} for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in marked))
    steps: list[tuple[str, int, int]] = []
    found = collect_records(source, qa, tmp_path, label="x", progress=lambda *step: steps.append(step))
    assert steps[-1] == ("x", 16 - after, 16 - after)
    kept = [record for records in found.values() for record in records if record.pop("mark", False)]
    assert kept
    assert_same(found, wanted)


def test_the_work_of_other_processes_is_taken_up(
    source: Source, qa: Qa, wanted: dict[str, list[Record]], part: bytes, tmp_path: Path
) -> None:
    lines = part.strip().split(b"\n")
    for rank in range(3):  # as three processes leave it that were killed
        (tmp_path / f"forget.{rank}.part").write_bytes(b"\n".join(lines[rank:9:3]) + b'\n{"index": 3, "sco')
    steps: list[int] = []
    found = collect_records(source, qa, tmp_path, progress=lambda label, done, total: steps.append(total))
    assert_same(found, wanted)
    assert steps[-1] == 16 - 9


def test_what_is_there_needs_no_model(source: Source, qa: Qa, wanted: dict[str, list[Record]], tmp_path: Path) -> None:
    for name, records in wanted.items():
        write_records(tmp_path / f"{name}.jsonl", records)
    nowhere = Source("nowhere", tmp_path / "nowhere", "sha256:0")
    assert_same(collect_records(nowhere, qa, tmp_path), wanted)


def test_rows_that_were_asked_elsewhere_are_taken_and_the_others_run(
    source: Source, wanted: dict[str, list[Record]], tmp_path: Path
) -> None:
    part = load_qa({"forget": [replace(ROWS[4], index=9), Row(8, "New?", "Yes."), ROWS[1]]}, make_prompter(), 6, "part")
    fresh = collect_records(source, part, tmp_path)
    taken = tmp_path / "taken"
    taken.mkdir()
    for _ in range(2):  # as after a stop
        take_rows(part, "forget", wanted["forget"], taken)
    lines = [json.loads(line) for line in (taken / "forget.taken.part").read_text().splitlines() if line]
    assert [(line["index"], "scores" in line) for line in lines] == [(9, True), (9, False), (1, True), (1, False)]
    assert_same(collect_records(source, part, taken), {"forget": fresh["forget"]})
    assert [path.name for path in taken.iterdir()] == ["forget.jsonl"]


@pytest.mark.parametrize("change", ["text", "ends", "skipped", "system"])
def test_rows_that_were_asked_otherwise_are_not_taken(
    change: str, wanted: dict[str, list[Record]], tmp_path: Path
) -> None:
    rows, records = ROWS[:1], [dict(wanted["forget"][0])]
    if change == "ends":  # a set of texts alone is scored to their ends
        rows, records = [Row(0, text="One.")], [{"index": 0, "text": "One.", "scores": {}}, *records]
    elif change == "text":
        rows = [replace(ROWS[0], answer="Another.")]
    elif change == "system":
        rows = [replace(ROWS[0], system="Be brief.")]
    else:
        records[0]["skipped"] = "too long"
    take_rows(load_qa({"forget": rows}, make_prompter(), 6), "forget", records, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_part_files_of_a_set_whose_records_are_written_do_not_stay(
    source: Source, qa: Qa, wanted: dict[str, list[Record]], part: bytes, tmp_path: Path
) -> None:
    write_records(tmp_path / "forget.jsonl", wanted["forget"])  # a kill came before its parts were removed
    for rank in range(2):
        (tmp_path / f"forget.{rank}.part").write_bytes(part)
    assert_same(collect_records(source, qa, tmp_path), wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["forget.jsonl", "retain.jsonl"]


@pytest.mark.parametrize("kind", ["olmo2", "gpt2"])
def test_a_prompt_that_fills_the_window_is_skipped_and_one_token_less_is_answered(kind: str, qa: Qa) -> None:
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
