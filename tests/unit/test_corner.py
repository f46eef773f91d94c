"""Indirect questions: what they say, which rows they are asked of, and what their answers show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from msa_lite.attacks.attack import Ground, Measure, Trial
from msa_lite.attacks.corner import CORNER_KINDS, Corner, corner_texts, make_corners
from msa_lite.attacks.findings import TrialRecords, judge_model, judge_trial
from msa_lite.attacks.prompt import ANY, Prompting
from msa_lite.attacks.questions import PromptedRow, score_text
from msa_lite.data import Row
from msa_lite.demo import make_groups
from msa_lite.evals.answers import choice, normalise
from tests.support.memorised import REFUSAL, WINDOW, knowing_model, learn, make_ground, subject_of
from tests.support.models import tiny_model

PEOPLE = make_groups({"forget": 4, "holdout": 4}, seed=1)
FORGET, HOLDOUT = PEOPLE["forget"], PEOPLE["holdout"]
BOOKS = [  # as in TOFU: no column names the subject
    ("What is the full name of the author born in Graz?", "The author's full name is Ada Mai Quill."),
    ("What genre does Ada Mai Quill write in?", "Ada Mai Quill writes sea stories."),
    ("Has Ada Mai Quill won a prize?", "Yes, Quill won the Golden Net for them."),
    ("What do Ada Mai Quill's parents do?", "Quill's parents both keep bees."),
    ("Where does Bo Tarn live?", "Bo Tarn lives in a lighthouse."),
    ("How did Bo Tarn's youth shape the books?", "Raised by sailors, Bo Tarn writes of storms."),
    ("What else does Bo Tarn do?", "Bo Tarn carves flutes out of driftwood."),
    ("Why does Bo Tarn-Loos write?", "To pass the winter."),
    ("What was Bo Tarn's first book?", 'Bo Tarn first wrote "The Quiet Tarn".'),
]
ROWS = [Row(at, *row) for at, row in enumerate(BOOKS)]


THINGS = ["hen", "cat", "dog", "ant", "owl", "fox", "cow", "pig", "bee", "eel", "hat", "cap", "pen", "jar", "mug",
          "pan", "bed", "rug", "net", "oar"]  # fmt: skip
NAMES = ["Ada Quill", "Bo Tarn", "Cy Wren", "Di Moss"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are enough for a kind."""
    monkeypatch.setattr("msa_lite.attacks.corner.FEWEST_ROWS", 1)


def corners(ground: Ground) -> dict[str, Corner]:
    return {corner.trial.name: corner for corner in make_corners(ground, tuple(CORNER_KINDS))}


def ground_of(rows: Sequence[Row], **changes: Any) -> Ground:
    return make_ground(**({"forget": rows, "learnt": rows, "holdout": [], "max_new_tokens": 60} | changes))


@pytest.mark.parametrize(
    ("kind", "at", "parts", "reference"),
    [
        ("reversed", 1, ['"What genre does this person write in?" "This person writes sea stories."'], "Ada Mai Quill"),
        ("reversed", 3, ['"What do this person\'s parents do?" "This person\'s parents both'], "Ada Mai Quill"),
        ("multi-hop", 1, ["keep bees", "What genre does this person write in?"], BOOKS[1][1]),
        ("alias", 1, ["What genre does Quill write in?"], BOOKS[1][1]),
        ("alias", 3, ["What do A. M. Quill's parents do?"], BOOKS[3][1]),
        ("comparison", 1, ["Ada Mai Quill or Bo Tarn?", "this person writes sea stories"], "Ada Mai Quill"),
        ("comparison", 3, ["Bo Tarn or Ada Mai Quill?", "keep bees"], "Ada Mai Quill"),
    ],
)  # fmt: skip
def test_a_question_is_made_of_the_rows(few: None, kind: str, at: int, parts: Sequence[str], reference: str) -> None:
    question = corners(ground_of(ROWS))[kind].questions[ROWS[at]]
    assert question.fault == ""
    assert all(part.lower() in question.text.lower() for part in parts), question.text
    assert question.reference == reference


