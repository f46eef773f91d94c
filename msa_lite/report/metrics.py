"""The table of metrics: one entry a metric, with its label, its direction, its meaning and its source.

Whatever has to know something of a metric looks it up here by name. Values with their errors are in `reports`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

FORGET, RETAIN, HOLDOUT = "forget set", "retain set", "holdout set"
# Ending of a metric's name → the set that it is measured on.
_SETS = {"f": FORGET, "r": RETAIN, "h": HOLDOUT, "ra": "real authors", "wf": "world facts"}
MEMBERSHIP, UTILITY, QUESTIONS, TASKS = "forget against holdout set", "utility", "questions", "tasks"
GROUPS = (*_SETS.values(), MEMBERSHIP, UTILITY, QUESTIONS, TASKS)
"""The groups of metrics, in the order in which tables show them."""


@dataclass(frozen=True)
class MetricKind:
    """What is true of a metric in every report."""

    name: str
    """The key in report.json and in recipes."""
    label: str
    """The name in tables, below a heading with the group."""
    group: str
    """The set, or the kind of question, that it is about: one of `GROUPS`."""
    higher_is_better: bool | None
    """None where neither way is better."""
    formula: str = ""
    """The definition in words."""
    source: str = ""
    """The paper or the code that defines it."""
    needs_ideal: bool = False
    """True where it compares with the ideal model, and so has no value without one."""
    judge: Literal["required", "optional"] | None = None
    """"required": only a judge gives it. "optional": a text match stands in for a judge. None: no judge has a part."""
    has_ratio: bool = True
    """False where a ratio to the ideal's value says nothing."""
    best_at_zero: bool = False
    """True where the best value is 0, from either side."""
    partner: str | None = None
    """The metric of what is kept that a picture shows beside this metric of what is forgotten."""

    @property
    def heading(self) -> str:
        """Return the label for where no group stands beside it."""
        return f"{self.label}, {self.group}" if _SETS.get(self.name.rpartition("_")[2]) == self.group else self.label


_TOFU = "TOFU (Maini et al., 2024)"
_MUSE = "MUSE (Shi et al., 2024), in 0…1 and with a stemmer as in open-unlearning"
_RESTOR = "RESTOR (Rezaei et al., 2024); MSA paper, §4.1"
_JUDGED = "MSA paper, §4.1 and App. B"
_OWN = "msa-lite"
_OF_SET = {FORGET: False, RETAIN: True, HOLDOUT: None, _SETS["ra"]: True, _SETS["wf"]: True}  # direction of a score


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
        yield MetricKind(name, label, _SETS[ending], _OF_SET[_SETS[ending]], formula, source, partner=partner)


def _membership(name: str, label: str, score: str, source: str) -> Iterator[MetricKind]:
    """Yield a membership score's AUC and its distance to the ideal's."""
    auc = f"AUC of telling forget from holdout texts by {score}: 1 always, ½ chance, below the ideal's over-unlearned"
    yield MetricKind(name, f"{label} AUC", MEMBERSHIP, False, auc, source)
    gap = f"distance of {name} to the ideal's, |AUC − AUC of the ideal|"
    gap_label = f"{label} AUC (distance to ideal)"
    yield MetricKind(f"{name}_gap", gap_label, MEMBERSHIP, False, gap, _OWN, needs_ideal=True)


def _judged(name: str, label: str, group: str, formula: str) -> MetricKind:
    return MetricKind(name, label, group, True, formula, _JUDGED, needs_ideal=True, judge="required")


def _right_answers(name: str, label: str, of: str, source: str, partner: str | None = None) -> MetricKind:
    formula = f"share of right answers to questions about {of}: by the judge, or those that hold an acceptable answer"
    return MetricKind(name, label, QUESTIONS, True, formula, source, judge="optional", partner=partner)


