"""The baselines' losses beside float64 formulas of the papers, open-unlearning's defects, and transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_lite.baselines import losses
from msa_lite.data import IGNORE
from msa_lite.train.objectives.reference import kl_divergence
from tests.support.models import VOCABULARY, tiny_model

many = settings(max_examples=50)
betas = st.sampled_from([0.05, 0.1, 1.0, 4.5, 10.0])
exponents = st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0])


class Batch(NamedTuple):
    """A model's logits, labels, and the logits of a reference; all in numpy, the logits exact in fp32."""

    logits: np.ndarray
    labels: np.ndarray
    reference: np.ndarray

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, labels, reference = map(torch.from_numpy, self)
        return logits, labels, reference

    def log_ratios(self) -> np.ndarray:
        """(b,) log π_θ(y|x) − log π_ref(y|x)."""
        pairs = zip(answers(self.logits, self.labels), answers(self.reference, self.labels), strict=True)
        return np.array([mine.sum() - theirs.sum() for mine, theirs in pairs])

    def reference_sums(self) -> torch.Tensor:
        return torch.tensor([row.sum() for row in answers(self.reference, self.labels)], dtype=torch.float32)


@st.composite
def batches(draw: st.DrawFn, vocabularies: tuple[int, int] = (2, 6), scale: float = 3.0) -> Batch:
    """One to four rows of up to seven positions, a label at one of them at least, wherever they stand."""
    rows, positions = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    vocabulary = draw(st.integers(*vocabularies))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    labels = random.integers(vocabulary, size=(rows, positions))
    for row in labels:
        row[random.permutation(positions)[random.integers(1, positions + 1) :]] = IGNORE
    logits, reference = random.normal(scale=scale, size=(2, rows, positions, vocabulary)).astype(np.float32)
    return Batch(logits, labels, reference)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(float)
    exact = exact - exact.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def answers(logits: np.ndarray, labels: np.ndarray) -> Iterator[np.ndarray]:
    """Row by row, the log-probabilities of the labels."""
    for predicted, row in zip(log_softmax(logits), labels, strict=True):
        yield np.array([predicted[i, label] for i, label in enumerate(row) if label != IGNORE])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def assert_same(found: torch.Tensor, expected: float) -> None:
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected, rel=2e-5, abs=1e-5)


@many
@given(batches())
def test_cross_entropy_and_gradient_ascent(batch: Batch) -> None:
    logits, labels, _ = batch.tensors()
    expected = -np.concatenate(list(answers(batch.logits, batch.labels))).mean()
    assert_same(losses.cross_entropy(logits, labels), expected)
    assert_same(losses.grad_ascent(logits, labels), -expected)
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(losses.cross_entropy(logits, labels), flat)


@many
@given(batches(), betas)
def test_npo(batch: Batch, beta: float) -> None:
    # Its second form: (2/β) E log(1 + (π_θ/π_ref)^β).
    logits, labels, _ = batch.tensors()
    expected = 2 / beta * np.logaddexp(0, beta * batch.log_ratios()).mean()
    assert_same(losses.npo(logits, labels, batch.reference_sums(), beta=beta), expected)


@many
@given(batches(), betas, st.sampled_from([-1.0, 0.0, 0.5, 3.0]))
def test_simnpo(batch: Batch, beta: float, gamma: float) -> None:
    # E −(2/β) log σ(−(β/|y|) log π_θ(y|x) − γ)
    logits, labels, _ = batch.tensors()
    means = np.array([row.sum() / len(row) for row in answers(batch.logits, batch.labels)])
    expected = (-2 / beta * np.log(sigmoid(-beta * means - gamma))).mean()
    assert_same(losses.simnpo(logits, labels, beta=beta, delta=gamma / beta), expected)


@many
@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=5), betas)
def test_dpo(pairs: list[tuple[float, float]], beta: float) -> None:
    # 2/β times E −log σ(β log-ratio of the winner − β log-ratio of the loser); the winner is the alternative.
    forget, alternative = np.array(pairs).T
    expected = 2 / beta * np.logaddexp(0, -(beta * alternative - beta * forget)).mean()
    found = losses.dpo(torch.tensor(forget).float(), torch.tensor(alternative).float(), beta=beta)
    assert_same(found, expected)


@many
@given(batches(), exponents, exponents)
def test_satimp_and_wga(batch: Batch, beta1: float, beta2: float) -> None:
    logits, labels, _ = batch.tensors()
    each = np.concatenate(list(answers(batch.logits, batch.labels)))
    p = np.exp(each)
    assert_same(losses.satimp(logits, labels, beta1=beta1, beta2=beta2), (p**beta1 * (1 - p) ** beta2 * each).mean())
    assert_same(losses.wga(logits, labels, beta=beta1), (p**beta1 * each).mean())


def distilled(batch: Batch, onehot: np.ndarray, beta: float) -> np.ndarray:
    """(b, t) cross-entropies of the student against the reference with β off the marked logits."""
    teacher = np.exp(log_softmax(batch.reference.astype(float) - beta * onehot))
    return -(teacher * log_softmax(batch.logits)).sum(-1)


@many
@given(batches(), betas)
def test_undial(batch: Batch, beta: float) -> None:
    onehot = batch.labels[..., None] == np.arange(batch.logits.shape[-1])
    expected = distilled(batch, onehot, beta)[batch.labels != IGNORE].mean()
    assert_same(losses.undial(*batch.tensors(), beta=beta), expected)


@many
@given(batches())
def test_kl_divergence(batch: Batch) -> None:
    logits, labels, reference = batch.tensors()
    mine, theirs = log_softmax(batch.logits), log_softmax(batch.reference)
    expected = (np.exp(theirs) * (theirs - mine)).sum(-1)[batch.labels != IGNORE].mean()
    assert_same(kl_divergence(logits, reference, labels != IGNORE), expected)


@many
@given(batches(), st.booleans())
def test_rmu(batch: Batch, retain: bool) -> None:
    # The logits stand for activations; one vector for all positions, or as many as there are.
    activations, labels, reference = batch.tensors()
    aim = batch.reference if retain else batch.reference[0, 0]
    squares = (batch.logits.astype(float) - aim) ** 2
    rows = [row[known].mean(-1) for row, known in zip(squares, batch.labels != IGNORE, strict=True)]
    expected = np.mean([row.mean() for row in rows])
    theirs = reference if retain else reference[0, 0]
    assert_same(losses.rmu(activations, theirs, labels != IGNORE), expected)


def test_cross_entropy_is_the_loss_of_transformers_on_a_ragged_batch() -> None:
    model = tiny_model("llama").eval()
    ids = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
    attention = torch.arange(9) < torch.tensor([[9], [6], [4]])
    labels = torch.where(attention & (torch.arange(9) >= 2), ids, IGNORE)
    with torch.inference_mode():
        out = model(ids, attention_mask=attention.long(), labels=labels)
    torch.testing.assert_close(losses.cross_entropy(out.logits[:, :-1], labels[:, 1:]), out.loss)
    torch.testing.assert_close(losses.grad_ascent(out.logits[:, :-1], labels[:, 1:]), -out.loss)
