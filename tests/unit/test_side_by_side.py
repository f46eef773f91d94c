"""Questions side by side: which are taken, and how they read."""

from __future__ import annotations

from typing import Any

import pytest

from msa_lite.evals.benchmarks.muse import MUSE
from msa_lite.evals.benchmarks.qa import QA
from msa_lite.evals.benchmarks.restor import RESTOR
from msa_lite.evals.scores.records import pick_examples


def asked(count: int, answer: str | None = "yes") -> list[dict[str, Any]]:
    return [{"question": f"q{i}", "answer": "a", "generated": answer} for i in range(count)]


@pytest.mark.parametrize(
    ("forget", "retain", "counts"), [(20, 20, (5, 5)), (2, 20, (2, 8)), (20, 0, (10, 0)), (3, 3, (3, 3))]
)
def test_ten_questions_half_of_them_to_be_forgotten(forget: int, retain: int, counts: tuple[int, int]) -> None:
    models = {name: {"forget": asked(forget), "retain": asked(retain), "holdout": asked(9)} for name in ("target", "x")}
    models["unlearned"] = {"forget": asked(forget, "no"), "retain": asked(retain)}
    examples = pick_examples(QA, models, seed=0)
    names = [example.set_name for example in examples]
    assert (names.count("forget"), names.count("retain")) == counts
    assert len({(example.set_name, example.question) for example in examples}) == len(examples)
    assert examples == pick_examples(QA, models, seed=0)
    assert dict(examples[0].answers) == {"target": "yes", "unlearned": "no"}


def test_texts_are_left_out_and_other_benchmarks_sets_are_found() -> None:
    texts = {"forget": [{"text": "t"}], "retain": asked(1, None)}
    assert pick_examples(QA, {"target": texts, "unlearned": texts}, 0) == []
    muse = {"verbmem": [{"prompt": "p", "gt": "g", "generated": "x"}], "knowmem_forget": asked(1)}
    assert [example.set_name for example in pick_examples(MUSE, {"target": muse, "unlearned": muse}, 0)] == ["forget"]
    rows = [{"question": "q", "answers": ["a", "b"], "generated": ["x", "y"], "corrupted": c} for c in (True, False)]
    restor = {"questions": rows}
    (forget, retain) = pick_examples(RESTOR, {"target": restor, "unlearned": restor}, 0)
    assert (forget.set_name, retain.set_name, forget.expected) == ("forget", "retain", "a / b")
    assert forget.answers == {"target": "x", "unlearned": "x"}
