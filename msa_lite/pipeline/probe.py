"""Which prior? Each candidate is asked whether it has already seen the forget set, beside target and ideal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msa_lite.errors import UsageError
from msa_lite.evals.probe import LABELS, PROBE_ROWS, SIGN, Finding, probe_model, read_verdicts
from msa_lite.io.files import write_text
from msa_lite.io.hub import Source, fetch
from msa_lite.io.progress import Progress, silent
from msa_lite.pipeline.folder import claimed
from msa_lite.pipeline.msa import RecipeLike, msa_plan
from msa_lite.pipeline.prepare import Run
from msa_lite.pipeline.prepare_models import fit_prior
from msa_lite.pipeline.probe_rows import PROBE_FOLDER, WHAT, compare_sides
from msa_lite.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found: its folder, what the forget rows were compared with ("holdout", "paraphrased"), names of the
    models, and a finding for each of them.
    """

    folder: Path
    against: str
    models: Mapping[str, str]
    findings: list[Finding]

    @property
    def title(self) -> str:
        """What was compared with what, for a table."""
        forget, other = self.findings[0].report.settings["rows"].values()
        return f"{forget} forget rows against {other} {WHAT[self.against]}"

    @property
    def labels(self) -> list[str]:
        """Headings of what `Finding.cells` gives."""
        return [LABELS[name] for name in self.findings[0].report.metrics]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able form, for `--json`."""
        return {
            "output": str(self.folder),
            "against": self.against,
            "rows": self.findings[0].report.settings["rows"],
            "models": {
                finding.name: {
                    "model": self.models[finding.name],
                    "verdict": finding.verdict,
                    "said": finding.said,
                    **{
                        name: {"value": metric.value, "interval": interval, "stderr": metric.stderr, "n": metric.n}
                        for name, metric, interval in finding.measured()
                    },
                }
                for finding in self.findings
            },
        }


def probe(recipe: RecipeLike, overrides: Iterable[str] = (), progress: Progress = silent) -> ProbeResult:
    """Test the candidates for the prior, and target and ideal as controls, for signs of having seen the forget set.

    Candidates are all checkpoints of the recipe's history, or its prior. Writes a folder for each model and report.md
    into OUTPUT/probe; models that are there already are not asked again. Raises UsageError where there is nothing to
    compare the forget rows with, MismatchError for a candidate of another shape, before anything is scored.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    plan = replace(msa_plan(recipe), choice=False, vectors=())  # there is nothing to choose, so all rows are asked
    with claimed(recipe, plan, progress, _check) as run:
        sides, sources, folder = compare_sides(run), _models(run), run.folder / PROBE_FOLDER
        assert sides is not None, "checked"
        sides = sides.sampled(PROBE_ROWS, recipe.seed)
        reports = {
            name: probe_model(source, sides, folder / name, f"probe: {name}", progress)
            for name, source in sources.items()
        }
        models = {name: source.pinned() for name, source in sources.items()}
        result = ProbeResult(folder, sides.against, models, read_verdicts(reports))
        write_text(folder / "report.md", _summary(result))
    return result


def _check(run: Run) -> None:
    if compare_sides(run) is None:
        raise UsageError(
            "there is nothing to compare the forget rows with: give probe.against, rows of the same kind that no "
            "candidate has seen, or (with probe.paired) a paraphrase of each forget row"
        )


def _models(run: Run) -> dict[str, Source]:
    """The models by the names of their folders: candidates in the order of the history, then the controls.

    Raises MismatchError for a checkpoint that the target could not be edited with.
    """
    history, prior = run.recipe.history, run.recipe.prior_checkpoint
    names = [item.checkpoint for item in history.checkpoints] if history else [prior]
    candidates = {
        "prior" if name == prior else f"checkpoint-{place}": run.sources["prior"] if name == prior else fetch(name)
        for place, name in enumerate(names, start=1)
    }
    target = run.sources["target"]
    candidates = {
        name: source if name == "prior" else fit_prior(target, source, "checkpoint")
        for name, source in candidates.items()
    }
    controls = {name: run.sources[name] for name in ("target", "ideal") if name in run.sources}
    return candidates | controls


def _summary(result: ProbeResult) -> str:
    """report.md: the table, a line for each model, and what the figures are."""
    rows = [" | ".join([f.name, result.models[f.name], *f.cells(), f.verdict]) for f in result.findings]
    return "\n".join(
        [
            f"# Has it seen the forget set? {result.title}\n",
            f"| name | model | {' | '.join(result.labels)} | verdict |",
            f"|---|---|{'---:|' * len(result.labels)}---|",
            *(f"| {row} |" for row in rows),
            "",
            *(f"- {finding.name}: {finding.said}." for finding in result.findings),
            "",
            "AUC [95 % interval over rows]: the chance that a forget row looks better known than a comparison row; ½ "
            f"is what a model shows that has seen neither. A sign is an interval above {SIGN}, not above ½: the rows "
            "may differ in more than exposure, which moves the AUC of a model that has seen neither.",
            "",
        ]
    )
