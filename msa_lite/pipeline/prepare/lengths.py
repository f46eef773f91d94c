"""Cut the rows of a recipe to what its models read: say which rows are cut, and refuse those whose answers are lost.

Find the rows that a filter is measured on. Run, dry run and plan call it before any work, so that they say the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msa_lite.catalogue import OWN
from msa_lite.choose.rules import LeastExtraction
from msa_lite.data import DataSource, Example, Prompter, Row, encode, encode_qa, encode_text, sample_rows, shorten
from msa_lite.errors import DataError, Faults
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.io.console.progress import muted
from msa_lite.merger.unseen import ENOUGH_ROWS, ENOUGH_TOKENS
from msa_lite.pipeline.prepare.division import among, divide_retain, each_once, words_of
from msa_lite.pipeline.prepare.questions import find_rule, scored_rows
from msa_lite.recipe import Recipe
from msa_lite.train.objectives.rows import count_labels

LEARNT = ("forget", "retain")  # the places of rows that vectors learn
FILTER = "filter"  # the name of those that a filter leaves as they are, among examples
MOST_ROWS = 500
"""The rows that a filter is measured on, at most; of more, evenly drawn ones. Beyond them, others hardly tell more."""


@dataclass(frozen=True)
class FittedRows:
    """The rows of a recipe by their places in it, none longer than its models read."""

    rows: Mapping[str, list[Row]]
    """All rows, conversations without the turns that find no room; of the retain set those that may be scored."""
    learnt: Mapping[str, list[Row]]
    """The rows that vectors learn."""
    sample: Sequence[Row]
    """The retain rows that MSA's vector learns; none without a retain set."""
    spare: Sequence[Row]
    """The retain rows that nothing learns or scores."""
    examples: Mapping[str, list[Example]]
    """The learnt rows as token ids."""
    notes: Sequence[str]
    """A sentence about the rows of each place that are cut."""


def fit_rows(
    recipe: Recipe,
    sources: Mapping[str, DataSource],
    rows: Mapping[str, list[Row]],
    prompter: Prompter,
    samples: bool = True,
) -> FittedRows:
    """Cut rows to `vector.max_length` and to the prompter's window. samples: False where all retain rows are learnt.

    rows: by place, after `separate_sets`. Scores read whole answers, up to the window. Raise DataError, with all places
    and the numbers of the rows, where nothing is left of an answer to learn, or a question to score has no room.
    """
    most, faults, notes = recipe.vector.max_length, Faults(), list[str]()
    short = dict[str, list[Row]]()
    for place, whole in rows.items():
        short[place], cuts = shorten(whole, prompter, most)
        notes += [f"{place}: {cut}" for cut in cuts]
    learnt, sample = {place: short[place] for place in LEARNT if place in short}, list[Row]()
    spare = list[Row]()
    if learnt.keys() == set(LEARNT):
        whole, sample, short["retain"], spare = divide_retain(recipe, short)
        learnt["retain"] = sample if samples else whole
    examples = dict[str, list[Example]]()
    reads_on = recipe.evaluate and prompter.room(most + 1) > most
    for place, chosen in learnt.items():
        with faults.gathered(f"{place}: "):
            examples[place], cuts = encode(chosen, sources[place], prompter, most)
            scored = "; scores read them whole, up to the window" if reads_on else ""
            notes += [f"{place}: {cut}{scored}" for cut in cuts]
    with faults.gathered():
        refused = learnt.keys() - examples.keys()
        others = {place: chosen for place, chosen in short.items() if place not in refused}
        notes += _cut_scores(recipe, others, prompter)
    faults.check()
    return FittedRows(short, learnt, sample, spare, examples, notes)


@dataclass(frozen=True)
class FilterRows:
    """The rows whose outputs a filter leaves as they are."""

    rows: Sequence[Row]
    examples: list[Example]
    """The same as token ids, at most `MOST_ROWS`; rows about one subject stand side by side, in a seeded order."""

    @property
    def notes(self) -> list[str]:
        """A sentence that there are few rows, or few tokens of text, if so."""
        count, enough, unit = len(self.rows), ENOUGH_ROWS, rows_or_passages(self.rows)
        if unit == "passages":
            count, enough, unit = sum(map(count_labels, self.examples)), ENOUGH_TOKENS, "tokens of text"
        if not self.examples or count >= enough:
            return []
        return [
            f"few {unit} for the filter ({count:,} to keep or holdout), so it protects others less"
            f"{'; the run says how much less before its fits' if len(self.examples) > 1 else ''}. Give {enough:,} "
            f"{unit} of the kinds that are to stay, if you can"
        ]


