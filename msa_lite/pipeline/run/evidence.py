"""Collect evidence beside the scores of a run: a stage for each kind, once its models are scored."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from msa_lite.errors import MsaError, OutputError
from msa_lite.evals.engine.models import model_identity
from msa_lite.evals.scores.records import write_records
from msa_lite.evidence.evidence import MODELS, EvidenceKind, Scene
from msa_lite.evidence.nearer import Nearer
from msa_lite.evidence.says import Says
from msa_lite.io.console.progress import Progress, notices
from msa_lite.io.files.writing import digest
from msa_lite.io.finished.manifest import is_finished, stage_folder
from msa_lite.io.weights.hub import Source, fetch
from msa_lite.pipeline.prepare.models import fit_prior
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.scores import scores_folder
from msa_lite.pipeline.stages.costs import evidence_costs
from msa_lite.pipeline.stages.stage import Stage
from msa_lite.report import load_report, write_report
from msa_lite.report.run.evidence import EVIDENCE_FOLDER, EvidenceFinding, evidence_report, finding_of, undecided

logger = logging.getLogger(__name__)

EVIDENCE_KIND = "evidence"
_KINDS: dict[str, EvidenceKind] = {"says": Says(), "nearer": Nearer()}


def evidence_stages(context: Context) -> list[Stage]:
    """Return the stages of the evidence that a recipe wants; none where nothing is scored."""
    folder = context.scope.folder / EVIDENCE_FOLDER
    stages = []
    for kind in context.recipe.evidence.collect if context.scored else ():
        evidence = _KINDS[kind]
        stages.append(
            Stage(
                f"evidence: {kind}",
                "observe",
                folder / kind,
                partial(_collect, context, evidence),
                needs=[f"scores: {name}" for name in context.scored],
                inputs=lambda evidence=evidence: _inputs(evidence, make_scene(context.run)),  # type: ignore[misc]
                cost=partial(evidence_costs, "the evidence", evidence.loads, evidence.passes),
                says="what scores do not tell, such as what the unlearned model says instead",
            )
        )
    return stages


def check_evidence(run: Run) -> None:
    """Tell, before any work, which evidence stays undecided on a run's models and rows, and why."""
    if run.test is None or not run.recipe.evidence.collect:
        return
    scene = make_scene(run, merged=False)
    for kind in run.recipe.evidence.collect:
        if reason := _KINDS[kind].lacking(scene):
            notices.info("evidence: %s stays undecided: %s", kind, reason)


def make_scene(run: Run, merged: bool = True) -> Scene:
    """Return the models and rows that evidence is about. merged: True once the unlearned model is there."""
    assert run.test is not None, "something is scored"
    sources = {name: run.sources[name] for name in ("target", "ideal") if name in run.sources}
    if prior := _prior(run):
        sources["prior"] = prior
    scores = {}
    if merged:
        sources["unlearned"] = fetch(str(run.folder / run.recipe.merge.form))
        scores = {name: scores_folder(run, name, "test") for name in Context.of(run).scored}
    return Scene(run.test, sources, scores, run.recipe.seed)


def _prior(run: Run) -> Source | None:
    """Return the recipe's prior, also for a method that starts at the target; None where there is none."""
    if run.scope.start == "prior":
        return run.sources["prior"]
    if not run.recipe.has_prior:
        return None
    try:
        return fit_prior(run.sources["target"], fetch(run.recipe.prior_checkpoint))
    except MsaError as error:  # the method itself needs none
        logger.warning("evidence: without a prior: %s", error)
        return None


def _identities(scene: Scene) -> dict[str, Any]:
    return {name: model_identity(scene.sources[name]) for name in MODELS if name in scene.sources}


def _inputs(evidence: EvidenceKind, scene: Scene) -> dict[str, Any]:
    """Return all that decides a finding, as its manifest records it."""
    return {
        "evidence": evidence.name,
        "settings": evidence.describe(scene),
        "models": _identities(scene),
        "rows": digest(scene.benchmark.describe()),
    }


def _collect(context: Context, evidence: EvidenceKind, progress: Progress) -> EvidenceFinding:
    """Return what a kind of evidence found; observe it first, unless that was done from the same inputs.

    Evidence that fails costs no run its verdict: it is undecided then, and a rerun tries again.
    """
    scene = make_scene(context.run)
    inputs, folder = _inputs(evidence, scene), context.scope.folder / EVIDENCE_FOLDER / evidence.name
    if is_finished(folder, inputs):
        return finding_of(load_report(folder))
    facts = {"sources": {name: scene.sources[name].pinned() for name in scene.sources}}
    try:
        with stage_folder(folder, EVIDENCE_KIND, inputs, facts) as partial_folder:
            if reason := evidence.lacking(scene):
                finding = undecided(evidence.name, reason)
            else:
                finding, observed = evidence.find(scene, progress)
                for name, records in observed.items():
                    write_records(partial_folder / f"{name}.jsonl", records)
            write_report(evidence_report(finding, _identities(scene)), partial_folder)
    except OutputError:
        raise
    except MsaError as error:
        logger.warning("evidence: %s stays undecided, and a rerun tries again: %s", evidence.name, error)
        return undecided(evidence.name, "it failed, and a rerun tries again")
    return finding


def findings_of(results: Mapping[str, Any]) -> Sequence[EvidenceFinding]:
    """Return the findings among the results of stages."""
    return [result for result in results.values() if isinstance(result, EvidenceFinding)]
