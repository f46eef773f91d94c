"""Gather what a run's folder tells, from its files alone: the one source of report.html and report.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msa_lite.catalogue import BENCHMARKS
from msa_lite.io.finished.seal import MANIFEST
from msa_lite.report.run.attacks import ATTACKS_FOLDER, HOLDOUT_LIMIT, AttackFacts, load_attacks
from msa_lite.report.run.choice import CHOICE_FILE, Choice, load_choice
from msa_lite.report.run.evidence import EVIDENCE_FOLDER, EvidenceFinding, load_evidence
from msa_lite.report.run.probing import ProbeFacts, load_probe
from msa_lite.report.run.provenance import (
    PURGED_FILE,
    WITH_VECTORS,
    Provenance,
    load_provenance,
    purge_day,
    read_run,
    recorded_method,
    result_revision,
)
from msa_lite.report.run.rows import RowList, SideBySide
from msa_lite.report.run.stages import StageList, load_stages
from msa_lite.report.run.update import Fit, Update, load_fits, load_update
from msa_lite.report.tables.metrics import GROUPS, HOLDOUT, metric_kind
from msa_lite.report.tables.reports import Report, reading, stage_manifest, stage_report
from msa_lite.report.verdict.figures import EarlierFacts, counts_basis
from msa_lite.report.verdict.verdict import VERDICT_FILE, NoVerdict, Outcome, Verdict, load_verdict
from msa_lite.strengths import filtered_folder

LIMIT = (
    "Unlearning is approximate. These scores are evidence, not a proof that the data has no influence left; other "
    "prompts, further tuning or quantisation may bring some of it back."
)
_UNTESTED = {
    "prompt": "other wordings",
    "sample": "answers drawn at random",
    "quantise": "the model with rounded weights",
    "relearn": "the model after more training",
}  # by the attack that tests it
_STRENGTHS = ("alpha", "beta", "scale")
_FORGET_VECTOR = re.compile(r"\(θ_1 − θ_\w\)|\(θ_12 − θ_2\)")
_FILTER_LIMIT = (
    "The filter of the forget vector brings the model nearer to one that never saw the rows. Its price: after "
    "longer training on some of the forgotten rows, more of the others may come back than without it."
)
_FILTERED = r"s \g<0> C_f (C_f + λ C_r)⁻¹"  # layer by layer (merger.formula.Filter), with one scalar s
LATER = "θ_u = θ_D − α (θ_12 − θ_2)"
"""The formula of a forget vector that starts at the retain vector."""
_FORMULAS = {
    "msa": "θ_u = θ_D − α (θ_1 − θ_0) + β (θ_2 − θ_0)",
    "task_vector": "θ_u = θ_D − α (θ_1 − θ_D) + β (θ_2 − θ_D)",
    "prior": "θ_u = θ_D + scale (θ_1 − θ_0)",
    "target": "θ_u: the target, trained further",
    "checkpoint": "θ_u: not made by msa-lite, which saw only the checkpoint and was told nothing of its training",
}


@dataclass(frozen=True)
class Story:
    """All that a run's folder tells of the run. Parts that an unfinished run lacks are None or empty."""

    folder: Path
    """The run's folder."""
    verdict: Verdict | NoVerdict | None
    """The verdict, or the reason why there is none; None where the run is not so far. Its folders of earlier requests
    are named as the recipe has them."""
    method: str
    """"msa", "task_vector" for a recipe without a prior, or the name of a baseline."""
    formula: str
    """The formula of the method, in symbols."""
    strengths: Mapping[str, float | int | str]
    """The values that made the model: alpha and beta; of a baseline its parameters. Empty until they are chosen."""
    earlier: Mapping[str, Mapping[str, float]]
    """The earlier requests whose vectors are in the same merge: alpha and beta by the folder of the run."""
    names: Mapping[str, str]
    """The names of target, prior and ideal as the recipe has them: repository or folder."""
    reports: Mapping[str, Report]
    """The scores on the test rows of "target", "unlearned" and "ideal", as far as they are there."""
    validation: Mapping[str, Report]
    """The same on the validation rows, by which α and β were chosen; also "prior", on the forget rows."""
    choice: Choice | None
    """The choice with all its candidates; None where nothing was to be chosen."""
    fits: Mapping[str, Fit]
    """The fits by the name of the vector."""
    update: Update | None
    """The change of the weights; None until the model is merged."""
    probe: ProbeFacts | None
    """The findings of the probe on the prior; None where none was made."""
    attacks: AttackFacts | None
    """What attacks brought back from the unlearned model; None where none was made, or only of another model."""
    evidence: tuple[EvidenceFinding, ...]
    """What was looked at beside the scores; empty where nothing was, or only on another model."""
    interference: Sequence[Mapping[str, Any]]
    """Pairs of vectors, "one" and "other", with their "cosine" in [−1, 1] (0: they do not touch) or None; empty without
    earlier requests."""
    examples: tuple[SideBySide, ...]
    """Questions with the models' answers. They hold the data, so they are there only if somebody wants them."""
    provenance: Provenance
    """Models, data, hashes, versions, seed and recipe."""
    warnings: tuple[str, ...]
    """Remarks of the merge, and reasons to doubt the choice."""
    limits: tuple[str, ...]
    """Sentences on what the scores do not show."""
    missing: tuple[str, ...]
    """A line for each stage that is not there yet: "model: the vectors are not merged yet"."""
    forget_rows: RowList | None = None
    """Every row to forget with the models' answers; they hold the data, so they are there only on request."""
    salt: str | None = None
    """Random digits of a report with rows: without them, its hash in the public record would confirm guesses."""

    @property
    def outcome(self) -> Outcome | None:
        """Return PASS, PARTLY or FAIL; None where there is no verdict."""
        return self.verdict.outcome if self.verdict else None

    @property
    def sentence(self) -> str:
        """Return the outcome, for somebody who knows nothing of unlearning; true for every outcome."""
        if self.verdict:
            return self.verdict.sentence
        if "unlearned" in self.reports:
            return "This run gave no verdict on its model; the scores tell what it knows."
        return "This run is not finished, so nothing can be said of an unlearned model yet."

    @property
    def basis(self) -> str | None:
        """Return the meaning of the sentence's counts: when an answer counts. None without a verdict."""
        if not isinstance(self.verdict, Verdict):
            return None
        tested = _scored_rows(self.reports["unlearned"]) if "unlearned" in self.reports else {}
        return counts_basis(self.verdict.forgotten, self.verdict.kept, tested)

    @property
    def earlier_rows(self) -> EarlierFacts | None:
        """Return what became of the rows of earlier requests; None without such rows, or before they are scored."""
        return self.verdict.earlier if self.verdict else None

    @property
    def benchmark(self) -> str | None:
        """Return the name of the benchmark that the models were scored on."""
        return next((report.benchmark for report in self.reports.values()), None)

    @property
    def split(self) -> str | None:
        """Return the rows that the models were scored on."""
        return next((report.split for report in self.reports.values()), None)

    @property
    def main_metrics(self) -> tuple[str, ...]:
        """Return the few metrics that matter on this benchmark, forgetting first; of others all but the holdout's."""
        values = [(name, value) for report in self.reports.values() for name, value in report.values().items()]
        names = list(dict.fromkeys(name for name, value in values if value is not None))
        entry = BENCHMARKS.get(self.benchmark or "")
        main = [name for name in (entry.main_columns(names) if entry else ()) if name in names]
        kinds = [kind for kind in map(metric_kind, main or names) if kind.group != HOLDOUT]
        return tuple(kind.name for kind in sorted(kinds, key=lambda kind: GROUPS.index(kind.group)))

    @property
    def written_gap(self) -> float | None:
        """Return the largest difference of a metric between the chosen point as tried and the model as written.

        Both are scored on the validation rows. None where one of them is not there.
        """
        if self.choice is None or "unlearned" not in self.validation:
            return None
        written = self.validation["unlearned"].values()
        pairs = [(metric.value, written.get(name)) for name, metric in self.choice.chosen.metrics.items()]
        return max((abs(x - y) for x, y in pairs if x is not None and y is not None), default=None)

    @property
    def rows(self) -> Mapping[str, int]:
        """Return the scored rows of each set."""
        return next((rows for report in self.reports.values() if (rows := _scored_rows(report))), {})


