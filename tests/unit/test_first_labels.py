"""The first token of a row is predicted by nothing: a label there, as texts have it, counts nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


START = [5, 9, 3, 8, 4, 7, 6, 9, 8, 5]
BEHIND = [replace(row, ids=START + row.ids, labels=[IGNORE] * len(START) + row.labels) for row in ROWS]


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Count the tokens of each pass, padding included."""
    counts: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _m, given, _out: counts.append(given[0].numel()))
    yield counts
    hook.remove()


@pytest.mark.parametrize("rows", [ROWS, BEHIND])
def test_the_loss_that_a_fit_is_stopped_by(model: Any, rows: list[Example]) -> None:
    losses = [loss for row in rows for loss in plain_losses(model, row)]
    for size in (1, 4, 6):
        assert measure_loss(model, [*rows, ALONE], PAD, size) == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert sum(losses) > 1


def test_what_all_rows_begin_with_runs_once(model: Any) -> None:
    shared = len(START) - 1  # its last token predicts the first label
    behind = sum(len(row.ids) for row in ROWS)
    with counted(model) as tokens:
        measure_loss(model, BEHIND, PAD, rows=1)
    assert sum(tokens[-len(ROWS) - 1 :]) == shared + behind + len(ROWS)
    with counted(model) as tokens:
        list(score_bundles(Runner(model, 1000), [[row] for row in BEHIND]))
    assert tokens[-2:] == [shared, len(ROWS) * max(len(row.ids) for row in ROWS)]


@pytest.mark.parametrize("rows", [ROWS, BEHIND])
def test_the_scores_of_a_text(model: Any, rows: list[Example]) -> None:
    bundles = [[row] for row in [*rows, ALONE]]
    found = {index: scores for part in score_bundles(Runner(model), bundles) for index, (scores,) in part}
    for number, row in enumerate(rows):
        assert found[number].log_probs == pytest.approx([-loss for loss in plain_losses(model, row)], rel=1e-4)
    assert len(found[len(rows)].log_probs) == 0
