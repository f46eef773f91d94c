"""The memory of a baseline's step stays below what a fit has tried; the log-probabilities of its reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_lite.baselines import objective
from msa_lite.baselines.objective import reference_log_probs
from msa_lite.data import IGNORE
from msa_lite.io.models import heads
from tests.support.fits import PAD, VOCABULARY, ragged_rows
from tests.unit.test_baseline_methods import tiny
from tests.unit.test_baseline_objective import (
    FORGET,
    ROWS,
    assert_alike,
    each_mode,
    gradients,
    objective_of,
    point,
    to_train,
)


@each_mode
@pytest.mark.parametrize("name", ["grad_diff", "npo", "dpo", "rmu", "undial"])  # one for each kind of pass
def test_no_pass_holds_more_tokens_than_a_micro_batch_of_the_longest_rows(name: str, full: bool) -> None:
    made, model = objective_of(point(name), name, full), to_train(full)
    made.prepare(model)
    held: list[Tensor] = []
    body = (model if full else model.get_base_model()).base_model
    body.register_forward_pre_hook(lambda *args: held.append(args[2]["input_ids"]), with_kwargs=True)
    passes: dict[int, list[Tensor]] = {4: [], 1: []}
    for micro, values in passes.items():
        held.clear()
        made.step(model, ROWS, 0, micro, values.append)
        assert max(ids.numel() for ids in held) <= micro * made.longest
    assert len(passes[4]) < len(passes[1])


@pytest.mark.parametrize(("name", "retain_loss"), [("npo", "nll"), ("dpo", "kl"), ("satimp", "nll"), ("undial", "kl")])
def test_logits_are_made_a_block_at_a_time(name: str, retain_loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, model = objective_of(point(name, retain_loss), name, False), to_train(False)
    made.prepare(model)
    wanted = made.step(model, ROWS, 0, 4, lambda loss: loss.backward())
    gradient = gradients(model)
    sizes: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    for rows in (1000, 3):
        sizes.clear()
        monkeypatch.setattr(heads, "_BLOCK_BYTES", 4 * VOCABULARY * rows)
        assert float(made.step(model, ROWS, 0, 4, lambda loss: loss.backward())) == pytest.approx(float(wanted))
        assert_alike(gradients(model), gradient)
        assert max(sizes) == 3 if rows == 3 else max(sizes) > 3


def test_long_alternatives_count_as_well_as_short_answers() -> None:
    long = [replace(row, ids=[5] * 60, labels=[IGNORE, *[5] * 59]) for row in FORGET]
    made, model = objective_of(point("dpo"), "dpo", False, alternatives=long), to_train(False)
    made.prepare(model)
    made._reference_scores = {"forget": [0.0] * 8, "alternatives": [0.0] * 8}
    sizes: list[int] = []
    body = model.get_base_model().base_model
    body.register_forward_pre_hook(lambda *args: sizes.append(args[2]["input_ids"].numel()), with_kwargs=True)
    tokens: list[int] = []  # of each pass with its backward pass: of both answers, or of retain rows

    def backward(loss: Tensor) -> None:
        tokens.append(sum(sizes))
        sizes.clear()

    made.step(model, ROWS, 0, 4, backward)
    assert max(tokens) <= 4 * made.longest == 240


# The reference's log-probabilities: those of a plain loop, of as many rows at a time as fit into memory


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
