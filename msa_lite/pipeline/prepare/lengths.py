"""Cut the rows of a recipe to what its models read: say which rows are cut, and refuse those whose answers are lost.

Run, dry run and plan call it before any work, so that they say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msa_lite.catalogue import OWN
from msa_lite.data import DataSource, Example, Prompter, Row, encode, shorten
from msa_lite.errors import DataError, Faults
from msa_lite.evals.benchmarks.qa import load_qa
from msa_lite.io.console.progress import muted
from msa_lite.pipeline.prepare.questions import divide_retain, scored_rows
from msa_lite.recipe import Recipe

LEARNT = ("forget", "retain")  # the places of rows that vectors learn


@dataclass(frozen=True)
class FittedRows:
    """The rows of a recipe by their places in it, none longer than its models read."""

    rows: Mapping[str, list[Row]]
    """All rows, conversations without the turns that find no room; of the retain set those that may be scored."""
    learnt: Mapping[str, list[Row]]
    """The rows that vectors learn."""
    sample: Sequence[Row]
    """The retain rows that MSA's vector learns; none without a retain set."""
    examples: Mapping[str, list[Example]]
    """The learnt rows as token ids, and those that a filter leaves as they are."""
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
    if learnt.keys() == set(LEARNT):
        whole, sample, short["retain"] = divide_retain(recipe, short)
        learnt["retain"] = sample if samples else whole
    encoded, examples = dict(learnt), dict[str, list[Example]]()
    if recipe.filter_place in short:
        encoded.setdefault(recipe.filter_place, short[recipe.filter_place])
    reads_on = recipe.evaluate and prompter.room(most + 1) > most
    for place, chosen in encoded.items():
        with faults.gathered(f"{place}: "):
            examples[place], cuts = encode(chosen, sources[place], prompter, most)
            scored = "; scores read them whole, up to the window" if reads_on and place in learnt else ""
            notes += [f"{place}: {cut}{scored}" for cut in cuts]
    with faults.gathered():
        refused = encoded.keys() - examples.keys()
        others = {place: chosen for place, chosen in short.items() if place not in refused}
        notes += _cut_scores(recipe, others, prompter)
    faults.check()
    return FittedRows(short, learnt, sample, examples, notes)


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
