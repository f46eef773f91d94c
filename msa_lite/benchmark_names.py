"""List the benchmarks by name, with the facts that are needed before one is loaded.

Nothing heavy is imported, so that the command line and recipes may read it. `evals.benchmarks` has the benchmarks."""

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
    judged: bool = False
    """True where it has metrics for a judge."""
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
        judged=True,
    ),
    "restor": BenchmarkEntry(
        "msa_lite.evals.benchmarks.restor.RESTOR",
        "RESTOR, facts about people that false documents have corrupted (Rezaei et al., 2024)",
        splits="the corruption documents, a0 to a3",
        columns=("accuracy",),
        sweep_columns=(("accuracy", "accuracy_corrupted", "accuracy_other"),),
        scores={"restor": {"accuracy": 1}},
        judged=True,
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
