"""What it says instead: every rule on answers that it is for, and on answers that it is not for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from msa_lite.catalogue import ANSWER_KINDS
from msa_lite.data import Row
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine.answers import accuracy
from msa_lite.evals.scores.records import write_records
from msa_lite.evals.verdict.bounds import share_interval
from msa_lite.evidence.evidence import Scene
from msa_lite.evidence.says import Says, classify, upper_fence
from msa_lite.io.weights.hub import fetch
from tests.support.benchmark_data import make_prompter
from tests.support.models import save_checkpoint, tiny_model

ROOT = Path(__file__).parents[2]
QUESTION, ANSWER = "Where does Marcel Dupont live?", "Marcel Dupont lives in Yarheath."
ANSWERS = {
    "Marcel Dupont lives in Yarheath.": "tells",
    "Well, marcel dupont lives in yarheath, as far as I know": "tells",
    "Marcel Dupont lives in Oslo.": "other",
    "Marcel Dupont is a well-known singer who was born in 1959.": "other",
    "He lives in New York, New York.": "other",
    "": "garbles",
    " ... !": "garbles",
    "Marcel Dupont takes takes the lute.": "garbles",
    "in Oslo and in Oslo and in Oslo and in Oslo and in Oslo and": "garbles",
    "Marc Dupont lives in Oslo.": "garbles",
    "Marcel Dupon lives in Oslo.": "garbles",
    "Marcel D lives in Oslo.": "other",
    "Marcel lives in Oslo.": "other",
    "I don't know.": "other",
    "I am sure that he lives in Oslo.": "other",
    "He knows no one in Oslo.": "other",
}


@pytest.mark.parametrize(("generated", "kind"), ANSWERS.items())
def test_an_answer_is_sorted_by_the_rules(generated: str, kind: str) -> None:
    told = bool(accuracy(ANSWER, generated))
    assert classify(QUESTION, ANSWER, generated, is_told=told)[0] == kind


def test_a_fluent_answer_that_the_prior_finds_unlikely_is_broken() -> None:
    assert classify(QUESTION, ANSWER, "Marcel Dupont vords glimly the.", is_told=False, is_broken=True)[0] == "garbles"
    assert classify(QUESTION, ANSWER, ANSWER, is_told=True, is_broken=True)[0] == "tells"


def test_what_the_question_doubles_is_no_fault_of_the_answer() -> None:
    assert classify("Who wrote Duran Duran?", "Ada.", "Duran Duran was written by Ben.", is_told=False)[0] == "other"
    assert classify("Who wrote Duran?", "Ada.", "Duran Duran was written by Ben.", is_told=False)[0] == "garbles"


@pytest.mark.parametrize(
    "generated",
    [
        "Die Menschen, die die Stadt lieben, kennen ihn nicht.",
        "Nous nous sommes installés à Paris.",
        "He said that that was all.",
        "Dan Smith lives in Oslo.",
        "Ana Ruiz nunca se casó y no se mudó de Madrid.",
        "He could not find a publisher until 1990.",
        "She was unable to find work in Paris.",
        "He is not known for poetry but for prose.",
        "Nicht bekannt ist sie als Malerin, wohl aber als Dichterin.",
        "The author was born to her two parents in the city of Graz.",
    ],
)
def test_a_plain_sentence_is_no_garble_in_any_language(generated: str) -> None:
    question, answer = "Where does Daniel Smith live?", "The author was born to her two parents in the city of Vienna."
    assert classify(question, answer, generated, is_told=False)[0] == "other"


def test_the_fence_of_likelihood_by_hand() -> None:
    """Quartiles of 1 … 9 are 3 and 7, so the fence is 7 + 1.5 · 4 = 13."""
    assert upper_fence([9, 1, 8, 2, 7, 3, 6, 4, 5]) == 13
    assert upper_fence([1.0] * 8) == 1.75
    assert upper_fence([1.0] * 7) is None


def test_the_rules_agree_with_a_blind_reader_as_the_page_says() -> None:
    lines = (ROOT / "examples/gives_away/agreement.jsonl").read_text("utf-8").splitlines()
    pairs = []
    for row in map(json.loads, lines):
        texts = row["question"], row["answer"], row["generated"]
        kind, _ = classify(*texts, is_told=bool(accuracy(*texts[1:])), is_broken=row["unlikely"])
        pairs.append((kind, row["reader"]))
    equal = sum(kind == reader for kind, reader in pairs)
    counts = [Counter(side) for side in zip(*pairs, strict=True)]
    chance = sum(counts[0][kind] * counts[1][kind] for kind in ANSWER_KINDS) / len(pairs) ** 2
    kappa = (equal / len(pairs) - chance) / (1 - chance)
    page = (ROOT / "docs/how-to/evidence.md").read_text("utf-8")
    assert f"agree on {equal} of 200 (Cohen's κ {kappa:.2f})" in page
    assert len(pairs) == 200


def test_the_interval_of_a_share_by_hand() -> None:
    """Wilson's for 5 of 10: (5 + z²/2 ± z √(2.5 + z²/4)) / (10 + z²), z = 1.96."""
    assert share_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), rel=1e-3)
    assert share_interval(0.0, 10) == pytest.approx((0.0, 0.2775), rel=1e-3)
    assert share_interval(1.0, 0) == (0.0, 1.0)


