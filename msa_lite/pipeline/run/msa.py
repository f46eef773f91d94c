"""The stages of a run of MSA, of the task vector and of a sweep; and what a run ends with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msa_lite.choose.choice import Values
from msa_lite.data import Row
from msa_lite.errors import UsageError
from msa_lite.io.finished.seal import load_manifest
from msa_lite.merger import Merged, MergedAdapter
from msa_lite.pipeline.prepare.earlier import earlier_terms, open_earlier
from msa_lite.pipeline.prepare.models import whole_target
from msa_lite.pipeline.prepare.run import Context, Run
from msa_lite.pipeline.run.checks import check_stages
from msa_lite.pipeline.run.choice import CHOICE, choice_stages, chosen_strengths, recorded_points, rescore_stages
from msa_lite.pipeline.run.evidence import evidence_stages
from msa_lite.pipeline.run.filtering import filter_stages
from msa_lite.pipeline.run.merge import merge_stage, point_terms, run_terms
from msa_lite.pipeline.run.report import write_record
from msa_lite.pipeline.run.scores import earlier_stages, score_stages
from msa_lite.pipeline.run.vectors import fit_stages
from msa_lite.pipeline.run.verdict import Findings, complete_card, judge_run
from msa_lite.pipeline.stages.stage import Stage, unique
from msa_lite.recipe import Recipe
from msa_lite.report.run.choice import load_choice
from msa_lite.report.run.provenance import load_provenance
from msa_lite.report.run.story import load_story
from msa_lite.strengths import Strengths


def msa_stages(context: Context, accept: bool = False) -> list[Stage]:
    """Return the stages of a run of MSA, or of the task vector, which starts from the target.

    accept: only warn if the target does not know the rows to forget, or the prior does.
    """

    def describe() -> Mapping[str, Any]:
        return context.scope.describe(context.recipe, chosen_strengths(context.run).values)

    merged = _up_to_merge(context, accept, probe=context.scope.method == "msa")
    return unique([*merged, *score_stages(context, describe), *earlier_stages(context), *evidence_stages(context)])


def sweep_stages(context: Context) -> list[Stage]:
    """Return the stages of a sweep: a run without its scores on test rows."""
    return unique(_up_to_merge(context, accept=False, probe=False))


def _up_to_merge(context: Context, accept: bool, probe: bool) -> list[Stage]:
    checks = check_stages(context, accept, probe)
    fits = fit_stages(context)
    names = [stage.name for stage in fits]
    moments, filters = filter_stages(context)
    names += [stage.name for stage in filters]
    levels = [stage.name for stage in checks if stage.name in ("validation: ideal", "validation: prior")]
    choice = choice_stages(context, [*names, *levels])
    needs = [*names, *(stage.name for stage in choice if stage.name == CHOICE)]
    merge = merge_stage(context, lambda: run_terms(context.run, chosen_strengths(context.run)), needs)
    return [*checks, *moments, *fits, *filters, *choice, merge, *rescore_stages(context)]


def finish_run(
    run: Run,
    chosen: Values,
    merged: Merged | MergedAdapter,
    learnt: Iterable[Row],
) -> Findings:
    """Write what a run ends with, once its stages are done: verdict, card, report, removal record.

    chosen: α and β, or what was chosen for a baseline. learnt: the rows to keep that the merged model learnt.
    """
    findings = judge_run(run, learnt)
    story = load_story(run.folder, verdict=findings.verdict)
    complete_card(run, story, merged, chosen)  # which the manifest then has
    write_record(run, replace(story, provenance=load_provenance(run.folder)), chosen, merged)
    return findings


def learnt_rows(run: Run, strengths: Strengths) -> Sequence[Row]:
    """Return the rows to keep that had a part in the merged model: by a filter, or by a retain vector or a hold."""
    fitted = run.rows.get("retain", ()) if strengths.beta or run.recipe.hold else ()
    return [*fitted, *(run.spared if strengths.filter else ())]


def merge_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `mergekit_recipe`, for the merge of a recipe's run.

    Raise UsageError while its vectors are not fitted, or alpha and beta not chosen.
    """
    folder = recipe.folder
    if recipe.has_choice:
        inputs = (load_manifest(folder / "sweep") or {"inputs": {}})["inputs"]
        if inputs.get("candidates") != recorded_points(recipe):
            raise UsageError(f"{folder}: alpha and beta are not chosen yet; run the recipe, or give one value of each")
        strengths = Strengths.of(load_choice(folder / "sweep").values)
    else:
        strengths = recipe.points[0]
    terms = [term for term in point_terms(folder, recipe, (), strengths) if term.weight]
    missing = [str(term.vector) for term in terms if load_manifest(term.vector) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)}: not fitted yet; `msa-lite run RECIPE --until vectors` does it")
    terms += earlier_terms(open_earlier(recipe))
    target = whole_target(recipe)
    prior = recipe.prior_checkpoint if recipe.has_prior else target
    arguments: dict[str, Any] = {"target": target, "prior": prior, "dtype": recipe.merge.dtype}
    for side, weight in (("forget", "alpha"), ("retain", "beta")):
        chosen = [term for term in terms if term.side == side]
        arguments[side] = [str(term.vector) for term in chosen] or None
        arguments[weight] = [abs(term.weight) for term in chosen] or 0.0
    return arguments
