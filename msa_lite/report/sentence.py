"""Say in a sentence or two what happened to a model, for somebody who has never heard of unlearning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msa_lite.report.reports import Report


def first_sentence(verdict: Mapping[str, Any] | None, reports: Mapping[str, Report]) -> str:
    """Return what happened, by verdict.json; reports: the scores on test rows, where there is no verdict."""
    if verdict is None:
        return "This run is not finished, so nothing can be said of its model yet."
    if verdict["outcome"] is None:
        return f"There is no verdict on this model: {verdict['reason']}."
    return str(verdict["sentence"])
