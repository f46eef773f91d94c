"""Tell which stages a run's recipe asks for: folders of an earlier recipe may still lie beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msa_lite.io.hub import content_files, revision_of
from msa_lite.report.faults import stage_manifest
from msa_lite.report.provenance import Provenance
from msa_lite.report.reports import Report

_OF_VECTORS = ("msa", "task_vector")


@dataclass(frozen=True)
class Wanted:
    """The stages that a run's recipe asks for."""

    vectors: tuple[str, ...] | None
    """The vectors to be fitted; None for a baseline, whose fits have names of their own."""
    choice: bool | Literal["perhaps"]
    """True if something is to be chosen; "perhaps": if there are rows to choose by."""
    strengths: Mapping[str, float]
    """alpha and beta, where the recipe gives one value of each."""
    models: tuple[str, ...]
    """The models to be scored: target, unlearned and ideal; none where nothing is scored."""

    @property
    def models_to_choose_by(self) -> tuple[str, ...]:
        """Return the models that have scores on validation rows."""
        return (*self.models, "prior") if self.models and self.choice else ()

    @classmethod
    def of(cls, provenance: Provenance) -> Wanted:
        """Return what a recipe asks for."""
        recipe, method = provenance.values, provenance.method
        strengths = {"forget": recipe["forget"]["alpha"]}
        if retain := recipe.get("retain"):
            strengths["retain"] = retain["beta"]
        symbols = {"forget": "alpha", "retain": "beta"}
        numbers = {symbols[name]: value for name, value in strengths.items() if isinstance(value, int | float)}
        used = tuple(name for name, value in strengths.items() if _is_used(value))
        evaluate = recipe.get("evaluate")
        ideal = ("ideal",) if evaluate and evaluate.get("ideal") else ()
        return cls(
            vectors=used if method in _OF_VECTORS else None,
            choice=any(map(_is_choice, strengths.values())) if method in _OF_VECTORS else "perhaps",
            strengths=numbers,
            models=("target", "unlearned", *ideal) if evaluate else (),
        )


def _is_choice(strength: Any) -> bool:
    return strength == "auto" or (isinstance(strength, list) and len(strength) > 1)


def _is_used(strength: Any) -> bool:
    """Check whether a strength of a recipe is not 0 alone."""
    return any(strength) if isinstance(strength, list) else bool(strength)


def is_report_of(report: Report, folder: Path) -> bool:
    """Check by the recorded hashes whether a report is of the model, or adapter, in a folder as it is now."""
    model = report.settings.get("model")
    manifest = stage_manifest(folder)
    if not isinstance(model, Mapping) or manifest is None:
        return True  # an earlier version, which did not record it
    hashes = {name: item["sha256"] for name, item in manifest["files"].items()}
    return bool(
        model.get("revision") == revision_of({path.name: hashes.get(path.name) for path in content_files(folder)})
    )
