"""The reference's log-probabilities: those of a plain loop, of as many rows at a time as fit into memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from msa_lite.baselines import objective
from msa_lite.baselines.objective import reference_log_probs
from msa_lite.data import IGNORE
from tests.support.fits import PAD, ragged_rows
from tests.unit.test_baseline_methods import tiny

SETS = {"forget": ragged_rows(11), "other": ragged_rows(3, 1)}


def test_values_are_those_of_a_plain_loop() -> None:
    model = tiny("llama", attention_dropout=0.5).train()  # which is off in both
    found = reference_log_probs(model, SETS, PAD)
    assert model.training
    assert found.keys() == SETS.keys()
    for name, rows in SETS.items():
        for row, value in zip(rows, found[name], strict=True):
            with torch.no_grad():
                chances = model.eval()(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
            pairs = pairwise(range(len(row.ids)))
            wanted = sum(float(chances[i, row.ids[j]]) for i, j in pairs if row.labels[j] != IGNORE)
            assert value == pytest.approx(wanted, abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("most", [2, 1, 0])
def test_values_are_made_of_fewer_rows_at_a_time_when_memory_runs_out(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = reference_log_probs(tiny("llama"), SETS, PAD)
    make = objective.make_batch

    def small(rows: Any, *more: Any) -> Any:
        if len(rows) > most:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return make(rows, *more)

    monkeypatch.setattr(objective, "make_batch", small)
    if not most:
        with pytest.raises(RuntimeError, match="ALLOC_FAILED"):  # the fit then steps down
            reference_log_probs(tiny("llama"), SETS, PAD)
        return
    found = reference_log_probs(tiny("llama"), SETS, PAD)
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=1e-4)
