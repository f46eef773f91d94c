"""The memory of a baseline's step: tokens of a pass and logits of a block stay below what a fit has tried."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from msa_lite.data import IGNORE
from msa_lite.io.models import heads
from tests.support.fits import VOCABULARY
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
