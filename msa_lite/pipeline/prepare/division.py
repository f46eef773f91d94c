"""Keep the rows of a recipe apart by their use: forget, retain and holdout rows, and those that a vector learns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from msa_lite.choose.validation import FEWEST
from msa_lite.data import Row, sample_rows, split_rows
from msa_lite.errors import DataError, Faults, UsageError
from msa_lite.evals.engine.answers import normalise
from msa_lite.io.files.writing import digest
from msa_lite.pipeline.prepare.earlier import EarlierRun
from msa_lite.recipe import Recipe

_SCORED = 80  # retain rows; about 30 of them choose, and 50 show what is kept

_REASONS = {
    "retain": "no row can be both forgotten and kept",
    "holdout": "only rows that no model was trained on are a control",
}


def separate_sets(
    rows: Mapping[str, list[Row]], removed: Collection[str] = ()
) -> tuple[dict[str, list[Row]], list[str]]:
    """Return the rows with those left out that stand in another set, too, and a sentence for each set that has some.

    rows: by their places in the recipe ("retain", "evaluate.holdout", …). removed: hashes of what earlier requests
    removed. Retain rows may be among neither these nor the forget rows, and holdout rows in no other set. Two rows are
    the same if they ask the same after the same system message and turns, or are the same text, in the words of
    `normalise`. Raise DataError where nothing is left of a set.
    """
    separate, notes, faults = dict(rows), [], Faults()
    contents: dict[str, set[tuple[str, ...]]] = {"forget": set()}  # by role
    for role in ("forget", "retain", "holdout"):
        places = [place for place in rows if place.rpartition(".")[2] == role]
        taken = set().union(*contents.values()) if role != "forget" else set()
        gone = removed if role != "forget" else ()
        names = " or ".join(contents) + (" set, or in that of an earlier request," if gone else " set,")
        for place in places:
            separate[place] = [row for row in rows[place] if content_of(row) not in taken and row.sha256 not in gone]
            count, whole = len(rows[place]) - len(separate[place]), len(rows[place])
            if count == whole and whole:
                with faults.gathered():
                    raise DataError(
                        f"{place}: all {whole} rows stand in the {names} too, and {_REASONS[role]}; give "
                        "other rows, or leave the set out"
                    )
            elif count:
                notes.append(
                    f"{place}: {count} of {whole} rows stand in the {names} too, and are left out: {_REASONS[role]}"
                )
        contents.setdefault(role, set()).update(content_of(row) for place in places for row in separate[place])
    faults.check()
    return separate, notes


def compare_with_earlier(rows: Iterable[Row], earlier: Iterable[EarlierRun]) -> list[str]:
    """Return a sentence for each earlier request that removes some of these rows to forget, too.

    Raise UsageError if one of them removes all.
    """
    hashes, notes = {row.sha256 for row in rows}, []
    for run in earlier:
        common = hashes.intersection(run.rows if "forget" in run.vectors else ())
        if common == hashes:
            raise UsageError(
                f"forget.data: {run.folder} removes all these {len(hashes)} rows already, so this request would "
                "subtract them twice; give other rows, or take that run out of `earlier`"
            )
        if common:
            notes.append(
                f"{len(common)} of the {len(hashes)} rows to forget are among those of the earlier request "
                f"{run.folder}, so they count twice"
            )
    return notes


def each_once(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without those that repeat an earlier one: the same prompt with the same answer, or text."""
    first: dict[tuple[str, ...], Row] = {}
    for row in rows:
        first.setdefault((*content_of(row), words_of(row.answer)), row)
    return list(first.values())


def count_repeated(sets: Mapping[str, Iterable[Row]]) -> list[str]:
    """Return a sentence for each set of scored rows in which some stand more than once."""
    notes = []
    for name, scored in sets.items():
        rows = list(scored)
        if count := len(rows) - len(each_once(rows)):
            notes.append(f"{count} of {len(rows)} {name} rows repeat another one; each is scored once")
    return notes


def content_of(row: Row) -> tuple[str, ...]:
    """Return what a model is asked in a row, as it is compared: system message, turns and steps, or the text."""
    if row.text:
        return ("text", words_of(row.text))
    around = [text for turn in row.earlier for text in turn]
    return (words_of(row.system), *map(words_of, filter(None, [*around, row.question, row.tools.steps])))


def words_of(text: str) -> str:
    """Return a hash of the words of a text, which is shorter than a book."""
    return digest(normalise(text) or text.strip())


class RetainRows(NamedTuple):
    """The rows of a retain set by their use."""

    whole: list[Row]
    """Those that baselines learn, and MSA's vector without a sample."""
    sample: list[Row]
    """Those that MSA's vector learns."""
    scored: list[Row]
    """Those that may be scored, where the recipe names no others."""
    spare: list[Row]
    """Those that nothing learns or scores; a filter sees them."""


def count_scored(count: int) -> int:
    """Return how many of so many rows that nothing learns are scored: all up to 80, and half of those beyond."""
    return count - max(0, count - _SCORED) // 2


def divide_retain(recipe: Recipe, rows: Mapping[str, list[Row]]) -> RetainRows:
    """Divide the retain set by use. Rows that are learnt are kept much better than others, and mislead a choice.

    rows: all rows by their place in the recipe; "retain" and "forget" are needed. Rows that `evaluate.retain` names are
    not learnt, if there are as many others as forget rows. Of a set that is sampled, `count_scored` of the rows that
    the sample leaves may be scored; all rows, if it leaves fewer than `FEWEST`. Without a sample all may be.
    It is the same with and without a filter, so that their results can be compared.
    """
    retain, count = rows["retain"], len(rows["forget"])
    assert recipe.retain is not None
    unscored = _without(retain, rows.get("evaluate.retain", ()))
    whole = unscored if len(unscored) >= count else retain
    if recipe.retain.data.sample is None:
        return RetainRows(whole, whole, retain, [])
    sample = sample_rows(whole, count, recipe.seed)
    left = _without(retain, sample)
    threads = len({row.thread for row in left})
    if threads < FEWEST:
        return RetainRows(whole, sample, retain, [])
    return RetainRows(whole, sample, *split_rows(left, count_scored(threads) / threads, recipe.seed))


def _without(rows: Iterable[Row], removed: Sequence[Row]) -> list[Row]:
    is_removed = among(removed)
    return [row for row in rows if not is_removed(row)]


def among(rows: Sequence[Row]) -> Callable[[Row], bool]:
    """Return a check whether a row is one of these by its content, or by the conversation or text that it is of."""
    contents, threads = {content_of(row) for row in rows}, {row.thread for row in rows}
    return lambda row: row.thread in threads or content_of(row) in contents