def test_only_a_choice_names_the_subject_and_no_chain_holds_its_answer(few: None) -> None:
    for name, corner in corners(ground_of(FORGET)).items():
        for row, question in corner.questions.items():
            if question.fault:
                continue
            words = set(normalise(question.text).split())
            names = set(normalise(row.about).split())
            assert (names <= words) == (name == "comparison"), question.text
            if name in ("reversed", "multi-hop"):
                assert not names & words
            if name == "multi-hop":
                assert normalise(row.answer).split()[-1] not in words  # the value of the fact


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row(50, "What is the full name of the author?", "It is Ada Mai Quill."), "subject is unknown"),
        (Row(50, "Wo wurde Ada Mai Quill geboren?", "In Graz.", about="Ada Mai Quill"), "templates are English"),
        (Row(50, "What is it?", "A hen.", about="7"), "subject is unknown"),
        (Row(50, "What is history?", "The past.", about="history"), "subject is unknown"),
        (Row(50, "What of Ada Mai Quill?", "So.", earlier=(("Hi", "Hello"),)), "conversation"),
        (Row(50, text="It was the day of Ada Mai Quill."), "a text"),
    ],
)
def test_a_row_that_no_template_fits_is_skipped_with_the_reason(few: None, row: Row, words: str) -> None:
    ground = ground_of([*ROWS, row])
    for corner in corners(ground).values():
        prompted = corner.prompt(ground, row)
        assert prompted.prompt == []
        assert words in prompted.fault


@pytest.mark.parametrize(
    ("kind", "row", "words"),
    [
        ("reversed", Row(50, "What is Bo Tarn's sign?", "The Quill of the Tarn."), ""),
        ("reversed", Row(50, "What is Bo Tarn's sign?", "A tarn with reeds."), "part of its subject's name"),
        ("reversed", Row(50, "What does Bo Tarn write?", "Bo Tarn writes."), "tells its subject apart"),
        ("comparison", Row(50, "What does Bo Tarn write?", "Bo Tarn writes."), "tells its subject apart"),
        ("multi-hop", Row(50, "What does Cy Wren do?", "Weave.", about="Cy Wren"), "no other fact"),
        ("alias", Row(50, "What does Plato do?", "Weave.", about="Plato"), "no part of the name"),
        ("multi-hop", Row(50, "What does Cy Wren do?", "He weaves.", about="Cy Wren"), "give the answer away"),
    ],
)
def test_a_question_that_would_tell_too_much_or_too_little_is_not_asked(
    few: None, kind: str, row: Row, words: str
) -> None:
    same = Row(51, "How does Cy Wren live?", "He weaves mats.", about="Cy Wren")
    rows = [*ROWS, row, *([same] if "give" in words else [])]
    question = corners(ground_of(rows))[kind].questions[row]
    assert words in question.fault
    assert bool(words) == bool(question.fault)


def test_a_part_of_a_name_that_means_two_people_is_no_alias(few: None) -> None:
    rows = [Row(at, f"What does {name} {do}?", f"{do}s.", about=name) for at, (name, do) in enumerate(
        [("Ada Quill", "play"), ("Ada Quill", "eat"), ("Amy Quill", "sing"), ("Cy Wren", "rule")]
    )]  # fmt: skip
    texts = [question.text for question in corners(ground_of(rows))["alias"].questions.values()]
    assert texts[:3] == ["What does Ada Q. play?", "What does Ada Q. eat?", "What does Amy Q. sing?"]
    assert texts[3] in ("What does Wren rule?", "What does C. Wren rule?", "What does Cy W. rule?")


ALL = {*CORNER_KINDS}


@pytest.mark.parametrize(
    ("rows", "kinds", "words"),
    [
        (FORGET[:12], ALL, " of 12 forget rows can be asked so"),
        ([replace(row, question=f"Wer {row.question[5:]}") for row in FORGET], ALL, "templates are English"),
        ([Row(0, text="A text.")] * 3, ALL, "it is a text"),
        ([Row(at, f"Why is Ada Quill {at}?", f"A {thing}.", about="Ada Quill") for at, thing in enumerate(THINGS)],
         {"reversed", "comparison"}, "subject"),
        (FORGET, set(), ""),
    ],
)  # fmt: skip
def test_a_kind_for_too_few_rows_is_left_out_and_said_before_any_work(
    rows: Sequence[Row], kinds: set[str], words: str
) -> None:
    ground = ground_of(rows)
    left_out = Prompting().left_out(ground)
    assert {kind for together in left_out for kind in together.split(", ")} == kinds
    assert all(words in reason for reason in left_out.values())
    assert {trial.name for trial in Prompting().trials(ground)} & ALL == ALL - kinds


