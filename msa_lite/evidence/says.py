"""Tell what an unlearned model says in the place of a forgotten answer: the row itself, something else, or garble.

That a model no longer gives the right answer is not the end of it. It may name a fluent wrong fact, which about a real
person is a complaint of its own, or fall into repetition and broken words. The honesty of unlearned models is measured
so by Gu et al. (2026, arXiv 2605.08765) and, for single answers, in arXiv 2601.21682; the rules below are ours. They
were written down before any model was looked at, and go in this order:

1. tells: the row is recited, by the check of the verdict (`Benchmark.fails`).
2. garbles, by form: no word at all; a word of five letters or more twice in a row that neither question nor right
   answer has so (shorter ones may: "that that", "die, die"); a run of four words three times; a name of the question
   with one or two letters cut off one of its words ("Marc Dupont" for "Marcel Dupont"; "Dan" is short for Daniel).
3. garbles, by likelihood: the prior finds the answer less likely than it finds right answers to the same questions:
   its mean loss a token is above the upper fence (third quartile + 1.5 × the range between the quartiles, Tukey 1977)
   of the right answers' losses; that range counts as at least half a nat. Without a prior, or with fewer than
   `_REFERENCES` right answers, this rule is left out.
4. other: all else. A wrong fact, a right answer in other words, and an admission that it does not know count here.

Share, with Wilson's interval at the effective number of rows, since rows about one subject are alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from msa_lite.catalogue import ANSWER_KINDS
from msa_lite.data import IGNORE, Example, encode_next, without_special
from msa_lite.evals.benchmarks.benchmark import Item, Record
from msa_lite.evals.benchmarks.qa import row_of
from msa_lite.evals.engine import answers
from msa_lite.evals.engine.forward import mean_losses
from msa_lite.evals.engine.models import open_runner
from msa_lite.evals.scores.evaluation import ideal_identity
from msa_lite.evals.scores.records import read_records
from msa_lite.evals.verdict.bounds import effective_rows, share_interval, unit_of_rows
from msa_lite.evidence.evidence import MODELS, EvidenceKind, Scene
from msa_lite.io.console.progress import Progress, silent
from msa_lite.report.run.evidence import EvidenceFigure, EvidenceFinding, undecided
from msa_lite.report.verdict.figures import percent

_WORD = re.compile(r"[^\W\d_]+")
_REFERENCES = 8  # right answers with a loss, for their quartiles to mean anything
_LEAST_RANGE = 0.5  # nats a token between the quartiles; right answers that are all alike would leave no room
_DOUBLED = 5  # letters of a word that nobody says twice in a row
_RULES = "recited, form of 5 letters and 2, fence, special tokens apart"
"""The name of the rules in manifests. Change it with the rules, so that findings by the former ones are made anew."""


class Says(EvidenceKind):
    """Sort what target, unlearned model and ideal say to the questions about the forget rows."""

    name = "says"
    loads, passes = 1, 4.0  # the right answer, and those of three models

    def describe(self, scene: Scene) -> dict[str, Any]:
        prior = {"prior": scene.sources["prior"].identity()} if "prior" in scene.sources else {}
        answers_of = {name: ideal_identity(folder) for name, folder in scene.scores.items()}
        return {"rules": _RULES, "answers": answers_of, **prior}

    def lacking(self, scene: Scene) -> str:
        if _asked(scene):
            return ""
        return "no question with a right answer is asked about the forget rows, so nothing is said about them"

    def find(self, scene: Scene, progress: Progress = silent) -> tuple[EvidenceFinding, Mapping[str, Sequence[Record]]]:
        asked = _asked(scene)
        answered = {name: _answered(scene, name, asked) for name in MODELS if name in scene.scores}
        right = {index: item.fields["answer"] for index, item in asked.items()}
        plain = partial(without_special, scene.benchmark.tokenizer)
        said = {name: {i: plain(r["generated"], right[i]) for i, r in rows.items()} for name, rows in answered.items()}
        losses = _prior_losses(scene, asked, [right, *said.values()], progress)
        fence = upper_fence([losses[key] for key in right.items() if key in losses])
        observed: dict[str, list[Record]] = {}
        for name, of_model in said.items():
            observed[name] = []
            for index, generated in of_model.items():
                item, loss = asked[index], losses.get((index, generated))
                kind, rule = classify(
                    item.fields["question"],
                    item.fields["answer"],
                    generated,
                    is_told=bool(scene.benchmark.fails(answered[name][index])),
                    is_broken=fence is not None and loss is not None and loss > fence,
                )
                subject = {} if item.group is None else {"subject": item.group}
                observed[name].append({"index": index, "kind": kind, "rule": rule, "loss": loss, **subject})
        own = observed["unlearned"]
        if not own:
            return undecided(self.name, "no row was answered"), observed
        figures = {name: _shares(records) for name, records in observed.items() if records}
        control = "ideal" if "ideal" in observed else None
        outcome = max(ANSWER_KINDS, key=lambda kind: figures["unlearned"][kind].value)
        details = {"rules": dict(Counter(record["rule"] for record in own))}
        finding = EvidenceFinding(
            self.name, outcome, _sentence(figures, control), control, len(own), figures, details
        )  # fmt: skip
        return finding, observed


def classify(question: str, answer: str, generated: str, *, is_told: bool, is_broken: bool = False) -> tuple[str, str]:
    """Return (kind of the answer, the rule that says so).

    is_told: as the verdict finds it (rule 1). is_broken: as the prior finds it (rule 3).
    """
    if is_told:
        return "tells", "recited"
    if fault := garbled_form(question, answer, generated):
        return "garbles", fault
    return ("garbles", "unlikely under the prior") if is_broken else ("other", "all else")


def garbled_form(question: str, answer: str, generated: str) -> str:
    """Return what is wrong with the form of an answer by rule 2; "" where nothing is."""
    words = answers.split_answer(generated).words
    if not words:
        return "no word"
    doubled = {a for text in (question, answer) for a, b in pairwise(answers.iter_words(text)) if a == b}
    if any(a == b and len(a) >= _DOUBLED and a.isalpha() and a not in doubled for a, b in pairwise(words)):
        return "a word twice in a row"
    runs = Counter(zip(*(words[at:] for at in range(4)), strict=False))
    if runs and max(runs.values()) >= 3:
        return "a run of words three times"
    return "a name cut short" if _cuts_a_name(question, generated) else ""


def _cuts_a_name(question: str, generated: str) -> bool:
    """Check whether two neighbouring capitalised words of a question stand in an answer with one of them cut short."""
    names = [pair for pair in pairwise(_WORD.findall(question)) if all(word[0].isupper() for word in pair)]

    def is_cut(word: str, name: str) -> bool:
        return len(word) > 1 and 0 < len(name) - len(word) <= 2 and name.startswith(word)

    return any(
        (is_cut(first, name) and last == surname) or (first == name and is_cut(last, surname))
        for first, last in set(pairwise(_WORD.findall(generated)))
        for name, surname in names
    )


def upper_fence(losses: Sequence[float]) -> float | None:
    """Return Tukey's upper fence of losses, with a range of at least `_LEAST_RANGE`; None of too few losses."""
    if len(losses) < _REFERENCES:
        return None
    low, high = np.percentile(losses, [25, 75])
    return float(high + 1.5 * max(high - low, _LEAST_RANGE))


