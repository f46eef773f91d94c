"""The recipe of a table: rows of MSA and of baselines on one recipe, and the trainings that make its models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from msa_lite.io.files.schema import Closed
from msa_lite.recipe.inputs import NameOr
from msa_lite.recipe.training import SEEDS

Changes = dict[str, Any]


def overrides_of(changes: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield changes of a recipe as `key.sub=value`. A mapping changes the keys below it, and leaves the others."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and value:
            yield from overrides_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"


class TableTraining(Closed):
    """A training that makes models of the table. A finished one is not repeated."""

    recipe: str | dict[str, Any]
    """The recipe of a training: a file, the name of a shipped one, or its keys."""
    set: Changes = {}
    """Keys of the recipe to change, as {stages.0.data.name: retain90}."""


class TableMethod(Closed):
    """A baseline of the table."""

    method: str
    """The method, as `msa-lite baseline` takes it."""
    label: str | None = Field(None, min_length=1)
    """The label of its row. Default: its name in the paper, as in `compare`."""
    set: Changes = {}
    """Keys of the recipe to change, as {baseline.start: prior}."""


class TableRecipe(Closed):
    """A table: rows of MSA and of baselines on one recipe, side by side (`msa-lite table`)."""

    recipe: str
    """The recipe of all rows: a file, or the name of a shipped one."""
    set: Changes = {}
    """Keys of that recipe to change in all rows, as {vector.mode: lora}."""
    train: list[TableTraining] = []
    """Trainings that make targets, ideals and priors first, in their order."""
    msa: dict[str, Changes] = {}
    """MSA's rows by label, each with the keys of the recipe to change, as {prior: meta-llama/Llama-3.2-1B}."""
    methods: list[NameOr[TableMethod]] = []
    """The baselines: names of methods, or {method, label, set}."""
    seeds: list[int] = Field([0], min_length=1)
    """Make every row with each of these seeds. With several, a row's label ends with its seed."""
    published: str | None = None
    """The name of the MSA paper's table to print below."""
    data: str | None = None
    """The folder or repository with the benchmark's data, instead of the usual one."""
    output: str
    """The folder of the table and of its runs."""

    @property
    def folder(self) -> Path:
        """The folder of the table."""
        return Path(self.output).expanduser()

    @property
    def baselines(self) -> list[TableMethod]:
        """The baselines, each with its keys."""
        return [TableMethod(method=item) if isinstance(item, str) else item for item in self.methods]

    @field_validator("seeds")
    @classmethod
    def _are_seeds(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) != len(seeds) or not all(0 <= seed < SEEDS for seed in seeds):
            raise ValueError(f"numbers from 0 to {SEEDS - 1} are wanted, each once")
        return seeds

    @field_validator("methods")
    @classmethod
    def _has_rows(cls, methods: list[str | TableMethod], info: Any) -> list[str | TableMethod]:
        if not methods and not info.data.get("msa"):
            raise ValueError("a table without rows; name one in msa, or a method")
        return methods
