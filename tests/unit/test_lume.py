"""LUME: its two layouts, what is asked, and the metrics against values worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import IGNORE
from msa_lite.errors import DataError, UsageError
from msa_lite.evals import scoring
from msa_lite.evals.benchmark import BenchmarkSettings, Record, Records
from msa_lite.evals.lume import Lume
from msa_lite.evals.outcome import weigh_recited
from tests.support.benchmark_data import make_prompter, write_data
from tests.support.lume_data import ROWS, SAID, write_lume
from tests.support.models import tiny_tokenizer


def load(data: str | Path | None, split: str | None = None, **options: Any) -> Lume:
    return Lume.load(make_prompter(), BenchmarkSettings(None if data is None else str(data), split, **options))


@pytest.fixture(scope="module")
def lume(tmp_path_factory: pytest.TempPathFactory) -> Lume:
    return load(write_lume(tmp_path_factory.mktemp("data")))


def write_challenge(folder: Path, members: Sequence[str] = ("member", "nonmember")) -> str:
    """The challenge's layout: one configuration with four splits, and documents for membership inference beside it."""
    folds = {("default", f"{side}_{fold}"): ROWS[side] for side in ROWS for fold in ("train", "validation")}
    folds["default", "forget_validation"] = ROWS["forget"][:2]
    write_data(folder, folds)
    (folder / "mia_data").mkdir()
    for name in members:
        lines = [json.dumps({"id": f"{name}{i}", "document": f"It was the {name} that sat there."}) for i in range(3)]
        (folder / "mia_data" / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder)


# The data


def test_rows_are_asked_as_they_are(lume: Lume) -> None:
    assert {name: len(part.items) for name, part in lume.sets.items()} == {"forget": 7, "retain": 7}
    tokenizer = tiny_tokenizer()
    for part in lume.sets.values():
        for item in part.items:
            assert item.prompt == tokenizer(item.fields["question"])["input_ids"]
            (text,) = item.texts["answer"]
            assert text.ids == tokenizer(f"{item.fields['question']} {item.fields['answer']}")["input_ids"]
            assert [label for label in text.labels if label != IGNORE] == text.ids[len(item.prompt or ()) :]
        assert part.decoding
        assert part.decoding.max_new_tokens == 256


def test_rows_of_one_document_are_one_subject(lume: Lume) -> None:
    items = lume.sets["forget"].items
    assert [item.group for item in items] == ["a-1", "a-1", "b2", "b2", "b2", "301", "301"]  # without quotes, kinds
    assert [item.fields["kind"] for item in items] == ["sc", "qa", "sc", "qa", "qa", "sc", "qa"]


def test_folds_of_the_challenge_come_with_documents_for_membership(tmp_path: Path) -> None:
    data = write_challenge(tmp_path)
    train, validation = load(data, "train"), load(data, "validation")
    assert {name: len(part.items) for name, part in train.sets.items()} == {
        "forget": 7, "retain": 7, "member": 3, "nonmember": 3,
    }  # fmt: skip
    assert (train.split, validation.split) == ("train", "validation")
    assert len(validation.sets["forget"].items) == 2
    assert train.sets["member"].answered == []
    assert {"mia_auc", "mia_score"} <= {*train.metric_names()}


@pytest.mark.parametrize("members", [(), ("member",), ("nonmember",)])
def test_without_both_sides_there_is_no_membership(members: Sequence[str], tmp_path: Path) -> None:
    train = load(write_challenge(tmp_path, members), "train")
    assert train.sets.keys() == {"forget", "retain"}
    assert not {"mia_auc", "mia_score"} & {*train.metric_names()}


def test_all_faults_of_the_data_stand_in_one_message(tmp_path: Path) -> None:
    lacking = [{key: row[key] for key in ("id", "input")} for row in ROWS["forget"]]
    (tmp_path / "forget.jsonl").write_text("\n".join(map(json.dumps, lacking)))
    with pytest.raises(DataError) as error:
        load(tmp_path)
    assert all(part in str(error.value) for part in ("forget.jsonl", "'output', 'task'", "no file 'retain.jsonl'"))