def _scored_rows(report: Report) -> dict[str, int]:
    """Return the rows of each set that a report is of."""
    sets = report.settings.get("sets")
    parts = sets.items() if isinstance(sets, Mapping) else ()
    return {str(name): int(part["rows"]) for name, part in parts if isinstance(part, Mapping) and "rows" in part}


def _revision(report: Report) -> object:
    """Return the revision of the model that a report is of."""
    return (report.settings.get("model") or {}).get("revision")


def load_story(folder: Path, examples: Sequence[SideBySide] = (), verdict: Verdict | NoVerdict | None = None) -> Story:
    """Load the story of a run, finished or not, from its folder. It changes nothing there and loads no model.

    examples: questions to show, which hold the data. verdict: that of a run that has just written it; else verdict.json
    is read. Raise UsageError for what is no run, FormatError for broken files.
    """
    read_run(folder)
    provenance, verdict = load_provenance(folder), verdict or load_verdict(folder)
    if verdict and verdict.earlier:
        verdict = replace(verdict, earlier=verdict.earlier.renamed(provenance.given))
    again = verdict.earlier if verdict else None
    listed = load_stages(folder)
    merged = folder / provenance.form
    update, manifest = load_update(merged, provenance.form), stage_manifest(merged) or {"inputs": {}}
    reports = {name: report for name in listed.models if (report := stage_report(folder / "evaluation" / name))}
    parts = {name: stage_report(folder / "evaluation" / f"{name}_validation") for name in listed.models_to_choose_by}
    validation = {name: report for name, report in parts.items() if report}
    revision = result_revision(update.folder) if update else None
    for scored in (reports, validation):
        if "unlearned" in scored and _revision(scored["unlearned"]) != revision:
            del scored["unlearned"]  # of a model that was there before
    choice = load_choice(folder / "sweep") if listed.chooses and (folder / "sweep" / CHOICE_FILE).is_file() else None
    fits = load_fits(folder / "vectors", listed.vectors)
    earlier = _earlier(folder, provenance, manifest)
    strengths = _strengths(manifest, reports, choice, listed)
    story = Story(
        folder=folder,
        verdict=verdict,
        method=provenance.method,
        formula=formula_of(
            provenance.method, _start(provenance), bool(strengths.get("filter")), listed.starts_at_retain
        ),
        strengths=strengths,
        earlier=earlier,
        names=provenance.models,
        reports=reports,
        validation=validation,
        choice=choice,
        fits=fits,
        update=update,
        probe=load_probe(folder / "probe"),
        attacks=load_attacks(folder / ATTACKS_FOLDER, revision) if revision else None,
        evidence=load_evidence(folder / EVIDENCE_FOLDER, revision) if revision else (),
        interference=manifest.get("interference") or (),
        examples=tuple(examples),
        provenance=provenance,
        warnings=(
            *(update.notes if update else ()),
            *(choice.doubts if choice else ()),
            *([again.warning] if again and again.warning else []),
        ),
        limits=(),
        missing=(),
    )
    return replace(story, limits=_limits(story), missing=_missing(story, listed))


