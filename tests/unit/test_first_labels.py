"""The first token of a row is predicted by nothing: a label there, as texts have it, counts nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from msa_lite.data import IGNORE, Example
from msa_lite.evals.engine.forward import score_bundles
from msa_lite.evals.engine.models import Runner
from msa_lite.train.fit.until import measure_loss
from tests.support.fits import PAD, VOCABULARY, ragged_rows
from tests.support.models import tiny_model

ROWS = [row if row.index % 2 else replace(row, labels=row.ids) for row in ragged_rows(6)]  # questions and texts
ALONE = Example(6, [5, 6, 7], [5, IGNORE, IGNORE])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", vocab_size=VOCABULARY).eval()


def plain_losses(model: Any, row: Example) -> list[float]:
    """−log p of each label of a row that something comes before, one row at a time."""
    with torch.no_grad():
        logs = model(torch.tensor([row.ids])).logits[0].double().log_softmax(-1)
    pairs = enumerate(row.labels[1:])
    return [-float(logs[i, label]) for i, label in pairs if label != IGNORE]


def test_the_loss_that_a_fit_is_stopped_by(model: Any) -> None:
    losses = [loss for row in ROWS for loss in plain_losses(model, row)]
    for rows in (1, 4, 6):
        assert measure_loss(model, [*ROWS, ALONE], PAD, rows) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_the_scores_of_a_text(model: Any) -> None:
    bundles = [[row] for row in [*ROWS, ALONE]]
    found = {index: scores for part in score_bundles(Runner(model), bundles) for index, (scores,) in part}
    for number, row in enumerate(ROWS):
        assert found[number].log_probs == pytest.approx([-loss for loss in plain_losses(model, row)], rel=1e-4)
    assert len(found[len(ROWS)].log_probs) == 0
