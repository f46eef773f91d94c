"""Forecast, before a fit, how much more a vector changes on rows that its filter has not seen than on measured ones.

The vector is not there yet, so the forecast is of an arbitrary change, of random numbers: the share of it that the
filter leaves in a layer's outputs, a mean over layers, on each row to keep as measured, and as if the filter had never
seen that row.

Beside the fitted vector on rows that nothing saw, means of two or three draws were off by a factor of at most 1.24 with
48 rows or more at λ = 1 and 4, and of 1.39 at λ = 16; with 24 rows 1.46 and 1.55 (five histories of small models, where
it was 1.26 at most, and one of SmolLM2-135M, where the forecast was too high). Single draws with 96 rows at λ = 64: at
most 1.25 (three histories of small models, where it was too low, and one of SmolLM2-135M).

Of texts, tokens decide, in passages of 128 as of 512: of 3,000, 6,000, 12,000 and 16,000 to 25,000 of documentation,
SmolLM2-135M left 1.6, 1.4, 1.2 and 1.2 times as much of a random change on other documents (λ = 1). The forecast was
1.0 to 1.3 times as high there, and at λ = 16 up to 1.7 times.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msa_lite.merger.formula import Filter

ENOUGH_ROWS = 200  # rows that a filter is measured on; others then change hardly more than these
ENOUGH_TOKENS = 16_000  # the same for texts, which are cut into passages
_BLOCKS = 2  # of a model's layers
_DIRECTIONS = 32  # rows of the random change
_LARGEST = 4096  # equations of a system; of more, it takes minutes
_BLOCK = re.compile(r"\.(\d+)\.")


@dataclass
class Unseen:
    """Gathers the shares of a change that a filter leaves, while its moments are measured."""

    strengths: Sequence[float]
    """The filter's λ."""
    targets: str | Collection[str] = "all-linear"
    """The modules that the vector will change: names, or else all."""
    unit: str = "rows"
    """The name of what is measured: "rows", or "passages" of texts."""
    rows: int = 0
    """The rows to keep that were measured, or passages; 0 before that."""
    _shares: list[np.ndarray] = field(default_factory=list)

    def choose(self, names: Collection[str]) -> set[str]:
        """Return the names of the layers to look at: those of a few blocks, evenly drawn."""
        blocks = sorted({int(match[1]) for name in names if (match := _BLOCK.search(name))})
        chosen = {blocks[int((place + 0.5) / _BLOCKS * len(blocks))] for place in range(_BLOCKS) if blocks}
        return {name for name in names if (match := _BLOCK.search(name)) and int(match[1]) in chosen}

    def add(self, layers: Sequence[str], forget: np.ndarray, retain: np.ndarray, owners: np.ndarray) -> None:
        """Add some layers with the same inputs.

        forget: (k, in), a root of C_f. retain: (n, in), the inputs at the positions of the rows to keep. owners: (n,),
        the row of each position.
        """
        parts = {part for name in layers for part in name.split(".")}
        is_changed = isinstance(self.targets, str) or any(name.rpartition(".")[2] in parts for name in self.targets)
        size = float(np.sum(retain.astype(np.float64) ** 2))
        is_known = np.isfinite(size) and size > 0 and np.isfinite(forget).all()
        if not (is_changed and is_known) or min(forget.shape[1], len(forget) + len(retain)) > _LARGEST:
            return
        self.rows = len(np.unique(owners))
        change = np.random.default_rng(0).standard_normal((_DIRECTIONS, forget.shape[1]))
        whole = np.sum((retain @ change.T) ** 2) / size
        self._shares.append(np.array([*Filter(forget, retain).left_out(change, self.strengths, owners)]) / whole)

    @property
    def facts(self) -> dict[str, Any]:
        """Return how many times as much changes on unseen rows, by λ, for a manifest; empty where nothing tells.

        A filter that never saw a row was measured on one row less; the excess over 1 falls as 1 ÷ rows.
        """
        if not self._shares or self.rows < 2:
            return {}
        seen, unseen = np.mean(self._shares, axis=0).T
        ratios = 1 + (unseen / seen - 1) * (1 - 1 / self.rows)
        by_strength = {f"{λ:g}": float(ratio) for λ, ratio in zip(self.strengths, ratios, strict=True)}
        return {"rows": self.rows, "unit": self.unit, "ratios": by_strength}


def unseen_sentence(facts: Mapping[str, Any]) -> str:
    """Return the forecast in a sentence. facts: as `Unseen.facts`, with one λ or several.

    What more would bring is told of rows alone: more text than the moments take is thinned out.
    """
    rows, unit, ratios = facts["rows"], facts["unit"], facts["ratios"]
    enough = {λ: 1 + (ratio - 1) * rows / ENOUGH_ROWS for λ, ratio in ratios.items()}
    more = f"; {ENOUGH_ROWS} would bring it to about {_listed(enough)}" if unit == "rows" and rows < ENOUGH_ROWS else ""
    return (
        f"with these {rows} {unit} in the filter, about {_listed(ratios)} times as much of a change is left on {unit} "
        f"that it has not seen as on these (λ = {', '.join(ratios)}){more}"
    )


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in values.values())