def formula_of(method: str, start: str, is_filtered: bool = False, is_later: bool = False) -> str:
    """Return the formula of "msa" or of a baseline in symbols.

    start: the model that is tuned, "prior" or "target"; "checkpoint" for another method's result. is_filtered: True
    where its vector was filtered. is_later: True where it was fitted from θ_2; only "msa" and "task_vector" have one.
    """
    formula = _FORMULAS.get(method) or _FORMULAS[start]
    formula = LATER if is_later and method in WITH_VECTORS else formula
    if not is_filtered:
        return formula
    filtered, count = _FORGET_VECTOR.subn(_FILTERED, formula)
    return filtered if count else f"{formula}, its change times s C_f (C_f + λ C_r)⁻¹"


def _start(provenance: Provenance) -> str:
    if recorded_method(provenance.recipe)[1]:
        return "checkpoint"
    baseline = provenance.values.get("baseline")
    return "prior" if isinstance(baseline, dict) and baseline.get("start") == "prior" else "target"


def _strengths(
    manifest: Mapping[str, Any], reports: Mapping[str, Report], choice: Choice | None, listed: StageList
) -> Mapping[str, Any]:
    """Return the values that made the model, as the scores, the choice or the merge recorded them."""
    method = reports["unlearned"].settings.get("method") if "unlearned" in reports else None
    if isinstance(method, Mapping) and isinstance(method.get("parameters"), Mapping):
        return dict(method["parameters"])
    if choice:
        return dict(choice.values)
    if "strengths" in manifest["inputs"] or listed.starts_at_retain:  # of several requests, or without a β
        return listed.strengths
    filtered = {"filter": listed.strengths["filter"]} if "filter" in listed.strengths else {}
    return {name: value for name, value in manifest["inputs"].items() if name in _STRENGTHS} | filtered


