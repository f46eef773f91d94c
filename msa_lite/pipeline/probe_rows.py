"""Has the prior already seen the forget set? What a run's forget rows are compared with, and a run's own question."""

from __future__ import annotations

from msa_lite.data import load_rows
from msa_lite.evals.probe import Probe, against_own, against_rows, probe_model, read_verdicts
from msa_lite.io.progress import Progress, silent
from msa_lite.pipeline.prepare import Run

PROBE_FOLDER = "probe"
WHAT = {"holdout": "holdout rows", "paraphrased": "paraphrases of them"}
CHEAP_ROWS = 64  # of each side, for a run's own question: seconds, and what a set was learnt from shows in them


def cheap_probe(run: Run, progress: Progress = silent) -> str | None:
    """A warning where the run's prior shows signs of having seen the forget set, from the loss of a few rows.

    None where it shows none, where that cannot be told, and where there is nothing to compare with; where the ideal
    shows them too, they mean nothing. What was measured stays in OUTPUT/probe/cheap, so a rerun loads no model for it.
    """
    sides = compare_sides(run)
    if sides is None:
        return None
    few = sides.sampled(CHEAP_ROWS, run.recipe.seed, with_z=False)
    folder, reports = run.folder / PROBE_FOLDER / "cheap", {}
    for name in ("prior", "ideal"):  # the latter only where the former shows signs, to see whether they mean anything
        if name in run.sources:
            reports[name] = probe_model(run.sources[name], few, folder / name, f"probe: {name}", progress)
        finding = read_verdicts(reports)[0]
        if finding.verdict != "signs":
            return None
    forget, other = reports["prior"].settings["rows"].values()
    return (
        f"the prior {run.sources['prior'].name} {finding.said}. {forget} forget rows were compared with {other} "
        f"{WHAT[few.against]}; `msa-lite probe` looks closer. MSA fails with a prior that has seen what is to be "
        "forgotten: take an earlier checkpoint"
    )


def compare_sides(run: Run) -> Probe | None:
    """Forget rows and what they are compared with, the first that there is: `probe.against`, the holdout rows of the
    recipe, those of its benchmark, its paraphrases.

    Of a benchmark, the validation part is asked where it suffices; else the test part, on which no candidate is scored
    here and by which nothing is chosen.
    """
    asked, forget = run.recipe.probe, run.data["forget"]
    other = run.data.get("probe.against")
    if other is None:
        forget, other = run.data.get("evaluate.forget", forget), run.data.get("evaluate.holdout")
        if other is None or other.format != forget.format:
            parts = [against_own(part) for part in (run.validation, run.test) if part]
            found = [part for part in parts if part]
            return next((part for part in found if part.suffices), found[-1] if found else None)
    rows = load_rows(forget), load_rows(other)
    return against_rows(*rows, run.prompter, asked.paired, run.recipe.vector.max_length)
