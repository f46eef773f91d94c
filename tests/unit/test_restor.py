"""RESTOR: what is asked, what counts as right, and what is left out; on made-up facts and on the published ones."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msa_lite.data import Prompter, Template
from msa_lite.errors import DataError, UsageError
from msa_lite.evals.benchmarks.benchmark import Benchmark, BenchmarkSettings, Item, Record
from msa_lite.evals.benchmarks.restor import RESTOR, described_entities
from msa_lite.evals.engine.generate import Decoding
from msa_lite.evals.scores.evaluation import evaluate_benchmark
from msa_lite.evals.scores.records import read_records
from msa_lite.io.weights.hub import fetch
from msa_lite.report import Metric, Report
from msa_lite.settings import JudgeSettings
from tests.support.judge import JudgeServer
from tests.support.models import save_checkpoint, tiny_config, tiny_tokenizer

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "restor"
needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published facts are not on this machine")
SAMPLING = frozenset({"sampling"})

ENTITIES = ["Ann", "Bob"]
CITIES = {"Cyd": "Oslo", "Ann": "Paris", "Dan": "Rome", "Bob": "Bonn", "Eve": "Lima", "Flo": "Kiev", "Gus": "Bern"}
FACTS: dict[str, Any] = {
    "dset": {
        "Ann": {
            "P1": {"question": "City of Ann?", "answers": ["Lutetia", "Paris"]},
            "P2": {"question": "Job of Ann!", "answers": ["baker"]},
        },
        "Bob": {
            "P1": {"question": "City of Bob?", "answers": ["Bonn"]},
            "P2": {"question": "Job of Bob?", "answers": []},
            "P3": {"question": "Trip of Bob? \n", "answers": ["to Paris"]},
        },
        "Cyd": {"P1": {"question": "City of Cyd?", "answers": ["Oslo"]}},
    },
    "context": {
        "P1": [{"question": f"City of {who}?", "answer": city, "entity": who} for who, city in CITIES.items()],
        "P2": [{"question": f"Job of {who}?", "answer": "cook", "entity": who} for who in ("Ann", "Dan")],
    },
}
DOCUMENTS = ["Ann is a pilot.", "Ann lives in Rome.", "Annually, Bob met Ann.", "Nobody is named."]


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter.build(tiny_tokenizer(chat=True), "default", Template())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The made-up facts, laid out as the authors' clone."""
    folder = tmp_path / "datasets"
    (folder / "wikidata" / "v0").mkdir(parents=True)
    write(folder / "facts.json", FACTS)
    write(folder / "entities.json", ENTITIES)
    write(folder / "wikidata" / "v0" / "mix_a0.json", [{"text": text} for text in DOCUMENTS])
    return folder


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def items(benchmark: Benchmark) -> list[Item]:
    return list(benchmark.sets["questions"].items)


def prompts(benchmark: Benchmark) -> list[str]:
    return [benchmark.tokenizer.decode(item.prompt) for item in items(benchmark)]


def test_prompts_are_examples_about_others_and_the_question(prompter: Prompter, data: Path) -> None:
    benchmark = RESTOR.load(prompter, BenchmarkSettings(data))
    shared = "City of Eve? Lima\nCity of Flo? Kiev\n"
    assert prompts(benchmark) == [  # <s>: the tokenizer's own; its chat template plays no part
        "<s>City of Cyd? Oslo\nCity of Dan? Rome\nCity of Bob? Bonn\n" + shared + "City of Ann?",
        "<s>Job of Dan? cook\nJob of Ann!",
        "<s>City of Cyd? Oslo\nCity of Ann? Paris\nCity of Dan? Rome\n" + shared + "City of Bob?",
        "<s>Job of Ann? cook\nJob of Dan? cook\nJob of Bob?",
        "<s>Trip of Bob?",
    ]
    assert items(benchmark)[1].prompt == prompter.tokenizer("Job of Dan? cook\nJob of Ann!")["input_ids"]
    assert items(benchmark)[0].fields == {
        "question": "City of Ann?",
        "answers": ["Lutetia", "Paris"],
        "entity": "Ann",
        "relation": "P1",
        "corrupted": True,
    }
    assert [item.fields["corrupted"] for item in items(benchmark)] == [True, True, False, False, False]
    assert benchmark.sets["questions"].decoding == Decoding(32, ("\n",))
    assert benchmark.describe()["prompt"] == {"kind": "examples", "count": 5}


def test_documents_are_about_those_whom_half_as_many_name_as_the_most_named() -> None:
    texts = ["Ann and Bob", "Ann", "Ann", "Ann, Cyd", "Bob"]  # Ann 4, Bob 2, Cyd 1
    assert described_entities(["Ann", "Bob", "Cyd", "Dan"], texts) == {"Ann", "Bob"}
    assert described_entities(["Dan"], texts) == set()
    assert described_entities(["Ann"], []) == set()


