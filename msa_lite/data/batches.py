"""Divide rows into forward passes: rows of similar length together, so that there is little padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def pass_tokens(device: Any) -> int:
    """Return the tokens that a device of torch could run in the time that a pass takes beside its arithmetic."""
    return 32 if device.type == "cpu" else 512


def group_rows(lengths: Sequence[int], budget: int, per_pass: int = 0) -> list[list[int]]:
    """Return the rows of each pass, those of the longest rows first, so that memory runs out early.

    Of all divisions of the rows sorted by length, this one has the fewest tokens, padding included. budget: the most
    tokens of a pass, padding included; a row that is longer has a pass of its own. per_pass: tokens that a pass costs
    beside its own.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    cost, start = [0.0], [0]  # of the best division of the first rows; where its last pass starts
    for end in range(1, len(order) + 1):
        cost.append(math.inf)
        start.append(end)
        for first in range(end - 1, -1, -1):
            tokens = (end - first) * lengths[order[first]]
            if tokens > budget and first < end - 1:
                break
            if cost[first] + per_pass + tokens < cost[end]:
                cost[end], start[end] = cost[first] + per_pass + tokens, first
    passes, end = [], len(order)
    while end:
        passes.append(order[start[end] : end])
        end = start[end]
    return passes[::-1]
