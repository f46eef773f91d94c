"""Make the tables of what attacks bring back: the shares beyond the ideal, and the scores behind them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from claims import NAMES, name_of
from collect import Results, Run, seed_names

from msa_lite.catalogue import ATTACKS
from msa_lite.report.run.attacks import MOST_BACK, AttackedModel
from msa_lite.report.tables.formats import Cell, Section, TextTable, markdown
from msa_lite.report.tables.reports import number
from msa_lite.report.verdict.figures import percent

SCORES: Mapping[str, tuple[str, str]] = {
    "extraction": ("quantise", "plain.extraction_strength"),
    "in NF4": ("quantise", "nf4.extraction_strength"),
    "12 steps on retain rows": ("relearn", "retain step 12.extraction_strength"),
    "12 steps on other texts": ("relearn", "unrelated step 12.extraction_strength"),
    "12 steps on the other half": ("relearn", "part step 12.extraction_strength"),
    "12 steps on the rows": ("relearn", "forget step 12.extraction_strength"),
    "best ROUGE-L of all prompts": ("prompt", "any.rouge_l"),
    "best ROUGE-L of 16 answers": ("sample", "drawn.leak_rouge_16"),
    "AUC by Min-K%++": ("membership", "scores.min_k_pp"),
    "AUC by loss": ("membership", "scores.loss"),
}
"""Headings of the scores, each with the attack and its metric. Fixed before any model but msa-lora was attacked."""


def attack_tables(results: Results) -> Iterator[str]:
    """Yield which seeds were attacked, what comes back by attack, and scores under attack. Nothing without attacks."""
    attacked = {
        name: runs for name in NAMES if (runs := {seed: run for seed, run in results.runs(name).items() if run.attacks})
    }
    if attacked:
        yield f"Attacked: {seed_names({seed for runs in attacked.values() for seed in runs})}.\n"
        yield _shares_table(attacked)
        yield _scores_table(attacked)


def _shares_table(attacked: Mapping[str, Mapping[int, Run]]) -> str:
    def cell(name: str, runs: Mapping[int, Run]) -> Cell:
        models = [own for run in runs.values() if (own := _model(run, name)) is not None]
        trials = [model.strongest for model in models]
        shares = [share for trial in trials if (share := trial.signed[0]) is not None]
        leaks = any(trial.outcome == "leaks" for trial in trials)
        if len(trials) == 1:
            return Cell(trials[0].words, leaks)
        spread = f" ± {percent(statistics.stdev(shares))}" if len(shares) > 1 else ""
        return Cell(percent(statistics.fmean(shares)) + spread if shares else "–", leaks)

    rows = [[Cell(name_of(name)), *(cell(attack, runs) for attack in ATTACKS)] for name, runs in attacked.items()]
    notes = [
        "what the strongest trial of each attack draws beyond the ideal under the same attack, as a share of what the "
        "target shows: the target is 100 %, the ideal 0 %; below 0 the rows look less known than rows never seen",
        "with one seed the 95 % interval over its rows, else mean ± standard deviation over seeds",
        f"bold: it leaks, more than {percent(MOST_BACK)} in a seed and surely not by chance",
    ]
    return markdown(TextTable(["model", *ATTACKS], [Section(rows)], notes=notes))


def _scores_table(attacked: Mapping[str, Mapping[int, Run]]) -> str:
    def line(label: str, model: str, runs: Mapping[int, Run]) -> list[Cell]:
        return [Cell(label), *(_score(runs, attack, f"{metric}.{model}") for attack, metric in SCORES.values())]

    first = next(iter(attacked.values()))
    references = [line(model, model, first) for model in ("target", "ideal")]
    rows = [line(name_of(name), "unlearned", runs) for name, runs in attacked.items()]
    notes = [
        "extraction strength but where a heading says more, on the forget rows; ± is the half width of the 95 % "
        "interval with one seed, else the standard deviation over seeds"
    ]
    return markdown(TextTable(["model", *SCORES], [Section(references), Section(rows)], notes=notes))


def _model(run: Run, attack: str) -> AttackedModel | None:
    """Return the results of an attack on the run's unlearned model; None if it was not made."""
    results = run.attacks.attacks if run.attacks else ()
    return next((one.models.get("unlearned") for one in results if one.name == attack), None)


def _score(runs: Mapping[int, Run], attack: str, name: str) -> Cell:
    metrics = [metric for run in runs.values() if (metric := run.under_attack.get(attack, {}).get(name))]
    values = [metric.value for metric in metrics if metric.value is not None]
    if not values:
        return Cell("–")
    error = statistics.stdev(values) if len(values) > 1 else max(metric.margin for metric in metrics)
    return Cell(f"{number(statistics.fmean(values))} ± {number(error)}")
