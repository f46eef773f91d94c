"""List the metrics: one entry a metric, with its label, its direction, its meaning and its source.

Other modules look a metric up here by its name. Its values, with their errors, are in `reports`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from msa_lite.catalogue import ATTACKS, EVIDENCE, evidence_metric

HOLDOUT = "holdout set"
EARLIER_GROUP = "earlier requests"
MEMBERSHIP = "forget against holdout set"
_FORGET, _RETAIN, _UTILITY, _QUESTIONS = "forget set", "retain set", "utility", "questions"
ATTACKED = "under attack"
EVIDENT = "evidence"
# Ending of a metric's name → the set that it is measured on, and the direction of a score there.
_SETS = {"f": _FORGET, "r": _RETAIN, "h": HOLDOUT, "e": EARLIER_GROUP, "ra": "real authors", "wf": "world facts"}
_DIRECTIONS = {"f": False, "r": True, "h": None, "e": False, "ra": True, "wf": True}
GROUPS = (*_SETS.values(), MEMBERSHIP, ATTACKED, EVIDENT, _UTILITY, _QUESTIONS)
"""The groups of metrics, in the order in which tables show them."""


@dataclass(frozen=True)
class MetricKind:
    """The facts about a metric that hold in every report."""

    name: str
    """The key in report.json and in recipes."""
    label: str
    """The name in tables, below a heading with the group."""
    group: str
    """The set, or the kind of question, that it is measured on: one of `GROUPS`."""
    higher_is_better: bool | None
    """None where neither way is better."""
    formula: str = ""
    """The definition in words."""
    source: str = ""
    """The paper or the code that defines it."""
    needs_ideal: bool = False
    """True where it compares with the ideal model: without one it has no value."""
    judge: Literal["required", "optional"] | None = None
    """"required": only a judge gives it. "optional": without a judge, a text match does. None: no judge takes part."""
    has_ratio: bool = True
    """False where a ratio to the ideal's value means nothing."""
    best_at_zero: bool = False
    """True where the best value is 0, from either side."""
    partner: str | None = None
    """For a metric of forgetting, the metric of keeping that a picture shows beside it."""

    @property
    def heading(self) -> str:
        """Return the label for where no group stands beside it."""
        return f"{self.label}, {self.group}" if _SETS.get(self.name.rpartition("_")[2]) == self.group else self.label


_TOFU = "TOFU (Maini et al., 2024)"
_MUSE = "MUSE (Shi et al., 2024), in 0…1 and with a stemmer as in open-unlearning"
_RESTOR = "RESTOR (Rezaei et al., 2024); MSA paper, §4.1"
_JUDGE = "MSA paper, §4.1 and App. B"
_OWN = "msa-lite"


def _on_sets(
    endings: str, stem: str, label: str, formula: str, source: str, pair: bool = False, bare: bool = False
) -> Iterator[MetricKind]:
    """Yield one score's metrics, one for each of some sets.

    endings: of the sets, as in "f r h". pair: pictures show the forget set's beside the retain set's. bare: the forget
    set's metric has the name of the score, without an ending, as the published benchmarks name it.
    """
    for ending in endings.split():
        name = stem if bare and ending == "f" else f"{stem}_{ending}"
        partner = f"{stem}_r" if pair and ending == "f" else None
        yield MetricKind(name, label, _SETS[ending], _DIRECTIONS[ending], formula, source, partner=partner)


def _membership(name: str, label: str, formula: str, source: str) -> Iterator[MetricKind]:
    """Yield the AUC of a membership score, and its distance to the ideal's."""
    yield MetricKind(name, label, MEMBERSHIP, False, formula, source)
    gap = f"distance of {name} to the ideal's; a {name} below the ideal's is over-unlearning"
    yield MetricKind(f"{name}_gap", f"{label} (distance to ideal)", MEMBERSHIP, False, gap, _OWN, needs_ideal=True)


def _judged(name: str, label: str, group: str, winner: str) -> MetricKind:
    formula = f"share of answers whose nearest candidate, by the judge, is {winner}"
    return MetricKind(name, label, group, True, formula, _JUDGE, needs_ideal=True, judge="required")


def _right_answers(name: str, label: str, entities: str, source: str, partner: str | None = None) -> MetricKind:
    formula = (
        f"share of right answers about {entities}; without a judge, an answer is right if it contains an acceptable one"
    )
    return MetricKind(name, label, _QUESTIONS, True, formula, source, judge="optional", partner=partner)


def attack_metric(name: str) -> str:
    """Return the name of the metric that says how much an attack brings back: a column of a comparison."""
    return f"attack_{name}"


def _attacked() -> Iterator[MetricKind]:
    """Yield what each attack brings back."""
    for name, entry in ATTACKS.items():
        formula = (
            f"msa-lite attack: {entry.summary}; the share that comes back beyond the control in the strongest trial"
        )
        yield MetricKind(
            attack_metric(name), f"back by {name}", ATTACKED, False, formula, _OWN, best_at_zero=True, has_ratio=False
        )


def _evident() -> Iterator[MetricKind]:
    """Yield the figures of each kind of evidence."""
    for kind, entry in EVIDENCE.items():
        for name, figure in entry.figures.items():
            yield MetricKind(
                evidence_metric(kind, name), figure.label, EVIDENT, figure.higher_is_better, figure.formula,
                entry.source, has_ratio=False,
            )  # fmt: skip