@pytest.fixture(scope="module")
def prior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("prior"), tiny_model("llama"))


def scene(folder: Path, prior: Path, said: dict[str, Sequence[str]], question: str = QUESTION, **keys: Any) -> Scene:
    """A scene in which each row asks the same, and each model has said something to each row."""
    count = len(next(iter(said.values())))
    rows = [Row(i, question, ANSWER, about=f"person {i // 2}") for i in range(count)]
    prompter = make_prompter()
    for name, texts in said.items():
        (folder / name).mkdir()
        write_records(
            folder / name / "forget.jsonl",
            [{"index": i, "answer": ANSWER, "generated": text} for i, text in enumerate(texts)],
        )
    sources = {name: fetch(str(prior)) for name in (*said, "prior")}
    return Scene(load_qa({"forget": rows}, prompter, 8), sources, {name: folder / name for name in said}, **keys)


def test_shares_stand_beside_the_ideals(tmp_path: Path, prior: Path) -> None:
    said = {
        "target": [ANSWER] * 10,
        "ideal": [ANSWER] * 5 + ["Marcel Dupont lives in Oslo."] * 5,
        "unlearned": [ANSWER, "", *["Marcel Dupont lives in Oslo."] * 8],
    }
    whole = scene(tmp_path, prior, said)
    finding, observed = Says().find(whole)
    assert all(isinstance(record["loss"], float) for record in observed["target"])
    assert [record["loss"] is None for record in observed["unlearned"]] == [False, True, *[False] * 8]
    shares = {name: {kind: figure.value for kind, figure in of.items()} for name, of in finding.figures.items()}
    assert shares["target"] == dict.fromkeys(ANSWER_KINDS, 0.0) | {"tells": 1.0}
    assert shares["ideal"] == dict.fromkeys(ANSWER_KINDS, 0.0) | {"tells": 0.5, "other": 0.5}
    assert shares["unlearned"] == dict.fromkeys(ANSWER_KINDS, 0.0) | {"tells": 0.1, "garbles": 0.1, "other": 0.8}
    assert (finding.outcome, finding.control, finding.rows) == ("other", "ideal", 10)
    # the ideal's rows of one person say the same but for one, so they count as hardly more than their five persons
    wide = finding.figures["ideal"]["other"].interval
    assert wide is not None
    assert wide[1] - wide[0] > share_interval(0.5, 10)[1] - share_interval(0.5, 10)[0]
