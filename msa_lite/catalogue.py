"""List benchmarks, attacks and kinds of evidence by name, with the facts that are needed before one is loaded.

Nothing heavy is imported, so that the command line, recipes and reports may read it. `evals.benchmarks`, `attacks` and
`evidence` have the things themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

OWN = "qa"
"""The benchmark of the user's own questions and texts; all others are published ones."""


@dataclass(frozen=True)
class BenchmarkEntry:
    """One benchmark. All else about it is in the value that `implementation` names."""

    implementation: str
    """Dotted name of its value, a `msa_lite.evals.benchmarks.benchmark.Benchmark`."""
    summary: str
    """Half a sentence for help texts."""
    splits: str = ""
    """Its splits, for help texts; empty where it has but one."""
    columns: Sequence[str] = ()
    """The metrics that a comparison shows; all where it is empty."""
    sweep_columns: Sequence[Sequence[str]] = ()
    """The metrics that reports and the table of a sweep show first; of several lists, `main_columns` picks one."""
    scores: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Selection scores by name, as weights by metric. A positive weight belongs to the factor m, a negative one to
    1 − m (`choose.rules.paper_score`). A name that ends in -printed stands for the form that the MSA paper prints."""
    judged: Sequence[str] = ()
    """The sets that a judge is asked about."""
    validation: float = 0.15
    """The share of its questions that choose alpha and beta, where its own score decides (MSA paper, App. "Choosing
    Hyperparameters")."""

    def main_columns(self, available: Collection[str]) -> Sequence[str]:
        """Return the first list of `sweep_columns` whose first metric has a value, else the first one.

        available: the metrics that have a value.
        """
        return next((names for names in self.sweep_columns if names[0] in available), [*self.sweep_columns, ()][0])


_TOFU = {"model_utility": 2, "acc_forget": 1, "acc_recover": 2, "acc_retain": 1, "extraction_strength": -2}
_PASSAGES = {"verbmem_f": -1, "extraction_strength": -2, "exact_memorization": -1}

BENCHMARKS: dict[str, BenchmarkEntry] = {
    OWN: BenchmarkEntry(
        "msa_lite.evals.benchmarks.qa.QA",
        "your own questions and texts, in forget, retain and holdout sets",
        columns=(
            "rouge_l_f", "accuracy_f", "extraction_strength", "rouge_l_r", "accuracy_r", "rouge_l_h", "accuracy_h",
        ),
        sweep_columns=(
            ("accuracy_f", "rouge_l_f", "extraction_strength", "accuracy_r", "rouge_l_r"),
            ("extraction_strength", "probability_f", "extraction_strength_r", "probability_r"),
        ),
    ),
    "tofu": BenchmarkEntry(
        "msa_lite.evals.benchmarks.tofu.TOFU",
        "TOFU, questions about invented authors (Maini et al., 2024)",
        splits="forget01, forget05 or forget10",
        columns=(
            "acc_forget", "acc_recover", "acc_retain",
            "extraction_strength", "model_utility", "rouge_l_f", "forget_quality",
        ),
        sweep_columns=((
            "rouge_l_f", "extraction_strength", "probability_f", "model_utility", "rouge_l_r",
            "acc_forget", "acc_recover", "acc_retain",
        ),),
        scores={"tofu": _TOFU, "tofu-printed": _TOFU},
        judged=("forget", "retain"),
    ),
    "restor": BenchmarkEntry(
        "msa_lite.evals.benchmarks.restor.RESTOR",
        "RESTOR, facts about people that false documents have corrupted (Rezaei et al., 2024)",
        splits="the corruption documents, a0 to a3",
        columns=("accuracy",),
        sweep_columns=(("accuracy", "accuracy_corrupted", "accuracy_other"),),
        scores={"restor": {"accuracy": 1}},
        judged=("questions",),
        validation=0.1,
    ),
    "muse": BenchmarkEntry(
        "msa_lite.evals.benchmarks.muse.MUSE",
        "MUSE, a series of books or news articles (Shi et al., 2024)",
        splits="books or news",
        columns=(
            "extraction_strength", "exact_memorization", "verbmem_f", "min_k", "min_k_pp", "knowmem_r", "privleak",
        ),
        sweep_columns=(
            ("min_k", "min_k_pp", "verbmem_f", "extraction_strength", "exact_memorization", "knowmem_r"),
        ),
        scores={
            "muse": {"min_k": -1, "min_k_pp": -1, **_PASSAGES, "knowmem_r": 2},
            "muse-gap": {"min_k_gap": -1, "min_k_pp_gap": -1, **_PASSAGES, "knowmem_r": 2},
            "muse-printed": {"min_k": -1, "min_k_pp": -1, **_PASSAGES, "knowmem_r": -2},
        },
    ),
}  # fmt: skip


EARLIER_COLUMNS = (("accuracy_e", "extraction_strength_e"), ("exact_memorization_e", "extraction_strength_e"))
"""The metrics of rows of earlier requests that a comparison shows: of questions, and of texts alone."""


def published() -> list[str]:
    """Return the names of the published benchmarks."""
    return [name for name in BENCHMARKS if name != OWN]


def paper_scores() -> dict[str, Mapping[str, int]]:
    """Return the weights of every benchmark's selection scores, by the score's name."""
    return {name: weights for entry in BENCHMARKS.values() for name, weights in entry.scores.items()}


def splits_help() -> str:
    """Return a line on the splits of the benchmarks that have several."""
    return "; ".join(f"{name}: {entry.splits}" for name, entry in BENCHMARKS.items() if entry.splits)


@dataclass(frozen=True)
class AttackEntry:
    """One attack. All else about it is in the class that implements it."""

    implementation: str
    """Dotted name of its class, a `msa_lite.attacks.attack.Attack`."""
    summary: str
    """Half a sentence for help texts and reports: what somebody does to get the rows back."""
    words: str
    """Its name for somebody who knows nothing of attacks; with `leak`, a clause."""
    leak: str = "brings rows back"
    """The rest of that clause, of an attack that succeeds."""


ATTACKS: dict[str, AttackEntry] = {
    "membership": AttackEntry(
        "msa_lite.attacks.membership.Membership",
        "tell from its losses that a model was trained on the rows",
        "guessing what it was trained on",
        "works",
    ),
    "prompt": AttackEntry(
        "msa_lite.attacks.prompt.Prompting",
        "ask in other words, with examples, with the first words of the answer",
        "asking in other words",
    ),
    "sample": AttackEntry(
        "msa_lite.attacks.sample.Sample", "draw many answers at random, and look at the best", "drawing many answers"
    ),
    "quantise": AttackEntry(
        "msa_lite.attacks.quantise.Quantise", "round the weights to 8 or 4 bits", "rounding its weights"
    ),
    "relearn": AttackEntry(
        "msa_lite.attacks.relearn.Relearn",
        "train a little on a part of the rows, or on others",
        "training it a little more",
    ),
    "depth": AttackEntry(
        "msa_lite.attacks.depth.Depth",
        "read the rows from inner layers, by activation patching",
        "reading its inner layers",
        "still finds the rows",
    ),
}


@dataclass(frozen=True)
class FigureEntry:
    """One figure that a kind of evidence gives for a model: a row of the table of metrics."""

    label: str
    """Its name in tables."""
    formula: str
    """Its definition, in half a sentence."""
    higher_is_better: bool | None = None
    """None where neither way is better by itself; then the ideal's value is what to compare with."""


@dataclass(frozen=True)
class EvidenceEntry:
    """One kind of evidence. All else about it is in the class that implements it."""

    question: str
    """The question that it answers, for reports and help texts."""
    source: str
    """The publication that it follows."""
    figures: Mapping[str, FigureEntry]
    """Its figures by name; the name of the metric is `evidence_metric`."""


ANSWER_KINDS: Mapping[str, FigureEntry] = {
    "tells": FigureEntry("still tells it", "share of forget rows that are recited, by the rule of the verdict", False),
    "other": FigureEntry(
        "says something else", "share of forget rows with a fluent answer that is not the right one, or an admission"
    ),
    "garbles": FigureEntry(
        "garbles", "share of forget rows with no text, repetition, or words that the prior finds unlikely", False
    ),
}
"""What a model can say where it is asked for a forgotten row; each answer is one of these."""

EVIDENCE: dict[str, EvidenceEntry] = {
    "says": EvidenceEntry("What does it say instead?", "honesty of unlearned models, arXiv 2605.08765", ANSWER_KINDS),
    "nearer": EvidenceEntry(
        "Is it nearer to a model that never saw the rows, or to the target?",
        "relative three-sample test, arXiv 2601.19755 and 1511.04581",
        {
            "losses": FigureEntry(
                "nearer by losses", "position between target (−1) and control (+1) by the answers' probabilities"
            )
        },
    ),
}


def evidence_metric(kind: str, figure: str) -> str:
    """Return the name of the metric of a figure: a column of a comparison."""
    return f"{kind}_{figure}"
