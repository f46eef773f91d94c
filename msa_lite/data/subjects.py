"""Read from a column whom or what each row is about: six questions about one person are not six independent rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msa_lite.data.forms import find_form
from msa_lite.data.sources import DataSource

_NAMES = ("subject", "person", "author", "id")
"""The columns that are taken where the recipe names none, the first that there is. `id` only if its values repeat."""


def subject_columns(source: DataSource, columns: Collection[str]) -> list[str]:
    """Return the columns that may say whom or what a row is about: the one that the recipe names, or the usual ones."""
    if source.subject:
        return [source.subject]
    form = find_form(source, columns) if source.format == "qa" else None
    read = form.columns if form else (source.text,)
    return [name for name in _NAMES if name in columns and name not in read]


def read_subjects(source: DataSource, columns: Collection[str], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return whom or what each record is about; "" where nothing says so."""
    for column in subject_columns(source, columns):
        subjects = [_cell(record.get(column)) for record in records]
        named = [subject for subject in subjects if subject]
        if named and (source.subject or column != "id" or len(set(named)) < len(named)):
            return subjects
    return [""] * len(records)


def _cell(value: object) -> str:
    return str(value).strip() if isinstance(value, (str, int, float)) else ""
