"""Answer whether rows are among those that a run, or an earlier one in its chain, was to forget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msa_lite.errors import MismatchError, UsageError
from msa_lite.io.reading import local_path
from msa_lite.record.chain import reach_earlier
from msa_lite.record.keyed import KEY_FILE, RowContent, RowMatch, load_key
from msa_lite.record.store import RECORD_FILE, load_record

_BETTER = {"none": 0, "question": 1, "row": 2}


@dataclass(frozen=True)
class RowAnswer:
    """The answer for one row."""

    match: RowMatch
    """row: it is among the rows to forget. question: only its question is. none: neither."""
    folder: Path
    """The run whose record has it; the first one for `none`."""


def find_rows(folder: Path, rows: Sequence[RowContent], key: str | Path | None = None) -> list[RowAnswer]:
    """Return an answer for each row, by the record and the key in a run's folder.

    Earlier runs that the run names are searched too, as far as they are there with their keys. key: a copy of the
    run's record.key. Raise UsageError without record or key, FormatError for a broken one, and MismatchError for the
    key of another record, and for texts where the rows to forget were questions, or the other way round.
    """
    if not (folder / RECORD_FILE).exists():
        raise UsageError(f"{folder}: no {RECORD_FILE} in there; a finished run has one")
    answers = _answers(folder, rows, local_path(key) if key else folder / KEY_FILE)
    earlier = reach_earlier(folder)
    if not earlier and all(answer.match == "none" for answer in answers):
        _check_form(folder, rows)
    for place in earlier:
        if (place / RECORD_FILE).exists() and (place / KEY_FILE).exists():
            others = _answers(place, rows, place / KEY_FILE)
            pairs = zip(answers, others, strict=True)
            answers = [b if _BETTER[b.match] > _BETTER[a.match] else a for a, b in pairs]
    return answers


def _answers(folder: Path, rows: Sequence[RowContent], key: Path) -> list[RowAnswer]:
    record = load_record(folder / RECORD_FILE)
    return [RowAnswer(match, folder) for match in load_key(key).find(rows, record.forget_rows)]


def _check_form(folder: Path, rows: Sequence[RowContent]) -> None:
    """Raise MismatchError where no row can be among the rows to forget, since one are texts, the others questions."""
    has_questions = bool(load_record(folder / RECORD_FILE).forget_rows.questions)
    if any(bool(question) == has_questions for question, _, _ in rows):
        return
    here, there = ("texts", "questions with answers") if has_questions else ("questions", "texts")
    raise MismatchError(f"these rows are {here}, and those to forget were {there}; give them in that form")
