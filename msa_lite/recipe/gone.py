"""Keys that recipes no longer have, each with what to write now."""

from __future__ import annotations

_SCORES = "the rules are extraction and the paper's scores: select.score"
_JUDGE = {
    "batch": "calls are made a few at a time; leave it out",
    "concurrency": "8 calls are made at a time; leave it out",
    "price": "the server's own account shows the cost; leave it out",
    "separate": "acc_forget is scored from the same call as acc_recover; leave it out",
    "timeout": "a call is tried again after 300 s; leave it out",
}
_ATTACK = "its settings are fixed, so that results can be compared; leave it out"
_OF_DEMO = [
    f"demo.{key}"
    for key in ("hidden_size", "layers", "vocabulary", "prior_epochs", "tuning_epochs", "prior_learning_rate",
                "tuning_learning_rate", "batch_size")
]  # fmt: skip
GONE = {
    "attack.prompt": _ATTACK,
    "attack.quantise": _ATTACK,
    "attack.relearn": _ATTACK,
    "attack.sample": _ATTACK,
    **{f"evaluate.judge.{key}": advice for key, advice in _JUDGE.items()},
    "evidence.judge": "the answers are sorted by rules alone; leave it out",
    "probe": "forget rows are compared with evaluate.holdout, or the benchmark's own holdout rows",
    "publish.gated": "the settings of the repository on the Hub gate it; leave it out",
    "publish.name_models": "the card names models that are public; leave it out",
    "baseline.alternatives": "dpo has answers of its own; leave it out",
    "baseline.compat": "losses are as their papers have them; leave it out",
    "baseline.keep": "the best epoch is kept; leave it out",
    **dict.fromkeys(_OF_DEMO, "the models of a demo have one size and rate; leave it out"),
    "evaluate.engine": "transformers scores everything; leave it out",
    "merge.forecast": "the attack quantise measures what it predicted: attack.attacks=[quantise]",
    "tokenizer": "a target without a tokenizer takes the prior's; leave it out",
    "select.by": "the validation part is drawn by question; leave it out",
    "select.four_bit": "points are scored in the target's own precision; leave it out",
    "select.judge": "a judge of kind openai is asked; evaluate.judge.kind: none asks none",
    "select.maximise": _SCORES,
    "select.minimise": _SCORES,
    "select.refine": "name the points in a list, such as forget.alpha=[0.5, 0.75, 1.0]",
    "select.subject_to": _SCORES,
    "select.under": "the attack quantise shows what rounding brings back: attack.attacks=[quantise]",
}
"""The dotted key → its new form, for the refusal."""
