"""The formula of Model State Arithmetic (paper §3) on one block of one tensor, for deltas and for their factors."""

from __future__ import annotations

import numpy as np

Factors = tuple[np.ndarray, np.ndarray]
"""(rows, r) and (r, columns), whose product is a delta."""


def combine(
    weight: np.ndarray,
    forget: np.ndarray | None,
    alpha: float,
    retain: np.ndarray | None,
    beta: float,
    out: np.ndarray,
) -> np.ndarray:
    """θ_u = θ_D − α Δ_forget + β Δ_retain, in this order, for one block.

    weight, forget, retain, out: of one shape and dtype, fp32 or fp64; None for a vector that does not touch the tensor.
    The deltas are left multiplied with α and β. Returns `out`.
    """
    np.copyto(out, weight)
    if forget is not None:
        forget *= alpha
        out -= forget
    if retain is not None:
        retain *= beta
        out += retain
    return out


def combine_factors(forget: Factors | None, alpha: float, retain: Factors | None, beta: float) -> Factors:
    """−α Δ_forget + β Δ_retain as one product, [−α L_f | β L_r] · [R_f ; R_r]: one multiplication does for both."""
    signed = [
        (left * left.dtype.type(strength), right)
        for factors, strength in ((forget, -alpha), (retain, beta))
        if factors is not None
        for left, right in [factors]
    ]
    return np.concatenate([left for left, _ in signed], axis=1), np.concatenate([right for _, right in signed])
