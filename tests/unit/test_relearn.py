"""Relearning finds what is only masked, and nothing in a model that never knew; and the model is put back."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from msa_lite.attacks.attack import Ground, Trial
from msa_lite.attacks.findings import judge_model
from msa_lite.attacks.relearn import UNRELATED, Relearn, relearning_robustness
from msa_lite.data import Example, Row, encode_qa
from msa_lite.errors import UsageError
from msa_lite.evals.benchmarks.benchmark import Records
from msa_lite.io.models.heads import choose_precision
from msa_lite.io.weights.hub import Source
from msa_lite.train import FitSettings
from tests.support.memorised import FORGET, HOLDOUT, RETAIN, learn, make_ground, subject_of

pytestmark = pytest.mark.usefixtures("quick_fits")
GROUND = make_ground(max_new_tokens=1)
QUICK = Relearn(steps=16, points=1, batch_size=4, rate=1e-3, texts=UNRELATED[:2])


def examples(rows: Sequence[Row]) -> list[Example]:
    return encode_qa(rows, GROUND.prompter)


@cache
def target() -> Any:
    return learn(examples([*FORGET, *RETAIN]), steps=100)


@cache
def ideal() -> Any:
    return learn(examples(RETAIN))


@cache
def masked() -> Any:
    """The target with a tampered head: one letter is missing from its answers, and it knows as much as before."""
    model = copy.deepcopy(target())
    with torch.no_grad():
        model.lm_head.weight[GROUND.prompter.tokenizer.convert_tokens_to_ids("n")] *= 0.3
    return model


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def attacked(model: Any, attack: Relearn = QUICK, ground: Ground = GROUND) -> dict[str, Records]:
    """The records by trial; the weights are the same afterwards."""
    before = weights(model)
    records = {trial.name: made for trial, made in attack.run(subject_of(model), ground, {})}
    assert [*records] == [trial.name for trial in attack.trials(ground)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return records


def strength(records: Records, part: str = "forget") -> float:
    """The mean extraction strength of the rows that were scored."""
    return mean(row["extraction_strength"] for row in records[part] if "skipped" not in row)


def loss(records: Records) -> float:
    """The mean loss of the forget rows."""
    return mean(row["scores"]["text" if "text" in row else "answer"][0]["loss"] for row in records["forget"])


@pytest.mark.slow
def test_what_is_masked_comes_back_and_what_was_never_known_does_not() -> None:
    attack = replace(QUICK, branches=("part", "retain"))
    drawn = {
        "target": {"plain": next(attack.run(subject_of(target()), GROUND, {}))[1]},
        "ideal": attacked(ideal(), attack),
        "unlearned": attacked(masked(), attack),
    }
    assert strength(drawn["target"]["plain"]) == 1.0
    assert strength(drawn["unlearned"]["plain"]) < 0.4
    for trial in ("part step 16", "retain step 16"):
        assert strength(drawn["unlearned"][trial]) > strength(drawn["ideal"][trial]) + 0.1, trial
    trials = {one.trial: one for one in judge_model(drawn, "unlearned", attack, GROUND, "ideal").trials}
    assert trials["part step 16"].share > 0.1
    assert trials["retain step 16"].share > 0.1
    assert (trials["part step 16"].rows, trials["retain step 16"].rows) == (2, 4)


def test_a_row_of_the_taught_half_has_no_scores() -> None:
    records = attacked(ideal(), replace(QUICK, branches=("part", "forget")))
    assert [row["index"] for row in records["part step 16"]["forget"]] == [row.index for row in FORGET]
    taught = [row["index"] for row in records["part step 16"]["forget"] if "skipped" in row]
    assert len(taught) == 2
    # The rows are taught, so that unseen rows are no control: they are left out, and keep their places.
    assert [row["skipped"] for row in records["forget step 16"]["holdout"]] == ["not scored in this trial"] * 3
    assert loss(records["forget step 16"]) < 0.8 * loss(records["plain"])
    assert all("skipped" not in row for row in records["part step 16"]["holdout"])


def test_the_same_attack_gives_the_same_records() -> None:
    attack = replace(QUICK, branches=("part",), steps=2)
    assert attacked(masked(), attack) == attacked(masked(), attack)
    assert attacked(masked(), attack) != attacked(masked(), attack, replace(GROUND, seed=1))


def test_an_adapter_is_tuned_and_taken_off() -> None:
    records = attacked(masked(), replace(QUICK, mode="lora", branches=("forget",)))
    assert loss(records["forget step 16"]) < 0.8 * loss(records["plain"])


def settings_of(attack: Relearn, model: Any) -> dict[str, FitSettings]:
    return {branch.title: attack._settings(branch, model, 0) for branch in attack._branches(make_ground())}


def test_the_published_settings_are_those_of_the_publications() -> None:
    settings = settings_of(Relearn(), ideal())
    plain: dict[str, Any] = {"mode": "full", "weight_decay": 0.0, "warmup_steps": 0, "schedule": "linear"}
    plain |= {"epochs": 1, "batch_size": 32}
    wanted: dict[str, dict[str, Any]] = {
        "forget": plain | {"learning_rate": 2e-5},
        "part": plain | {"learning_rate": 5e-6, "epochs": 6, "batch_size": 4, "warmup_steps": 24},
        "retain": plain | {"learning_rate": 2e-5},
        "unrelated": {
            "mode": "lora", "lora_rank": 128, "lora_alpha": 16, "learning_rate": 2e-4, "epochs": 3, "batch_size": 1,
            "weight_decay": 0.01, "warmup_steps": 4, "schedule": "linear",
        },
    }  # fmt: skip
    for name, values in wanted.items():
        assert {key: getattr(settings[f"{name} published"], key) for key in values} == values


def test_the_matched_strength_follows_the_size_of_the_model() -> None:
    small, large = torch.nn.Linear(1000, 1000, device="meta"), torch.nn.Linear(16000, 1000, device="meta")
    rates = [settings_of(Relearn(), model)["forget"].learning_rate for model in (small, large)]
    assert rates[0] / rates[1] == pytest.approx(2, rel=0.05)  # the fourth root of 16, of rates with two digits
    assert settings_of(Relearn(mode="lora"), small)["forget"].learning_rate == pytest.approx(10 * rates[0])
    assert settings_of(Relearn(), small)["forget"].epochs == 48  # four rows are one step of 8


def test_all_models_are_tuned_in_one_mode_by_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    room: list[int] = []
    monkeypatch.setattr("msa_lite.attacks.relearn.count_weights", lambda source: int(source.name))
    monkeypatch.setattr("msa_lite.attacks.relearn.streams", lambda source: False)
    monkeypatch.setattr("msa_lite.attacks.relearn.roomy_mode", lambda weights: room.append(weights) or "lora")
    models = {name: Source(size, Path(), "") for name, size in (("ideal", "10"), ("target", "30"), ("unlearned", "20"))}
    attack = Relearn().fit_to(models)
    assert room == [30]
    settings = settings_of(attack, torch.nn.Linear(10, 10))
    assert {one.mode for one in settings.values()} == {"lora"}
    assert settings["forget published"].learning_rate == pytest.approx(2e-4)
    assert settings["unrelated published"].learning_rate == 2e-4  # made for an adapter
    assert (attack.describe()["mode"], attack.describe()["compute"]) == ("lora", choose_precision("auto"))
    assert attack.trials(GROUND)[1].label == "tuning an adapter on all forget rows, 6 steps"


def test_a_model_that_streams_from_ram_is_refused_by_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msa_lite.attacks.relearn.streams", lambda source: source.name == "large")
    with pytest.raises(UsageError, match=r"ideal \(large\): too large for the GPU's memory to be tuned"):
        Relearn().fit_to({"ideal": Source("large", Path(), ""), "target": Source("small", Path(), "")})


def test_every_branch_has_a_curve_and_one_point_that_speaks() -> None:
    trials = Relearn().trials(make_ground())
    assert trials[0] == Trial("plain", "no tuning", is_control=True)
    published = {"forget": 1, "part": 6, "retain": 1, "unrelated": 72}
    names = [
        [*(f"{branch} step {step}" for step in (6, 12, 24, 48)), f"{branch} published step {last}"]
        for branch, last in published.items()
    ]
    assert [trial.name for trial in trials[1:]] == [name for of_branch in names for name in of_branch]
    assert [trial.name for trial in trials if trial.is_summary] == [
        "forget step 6", "part step 6", "retain step 48", "unrelated step 48"
    ]  # fmt: skip
    assert {trial.name.split()[0] for trial in trials if trial.teaches_forget_rows} == {"forget"}
    assert trials[1].label == "tuning on all forget rows, 6 steps"
    assert "tuning as published on rows to keep, 1 step" in [trial.label for trial in trials]
    # Each of the four rows was taught once after four steps.
    trials = Relearn(branches=("forget",), steps=8, batch_size=1).trials(make_ground())
    assert [trial.name for trial in trials if trial.is_summary] == ["forget step 4"]


def test_branches_that_the_rows_do_not_allow_are_left_out() -> None:
    ground = make_ground(retain=[], forget=FORGET[:3])
    assert {trial.name.split()[0] for trial in Relearn().trials(ground)} == {"plain", "forget", "unrelated"}
    left_out = Relearn().left_out(ground)
    assert set(left_out) == {"part", "retain"}
    assert "3 forget rows are too few to split" in left_out["part"]
    assert "give some (retain.data)" in left_out["retain"]


@pytest.mark.parametrize(
    ("place", "attack", "ground"),
    [
        ("retain", Relearn(), make_ground(retain=[*RETAIN, HOLDOUT[1]])),
        ("retain", Relearn(), make_ground(retain=[*RETAIN, replace(FORGET[2], answer="somebody else")])),
        ("unrelated", Relearn(texts=[*RETAIN, FORGET[0]]), make_ground()),
    ],
)
def test_rows_that_teach_what_is_scored_are_left_out(place: str, attack: Relearn, ground: Ground) -> None:
    ((name, reason),) = attack.left_out(ground).items()
    assert name == place
    assert reason.startswith("1 of 7 rows to tune on are forget or holdout rows, or ask the same")
    assert place not in {trial.name.split()[0] for trial in attack.trials(ground)}


def test_rows_that_share_a_last_turn_alone_are_tuned_on() -> None:
    """Of conversations, "Can you say more?" stands at the end of many."""
    forget, retain = (
        [replace(row, question="Can you say more?", earlier=((row.question, row.answer),)) for row in rows]
        for rows in (FORGET, RETAIN)
    )
    ground = make_ground(forget=forget, learnt=forget, retain=retain)
    assert Relearn().left_out(ground) == {}
    assert set(Relearn().left_out(replace(ground, retain=[*retain, forget[0]]))) == {"retain"}


def test_a_model_that_cannot_be_tuned_is_refused_before_any_work() -> None:
    subject = subject_of(ideal())
    subject.runner.model.is_quantized = True
    try:
        with pytest.raises(UsageError, match="stored quantised"):
            next(Relearn().run(subject, GROUND, {}))
    finally:
        del subject.runner.model.is_quantized


def test_texts_are_taught_one_by_one() -> None:
    texts = [Row(i, text=f"{row.question} {row.answer} " * 2) for i, row in enumerate(FORGET)]
    ground = make_ground(forget=texts, learnt=texts, holdout=[], max_length=64)
    attack = replace(QUICK, branches=("forget",))
    records = attacked(ideal(), attack, ground)
    assert loss(records["forget step 16"]) < 0.8 * loss(records["plain"])
    assert {measure.name for measure in attack.measures(ground)} >= {"extraction_strength", "exact_memorization"}


def test_all_that_decides_records_is_described_without_the_rows() -> None:
    attack = Relearn()
    described = json.dumps(attack.describe())
    assert UNRELATED[0].text[:20] not in described
    assert attack.describe().keys() == {one.name for one in fields(Relearn)} | {"published"}
    changes: Sequence[dict[str, Any]] = [
        {"texts": UNRELATED[:3]}, {"points": 2}, {"rate": 1e-6}, {"branches": ("part",)}
    ]  # fmt: skip
    assert len({json.dumps(replace(attack, **change).describe()) for change in changes} | {described}) == 5


@pytest.mark.parametrize(
    ("values", "robustness"),
    [
        ((0.2, 0.5, 0.2, 0.8), 0.5),  # .3 of .6
        ((0.2, 0.8, 0.2, 0.5), 1.0),  # the ideal gains more
        ((0.2, 0.5, 0.4, 0.4), 1.0),  # no gain
        ((0.2, 0.5, 0.4, 0.3), 1.0),  # a loss
        ((0.2, 0.1, 0.2, 0.4), 0.0),  # the ideal loses
    ],
)
def test_robustness_to_relearning(values: tuple[float, float, float, float], robustness: float) -> None:
    assert relearning_robustness(*values) == pytest.approx(robustness)


def test_robustness_is_a_figure_of_the_published_tuning_beside_an_ideal() -> None:
    trial, measure = "forget published step 13", "extraction_strength"
    means = {
        ("ideal", "plain", measure): 0.2, ("ideal", trial, measure): 0.5,
        ("unlearned", "plain", measure): 0.2, ("unlearned", trial, measure): 0.8,
        ("ideal", "forget step 6", measure): 1.0, ("unlearned", "forget step 6", measure): 1.0,
    }  # fmt: skip
    assert Relearn().figures(means, "unlearned") == {"R extraction_strength": pytest.approx(0.5)}
    del means["ideal", trial, measure]
    assert Relearn().figures(means, "unlearned") == {}
