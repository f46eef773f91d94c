"""What each method minimises: against a plain computation on one batch, whatever the micro-batch, lora and full."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from msa_lite.baselines import losses
from msa_lite.baselines.methods import METHODS, Value, settings_grid
from msa_lite.baselines.objective import BaselineObjective
from msa_lite.data import IGNORE, Example
from msa_lite.train.objectives import objective as divided
from msa_lite.train.objectives.objective import draw_rows
from msa_lite.train.objectives.reference import Batch, make_batch
from tests.support.fits import PAD, VOCABULARY, ragged_rows, with_adapter
from tests.support.models import tiny_model

# Every third row is a text, whose labels begin with its first token, which nothing predicts.
FORGET, RETAIN = (
    [row if i % 3 else replace(row, labels=[*row.ids]) for i, row in enumerate(rows)]
    for rows in (ragged_rows(8, seed=1), ragged_rows(9, seed=2))
)
ALTERNATIVES = [  # to the same questions, of other lengths
    replace(row, ids=[*row.prompt_ids, *other.ids[-3:]], labels=[IGNORE] * len(row.prompt_ids) + other.ids[-3:])
    for row, other in zip(FORGET, ragged_rows(8, seed=3), strict=True)
]
ROWS = [5, 0, 3, 7, 4, 2]  # a step's rows, in no order
SEED, EPOCH, LAYER = 7, 2, 0

CASES = [
    (name, retain_loss)
    for name, method in METHODS.items()
    for retain_loss in (("nll", "kl") if "retain_loss" in method.parameters else ("",))
]
every_case = pytest.mark.parametrize(("name", "retain_loss"), CASES)
each_mode = pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])


def start_model() -> Any:
    return tiny_model("llama", vocab_size=VOCABULARY, initializer_range=0.15).eval()


def to_train(full: bool) -> Any:
    return start_model() if full else with_adapter(start_model())


# In the place of defaults that leave a model of random weights, at ln 150 nats a token, hardly any gradient.
OWN: dict[str, dict[str, Value]] = {
    "rmu": {"layer": LAYER},
    "simnpo": {"beta": 1.5, "delta": 5.0},
    "satimp": {"beta1": 0.5, "beta2": 2.0},
    "wga": {"beta": 0.5},
}


def point(name: str, retain_loss: str = "nll", **changes: Any) -> dict[str, Any]:
    """Parameters with every weight at work and none of them 1."""
    parameters = settings_grid(name, OWN.get(name, {}))[0]
    weights: dict[str, Value] = {"forget_weight": 0.75, "retain_weight": 1.5, "retain_loss": retain_loss}
    return parameters | {key: value for key, value in (weights | changes).items() if key in parameters}


def objective_of(parameters: dict[str, Any], name: str, full: bool, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "forget": FORGET,
        "retain": RETAIN,
        "pad": PAD,
        "seed": SEED,
        "alternatives": ALTERNATIVES if name == "dpo" else (),
        "full": full,
    }
    return BaselineObjective(name, parameters, **(given | changes))


@dataclass(frozen=True)
class Plain:
    """The objective as one would write it down: all rows in one batch, all logits, a second model as reference."""

    name: str
    parameters: dict[str, Any]
    model: Any

    def loss(self, retained: Sequence[int]) -> Tensor:
        """Of `ROWS`, with these rows of the retain set."""
        total = self.parameters["forget_weight"] * self.forget_loss(ROWS)
        if self.parameters.get("retain_weight"):
            total = total + self.parameters["retain_weight"] * self.retain_loss(retained)
        return total

    def forget_loss(self, wanted: Sequence[int]) -> Tensor:
        rows, other = [FORGET[i] for i in wanted], start_model()
        keywords = {key: self.parameters[key] for key in METHODS[self.name].keywords}
        if self.name == "dpo":
            better = [ALTERNATIVES[i] for i in wanted]
            gains = [self.sums(self.model, part) - self.sums(other, part).detach() for part in (rows, better)]
            return losses.dpo(gains[0], gains[1], **keywords)
        if self.name == "rmu":
            batch = make_batch(rows, PAD, "cpu")
            aim = losses.control_vector(32, self.parameters["steering"], SEED)
            return losses.rmu(self.states(self.model, batch), aim, batch.labels != IGNORE)
        logits, labels = self.logits(self.model, rows)
        if self.name == "npo":
            return losses.npo(logits, labels, self.sums(other, rows).detach(), **keywords)
        if self.name == "undial":
            reference = self.logits(other, rows)[0].detach()
            return losses.undial(logits, labels, reference, **keywords)
        return getattr(losses, "grad_ascent" if self.name == "grad_diff" else self.name)(logits, labels, **keywords)

    def retain_loss(self, wanted: Sequence[int]) -> Tensor:
        rows = [RETAIN[i] for i in wanted]
        batch, other = make_batch(rows, PAD, "cpu"), start_model()
        if self.name == "rmu":
            aim = self.states(other, batch).detach()
            return losses.rmu(self.states(self.model, batch), aim, batch.labels != IGNORE)
        if self.parameters["retain_loss"] == "nll":
            return losses.cross_entropy(*self.logits(self.model, rows))
        mine, theirs = (self.logits(model, rows)[0].log_softmax(-1) for model in (self.model, other))
        told = batch.mask[:, 1:] == 1
        return (theirs.exp() * (theirs - mine)).sum(-1)[told].mean()

    def logits(self, model: Any, rows: Sequence[Example]) -> tuple[Tensor, Tensor]:
        batch = make_batch(rows, PAD, "cpu")
        return model(input_ids=batch.ids, attention_mask=batch.mask).logits[:, :-1], batch.labels[:, 1:]

    def states(self, model: Any, batch: Batch) -> Tensor:
        output = model(input_ids=batch.ids, attention_mask=batch.mask, output_hidden_states=True)
        return output.hidden_states[LAYER + 1]

    def sums(self, model: Any, rows: Sequence[Example]) -> Tensor:
        """Log-probabilities of answers, each row alone."""
        return torch.cat([losses.sequence_log_probs(*self.logits(model, [row])) for row in rows])


def gradients(model: Any) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    wanted = {name: grad for name, grad in wanted.items() if name in found or grad.any()}
    assert found.keys() == wanted.keys()
    size = max(float(grad.abs().max()) for grad in wanted.values())
    assert size > 1e-4
    for name, grad in found.items():
        assert torch.allclose(grad, wanted[name], rtol=1e-3, atol=1e-4 * size), name


def move(model: Any, made: Any) -> None:
    """A few optimiser steps away from the start."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for epoch in range(2):
        made.step(model, ROWS, epoch, 6, lambda loss: loss.backward())
        optimizer.step()
        optimizer.zero_grad()