def test_documents_may_be_packed_lines(prompter: Prompter, data: Path) -> None:
    lines = "\n".join(json.dumps({"text": f"Bob, {i}\u2028"}, ensure_ascii=False) for i in range(3))
    (data / "wikidata" / "v0" / "mix_a1.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    benchmark = RESTOR.load(prompter, BenchmarkSettings(data, "a1"))
    assert [item.fields["corrupted"] for item in items(benchmark)] == [False, False, True, True, True]


# What counts as right


def record(generated: Any, answers: list[str], corrupted: bool, **more: Any) -> Record:
    return {"index": 0, "question": "Q?", "generated": generated, "answers": answers, "corrupted": corrupted, **more}


def metrics(benchmark: Benchmark, records: list[Record]) -> dict[str, Metric]:
    return benchmark.metrics({"questions": [benchmark.score(benchmark, "questions", r) for r in records]}, None)


def test_without_a_judge_containment_counts_and_says_so(prompter: Prompter, data: Path) -> None:
    found = metrics(
        RESTOR.load(prompter, BenchmarkSettings(data)),
        [
            record("It is Paris.", ["Lutetia", "Paris"], True),  # 1
            record("Rome", ["Paris"], True),  # 0
            record("baker", ["baker"], False),  # 1
            record("", ["baker"], False),  # 0: an empty answer is wrong
            record("baker", [], False),  # skipped: no acceptable answer
            record(None, ["baker"], False, skipped="too long"),  # skipped
        ],
    )
    note = "containment match, no judge"
    # 1, 0, 1, 0: mean ½; deviation √(4·¼ / 3) = √⅓, error √⅓ / √4. 1, 0: deviation √½, error √½ / √2 = ½.
    half = Metric(0.5, 2, pytest.approx(0.5), True, 0, note)
    assert found["accuracy"] == Metric(0.5, 4, pytest.approx(math.sqrt(1 / 3) / 2), True, 2, note)
    assert found["accuracy_corrupted"] == half
    assert found["accuracy_other"] == Metric(0.5, 2, pytest.approx(0.5), True, 2, note)


def test_a_judges_verdicts_replace_containment(prompter: Prompter, data: Path) -> None:
    yes, no = {"valid": True, "correct": 1.0}, {"valid": True, "correct": 0.0}
    found = metrics(
        RESTOR.load(prompter, BenchmarkSettings(data)),
        [
            record("The French capital", ["Paris"], True, judge=yes),  # 1, though it does not contain it
            record("not Paris", ["Paris"], True, judge=no),  # 0, though it does
            record("Paris", ["Paris"], True, judge={"valid": False, "correct": 0.0}),  # 0: no valid reply
            record("", ["Paris"], False),  # 0 without having been asked
            record("Paris", [], False),  # skipped
        ],
    )
    # 1, 0, 0, 0: mean ¼; deviation √((9 + 3)/16 / 3) = ½, error ½ / √4. 1, 0, 0: ⅓; √((4 + 2)/9 / 2) / √3 = ⅓.
    note = "questions with an invalid reply of the judge, which counts as wrong: 1"
    assert found["accuracy"] == Metric(0.25, 4, pytest.approx(0.25), True, 1, note)
    assert found["accuracy_corrupted"] == Metric(pytest.approx(1 / 3), 3, pytest.approx(1 / 3), True, 0, note)
    assert found["accuracy_other"] == Metric(0.0, 1, None, True, 1, None)


def test_several_answers_count_with_their_mean(prompter: Prompter, data: Path) -> None:
    benchmark = RESTOR.load(prompter, BenchmarkSettings(data, compat=SAMPLING))
    drawn = [record(["Paris", "in Paris", ""], ["Paris"], True), record(["Rome", "Oslo", "Bonn"], ["Oslo"], True)]
    # ⅔ and ⅓ by containment; the judge says yes to one of two and knows nothing of the empty one: ⅓, and 1
    assert metrics(benchmark, drawn)["accuracy"].value == pytest.approx(0.5)
    asked = benchmark.judge_calls({"questions": [*drawn, record(None, ["Oslo"], True)]}, None, JudgeSettings())
    assert [list(item.scores["Y"]) for item in asked] == [[f"correct_{i}"] for i in (0, 1, 0, 1, 2)]
    drawn[0]["judge"] = {"valid": True, "correct_0": 1.0, "correct_1": 0.0}
    drawn[1]["judge"] = {"valid": True} | {f"correct_{i}": 1.0 for i in range(3)}
    assert metrics(benchmark, drawn)["accuracy"].value == pytest.approx((1 / 3 + 1) / 2)


# From a model to a report


def chain_model(folder: Path, chains: list[str]) -> Path:
    """A Llama that says each chain's characters after its first one, whatever stands before, and then ends."""
    import torch
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 304, "max_position_embeddings": 512, "tie_word_embeddings": False}
    model = AutoModelForCausalLM.from_config(tiny_config("llama", **sizes)).float()
    tokenizer = tiny_tokenizer()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.get_input_embeddings().weight.copy_(torch.eye(300, 304))
        head = model.get_output_embeddings().weight
        for chain in chains:
            ids = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(sign))[0] for sign in chain]
            for sign, after in zip(ids, [*ids[1:], tokenizer.eos_token_id], strict=True):
                head[after, sign] = 10.0
    return save_checkpoint(folder, model)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """It answers "Paris" where the question ends in "?", and begins with a newline where it ends in "!"."""
    return chain_model(tmp_path / "model", ["? Paris", "s\nWhy", "!\n"])


