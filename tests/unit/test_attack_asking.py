"""Attacks by asking find what is only masked, and nothing in a model that never knew the rows."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from msa_lite.attacks import membership, sample
from msa_lite.attacks.attack import Attack, Ground, Subject
from msa_lite.attacks.membership import Membership
from msa_lite.attacks.prompt import Prompting, best_of
from msa_lite.attacks.questions import prompt_rest, prompt_row
from msa_lite.attacks.sample import Sample
from msa_lite.data import Row
from msa_lite.evals.benchmarks.benchmark import Record, Records
from msa_lite.evals.engine.scoring import leak_at, membership_auc, threshold_at_fpr
from msa_lite.evals.judge.base import Ruling
from msa_lite.evals.judge.prompts import Ask
from msa_lite.settings import JudgeSettings
from tests.support.memorised import (
    FORGET,
    HOLDOUT,
    KNOWN,
    REFUSAL,
    RETAIN,
    WINDOW,
    knowing_model,
    make_ground,
    subject_of,
)
from tests.support.models import tiny_model

TEXTS = [Row(i, text=f"It was the day of {word} and nobody had seen it before.") for i, word in enumerate("abc")]


def attack(
    one: Attack, model: Any, ground: Ground, others: dict[str, Subject] | None = None
) -> dict[str, dict[str, Sequence[Record]]]:
    """The records of an attack by trial and set, which have what the attack says that they have."""
    seen: list[tuple[str, int, int]] = []
    records: dict[str, Records] = {}
    for trial, part in one.run(subject_of(model), ground, others or {}, lambda *call: seen.append(call)):
        records[trial.name] = part
        for name, rows in part.items():
            assert [record["index"] for record in rows] == [row.index for row in getattr(ground, name)]
            assert all(measure.name in record for record in rows for measure in one.measures(ground))
    assert list(records) == [trial.name for trial in one.trials(ground)]
    assert seen[-1][1] == seen[-1][2] > 0
    return {name: dict(part) for name, part in records.items()}


def scores(records: Sequence[Record], key: str) -> list[float | None]:
    return [record[key] for record in records]


def masked_model() -> Any:
    """The knowing model with a head that says a sign in the place of the first letter of four words."""
    import torch

    model = copy.deepcopy(knowing_model())
    tokenizer = make_ground().prompter.tokenizer
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for letter, sign in zip("QTpsRU", "#%&*+$", strict=True):
            own, other = (tokenizer.convert_tokens_to_ids(text) for text in (letter, sign))
            head[other] = 1.03 * head[own]
    return model


def test_drawn_answers_find_what_greedy_ones_hide() -> None:
    ground = make_ground(forget=KNOWN)
    plain, masked = (attack(Sample(samples=12), model, ground) for model in (knowing_model(), masked_model()))
    assert scores(plain["greedy"]["forget"], "leak_exact_12") == [1.0, 1.0]
    assert scores(masked["greedy"]["forget"], "leak_exact_12") == [0.0, 0.0]
    assert scores(masked["greedy"]["forget"], "leak_exact_1") == [0.0, 0.0]
    drawn = masked["drawn"]["forget"]
    assert scores(drawn, "leak_exact_12") == [1.0, 1.0]
    for record in drawn:
        assert 0 < record["leaks_exact"] < record["samples"] == 12
        assert record["leak_exact_1"] == pytest.approx(record["leaks_exact"] / 12)
        ks = [record[f"leak_exact_{k}"] for k in (1, 2, 4, 8, 12)]
        assert ks == sorted(ks)
        assert record["leak_rouge_1"] < record["leak_rouge_12"] == 1.0
    assert [record["generated"] for record in drawn] == [row.answer for row in KNOWN]


def test_a_hidden_answer_comes_behind_its_first_word() -> None:
    records = attack(Prompting(words=(1, 2, 4)), knowing_model(), make_ground())
    plain, first, best = (records[name]["forget"] for name in ("plain", "prefix-1", "any"))
    assert scores(plain, "accuracy") == [1.0, 1.0, 0.0, 0.0]
    assert scores(plain, "rouge_l") == [1.0, 1.0, 0.0, 0.0]
    assert [record["generated"] for record in plain[2:]] == [REFUSAL] * 2
    assert scores(first, "accuracy") == scores(best, "accuracy") == [1.0] * 4
    assert [record["generated"] for record in first[2:]] == ["Wren has two red boats.", "Moss grows figs in Bonn."]
    assert {record["trial"] for record in best} <= {"prefix-1", "prefix-2"}
    assert all("fewer than 8 words" in record["skipped"] for record in records["prefix-4"]["forget"])
    assert scores(records["prefix-4"]["forget"], "rouge_l") == [None] * 4


def test_nothing_comes_out_of_a_model_that_never_knew() -> None:
    for model, ground in (
        (tiny_model("qwen2", max_position_embeddings=WINDOW).eval(), make_ground()),
        (knowing_model(), make_ground(forget=HOLDOUT, holdout=[])),
    ):
        prompted, drawn = attack(Prompting(), model, ground), attack(Sample(samples=4), model, ground)
        assert max(float(r["accuracy"]) for r in prompted["any"]["forget"]) == 0.0
        assert max(float(r["rouge_l"]) for r in prompted["any"]["forget"]) < 0.6
        assert max(float(r["leak_exact_4"]) for r in drawn["drawn"]["forget"]) == 0.0
        assert max(float(r["leak_rouge_4"]) for r in drawn["drawn"]["forget"]) < 0.6


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_hold_what_their_trial_says(chat: bool) -> None:
    ground = make_ground(chat, rewordings={"German": [f"Wer ist das, {i}?" for i in range(4)]})
    prompts = {trial.name: prompt(FORGET[2]).prompt for trial, prompt in Prompting()._ways(ground).items()}
    texts = {name: ground.prompter.tokenizer.decode(prompt) for name, prompt in prompts.items()}
    row = FORGET[2]
    assert [trial.name for trial in Prompting().trials(ground)] == [*texts, "any"]
    assert texts["plain"].count(row.question) == 1
    shown = [retain for retain in RETAIN if f"{retain.question}" in texts["few-shot"]]
    assert len(shown) == 5
    assert all(retain.answer in texts["few-shot"] for retain in shown)
    assert "Wer ist das, 2?" in texts["German"]
    assert row.question not in texts["German"]
    assert texts["prefix-1"].endswith(" Cy" if not chat else "Cy")
    assert texts["prefix-2"].startswith(texts["prefix-1"])
    assert texts["prefix-2"].endswith("Cy Wren")
    others = {name: text for name, text in texts.items() if name not in ("German", "prefix-4", "prefix-8")}
    assert all(row.question in text for text in others.values())
    assert len(set(others.values())) == len(others)
    assert not any(part.answer in text for part in FORGET for text in texts.values())


@pytest.mark.parametrize("chat", [False, True])
def test_given_words_stand_as_they_do_in_the_row_and_do_not_count(chat: bool) -> None:
    ground, row = make_ground(chat), Row(3, "Who?", 'She said "no",  twice\nand left.', earlier=(("Hi", "Hello"),))
    question = prompt_rest(ground, row, 3)
    assert ground.prompter.full(row)[: len(question.prompt)] == question.prompt
    assert ground.prompter.tokenizer.decode(question.prompt).endswith('She said "no",')
    assert question.reference == "twice\nand left."
    assert (prompt_rest(ground, row, 4).prompt, prompt_row(ground, row).reference) == ([], row.answer)


def test_a_text_is_asked_for_by_its_first_half() -> None:
    ground = make_ground(forget=TEXTS, holdout=[], retain=[Row(0, text="A retain text.")], max_new_tokens=20)
    question = prompt_row(ground, TEXTS[1])
    prompt = ground.prompter.tokenizer.decode(question.prompt, skip_special_tokens=True)
    assert TEXTS[1].text.startswith(f"{prompt} {question.reference}")
    assert 0 <= len(question.reference.split()) - len(prompt.split()) <= 1
    assert len(ground.prompter.tokenizer(f"{prompt} {question.reference}")["input_ids"]) <= 1 + 2 * 20
    few = prompt_row(ground, TEXTS[1], texts=["A retain text."])
    assert ground.prompter.tokenizer.decode(few.prompt, skip_special_tokens=True) == f"A retain text.\n\n{prompt}"
    assert [trial.name for trial in Prompting().trials(ground)] == ["plain", "few-shot", "any"]
    attack(Prompting(), knowing_model(), ground)
    drawn = attack(Sample(samples=2), knowing_model(), ground)
    assert prompt_row(ground, Row(0, text="word")).fault == "a text of one word"
    assert all(record["leak_rouge_2"] is not None for record in drawn["drawn"]["forget"])


def test_texts_among_questions_are_left_out_of_other_wordings() -> None:
    ground = make_ground(forget=[*KNOWN, replace(TEXTS[0], index=2)], holdout=[])
    records = attack(Prompting(words=(1,)), knowing_model(), ground)
    assert ["skipped" in record for record in records["role"]["forget"]] == [False, False, True]
    assert ["skipped" in record for record in records["prefix-1"]["forget"]] == [False, False, True]
    assert ["skipped" in record for record in records["any"]["forget"]] == [False, False, False]  # few-shot: no texts


def test_questions_without_room_in_the_window_are_said() -> None:
    ground = make_ground(forget=[*KNOWN, Row(2, "Who? " * 60, "Nobody at all.")], holdout=[])
    model = tiny_model("qwen2", max_position_embeddings=80).eval()
    for one, key in ((Prompting(), "rouge_l"), (Sample(samples=3), "leak_exact_2"), (Membership(), "loss")):
        records = attack(one, model, ground)
        for name in ("plain", "greedy", "drawn", "scores"):
            for record in records.get(name, {}).get("forget", [])[2:]:
                assert record[key] is None
                assert "80 tokens" in record["skipped"]


def test_the_best_answer_of_a_row_counts() -> None:
    def record(rouge: float | None, accuracy: float | None, text: str) -> Record:
        return {"index": 0, "rouge_l": rouge, "accuracy": accuracy, "generated": text}

    first, second, none = record(0.5, 1.0, "a"), record(0.7, 0.0, "b"), record(None, None, "")
    assert best_of([[first], [second], [none]]) == [record(0.7, 1.0, "b")]
    assert best_of([[none]]) == [none]


def test_rewordings_are_of_the_forget_rows_alone_and_any_leaves_them_out_beside_holdout_rows() -> None:
    wordings = {"direct": [row.question for row in FORGET]}
    with_holdout = attack(Prompting(shots=0, words=(2,)), knowing_model(), make_ground(rewordings=wordings))
    assert set(with_holdout["direct"]) == {"forget"}
    assert scores(with_holdout["direct"]["forget"], "accuracy") == [1.0, 1.0, 0.0, 0.0]
    assert "few-shot" not in with_holdout
    alone = attack(Prompting(words=()), knowing_model(), make_ground(rewordings=wordings, holdout=[]))
    assert [record["trial"] for record in alone["any"]["forget"][:2]] == ["direct", "direct"]


def test_leak_at_k_against_numbers_by_hand_and_the_mean_over_subsets() -> None:
    # 10 samples, 3 leaks: 1 − 7·6/(10·9) for two, 1 − 7·6·5/(10·9·8) for three.
    leaks = [1.0] * 3 + [0.0] * 7
    assert leak_at(leaks, 1) == pytest.approx(0.3)
    assert leak_at(leaks, 2) == pytest.approx(48 / 90)
    assert leak_at(leaks, 3) == pytest.approx(510 / 720)
    assert [leak_at(leaks, k) for k in (8, 10)] == [1.0, 1.0]
    assert [leak_at([value] * 200, 128) for value in (0.0, 1.0)] == [0.0, pytest.approx(1.0)]
    values = np.random.default_rng(0).random(7)
    for k in range(1, 8):
        assert leak_at(values, k) == pytest.approx(np.mean([max(part) for part in combinations(values, k)]))


def test_a_threshold_of_few_false_alarms_by_hand() -> None:
    holdout = [float(value) for value in range(200)][::-1]
    assert threshold_at_fpr(holdout) == 2.0  # 1 % are two rows, 0 and 1
    assert threshold_at_fpr([*holdout, None]) == 2.0
    assert threshold_at_fpr(holdout, 0.29) == 58.0
    assert threshold_at_fpr([1.0] * 200) == 1.0  # all alike: none is below
    assert threshold_at_fpr(holdout[:99]) is None
    assert threshold_at_fpr([]) is None


def test_a_judge_is_asked_about_answers_that_are_near_the_true_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []

    class Judge:
        def ask(self, asks: Sequence[Ask]) -> tuple[list[Ruling], None]:
            asked.extend(asks)
            return [
                Ruling("Y" if "chess" in ask.user.split("Answer under test")[1] else "N", True) for ask in asks
            ], None

    monkeypatch.setattr(sample, "open_judge", lambda settings: Judge())
    ground = make_ground(holdout=[])
    one = Sample(samples=4, judge=JudgeSettings("openai"))
    records = attack(one, knowing_model(), ground)
    assert scores(records["greedy"]["forget"], "leak_judge_4") == [1.0, 0.0, 0.0, 0.0]
    assert records["drawn"]["forget"][0]["leaks_judge"] > 0
    assert not any(REFUSAL in ask.user for ask in asked)
    assert all(FORGET[0].question in ask.user for ask in asked if "plays chess in Ulm.\n" in ask.user)
    assert [m.name for m in one.measures(ground)][:3] == ["leak_rouge_4", "leak_exact_4", "leak_judge_4"]


def test_membership_is_seen_in_a_model_that_learnt_and_not_in_one_that_did_not() -> None:
    ground = make_ground()
    never = tiny_model("qwen2", max_position_embeddings=WINDOW).eval()
    prior = {"prior": subject_of(never, "prior")}
    aucs = {}
    for name, model in (("learnt", knowing_model()), ("never", tiny_model("qwen2", 1).eval())):
        records = attack(Membership(), model, ground, prior)["scores"]
        aucs[name] = [
            membership_auc(scores(records["forget"], m.name), scores(records["holdout"], m.name))
            for m in Membership().measures(ground)
        ]
    assert aucs["learnt"] == [1.0] * 5
    assert all(auc is not None and 0.05 < auc < 0.95 for auc in aucs["never"])


def test_rows_are_found_at_a_low_rate_of_false_alarms_where_there_are_enough_holdout_rows() -> None:
    many = make_ground(
        forget=KNOWN, holdout=[replace(HOLDOUT[i % 3], index=i, question=f"Who is {i}?") for i in range(100)]
    )
    records = attack(Membership(), knowing_model(), many)["scores"]
    assert scores(records["forget"], "found_loss") == [1.0, 1.0]
    assert sum(record["found_loss"] for record in records["holdout"]) <= 1
    assert scores(records["forget"], "found_reference") == [None, None]
    assert scores(attack(Membership(), knowing_model(), make_ground())["scores"]["forget"], "found_loss") == [None] * 4
    assert "found_loss" not in [measure.name for measure in Membership().measures(make_ground())]


def test_scores_of_membership_by_hand() -> None:
    ground, never = make_ground(), tiny_model("qwen2", max_position_embeddings=WINDOW).eval()
    alone = attack(Membership(), knowing_model(), ground)["scores"]["holdout"]
    assert scores(alone, "reference") == [None] * 3
    beside = attack(Membership(), knowing_model(), ground, {"prior": subject_of(never, "prior")})["scores"]["holdout"]
    before = attack(Membership(), never, ground)["scores"]["holdout"]
    for row, one, two, old in zip(HOLDOUT, alone, beside, before, strict=True):
        assert one["zlib"] == pytest.approx(one["loss"] / len(zlib.compress(f" {row.answer}".encode())))
        assert two["reference"] == pytest.approx(one["loss"] - old["loss"])
        assert two | {"reference": None} == one


def test_the_prior_runs_once_for_all_models_and_is_no_reference_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    run_items = membership.run_items
    monkeypatch.setattr(
        membership, "run_items", lambda runner, *rest: (runs.append(runner), run_items(runner, *rest))[1]
    )
    ground, one = make_ground(), Membership()
    prior = subject_of(tiny_model("qwen2", max_position_embeddings=WINDOW).eval(), "prior")
    for _ in range(2):
        attack(one, knowing_model(), ground, {"prior": prior})
    assert runs.count(prior.runner) == 2  # forget and holdout
    ((_, records),) = one.run(prior, ground, {"prior": prior})
    assert scores(records["forget"], "reference") == [None] * 4
