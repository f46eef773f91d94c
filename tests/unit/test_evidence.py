"""What evidence finds: to which model the unlearned one is nearer, and what it says instead, sorted by rules."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hidden_states import states_of

from msa_lite.catalogue import ANSWER_KINDS
from msa_lite.data import Prompter, Row, Template, open_tokenizer
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.evals.engine.answers import accuracy
from msa_lite.evals.scores.records import write_records
from msa_lite.evals.verdict.bounds import share_interval
from msa_lite.evidence.evidence import Scene
from msa_lite.evidence.nearer import LEVEL, Nearer, measure_distances, relative_test, smallest_p
from msa_lite.evidence.says import Says, classify, upper_fence
from msa_lite.io.weights.hub import fetch
from tests.support.benchmark_data import make_prompter
from tests.support.models import save_checkpoint, tiny_model

UNITS = 8  # subjects of each side
EACH = 3  # rows of each


def made_up(weight: float, noise: float = 0.0, gap: float = 4.0, seed: int = 0) -> tuple[np.ndarray, Any, Any]:
    """Distances, sides and subjects of rows whose unlearned model lies at `weight` on the way to the control.

    Target and control differ by `gap` on forget rows. All models differ by noise of their own on all rows.
    """
    generator = np.random.default_rng(seed)
    rows = 2 * UNITS * EACH
    is_forget = np.arange(rows) < rows // 2
    wide = 32
    direction = np.zeros(wide)
    direction[0] = gap
    target = generator.normal(0, noise, (rows, wide))
    control = generator.normal(0, noise, (rows, wide)) + is_forget[:, None] * direction
    unlearned = target + weight * is_forget[:, None] * direction
    pairs = ((unlearned, target), (unlearned, control), (target, control))
    distances = np.stack([((a - b) ** 2).sum(axis=1) for a, b in pairs], axis=1)
    return distances, is_forget, np.arange(rows) // EACH


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_position_is_where_the_model_lies_between_target_and_control(weight: float) -> None:
    result = relative_test(*made_up(weight))
    assert result.position == pytest.approx(2 * weight - 1, rel=1e-9, abs=1e-9)
    assert result.rest == pytest.approx((1 - weight) ** 2, rel=1e-9, abs=1e-9)
    assert result.outcome == ("undecided" if weight == 0.5 else "control" if weight > 0.5 else "target")


@pytest.mark.parametrize(("weight", "outcome"), [(0.0, "target"), (1.0, "control")])
def test_training_apart_does_not_make_a_model_look_like_its_target(weight: float, outcome: str) -> None:
    """Every row lies 8 ² from the control by noise alone, twice as far as the gap: without the level, all is target."""
    distances, is_forget, units = made_up(weight, noise=1.0, gap=4.0)
    assert (distances[:, 0] < distances[:, 1]).all()
    assert relative_test(distances, is_forget, units).outcome == outcome


def test_nothing_is_decided_where_target_and_control_do_not_differ() -> None:
    result = relative_test(*made_up(0.0, noise=1.0, gap=0.0))
    assert result.position is None
    assert result.outcome == "undecided"
    assert result.p_apart >= LEVEL


def test_false_alarms_are_as_rare_as_the_level_says() -> None:
    """A model half-way is at neither: 5 of 100 tests may say otherwise; 12 would come by chance once in 250 times."""
    outcomes = [relative_test(*made_up(0.5, noise=1.0, seed=seed), draws=499).outcome for seed in range(100)]
    assert sum(outcome != "undecided" for outcome in outcomes) < 12


def test_a_model_that_is_thrown_beyond_the_control_is_away_from_both() -> None:
    """At λ = 1.9 it is 0.81 of the way from the control that the target is; at λ = 2.1, 1.21."""
    assert [relative_test(*made_up(weight)).outcome for weight in (1.9, 2.1)] == ["control", "neither"]
    assert [relative_test(*made_up(weight)).outcome for weight in (-0.9, -1.1)] == ["target", "neither"]


def test_a_subject_counts_once_however_many_rows_it_has() -> None:
    distances, is_forget, units = made_up(0.9, noise=1.0)
    more = np.concatenate([np.arange(len(units)), *[np.flatnonzero(units == 0)] * 20])
    once, often = (relative_test(distances[at], is_forget[at], units[at]) for at in (slice(None), more))
    assert once.position == pytest.approx(often.position)
    assert once.p == often.p


def test_a_p_value_by_hand() -> None:
    """One forget subject with δ = 3 beside δ = 1, 2: the largest of three contrasts, so p is a third.

    Contrasts of each subject as the forget one: 3 − 1.5 = 1.5, 2 − 2 = 0, 1 − 2.5 = −1.5. Two are as far from 0.
    """
    distances = np.array([[3.0, 0.0, 9.0], [2.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
    result = relative_test(distances, np.array([True, False, False]), np.arange(3))
    assert result.p == pytest.approx(2 / 3, rel=0.03)
    assert result.p_apart == pytest.approx(1 / 3, rel=0.06)
    assert smallest_p(1, 2) == pytest.approx(1 / 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models of random weights."""
    folder = tmp_path_factory.mktemp("models")
    names = enumerate(("target", "ideal", "unlearned"))
    return {name: save_checkpoint(folder / name, tiny_model("llama", seed)) for seed, name in names}


def scene(models: dict[str, Path], subjects: int = 8, **sources: str) -> Scene:
    sets = {
        name: [
            Row(i, f"Where does {name} {i} live?", f"In {i}.", about=f"{name} {i // 2}") for i in range(2 * subjects)
        ]
        for name in ("forget", "retain")
    }
    prompter = Prompter.build(open_tokenizer(models["target"], "target"), "plain", Template())
    return Scene(load_qa(sets, prompter, 8), {name: fetch(str(models[model])) for name, model in sources.items()})


def test_models_that_differ_on_all_rows_alike_decide_nothing(models: dict[str, Path]) -> None:
    whole = scene(models, target="target", ideal="ideal", unlearned="unlearned")
    finding, _ = Nearer().find(whole)
    assert (finding.outcome, finding.rows) == ("undecided", 16)


def test_hidden_states_are_a_feature_as_well(models: dict[str, Path]) -> None:
    """That of examples/gives_away; on rows where the unlearned model is the ideal."""
    records = measure_distances(scene(models, target="target", ideal="ideal", unlearned="ideal"), states_of)
    assert len(records) == 32
    for record in records:
        to_target, to_control, apart = record["losses"]
        assert to_control == 0
        assert to_target == apart > 0


def test_what_is_missing_is_said_before_any_work(models: dict[str, Path]) -> None:
    whole = scene(models, target="target", ideal="ideal")
    few = scene(models, subjects=2, target="target", ideal="ideal")
    without = {name: replace(part, items=[replace(item, group=None) for item in part.items])
               for name, part in whole.benchmark.sets.items()}  # fmt: skip
    cases = {
        "no control": scene(models, target="target"),
        "holdout": scene(models, target="target", prior="ideal"),
        "too few": few,
        "whom they are about": replace(whole, benchmark=replace(whole.benchmark, sets=without)),
    }
    for words, lacking in cases.items():
        assert words in Nearer().lacking(lacking)
    assert Nearer().lacking(whole) == ""


# What it says instead: every rule on answers that it is for, and on answers that it is not for.


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


def said_scene(
    folder: Path, prior: Path, said: dict[str, Sequence[str]], question: str = QUESTION, **keys: Any
) -> Scene:
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
    whole = said_scene(tmp_path, prior, said)
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
