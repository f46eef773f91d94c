"""The formulas of the rivals, beside whole matrices in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.benchmarks.rivals import kfade, sage, win_u
from tests.benchmarks.rivals.curvature import precondition, random_signs, roots

COUNT = 50


def drawn() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a gradient (3, 4), factors A and G, and inputs, outputs and rows of five positions."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    samples = draw(9, 4), draw(9, 3)
    left, right = (root.T @ root / 9 for root in samples)
    return draw(3, 4), (left, right), draw(5, 4), draw(5, 3), torch.tensor([0, 0, 1, 1, 1])


def damped(matrix: torch.Tensor, share: float) -> np.ndarray:
    values = matrix.numpy()
    return values + share * np.trace(values) / len(values) * np.eye(len(values))


def test_a_step_of_k_fade_inverts_the_kronecker_product() -> None:
    gradient, (inputs, outputs), *_ = drawn()
    whole = np.kron(damped(outputs, 0.1), damped(inputs, 0.1))
    expected = np.linalg.solve(whole, gradient.numpy().ravel()).reshape(3, 4)
    np.testing.assert_allclose(precondition(gradient, roots((inputs, outputs), 0.1)).numpy(), expected, rtol=1e-9)
    assert {steps for _, steps in kfade.GRID} == {1, 2}


@pytest.mark.parametrize(("size", "is_bounded"), [(0.3, False), (30.0, True)])
def test_the_step_of_win_u_takes_the_forget_rows_curvature_away(size: float, is_bounded: bool) -> None:
    gradient, (inputs, outputs), read, slopes, owners = drawn()
    slopes = size * slopes
    step = win_u.newton(gradient, read, slopes, owners, roots((inputs, outputs), 0.1), COUNT).numpy()
    whole = COUNT * np.kron(damped(outputs, 0.1), damped(inputs, 0.1))
    columns = np.stack([(slopes[owners == i].T @ read[owners == i]).numpy().ravel() for i in (0, 1)], axis=1)
    sizes, axes = np.linalg.eigh(columns.T @ np.linalg.solve(whole, columns))
    assert (sizes.max() > win_u.MOST) == is_bounded
    # Of the curvature that goes, along each axis, what is above the bound stays.
    taken = columns @ axes @ np.diag(np.minimum(sizes, win_u.MOST) / sizes) @ axes.T @ columns.T
    exact = np.linalg.solve(whole - taken, gradient.numpy().ravel()).reshape(3, 4)
    np.testing.assert_allclose(step, exact, rtol=1e-8)


def test_sage_minimises_its_objective_over_the_dominant_directions() -> None:
    change, moment = drawn()[0], torch.diag(torch.tensor([5.0, 3.0, 1.0, 0.01], dtype=torch.float64))
    penalty = np.diag([5.0, 3.0, 1.0, 0.0]) / (9.01 / 4)  # the last has less than 1 % of the energy
    expected = change.numpy() @ np.linalg.inv(np.eye(4) + 2.0 * penalty)
    np.testing.assert_allclose(sage.clean(change, moment, 2.0).numpy(), expected, rtol=1e-9)


def test_random_signs_have_the_curvature_of_the_loss_as_second_moment() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 0.5, -1.0]])
    shares = logits.softmax(-1)[0]
    slopes = random_signs(logits.expand(40_000, 3), torch.zeros(40_000, dtype=torch.long))
    moment = slopes.T @ slopes / len(slopes)
    torch.testing.assert_close(moment, torch.diag(shares) - shares[:, None] * shares, atol=0.003, rtol=0.05)