def _earlier(folder: Path, provenance: Provenance, manifest: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return alpha and beta by the folder of each run whose vectors were merged, without this run."""
    own = {str(folder), str(folder.resolve()), str(provenance.values.get("output"))}
    runs: dict[str, dict[str, float]] = {}
    with reading(folder / provenance.form / MANIFEST):
        sources, shared = manifest.get("sources") or {}, manifest.get("shared") or {}
        filters = {term["name"]: term["filter"] for term in manifest.get("terms") or () if "filter" in term}
        for name, strength in (manifest["inputs"].get("strengths") or {}).items():
            for part in shared.get(name) or [{"source": sources[name], "weight": strength}]:
                place = Path(part["source"])
                run = str(place.parent.parent) if place.parent.name == "vectors" else str(place)
                if run not in own:
                    strengths = runs.setdefault(provenance.given.get(run, run), {})
                    strengths["alpha" if name.startswith("forget") else "beta"] = abs(part["weight"])
                    strengths |= {"filter": filters[name]} if name in filters else {}
    return runs


def _limits(story: Story) -> tuple[str, ...]:
    """Return sentences on what the scores do not show, and on what was not measured."""
    is_filtered = story.strengths.get("filter") and story.method in WITH_VECTORS
    limits = [LIMIT, *([_FILTER_LIMIT, *_unseen_limit(story)] if is_filtered else [])]
    if not story.reports:
        return (*limits, "Nothing was scored.")
    made = {attack.name for attack in story.attacks.attacks} if story.attacks else set()
    if untested := [words for name, words in _UNTESTED.items() if name not in made]:
        way = "" if purge_day(story.folder) else " `msa-lite attack` does."  # which needs the rows
        limits.append(f"Not tested here: {', '.join(untested)}.{way}")
    if story.attacks and story.attacks.control == "holdout":
        limits.append(HOLDOUT_LIMIT)
    if story.earlier and story.earlier_rows is None:
        limits.append(
            "The rows of earlier requests were not scored again. `msa-lite evaluate` with `--recipe RUN/recipe.yaml` "
            f"scores this model on those of a run: {', '.join(story.earlier)}."
        )
    return tuple(limits)


def _unseen_limit(story: Story) -> list[str]:
    """Return the forecast for rows that the filter has not seen, as a sentence, if there is one."""
    manifest = stage_manifest(filtered_folder(story.folder, float(story.strengths["filter"]))) or {}
    return [f"By a forecast, {manifest['unseen']['sentence']}."] if manifest.get("unseen") else []


def _missing(story: Story, listed: StageList) -> tuple[str, ...]:
    """Return a line for each stage of the recipe that is not there. After a purge, vectors are not called unfitted."""
    fits, verdict = story.fits, story.verdict
    unfitted = [name for name in listed.vectors or () if name not in fits]
    lines = [f"vectors/{name}: the {name} vector is not fitted yet" for name in unfitted]
    if listed.vectors is None and not fits:
        lines = ["vectors: nothing is trained yet"]
    if day := purge_day(story.folder):
        lines = [f"vectors: purged on {day}, and so were the records of rows; {PURGED_FILE} lists what was removed"]
    if listed.chooses and story.choice is None:
        lines.append(f"sweep: {'alpha and beta are' if listed.vectors else 'the epoch is'} not chosen yet")
    if story.update is None:
        lines.append(f"{story.provenance.form}: the unlearned model is not merged yet")
    nothing = isinstance(verdict, NoVerdict) and not story.reports  # no rows to score
    absent = [name for name in listed.models if name not in story.reports and not nothing]
    whats = {"unlearned": "unlearned model"}
    lines += [f"evaluation/{name}: the {whats.get(name, name)} is not scored yet" for name in absent]
    if verdict is None:
        lines.append(f"{VERDICT_FILE}: there is no verdict yet")
    return tuple(lines)
