"""Candidates against relearning, which `variants.py` measures: token-wise weights, noise and distillation, flatness.

All numbers here were written down before any score.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, kl_div

from msa_lite.data import IGNORE, Example, to_batch
from msa_lite.io.weights.blocks import Files, read_whole
from msa_lite.merger.formula import FORGET_RIDGE, RETAIN_RIDGE
from msa_lite.merger.moments import load_moments
from msa_lite.train.objectives.held import HeldLoss
from msa_lite.train.objectives.plain import PlainLoss

ROUNDS, PACE, LEAST, MOST = 3, 0.7, -0.5, 4.0  # of token-wise weights
NOISE, STEPS, ROWS = 1.0, 60, 16  # noise over the update, by norm; steps of distillation and their rows
RADIUS = 0.05  # of the step uphill, in the weights of the adapter


def batches(lab: Any, rows: Sequence[Example], size: int = 8) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield padded batches and the places of their labels, shifted to the positions that predict them."""
    for first in range(0, len(rows), size):
        batch = to_batch(rows[first : first + size], lab.pad, "cpu")
        yield batch, batch["labels"][:, 1:] != IGNORE


@torch.no_grad()
def token_scores(lab: Any, rows: Sequence[Example]) -> np.ndarray:
    """Return log p of every label of some rows, in their order, by the model as it is."""
    parts = []
    for batch, known in batches(lab, rows):
        states = lab.model.model(batch["input_ids"], batch["attention_mask"])[0][:, :-1]
        parts.append(-cross_entropy(lab.model.lm_head(states[known]), batch["labels"][:, 1:][known], reduction="none"))
    return torch.cat(parts).double().numpy()


