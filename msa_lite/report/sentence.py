"""Say in a sentence or two what happened to a model, for somebody who has never heard of unlearning.

The sentence claims what was measured and no more: one greedy answer to each question, in the words of the data. Where a
run failed, it begins with what went wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msa_lite.report.reports import Report
from msa_lite.report.verdict import FEW_ROWS, KEPT_FAIL, KEPT_PASS, LEFT_FAIL, LEFT_PASS, Unit, percent


@dataclass(frozen=True)
class _Words:
    """The words for a unit of the forget set."""

    noun: str
    """The plural: "questions"."""
    does: str
    """The verb of knowing one, in the present: "answers"."""
    did: str
    """The same in the past: "answered"."""
    how: str
    """The words after the verb: " by heart"; may be empty."""
    basis: str
    """The rule by which one counts as known."""
    about: str = "that it was to forget"
    """The words that tell these from others."""


_WORDS: dict[Unit, _Words] = {
    "questions": _Words(
        "questions", "answers", "answered", "",
        "A question counts as answered if the whole right answer stands in the model's most likely answer. Each was "
        "asked once, in the words of the data",
        "about what it was to forget",
    ),
    "texts": _Words(
        "texts", "knows", "knew", " by heart",
        "A text counts as known by heart if the model predicts 90 % of its tokens, each from those before it",
    ),
    "passages": _Words(
        "passages", "continues", "continued", " word for word",
        "A passage counts as continued word for word if the model's most likely continuation shares 90 % of its words, "
        "in order, with the book's",
    ),
    "rows": _Words(
        "rows", "reproduces", "reproduced", "",
        "A question counts as reproduced if the whole right answer stands in the model's most likely answer; a text if "
        "the model predicts 90 % of its tokens",
    ),
    "facts": _Words(
        "questions", "answers", "answered", " right",
        "Each question was asked in the words of the benchmark; the model's most likely answer counts",
    ),
}  # fmt: skip


def first_sentence(verdict: Mapping[str, Any] | None, reports: Mapping[str, Report]) -> str:
    """Return what happened, by the content of verdict.json; reports: the scores on test rows, if there are any."""
    if verdict is None:
        if "unlearned" in reports:
            return "This run gave no verdict on its model; the scores tell what it knows."
        return "This run is not finished, so nothing can be said of an unlearned model yet."
    if verdict["outcome"] is None:
        return f"Nobody can say yet what this model has forgotten: {verdict['reason']}."
    forgotten, kept = verdict["forgotten"], verdict["kept"]
    sentences = _facts(forgotten, kept) if unit_of(forgotten) == "facts" else _recited(forgotten, kept)
    return " ".join([*sentences, *_caution(forgotten, kept)])


def basis_of(verdict: Mapping[str, Any] | None, reports: Mapping[str, Report]) -> str | None:
    """Return how the first sentence's counts were measured; None without a verdict.

    reports: the scores on the test rows. Where the verdict counts more rows than these, the basis says so.
    """
    if not verdict or verdict["outcome"] is None:
        return None
    forgotten = verdict["forgotten"]
    settings = reports["unlearned"].settings if "unlearned" in reports else {}
    tested = settings.get("sets", {}).get("forget", {}).get("rows")
    more = ""
    if tested is not None and tested < forgotten["rows"]:
        more = (
            f" The counts are over all {forgotten['rows']} rows, those among them by which the model was chosen; "
            f"the scores are those of the other {tested}"
        )
    return f"{_WORDS[unit_of(forgotten)].basis}.{more}{'.' if more else ''}"


def unit_of(forgotten: Mapping[str, Any]) -> Unit:
    """Return what the forget set consists of; verdicts of earlier versions tell it only in their sentence."""
    unit: Unit | None = forgotten.get("unit")
    if unit in _WORDS:
        return unit
    if "regained" in str(forgotten["said"]):
        return "facts"
    known: tuple[Unit, ...] = ("texts", "passages")
    return next((unit for unit in known if f" {unit} " in str(forgotten["said"])), "questions")


def _recited(forgotten: Mapping[str, Any], kept: Mapping[str, Any] | None) -> list[str]:
    """Return the sentences on questions, texts or passages that a model knows or does not know."""
    words, left = _WORDS[unit_of(forgotten)], forgotten["left"]
    rows = f"{forgotten['rows']} {words.noun} {words.about}"
    if left is None:
        witness = not forgotten["recited"].keys().isdisjoint({"ideal", "prior", "holdout"})
        little = f"no more of the {rows} than one that never met them" if witness else f"next to nothing of the {rows}"
        sames = [] if forgotten["changed"] else ["Its output has not changed either."]
        return [f"There was nothing to forget: even before, the model knew {little}.", *sames, _remains(kept)]
    if not forgotten["changed"]:
        return [f"Nothing has changed: the model's output is the same as before on each of the {rows}."]
    damaged = kept is not None and kept["share"] < KEPT_FAIL
    if left > LEFT_FAIL:
        wrong = "The model has not forgotten, and it is damaged" if damaged else "The model has not forgotten"
        counts = [f"{_counts(forgotten, words)}."] if forgotten["recited"] else []
        return [f"{wrong}: {_left(forgotten)}.", *counts, _remains(kept)]
    if damaged:
        return [f"The model is damaged: {_lower(_remains(kept))}", f"{_gone(forgotten, words, 'It')}."]
    if left > LEFT_PASS:
        counts = [f"{_gone(forgotten, words, 'It')}."] if forgotten["recited"] else []
        return [f"The model has forgotten only in part: {_left(forgotten)}.", *counts, _remains(kept)]
    return [f"{_gone(forgotten, words, 'The model')}.", _remains(kept)]


def _gone(forgotten: Mapping[str, Any], words: _Words, subject: str) -> str:
    """Return the clause on what the model no longer knows, with that of a model that never saw it."""
    rows, recited = forgotten["rows"], forgotten["recited"]
    if not recited:  # a benchmark whose verdict rests on shares alone
        return f"Of what could be extracted before, in whole or in part, {percent(forgotten['left'])} is left"
    before, after = recited["target"], recited["unlearned"]
    if not before:
        text = f"Even before, the model {words.did}{words.how} none of the {rows} {words.noun} {words.about}"
        return text + (f" in full; {_left(forgotten)}" if forgotten["left"] <= LEFT_PASS else " in full")
    gone = forgotten.get("gone")
    gone = max(0, before - after) if gone is None else gone  # verdicts of earlier versions: at least so many
    text = f"{subject} no longer {words.does}{words.how} {gone} of"
    if before == rows:
        return f"{text} {rows} {words.noun} {words.about}{_others(forgotten, words)}"
    text += f" the {before} {words.noun} {words.about} that it {words.did} before (of {rows}; now it {words.does}"
    return f"{text} {after}){_others(forgotten, words)}"


def _counts(forgotten: Mapping[str, Any], words: _Words) -> str:
    """Return the clause on what the model knows, and knew."""
    rows, recited = forgotten["rows"], forgotten["recited"]
    same = recited["unlearned"] == recited["target"]
    before = "as many as before" if same else f"{recited['target']} before"
    text = f"It {words.does}{words.how} {recited['unlearned']} of {rows} {words.noun} {words.about} ({before})"
    return text + _others(forgotten, words)


def _others(forgotten: Mapping[str, Any], words: _Words) -> str:
    """Return the clause on what a model knows that never saw the rows, by the best witness that there is."""
    recited = forgotten["recited"]
    if "ideal" in recited:
        return f"; a model that never met them {words.does} {recited['ideal']}"
    if "prior" in recited:
        return f"; the model from before it met them {words.does} {recited['prior']}"
    if "holdout" in recited:
        of = f" of {forgotten['unseen_rows']}" if forgotten.get("unseen_rows") else ""
        return f"; of {words.noun} that it never met, it {words.did} {recited['holdout']}{of}"
    return ""


def _left(forgotten: Mapping[str, Any]) -> str:
    return f"{percent(forgotten['left'])} is left of what could be extracted before, in whole or in part"


def _facts(forgotten: Mapping[str, Any], kept: Mapping[str, Any] | None) -> list[str]:
    """Return the sentences on facts that documents have corrupted, which are to be regained."""
    left, right = forgotten["left"] or 0.0, forgotten.get("right") or {}
    if not forgotten["changed"]:
        return [
            f"Nothing has changed: the model gives the same answers as before to each of the {forgotten['rows']} "
            "questions on what the false documents cost it."
        ]
    share, figures = f"regained {percent(1 - left)} of what the false documents cost it", []
    if {"target", "unlearned", "ideal"} <= right.keys():
        before, after, ideal = (percent(right[name]) for name in ("target", "unlearned", "ideal"))
        figures = [
            f"It answers {after} of {forgotten['rows']} questions right ({before} before); a model that never read the "
            f"documents answers {ideal}."
        ]
    damaged = kept is not None and kept["share"] < KEPT_FAIL
    if left > LEFT_FAIL:
        wrong = "The model has not recovered, and it is damaged" if damaged else "The model has not recovered"
        return [f"{wrong}: it has {share.replace('regained', 'regained only')}.", *figures, _remains(kept)]
    if damaged:
        return [f"The model is damaged: {_lower(_remains(kept))}", f"It has {share}.", *figures]
    if left > LEFT_PASS:
        return [f"The model has recovered only in part: it has {share}.", *figures, _remains(kept)]
    return [f"The model has {share}.", *figures, _remains(kept)]


def _remains(kept: Mapping[str, Any] | None) -> str:
    """Return the sentence on what was to be kept."""
    if kept is None:
        return "Nothing shows how much remains of what it was to keep."
    share, (low, high) = kept["share"], kept["interval"]
    if share > 1:
        return "Of what it was to keep, nothing is lost on average."
    if share >= KEPT_PASS:
        return f"Of what it was to keep, {'more than 99 %' if 0.995 <= share < 1 else percent(share)} remains."
    only = "" if high >= KEPT_PASS else "only "
    interval = f"95 % interval {percent(low)} to {percent(high)}"
    return f"Of what it was to keep, {only}{percent(share)} remains ({interval})."


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _caution(forgotten: Mapping[str, Any], kept: Mapping[str, Any] | None) -> list[str]:
    counts = {"to forget": forgotten["rows"]} | ({"to keep": kept["rows"]} if kept else {})
    few = [f"{count} {name}" for name, count in counts.items() if count < FEW_ROWS]
    return [f"That rests on few rows: {', '.join(few)}."] if few else []
