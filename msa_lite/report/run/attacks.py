"""Say what attacks brought back from the models of a run, and read it from attacks/report.json.

`msa_lite.attacks.findings` computes the shares and gains; here they become an outcome and a sentence.

An attack leaks only by what it brings back itself. What the model says without any attack is the verdict's business.
If 21 % is left before the weights are rounded, and 21 % afterwards, rounding has brought nothing. To call that a leak
would send the reader to the wrong remedy. So an attack that has a trial without an attack leaks only if its gain over
that trial is surely above 0. The rule was fixed before any result was read by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from msa_lite.catalogue import ATTACKS, AttackEntry
from msa_lite.report.tables.metrics import attack_metric
from msa_lite.report.tables.reports import REPORT_FILE, Z95, Metric, Report, reading, report_on
from msa_lite.report.verdict.figures import percent

ATTACKS_FOLDER = "attacks"
AttackControl = Literal["ideal", "holdout"]
AttackOutcome = Literal["leaks", "overshoots", "no sure gain", "unclear", "holds", "silent"]
MOST_BACK = 0.2  # the share that may come back; with more, it leaks
LEAST_LEAK = 0.05  # below, the shares of a few rows are noise
FEWEST_ROWS = 17  # with fewer, no interval of a share ends at 20 % or below, whatever the rows show
OUTCOMES: Mapping[AttackOutcome, str] = {
    "leaks": (
        f"more than {percent(MOST_BACK)} comes back, the 95 % interval lies above {percent(LEAST_LEAK)}, and where the "
        "attack has a trial without an attack, the interval of the gain over that lies above 0"
    ),
    "overshoots": (
        f"the rows look less known than they should: an AUC is below the control's by more than {percent(MOST_BACK)}, "
        f"and the 95 % interval of that lies above {percent(LEAST_LEAK)}. That tells the rows apart, too"
    ),
    "no sure gain": "as much comes back as in a leak, but not surely more than is left without the attack",
    "unclear": "too few rows to say",
    "holds": (
        f"the 95 % interval of what comes back ends at {percent(MOST_BACK)} or below; of an AUC, also that of what is "
        "missing below the control"
    ),
    "silent": "no row has a value, or the target shows hardly more than the control: nothing can be told",
}
"""The outcomes of an attack, the worst first, with their meanings."""
BEYOND: Mapping[AttackControl, str] = {
    "ideal": "beyond what the same attack draws from the ideal",
    "holdout": "beyond what the same attack draws of holdout rows, which no model saw",
}
HOLDOUT_LIMIT = (
    "Without an ideal, holdout rows are the control. They do not show what an attack gives away or teaches of the "
    "forget rows themselves, and they may be harder or easier than these; only an ideal, attacked alike, shows both."
)


@dataclass(frozen=True)
class Overshoot:
    """Over-unlearning: rows look less known than to the control, which tells them apart, too."""

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
class Gain:
    """The part of a share that the attack itself brought: the share with it, minus the share without it."""

    share: float
    """The difference on the same rows, between −1 and 1: both shares count each measure as at least 0 and at most 1."""
    interval: tuple[float, float]
    """Its 95 % interval, paired over rows: from the redraws of the share's own interval."""

    @property
    def words(self) -> str:
        """Return the gain with its interval: "12 % (4 % to 20 %)"."""
        return _words(self.share, self.interval)


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
    gain: Gain | None = None
    """What the attack brought beyond what was left without it. None for the trial without an attack, and for attacks
    that have none (`membership`, `depth`)."""

    @property
    def outcome(self) -> AttackOutcome:
        """Return the outcome, as `OUTCOMES` defines it."""
        if self.share is None or self.interval is None:
            return "silent"
        if _is_clear(self.share, self.interval):
            return "leaks" if self.gain is None or self.gain.interval[0] > 0 else "no sure gain"
        if self.overshoot and _is_clear(self.overshoot.share, self.overshoot.interval):
            return "overshoots"
        ends = [self.interval[1], *([self.overshoot.interval[1]] if self.overshoot else [])]
        return "holds" if max(ends) <= MOST_BACK else "unclear"

    @property
    def has_too_few_rows(self) -> bool:
        """Check whether the outcome is open, and could not be `holds` on so few rows, whatever they show.

        AUCs are made of pairs of rows, and need no such number.
        """
        return self.overshoot is None and self.outcome == "unclear" and self.rows < FEWEST_ROWS

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
        return "–" if share is None or interval is None else _words(share, interval)

    @property
    def less_known(self) -> str:
        """Return that the rows look less known than they should, with both AUCs; "" where it does not overshoot."""
        if self.overshoot is None or self.outcome != "overshoots":
            return ""
        aucs = f"AUC {self.overshoot.auc:.2f}, the control's {self.overshoot.control:.2f}"
        return f"the rows look less known than they should ({aucs})"


