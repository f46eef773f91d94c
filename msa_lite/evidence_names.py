"""List the kinds of evidence by name, in the order in which a run collects them; no model or data is loaded here.

Scores say how much is forgotten. Evidence answers what somebody asks next: what does it say instead, and is it like a
model that never saw the rows?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FigureEntry:
    """One figure that a kind of evidence gives for a model: a row of the table of metrics."""

    label: str
    """Its name in tables."""
    formula: str
    """Its definition, in half a sentence."""
    higher_is_better: bool | None = None
    """None where neither way is better by itself; then the ideal's value is what to compare with."""


@dataclass(frozen=True)
class EvidenceEntry:
    """One kind of evidence. All else about it is in the class that implements it."""

    question: str
    """The question that it answers, for reports and help texts."""
    source: str
    """The publication that it follows."""
    figures: Mapping[str, FigureEntry]
    """Its figures by name; the name of the metric is `evidence_metric`."""


ANSWER_KINDS: Mapping[str, FigureEntry] = {
    "tells": FigureEntry("still tells it", "share of forget rows that are recited, by the rule of the verdict", False),
    "other": FigureEntry(
        "says something else", "share of forget rows with a fluent answer that is not the right one, or an admission"
    ),
    "garbles": FigureEntry(
        "garbles", "share of forget rows with no text, repetition, or words that the prior finds unlikely", False
    ),
}
"""What a model can say where it is asked for a forgotten row; each answer is one of these."""

EVIDENCE: dict[str, EvidenceEntry] = {
    "says": EvidenceEntry("What does it say instead?", "honesty of unlearned models, arXiv 2605.08765", ANSWER_KINDS),
    "nearer": EvidenceEntry(
        "Is it nearer to a model that never saw the rows, or to the target?",
        "relative three-sample test, arXiv 2601.19755 and 1511.04581",
        {
            "losses": FigureEntry(
                "nearer by losses", "position between target (−1) and control (+1) by the answers' probabilities"
            )
        },
    ),
}


def evidence_metric(kind: str, figure: str) -> str:
    """Return the name of the metric of a figure: a column of a comparison."""
    return f"{kind}_{figure}"
