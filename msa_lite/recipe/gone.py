"""Keys that recipes no longer have and that others took the place of. Keys without a new form are unknown keys."""

from __future__ import annotations

_SCORES = "the rules are extraction and the paper's scores: select.score"
_QUANTISE = "the attack quantise measures what rounding brings back: attack.attacks=[quantise]"
GONE = {
    "merge.forecast": _QUANTISE,
    "probe": "forget rows are compared with evaluate.holdout, or the benchmark's own holdout rows",
    "select.judge": "a judge of kind openai is asked; evaluate.judge.kind: none asks none",
    "select.maximise": _SCORES,
    "select.minimise": _SCORES,
    "select.refine": "name the points in a list, such as forget.alpha=[0.5, 0.75, 1.0]",
    "select.subject_to": _SCORES,
    "select.under": _QUANTISE,
}
"""The dotted key → its new form, for the refusal."""
