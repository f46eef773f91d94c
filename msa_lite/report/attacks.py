"""Say what attacks brought back from the models of a run, and read it from attacks/report.json.

`msa_lite.attacks.findings` computes the shares; here they become an outcome and a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from msa_lite.attack_names import ATTACKS
from msa_lite.report.faults import reading, stage_report
from msa_lite.report.metrics import attack_metric
from msa_lite.report.reports import REPORT_FILE, Z95, Metric, Report
from msa_lite.report.verdict import LEFT_PASS, percent
from msa_lite.report.wanted import is_report_of

ATTACKS_FOLDER = "attacks"
AttackControl = Literal["ideal", "holdout"]
AttackOutcome = Literal["holds", "leaks", "unclear", "silent"]
LEAST_LEAK = 0.05  # below, the shares of a few rows are noise
OUTCOMES: Mapping[AttackOutcome, str] = {
    "leaks": f"more than {percent(LEFT_PASS)} comes back, and the 95 % interval lies above {percent(LEAST_LEAK)}",
    "unclear": "too few rows to say",
    "holds": f"the 95 % interval of what comes back ends at {percent(LEFT_PASS)} or below",
    "silent": "the target shows no more than the control, so nothing can be told",
}
"""The outcomes of an attack, the worst first, with their meanings."""
BEYOND: Mapping[AttackControl, str] = {
    "ideal": "beyond what the same attack draws from the ideal",
    "holdout": "beyond what the same attack draws of holdout rows, which no model saw",
}
HOLDOUT_LIMIT = (
    "Without an ideal, holdout rows are the control. They cannot tell what an attack taught from what was left, and "
    "they may be harder or easier than the forget rows; only an ideal model, attacked in the same way, tells that."
)


@dataclass(frozen=True)
class TrialResult:
    """The result of one trial of an attack on one model."""

    trial: str
    label: str
    """The trial's name in tables."""
    share: float | None
    """The part that comes back beyond the control, of what the target shows beyond it: the mean over the deciding
    measures, of which each counts as at least 0 and at most 1 (an AUC as at least −1: rows that look less known than
    unseen ones stand out, too). None where the target shows nothing that the control does not show."""
    interval: tuple[float, float] | None
    """Its 95 % interval, by a seeded bootstrap over rows."""
    rows: int
    """Forget rows that all models have a value for."""
    skipped: int = 0
    """Forget rows that lack one."""
    is_control: bool = False
    """True for the trial without an attack."""
    is_summary: bool = False
    """True for a trial that speaks for the whole attack."""

    @property
    def outcome(self) -> AttackOutcome:
        """Return the outcome, as `OUTCOMES` defines it."""
        if self.share is None or self.interval is None:
            return "silent"
        low, high = self.interval
        if high <= LEFT_PASS:
            return "holds"
        return "leaks" if low > LEAST_LEAK and self.share > LEFT_PASS else "unclear"

    @property
    def words(self) -> str:
        """Return the share with its interval: "12 % (4 % to 20 %)"."""
        if self.share is None or self.interval is None:
            return "–"
        low, high = map(percent, self.interval)
        return f"{percent(self.share)} ({low} to {high})"


@dataclass(frozen=True)
class AttackedModel:
    """The results of an attack on one model."""

    trials: tuple[TrialResult, ...]
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further figures of the published protocol, by name."""

    @property
    def plain(self) -> TrialResult | None:
        """Return the trial without an attack, if there is one."""
        return next((trial for trial in self.trials if trial.is_control), None)

    @property
    def strongest(self) -> TrialResult:
        """Return the trial that speaks for the attack: the one that sums it up, else the one that brings back most.

        Being chosen for that, the latter's share is a little too high.
        """
        attacks = [trial for trial in self.trials if not trial.is_control] or list(self.trials)
        attacks = [trial for trial in attacks if trial.is_summary] or attacks
        return max(attacks, key=lambda trial: float("-inf") if trial.share is None else trial.share)

    @property
    def sentence(self) -> str:
        """Return what the attack brought back, without a subject."""
        trial, plain = self.strongest, self.plain
        if trial.share is None:
            return "tells nothing here: the target itself gives no more than the control"
        without = f"; {percent(plain.share)} without an attack" if plain and plain.share is not None else ""
        return f"brings back {trial.words} by {trial.label}{without}"


@dataclass(frozen=True)
class AttackResult:
    """One attack on the models of a run."""

    name: str
    summary: str
    """What somebody does to get the rows back."""
    source: str
    """The publication of its protocol."""
    control: AttackControl
    rows: int
    """The forget rows that were scored."""
    models: Mapping[str, AttackedModel]
    """The attacked models but target and ideal, by name."""


@dataclass(frozen=True)
class AttackFacts:
    """All attacks on the models of a run."""

    attacks: tuple[AttackResult, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Attacks that were not made, each with the reason."""

    @property
    def control(self) -> AttackControl:
        """Return what the results are held against."""
        return self.attacks[0].control

    @property
    def meaning(self) -> str:
        """Return what the shares are shares of, in half a sentence."""
        return BEYOND[self.control]

    @property
    def models(self) -> list[str]:
        """Return the names of the attacked models."""
        return list(dict.fromkeys(name for attack in self.attacks for name in attack.models))

    def outcome(self, model: str = "unlearned") -> AttackOutcome:
        """Return the worst outcome of all attacks on a model; silent ones count last."""
        outcomes = {attack.models[model].strongest.outcome for attack in self.attacks if model in attack.models}
        return next((outcome for outcome in OUTCOMES if outcome in outcomes), "silent")

    def sentence(self, model: str = "unlearned") -> str:
        """Return the outcome of all attacks on a model in a sentence."""
        ours = {attack.name: attack.models[model] for attack in self.attacks if model in attack.models}
        by_outcome = {
            outcome: [name for name, attacked in ours.items() if attacked.strongest.outcome == outcome]
            for outcome in OUTCOMES
        }
        parts = [f"{', '.join(names)}: {_WORDS[outcome]}" for outcome, names in by_outcome.items() if names]
        return "; ".join(parts) + "."


