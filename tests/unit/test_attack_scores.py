"""The measures that attacks on the weights share are scores of the records, each with a definition."""

from __future__ import annotations

import pytest

from msa_lite.attacks.attack import Ground, recall_measures
from msa_lite.data import Row

QUESTION, TEXT = Row(0, "Who?", "Ada."), Row(1, text="Ada wrote.")
OF_QUESTIONS = ["extraction_strength", "accuracy", "rouge_l", "probability"]


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([QUESTION], OF_QUESTIONS),
        ([TEXT, QUESTION], OF_QUESTIONS),
        ([TEXT], ["extraction_strength", "exact_memorization", "probability"]),
    ],
)
def test_measures_follow_from_the_kind_of_rows_and_are_explained(rows: list[Row], names: list[str]) -> None:
    measures = recall_measures(Ground(rows, [], [], rows, prompter=None))  # type: ignore[arg-type]
    assert [measure.name for measure in measures] == names
    assert all(measure.label and measure.meaning and measure.kind == "mean" for measure in measures)
