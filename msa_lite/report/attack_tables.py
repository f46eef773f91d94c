"""Make the tables of what attacks brought back: one line for each attack, and one for each of its trials."""

from __future__ import annotations

from collections.abc import Sequence

from msa_lite.report.attacks import AttackedModel, AttackFacts, AttackResult, TrialResult

ATTACK_HEADINGS = ("attack", "model", "strongest trial", "comes back", "gain", "rows", "outcome")
TRIAL_HEADINGS = ("model", "trial", "comes back", "gain", "rows", "outcome")
GAIN_MEANING = "gain: what comes back, minus what is left of the same rows without the attack"


def attack_rows(facts: AttackFacts) -> list[Sequence[str]]:
    """Return the cells of a table, under `ATTACK_HEADINGS`: the strongest trial of each attack and model."""
    rows: list[Sequence[str]] = []
    for attack in facts.attacks:
        for name, attacked in attack.models.items():
            trial = attacked.strongest
            rows.append((attack.name, name, trial.label, trial.words, _gain(trial), str(trial.rows), trial.outcome))
    return rows


def _gain(trial: TrialResult) -> str:
    return trial.gain.words if trial.gain else "–"


def trial_rows(attack: AttackResult) -> list[Sequence[str]]:
    """Return the cells of a table of one attack, under `TRIAL_HEADINGS`."""
    return [
        (
            name,
            trial.label,
            trial.words,
            _gain(trial),
            str(trial.rows),
            "" if trial.is_control else _outcome_words(attacked, trial),
        )
        for name, attacked in attack.models.items()
        for trial in attacked.trials
    ]


def _outcome_words(attacked: AttackedModel, trial: TrialResult) -> str:
    """Return the outcome of a trial, and whether its rows are too few for it to count."""
    is_left_out = trial.has_too_few_rows and not attacked.strongest.has_too_few_rows
    return "unclear, too few rows to count" if is_left_out else trial.outcome
