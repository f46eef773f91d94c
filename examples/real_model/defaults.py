"""Compare each setting's default with what was tried in its place."""

from __future__ import annotations

from dataclasses import dataclass

from claims import mean_measure
from collect import Results
from measures import paired
from rules import NO, YES, further, mark

from msa_lite.report.tables.formats import Cell, Section, TextTable, markdown
from msa_lite.report.tables.reports import number


@dataclass(frozen=True)
class Trial:
    """Another value of a setting, tried with all other settings of the recipe equal."""

    key: str
    """The recipe's key."""
    default: str
    """The tool's default for SmolLM2-135M, or what a run with `of` had."""
    tried: str
    """The other value."""
    name: str
    """The experiment with the other value."""
    of: str = "msa-lora"
    """The experiment with the default."""


TRIALS = (
    Trial("vector.mode", "lora", "full", "msa-full"),
    Trial("vector.mode", "lora", "qlora", "qlora"),
    Trial("vector.lora.rank, .alpha", "32, 64, rate 3.4e-4", "8, 16, rate 1.4e-3", "lora-r8"),
    Trial("vector.lora.rank, .alpha", "32, 64, rate 3.4e-4", "128, 256, rate 8.5e-5", "lora-r128"),
    Trial("vector.lora.targets", "all-linear", "MLP alone", "lora-mlp"),
    Trial("vector.learning_rate", "auto, 3.4e-4", "1e-4", "lora-rate-low"),
    Trial("vector.learning_rate", "auto, 3.4e-4", "1e-3", "lora-rate-high"),
    Trial("vector.learning_rate, mode full", "auto, 3.4e-5", "1e-4", "full-rate-high", "msa-full"),
    Trial("retain.data.sample", "match_forget, 40 rows", "all 140 rows", "retain-all"),
    Trial("retain.data.sample, mode full", "match_forget, 40 rows", "all 140 rows", "retain-all-full", "msa-full"),
    Trial("vector.mode, text after TOFU", "lora", "full", "text-before-full", "text-before"),
    Trial("vector.mode, TOFU twice", "lora", "full", "again-before-full", "again-before"),
    Trial("merge.dtype", "same, float32", "bfloat16", "bf16"),
)
_ANSWERS = {YES: "nearer", NO: "further"}


def defaults_table(results: Results) -> str | None:
    """Return what was tried beside each default, and how much nearer to the ideal it is; None if nothing was."""
    rows = []
    for trial in TRIALS:
        runs, usual = results.runs(trial.name), results.runs(trial.of)
        one = paired(trial.tried, usual, runs)
        if one.mean is None:
            continue
        own, beside = ({seed: some[seed] for seed in one.by_seed} for some in (runs, usual))
        kept = " against ".join(number(mean_measure(points, "kept")) for points in (own, beside))
        ends = "–" if one.low is None else f"{one.low:+.3f} to {one.high:+.3f} ({one.source})"
        seeds = ", ".join(f"{seed}: {value:+.3f}" for seed, value in one.by_seed.items())
        answer = _ANSWERS.get(further(one), "not sure") + mark(one)
        texts = (trial.key, trial.default, trial.tried, answer, f"{one.mean:+.3f}", ends, seeds, kept)
        rows.append([Cell(text) for text in texts])
    headings = ["setting", "default", "tried", "to the ideal", "nearer by", "95 % interval", "by seed", "kept ↑"]
    return markdown(TextTable(headings, [Section(rows)], left=4)) if rows else None
