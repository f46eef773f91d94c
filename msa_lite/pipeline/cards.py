"""Complete the card of a run's model or adapter once the run has scored it: the outcome into manifest and README.md."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from msa_lite.benchmarks import BENCHMARKS
from msa_lite.choose.candidates import Values
from msa_lite.choose.choice import Choice
from msa_lite.errors import FormatError
from msa_lite.io.files import write_text
from msa_lite.io.reading import read_text
from msa_lite.io.seal import CARD_FILE, add_files, describe_file, load_manifest
from msa_lite.merger import Merged, MergedAdapter
from msa_lite.pipeline.prepare import Run
from msa_lite.pipeline.verdict import Findings
from msa_lite.report import Report
from msa_lite.report.card import model_card
from msa_lite.report.front_matter import read_target_card

logger = logging.getLogger(__name__)

_FIGURES = ("value", "n", "stderr", "higher_is_better")


def complete_card(
    run: Run,
    merged: Merged | MergedAdapter,
    chosen: Values,
    choice: Choice | None,
    reports: Mapping[str, Report],
    findings: Findings,
) -> None:
    """Put the outcome of a run into the manifest of its model or adapter, and write the card anew.

    A run that ends as before changes no byte. A card that somebody has edited stays as it is. The card is written
    before the manifest; after a kill in between, the next run completes the manifest.
    """
    folder = merged.folder
    manifest = load_manifest(folder)
    assert manifest is not None, "the merge has just been done, or found whole"
    outcome = json.loads(json.dumps(_outcome(run, chosen, choice, reports, findings)))
    facts = {"target_card": read_target_card(run.sources["target"].folder), **manifest, "outcome": outcome}
    card, path, known = model_card(facts), folder / CARD_FILE, manifest["files"].get(CARD_FILE)
    try:
        present = read_text(path) if path.exists() else None
    except FormatError:
        present = ""
    if present not in (None, card) and (known is None or describe_file(path) != known):
        logger.warning("%s: somebody has edited it, so it stays as it is; without it, a rerun writes a new one", path)
        names = [] if known is None else [CARD_FILE]
    ...


def _outcome(
    run: Run, chosen: Values, choice: Choice | None, reports: Mapping[str, Report], findings: Findings
) -> dict[str, Any]:
    """Return the outcome for the manifest: figures and sentences, no row and no path."""
    verdict, unlearned = findings.verdict, reports.get("unlearned")
    ...
