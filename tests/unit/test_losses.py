"""The baselines' losses: values worked out by hand, gradients, and logits at their extremes."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from msa_lite.baselines import losses
from msa_lite.data import IGNORE
from msa_lite.train.objectives.reference import kl_divergence

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

LN2, LN3 = log(2), log(3)
# Two rows over a vocabulary of two: the labels of the first have p = 1/2, 1/4, the label of the second 1/2, so that
# S = (−3 ln 2, −ln 2), n = (2, 1). The last position is padding, and sure of itself.
LABELS = torch.tensor([[0, 1], [1, IGNORE]])
LOGITS = torch.tensor([[[0.5, 0.5], [0.75, 0.25]], [[0.5, 0.5], [1e-6, 1.0]]]).log()

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
every_loss = pytest.mark.parametrize("loss", (FORGET | TUNING).values(), ids=(FORGET | TUNING).keys())


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


def value(loss: Tensor) -> Any:
    return pytest.approx(loss.item(), rel=1e-5, abs=1e-6)


def test_token_losses_and_their_sums_by_hand() -> None:
    assert losses.token_losses(LOGITS, LABELS).flatten().tolist() == pytest.approx([LN2, 2 * LN2, LN2, 0])
    assert losses.sequence_log_probs(LOGITS, LABELS).tolist() == pytest.approx([-3 * LN2, -LN2])
    # Four halvings over three labels; a mean of the rows' means would give 5/4 ln 2.
    assert value(losses.cross_entropy(LOGITS, LABELS)) == 4 / 3 * LN2
    assert value(losses.grad_ascent(LOGITS, LABELS)) == -4 / 3 * LN2


def test_npo_by_hand() -> None:
    # (2/β) mean ln(1 + (p/p_ref)^β). The first row is as the reference has it, the second three times as likely:
    # 2 · (ln 2 + ln 4) / 2 = 3 ln 2.
    reference = torch.tensor([-3 * LN2, -LN2 - LN3])
    assert value(losses.npo(LOGITS, LABELS, reference, beta=1.0)) == 3 * LN2
    # A third as likely instead: ln 2 + ln(4/3) = ln(8/3), which is less.
    reference = torch.tensor([-3 * LN2, -LN2 + LN3])
    assert value(losses.npo(LOGITS, LABELS, reference, beta=1.0)) == log(8 / 3)
    # β = 2 takes the ratio to its square: (ln 2 + ln(1 + 9)) / 2.
    reference = torch.tensor([-3 * LN2, -LN2 - LN3])
    assert value(losses.npo(LOGITS, LABELS, reference, beta=2.0)) == log(20) / 2


def test_simnpo_by_hand() -> None:
    # Mean losses per token are 3/2 ln 2 and ln 2; with β = 2: mean ln(1 + e^(−2·)) = (ln(1 + 1/8) + ln(1 + 1/4)) / 2.
    assert value(losses.simnpo(LOGITS, LABELS, beta=2.0)) == log(45 / 32) / 2
    # A margin of ½ ln 2 leaves ln 2 and ½ ln 2 of them: (ln(1 + 1/4) + ln(1 + 1/2)) / 2.
    assert value(losses.simnpo(LOGITS, LABELS, beta=2.0, delta=LN2 / 2)) == log(15 / 8) / 2


def test_dpo_by_hand() -> None:
    # Row 1 has gained ln 3 on what is to be forgotten, row 2 on the alternative: 2 · (ln(1 + 3) + ln(1 + 1/3)) / 2.
    gained, kept = torch.tensor([LN3, 0.0]), torch.tensor([0.0, LN3])
    assert value(losses.dpo(gained, kept, beta=1.0)) == log(16 / 3)
    assert value(losses.dpo(gained[:1], kept[:1], beta=1.0)) == 2 * log(4)
    assert value(losses.dpo(gained[1:], kept[1:], beta=1.0)) == 2 * log(4 / 3)


def test_satimp_and_wga_by_hand() -> None:
    # β1 = β2 = 1: weights p(1 − p) = 1/4, 3/16, 1/4 on ln 2, 2 ln 2, ln 2: 7/8 ln 2 over three labels.
    assert value(losses.satimp(LOGITS, LABELS, beta1=1.0, beta2=1.0)) == -7 / 24 * LN2
    # β1 = 2, β2 = 1: weights 1/8, 3/64, 1/8: (1/8 + 3/32 + 1/8) ln 2 = 11/32 ln 2.
    assert value(losses.satimp(LOGITS, LABELS, beta1=2.0, beta2=1.0)) == -11 / 96 * LN2
    # β1 = 1, β2 = 2: weights 1/8, 9/64, 1/8: (1/8 + 9/32 + 1/8) ln 2 = 17/32 ln 2.
    assert value(losses.satimp(LOGITS, LABELS, beta1=1.0, beta2=2.0)) == -17 / 96 * LN2
    # Weights p: (1/2 + 2/4 + 1/2) ln 2.
    assert value(losses.wga(LOGITS, LABELS)) == -LN2 / 2


def test_undial_by_hand() -> None:
    # The reference has p = 3/4 for the label; ln 3 off its logit makes the odds even. A student that gives the label
    # 1/4: ½ ln 4 + ½ ln(4/3); one that gives it 3/4 has as much to lose; one with even odds is there: ln 2.
    labels, reference = torch.tensor([[0]]), torch.tensor([[[0.75, 0.25]]]).log()
    low, high, even = (torch.tensor([[[p, 1 - p]]]).log() for p in (0.25, 0.75, 0.5))
    for student, expected in ((low, log(16 / 3) / 2), (high, log(16 / 3) / 2), (even, LN2)):
        assert value(losses.undial(student, labels, reference, beta=LN3)) == expected


def test_kl_divergence_by_hand() -> None:
    # KL((1/2, 1/2) ‖ (1/4, 3/4)) = ½ ln 2 + ½ ln(2/3); the other way round it is ¼ ln(1/2) + ¾ ln(3/2).
    even, uneven = torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[[0.25, 0.75]]]).log()
    mask = torch.tensor([[True]])
    assert value(kl_divergence(uneven, even, mask)) == log(4 / 3) / 2
    assert value(kl_divergence(even, uneven, mask)) == 0.75 * LN3 - LN2


# Squares' means over the width: 1 and 5 in row 1, 5 in row 2, whose second position is padding.
ACTIVATIONS = torch.tensor([[[1.0, 1.0], [3.0, 1.0]], [[1.0, -3.0], [100.0, 100.0]]])
POSITIONS = torch.tensor([[True, True], [True, False]])


def test_rmu_by_hand() -> None:
    # Rows' means 3 and 5. Over all positions at once it would be 11/3.
    assert losses.rmu(ACTIVATIONS, torch.zeros(2), POSITIONS).item() == 4
    # A vector of (1, 1): 0 and 2 in row 1, 8 in row 2. The model's own activations: nothing is left.
    assert losses.rmu(ACTIVATIONS, torch.ones(2), POSITIONS).item() == 4.5
    assert losses.rmu(ACTIVATIONS, ACTIVATIONS, POSITIONS).item() == 0


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


def test_npo_weighs_each_row_by_its_log_ratio() -> None:
    logits, labels, reference = random_batch([3, 1, 4])
    theirs = losses.sequence_log_probs(reference, labels)
    for beta in (0.1, 1.0, 3.0):
        sums = losses.sequence_log_probs(logits, labels)
        weights = 2 * torch.sigmoid(beta * (sums - theirs)).detach()
        assert weights.std() > 0.01
        assert_same(
            gradient(losses.npo(logits, labels, theirs, beta=beta), logits), gradient((weights * sums).mean(), logits)
        )


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


def test_undial_is_least_where_the_student_is_the_adjusted_teacher() -> None:
    _, labels, reference = random_batch([3, 1, 4])
    known, before = labels != IGNORE, reference.clone()
    adjusted = reference.clone()
    adjusted[known, labels[known]] -= 2.0
    adjusted.requires_grad_()
    least = losses.undial(adjusted, labels, reference, beta=2.0)
    assert gradient(least, adjusted).abs().max() < 1e-6
    for seed in range(5):
        elsewhere, _, _ = random_batch([3, 1, 4], seed=seed)
        assert losses.undial(elsewhere, labels, reference, beta=2.0) > least
        # Above that least by the divergence from it.
        above = kl_divergence(elsewhere, adjusted.detach(), known)
        assert_same(losses.undial(elsewhere, labels, reference, beta=2.0) - least, above)
    assert torch.equal(reference, before)


@every_loss
def test_positions_without_a_label_neither_count_nor_move(loss: Loss) -> None:
    logits, labels, reference = random_batch([3, 1, 4])
    found = loss(logits, labels, reference)
    unlabelled = labels == IGNORE
    assert (gradient(loss(logits, labels, reference), logits)[unlabelled] == 0).all()
    elsewhere, theirs = logits.detach().clone(), reference.clone()
    elsewhere[unlabelled], theirs[unlabelled] = 50.0, torch.arange(5) * 20.0
    assert torch.equal(loss(elsewhere, labels, theirs), found)
    # Nor does more padding.
    wider = [torch.nn.functional.pad(x, (0, 0, 0, 4), value=9.0) for x in (logits, reference)]
    assert_same(loss(wider[0], torch.nn.functional.pad(labels, (0, 4), value=IGNORE), wider[1]), found)


@every_loss
@pytest.mark.parametrize("logit", [100.0, 1e30, -100.0, -1e30])
def test_logits_at_their_extremes_give_numbers(loss: Loss, logit: float) -> None:
    labels = torch.tensor([[0, 1, IGNORE], [2, IGNORE, IGNORE]])
    logits = logit * torch.nn.functional.one_hot(labels.clamp(0), 4).float()
    for reference in (torch.zeros_like(logits), logits, -logits):
        student = logits.clone().requires_grad_()
        found = loss(student, labels, reference)
        assert found.isfinite()
        assert gradient(found, student).isfinite().all()