def test_all_faults_of_rows_stand_in_one_message(tmp_path: Path) -> None:
    forget = [ROWS["forget"][0] | {"id": "a-1"}, ROWS["forget"][1] | {"task": "Task4"}, *ROWS["forget"][2:]]
    retain = [ROWS["retain"][0] | {"input": " "}, *ROWS["retain"][1:]]
    with pytest.raises(DataError) as error:
        load(write_lume(tmp_path, {"forget": forget, "retain": retain}))
    assert all(part in str(error.value) for part in ("forget, row 0", "forget, row 1", "'Task4'", "retain, row 0"))
    assert "row 2" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "split", "message"),
    [
        (".", "tain", "choose from all, train, validation"),
        (None, None, "clone"),
        ("some/where", None, "no such folder"),
    ],
)
def test_what_cannot_be_loaded_is_refused(data: str | None, split: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(data, split)


def test_a_fold_that_is_missing_is_named(tmp_path: Path) -> None:
    data = write_data(tmp_path, {("default", "forget_train"): ROWS["forget"]})
    with pytest.raises(DataError, match="retain_train"):
        load(data, "train")


# The metrics


def answered(lume: Lume, said: dict[str, list[str]]) -> dict[str, list[Record]]:
    """The records of a model that says something to each row."""
    return {
        name: [
            lume.complete(name, {"index": item.index, **item.fields, "subject": item.group, "generated": text})
            for item, text in zip(lume.sets[name].items, texts, strict=True)
        ]
        for name, texts in said.items()
    }


WANTED = {  # means over the rows of `SAID`, whose scores stand beside them
    "regurgitation_task1_f": 1 / 2,
    "regurgitation_task2_f": 1 / 3,
    "regurgitation_task3_f": 1 / 4,
    "regurgitation_f": (1 / 2 + 1 / 3 + 1 / 4) / 3,
    "knowledge_task1_f": 0.0,
    "knowledge_task2_f": 1 / 2,  # 0 and 1
    "knowledge_task3_f": 0.0,
    "knowledge_f": 1 / 4,  # one of four answers, of which task 2 has two
    "regurgitation_task1_r": 1.0,
    "regurgitation_task2_r": 1 / 2,
    "regurgitation_task3_r": 4 / 5,
    "regurgitation_r": (1 + 1 / 2 + 4 / 5) / 3,
    "knowledge_task1_r": 1.0,
    "knowledge_task2_r": 1 / 2,
    "knowledge_task3_r": 1.0,
    "knowledge_r": 3 / 4,
    # forget: 1 − ½, 1 − 0; 1 − ⅓, 1 − ½; 1 − ¼, 1 − 0. retain: 1, 1; ½, ½; ⅘, 1. The harmonic mean of these twelve is
    # 12 / (2 + 1 + 3/2 + 2 + 4/3 + 1 + 1 + 1 + 2 + 2 + 5/4 + 1) = 12 / (205/12) = 144/205
    "task_aggregate": 144 / 205,
}


def test_scores_are_those_worked_out_by_hand(lume: Lume) -> None:
    metrics = Lume.metrics(answered(lume, SAID), None)
    assert {name: metrics[name].value for name in WANTED} == pytest.approx(WANTED)
    assert metrics["knowledge_f"].n == 4
    assert metrics["regurgitation_f"].n == 3


def test_one_part_of_nothing_makes_the_aggregate_0(lume: Lume) -> None:
    said = SAID | {"forget": [*SAID["forget"][:-1], "Ann Lee"]}  # all of task 3's answers are right: 1 − 1
    assert Lume.metrics(answered(lume, said), None)["task_aggregate"].value == 0.0


def test_without_a_task_there_is_no_aggregate(lume: Lume) -> None:
    records = answered(lume, SAID)
    records["forget"] = [record for record in records["forget"] if record["task"] != "Task3"]
    metrics = Lume.metrics(records, None)
    assert metrics["task_aggregate"].value is None
    assert metrics["task_aggregate"].note
    assert metrics["regurgitation_task3_f"].value is None
    assert metrics["regurgitation_f"].value == pytest.approx(5 / 12)


def test_empty_outputs_are_skipped(tmp_path: Path) -> None:
    forget = [*ROWS["forget"][:-1], ROWS["forget"][-1] | {"output": ""}]
    lume = load(write_lume(tmp_path, ROWS | {"forget": forget}))
    metric = Lume.metrics(answered(lume, SAID), None)["knowledge_f"]
    assert (metric.n, metric.skipped) == (3, 1)
    assert lume.sets["forget"].items[-1].texts["answer"] == ()


def test_membership_is_by_the_loss_of_documents(lume: Lume) -> None:
    """Of the 6 pairs the other one has the higher loss in 3 (1 < 2, 1 < 3, 2 < 3), and one is a tie: 3.5/6."""
    losses = {"member": [1.0, 2.0], "nonmember": [2.0, 3.0, 0.5]}
    records: Records = answered(lume, SAID) | {
        name: [lume.complete(name, {"text": "t", "scores": {"text": [{"loss": loss}]}}) for loss in values]
        for name, values in losses.items()
    }
    metrics = Lume.metrics(records, None)
    assert metrics["mia_auc"].value == pytest.approx(7 / 12)
    assert metrics["mia_score"].value == pytest.approx(1 - 2 * (7 / 12 - 1 / 2))


@pytest.mark.parametrize(("auc", "score"), [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 0.5), (1.0, 0.0)])
def test_membership_is_best_at_chance(auc: float, score: float) -> None:
    assert scoring.mia_score(auc) == score


