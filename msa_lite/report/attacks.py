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
AttackOutcome = Literal["leaks", "overshoots", "unclear", "holds", "silent"]
LEAST_LEAK = 0.05  # below, the shares of a few rows are noise
FEWEST_ROWS = 17  # with fewer, no interval of a share ends at 20 % or below, whatever the rows show
OUTCOMES: Mapping[AttackOutcome, str] = {
    "leaks": f"more than {percent(LEFT_PASS)} comes back, and the 95 % interval lies above {percent(LEAST_LEAK)}",
    "overshoots": (
        f"the rows look less known than rows that were never seen, by more than {percent(LEFT_PASS)}, and the 95 % "
        f"interval lies above {percent(LEAST_LEAK)}: that tells them apart, too"
    ),
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
class Overshoot:
    """Over-unlearning: rows look less known than rows that were never seen, which tells them apart, too."""

    share: float
    """The AUC that is missing below the control, of what the target shows beyond it: the mean over the deciding AUCs,
    each counts as at least 0 and at most 1."""
    interval: tuple[float, float]
    """Its 95 % interval."""
    auc: float
    """The mean AUC of the model; below 0.5, unseen rows look better known than forget rows."""
    control: float
    """The mean AUC of the control: the ideal's, or 0.5."""


@dataclass(frozen=True)
class TrialResult:
    """The result of one trial of an attack on one model."""

    trial: str
    label: str
    """The trial's name in tables."""
    share: float | None
    """The part that comes back beyond the control, of what the target shows beyond it: the mean over the deciding
    measures, of which each counts as at least 0 and at most 1. None where the target shows nothing that the control
    does not show."""
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
    overshoot: Overshoot | None = None
    """The other side of a trial that is measured by AUCs; None for all others."""

    @property
    def outcome(self) -> AttackOutcome:
        """Return the outcome, as `OUTCOMES` defines it."""
        if self.share is None or self.interval is None:
            return "silent"
        if _is_clear(self.share, self.interval):
            return "leaks"
        if self.overshoot and _is_clear(self.overshoot.share, self.overshoot.interval):
            return "overshoots"
        ends = [self.interval[1], *([self.overshoot.interval[1]] if self.overshoot else [])]
        return "holds" if max(ends) <= LEFT_PASS else "unclear"

    @property
    def has_too_few_rows(self) -> bool:
        """Check whether the outcome is open, and could not be another one than that or a leak on so few rows."""
        return self.outcome == "unclear" and self.rows < FEWEST_ROWS

    @property
    def signed(self) -> tuple[float | None, tuple[float, float] | None]:
        """Return the share with its interval; where it overshoots, by how much, below 0."""
        if self.overshoot and self.outcome == "overshoots":
            low, high = self.overshoot.interval
            return -self.overshoot.share, (-high, -low)
        return self.share, self.interval

    @property
    def words(self) -> str:
        """Return the share with its interval: "12 % (4 % to 20 %)"; below 0 where it overshoots."""
        share, interval = self.signed
        if share is None or interval is None:
            return "–"
        low, high = map(percent, interval)
        return f"{percent(share)} ({low} to {high})"

    @property
    def less_known(self) -> str:
        """Return that the rows look less known than unseen ones, with both AUCs; "" where it does not overshoot."""
        if self.overshoot is None or self.outcome != "overshoots":
            return ""
        aucs = f"AUC {self.overshoot.auc:.2f}; the control's is {self.overshoot.control:.2f}"
        return f"the rows look less known than rows that were never seen ({aucs})"


def _is_clear(share: float, interval: tuple[float, float]) -> bool:
    """Check whether a share is above what may be left, and surely not noise."""
    return share > LEFT_PASS and interval[0] > LEAST_LEAK


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
        """Return the trial that speaks for the attack: of those that sum it up, else of all, the one that ends worst.

        Of those that end alike, it is the one that brings back most; being chosen for that, its share is a little too
        high. Trials on too few rows speak only where there are no others.
        """
        attacks = [trial for trial in self.trials if not trial.is_control] or list(self.trials)
        attacks = [trial for trial in attacks if trial.is_summary] or attacks
        attacks = [trial for trial in attacks if not trial.has_too_few_rows] or attacks
        ranks = {outcome: -rank for rank, outcome in enumerate(OUTCOMES)}
        return max(attacks, key=lambda trial: (ranks[trial.outcome], trial.share or 0.0))

    @property
    def sentence(self) -> str:
        """Return what the attack brought back, without a subject."""
        trial, plain = self.strongest, self.plain
        if trial.share is None:
            return "tells nothing here: the target itself gives no more than the control"
        if trial.less_known:
            return f"tells the rows apart by {trial.label}: {trial.less_known}"
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
        parts += [words for attacked in ours.values() if (words := attacked.strongest.less_known)]
        return "; ".join(parts) + "."


_WORDS: Mapping[AttackOutcome, str] = {
    "leaks": "gets at the rows",
    "overshoots": "tells the rows apart",
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
    share, interval = trial.signed
    width = None if interval is None else (interval[1] - interval[0]) / (2 * Z95)
    less = f"; {trial.less_known}" if trial.less_known else ""
    return Metric(share, trial.rows, width, False, trial.skipped, f"{trial.label}, {BEYOND[control]}{less}")


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
    interval, overshoot = values["interval"], values.get("overshoot")
    other = Overshoot(**{**overshoot, "interval": _pair(overshoot["interval"])}) if overshoot else None
    return TrialResult(**{**values, "interval": None if interval is None else _pair(interval), "overshoot": other})


def _pair(values: Sequence[Any]) -> tuple[float, float]:
    return float(values[0]), float(values[1])


def attack_rows(facts: AttackFacts) -> list[Sequence[str]]:
    """Return the cells of a table: attack, model, strongest trial, what comes back, without an attack, outcome."""
    rows: list[Sequence[str]] = []
    for attack in facts.attacks:
        for name, attacked in attack.models.items():
            trial, plain = attacked.strongest, attacked.plain
            before = percent(plain.share) if plain and plain.share is not None else "–"
            rows.append((attack.name, name, trial.label, trial.words, before, str(trial.rows), trial.outcome))
    return rows


ATTACK_HEADINGS = ("attack", "model", "strongest trial", "comes back", "without", "rows", "outcome")


def trial_rows(attack: AttackResult) -> list[Sequence[str]]:
    """Return the cells of a table of one attack: model, trial, what comes back, rows, outcome."""
    return [
        (name, trial.label, trial.words, str(trial.rows), "" if trial.is_control else _outcome_words(attacked, trial))
        for name, attacked in attack.models.items()
        for trial in attacked.trials
    ]


def _outcome_words(attacked: AttackedModel, trial: TrialResult) -> str:
    """Return the outcome of a trial, and whether its rows are too few for it to count."""
    is_left_out = trial.has_too_few_rows and not attacked.strongest.has_too_few_rows
    return "unclear, too few rows to count" if is_left_out else trial.outcome


TRIAL_HEADINGS = ("model", "trial", "comes back", "rows", "outcome")
