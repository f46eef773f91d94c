"""The baselines' losses beside float64 formulas of the papers; what counts, what is held fixed, and extreme logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msa_lite.baselines import losses
from msa_lite.data import IGNORE
from msa_lite.train.objectives.reference import kl_divergence

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


# Losses of (logits, labels, logits of a reference).
FORGET: dict[str, Loss] = {
    "grad_ascent": lambda logits, labels, _: losses.grad_ascent(logits, labels),
    "satimp": lambda logits, labels, _: losses.satimp(logits, labels),
    "satimp, equal weights": lambda logits, labels, _: losses.satimp(logits, labels, beta1=0.0, beta2=0.0),
    "wga": lambda logits, labels, _: losses.wga(logits, labels),
    "undial": lambda logits, labels, reference: losses.undial(logits, labels, reference),
    "npo": lambda logits, labels, reference: losses.npo(logits, labels, losses.sequence_log_probs(reference, labels)),
    "simnpo": lambda logits, labels, _: losses.simnpo(logits, labels, delta=0.5),
    "dpo": lambda logits, labels, reference: losses.dpo(*gains(logits, labels, reference)),
}
TUNING: dict[str, Loss] = {
    "cross_entropy": lambda logits, labels, _: losses.cross_entropy(logits, labels),
    "kl_divergence": lambda logits, labels, reference: kl_divergence(logits, reference, labels != IGNORE),
}


def gains(logits: Tensor, labels: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """What the model has gained over the reference on the labels, and on every other token in their place."""
    others = torch.where(labels == IGNORE, IGNORE, (labels + 1) % logits.shape[-1])
    forget, alternative = (
        losses.sequence_log_probs(logits, answer) - losses.sequence_log_probs(reference, answer)
        for answer in (labels, others)
    )
    return forget, alternative


def random_batch(lengths: list[int], vocabulary: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and a reference's logits; row i has `lengths[i]` labels behind a prompt of one or two tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths) + 3, vocabulary)
    labels = torch.full(shape[:2], IGNORE)
    for i, n in enumerate(lengths):
        start = 1 + i % 2
        labels[i, start : start + n] = torch.randint(vocabulary, (n,), generator=generator)
    logits, reference = (torch.randn(shape, generator=generator) * 2 for _ in range(2))
    return logits.requires_grad_(), labels, reference


def gradient(loss: Tensor, at: Tensor) -> Tensor:
    return torch.autograd.grad(loss, at, retain_graph=True)[0]


def assert_same(found: Tensor, expected: Tensor, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rmu_of_half_precision_is_that_of_the_same_values_in_full(dtype: torch.dtype) -> None:
    # 300² is past what float16 holds, and half precision counts no further than 256 or 2048 exactly.
    generator = torch.Generator().manual_seed(0)
    activations, reference = ((torch.randn(2, 300, 8, generator=generator) * 300).to(dtype) for _ in range(2))
    mask = torch.arange(300) < torch.tensor([[299], [257]])
    for aim in (reference, losses.control_vector(8, 2.0, seed=0)):
        loss = losses.rmu(activations, aim, mask)
        assert loss.dtype == torch.float32
        assert_same(loss, losses.rmu(activations.float(), aim.float(), mask))


def test_a_control_vector_has_its_length_its_seed_and_no_negative_entry() -> None:
    vector = losses.control_vector(64, 2.5, seed=7)
    assert vector.shape == (64,)
    assert vector.norm().item() == pytest.approx(2.5)
    assert (vector >= 0).all()
    state = torch.get_rng_state()
    assert torch.equal(losses.control_vector(64, 2.5, seed=7), vector)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(losses.control_vector(64, 5.0, seed=7), 2 * vector)
    assert not torch.allclose(losses.control_vector(64, 2.5, seed=8), vector)


@pytest.mark.parametrize("loss", FORGET.values(), ids=FORGET.keys())
def test_a_step_down_a_forget_loss_makes_the_labels_less_likely(loss: Loss) -> None:
    logits, labels, reference = random_batch([3, 1, 4])
    # A model that knows its labels, as its reference does.
    known = torch.nn.functional.one_hot(labels.clamp(0), 5) * (labels != IGNORE).unsqueeze(-1)
    logits, reference = (logits.detach() + 4 * known).requires_grad_(), reference + 4 * known
    slope = gradient(loss(logits, labels, reference), logits)
    assert (slope[known.bool()] > 0).all()
    plain = gradient(losses.cross_entropy(logits, labels), logits)
    assert (plain[known.bool()] < 0).all()


@pytest.mark.parametrize(("beta1", "beta2"), [(5.0, 1.0), (1.0, 0.0), (0.5, 2.0)])
def test_weights_of_satimp_and_wga_are_constants(beta1: float, beta2: float) -> None:
    logits, labels, _ = random_batch([3, 1, 4])
    tokens = losses.token_losses(logits, labels)
    weights = (-tokens).exp() ** beta1 * (1 - (-tokens).exp()) ** beta2
    fixed, moving = (gradient(-(w * tokens).sum() / 8, logits) for w in (weights.detach(), weights))
    found = gradient(losses.satimp(logits, labels, beta1=beta1, beta2=beta2), logits)
    assert_same(found, fixed)
    assert (found - moving).norm() > 0.1 * fixed.norm()
    if beta2 == 0:
        wga = losses.wga(logits, labels, beta=beta1)
        assert torch.equal(wga, losses.satimp(logits, labels, beta1=beta1, beta2=0.0))
        assert_same(gradient(wga, logits), fixed)


@pytest.mark.parametrize("loss", (FORGET | TUNING).values(), ids=(FORGET | TUNING).keys())
@pytest.mark.parametrize("logit", [100.0, 1e30, -100.0, -1e30])
def test_logits_at_their_extremes_give_numbers(loss: Loss, logit: float) -> None:
    labels = torch.tensor([[0, 1, IGNORE], [2, IGNORE, IGNORE]])
    logits = logit * torch.nn.functional.one_hot(labels.clamp(0), 4).float()
    for reference in (torch.zeros_like(logits), logits, -logits):
        student = logits.clone().requires_grad_()
        found = loss(student, labels, reference)
        assert found.isfinite()
        assert gradient(found, student).isfinite().all()


# The baselines' losses beside float64 formulas of the papers, open-unlearning's defects, and transformers.


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


def assert_value(found: torch.Tensor, expected: float) -> None:
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected, rel=2e-5, abs=1e-5)


@many
@given(batches())
def test_cross_entropy_and_gradient_ascent(batch: Batch) -> None:
    logits, labels, _ = batch.tensors()
    expected = -np.concatenate(list(answers(batch.logits, batch.labels))).mean()
    assert_value(losses.cross_entropy(logits, labels), expected)
    assert_value(losses.grad_ascent(logits, labels), -expected)
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(losses.cross_entropy(logits, labels), flat)


@many
@given(batches(), betas)
def test_npo(batch: Batch, beta: float) -> None:
    # Its second form: (2/β) E log(1 + (π_θ/π_ref)^β).
    logits, labels, _ = batch.tensors()
    expected = 2 / beta * np.logaddexp(0, beta * batch.log_ratios()).mean()
    assert_value(losses.npo(logits, labels, batch.reference_sums(), beta=beta), expected)


@many
@given(batches(), betas, st.sampled_from([-1.0, 0.0, 0.5, 3.0]))
def test_simnpo(batch: Batch, beta: float, gamma: float) -> None:
    # E −(2/β) log σ(−(β/|y|) log π_θ(y|x) − γ)
    logits, labels, _ = batch.tensors()
    means = np.array([row.sum() / len(row) for row in answers(batch.logits, batch.labels)])
    expected = (-2 / beta * np.log(sigmoid(-beta * means - gamma))).mean()
    assert_value(losses.simnpo(logits, labels, beta=beta, delta=gamma / beta), expected)


@many
@given(st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=5), betas)
def test_dpo(pairs: list[tuple[float, float]], beta: float) -> None:
    # 2/β times E −log σ(β log-ratio of the winner − β log-ratio of the loser); the winner is the alternative.
    forget, alternative = np.array(pairs).T
    expected = 2 / beta * np.logaddexp(0, -(beta * alternative - beta * forget)).mean()
    found = losses.dpo(torch.tensor(forget).float(), torch.tensor(alternative).float(), beta=beta)
    assert_value(found, expected)


@many
@given(batches(), exponents, exponents)
def test_satimp_and_wga(batch: Batch, beta1: float, beta2: float) -> None:
    logits, labels, _ = batch.tensors()
    each = np.concatenate(list(answers(batch.logits, batch.labels)))
    p = np.exp(each)
    assert_value(losses.satimp(logits, labels, beta1=beta1, beta2=beta2), (p**beta1 * (1 - p) ** beta2 * each).mean())
    assert_value(losses.wga(logits, labels, beta=beta1), (p**beta1 * each).mean())


def distilled(batch: Batch, onehot: np.ndarray, beta: float) -> np.ndarray:
    """(b, t) cross-entropies of the student against the reference with β off the marked logits."""
    teacher = np.exp(log_softmax(batch.reference.astype(float) - beta * onehot))
    return -(teacher * log_softmax(batch.logits)).sum(-1)


@many
@given(batches(), betas)
def test_undial(batch: Batch, beta: float) -> None:
    onehot = batch.labels[..., None] == np.arange(batch.logits.shape[-1])
    expected = distilled(batch, onehot, beta)[batch.labels != IGNORE].mean()
    before = batch.reference.copy()
    assert_value(losses.undial(*batch.tensors(), beta=beta), expected)
    assert np.array_equal(batch.reference, before)  # whose memory the tensor shares


@many
@given(batches())
def test_kl_divergence(batch: Batch) -> None:
    logits, labels, reference = batch.tensors()
    mine, theirs = log_softmax(batch.logits), log_softmax(batch.reference)
    expected = (np.exp(theirs) * (theirs - mine)).sum(-1)[batch.labels != IGNORE].mean()
    assert_value(kl_divergence(logits, reference, labels != IGNORE), expected)


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
    assert_value(losses.rmu(activations, theirs, labels != IGNORE), expected)
