"""Which rows attacks take: all questions about the forget set, however the choice has divided them, each once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from msa_lite.choose.rules import LeastExtraction
from msa_lite.data import Row
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.pipeline.attack.campaign import asked_rows
from msa_lite.pipeline.prepare.questions import Questions
from tests.support.benchmark_data import make_prompter

ROWS = [Row(at, f"Who is {at}?", f"The man {at}.") for at in range(5)]
SAME = Row(5, ROWS[0].question, ROWS[0].answer)
OTHER = Row(6, ROWS[0].question, "Another man.")

CASES: dict[str, tuple[Sequence[Row] | None, Sequence[Row] | None, list[int]]] = {
    "divided": ([ROWS[3], ROWS[0]], [ROWS[1], ROWS[2], ROWS[4]], [0, 1, 2, 3, 4]),
    "whole in both": (ROWS, ROWS, [0, 1, 2, 3, 4]),
    "chosen by some of all": (ROWS[2:4], ROWS, [0, 1, 2, 3, 4]),
    "nothing chosen": (None, ROWS, [0, 1, 2, 3, 4]),
    "the same twice": (None, [*ROWS, SAME], [0, 1, 2, 3, 4]),
    "another answer": ([ROWS[0]], [ROWS[1], OTHER], [0, 1, 6]),
    "nothing asked": (None, None, []),
}


@pytest.mark.parametrize("case", CASES)
def test_all_forget_rows_are_attacked_in_the_order_of_the_data_each_once(case: str) -> None:
    *parts, expected = CASES[case]
    validation, test = (load_qa({"forget": rows}, make_prompter(), 40) if rows else None for rows in parts)
    rows = asked_rows(Questions(LeastExtraction(0.9), validation, test).everything, "forget")
    assert [row.index for row in rows] == expected
    assert all(row.question and row.answer for row in rows)
