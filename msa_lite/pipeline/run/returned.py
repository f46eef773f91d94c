"""Ask the models of a run the rows of earlier requests, and tell which of them come back.

The scores are apart from those of the run's own rows, in `evaluation/earlier`, whatever benchmark these are of: they
decide neither α nor β, and reports of runs with other earlier requests still stand side by side.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msa_lite.evals.benchmarks.benchmark import Record, Records
from msa_lite.evals.scores.records import read_records
from msa_lite.evals.verdict.outcome import is_recited, weigh_recited, yardstick_of_rows
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.scores import row_content, score_stage, scored_records, scores_folder
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.report.verdict.comeback import EARLIER_SET, EarlierFacts

logger = logging.getLogger(__name__)


def earlier_stages(context: Context) -> list[Stage]:
    """Return the stages that ask the models the rows of earlier requests; none without such rows.

    Without an ideal the prior is asked, too: it is the control then, where there are no holdout rows.
    """
    if not context.asks_earlier:
        return []
    names = [*context.earlier_models]
    return [score_stage(context, name, "earlier", ["merge"] * (name == "unlearned")) for name in names]


def weigh_earlier(run: Run) -> EarlierFacts | None:
    """Return what became of the rows of earlier requests, with a warning for those that come back; None without any."""
    removed = run.removed
    if removed is None:
        return None
    unscored = {os.path.abspath(folder): reason for folder, reason in removed.unscored.items()}
    if removed.questions is None:
        return EarlierFacts(removed.requests, removed.total, None, {}, unscored)
    asked = {name: _records(run, name) for name in Context.of(run).earlier_models}
    models: dict[str, dict[str, Sequence[Record]]] = {name: {"forget": records} for name, records in asked.items()}
    if "ideal" not in asked and (holdout := _holdout(run)):
        models["target"]["holdout"] = holdout
    weighed = weigh_recited(models, yardstick_of_rows(models))
    assert not isinstance(weighed, str), "there are rows"
    back = _count_back(removed.owners, asked)
    facts = EarlierFacts(removed.requests, removed.total, weighed[0], back, unscored)
    if facts.warning:
        logger.warning("%s", facts.warning)
    return facts


def _records(run: Run, name: str) -> list[Record]:
    return read_records(scores_folder(run, name, "earlier") / f"{EARLIER_SET}.jsonl")


def _holdout(run: Run) -> Sequence[Record]:
    """Return the target's records of holdout rows, of the user's own sets."""
    target = scored_records(run.folder, [""]).get("target", {})
    return target.get("holdout", [])


def _count_back(owners: Sequence[Path], asked: Mapping[str, Sequence[Record]]) -> dict[str, int]:
    """Count the rows that come back, by the folder of the run that removed them.

    owners: that folder of each row. asked: the records of each model, in the same order.
    """
    control = asked.get("ideal") or asked.get("prior") or ()
    seen: dict[Path, set[str]] = {}
    back: dict[str, int] = {}
    for place, (owner, record) in enumerate(zip(owners, asked["unlearned"], strict=True)):
        if not is_recited(record) or (control and is_recited(control[place])):
            continue
        if owner not in seen:
            seen[owner] = _forgotten(owner)
        if row_content(record) in seen[owner]:
            name = os.path.abspath(owner)
            back[name] = back.get(name, 0) + 1
    return back


def _forgotten(folder: Path) -> set[str]:
    """Return the rows that the model of an earlier request did not recite, by its records, as far as they are left."""
    asked, recited = set[str](), set[str]()
    for ending in ("", "_validation"):
        records: Records = scored_records(folder, [ending]).get("unlearned", {})
        asked |= {row_content(record) for record in records.get("forget", ())}
        recited |= {row_content(record) for record in records.get("forget", ()) if is_recited(record)}
    return asked - recited
