"""Products of few ranks in the place of matrices: the best ones in the Frobenius norm (Eckart and Young), in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from msa_lite.merger.formula import Factors

OVERSAMPLED = 8  # columns of the sketch beyond the rank
_ITERATIONS = 2  # of the power method: singular values of updates fall slowly
ReadRows = Callable[[], Iterable[tuple[slice, np.ndarray]]]
"""Yields a matrix by rows; called once for each pass."""


def squared_norm(b: np.ndarray, a: np.ndarray) -> float:
    """Return ‖B A‖², without the product."""
    return float(np.sum((b.T @ b) * (a @ a.T)))


def truncate(b: np.ndarray, a: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the best approximation of B A of this rank, never forming the product; and its squared error.

    b: (out, r), a: (r, in). With B = Q_b R_b and Aᵀ = Q_a R_a the singular values are those of R_b R_aᵀ, which is
    at most (r, r).
    """
    left, core_left = np.linalg.qr(b)
    right, core_right = np.linalg.qr(a.T)
    u, s, v = np.linalg.svd(core_left @ core_right.T, full_matrices=False)
    root = np.sqrt(s[:rank])
    return left @ (u[:, :rank] * root), (root[:, None] * v[:rank]) @ right.T, float(np.sum(s[rank:] ** 2))


def approximate(rows: ReadRows, shape: tuple[int, int], rank: int) -> tuple[Factors, float, float]:
    """Return B (out, rank) and A (rank, in) near a matrix that is only read by rows; its squared norm, and theirs.

    A random sketch finds the range of the largest singular values, and two steps of the power method sharpen it; the
    matrix is read six times. Source: Halko, Martinsson and Tropp (2011), algorithms 4.4 and 5.1. The result depends on
    the matrix alone.
    """
    (out, into), width = shape, min(rank + OVERSAMPLED, *shape)
    sketch = np.random.default_rng(0).standard_normal((into, width))
    whole = 0.0
    for step in range(_ITERATIONS + 1):
        image = np.empty((out, width))
        for part, block in rows():
            image[part] = block @ sketch
            whole += float(np.sum(block * block)) if step == 0 else 0.0
        basis, _ = np.linalg.qr(image)
        seen = np.zeros((into, width))  # Dᵀ Q
        for part, block in rows():
            seen += block.T @ basis[part]
        if step < _ITERATIONS:
            sketch, _ = np.linalg.qr(seen)
    u, s, v = np.linalg.svd(seen.T, full_matrices=False)
    root = np.sqrt(s[:rank])
    return ((basis @ u[:, :rank]) * root, root[:, None] * v[:rank]), whole, float(np.sum(s[:rank] ** 2))