_WORDS: Mapping[AttackOutcome, str] = {
    "leaks": "gets at the rows",
    "unclear": "cannot be told with so few rows",
    "holds": "gets at next to nothing",
    "silent": "tells nothing here",
}


def attack_report(facts: AttackFacts, models: Mapping[str, Any]) -> Report:
    """Return attacks/report.json: the strongest trial of each attack and model as a metric, and everything as settings.

    models: what was attacked, by name, as evaluations name their model.
    """
    metrics = {
        f"{attack.name}.{name}": _metric(attacked.strongest, attack.control)
        for attack in facts.attacks
        for name, attacked in attack.models.items()
    }
    settings = {"models": dict(models), "outcomes": attack_summary(facts), **asdict(facts)}
    return Report("attack", "all", metrics, settings)


def attack_summary(facts: AttackFacts) -> dict[str, dict[str, str]]:
    """Return the outcome of all attacks on each model, with its sentence."""
    return {name: {"outcome": facts.outcome(name), "sentence": facts.sentence(name)} for name in facts.models}


def _metric(trial: TrialResult, control: AttackControl) -> Metric:
    low, high = trial.interval or (None, None)
    width = None if low is None or high is None else (high - low) / (2 * Z95)
    note = f"{trial.label}, {BEYOND[control]}"
    return Metric(trial.share, trial.rows, width, False, trial.skipped, note)


def load_attacks(folder: Path, result: Path) -> AttackFacts | None:
    """Load the attacks of a run from its folder `attacks`. Raise FormatError for broken files.

    result: the folder of the unlearned model. Return None where there are none, or they were made on another model.
    """
    report = stage_report(folder)
    if report is None:
        return None
    with reading(folder / REPORT_FILE):
        unlearned = replace(report, settings={"model": report.settings["models"].get("unlearned")})
        return facts_of(report) if is_report_of(unlearned, result) else None


def facts_of(report: Report) -> AttackFacts:
    """Return what attacks/report.json says. Raise KeyError, TypeError or ValueError where it has another form."""
    return AttackFacts(tuple(map(_attack, report.settings["attacks"])), dict(report.settings["left_out"]))


def attack_metrics(folder: Path, model: object) -> dict[str, Metric]:
    """Return what the attacks in a run's folder `attacks` bring back from its unlearned model, as columns of a table.

    model: that model, as its evaluation names it. Return nothing where the attacks were made on another one.
    """
    report = stage_report(folder)
    if report is None or not isinstance(model, Mapping):
        return {}
    with reading(folder / REPORT_FILE):
        if report.settings["models"].get("unlearned", {}).get("revision") != model.get("revision"):
            return {}
        return {attack_metric(name): m for name in ATTACKS if (m := report.metrics.get(f"{name}.unlearned"))}


def _attack(values: Mapping[str, Any]) -> AttackResult:
    models = {
        name: AttackedModel(tuple(map(_trial, one["trials"])), {k: float(v) for k, v in one["figures"].items()})
        for name, one in values["models"].items()
    }
    return AttackResult(**{**values, "models": models})


def _trial(values: Mapping[str, Any]) -> TrialResult:
    interval = values["interval"]
    return TrialResult(**{**values, "interval": None if interval is None else (float(interval[0]), float(interval[1]))})


def attack_rows(facts: AttackFacts) -> list[Sequence[str]]:
    """Return the cells of a table: attack, model, strongest trial, what comes back, without an attack, outcome."""
    rows: list[Sequence[str]] = []
    for attack in facts.attacks:
        for name, attacked in attack.models.items():
            trial, plain = attacked.strongest, attacked.plain
            before = percent(plain.share) if plain and plain.share is not None else "–"
            rows.append((attack.name, name, trial.label, trial.words, before, str(attack.rows), trial.outcome))
    return rows


ATTACK_HEADINGS = ("attack", "model", "strongest trial", "comes back", "without", "rows", "outcome")


def trial_rows(attack: AttackResult) -> list[Sequence[str]]:
    """Return the cells of a table of one attack: model, trial, what comes back, rows, outcome."""
    return [
        (name, trial.label, trial.words, str(trial.rows), "" if trial.is_control else trial.outcome)
        for name, attacked in attack.models.items()
        for trial in attacked.trials
    ]


TRIAL_HEADINGS = ("model", "trial", "comes back", "rows", "outcome")
