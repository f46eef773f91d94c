"""The rows of a probe, and a run's own short probe of its prior: has it already seen the forget set?"""

from __future__ import annotations

from msa_lite.data import load_rows
from msa_lite.evals.probe import Probe, against_own, against_rows, probe_model
from msa_lite.io.progress import Progress, silent
from msa_lite.pipeline.prepare import Run
from msa_lite.report.findings import read_verdicts

PROBE_FOLDER = "probe"
COMPARED_WITH = {"holdout": "holdout rows", "paraphrased": "paraphrases of them"}
CHEAP_ROWS = 64  # of each side, for a run's own probe: it takes seconds, and shows rows that were learnt


def probe_rows(run: Run) -> Probe | None:
    """Return the forget rows and the rows they are compared with; None if there are none.

    The comparison rows are the first of these that exist: `probe.against`, the recipe's holdout rows, the benchmark's,
    the benchmark's paraphrases. A benchmark's validation part is used if it has enough rows. Otherwise its test part
    is: no candidate is scored on it here, and nothing is chosen by it.
    """
    forget, other = run.data["forget"], run.data.get("probe.against")
    if other is None:
        forget, other = run.data.get("evaluate.forget", forget), run.data.get("evaluate.holdout")
        if other is None or other.format != forget.format:
            parts = [probe for part in (run.validation, run.test) if part and (probe := against_own(part))]
            return next((probe for probe in parts if probe.suffices), parts[-1] if parts else None)
    rows = load_rows(forget), load_rows(other)
    return against_rows(*rows, run.prompter, run.recipe.probe.paired, run.recipe.vector.max_length)


def cheap_probe(run: Run, progress: Progress = silent) -> str | None:
    """Return a warning if the run's prior shows signs of having seen the forget set, by the loss of a few rows.

    None if it shows none, if that cannot be told, or if there is nothing to compare with. Signs that the ideal shows as
    well mean nothing. The scores stay in OUTPUT/probe/cheap, so a rerun loads no model for them.
    """
    rows = probe_rows(run)
    if rows is None:
        return None
    few = rows.sampled(CHEAP_ROWS, run.recipe.seed, with_z=False)
    folder, reports = run.folder / PROBE_FOLDER / "cheap", {}
    for name in ("prior", "ideal"):  # the ideal only if the prior shows signs, to see whether they mean anything
        if name in run.sources:
            reports[name] = probe_model(run.sources[name], few, folder / name, f"probe: {name}", progress)
        finding = read_verdicts(reports)[0]
        if finding.verdict != "signs":
            return None
    forget, other = reports["prior"].settings["rows"].values()
    return (
        f"the prior {run.sources['prior'].name} {finding.explanation}. {forget} forget rows were compared with {other} "
        f"{COMPARED_WITH[few.against]}; `msa-lite probe` looks closer. MSA fails with a prior that has already seen "
        "the forget set: take an earlier checkpoint"
    )