def is_filtered(recipe: Recipe, samples: bool) -> bool:
    """Check whether a method has a filter. samples: False for a baseline, which has one only if λ is given."""
    return any(recipe.filters) if samples else isinstance(recipe.merge.filter, float)


def rows_or_passages(rows: Sequence[Row]) -> str:
    """Return what the examples of these rows are: "passages" where there is a text, else "rows"."""
    return "passages" if any(row.text for row in rows) else "rows"


def find_filter_rows(recipe: Recipe, fitted: FittedRows, prompter: Prompter, asked: Collection[str] = ()) -> FilterRows:
    """Return all rows that may tell a filter what to leave.

    These are the retain rows that vectors learn, those that are not to be scored, and holdout rows: as inputs, these
    tell nothing of their answers. Rows that choose λ are among them only where a fit learns them, too: they would
    change less than any others, the more so the smaller λ is. asked: the questions of a published benchmark. Rows
    without room for an answer are left out. Raise DataError where all are.
    """
    if not recipe.can_filter:
        return FilterRows((), [])
    parts = _spare_rows(recipe, fitted, asked)
    new = {id(row) for row in each_once([row for _, part in parts for row in part])}
    share = MOST_ROWS / max(MOST_ROWS, len(new))
    rows, groups = list[Row](), dict[Any, list[Example]]()
    for place, part in parts:
        fresh = [row for row in part if id(row) in new]
        new -= {id(row) for row in fresh}
        drawn = sample_rows(fresh, math.ceil(share * len(fresh)), recipe.seed)
        rows += drawn
        is_text = bool(drawn and drawn[0].text)  # its examples are no rows
        subjects = {} if is_text else {row.index: row.about or row.thread for row in drawn}
        for example in _encode_spare(drawn, prompter, recipe.vector.max_length):
            groups.setdefault(subjects.get(example.index, (place, example.index)), []).append(example)
    order = list(groups)
    random.Random(recipe.seed).shuffle(order)
    examples = [example for key in order for example in groups[key]][:MOST_ROWS]
    if not examples:
        raise DataError("the filter has no rows to keep with room for an answer; shorten rows, or raise max_length")
    return FilterRows(rows, examples)


def _spare_rows(recipe: Recipe, fitted: FittedRows, asked: Collection[str]) -> list[tuple[str, list[Row]]]:
    """Return the rows of `find_filter_rows` in parts by their use. A row may be in several."""
    rows, questions = fitted.rows, set(map(words_of, asked))
    scored = scored_rows(recipe, rows) if recipe.evaluate else {}
    if not isinstance(find_rule(recipe, scored), LeastExtraction):
        scored = {}  # the benchmark's own questions choose
    is_scored = among(scored.get("retain", ()))
    parts = [("learnt", list(fitted.learnt.get("retain", ())))]
    for place in ("spare", "retain", "evaluate.retain", "evaluate.holdout"):
        part = fitted.spare if place == "spare" else rows.get(place, ())
        unused = [row for row in part if not is_scored(row) and words_of(row.question or row.text) not in questions]
        parts.append((place, unused))
    return parts


def _encode_spare(rows: Sequence[Row], prompter: Prompter, most: int) -> list[Example]:
    """Return rows as examples, cut to `most` tokens, without those of which no answer is left."""
    if rows and rows[0].text:
        return encode_text(rows, prompter, most)
    limit = prompter.room(most)
    whole = encode_qa(shorten(rows, prompter, most)[0], prompter)
    return [
        Example(e.index, e.ids[:limit], e.labels[:limit]) for e in whole if len(e.prompt_ids) < min(limit, len(e.ids))
    ]


def _cut_scores(recipe: Recipe, rows: Mapping[str, list[Row]], prompter: Prompter) -> list[str]:
    """Return a sentence for each set of own rows that are not scored whole. Raise DataError where some cannot be asked.

    The verdict would count these as forgotten.
    """
    if recipe.evaluate is None or recipe.evaluate.benchmark != OWN or prompter.window is None:
        return []
    with muted():  # the questions themselves warn of the same
        benchmark = load_qa(scored_rows(recipe, rows), prompter)
    if unasked := benchmark.unasked():
        raise DataError(f"{'; '.join(unasked)}; shorten these rows, or take them out")
    return benchmark.unscored()