@torch.no_grad()
def token_inputs(lab: Any, rows: Sequence[Example], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the inputs (labels, in) of some linear layers at the positions that predict the labels of rows."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    known = torch.zeros(0)

    def take(name: str) -> Callable[..., None]:
        return lambda _, inputs: found[name].append(inputs[0][:, :-1][known].float())

    with ExitStack() as hooks:
        for name in names:
            layer = lab.model.get_submodule(name.removesuffix(".weight"))
            hooks.callback(layer.register_forward_pre_hook(take(name)).remove)
        for batch, known in batches(lab, rows):  # noqa: B007 (the hooks read it)
            lab.model.model(batch["input_ids"], batch["attention_mask"])
    return {name: torch.cat(parts) for name, parts in found.items()}


def tokenwise(lab: Any, vector: Path, later: Path, moments: Path, strength: float, alpha: float, scale: float) -> Path:
    """Write the change s D (Σ w x xᵀ)(Σ x xᵀ + λ C_r)⁻¹ with the weights w of the nearest of some rounds.

    later: the retain vector, on the prior, which says how much of each answer the model is to lose.
    """
    out = lab.out / f"tokenwise-{vector.parent.name}-{vector.name}.safetensors"
    if out.exists():
        return out
    measured, files, rows = load_moments(moments), Files(), lab.rows["forget"]
    deltas = {n: d for n, d in lab.sum_of([(vector, 1.0)]).items() if n in measured.layers}
    lab.put((), 1.0)
    before, inputs = token_scores(lab, rows), token_inputs(lab, rows, list(deltas))
    lab.put_prior(later)
    need = np.maximum(0.0, before - token_scores(lab, rows))
    parts = {}
    for name, delta in deltas.items():
        root = torch.from_numpy(
            read_whole(files, measured.roots[f"retain.{measured.layers[name].roots[0]}"], np.float64)
        )
        x, size = inputs[name].double() / inputs[name].double().norm(), inputs[name].shape[1]
        system = x.T @ x + strength * (root.T @ root) / root.square().sum()
        system += (FORGET_RIDGE + strength * RETAIN_RIDGE) / size * torch.eye(size, dtype=torch.float64)
        right = torch.linalg.solve(system, torch.cat([x.T, torch.eye(size, dtype=torch.float64)], 1)).T  # symmetric
        parts[name] = (delta.double() @ x.T, right[: len(x)], FORGET_RIDGE / size * delta.double() @ right[len(x) :])

    def change(weights: np.ndarray) -> dict[str, torch.Tensor]:
        by_token = torch.from_numpy(weights)
        return {n: (scale * ((d * by_token) @ right + rest)).float() for n, (d, right, rest) in parts.items()}

    weights, best, nearest = np.ones(len(need)), {}, math.inf
    for number in range(ROUNDS + 1):
        changes = change(weights)
        lab.put_changes(changes, -alpha)
        if (parity := lab.parity) < nearest:
            best, nearest = changes, parity
        got = before - token_scores(lab, rows)
        print(f"    round {number}: parity {parity:.4f}, need {need.sum():.1f}, got {got.sum():.1f}", flush=True)
        weights = weights + PACE * (need - got) / np.maximum(got / np.maximum(weights, 0.1), 0.5 * alpha)
        weights = weights.clip(LEAST, MOST)
    save_file({name: value.contiguous() for name, value in best.items()}, out)
    return out


def undone(lab: Any, terms: Any, alpha: float, moments: Path, strength: float) -> Path:
    """Write what noise on the filtered directions and a distillation from the unlearned model change (2506.06278).

    The noise is Gaussian, through each layer's filter, as large as the layer's update. Then the model learns what the
    unlearned one says on forget rows, rows to keep (but `test`) and holdout rows: KL, AdamW, the rate of a full fit.
    """
    out = lab.out / "undone.safetensors"
    if out.exists():
        return out
    measured, files = load_moments(moments), Files()
    lab.put(terms, alpha)
    teacher = copy.deepcopy(lab.model)
    generator = torch.Generator().manual_seed(0)
    updates = lab.sum_of(terms)
    with torch.no_grad():
        for name, value in lab.model.named_parameters():
            if name in updates and name in measured.layers:
                keep = measured.filter_of(measured.layers[name].roots[0], files)
                (drawn,) = keep.apply(torch.randn(value.shape, generator=generator).double().numpy(), [strength])
                noise = torch.from_numpy(drawn)
                value.add_((noise * (NOISE * alpha * updates[name].norm() / noise.norm())).float())
    rows = [*lab.rows["forget"], *lab.rows["learnt"], *lab.rows["choose"], *lab.rows["holdout"]]
    optimizer = torch.optim.AdamW(lab.model.parameters(), lr=lab.settings.learning_rate / 10, weight_decay=0.0)
    chance = np.random.default_rng(0)
    for _ in range(STEPS):
        chosen = [rows[i] for i in chance.choice(len(rows), ROWS, replace=False)]
        batch, known = next(batches(lab, chosen, ROWS))
        logs = []
        for model in (lab.model, teacher):
            with torch.set_grad_enabled(model is lab.model):
                states = model.model(batch["input_ids"], batch["attention_mask"])[0][:, :-1][known]
                logs.append(model.lm_head(states).log_softmax(-1))
        optimizer.zero_grad()
        kl_div(*logs, log_target=True, reduction="batchmean").backward()
        torch.nn.utils.clip_grad_norm_(lab.model.parameters(), 1.0)
        optimizer.step()
    lab.model.zero_grad(set_to_none=True)
    changes = {n: (p.detach() - lab.before[n]).contiguous() for n, p in lab.model.named_parameters()}
    save_file(changes, out)
    return out


class FlatPlain(PlainLoss):
    """The plain loss at the worst point near the weights, to first order (SAM; of the forget loss, 2502.05374)."""

    def step(self, model: Any, rows: Sequence[int], epoch: int, micro: int, backward: Any) -> Any:
        trained = [p for p in model.parameters() if p.requires_grad]
        super().step(model, rows, epoch, micro, backward)
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in trained if p.grad is not None)) or 1.0
        shifts = [None if p.grad is None else p.grad * (RADIUS / norm) for p in trained]
        with torch.no_grad():
            for p, shift in zip(trained, shifts, strict=True):
                if shift is not None:
                    p.add_(shift)
                p.grad = None
        total = super().step(model, rows, epoch, micro, backward)
        with torch.no_grad():
            for p, shift in zip(trained, shifts, strict=True):
                if shift is not None:
                    p.sub_(shift)
        return total


@dataclass
class FlatHeld(HeldLoss):
    """A held fit whose forget loss is to be flat."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._plain = FlatPlain(self.examples, self.pad)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"radius": RADIUS}
