"""Read where a run's result comes from: models and data with their revisions, hashes, versions, seed and recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msa_lite.errors import FormatError
from msa_lite.io.reading import parse_yaml, read_text
from msa_lite.report.faults import stage_manifest

_RECIPE = "recipe.yaml"
_FIRST = "# A run of msa-lite"
_ROWS = "rows learnt, "
_PINNED = re.compile(rf"({_ROWS}[^:]+|[a-z]+): (\S+)")


@dataclass(frozen=True)
class Provenance:
    """The inputs of a run, and the hashes of what it made."""

    recipe: str
    """The text of recipe.yaml, the recipe as resolved."""
    values: Mapping[str, Any]
    """The same as plain data."""
    method: str
    """"msa", or the name of the baseline."""
    reason: str | None
    """The reason why this prior was taken, where the recipe gives a history to choose from."""
    models: Mapping[str, str]
    """The names of target, prior and ideal, as in the recipe: a repository with its commit, or a folder."""
    revisions: Mapping[str, str]
    """The commit or content hash of each model."""
    rows: Mapping[str, str]
    """The hash of the rows that each vector learnt."""
    files: Mapping[str, str]
    """The SHA-256 of each file of the unlearned model; empty until it is merged."""
    versions: Mapping[str, str]
    """The versions of msa-lite and its libraries that merged the model."""
    seed: int | None
    """The seed of the run."""
    form: Literal["model", "adapter"] = "model"
    """What the merge makes, which is also the name of its folder."""


def load_provenance(folder: Path) -> Provenance:
    """Load the provenance from a run's folder. Raise FormatError for broken files."""
    path = folder / _RECIPE
    text = read_text(path)
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise FormatError(f"{path}: not a recipe")
    first, *notes = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    method = re.search(r"`msa-lite baseline (\w+)`", first)
    pinned = {found[1]: found[2] for line in notes if (found := _PINNED.fullmatch(line))}
    merge = values.get("merge")
    form: Literal["model", "adapter"] = (
        "adapter" if isinstance(merge, dict) and merge.get("as") == "adapter" else "model"
    )
    manifest = stage_manifest(folder / form) or {}
    revisions = {name: value for name, value in pinned.items() if not name.startswith(_ROWS)}
    seed = values.get("seed")
    return Provenance(
        recipe=text,
        values=values,
        method=method[1] if method else "msa",
        form=form,
        reason=next((line for line in notes if not _PINNED.fullmatch(line)), None),
        models=_models(values, revisions),
        revisions=revisions,
        rows={name.removeprefix(_ROWS): value for name, value in pinned.items() if name.startswith(_ROWS)},
        files={name: item["sha256"] for name, item in manifest.get("files", {}).items()},
        versions=dict(manifest.get("versions") or {}),
        seed=seed if isinstance(seed, int) else None,
    )


def is_run(folder: Path) -> bool:
    """Check whether a folder is that of a run, of MSA or of a baseline."""
    path = folder / _RECIPE
    try:
        return path.is_file() and read_text(path).startswith(_FIRST)
    except FormatError:
        return False


def _models(values: Mapping[str, Any], revisions: Mapping[str, str]) -> dict[str, str]:
    evaluate = values.get("evaluate")
    names = {
        "target": values.get("target"),
        "prior": values.get("prior"),
        "ideal": evaluate.get("ideal") if isinstance(evaluate, dict) else None,
    }
    return {name: str(value) for name, value in names.items() if value and (name != "prior" or name in revisions)}