@each_mode
@every_case
def test_a_step_is_the_plain_loss_for_every_micro_batch_after_the_model_has_moved(
    name: str, retain_loss: str, full: bool
) -> None:
    parameters = point(name, retain_loss)
    model = to_train(full)
    made = objective_of(parameters, name, full)
    made.prepare(model)
    move(model, made)
    plain = Plain(name, parameters, model).loss(draw_rows(len(FORGET), len(RETAIN), made.seed, EPOCH)[ROWS].tolist())
    plain.backward()
    wanted = gradients(model)
    for micro in (4, 1):
        loss = made.step(model, ROWS, EPOCH, micro, lambda loss: loss.backward())
        assert not loss.requires_grad
        assert float(loss) == pytest.approx(float(plain.detach()), rel=1e-4, abs=1e-5)
        assert_alike(gradients(model), wanted)


@pytest.mark.parametrize("name", METHODS)
def test_without_a_retain_term_no_retain_set_is_needed(name: str) -> None:
    full = METHODS[name].reference == "logits"  # where the reference is a second model
    parameters, model = point(name, "kl", retain_weight=0.0), to_train(full)
    made = objective_of(parameters, name, full, retain=())
    made.prepare(model)
    loss = made.step(model, ROWS, 0, 4, lambda loss: loss.backward())
    plain = Plain(name, parameters, model).forget_loss(ROWS)
    assert float(loss) == pytest.approx(0.75 * float(plain.detach()), rel=1e-4)
    assert made.longest == max(len(row.ids) for row in (*FORGET, *made.alternatives))
    for retain in (RETAIN, ragged_rows(9, seed=5) * 2):  # what is not used decides nothing
        given = objective_of(parameters, name, full, retain=retain)
        assert (given.describe(), given.longest) == (made.describe(), made.longest)
    if "retain_weight" in parameters:
        used = parameters | {"retain_weight": 1.0}
        one, other = (objective_of(used, name, full, retain=RETAIN[:k]).describe() for k in (8, 9))
        assert one != other


@pytest.mark.parametrize(
    ("name", "changes", "copied"),
    [
        ("grad_diff", {}, False),
        ("npo", {}, False),
        ("dpo", {}, False),
        ("satimp", {"retain_weight": 0.0, "retain_loss": "kl"}, False),
        ("rmu", {"retain_weight": 0.0}, False),
        ("rmu", {}, True),
        ("wga", {"retain_loss": "kl"}, True),
        ("undial", {"retain_weight": 0.0}, True),
    ],
)
def test_a_second_model_is_held_only_where_a_step_runs_it(
    name: str, changes: dict[str, Any], copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[int | None] = []
    copy = divided.freeze_copy

    def watch(model: Any, count: int | None = None) -> Any:
        layers.append(count)
        return copy(model, count)

    monkeypatch.setattr(divided, "freeze_copy", watch)
    for full in (False, True):
        made, model = objective_of(point(name, **changes), name, full), to_train(full)
        made.prepare(model)
        made.step(model, ROWS, 0, 6, lambda loss: loss.backward())
    assert layers == ([LAYER + 1 if name == "rmu" else None] if copied else [])


def test_retain_rows_are_drawn_afresh_each_epoch_from_a_generator_of_their_own() -> None:
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    drawn = [draw_rows(120, 9, seed=7, epoch=epoch).tolist() for epoch in range(3)]
    assert torch.get_rng_state().equal(states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    assert [len(rows) for rows in drawn] == [120] * 3
    assert len({tuple(rows) for rows in drawn}) == 3
    torch.rand(3), random.random(), np.random.rand()
    assert [draw_rows(120, 9, seed=7, epoch=epoch).tolist() for epoch in range(3)] == drawn
    assert draw_rows(120, 9, seed=8, epoch=0).tolist() != drawn[0]


def test_retain_rows_are_drawn_uniformly() -> None:
    counts = np.bincount(np.concatenate([draw_rows(3600, 9, 7, epoch) for epoch in range(5)]), minlength=9)
    assert len(counts) == 9
    # 18,000 draws of 9 rows: 2,000 each, with a standard deviation of √(18,000 · 1/9 · 8/9) = 42.
    assert np.abs(counts - 2000).max() < 5 * 42