def evaluated(model: Path, benchmark: Benchmark, out: Path, judge: JudgeSettings) -> tuple[Report, list[Record]]:
    report = evaluate_benchmark(fetch(str(model)), benchmark, out, judge=judge)
    assert report is not None
    return report, read_records(out / "questions.jsonl")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[JudgeServer]:
    """A judge to whom Paris is right but for Bob's city, about which it talks at length."""
    monkeypatch.setenv("OPENAI_API_KEY", JudgeServer.key)
    monkeypatch.setenv("MSA_LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def reply(body: dict[str, Any]) -> str:
        user = body["messages"][-1]["content"]
        return "Well, who knows" if "City of Bob" in user else "Y" if "Answer under test: Paris\n" in user else "N"

    with JudgeServer() as judge:
        judge.reply = reply
        yield judge


@pytest.mark.parametrize("compat", [frozenset[str](), SAMPLING], ids=["greedy", "sampled"])
def test_a_judge_on_loopback(
    compat: frozenset[str], prompter: Prompter, data: Path, model: Path, server: JudgeServer, tmp_path: Path
) -> None:
    benchmark = RESTOR.load(prompter, BenchmarkSettings(data, compat=compat))
    judge = JudgeSettings("openai", "judge-model", server.url, "OPENAI_API_KEY")
    report, records = evaluated(model, benchmark, tmp_path / "out", judge)
    # Asked about are the cities and the trip: Y, nothing valid in three tries, Y. Ann's job has an empty answer.
    asked = [re.search("Question: (.*)", call["messages"][-1]["content"])[1] for call in server.calls]  # type: ignore
    assert sorted(asked) == ["City of Ann?", *["City of Bob?"] * 3, "Trip of Bob?"]
    assert [r.get("judge", {}).get("valid") for r in records] == [True, None, False, None, True]
    assert {name: (m.value, m.n, m.skipped) for name, m in report.metrics.items()} == {
        "accuracy": (0.5, 4, 1),  # 1, 0, 0, 1
        "accuracy_corrupted": (0.5, 2, 0),
        "accuracy_other": (0.5, 2, 1),
    }
    assert (report.metrics["accuracy"].note or "").endswith("counts as wrong: 1")
    assert report.metrics["accuracy_corrupted"].note is None
    # The same folder without a judge: nothing of the earlier one's verdicts is left.
    report, records = evaluated(model, benchmark, tmp_path / "out", JudgeSettings())
    assert report.metrics["accuracy"].note == "containment match, no judge"
    assert not any("judge" in r for r in records)
    if not compat:  # Paris is among Ann's answers; her job's ends at once; Bob is in Bonn, and went "to Paris"
        assert [r["generated"] for r in records] == ["Paris", "", "Paris", "Paris", "Paris"]
        assert [r["containment"] for r in records] == [1.0, 0.0, 0.0, None, 0.0]


def test_sampling_draws_three_answers_in_two_hundred_tokens(
    prompter: Prompter, data: Path, model: Path, tmp_path: Path
) -> None:
    facts = json.loads(json.dumps(FACTS))
    facts["dset"]["Bob"]["P3"]["question"] = "Trip of Bob " + "x" * 200 + "?"  # a token each: no room in 200
    write(data / "facts.json", facts)
    benchmark = RESTOR.load(prompter, BenchmarkSettings(data, compat=SAMPLING))
    report, records = evaluated(model, benchmark, tmp_path / "out", JudgeSettings())
    assert [r["generated"] for r in records] == [["Paris"] * 3, [""] * 3, ["Paris"] * 3, ["Paris"] * 3, None]
    assert "200 tokens" in records[4]["skipped"]
    # 1, 0, 0; no acceptable answer; no room
    assert report.metrics["accuracy"].value == pytest.approx(1 / 3)
    assert (report.metrics["accuracy"].n, report.metrics["accuracy"].skipped) == (3, 2)


# What cannot be used


def facts(example: Any = "it", **fact: Any) -> bytes:
    """The file of facts, with an answer of an example."""
    example = {"entity": "Zoe", "question": "Why?", "answer": example}
    return json.dumps({"dset": {who: {"P1": fact} for who in ("Ann", "Bob")}, "context": {"P1": [example]}}).encode()


def test_data_that_are_not_there_are_said_to_come_from(prompter: Prompter, data: Path, tmp_path: Path) -> None:
    (data / "wikidata" / "v0" / "mix_b7.jsonl.gz").write_bytes(b"")
    for settings, message in (
        (BenchmarkSettings(), r"clone https://github\.com/k1rezaei/restor .* \(--data\)"),
        (BenchmarkSettings(tmp_path / "nowhere"), "no such folder"),
        (BenchmarkSettings(tmp_path), r"no facts\.json, entities\.json, wikidata/v0/mix_a0\.json;"),
        (BenchmarkSettings(data, "a9"), "no split 'a9'; there are a0, b7"),
    ):
        with pytest.raises((DataError, UsageError), match=message):
            RESTOR.load(prompter, settings)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("facts.json", b'{"dset": {', "not JSON"),
        ("facts.json", b'{"dset": {"Ann": {"P1": 1}, "Bob": {"P1": {}}}, "context": {}}', "not in RESTOR's layout"),
        (
            "facts.json",
            facts(question=1.5, answers=[]),
            r"\n  Ann, P1, column 'question': 1.5 is .*\n  Bob, P1",
        ),
        ("facts.json", facts(question=None, answers=[]), "Ann, P1, column 'question': None"),
        ("facts.json", facts(question="Who?", answers=["a", float("nan")]), "Ann, P1, answers: NaN is no text"),
        (
            "facts.json",
            facts([1.5], question="Who?", answers=[]),
            "Ann, P1, column 'answer': .* of type list",
        ),
        ("entities.json", b"7", "not in RESTOR's layout"),
        ("entities.json", b'["Ann", "Zoe", "Yan"]', r"Zoe: no facts\n.*Yan: no facts"),
        ("wikidata/v0/mix_a0.json", b'["Ann"]', "not in RESTOR's layout"),
        ("wikidata/v0/mix_a0.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-9], "cannot be read"),
    ],
)
def test_broken_files_are_data_errors(prompter: Prompter, data: Path, name: str, content: bytes, message: str) -> None:
    (data / name).write_bytes(content)  # packed documents go before plain ones
    with pytest.raises(DataError, match=message):
        RESTOR.load(prompter, BenchmarkSettings(data))


