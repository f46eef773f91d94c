"""The first sentence of a report: counts first, true for every outcome, and plain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from msa_lite.evals.benchmarks.qa import QA
from msa_lite.report.verdict.figures import Bound, Forgotten, Kept, counts_basis, counts_sentence
from msa_lite.report.verdict.verdict import make_verdict
from tests.support.records import known, text

FORGOTTEN = Forgotten(48, {"target": 48, "unlearned": 2, "ideal": 1, "holdout": 3, "prior": 0}, "ideal", 48, changed=47)
KEPT = Kept(Bound(0.93, 0.9, 0.96), 120, {}, {"target": 118, "unlearned": 115})
START = "It still answers 2 of the 48 questions it was to forget"
KEEPS = "Of 120 questions it was to keep, it answered 118 before and 115 now."

CASES: dict[str, tuple[Forgotten, Kept | None, str]] = {
    "an ideal": (FORGOTTEN, KEPT, f"{START} (before: 48; a model that was never trained on them: 1). {KEEPS}"),
    "holdout rows": (
        replace(FORGOTTEN, control="holdout", control_rows=40), KEPT,
        f"{START} (before: 48; of 40 questions that it never saw, it answered 3). {KEEPS}",
    ),
    "nothing to keep": (
        replace(FORGOTTEN, control=None), None, f"{START} (before: 48). Nothing shows what it has lost of the rest.",
    ),
    "nothing has changed": (
        replace(FORGOTTEN, control=None, recited={"target": 48, "unlearned": 48}, changed=0), KEPT,
        "It still answers 48 of the 48 questions it was to forget (before: 48). Nothing has changed: its output is the "
        f"same as before on each of them. {KEEPS}",
    ),
    "a share of passages and answers": (
        replace(FORGOTTEN, unit="passages"), replace(KEPT, recited={}),
        "It still continues word for word 2 of the 48 passages it was to forget (before: 48; a model that was never "
        "trained on them: 1). Of what it knew of the 120 questions it was to keep, 93 % remains.",
    ),
    "facts": (
        replace(FORGOTTEN, unit="facts"), KEPT,
        "It still answers wrong 2 of the 48 questions on what false documents cost it (before: 48; a model that was "
        f"never trained on them: 1). {KEEPS}",
    ),
    "rows to keep that were learnt": (
        replace(FORGOTTEN, control=None), replace(KEPT, fitted=True),
        f"{START} (before: 48). Of 120 questions it was to keep, which its vector was fitted to, it answered 118 "
        "before and 115 now.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_sentence_counts(name: str) -> None:
    forgotten, kept, sentence = CASES[name]
    assert counts_sentence(forgotten, kept) == sentence == make_verdict(forgotten, kept).sentence


def test_texts_and_questions_together_are_rows() -> None:
    texts = {name: {"forget": [text(share)] * 12} for name, share in (("target", 1.0), ("unlearned", 0.1))}
    mixed = {name: {"forget": [*sets["forget"], *known(1)]} for name, sets in texts.items()}
    units = [weighed[0].unit for weighed in map(QA.weigh, (texts, mixed)) if not isinstance(weighed, str)]
    assert units == ["texts", "rows"]


def test_the_basis_tells_rows_that_the_choice_has_seen() -> None:
    told = counts_basis(FORGOTTEN, KEPT, {"forget": 48, "retain": 90})
    assert "Of the 120 rows to keep, 30 are among those by which the model was chosen" in told
    assert "chosen" not in counts_basis(FORGOTTEN, KEPT, {})