def _asked(scene: Scene) -> dict[int, Item]:
    """Return the forget rows that models answer, with a right answer, by their index."""
    return {
        item.index: item
        for item in scene.forget
        if item.prompt is not None and item.fields.get("question") and isinstance(item.fields.get("answer"), str)
    }


def _answered(scene: Scene, name: str, asked: Mapping[int, Item]) -> dict[int, Record]:
    """Return the record of each asked row that a model answered, from its evaluation."""
    records = read_records(scene.scores[name] / f"{scene.benchmark.forget_set}.jsonl")
    return {r["index"]: r for r in records if r["index"] in asked and isinstance(r.get("generated"), str)}


def _prior_losses(
    scene: Scene, asked: Mapping[int, Item], said: Sequence[Mapping[int, str]], progress: Progress
) -> dict[tuple[int, str], float]:
    """Return the prior's mean loss a token of each text behind its question, by (row, text).

    An answer without a token of its own has none. Nothing without a prior.
    """
    if "prior" not in scene.sources:
        return {}
    texts = dict.fromkeys((index, text) for of_model in said for index, text in of_model.items() if text.strip())
    examples = {key: _example(scene, asked[key[0]], at, key[1]) for at, key in enumerate(texts)}
    keys, losses = list(examples), dict[tuple[int, str], float]()
    with open_runner(scene.sources["prior"]) as runner:
        for at, loss in mean_losses(runner, list(examples.values())):
            losses[keys[at]] = loss
            progress("evidence: says", len(losses), len(texts))
    return losses


def _example(scene: Scene, item: Item, index: int, text: str) -> Example:
    """Return a text as the answer to a row's question, without its end: an answer may be cut at its length."""
    prompter = scene.benchmark.prompter
    if not scene.benchmark.prompted:  # asked as it stands
        ids = encode_next(scene.benchmark.tokenizer, text)
        return Example(index, [*(item.prompt or ()), *ids], [IGNORE] * len(item.prompt or ()) + ids)
    example = prompter.example(row_of(index, {**item.fields, "answer": text}))
    has_end = example.ids[-1] == prompter.end and len(example.labels) > 1
    return Example(index, example.ids[:-1], example.labels[:-1]) if has_end else example


def _shares(records: Sequence[Record]) -> dict[str, EvidenceFigure]:
    """Return the share of each kind of answer."""
    units, shares = unit_of_rows(records), {}
    for kind in ANSWER_KINDS:
        values = [float(record["kind"] == kind) for record in records]
        share = sum(values) / len(values)
        shares[kind] = EvidenceFigure(share, share_interval(share, effective_rows(values, units)), len(values))
    return shares


def _sentence(figures: Mapping[str, Mapping[str, EvidenceFigure]], control: str | None) -> str:
    own, beside = figures["unlearned"], figures.get(control or "", {})
    parts = []
    for kind, entry in ANSWER_KINDS.items():
        if own[kind].value or (kind in beside and beside[kind].value):
            aside = f" (ideal {percent(beside[kind].value)})" if kind in beside else ""
            parts.append(f"{entry.label} {percent(own[kind].value)}{aside}")
    return f"Of {own['tells'].n} forgotten rows, the unlearned model: {', '.join(parts)}."
