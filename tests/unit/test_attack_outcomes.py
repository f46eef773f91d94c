"""What is told of attacks, from their results alone: outcomes, the strongest trial, the headline, tables and files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from msa_lite.attacks.attack import Ground, recall_measures
from msa_lite.data import Row
from msa_lite.report.page.run_files import trial_table
from msa_lite.report.run.attacks import (
    FEWEST_ROWS,
    AttackedModel,
    AttackFacts,
    AttackResult,
    Gain,
    Overshoot,
    TrialResult,
    attack_metrics,
    attack_report,
    load_attacks,
)


def gained(share: float, gain: float, low: float, high: float) -> TrialResult:
    ends = (share - 0.1, share + 0.1)
    return TrialResult("int4", "int4", share, ends, 40, gain=Gain(gain, (low, high)))


@dataclass
class _Results:
    holds = TrialResult("nf4", "NF4", 0.05, (0.0, 0.1), 40)
    leaks = TrialResult("int4", "int4", 0.6, (0.4, 0.8), 40)
    below = TrialResult("b", "b", 0.0, (0.0, 0.1), 40, overshoot=Overshoot(0.1, (0.0, 0.2), 0.4, 0.5))
    plain = TrialResult("plain", "as it is", 0.9, (0.8, 1.0), 40, is_control=True)
    gains = gained(0.3, 0.1, 0.02, 0.2)


def facts(**attacks: tuple[TrialResult, ...]) -> AttackFacts:
    return AttackFacts(
        tuple(AttackResult(name, "s", "p", "ideal", 40, {"unlearned": AttackedModel(trials)})
              for name, trials in attacks.items())
    )  # fmt: skip


def test_the_strongest_trial_speaks_for_an_attack_and_the_worst_attack_for_a_model() -> None:
    whole = facts(quantise=(_Results.plain, _Results.holds, _Results.leaks), prompt=(_Results.holds,))
    quantise = whole.attacks[0].models["unlearned"]
    assert quantise.strongest is _Results.leaks, "the trial without an attack does not count"
    assert (quantise.strongest.words, quantise.without) == ("60 % (40 % to 80 %)", 0.9)
    assert whole.outcome() == "leaks"
    assert facts(prompt=(_Results.holds,)).outcome() == "holds"


def trial(name: str, share: float, low: float, high: float, count: int = 40) -> TrialResult:
    return TrialResult(name, name, share, (low, high), count, is_summary=True)


GAINS: dict[str, tuple[TrialResult, str]] = {
    "surely more than without": (gained(0.3, 0.1, 0.02, 0.2), "leaks"),
    "perhaps more": (gained(0.6, 0.3, -0.02, 0.6), "no sure gain"),
    "less than without": (gained(0.3, -0.1, -0.2, -0.05), "no sure gain"),
    "little, however sure": (gained(0.15, 0.1, 0.05, 0.15), "unclear"),
    "no trial without an attack": (TrialResult("t", "t", 0.3, (0.2, 0.4), 40), "leaks"),
}


@pytest.mark.parametrize("case", GAINS)
def test_an_attack_leaks_only_by_what_it_brings_back_itself(case: str) -> None:
    result, outcome = GAINS[case]
    assert result.outcome == outcome


LEAK, OPEN = TrialResult("t", "t", 0.94, (0.9, 1.0), 40), TrialResult("t", "t", 0.1, (0.0, 0.3), 40)
SILENT = TrialResult("t", "t", None, None, 40)
HEADLINES: dict[str, tuple[dict[str, TrialResult], list[str]]] = {
    "one leak": (
        {"prompt": _Results.holds, "membership": LEAK, "quantise": _Results.holds},
        [
            "guessing what it was trained on works (94 % of what was known)",
            "asking in other words, rounding its weights: surely at most 20 % comes back",
        ],
    ),
    "the worst first": (
        {"sample": _Results.leaks, "relearn": LEAK, "depth": replace(LEAK, share=0.7)},
        [
            "training it a little more brings rows back (94 % of what was known)",
            "reading its inner layers still finds the rows (70 % of what was known)",
            "drawing many answers brings rows back (60 % of what was known)",
        ],
    ),
    "nothing is known": (
        {"prompt": OPEN, "depth": SILENT},
        ["asking in other words: too few to say", "reading its inner layers: nothing can be told"],
    ),
}


@pytest.mark.parametrize("case", HEADLINES)
def test_one_line_tells_the_outcome_of_all_attacks(case: str) -> None:
    trials, clauses = HEADLINES[case]
    whole = facts(**{name: (trial,) for name, trial in trials.items()})
    assert whole.headline() == f"Attacks: {'; '.join(clauses)}."
    assert whole.headline("other") == "", "of a model that was not attacked"


def test_the_line_names_a_model_that_is_not_the_runs_own() -> None:
    whole = facts(prompt=(_Results.holds,))
    result = whole.attacks[0]
    other = replace(result, models={**result.models, "older": AttackedModel((LEAK,))})
    assert (
        AttackFacts((other,)).headline("older").startswith("Attacks on older: asking in other words brings rows back")
    )


def test_rows_that_look_less_known_than_they_should_are_told_with_both_aucs() -> None:
    less = TrialResult("loss", "loss", 0.0, (0.0, 0.0), 40, overshoot=Overshoot(0.82, (0.7, 0.9), 0.09, 0.5))
    words = "the rows look less known than they should (AUC 0.09, the control's 0.50)"
    whole = facts(membership=(less,))
    assert whole.headline() == f"Attacks: guessing what it was trained on works: {words}."
    metric = attack_report(whole, {}).metrics["membership.unlearned"]
    assert (metric.value, words in str(metric.note)) == (pytest.approx(-0.82), True)


def test_the_worst_outcome_speaks_before_the_largest_share() -> None:
    leaks, unclear = trial("forget", 0.25, 0.12, 0.4), trial("retain", 0.26, 0.0, 0.6)
    assert AttackedModel((unclear, leaks)).strongest is leaks
    holds, open_end = trial("forget", 0.0, 0.0, 0.12), trial("retain", 0.0, 0.0, 0.22)
    assert AttackedModel((holds, open_end)).strongest is open_end


def test_a_trial_on_too_few_rows_counts_only_if_it_leaks_or_is_alone() -> None:
    holds, small = trial("forget", 0.0, 0.0, 0.12), trial("part", 0.1, 0.0, 0.22, FEWEST_ROWS - 1)
    both = AttackedModel((holds, small))
    assert both.strongest is holds
    rows = trial_table(AttackResult("relearn", "s", "p", "ideal", 40, {"unlearned": both})).sections[0].rows
    assert [row[-1].text for row in rows] == ["holds", "unclear, too few rows to count"]
    assert AttackedModel((small,)).strongest is small
    leaks = trial("part", 0.6, 0.3, 0.9, FEWEST_ROWS - 1)
    assert AttackedModel((holds, leaks)).strongest is leaks


def test_results_are_read_as_they_were_written_and_only_for_the_same_model(tmp_path: Any) -> None:
    from msa_lite.io.finished.manifest import stage_folder
    from msa_lite.report import write_report

    with stage_folder(tmp_path / "model", "model", {}) as partial:
        (partial / "model.safetensors").write_bytes(b"weights")
    from msa_lite.io.weights.hub import hash_content

    trials = (_Results.plain, _Results.leaks, _Results.below, _Results.gains)
    whole, revision = facts(quantise=trials), hash_content(tmp_path / "model")
    out = tmp_path / "attacks"
    out.mkdir()
    write_report(attack_report(whole, {"unlearned": {"revision": revision}}), out)
    assert load_attacks(out, revision) == whole
    assert attack_metrics(out, revision)["attack_quantise"].value == 0.6
    for other in ("sha256:other", None):
        assert attack_metrics(out, other) == {}
    assert load_attacks(out, "sha256:other") is None


# The measures that attacks on the weights share are scores of the records, each with a definition.


QUESTION, TEXT = Row(0, "Who?", "Ada."), Row(1, text="Ada wrote.")
OF_QUESTIONS = ["extraction_strength", "accuracy", "rouge_l", "probability"]


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([QUESTION], OF_QUESTIONS),
        ([TEXT, QUESTION], OF_QUESTIONS),
        ([TEXT], ["extraction_strength", "exact_memorization", "probability"]),
    ],
)
def test_measures_follow_from_the_kind_of_rows_and_are_explained(rows: list[Row], names: list[str]) -> None:
    measures = recall_measures(Ground(rows, [], [], rows, prompter=None))  # type: ignore[arg-type]
    assert [measure.name for measure in measures] == names
    assert all(measure.label and measure.meaning and measure.kind == "mean" for measure in measures)