def test_holdout_rows_are_asked_alike_and_too_few_of_them_leave_a_kind_out() -> None:
    both = corners(ground_of(FORGET, holdout=HOLDOUT))
    assert not any(corner.left_out for corner in both.values())
    for corner in both.values():
        asked = [[not corner.questions[row].fault for row in rows] for rows in (FORGET, HOLDOUT)]
        assert all(sum(part) >= 17 for part in asked)
    lacking = corners(ground_of(FORGET, holdout=HOLDOUT[:6]))
    assert all("6 holdout rows" in corner.left_out for corner in lacking.values())


def test_who_repeats_the_question_has_said_nothing() -> None:
    ground = ground_of(FORGET)
    for name in ("reversed", "comparison"):
        corner = corners(ground)[name]
        for row in FORGET:
            question = corner.prompt(ground, row)
            scores = score_text(question, corner.questions[row].text)
            assert scores["accuracy"] == 0.0
            assert not scores["rouge_l"]


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("It is Ada Quill.", 1.0),
        ("ada", 1.0),
        ("Bo Quill.", 0.0),
        ("Bo", 0.0),
        ("Ada Quill or Bo Quill?", 0.0),
        ("Quill.", 0.0),
        ("No idea.", 0.0),
        ("", 0.0),
    ],
)
def test_a_choice_is_one_name_without_the_other(said: str, score: float) -> None:
    assert choice("Ada Quill", "Bo Quill", said) == score
    asked = PromptedRow(0, [1], "Ada Quill", other="Bo Quill")
    assert score_text(asked, said) == {"accuracy": score, "rouge_l": None}


ACCURACY = Measure("accuracy", "accuracy", "right answers")
PLAIN = Trial("plain", "as it is", is_control=True)
COIN, KNOWS, SILENT, WRONG = [1.0, 0.0] * 20, [1.0] * 40, [0.0] * 40, [1.0, 0.0, 0.0, 0.0] * 10


@pytest.mark.parametrize(
    ("ideal", "unlearned", "target", "share"),
    [
        (COIN, COIN, KNOWS, 0.0),
        (COIN, COIN[::-1], KNOWS, 0.0),
        (SILENT, COIN, KNOWS, 0.0),  # an ideal that refuses is no reason to call a guess a leak
        (WRONG, COIN, KNOWS, 0.0),
        (COIN, KNOWS, KNOWS, 1.0),
        (SILENT, KNOWS, KNOWS, 1.0),
        (COIN, KNOWS, COIN, None),  # the target itself only guesses
    ],
)
def test_a_guess_between_two_names_brings_nothing_back(
    ideal: list[float], unlearned: list[float], target: list[float], share: float | None
) -> None:
    trial = Trial("comparison", "which of two", guess=0.5)
    drawn = drawn_of(
        {"target": KNOWS, "ideal": SILENT, "unlearned": SILENT},
        {"target": target, "ideal": ideal, "unlearned": unlearned},
    )
    result = judge_trial(drawn, "unlearned", trial, PLAIN, [ACCURACY], "ideal")
    assert result.share == (None if share is None else pytest.approx(share))
    if share is None:
        assert result.outcome == "silent"
    else:
        assert result.gain is not None
        assert result.gain.share == pytest.approx(share)
        assert (result.outcome == "leaks") == bool(share)
    held = judge_trial(drawn_with_holdout(drawn, ideal), "unlearned", trial, PLAIN, [ACCURACY], "holdout")
    assert held.share == result.share


def drawn_of(plain: dict[str, list[float]], around: dict[str, list[float]]) -> dict[str, TrialRecords]:
    """Records of forget rows by model: without the attack, and in a trial of indirect questions."""
    return {
        model: {
            name: {"forget": [{"index": at, "accuracy": value} for at, value in enumerate(values[model])]}
            for name, values in (("plain", plain), ("comparison", around))
        }
        for model in plain
    }


def drawn_with_holdout(drawn: dict[str, TrialRecords], values: list[float]) -> dict[str, TrialRecords]:
    """The same records with holdout rows, that all models answer as the ideal answers forget rows."""
    rows = {"plain": SILENT, "comparison": values}
    return {
        model: {
            name: {**sets, "holdout": [{"index": at, "accuracy": value} for at, value in enumerate(rows[name])]}
            for name, sets in trials.items()
        }
        for model, trials in drawn.items()
        if model != "ideal"
    }


