"""A fit that is held: its loss by hand, what it keeps, and that it can be stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from msa_lite.data import IGNORE, Example
from msa_lite.io.finished.seal import load_manifest
from msa_lite.io.weights.hub import fetch
from msa_lite.train import FitSettings, Until
from msa_lite.train.memory.model import load_trainable
from msa_lite.train.objectives.held import HeldLoss
from msa_lite.train.objectives.objective import draw_rows
from tests.support.fits import PAD, ROWS, SETTINGS, Killed, assert_close, fit, kill_at, ragged_rows, weights

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("quick_fits")
RETAIN = ragged_rows(5, seed=2)
H = 0.7


def held(full: bool = False, weight: float = H) -> HeldLoss:
    return HeldLoss(ROWS, RETAIN, weight, PAD, seed=0, full=full)


def log_probs(model: Any, example: Example) -> Any:
    """The log-probabilities (n, v) at the positions that predict labels, of a row alone."""
    logits = model(input_ids=torch.tensor([example.ids])).logits[0].double().log_softmax(-1)
    return logits[[t - 1 for t, label in enumerate(example.labels) if t and label != IGNORE]]


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("micro", [1, 4])
def test_a_step_is_the_plain_loss_and_h_times_the_divergence(mode: Any, micro: int, prior: Path) -> None:
    model = load_trainable(prior, replace(SETTINGS, mode=mode))
    objective = held(mode == "full")
    objective.prepare(model)
    before = [log_probs(model, example).detach() for example in RETAIN]
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)
    rows = [1, 3, 4, 6]
    drawn = draw_rows(len(ROWS), len(RETAIN), 0, 2)[rows]
    told = [-log_probs(model, ROWS[i]).gather(1, label[:, None]) for i in rows
            for label in [torch.tensor([x for x in ROWS[i].labels[1:] if x != IGNORE])]]  # fmt: skip
    apart = [(before[i].exp() * (before[i] - log_probs(model, RETAIN[i]))).sum(-1) for i in drawn]
    wanted = torch.cat(told).mean() + H * torch.cat(apart).mean()
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(wanted, trained)

    found = objective.step(model, rows, 2, micro, lambda loss: loss.backward())

    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert float(torch.cat(apart).mean()) > 1e-3  # of a divergence that counts
    for parameter, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient.to(parameter.dtype), rtol=1e-3, atol=1e-5)
    objective.release()


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_held_fit_learns_its_rows_and_leaves_the_others(mode: Any, prior: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, mode=mode, epochs=12, learning_rate=2e-2)
    fits = {"plain": None, "held": held(mode == "full", 5.0)}
    learnt, apart = {}, {}
    reference = load_trainable(prior, replace(settings, mode="full")).eval()
    for name, objective in fits.items():
        folder = fit(prior, tmp_path / name, settings, objective=objective)
        model = _open(prior, folder, mode)
        learnt[name] = _mean([_nll(model, e) for e in ROWS])
        apart[name] = _mean([_kl(reference, model, e) for e in RETAIN])
    start = _mean([_nll(reference, e) for e in ROWS])
    assert apart["held"] < apart["plain"] / 2
    assert learnt["held"] < (start + learnt["plain"]) / 2


def _open(prior: Path, folder: Path, mode: str) -> Any:
    if mode == "full":
        return load_trainable(folder, replace(SETTINGS, mode="full")).eval()
    from peft import PeftModel

    return PeftModel.from_pretrained(load_trainable(prior, replace(SETTINGS, mode="full")), folder).eval()


def _mean(values: list[Any]) -> float:
    return float(torch.cat(values).mean())


def _nll(model: Any, example: Example) -> Any:
    labels = torch.tensor([label for label in example.labels[1:] if label != IGNORE])
    return -log_probs(model, example).detach().gather(1, labels[:, None])[:, 0]


def _kl(reference: Any, model: Any, example: Example) -> Any:
    before, after = log_probs(reference, example).detach(), log_probs(model, example).detach()
    return (before.exp() * (before - after)).sum(-1)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_stopped_held_fit_goes_on_with_the_same_result(mode: Any, prior: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, mode=mode)
    whole = weights(fit(prior, tmp_path / "whole", settings, objective=held(mode == "full")))
    with pytest.raises(Killed):
        fit(prior, tmp_path / "stopped", settings, kill_at(5), objective=held(mode == "full"))
    assert_close(weights(fit(prior, tmp_path / "stopped", settings, objective=held(mode == "full"))), whole, atol=1e-6)


def test_an_open_ended_fit_can_be_held(prior: Path, make_checkpoint: Make, tmp_path: Path) -> None:
    target = make_checkpoint("llama", seed=5)
    until = Until(fetch(str(target)), load=lambda: load_trainable(target, FitSettings(mode="full")), least_steps=1)
    folder = fit(prior, tmp_path / "v", replace(SETTINGS, schedule="constant"), objective=held(), until=until)
    manifest = load_manifest(folder) or {}
    assert manifest["fit"]["ended"]
    assert manifest["inputs"]["objective"] == held().describe()
    assert held(weight=1.0).describe() != held().describe()