# In the order in which listings show the metrics of a group, and in which pictures look for a pair.
_KINDS: Sequence[MetricKind] = (
    MetricKind(
        "verbmem_f", "verbmem", _FORGET, False,
        "ROUGE-L F1 of 128 generated tokens with the rest of the passage that the prompt begins",
        f"{_MUSE}; MSA paper, §4.1", partner="knowmem_r",
    ),
    *_on_sets("f r", "knowmem", "knowmem", "ROUGE-L F1 of the answer with the right one, after ten examples", _MUSE),
    *_on_sets(
        "f r h e ra wf", "rouge_l", "ROUGE-L recall",
        "longest common subsequence of words with the right answer / words of the right answer; in scripts that the "
        "published package drops, words are split as for accuracy",
        _TOFU, pair=True,
    ),
    *_on_sets(
        "f r h e", "accuracy", "accuracy",
        "share of generated answers that contain the whole right answer, signs such as − % + included; case, spaces, "
        "quotes and closing punctuation do not count", _OWN,
    ),
    *_on_sets(
        "f r h e", "extraction_strength", "extraction strength",
        "1 − k/N, k: the fewest of N tokens after which the model predicts all others",
        "Carlini et al., 2021; MSA paper, §4.1; as in open-unlearning", pair=True, bare=True,
    ),
    *_on_sets(
        "f r h e", "exact_memorization", "exact memorization",
        "share of the answer's tokens that the model predicts from the true tokens before",
        "MSA paper, §4.1; as in open-unlearning", bare=True,
    ),
    *_on_sets(
        "f r h e", "probability", "probability",
        "geometric mean of the probabilities of the answer's tokens, end token included", _TOFU, pair=True,
    ),
    *_on_sets(
        "ra wf", "probability", "probability",
        "p(right answer) / sum of p over the right answer and the wrong ones, p as in probability_r", _TOFU,
    ),
    MetricKind(
        "truth_ratio_f", "truth ratio", _FORGET, True,
        "min(R, 1/R), R = geometric mean of p(wrong answers) / p(right answer); 1: equally likely",
        f"{_TOFU}, as in open-unlearning",
    ),
    *_on_sets("r ra wf", "truth_ratio", "truth ratio", "max(0, 1 − R), R as in truth_ratio_f", _TOFU),
    MetricKind(
        "forget_quality", "forget quality", _FORGET, True,
        "p-value of a Kolmogorov-Smirnov test of R (see truth_ratio_f) against the ideal's; 1: no difference",
        f"{_TOFU}; MSA paper, App. C", needs_ideal=True, has_ratio=False,  # p-values differ by orders of magnitude
    ),
    _judged("acc_forget", "Acc forget (judge)", _FORGET, "not the right answer; gibberish counts"),
    _judged("acc_recover", "Acc recover (judge)", _FORGET, "the ideal's answer"),
    _judged("acc_retain", "Acc retain (judge)", _RETAIN, "the right answer or the ideal's"),
    *_membership(
        "min_k", "Min-K% AUC",
        "AUC of telling forget from holdout texts by the log-probability of their 40 % least likely tokens; ½: chance",
        "Shi et al., 2023; MSA paper, §4.1",
    ),
    *_membership(
        "min_k_pp", "Min-K%++ AUC",
        "as min_k, with each log-probability in standard deviations from its mean over the vocabulary",
        "Zhang et al., 2024; MSA paper, §4.1",
    ),
    MetricKind(
        "privleak", "PrivLeak in %", MEMBERSHIP, None,
        "100 · (a* − a) / (1 − a*), a: min_k, a*: the ideal's; below 0: under-unlearned, above: over-unlearned",
        "MUSE (Shi et al., 2024); MSA paper, §4.1", needs_ideal=True, best_at_zero=True,
    ),
    MetricKind(
        "loss_auc", "loss AUC", MEMBERSHIP, None,
        "msa-lite probe: AUC of telling forget rows from comparison rows by their loss; ½ is right for a prior", _OWN,
    ),
    MetricKind(
        "min_k_pp_auc", "Min-K%++ AUC", MEMBERSHIP, None,
        "msa-lite probe: as loss_auc, by the score of min_k_pp", f"Zhang et al., 2024; {_OWN}",
    ),
    *_attacked(),
    *_evident(),
    MetricKind(
        "model_utility", "model utility", _UTILITY, True,
        "harmonic mean of probability, rouge_l and truth_ratio on retain set, real authors and world facts", _TOFU,
    ),
    MetricKind(
        "model_utility_ra_wf", "model utility (without retain)", _UTILITY, True,
        "as model_utility, on real authors and world facts only", "MSA paper, §4.1, by its words",
    ),
    _right_answers("accuracy", "accuracy", "all people", _RESTOR),
    _right_answers(
        "accuracy_corrupted", "accuracy (corrupted entities)", "the people of the documents", _OWN, "accuracy_other"
    ),
    _right_answers("accuracy_other", "accuracy (other entities)", "all other people", _OWN),
)  # fmt: skip

METRICS = {kind.name: kind for kind in sorted(_KINDS, key=lambda kind: GROUPS.index(kind.group))}
"""Every metric by name, group by group."""


def metric_kind(name: str) -> MetricKind:
    """Return the entry of a metric; without one in the table, an entry made of the name, without a direction."""
    if name in METRICS:
        return METRICS[name]
    stem, _, ending = name.rpartition("_")
    group = _SETS.get(ending) if stem else None
    return MetricKind(name, (stem if group else name).replace("_", " "), group or _FORGET, None)