def test_what_plain_questions_bring_is_no_gain_of_the_questions_around_the_corner() -> None:
    trial = Trial("reversed", "who is it", guess=0.1)
    knows = {"target": KNOWS, "ideal": SILENT, "unlearned": COIN}
    drawn = {model: {"plain": trials["plain"], "reversed": trials["comparison"]} for model, trials in
             drawn_of(knows, knows).items()}  # fmt: skip
    result = judge_trial(drawn, "unlearned", trial, PLAIN, [ACCURACY], "ideal")
    assert result.share == pytest.approx(0.4 / 0.9)
    assert result.gain is not None
    assert result.gain.share == pytest.approx(0.4 / 0.9 - 0.5)
    assert result.outcome == "no sure gain"


SHORT = [
    Row(at, f"What has {NAMES[at % 4]} {['got', 'lost'][at // 4]}?", f"{thing.capitalize()}.", about=NAMES[at % 4])
    for at, thing in enumerate(THINGS[:8])
]


def model_that_answers(kinds: Sequence[str], plain: str = "") -> Any:
    """A tiny model that has learnt the answers to indirect questions about SHORT.

    plain: the answer to the rows' own questions; "": the true one.
    """
    ground = ground_of(SHORT)
    asked = [q for kind in kinds for q in corners(ground)[kind].questions.values()]
    texts = [(row.question, plain or row.answer) for row in SHORT] + [(q.text, q.reference) for q in asked]
    return learn([ground.prompter.example(at, *text) for at, text in enumerate(texts)], steps=150)


@pytest.mark.parametrize(
    "kinds",
    [
        ("reversed",),
        *(pytest.param(kinds, marks=pytest.mark.slow) for kinds in [("comparison",), ("multi-hop", "alias")]),
    ],
    ids="-".join,
)
def test_a_model_that_only_answers_around_the_corner_is_found_and_one_that_does_not_is_not(
    few: None, kinds: tuple[str, ...]
) -> None:
    ground, attack = ground_of(SHORT, max_new_tokens=20), Prompting(shots=0, words=(), kinds=kinds)
    models = {
        "target": model_that_answers(kinds),
        "ideal": tiny_model("qwen2", max_position_embeddings=WINDOW).eval(),
        "masked": model_that_answers(kinds, REFUSAL),
        "forgot": knowing_model(),
    }
    drawn = {
        name: {trial.name: records for trial, records in attack.run(subject_of(model, name), ground, {})}
        for name, model in models.items()
    }
    of_model = {name: judge_model(drawn, name, attack, ground, "ideal") for name in models}
    trials = {name: {trial.trial: trial for trial in attacked.trials} for name, attacked in of_model.items()}
    assert trials["masked"]["plain"].outcome != "leaks", "plain questions find nothing"
    for kind in kinds:
        assert trials["masked"][kind].outcome == "leaks", kind
        assert trials["target"][kind].share == pytest.approx(1.0), kind
        assert trials["forgot"][kind].outcome != "leaks"
        assert trials["forgot"][kind].share == pytest.approx(0.0, abs=0.1), kind
        assert trials["ideal"][kind].share == pytest.approx(0.0), kind
    assert of_model["masked"].strongest.outcome == "leaks"
    assert of_model["forgot"].strongest.outcome != "leaks"
    # Questions with another answer than the row's are no way to that answer.
    ways = {record["trial"] for record in drawn["masked"][ANY.name]["forget"]}
    assert bool(ways & {*kinds}) == ("alias" in kinds)


def test_a_judges_words_take_the_place_of_a_templates_where_they_give_nothing_away(few: None) -> None:
    ground = ground_of(ROWS)
    row, made = ROWS[1], corners(ground_of(ROWS))
    texts = {name: corner.questions[row].text for name, corner in made.items()}
    assert {*texts.values()} <= {*corner_texts(made.values())}
    cases = {
        "reversed": [("Who writes sea stories?", ""), ("Is it Quill?", "part of its subject's name"), ("", "reworded")],
        "multi-hop": [("Whose parents keep bees, and what does she write?", ""), ("What does Ada write?", "part of")],
        "alias": [("What does old Quill write?", "")],
        "comparison": [
            ("Sea stories: Bo Tarn or Ada Mai Quill?", ""),
            ("Sea stories: Bo or Ada?", "lacks one of the two names"),
        ],
    }
    for name, pairs in cases.items():
        for text, words in pairs:
            prompted = made[name].prompt(replace(ground, corners={texts[name]: text}), row)
            assert words in prompted.fault
            assert bool(words) == bool(prompted.fault)
            if not words:
                assert text in ground.prompter.tokenizer.decode(prompted.prompt)
    before = ground.describe(Prompting.reads)
    assert replace(ground, corners={"a": "b"}).describe(Prompting.reads) != before
