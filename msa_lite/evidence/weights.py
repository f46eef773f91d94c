"""Ask in which weights a model was changed: in those that hold the forget rows, or elsewhere.

Only a history that trained the rows into known weights (a stage with `into:`) has the answer; see `location` for the
measures, and LACUNA (arXiv 2607.02513) for the idea. Nothing is run: two to four checkpoints are read block by block.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from msa_lite.evals.benchmark import Record
from msa_lite.evidence.evidence import EvidenceKind, Observed, Scene
from msa_lite.evidence.location import Location, Ranking, find_stage, locate_update, why_undecided
from msa_lite.io.console.progress import Progress, silent
from msa_lite.io.weights.adapter import is_adapter
from msa_lite.io.weights.known import KNOWN_FILE, read_known
from msa_lite.report.evidence import EvidenceFigure, EvidenceFinding
from msa_lite.report.sentence import percent

_MOST = 0.5  # of the stage's change; with more taken back, it counts as removed


class ChangedWeights(EvidenceKind):
    """The place of the update beside the weights that the forget rows were trained into."""

    name = "weights"
    uses = ("target", "unlearned")

    def lacking(self, scene: Scene) -> str:
        target, unlearned = scene.sources["target"].folder, scene.sources.get("unlearned")
        if why_undecided(target):
            return f"no known weights: the target has no {KNOWN_FILE}, as a training with `into:` writes it"
        if len(stages := read_known(target)) > 1:
            return (
                f"{', '.join(stages)} all changed known weights, and nothing says which of them holds the forget rows"
            )
        if unlearned and is_adapter(unlearned.folder):
            return "the result is an adapter, and its place among the weights is not looked at; choose merge.as model"
        return ""

    def observe(self, scene: Scene, progress: Progress = silent) -> Observed:
        target, unlearned = (scene.sources[name].folder for name in ("target", "unlearned"))
        progress("evidence: weights", 0, 1)
        location = locate_update(target, unlearned, find_stage(target))
        progress("evidence: weights", 1, 1)
        return {"location": [asdict(location)]}

    def conclude(self, observed: Observed, scene: Scene) -> EvidenceFinding:
        location = _location(observed["location"][0])
        within, count = location.within, location.within.known
        values = {
            "precision": within.precision,
            "recall": within.recall,
            "auc": within.auc,
            "energy": location.energy,
            "undone": location.undone,
        }
        figures = {name: EvidenceFigure(value, None, count) for name, value in values.items() if value is not None}
        details: dict[str, Any] = asdict(location) | {"chance": within.chance}
        return EvidenceFinding(
            self.name, _outcome(location), _sentence(location), None, 0, {"unlearned": figures}, details
        )  # fmt: skip


def _location(record: Record) -> Location:
    rankings = {name: Ranking(**record[name]) for name in ("everywhere", "within")}
    return Location(**{**record, **rankings})


def _outcome(location: Location) -> str:
    if location.undone is None:
        return "located"
    return "mostly removed" if location.undone >= _MOST else "mostly elsewhere"


def _sentence(location: Location) -> str:
    within = location.within
    text = f"{within.known:,} weights are known to hold the forget rows. "
    if within.precision is None:
        return f"{text}Nothing in their tensors has changed."
    text += (
        f"Of the largest changes in their tensors {percent(within.precision)} are in them, {percent(within.chance)} by "
        "chance."
    )
    if location.undone is None:
        return f"{text} The models before and after their training are gone, so what was taken back is not known."
    return f"{text} {percent(location.undone)} of what that training changed is taken back: 100 % would be removed."
