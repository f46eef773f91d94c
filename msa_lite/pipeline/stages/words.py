"""Say in plain words what a stage is for, by the first words of its name."""

from __future__ import annotations

from collections.abc import Iterable

from msa_lite.attack_names import ATTACKS

_WORDS: dict[str, str] = {
    "model:": "the real chat model that the first try starts from is fetched",
    "history:": "models of the first try learn invented people: the target more of them than prior and ideal",
    "check:": "before anything is fitted: the target must know the rows to forget, the prior must not",
    "probe:": "do the losses show that a model has seen the rows to forget?",
    "validation:": "scores on rows that are set apart for the choice of alpha and beta",
    "test:": "scores on the test rows of a model that never saw the rows to forget",
    "moments": "what the target's layers take in, on rows to forget and to keep; the filter needs it",
    "retain vector": "a copy of the prior is tuned on rows to keep; the change of its weights is the vector",
    "start of the forget vector": "the retain vector is merged into the prior, which is tuned next",
    "forget vector": "a copy of the prior is tuned on the rows to forget; the change of its weights is the vector",
    "filtered forget vector": "the forget vector without what the rows to keep use, too",
    "choosing alpha and beta": "strengths are tried in memory, by scores on validation rows",
    "merge": "the vectors are folded into the target, which gives the unlearned model",
    "scores:": "scores on the test rows, for report and verdict",
    "earlier rows:": "scores on the rows of earlier requests, which must stay forgotten",
    "evidence:": "what scores do not tell, such as what the unlearned model says instead",
    **{f"{name}:": f"an attack: {entry.summary}" for name, entry in ATTACKS.items()},
}


def explain_stage(name: str) -> str:
    """Return what a stage is for, in a clause; an empty text for a name that says it."""
    return _WORDS.get(_opening(name), "")


def explain_stages(names: Iterable[str]) -> list[str]:
    """Return a line for each kind of stage among these, in their order: "probe: do the losses show …"."""
    openings = dict.fromkeys(filter(None, map(_opening, names)))
    return [f"{opening.rstrip(':')}: {_WORDS[opening]}" for opening in openings]


def _opening(name: str) -> str:
    """Return the words of a stage's name that the table has; an empty text if it has none."""
    start = name.partition(", ")[0]  # "filtered forget vector, λ = 1"
    return next((words for words in _WORDS if start == words or (words.endswith(":") and name.startswith(words))), "")
