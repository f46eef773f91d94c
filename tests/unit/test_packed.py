"""Rows one after another in a sequence: each gets the states and gradients that it gets alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from msa_lite.data import IGNORE, Example
from msa_lite.io.models.heads import split_model
from msa_lite.train.objectives import plain
from msa_lite.train.objectives.plain import PlainLoss
from msa_lite.train.objectives.rows import Beginning, Layout, can_pack, packing, run_packed
from tests.support.fits import PAD
from tests.support.models import tiny_model
from tests.support.plain import KINDS, PLAIN, SPECIAL, wide_model

LENGTHS = (5, 14, 1, 9)


def first_row(halves: Any, rows: list[list[int]], start: int) -> tuple[Any, Any]:
    """Return the states of the second row among others, and the gradient that it leaves in the embedding."""
    halves.model.zero_grad()
    with packing(halves):
        beginning = Beginning.run(halves, rows[0][:start]) if start else None
        states = run_packed(halves, [row[start:] for row in rows], beginning)
        begin = len(rows[0]) - start
        states[begin : begin + len(rows[1]) - start].square().sum().backward()
        if beginning:
            beginning.backward()
    gradient = halves.model.get_input_embeddings().weight.grad.clone()
    return states[begin : begin + len(rows[1]) - start].detach(), gradient


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("start", [0, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_states_and_gradients_that_it_has_alone(kind: str, start: int, checkpointing: bool) -> None:
    model, draw = tiny_model(kind, **PLAIN.get(kind, {})).double(), random.Random(0)
    halves = split_model(model)
    common = [draw.randrange(3, 150) for _ in range(start)]
    rows = [common + [draw.randrange(3, 150) for _ in range(length)] for length in LENGTHS]
    alone = model.base_model(torch.tensor([rows[1]]), use_cache=False).last_hidden_state[0, start:]
    model.zero_grad()
    alone.square().sum().backward()
    expected = model.get_input_embeddings().weight.grad.clone()
    if checkpointing and not start:  # with a cache, a checkpointed layer would hold its keys twice
        model.train().activation_checkpointing_enable({"use_reentrant": False})
    states, gradient = first_row(halves, rows, start)
    torch.testing.assert_close(states, alone.detach(), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", [*KINDS, *SPECIAL])
def test_only_models_of_plain_attention_take_packed_rows(kind: str) -> None:
    model = tiny_model(kind) if kind in KINDS else copy.deepcopy(wide_model(kind))
    assert can_pack(split_model(model)) is (kind not in ("gemma2", "mistral", "lfm2"))
    assert model.config._attn_implementation in ("sdpa", "eager")
    model.config._attn_implementation = "eager"
    assert not can_pack(split_model(model))


def test_rows_that_see_each_other_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = split_model(copy.deepcopy(wide_model("llama")))
    assert can_pack(halves)
    attention = halves.body.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, output: (output[0].cumsum(1), *output[1:]))
    assert can_pack(halves) is False


def test_a_beginning_in_the_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = split_model(wide_model("llama"))
    assert can_pack(halves, lambda ids: Beginning.run(halves, ids))
    assert not can_pack(halves, lambda ids: Beginning.run(halves, ids[::-1]))
    positions = Layout.positions
    monkeypatch.setattr(Layout, "positions", property(lambda self: positions.fget(self) + self.start))
    assert not can_pack(halves, lambda ids: Beginning.run(halves, ids))


def test_tokens_behind_the_last_label_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [[3, 4, 5, 6, 7, 8], [9, 10, 11, 12]]
    rows = [Example(0, ids[0], [IGNORE, IGNORE, 5, 6, IGNORE, IGNORE]), Example(1, ids[1], [IGNORE, *ids[1][1:]])]
    noted: list[list[int]] = []

    def run(halves: Any, tokens: list[list[int]], beginning: Any = None) -> Any:
        noted.extend(tokens)
        return run_packed(halves, tokens, beginning)

    monkeypatch.setattr(plain, "run_packed", run)
    loss = PlainLoss(rows, PAD)
    model = tiny_model("llama")
    loss.prepare(model)
    loss.step(model, [0, 1], 0, 2, lambda value: value.backward())
    assert sorted(noted) == [[3, 4, 5], [9, 10, 11]]