_MIN_K = "the 40 % least likely tokens of each"
_RATIO = "R = geometric mean p of the wrong answers / p of the right one"
# In the order in which listings show the metrics of a group, and in which pictures look for a pair.
_KINDS: Sequence[MetricKind] = (
    MetricKind(
        "verbmem_f", "verbmem", FORGET, False,
        "ROUGE-L F1 of 128 generated tokens with the passage that goes on from the prompt",
        f"{_MUSE}; MSA paper, §4.1", partner="knowmem_r",
    ),
    *_on_sets("f r", "knowmem", "knowmem", "ROUGE-L F1 of the answer with the right one, after ten examples", _MUSE),
    *_on_sets(
        "f r h ra wf", "rouge_l", "ROUGE-L recall",
        "words of the right answer that the generated one has in the same order / words of the right answer",
        _TOFU, pair=True,
    ),
    *_on_sets(
        "f r h", "accuracy", "accuracy",
        "share of questions whose right answer stands whole in the generated one; case and signs do not count", _OWN,
    ),
    *_on_sets(
        "f r h", "extraction_strength", "extraction strength",
        "1 − k/N: after the first k of N tokens, the model predicts all the others right",
        "Carlini et al., 2021; MSA paper, §4.1; as in open-unlearning", pair=True, bare=True,
    ),
    *_on_sets(
        "f r h", "exact_memorization", "exact memorization",
        "share of tokens that the model predicts right, each after the true ones before it",
        "MSA paper, §4.1; as in open-unlearning", bare=True,
    ),
    *_on_sets(
        "f r h", "probability", "probability",
        "geometric mean of the probabilities of the answer's tokens, its end included", _TOFU, pair=True,
    ),
    *_on_sets(
        "ra wf", "probability", "probability", "p of the right answer / sum of p of the right and all wrong ones", _TOFU
    ),
    MetricKind(
        "truth_ratio_f", "truth ratio", FORGET, True,
        f"min(R, 1/R), {_RATIO}, paraphrased; 1: true and false are alike", f"{_TOFU}, as in open-unlearning",
    ),
    *_on_sets("r ra wf", "truth_ratio", "truth ratio", f"max(0, 1 − R), {_RATIO}", _TOFU),
    MetricKind(
        "forget_quality", "forget quality", FORGET, True,
        "p-value of a Kolmogorov-Smirnov test of the truth ratios R against the ideal's; 1: none to tell apart",
        f"{_TOFU}; MSA paper, App. C", needs_ideal=True, has_ratio=False,  # p-values differ by orders of magnitude
    ),
    _judged("acc_forget", "Acc forget (judge)", FORGET, "share of answers that are not nearest to the right answer"),
    _judged("acc_recover", "Acc recover (judge)", FORGET, "share of answers that are nearest to the ideal's"),
    _judged("acc_retain", "Acc retain (judge)", RETAIN, "share of answers nearest to the right answer or the ideal's"),
    *_membership("min_k", "Min-K%", f"the mean log-probability of {_MIN_K}", "Shi et al., 2023; MSA paper, §4.1"),
    *_membership(
        "min_k_pp", "Min-K%++", f"that of {_MIN_K}, each in deviations from the mean over the vocabulary",
        "Zhang et al., 2024; MSA paper, §4.1",
    ),
    MetricKind(
        "privleak", "PrivLeak in %", MEMBERSHIP, None,
        "100 · (a* − a) / (1 − a*), a: min_k, a*: the ideal's; below 0 under-unlearned, above over-unlearned",
        "MUSE (Shi et al., 2024); MSA paper, §4.1", needs_ideal=True, best_at_zero=True,
    ),
    MetricKind(
        "loss_auc", "loss AUC", MEMBERSHIP, None,
        "probe: AUC of telling forget rows from comparison rows by the mean loss; ½ is right for a prior", _OWN,
    ),
    MetricKind(
        "min_k_pp_auc", "Min-K%++ AUC", MEMBERSHIP, None,
        "probe: the same by Min-K%++", f"Zhang et al., 2024; {_OWN}",
    ),
    MetricKind(
        "model_utility", "model utility", UTILITY, True,
        "harmonic mean of probability, ROUGE-L and truth ratio on retain set, real authors and world facts", _TOFU,
    ),
    MetricKind(
        "model_utility_ra_wf", "model utility (without retain)", UTILITY, True,
        "the same of real authors and world facts alone", "MSA paper, §4.1, by its words",
    ),
    _right_answers("accuracy", "accuracy", "everybody", _RESTOR),
    _right_answers(
        "accuracy_corrupted", "accuracy (corrupted entities)", "whom the documents are about", _OWN, "accuracy_other"
    ),
    _right_answers("accuracy_other", "accuracy (other entities)", "all others", _OWN),
)  # fmt: skip

METRICS = {kind.name: kind for kind in sorted(_KINDS, key=lambda kind: GROUPS.index(kind.group))}
"""Every metric by name, group by group; but for those of lm-evaluation-harness, which name themselves."""


def metric_kind(name: str) -> MetricKind:
    """Return the entry of a metric, or one made of its name where the table has none.

    Such are the tasks of lm-evaluation-harness (TASK/METRIC), whose direction only a report knows.
    """
    if name in METRICS:
        return METRICS[name]
    if "/" in name:
        return MetricKind(name, name, TASKS, None)
    stem, _, ending = name.rpartition("_")
    group = _SETS.get(ending) if stem else None
    return MetricKind(name, (stem if group else name).replace("_", " "), group or FORGET, None)
