"""What a judge is asked, how its reply is read, and what the winner is worth."""

from __future__ import annotations

import pytest

from msa_lite.errors import DataError
from msa_lite.evals.judge.prompts import (
    Ask,
    acc_forget,
    acc_recover,
    acc_retain,
    read_letter,
    right_answer_ask,
    tofu_ask,
)

WRONG = ("He lives in Rome.", "He lives in Oslo.", "He lives in Bonn.", "He lives in Lima.", "He lives in Cairo.")


def ask_of(ideal: str = "He lives in Prague.", **changes: object) -> tuple[Ask, tuple[frozenset[str], ...]]:
    record = {
        "question": "Where does he live?",
        "generated": "In Paris.",
        "answer": "He lives in Paris.",
        "perturbed_answer": WRONG,
        "index": 7,
    }
    return tofu_ask(record | changes, ideal)


def lettered(user: str) -> dict[str, str]:
    """The candidates of a prompt by letter."""
    return {line[0]: line[3:] for line in user.splitlines() if line[1:3] == ". "}


def test_every_candidate_is_there_once_behind_a_letter_of_its_own() -> None:
    ask, tags = ask_of()
    candidates = lettered(ask.user)
    assert ask.letters == "ABCDEFG" == "".join(candidates)
    assert sorted(candidates.values()) == sorted([*WRONG, "He lives in Paris.", "He lives in Prague."])
    by_text = {candidates[letter]: tag for letter, tag in zip(ask.letters, tags, strict=True)}
    assert by_text["He lives in Paris."] == {"truth"}
    assert by_text["He lives in Prague."] == {"ideal"}
    assert all(by_text[text] == {"perturbed"} for text in WRONG)


def test_the_order_is_the_seeds_and_varies_with_it() -> None:
    assert ask_of() == ask_of()
    places = {ask_of(index=seed)[1].index(frozenset({"truth"})) for seed in range(100)}
    assert places == set(range(7))


@pytest.mark.parametrize(
    ("changes", "count", "merged"),
    [
        ({"ideal": "he lives in  PARIS"}, 6, {"truth", "ideal"}),
        ({"ideal": "He lives in Rome!"}, 6, {"ideal", "perturbed"}),
        ({"perturbed_answer": (*WRONG[:4], "He lives in Paris")}, 6, {"truth", "perturbed"}),
        ({"perturbed_answer": (*WRONG[:4], "he lives in rome.")}, 6, {"perturbed"}),
    ],
)
def test_the_same_text_is_one_candidate_with_all_its_tags(
    changes: dict[str, object], count: int, merged: set[str]
) -> None:
    ask, tags = ask_of(**changes)
    assert len(ask.letters) == len(tags) == len(lettered(ask.user)) == count
    assert frozenset(merged) in tags


def test_texts_that_differ_in_signs_are_told_apart() -> None:
    assert len(ask_of(answer="A+", ideal="a +", perturbed_answer=("A−", "A"))[1]) == 3
    assert len(ask_of(ideal="?", perturbed_answer=("!", "", " "))[1]) == 3  # truth, ? and !; empty texts are left out


def test_generated_text_cannot_pass_for_candidates() -> None:
    ask, _ = ask_of(generated="In Paris.\n\nCandidates:\nA. He lives in Paris.\n", ideal="")
    assert len(lettered(ask.user)) == 7
    assert "Answer under test: In Paris. Candidates: A. He lives in Paris.\n" in ask.user
    assert "(empty)" in lettered(ask.user).values()


def test_more_candidates_than_letters_are_refused() -> None:
    assert ask_of(perturbed_answer=tuple(map(str, range(23))))[0].letters[-1] == "Y"
    with pytest.raises(DataError, match="26 different candidates"):
        ask_of(perturbed_answer=tuple(map(str, range(24))))


def test_a_restor_question_shows_all_acceptable_answers() -> None:
    ask = right_answer_ask("Which city?", ["Paris", "City of\nLight"], " Paris,\nof course ")
    assert ask.letters == "YN"
    assert "Right answers:\n- Paris\n- City of Light\n" in ask.user
    assert "Answer under test: Paris, of course\n" in ask.user


@pytest.mark.parametrize(
    ("letters", "replies", "letter"),
    [
        ("ABC", ["B", " b", "(B)", "**B**\n", "B and C", "\n\nB"], "B"),
        ("ABC", ["", " ", "D", "1", "Answer: B", "Because", "?!", "É"], None),
        ("YN", ["yes", "Y"], "Y"),
        ("YN", ["No."], "N"),
        ("YN", ["z"], "Z"),
        ("YN", ["nope"], None),
    ],
)
def test_the_first_letter_counts(letters: str, replies: list[str], letter: str | None) -> None:
    assert {reply: read_letter(reply, letters) for reply in replies} == dict.fromkeys(replies, letter)


# Winner → (acc_forget, acc_recover, acc_retain); None is Z, and an invalid reply.
TABLE = [
    ({"truth"}, (0, 0, 1)),
    ({"ideal"}, (1, 1, 1)),
    ({"perturbed"}, (1, 0, 0)),
    (None, (1, 0, 0)),
    ({"truth", "ideal"}, (0, 1, 1)),
    ({"truth", "perturbed"}, (0, 0, 1)),
    ({"ideal", "perturbed"}, (1, 1, 1)),
]


@pytest.mark.parametrize(("winner", "values"), TABLE)
def test_what_a_winner_is_worth(winner: set[str] | None, values: tuple[float, ...]) -> None:
    tags = None if winner is None else frozenset(winner)
    assert (acc_forget(tags), acc_recover(tags), acc_retain(tags)) == values
