"""What a run has measured, for tests that need a verdict and not its figures."""

from __future__ import annotations

from typing import Any

from msa_lite.report.sentence import Bound, Forgotten, Kept


def around(value: float, half: float = 0.02) -> Bound:
    return Bound(value, value - half, value + half)


def make_forgotten(rows: int = 48, unlearned: int = 1, **changes: Any) -> Forgotten:
    """What passes, of this many rows: the target recites all of them, and the ideal none."""
    facts: dict[str, Any] = {
        "recited": {"target": rows, "unlearned": unlearned, "ideal": 0},
        "control": "ideal",
        "control_rows": rows,
        "excess": Bound(unlearned / rows, -0.05, 0.09),
        "left": {"extraction_strength": around(0.05), "probability": around(0.1)},
        "changed": rows,
    }
    return Forgotten(rows, **facts | changes)


def make_kept(share: float = 0.95, rows: int = 40, **changes: Any) -> Kept:
    """A share that is kept of this many rows, with narrow bounds."""
    return Kept(around(share), rows, {"accuracy": share}, {"target": rows, "unlearned": round(share * rows)}, **changes)