def _words(share: float, interval: tuple[float, float]) -> str:
    middle, low, high = (percent(round(value, 2) + 0.0) for value in (share, *interval))  # no "-0 %"
    return f"{middle} ({low} to {high})"


def _is_clear(share: float, interval: tuple[float, float]) -> bool:
    """Check whether a share is above what may come back, and surely not noise."""
    return share > MOST_BACK and interval[0] > LEAST_LEAK


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
    def without(self) -> float | None:
        """Return the share that is left without an attack, of the rows of the strongest trial; None if not measured."""
        trial = self.strongest
        if trial.gain and trial.share is not None:
            return trial.share - trial.gain.share
        return self.plain.share if self.plain else None

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
        """Return what the shares are, in half a sentence."""
        whole = "as a share of what the target shows beyond that without an attack"
        return f"{BEYOND[self.control]}, {whole} (95 % interval over rows)"

    @property
    def models(self) -> list[str]:
        """Return the names of the attacked models."""
        return list(dict.fromkeys(name for attack in self.attacks for name in attack.models))

    def outcome(self, model: str = "unlearned") -> AttackOutcome:
        """Return the worst outcome of all attacks on a model; silent ones count last."""
        outcomes = {attack.models[model].strongest.outcome for attack in self.attacks if model in attack.models}
        return next((outcome for outcome in OUTCOMES if outcome in outcomes), "silent")

    def headline(self, model: str = "unlearned") -> str:
        """Return the outcome of all attacks on a model in a line for anybody, the worst first; "" without attacks."""
        ours = {attack.name: attack.models[model] for attack in self.attacks if model in attack.models}
        if not ours:
            return ""
        worst_first = sorted(ours, key=lambda name: -(ours[name].strongest.share or 0.0))
        clauses = list[str]()
        for outcome in OUTCOMES:
            names = [name for name in worst_first if ours[name].strongest.outcome == outcome]
            if names and outcome in _COMMON:
                clauses.append(f"{', '.join(_entry(name).words for name in names)}: {_COMMON[outcome]}")
            else:
                clauses += [_clause(name, ours[name]) for name in names]
        return f"Attacks{'' if model == 'unlearned' else f' on {model}'}: {'; '.join(clauses)}."


_COMMON: Mapping[AttackOutcome, str] = {
    "unclear": "too few to say",
    "holds": f"surely at most {percent(MOST_BACK)} comes back",
    "silent": "nothing can be told",
}


def _clause(name: str, attacked: AttackedModel) -> str:
    """Return what an attack found, with its figures: of one that leaks, overshoots or brings no sure gain."""
    entry, trial, without = _entry(name), attacked.strongest, attacked.without
    if trial.less_known:
        return f"{entry.words} {entry.leak}: {trial.less_known}"
    share = "–" if trial.share is None else percent(trial.share)
    if trial.outcome == "leaks" or without is None:
        return f"{entry.words} {entry.leak} ({share} of what was known)"
    return f"{entry.words}: {share} of what was known, not surely more than without ({percent(without)})"


def _entry(name: str) -> AttackEntry:
    """Return the entry of an attack; of one that is not registered here, as by a user's script, one with its name."""
    return ATTACKS.get(name) or AttackEntry("", "", name)


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
    return {name: {"outcome": facts.outcome(name), "sentence": facts.headline(name)} for name in facts.models}


def _metric(trial: TrialResult, control: AttackControl) -> Metric:
    share, interval = trial.signed
    width = None if interval is None else (interval[1] - interval[0]) / (2 * Z95)
    less = f"; {trial.less_known}" if trial.less_known else ""
    return Metric(share, trial.rows, width, False, trial.skipped, f"{trial.label}, {BEYOND[control]}{less}")


def load_attacks(folder: Path, revision: str) -> AttackFacts | None:
    """Load the attacks of a run from its folder `attacks`. Raise FormatError for broken files.

    revision: the unlearned model's. Return None where there are none, or they were made on another model.
    """
    report = report_on(folder, "unlearned", revision)
    if report is None:
        return None
    with reading(folder / REPORT_FILE):
        return facts_of(report)


def facts_of(report: Report) -> AttackFacts:
    """Return what attacks/report.json says. Raise KeyError or ValueError where it has another form."""
    from pydantic import TypeAdapter

    values = {key: report.settings[key] for key in ("attacks", "left_out")}
    return TypeAdapter(AttackFacts).validate_python(values)


def attack_metrics(folder: Path, revision: str | None) -> dict[str, Metric]:
    """Return what the attacks in a run's folder `attacks` bring back from its unlearned model, as columns of a table.

    revision: that model's, as its evaluation names it. Return nothing where the attacks were made on another one.
    """
    report = report_on(folder, "unlearned", revision)
    metrics = report.metrics if report else {}
    return {attack_metric(name): m for name in ATTACKS if (m := metrics.get(f"{name}.unlearned"))}