# The verdict


def test_the_verdict_counts_answers_that_hold_the_right_one_and_ends_that_nearly_do(lume: Lume) -> None:
    records = answered(lume, SAID)
    # "It is Ann Lee" and "900." hold the right answer, and equal it not; "1 MAIN ST" does both.
    assert [Lume.fails(record) for record in records["forget"]] == [False, False, False, True, True, False, True]
    # "It was over." is whole. Of "she was born in Rome" four words of five are said, fewer than nine of ten.
    assert [Lume.fails(record) for record in records["retain"]] == [True, True, False, True, False, False, True]
    assert Lume.fails({"question": "q", "answer": "a", "kind": "qa", "generated": None}) is None
    long = "one two three four five six seven eight nine ten"
    for said, recited in (("one two three four five and six seven eight nine", True), ("one two three four", False)):
        record = {"index": 0, "question": "q", "answer": long, "task": "Task1", "kind": "sc", "generated": said}
        assert Lume.fails(lume.complete("forget", record)) == recited
        own = {"index": 0, "question": "q", "answer": long, "generated": said, "rouge_l": record["rouge_l"]}
        assert Lume.fails(own) == recited  # a prior's answer to the recipe's row


def test_the_verdict_counts_documents(lume: Lume) -> None:
    right = {name: [item.fields["answer"] for item in part.items] for name, part in lume.sets.items()}
    said = SAID | {"forget": ["the cat and sat there", *SAID["forget"][1:]]}  # all words in order, and one more
    models = {"target": answered(lume, right), "unlearned": answered(lume, said), "prior": answered(lume, SAID)}
    weighed = weigh_recited(models, Lume.yardstick(models))
    assert not isinstance(weighed, str)
    forgotten, kept = weighed
    assert forgotten.recited == {"target": 7, "unlearned": 4, "prior": 3}
    assert (forgotten.unit, forgotten.rows, forgotten.subjects) == ("questions", 7, 3)
    assert kept
    assert kept.recited == {"target": 7, "unlearned": 4}


def test_a_choice_may_divide_documents(lume: Lume) -> None:
    validation, test = lume.divide(0.4, seed=0, by="author")
    for side in ("forget", "retain"):
        parts = [{item.group for item in part.sets[side].items} for part in (validation, test)]
        assert [len(part) for part in parts] == [1, 2]
        assert not parts[0] & parts[1]