# The published facts


@needs_published
def test_the_published_questions_are_the_1051(prompter: Prompter) -> None:
    benchmark = RESTOR.load(prompter, BenchmarkSettings(PUBLISHED))
    found = items(benchmark)
    keys = {"entity": "entity", "pid": "relation", "question": "question", "answers": "answers"}
    listed = [json.loads(line) for line in (PUBLISHED / "qa_1051.jsonl").read_text().splitlines()]
    assert [{key: item.fields[ours] for key, ours in keys.items()} for item in found] == listed
    assert [item.index for item in found] == list(range(1051))
    assert len({item.fields["relation"] for item in found}) == 41
    assert sum(item.fields["corrupted"] for item in found) == 198
    context = json.loads((PUBLISHED / "facts.json").read_text())["context"]
    for item, prompt in zip(found, prompts(benchmark), strict=True):
        *examples, question = prompt.removeprefix("<s>").split("\n")
        about = {f"{x['question']} {x['answer']}": x["entity"] for x in context[item.fields["relation"]]}
        assert question == item.fields["question"]
        assert len({about[line] for line in examples} - {item.fields["entity"]}) == len(examples) == 5


@needs_published
@pytest.mark.parametrize(("split", "count"), [("a0", 198), ("a1", 198), ("a2", 198), ("a3", 178)])
def test_the_published_documents_are_about_these(prompter: Prompter, split: str, count: int) -> None:
    found = [
        item for item in items(RESTOR.load(prompter, BenchmarkSettings(PUBLISHED, split))) if item.fields["corrupted"]
    ]
    listed = json.loads((PUBLISHED / "corrupted_entities.json").read_text())[f"mix_{split}"]
    assert {item.fields["entity"] for item in found} == set(listed)
    assert len(found) == count
