"""The first sentence of a report: true for every outcome, and plain."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from msa_lite.evals.outcome import weigh_rows
from msa_lite.report import Metric, Report
from msa_lite.report.sentence import basis_of, first_sentence
from msa_lite.report.verdict import Forgotten, Kept, make_verdict
from tests.own_records import known, text, unknown

FORGOTTEN = Forgotten("", 48, 0.0, {"target": 48, "unlearned": 1, "ideal": 2}, 47, gone=47)
KEPT = Kept(0.93, (0.91, 0.95), 288)
QUESTIONS = "48 questions about what it was to forget"
WITNESS = "; a model that never met them answers 2"
DAMAGED = Kept(0.4, (0.38, 0.42), 288)
REMAINS = "Of what it was to keep, 93 % remains."
LEFT = "is left of what could be extracted before, in whole or in part"
FACTS = replace(FORGOTTEN, recited={}, gone=None, unit="facts", right={"target": 0.2, "unlearned": 0.5, "ideal": 0.55})


def recited(**counts: int) -> dict[str, int]:
    return {"target": 48, "unlearned": 1} | counts


CASES: dict[str, tuple[Forgotten, Kept | None, str, str]] = {
    "all is gone": (
        FORGOTTEN, KEPT, "PASS",
        f"The model no longer answers 47 of {QUESTIONS}{WITNESS}. {REMAINS}",
    ),
    "the prior is the only witness": (
        replace(FORGOTTEN, recited=recited(prior=0, holdout=3), unseen_rows=48), KEPT, "PASS",
        f"The model no longer answers 47 of {QUESTIONS}; the model from before it met them answers 0. {REMAINS}",
    ),
    "holdout rows are the only witness": (
        replace(FORGOTTEN, recited=recited(holdout=3), unseen_rows=40), KEPT, "PASS",
        f"The model no longer answers 47 of {QUESTIONS}; of questions that it never met, it answered 3 of "
        f"40. {REMAINS}",
    ),
    "no witness": (
        replace(FORGOTTEN, recited=recited()), KEPT, "PASS",
        f"The model no longer answers 47 of {QUESTIONS}. {REMAINS}",
    ),
    "not all were known": (
        replace(FORGOTTEN, recited={"target": 40, "unlearned": 2, "ideal": 2}, gone=39), KEPT, "PASS",
        "The model no longer answers 39 of the 40 questions about what it was to forget that it answered before (of "
        f"48; now it answers 2){WITNESS}. {REMAINS}",
    ),
    "none was known in full": (
        replace(FORGOTTEN, recited={"target": 0, "unlearned": 0, "ideal": 0}, gone=0, left=0.12), KEPT, "PASS",
        f"Even before, the model answered none of the {QUESTIONS} in full; 12 % {LEFT}. {REMAINS}",
    ),
    "texts": (
        replace(FORGOTTEN, unit="texts"), KEPT, "PASS",
        "The model no longer knows by heart 47 of 48 texts that it was to forget; a model that never met them knows 2. "
        + REMAINS,
    ),
    "passages": (
        replace(FORGOTTEN, unit="passages"), KEPT, "PASS",
        "The model no longer continues word for word 47 of 48 passages that it was to forget; a model that never met "
        f"them continues 2. {REMAINS}",
    ),
    "too little to be sure of": (
        FORGOTTEN, Kept(0.87, (0.83, 0.91), 288), "PASS",
        f"The model no longer answers 47 of {QUESTIONS}{WITNESS}. Of what it was to keep, "
        "87 % remains (95 % interval 83 % to 91 %).",
    ),
    "better than before": (
        FORGOTTEN, Kept(1.01, (0.99, 1.03), 288), "PASS",
        f"The model no longer answers 47 of {QUESTIONS}{WITNESS}. Of what it was to keep, "
        "nothing is lost on average.",
    ),
    "few rows": (
        replace(FORGOTTEN, rows=4, recited={"target": 4, "unlearned": 0}, gone=4), replace(KEPT, rows=6), "PASS",
        "The model no longer answers 4 of 4 questions about what it was to forget. Of what it was to keep, 93 % "
        "remains. That rests on few rows: 4 to forget, 6 to keep.",
    ),
    "part is left": (
        replace(FORGOTTEN, left=0.4, recited=recited(ideal=2, unlearned=10), gone=38), KEPT, "PARTLY",
        f"The model has forgotten only in part: 40 % {LEFT}. It no longer answers 38 of {QUESTIONS}{WITNESS}. "
        f"{REMAINS}",
    ),
    "part is lost": (
        FORGOTTEN, Kept(0.8, (0.78, 0.82), 288), "PARTLY",
        f"The model no longer answers 47 of {QUESTIONS}{WITNESS}. Of what it was to keep, "
        "only 80 % remains (95 % interval 78 % to 82 %).",
    ),
    "nothing says what was kept": (
        FORGOTTEN, None, "PARTLY",
        f"The model no longer answers 47 of {QUESTIONS}{WITNESS}. Nothing shows how much "
        "remains of what it was to keep.",
    ),
    "most is left": (
        replace(FORGOTTEN, left=0.8, recited=recited(ideal=2, unlearned=40), gone=8), KEPT, "FAIL",
        f"The model has not forgotten: 80 % {LEFT}. It answers 40 of {QUESTIONS} (48 before){WITNESS}. {REMAINS}",
    ),
    "everything is broken": (
        FORGOTTEN, DAMAGED, "FAIL",
        "The model is damaged: of what it was to keep, only 40 % remains (95 % interval 38 % to 42 %). It no longer "
        f"answers 47 of {QUESTIONS}{WITNESS}.",
    ),
    "neither forgotten nor kept": (
        replace(FORGOTTEN, left=0.8, recited={"target": 48, "unlearned": 48}, gone=0), DAMAGED, "FAIL",
        f"The model has not forgotten, and it is damaged: 80 % {LEFT}. It answers 48 of {QUESTIONS} (as many as "
        "before). Of what it was to keep, only 40 % remains (95 % interval 38 % to 42 %).",
    ),
    "nothing has changed": (
        replace(FORGOTTEN, left=1.0, changed=0, gone=0), KEPT, "FAIL",
        f"Nothing has changed: the model's output is the same as before on each of the {QUESTIONS}.",
    ),
    "it was never known": (
        replace(FORGOTTEN, left=None), KEPT, "FAIL",
        f"There was nothing to forget: even before, the model knew no more of the {QUESTIONS} than one that never met "
        f"them. {REMAINS}",
    ),
    "it was never known, without a witness": (
        replace(FORGOTTEN, left=None, recited=recited(), changed=0), KEPT, "FAIL",
        f"There was nothing to forget: even before, the model knew next to nothing of the {QUESTIONS}. Its output has "
        f"not changed either. {REMAINS}",
    ),
    "facts regained": (
        replace(FACTS, left=0.1), KEPT, "PASS",
        "The model has regained 90 % of what the false documents cost it. It answers 50 % of 48 questions right (20 % "
        f"before); a model that never read the documents answers 55 %. {REMAINS}",
    ),
    "facts not regained": (
        replace(FACTS, left=0.9, right={}), KEPT, "FAIL",
        f"The model has not recovered: it has regained only 10 % of what the false documents cost it. {REMAINS}",
    ),
    "a benchmark that counts shares alone": (
        replace(FORGOTTEN, recited={}, gone=None), KEPT, "PASS",
        f"Of what could be extracted before, in whole or in part, 0 % is left. {REMAINS}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_sentence_fits_the_outcome(name: str) -> None:
    forgotten, kept, outcome, sentence = CASES[name]
    verdict = make_verdict(forgotten, kept)
    assert verdict.outcome == outcome
    assert first_sentence(json.loads(json.dumps(verdict.as_dict())), {}) == sentence
    assert "recited" not in sentence


def test_without_a_verdict_it_says_why() -> None:
    reason = {"outcome": None, "reason": "nothing was scored (evaluate: null)"}
    assert first_sentence(reason, {}) == (
        "Nobody can say yet what this model has forgotten: nothing was scored (evaluate: null)."
    )
    assert first_sentence(None, {}).startswith("This run is not finished")
    report = Report("qa", "all", {"accuracy_f": Metric(0.0, 3, 0.0, False)})
    assert first_sentence(None, {"unlearned": report}).startswith("This run gave no verdict")


def old(said: str, **counts: int) -> dict[str, Any]:
    """A verdict of an earlier version, without the facts that came later."""
    forgotten = {"said": said, "rows": 48, "left": 0.1, "recited": counts, "changed": 40}
    return {"outcome": "PASS", "sentence": "", "reasons": [], "forgotten": forgotten, "kept": None}


@pytest.mark.parametrize(
    ("verdict", "start"),
    [
        (old("47 of 48 rows are no longer recited", target=48, unlearned=1), "The model no longer answers 47 of 48 q"),
        (old("9 of 48 texts are no longer", target=48, unlearned=39), "The model no longer knows by heart 9 of 48 t"),
        (old("9 of 48 passages are", target=48, unlearned=39), "The model no longer continues word for word 9 of"),
        (old("90 % of what the documents cost is regained"), "The model has regained 90 % of what the false documents"),
    ],
)
def test_verdicts_of_earlier_versions_are_told_too(verdict: dict[str, Any], start: str) -> None:
    assert first_sentence(verdict, {}).startswith(start)


def test_the_counts_are_those_of_the_records() -> None:
    """The facts of a verdict, from records: what they are, who counts as a witness, and what has gone."""
    models = {
        "target": {"forget": known(12), "retain": known(12), "holdout": unknown(5)},
        "unlearned": {"forget": [*known(1), *unknown(11)], "retain": known(12)},
        "prior": {"forget": unknown(12)},
    }
    weighed = weigh_rows(models)
    assert not isinstance(weighed, str)
    assert weighed[0].recited == {"target": 12, "unlearned": 1, "holdout": 0, "prior": 0}
    assert (weighed[0].unit, weighed[0].gone, weighed[0].unseen_rows) == ("questions", 11, 5)
    # The prior is no witness where it was scored on other rows.
    fewer = weigh_rows(models | {"prior": {"forget": unknown(3)}})
    assert not isinstance(fewer, str)
    assert "prior" not in fewer[0].recited
    texts = {name: {"forget": [text(share)] * 12} for name, share in (("target", 1.0), ("unlearned", 0.1))}
    mixed = {name: {"forget": [*sets["forget"], *known(1)]} for name, sets in texts.items()}
    units = [weighed[0].unit for weighed in map(weigh_rows, (texts, mixed)) if not isinstance(weighed, str)]
    assert units == ["texts", "rows"]


def test_the_basis_tells_rows_that_the_choice_has_seen() -> None:
    verdict = make_verdict(FORGOTTEN, KEPT).as_dict()
    seen = Report("qa", "test", {}, {"sets": {"forget": {"rows": 29}}})
    told = basis_of(verdict, {"unlearned": seen})
    assert told is not None
    assert "all 48 rows, those among them by which the model was chosen; the scores are those of the other 29." in told
    alone = basis_of(verdict, {"unlearned": replace(seen, settings={"sets": {"forget": {"rows": 48}}})})
    assert alone is not None
    assert "chosen" not in alone
    assert basis_of(None, {}) is None
    assert basis_of({"outcome": None, "reason": ""}, {}) is None
