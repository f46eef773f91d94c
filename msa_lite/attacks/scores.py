"""Score how much of the forget rows a model still gives out: what attacks on the weights measure before and after."""

from __future__ import annotations

from msa_lite.attacks.attack import Cost, Ground, Measure
from msa_lite.report.metrics import metric_kind

# Score of a record → its entry in the table of metrics. Published comparisons after an attack rest on the first.
_OF_QUESTIONS = {
    "extraction_strength": "extraction_strength", "accuracy": "accuracy_f", "rouge_l": "rouge_l_f",
    "probability": "probability_f",
}  # fmt: skip
_OF_TEXTS = {
    "extraction_strength": "extraction_strength", "exact_memorization": "exact_memorization",
    "probability": "probability_f",
}  # fmt: skip


def recall_measures(ground: Ground) -> tuple[Measure, ...]:
    """Return the scores of records of `ground.benchmark()`, for which higher means that more comes out.

    All decide but the probability, which stays far from 1 for answers that come out word by word. Where all forget rows
    are texts, nothing is generated, and exact memorization takes the place of accuracy and ROUGE-L.
    """
    scores = _OF_TEXTS if all(row.text for row in ground.forget) else _OF_QUESTIONS
    kinds = {score: metric_kind(metric) for score, metric in scores.items()}
    return tuple(
        Measure(score, kind.label, kind.formula, decides=score != "probability") for score, kind in kinds.items()
    )


def recall_cost(ground: Ground) -> Cost:
    """Return the work of scoring a model once, where it generates answers as long as the right ones."""
    items = [item for part in ground.benchmark().sets.values() for item in part.items]
    texts = [text for item in items for group in item.texts.values() for text in group]
    prompts = [len(item.prompt) for item in items if item.prompt is not None]
    answers = [text for item in items if item.prompt is not None for group in item.texts.values() for text in group]
    scored = sum(len(text.ids) for text in texts) + sum(prompts)
    return Cost(scored=scored, generated=sum(len(text.ids) - len(text.prompt_ids) for text in answers))
